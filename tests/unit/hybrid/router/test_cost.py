"""Milliseconds by shape: what was measured, what lies between, what the clock says later."""

from __future__ import annotations

import json

import pytest
from router_simulation import linear

from hybrid.errors import ConfigError
from hybrid.router.cost import CostModel, StepShape, shape_of, warm_up
from hybrid.types import Mode, RowStep, StepRecord

AR, WIDE = StepShape(1), StepShape(1, 4)


def record(shape, ms):
    points = tuple(range(shape.groups))
    rows = tuple(RowStep(i, (5,), (), points=points) for i in range(shape.rows))
    return StepRecord(
        Mode.SPECULATIVE,
        rows,
        num_draft_forwards=int(shape.drafting > 0),
        num_drafting=shape.drafting,
        width=shape.width,
        seconds=ms / 1000,
    )


def test_what_was_measured_is_what_is_expected():
    measured = {
        StepShape(1, 1): 7.7,
        StepShape(1, 2): 8.0,
        StepShape(1, 4): 11.1,
        StepShape(1, 1, 2): 9.1,
        StepShape(1, 1, 0, 1): 12.1,
    }
    costs = CostModel.fit(measured.items())
    for shape, ms in measured.items():
        assert costs.ms(shape) == pytest.approx(ms)
    assert costs.ms(StepShape(1, 3)) == pytest.approx((8.0 + 11.1) / 2)
    assert costs.ms(StepShape(1, 6)) == pytest.approx(11.1 + 2 * 1.55), "the last slope goes on"
    assert costs.ms(StepShape(1, 1, 1)) == pytest.approx(7.7 + 1.4 / 2), "half of two groups"
    assert costs.ms(StepShape(1, 4, 2, 1)) == pytest.approx(11.1 + 1.4 + 4.4), "parts add up"


def test_several_times_of_a_shape_count_as_their_median_and_curves_never_fall():
    costs = CostModel.fit([(AR, 7.0), (AR, 900.0), (AR, 8.0), (StepShape(1, 2), 6.0)])
    assert costs.ms(AR) == 8.0
    assert costs.ms(StepShape(1, 2)) == 8.0
    draftless = CostModel.fit([(AR, 8.0), (StepShape(1, 1, 0, 1), 7.0), (StepShape(1, 1, 1), 6.0)])
    assert draftless.ms(StepShape(1, 1, 1, 1)) == 8.0, "nothing takes less than no time"


def test_rows_and_tokens_of_a_pass_are_one_axis():
    ms = linear(token=0.5, group=0.3)
    costs = warm_up(ms, 8, 3, 4)
    assert costs.ms(StepShape(4, 4)) == pytest.approx(ms(StepShape(4, 4)))
    assert costs.ms(StepShape(3, 1)) > 0, "fewer tokens than were ever measured"
    assert costs.ms(StepShape(3, 1)) < costs.ms(StepShape(8, 1))


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 7, 31])
def test_warming_up_asks_for_few_shapes_and_finds_the_machine(num_draft_tokens):
    ms, asked = linear(), []

    def measure(shape):
        asked.append(shape)
        return ms(shape)

    costs = warm_up(measure, 2, num_draft_tokens, num_draft_tokens + 1)
    assert len(asked) == len(set(asked)) <= 8
    for shape in (StepShape(2, 1), StepShape(2, 1 + num_draft_tokens, num_draft_tokens + 1, 2)):
        assert costs.ms(shape) == pytest.approx(ms(shape))
    without = []
    warm_up(lambda shape: without.append(shape) or 1.0, 1, num_draft_tokens, 0)
    assert not any(shape.groups for shape in without)


def test_a_longer_context_slows_all_shapes_down_not_the_one_in_use():
    costs = CostModel.fit([(AR, 8.0), (WIDE, 12.0)])
    for step in range(400):
        costs.observe(record(AR, 8.0 * (1 + step / 400)))
    assert costs.ms(AR) == pytest.approx(16.0, rel=0.05)
    assert costs.ms(WIDE) == pytest.approx(24.0, rel=0.15)


def test_a_shape_that_was_measured_wrongly_is_corrected_alone():
    costs = CostModel.fit([(AR, 8.0), (WIDE, 12.0)])
    for step in range(300):
        shape, ms = (WIDE, 18.0) if step % 2 else (AR, 8.0)
        costs.observe(record(shape, ms))
    assert costs.ms(WIDE) == pytest.approx(18.0, rel=0.05)
    assert costs.ms(AR) == pytest.approx(8.0, rel=0.05)


def test_an_interrupted_step_is_hardly_evidence():
    costs = CostModel.fit([(AR, 8.0)])
    for _ in range(50):
        costs.observe(record(AR, 8.0))
    costs.observe(record(AR, 5000.0))
    assert costs.ms(AR) < 8.5


def test_a_guess_takes_its_scale_from_the_first_step():
    costs = CostModel.guess()
    ratio = costs.ms(WIDE) / costs.ms(AR)
    costs.observe(record(AR, 123.0))
    assert costs.ms(AR) == pytest.approx(123.0)
    assert costs.ms(WIDE) == pytest.approx(123.0 * ratio)


@pytest.mark.parametrize("costs", [CostModel.forwards(), CostModel.guess(frozen=True)])
def test_nominal_costs_do_not_follow_the_clock(costs):
    before = costs.to_dict()
    for _ in range(10):
        costs.observe(record(AR, 77.0))
    assert costs.to_dict() == before


def test_a_forward_costs_one_whatever_its_width():
    costs = CostModel.forwards()
    assert costs.ms(StepShape(8, 32, 5)) == 1.0
    assert costs.ms(StepShape(8, 1, 0, 3)) == 2.0


def test_json_gives_the_same_model_back():
    costs = warm_up(linear(), 1, 3, 4)
    costs.observe(record(WIDE, 20.0))
    again = CostModel.from_dict(json.loads(json.dumps(costs.to_dict())))
    assert again.to_dict() == costs.to_dict()
    for shape in (AR, WIDE, StepShape(2, 3, 1, 2)):
        assert again.ms(shape) == costs.ms(shape)
    again.observe(record(AR, 9.0))
    costs.observe(record(AR, 9.0))
    assert again.to_dict() == costs.to_dict()
    assert CostModel.from_dict(costs.to_dict(), frozen=True).frozen


def test_the_shape_of_a_step_is_read_from_its_record():
    shape = StepShape(2, 4, 3, 1)
    assert shape_of(record(shape, 1.0)) == shape
    assert shape_of(StepRecord(Mode.AR, (RowStep(0, (5,), ()),))) == AR


@pytest.mark.parametrize(
    "call",
    [
        lambda: CostModel.fit([(AR, 0.0)]),
        lambda: CostModel.fit([(StepShape(1, 1, 1), 3.0)]),
        lambda: CostModel.fit([]),
        lambda: CostModel.from_dict({}),
        lambda: CostModel.from_dict({**CostModel.forwards().to_dict(), "target": [[1]]}),
    ],
)
def test_what_is_no_cost_model_is_refused(call):
    with pytest.raises(ConfigError, match="cost: got"):
        call()
