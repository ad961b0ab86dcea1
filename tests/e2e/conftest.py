"""The wheel, built once from a clean copy and installed into a venv of its own; benchmarks/gpu."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from repository import FOLDERS, ROOT, Installed, clean_env


def _run(*command: str | Path, cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, env=clean_env(), capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Build the wheel and install it."""
    top = tmp_path_factory.mktemp("wheel")
    source = top / "source"  # a copy: setuptools leaves build/ and *.egg-info behind
    for folder in FOLDERS:
        shutil.copytree(
            ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    for path in ROOT.iterdir():
        if path.name in {"pyproject.toml", "README.md", "LICENSE"}:
            shutil.copy(path, source)
    pip = (sys.executable, "-m", "pip")
    _run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", top, source, cwd=top)
    (wheel,) = top.glob("*.whl")

    venv = top / "venv"
    _run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=top)
    result = Installed(wheel, venv)
    _run(*pip, "--python", result.python, "install", "--no-deps", "--no-index", wheel, cwd=top)
    # Paths named in a .pth file come last, and .pth files there are not read: our editable
    # installation stays invisible, torch and the rest do not.
    (site,) = venv.glob("[Ll]ib/**/site-packages")
    borrowed = [p for p in sys.path if Path(p).name in {"site-packages", "dist-packages"}]
    (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    return result


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a module of benchmarks/gpu as run.sh does."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: import_module(f"benchmarks.gpu.{name}")
