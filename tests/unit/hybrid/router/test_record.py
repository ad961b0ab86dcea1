"""A run is read back exactly, and replays to the same decisions."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from router_simulation import Machine, honest, linear, row

from hybrid.errors import CheckpointError, ConfigError
from hybrid.router.config import RouterConfig
from hybrid.router.cost import warm_up
from hybrid.router.hybrid import HybridRouter
from hybrid.router.profile import Profile, Threshold
from hybrid.router.record import RowHeader, RunHeader, read_run, replay, write_run
from hybrid.types import Mode, RowStep, Slot, Source, StepRecord

GPU = linear(group=0.2)
FULL = StepRecord(
    Mode.DIFFUSION_ONLY,
    (
        RowStep(
            index=3,
            tokens=(5, 6, 7),
            sources=(Source.DIFFUSION_ONLY, Source.DRAFT_VERIFIED, Source.CORRECTION),
            mode=Mode.DIFFUSION_ONLY,
            num_proposed=4,
            num_drafted=3,
            num_accepted=2,
            num_unverified=1,
            disagreements=(0.1 + 0.2,),
            drafted=(5, 6, 9),
            entropies=(0.0, 1e-300, math.nan, 2.0),
            confidences=(1.0, 0.5, math.nan, 0.25),
            margins=(1.0, 0.25, math.nan, 0.125),
            first_slot=2,
            points=(1, 2, 3),
            num_slots=6,
            next_slot=2,
            next_entropy=1 / 3,
            logprobs=(-0.5, -math.inf, 0.0),
            top_logprobs=({1: -0.5, 20: -3.0}, {}, {7: 0.0}),
            slots=(Slot(9, None, 0.0), Slot(10, 4, 0.75)),
            finish_reason="stop",
        ),
        RowStep(4, (), ()),
    ),
    num_draft_forwards=1,
    num_drafting=2,
    num_verify_forwards=1,
    num_denoise_forwards=3,
    width=4,
    num_carried=27,
    forward_seconds=0.1,
    draft_seconds=1e-9,
    seconds=0.30000000000000004,
)


def profile(risk=0.1):
    evidence = {"num_prompts": 9, "num_tokens": 90, "disagreements": 1.0, "p_value": 0.01}
    thresholds = (Threshold(threshold=0.9, **evidence), Threshold(threshold=0.8, **evidence))
    return Profile(model="m", domain="d", risk=risk, thresholds=thresholds)


def simulated(risk=0.0, rows=1, **sampling):
    config = RouterConfig(num_draft_tokens=4, risk=risk)
    made = HybridRouter(config, warm_up(GPU, rows, 4, 5), profile() if risk else None)
    batch = [row(i, 80 + i, **sampling) for i in range(rows)]
    machine = Machine(made, batch, honest((0.9,) * 8), GPU, noise=0.4).run(80)
    return RunHeader.of(machine.rows, made, model="tiny", strategy="hybrid"), machine


def test_every_field_is_read_back_exactly(tmp_path):
    header = RunHeader((RowHeader(3, 7, 99, False),), None, "m", "hybrid", {"hybrid": "1"})
    path = tmp_path / "folder" / "run.jsonl"
    write_run(path, header, [FULL, StepRecord(Mode.AR, ())])
    again, (record, empty) = read_run(path)
    assert again == header
    assert repr(record) == repr(FULL), "NaN is not equal to itself"
    assert empty == StepRecord(Mode.AR, ())
    names = {own for step in FULL.rows for own in step.__slots__}
    written = json.loads(path.read_text().splitlines()[1])
    assert set(written["rows"][0]) == names, "the test has a value for every field"
    assert set(written) == set(FULL.__slots__) - {"num_verify_forwards"}


@pytest.mark.parametrize(
    ("risk", "rows", "sampling"),
    [(0.0, 1, {}), (0.0, 3, {}), (0.0, 2, {"temperature": 1.0}), (0.1, 2, {})],
    ids=["greedy", "batch", "sampled", "risk"],
)
def test_a_run_replays_to_the_same_decisions(tmp_path, risk, rows, sampling):
    header, machine = simulated(risk, rows, **sampling)
    path = tmp_path / "run.jsonl"
    write_run(path, header, machine.history)
    decisions = list(replay(*read_run(path)))
    assert [d.plans for d in decisions] == machine.plans
    assert [d.routes for d in decisions] == machine.routes
    assert [d.explanations for d in decisions] == machine.explanations
    assert all(decision.agrees for decision in decisions)
    assert len({route for d in decisions for route in d.routes}) > 2


def test_a_step_that_the_router_did_not_choose_is_noticed():
    header, machine = simulated()
    step = machine.history[5]
    changed = replace(step.rows[0], num_drafted=step.rows[0].num_drafted + 1)
    machine.history[5] = replace(step, rows=(changed,))
    agreed = [decision.agrees for decision in replay(header, machine.history)]
    assert agreed[:4] == [True] * 4
    assert not agreed[4]


def test_what_cannot_be_replayed_is_refused():
    header, machine = simulated()
    with pytest.raises(ConfigError, match="not routed, expected 'hybrid'"):
        list(replay(replace(header, router=None), machine.history))
    with pytest.raises(ConfigError, match=r"got rows \[0\], expected some of \[\]"):
        list(replay(replace(header, rows=()), machine.history))
    with pytest.raises(ConfigError, match="no description of a router"):
        list(replay(replace(header, router={}), machine.history))


def lines(tmp_path):
    path = tmp_path / "run.jsonl"
    write_run(path, RunHeader((RowHeader(3, 7, 99, True),)), [FULL, FULL])
    return path, path.read_text().splitlines()


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (1, lambda line: line.replace('"format": 1', '"format": 9'), "format 9, expected 1"),
        (1, lambda line: "[]", "expected the first line of a recorded run"),
        (2, lambda line: line[:-5], "expected a step"),
        (2, lambda line: "", "expected a step"),
        (3, lambda line: line.replace('"index": 3', '"index": "x"'), "got 'x', expected int"),
        (3, lambda line: line.replace('"index": 3', '"index": true'), "got True, expected int"),
        (3, lambda line: line.replace('"index": 3, ', ""), "unknown or missing: index"),
        (3, lambda line: line.replace('"width"', '"wide"'), "unknown or missing: wide"),
        (3, lambda line: line.replace('"stop"', "7"), "got 7, expected str"),
        (3, lambda line: line.replace("correction", "guess"), "'guess' is not a valid Source"),
        (3, lambda line: line.replace("[5, 6, 7]", "5"), "got 5"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path, number, change, message):
    path, found = lines(tmp_path)
    changed = change(found[number - 1])
    assert changed != found[number - 1]
    found[number - 1] = changed
    path.write_text("\n".join(found) + "\n")
    with pytest.raises(CheckpointError, match=f"line {number}") as raised:
        read_run(path)
    assert message in str(raised.value)


def test_files_that_are_none_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_run(tmp_path / "missing.jsonl")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(CheckpointError, match="is empty"):
        read_run(empty)
    empty.write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError):
        read_run(empty)


def test_a_run_that_cannot_be_written_leaves_what_was_there(tmp_path):
    path, found = lines(tmp_path)

    def records():
        yield FULL
        raise OSError("disk full")

    with pytest.raises(CheckpointError, match="cannot be written"):
        write_run(path, RunHeader(()), records())
    assert path.read_text().splitlines() == found
    assert [p.name for p in tmp_path.iterdir()] == ["run.jsonl"]
