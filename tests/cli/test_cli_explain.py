"""`hybrid explain`: text, JSON lines, a picture, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from router_simulation import Machine, honest, linear, row

from hybrid.router.config import RouterConfig
from hybrid.router.hybrid import HybridRouter
from hybrid.router.record import RunHeader, write_run

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    router = HybridRouter(RouterConfig(num_draft_tokens=4))
    machine = Machine(router, [row(0, 40)], honest(), linear(group=0.2)).run(40)
    header = RunHeader.of(machine.rows, router, model="tiny\x1b[31m", strategy="hybrid")
    path = tmp_path / "run.jsonl"
    write_run(path, header, machine.history)
    return path


def test_it_prints_a_line_a_step_that_fits_a_terminal(run: Run, recorded: Path) -> None:
    code, out, err = run("explain", str(recorded))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in out
    first = next(i for i, line in enumerate(lines) if line.startswith("step  mode"))
    numbers = [line.split()[0] for line in lines[first + 1 :] if not line.startswith("      ")]
    num_steps = len(recorded.read_text().splitlines()) - 2  # header and prefill
    assert numbers == [str(n + 1) for n in range(num_steps)]


def test_json_is_an_object_a_step(run: Run, recorded: Path) -> None:
    code, out, _ = run("explain", str(recorded), "--json")
    assert code == 0
    found = [json.loads(line) for line in out.splitlines()]
    assert [reason["step"] for reason in found] == list(range(1, len(found) + 1))
    assert all(reason["agrees"] for reason in found)
    assert {"mode", "chosen", "runner_up", "rate", "worth", "trial"} <= set(found[0])


def test_a_picture_is_drawn_and_named_on_stderr(run: Run, recorded: Path) -> None:
    pytest.importorskip("matplotlib")
    path = recorded.with_name("run.png")
    code, out, err = run("explain", str(recorded), "--png", str(path))
    assert code == 0
    assert "step  mode" in out
    assert err == f"{path}\n"
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ('{"text": "hello"}\n', "line 1: expected the first line of a recorded run"),
        ('{"rows": [], "format": 1}\n', "not routed"),
    ],
)
def test_what_is_no_run_of_the_router_is_refused(
    run: Run, tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    code, out, err = run("explain", str(path))
    assert (code, out) == (1, "")
    assert message in err
    assert run("explain", str(tmp_path / "missing.jsonl"))[0] == 1
