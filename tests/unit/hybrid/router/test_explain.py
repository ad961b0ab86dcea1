"""The reasons of a run, as objects, text and picture."""

from __future__ import annotations

import sys

import pytest
from router_simulation import Machine, honest, hostile, linear, row

from hybrid.errors import CheckpointError, ConfigError
from hybrid.router.config import RouterConfig
from hybrid.router.cost import StepShape, warm_up
from hybrid.router.explain import describe, draw, reasons
from hybrid.router.hybrid import HybridRouter
from hybrid.router.profile import Profile, Threshold
from hybrid.router.record import RunHeader, replay
from hybrid.types import Mode, StepRecord

GPU = linear(group=0.2)


def recorded(draw_token=honest(), rows=1, risk=0.0, **fields):  # noqa: B008
    evidence = {"num_prompts": 9, "num_tokens": 90, "disagreements": 1.0, "p_value": 0.01}
    own = Profile(
        model="m", domain="d", risk=0.1, thresholds=(Threshold(threshold=0.8, **evidence),)
    )
    config = RouterConfig(num_draft_tokens=4, risk=risk, **fields)
    made = HybridRouter(config, warm_up(GPU, rows, 4, 5), own if risk else None)
    machine = Machine(made, [row(i, 60) for i in range(rows)], draw_token, GPU).run(60)
    header = RunHeader.of(machine.rows, made, model="tiny", strategy="hybrid")
    return header, machine


def test_a_reason_holds_the_numbers_of_its_step():
    header, machine = recorded()
    found = list(reasons(replay(header, machine.history)))
    steps = machine.history[1:]
    assert len(found) == len(steps)
    for number, (reason, record) in enumerate(zip(found, steps, strict=True), 1):
        (step,) = record.rows
        chosen, other = reason["chosen"], reason["runner_up"]
        assert (reason["step"], reason["mode"]) == (number, step.mode.value)
        assert reason["num_committed"] == len(step.tokens)
        assert chosen["num_draft_tokens"] == reason["num_drafted"] == step.num_drafted
        assert chosen["value"] == pytest.approx(
            chosen["tokens"] + reason["worth"] * chosen["hits"] - reason["rate"] * chosen["ms"]
        )
        shape = StepShape(1, record.width, len(step.points), record.num_drafting)
        assert chosen["ms"] == pytest.approx(GPU(shape), rel=0.2)
        if other is not None and reason["trial"] is None:
            assert other["value"] <= chosen["value"]
        assert reason["agrees"]


@pytest.mark.parametrize("rows", [1, 2, 12])
def test_lines_fit_a_terminal_and_name_modes_trials_and_disagreement(rows):
    header, machine = recorded(hostile, rows)
    machine.history[-1] = StepRecord(
        machine.history[-1].mode, machine.history[-1].rows, width=3, num_drafting=1
    )
    text = list(describe(header, list(replay(header, machine.history))))
    assert max(map(len, text)) <= 80
    whole = "\n".join(text)
    assert whole.isascii() or "·" in whole
    assert f"{rows} rows, " in whole
    assert "trial of" in whole or rows == 12
    assert ("      rows 0,1; " in whole) == (rows == 2)
    assert ("      12 rows; " in whole) == (rows == 12)


def test_trust_is_explained():
    header, machine = recorded(honest((0.97,) * 8), risk=0.1)
    text = "\n".join(describe(header, list(replay(header, machine.history))))
    assert "at 0.8 (level 0)" in text
    assert "tokens unverified" in text
    assert "diffusion-only" in text


def test_passes_are_called_passes():
    header, machine = recorded(cost="forwards")
    text = list(describe(header, list(replay(header, machine.history))))
    assert any("passes" in line for line in text)


def test_a_step_of_another_hand_is_pointed_out():
    header, machine = recorded()
    other = recorded(hostile)[1].history
    text = "\n".join(describe(header, list(replay(header, [*machine.history[:5], *other[5:]]))))
    assert "THE RUN DID SOMETHING ELSE" in text


def test_the_picture_is_a_png_and_appears_whole(tmp_path):
    pytest.importorskip("matplotlib")
    header, machine = recorded()
    path = draw(header, machine.history, tmp_path / "folder" / "run.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in path.parent.iterdir()] == ["run.png"]
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        draw(header, machine.history, tmp_path / "file" / "run.png")
    with pytest.raises(ConfigError, match="no decode steps"):
        draw(header, [StepRecord(Mode.PREFILL, ())], path)


def test_without_matplotlib_it_says_how_to_install_it(monkeypatch, tmp_path):
    header, machine = recorded()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'hybrid-decoder\[plot\]'"):
        draw(header, machine.history, tmp_path / "run.png")
