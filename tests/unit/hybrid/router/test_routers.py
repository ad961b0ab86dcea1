"""The router that always says the same."""

from __future__ import annotations

import pytest
import torch
from router_simulation import Machine, honest, linear, row

from hybrid.protocols import Router
from hybrid.router.fixed import FixedRouter
from hybrid.types import Mode, Plan, Proposal, Route

MODES = (Mode.SPECULATIVE, Mode.FUSED, Mode.ONE_PASS)


def proposal(*num_tokens):
    return Proposal(torch.zeros(len(num_tokens), max(num_tokens), dtype=torch.long), num_tokens)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [0, 1, 7])
def test_it_always_says_the_same(count, mode):
    router = FixedRouter(count, mode)
    assert isinstance(router, Router)
    rows = [row(0), row(1, temperature=1.0)]
    expected = Plan(mode if count else Mode.AR, count, may_draft=mode != Mode.ONE_PASS or not count)
    for history in ([], Machine(router, [row(0)], honest(), linear()).run(9).history):
        assert router.plan(rows, history) == (expected,) * 2


@pytest.mark.parametrize(
    ("mode", "points", "num_slots", "max_points"),
    [
        (Mode.SPECULATIVE, ((), (), ()), 0, 0),
        (Mode.FUSED, ((3,), (1,), (0,)), 4, 1),
        (Mode.ONE_PASS, ((0, 1, 2, 3), (0, 1), (0,)), 4, 4),
    ],
)
def test_all_that_is_proposed_is_fed_and_verified(mode, points, num_slots, max_points):
    router = FixedRouter(3, mode)
    rows = [row(b) for b in range(3)]
    routes = router.judge(rows, proposal(3, 1, 0), [])
    assert routes == tuple(Route(n, 0, own) for n, own in zip((3, 1, 0), points, strict=True))
    assert (router.num_slots, router.max_points) == (num_slots, max_points)


def test_nothing_drafted_is_plain_decoding():
    machine = Machine(FixedRouter(0), [row(0)], honest(), linear()).run(9)
    assert machine.share(Mode.AR) == 1
    assert all(len(record.rows[0].tokens) == 1 for record in machine.history)


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_drafts_in_its_own_way(mode):
    machine = Machine(FixedRouter(3, mode), [row(0)], honest(), linear(), seed=4).run(60)
    steps = machine.history[2:]
    passes = [record.num_draft_forwards for record in steps]
    if mode is Mode.SPECULATIVE:
        assert all(passes)
    elif mode is Mode.ONE_PASS:
        assert not any(passes)
    else:  # a pass follows a step in which not all was accepted that its slots assumed
        missed = [record.rows[0].next_slot != 2 for record in machine.history[1:-1]]
        assert [bool(n) for n in passes] == missed
        assert {True, False} == set(missed)
