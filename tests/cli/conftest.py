"""The command line around a scripted decoder, in this process and in a process of its own."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module with `FakeDecoder`."""
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module("fake_decoder")


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run `hybrid ARGS` here: (exit code, stdout, stderr)."""
    from hybrid.cli import main, options

    def call(*args: str, decoder: Any = None) -> tuple[int, str, str]:
        if decoder is not None:
            monkeypatch.setattr(options, "load_decoder", lambda _: decoder)
        monkeypatch.setattr(sys, "argv", ["hybrid", *args])
        with pytest.raises(SystemExit) as stopped:
            main.main()
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return call


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a child process: a known terminal, a state folder of its own."""
    kept = {k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "FORCE_COLOR", "COLUMNS"}}
    return {
        **kept,
        "TERM": "xterm-256color",
        "HYBRID_STATE_DIR": str(tmp_path / "state"),
        "PROMPT_TOOLKIT_NO_CPR": "1",
    }


@pytest.fixture
def piped(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Run `hybrid ARGS` on the scripted decoder with everything piped."""

    def call(scenario: str, *args: str, stdin: bytes = b"", **env: str) -> Any:
        return subprocess.run(
            [sys.executable, str(HERE / "driver.py"), scenario, *args],
            input=stdin,
            capture_output=True,
            env={**environment, **env},
            timeout=30,
        )

    return call


@pytest.fixture
def spawn(environment: dict[str, str]) -> Iterator[Callable[..., Any]]:
    """Run `hybrid ARGS` on the scripted decoder in a pseudo-terminal."""
    pexpect = pytest.importorskip("pexpect")
    children = []

    def call(scenario: str, *args: str, columns: int = 80, rows: int = 24, **env: str) -> Any:
        child = pexpect.spawn(
            sys.executable,
            [str(HERE / "driver.py"), scenario, *args],
            env={**environment, **env},
            dimensions=(rows, columns),
            encoding="utf-8",
            timeout=20,
        )
        child.delaybeforesend = 0.1
        children.append(child)
        return child

    yield call
    for child in children:
        child.close(force=True)
