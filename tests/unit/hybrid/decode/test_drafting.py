"""What a step drafts and what it keeps of the slots it carried, by hand."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from carrying import CarryingFake, CarryingTarget, carrying_engine
from fakes import ScriptedTarget, make_engine

from hybrid.carried import KeptSlots
from hybrid.decode.drafting import draft_rows, keep_slots
from hybrid.decode.loop import prefill, run
from hybrid.decode.step import decode_step
from hybrid.params import SamplingParams
from hybrid.router.fixed import FixedRouter
from hybrid.streams import RandomStream
from hybrid.types import Mode, Plan, Route, SequenceState

LONG = SamplingParams(max_new_tokens=30)
SIZE = 4  # rows of a group: its anchor, and three slots


def states(*firsts):
    """[1, S, 1] of groups: the anchor's row says -1, slot j of a group says its first + j - 1."""
    rows = [[-1.0, *(float(first + j) for j in range(SIZE - 1))] for first in firsts]
    return torch.tensor(rows).view(1, -1, 1)


def kept(points, num_accepted, *, old=None, finish_reason=None, is_uniform=False, carries=True):
    """What is kept behind a row of ten cached tokens: (position, first slot, states), or None.

    Group j's slots are numbered 100 j + 1, ...
    """
    row = SequenceState(3, [0] * (11 + num_accepted + 1), 5, LONG, RandomStream(0))
    row.finish_reason = finish_reason
    engine = SimpleNamespace(rows=[row], slots={} if old is None else {3: old})
    carried = SimpleNamespace(group_size=SIZE, first_drafting=1 - is_uniform) if carries else None
    hidden = states(*(100 * j + 1 for j in points)) if carries else None
    keep_slots(engine, carried, hidden, [Route(9, 0, points)], [num_accepted])
    assert set(engine.slots) <= {3}
    if 3 not in engine.slots:
        return None
    left = engine.slots[3]
    assert left.position == len(row.tokens), "the first predicts what follows the new anchor"
    return left.first_slot, left.hidden.flatten().tolist()


# The anchor stands at position 10. The target's own next token is the first slot's of its group.
@pytest.mark.parametrize(
    ("points", "num_accepted", "expected"),
    [
        ((0,), 0, (2, [2, 3])),
        ((2,), 2, (2, [202, 203])),
        ((0, 1, 2), 1, (2, [102, 103])),
        ((0, 1, 2), 2, (2, [202, 203])),
        ((0, 2), 1, (3, [3])),  # the nearest point that assumed no more
        ((0, 3), 2, None),  # all of its slots have been passed by
        ((1, 4), 6, None),
        ((3,), 2, None),  # it assumed a token that was rejected
        ((), 2, None),
    ],
)
def test_the_nearest_group_is_kept_behind_what_was_accepted(points, num_accepted, expected):
    assert kept(points, num_accepted) == expected


def test_a_group_of_random_tokens_drafts_from_its_anchors_row_on():
    assert kept((0,), 0, is_uniform=True) == (2, [1, 2, 3])


def test_older_slots_stay_until_they_are_passed_by():
    old = KeptSlots(11, 5, torch.arange(6.0)[:, None])  # for the tokens at 11, ..., 16
    assert kept((), 0, old=old, carries=False) == (6, [1, 2, 3, 4, 5])
    assert kept((3,), 2, old=old) == (8, [3, 4, 5])
    assert kept((2,), 2, old=old) == (2, [202, 203]), "a new group replaces them"
    assert kept((0,), 3, old=old) is None, "even where nothing of it is left"
    assert kept((), 5, old=old, carries=False) is None


def test_a_row_that_ended_keeps_nothing():
    assert kept((0,), 0, finish_reason="stop") is None
    assert kept((), 0, old=KeptSlots(11, 1, torch.zeros(9, 1)), finish_reason="length") is None


def test_slots_at_a_position():
    slots = KeptSlots(7, 2, torch.arange(3.0)[:, None])
    assert slots.at(6) is None
    assert slots.at(10) is None
    for passed in range(3):
        left = slots.at(7 + passed)
        assert (left.position, left.first_slot) == (7 + passed, 2 + passed)
        assert left.hidden.flatten().tolist() == list(range(passed, 3))


class Recorder(CarryingFake):
    """Keeps what it was shown."""

    taps = (0,)

    def draft(self, state, plan):
        rows = [row.row for row in state.rows]
        self.seen = (rows, plan.num_draft_tokens, sorted(state.slots), state.wants_features)
        self.hidden = state.hidden[0].flatten().tolist()
        return super().draft(state, plan)


def drafted(plans, slots=None):
    """Draft for rows 0, ... of prompts of 1, 2, ... tokens; the taps say so."""
    prompts = [[1] * (n + 1) for n in range(len(plans))]
    drafter = Recorder(8, 5)
    engine, rows = make_engine(CarryingTarget(8), drafter, prompts, LONG.replace(temperature=1.0))
    for row in rows:
        prefill(engine, row)
    engine.rows, engine.slots = list(rows), slots or {}
    engine.hidden = {0: torch.arange(float(len(rows)))[:, None]}
    return drafter, draft_rows(engine, plans)


def plan(count, **fields):
    return Plan(Mode.SPECULATIVE, count, **fields)


def test_only_rows_that_ask_are_drafted_for():
    drafter, proposal = drafted([plan(0), plan(2), plan(3, may_draft=False), plan(4)])
    assert drafter.seen == ([1, 3], 4, [], False)
    assert drafter.hidden == [1, 3]
    assert proposal.num_tokens == (0, 2, 0, 4)
    assert proposal.tokens.shape == (4, 4)
    assert proposal.first_slot == (0, 1, 0, 1)
    assert (proposal.num_forwards, proposal.num_drafting) == (1, 2)
    for b in (1, 3):  # laws and tokens lie in their own rows
        n = proposal.num_tokens[b]
        chosen = proposal.draft_probs[b, :n].gather(1, proposal.tokens[b, :n, None])
        assert (chosen > 0).all()
        assert (proposal.confidence[b, :n] > 0).all()
    assert not proposal.draft_probs[[0, 2]].any()


def test_slots_serve_rows_that_may_not_draft_and_those_that_may_reuse():
    own = torch.tensor([[1.0, 1, 1, 2], [1, 1, 1, 3]])
    # text: row + 1 tokens and one more
    slots = {row: KeptSlots(row + 2, 2, own) for row in range(4)}
    slots[3] = KeptSlots(4, 1, own)  # for the token at 4; the row has five already
    plans = [
        plan(3, may_draft=False),
        plan(3, may_reuse=False),
        plan(3, may_draft=False, may_reuse=False),
        plan(3, may_draft=False),
    ]
    drafter, proposal = drafted(plans, slots)
    assert drafter.seen == ([0, 1, 3], 3, [0, 3], False)
    assert proposal.num_tokens == (2, 3, 0, 1)
    assert proposal.first_slot == (2, 1, 0, 2)
    assert proposal.num_drafting == 1


def test_nobody_asks_so_nothing_is_drafted():
    drafter, proposal = drafted([plan(0), plan(3, may_draft=False)])
    assert not hasattr(drafter, "seen")
    assert proposal.num_tokens == (0, 0)
    assert proposal.tokens.shape == (2, 0)


class Cutting(FixedRouter):
    """Drafts three, feeds one, carries for its points."""

    wants_features = True

    def __init__(self):
        super().__init__(3, Mode.ONE_PASS)
        self._plan = Plan(Mode.ONE_PASS, 3)

    def judge(self, rows, proposal, history):
        return tuple(Route(min(1, n), 0, (0, 1)[: n + 1]) for n in proposal.num_tokens)


def test_the_record_says_what_was_proposed_fed_and_carried():
    target, drafter = CarryingTarget(5), CarryingFake(5, 3)
    engine, rows = carrying_engine(target, drafter, [[1, 2], [3]], LONG, Cutting())
    proposals, draft = [], drafter.draft
    drafter.draft = lambda state, plan: proposals.append(draft(state, plan)) or proposals[-1]
    last, seen = {}, set()
    for record in itertools.islice(run(engine, list(rows)), 2, 12):  # without the prefills
        assert record.num_carried == 2 * (4 + 1)
        assert record.width == 1 + max(step.num_drafted for step in record.rows)
        proposal = proposals[-1]
        for b, step in enumerate(record.rows):
            n = step.num_proposed
            assert n == proposal.num_tokens[b]
            assert step.confidences == tuple(proposal.confidence[b, :n].tolist())
            assert step.entropies == step.margins == ()  # this drafter cannot say
            assert step.drafted == tuple(proposal.tokens[b, : step.num_drafted].tolist())
            assert step.num_drafted == min(1, n)
            assert step.points == (0, 1)
            assert step.mode == Mode.ONE_PASS
            assert step.first_slot == proposal.first_slot[b]
            before = last.get(step.index)
            assert step.first_slot == (before.next_slot if before else 1)
            assert n == (before.num_slots if before else 3)
            # A group of four slots for the accepted point: the target's token took the first.
            assert (step.num_slots, step.next_slot) == (3, 2)
            assert step.next_entropy > 0
            last[step.index] = step
            seen.add(step.first_slot)
        assert record.num_drafting == proposal.num_drafting
    assert seen == {1, 2}


def test_without_a_drafter_that_carries_points_mean_nothing():
    target = ScriptedTarget([5, 6, 7, 8], 1, vocab_size=64)
    drafter = CarryingFake(64, 3)
    drafter.can_carry = False
    engine, (row,) = make_engine(target, drafter, [[1]], LONG)
    prefill(engine, row)
    engine.rows, engine.router = [row], FixedRouter(3, Mode.FUSED)
    record = decode_step(engine)
    assert (record.mode, record.num_carried) == (Mode.SPECULATIVE, 0)
    assert (record.rows[0].points, record.rows[0].num_slots) == ((), 0)
