"""What every drafter promises (hybrid/protocols.py): the registered ones and the fakes."""

from __future__ import annotations

import copy

import pytest
import torch
from fakes import (
    SkewedDrafter,
    UniformDrafter,
    make_engine,
    random_adapter,
    random_dflash,
    random_prompts,
    sometimes_wrong,
    tiny_backbone,
)

from hybrid import registry
from hybrid.decode.loop import prefill
from hybrid.params import SamplingParams
from hybrid.protocols import CarryingDrafter, Drafter, DraftState, can_carry
from hybrid.types import Mode, Plan, Proposal

PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [7], *random_prompts(9, 4)]
MODES = {
    "greedy": SamplingParams(max_new_tokens=20),
    "sampled": SamplingParams(max_new_tokens=20, temperature=0.8, top_k=9, seed=3),
    "penalties": SamplingParams(max_new_tokens=20, repetition_penalty=1.3, min_new_tokens=3),
}
FAKES = {
    "uniform": lambda: UniformDrafter(64),
    "skewed": lambda: SkewedDrafter(64),
    "sometimes-wrong": lambda: sometimes_wrong([p + [5] * 20 for p in PROMPTS], 4),
}
NAMES = [*sorted(registry.names("drafter")), *FAKES]
BACKBONE = tiny_backbone("llama")


def make(name):
    if name in FAKES:
        return FAKES[name]()
    if name == "dflash":
        return random_dflash(BACKBONE)
    kind = registry.load("drafter", name)
    needs_adapter = name in {"self-diffusion", "combined"}
    return kind(BACKBONE, random_adapter(BACKBONE)) if needs_adapter else kind()


def started(drafter, params, prompts=PROMPTS):
    """Prefilled rows and what a drafter may look at."""
    engine, rows = make_engine(BACKBONE, drafter, prompts, params)
    taps = [prefill(engine, row)[1] for row in rows]
    hidden = {layer: torch.cat([own[layer] for own in taps]) for layer in drafter.taps}
    return rows, DraftState(rows, engine.cache, hidden)


def propose(name, mode="greedy", count=3, prompts=PROMPTS):
    drafter = make(name)
    rows, state = started(drafter, MODES[mode], prompts)
    proposal = drafter.draft(state, Plan(Mode.SPECULATIVE, min(count, drafter.max_draft_tokens)))
    return drafter, rows, state, proposal


def laws(proposal, row, count):
    """What the tokens of a row were drawn from: a point each where the proposal says nothing."""
    if proposal.draft_probs is not None:
        return proposal.draft_probs[row, :count]
    return torch.nn.functional.one_hot(proposal.tokens[row, :count], BACKBONE.vocab_size).float()


each = pytest.mark.parametrize("name", NAMES)
each_mode = pytest.mark.parametrize("mode", MODES)


@each
def test_it_is_a_drafter(name):
    drafter = make(name)
    assert isinstance(drafter, Drafter)
    assert isinstance(drafter.taps, tuple)
    assert drafter.max_draft_tokens >= 0
    assert all(0 <= tap < BACKBONE.num_layers for tap in drafter.taps)


@each_mode
@each
def test_proposals_are_well_formed(name, mode):
    for count in (1, 2, 7):
        drafter, rows, _, proposal = propose(name, mode, count)
        most = min(count, drafter.max_draft_tokens)
        assert isinstance(proposal, Proposal)
        assert proposal.tokens.dtype == torch.long
        assert len(proposal.num_tokens) == len(rows) == proposal.tokens.shape[0]
        assert all(type(n) is int and 0 <= n <= most for n in proposal.num_tokens)
        assert proposal.num_forwards >= 0
        for tokens, n in zip(proposal.tokens.tolist(), proposal.num_tokens, strict=True):
            assert all(0 <= t < BACKBONE.vocab_size for t in tokens[:n])
        if proposal.draft_probs is not None:
            laws = proposal.draft_probs
            assert laws.shape == (*proposal.tokens.shape, BACKBONE.vocab_size)
            assert laws.dtype == torch.float32
            for row, n in enumerate(proposal.num_tokens):
                own = laws[row, :n]
                assert (own >= 0).all()
                torch.testing.assert_close(own.sum(-1), torch.ones(n), rtol=0, atol=1e-5)
                chosen = own.gather(1, proposal.tokens[row, :n, None])
                assert (chosen > 0).all()


@each_mode
@each
def test_it_changes_neither_rows_nor_committed_cache(name, mode):
    drafter = make(name)
    rows, state = started(drafter, MODES[mode])
    before = [(list(r.tokens), r.finish_reason, r.num_prompt_tokens) for r in rows]
    lengths = list(state.cache.lengths)
    held = [
        state.cache.data[:, :, r.row, :, :n].clone() for r, n in zip(rows, lengths, strict=True)
    ]
    taps = {layer: value.clone() for layer, value in state.hidden.items()}
    drafter.draft(state, Plan(Mode.SPECULATIVE, min(3, drafter.max_draft_tokens)))
    assert [(r.tokens, r.finish_reason, r.num_prompt_tokens) for r in rows] == before
    assert state.cache.lengths == lengths
    for row, length, data in zip(rows, lengths, held, strict=True):
        assert torch.equal(state.cache.data[:, :, row.row, :, :length], data)
    assert all(torch.equal(state.hidden[layer], value) for layer, value in taps.items())


@each_mode
@each
def test_a_row_does_not_depend_on_the_batch(name, mode):
    _, together_rows, _, together = propose(name, mode)
    for index, prompt in enumerate(PROMPTS):
        _, alone_rows, _, alone = propose(name, mode, prompts=[prompt])
        count = together.num_tokens[index]
        assert alone.num_tokens == (count,)
        assert torch.equal(alone.tokens[0, :count], together.tokens[index, :count])
        torch.testing.assert_close(
            laws(alone, 0, count), laws(together, index, count), rtol=0, atol=1e-5
        )
        states = [r.stream.offset for r in (alone_rows[0], together_rows[index])]
        assert states[0] == states[1]


@each
def test_no_global_randomness(name):
    before = torch.random.get_rng_state()
    _, _, _, first = propose(name, "sampled")
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(12345)
    _, _, _, second = propose(name, "sampled")
    torch.random.set_rng_state(before)
    assert first.num_tokens == second.num_tokens
    for a, b, n in zip(first.tokens, second.tokens, first.num_tokens, strict=True):
        assert torch.equal(a[:n], b[:n])


@each_mode
@each
def test_a_reset_drafter_proposes_the_same_again(name, mode):
    drafter, rows, state, first = propose(name, mode)
    drafter.reset()
    fresh, _ = started(drafter, MODES[mode])
    for row, same in zip(rows, fresh, strict=True):
        row.stream = copy.copy(same.stream)
    again = drafter.draft(state, Plan(Mode.SPECULATIVE, min(3, drafter.max_draft_tokens)))
    assert again.num_tokens == first.num_tokens
    for a, b, n in zip(again.tokens, first.tokens, first.num_tokens, strict=True):
        assert torch.equal(a[:n], b[:n])


def test_a_point_mass_follows_no_stream():
    """A greedy draft without probabilities draws nothing, so that a seed means the same with it."""
    for name in ("none", "ngram", "self-diffusion", "combined", "dflash"):
        drafter = make(name)
        rows, state = started(drafter, MODES["greedy"])
        before = [row.stream.offset for row in rows]
        proposal = drafter.draft(state, Plan(Mode.SPECULATIVE, min(3, drafter.max_draft_tokens)))
        assert proposal.draft_probs is None
        for row, state_before in zip(rows, before, strict=True):
            assert row.stream.offset == state_before


# Drafters whose slots can ride in a target pass

POINTS = [(0, 2), (1,), (), (0, 1, 3)]
INPUTS = torch.tensor(random_prompts(4, 4, 4, 4, seed=5))
CARRYING = [name for name in NAMES if can_carry(make(name))]
each_carrying = pytest.mark.parametrize("name", CARRYING)


def carry(name, rows=slice(None), mode="greedy", num_slots=3):
    """What rides for some of the rows, with made-up taps of the target's tokens as its input."""
    drafter = make(name)
    states, state = started(drafter, MODES[mode], PROMPTS[rows])
    points, inputs = POINTS[rows], INPUTS[rows]
    carried = drafter.carry(state, inputs, points, num_slots)
    taps = torch.randn(4, 4, BACKBONE.hidden_size, generator=torch.Generator().manual_seed(1))
    hidden = {layer: taps[rows] + layer for layer in carried.taps}
    return states, state, carried, carried.inputs(hidden, carried.tensors)


def test_those_that_carry_are_known():
    assert CARRYING == ["combined", "self-diffusion"]
    assert all(isinstance(make(name), CarryingDrafter) for name in CARRYING)


@each_carrying
def test_what_rides_is_well_formed(name):
    for num_slots in (1, 3, 50):
        states, _, carried, inputs = carry(name, num_slots=num_slots)
        size, most = carried.group_size, max(map(len, POINTS))
        assert size - carried.first_drafting == min(num_slots, make(name).max_slots)
        width = most * size
        assert carried.position_ids.shape == (len(states), width)
        assert carried.pattern.num_tokens == width
        assert inputs.shape == (len(states), width, BACKBONE.hidden_size)
        assert all(0 <= tap < carried.layer for tap in carried.taps)
        local = carried.pattern.local
        for b, (row, points) in enumerate(zip(states, POINTS, strict=True)):
            for g, point in enumerate(points):
                own = slice(g * size, (g + 1) * size)
                start = row.cached_len + point  # where the point's anchor stands
                expected = list(range(start, start + size))
                assert carried.position_ids[b, own].tolist() == expected
                assert carried.pattern.prefix_len[b][own] == (start,) * size
                assert carried.pattern.positions[b][own] == tuple(expected)
                assert local[own, own].all()
        for g in range(most):
            own = slice(g * size, (g + 1) * size)
            assert not local[own, : g * size].any()
            assert not local[own, (g + 1) * size :].any()


@each_mode
@each_carrying
def test_carrying_changes_nothing(name, mode):
    drafter = make(name)
    rows, state = started(drafter, MODES[mode])
    before = [(list(r.tokens), r.stream.offset) for r in rows]
    data, lengths = state.cache.data.clone(), list(state.cache.lengths)
    taps = {layer: value.clone() for layer, value in state.hidden.items()}
    tokens = INPUTS.clone()
    carried = drafter.carry(state, tokens, POINTS, 3)
    given = {n: torch.ones(4, 4, BACKBONE.hidden_size) for n in carried.taps}
    carried.inputs(given, carried.tensors)
    for row, (text, offset) in zip(rows, before, strict=True):
        assert row.tokens == text
        assert row.stream.offset == offset
    assert torch.equal(state.cache.data, data)
    assert state.cache.lengths == lengths
    assert all(torch.equal(state.hidden[n], value) for n, value in taps.items())
    assert torch.equal(tokens, INPUTS)
    assert all((value == 1).all() for value in given.values())


@each_carrying
def test_what_rides_for_a_row_does_not_depend_on_the_batch(name):
    _, _, together, inputs = carry(name)
    for b, points in enumerate(POINTS):
        if not points:
            continue
        _, _, alone, own = carry(name, slice(b, b + 1))
        width = len(points) * alone.group_size
        assert alone.group_size == together.group_size
        assert torch.equal(alone.position_ids[0], together.position_ids[b, :width])
        torch.testing.assert_close(own[0], inputs[b, :width], rtol=0, atol=1e-5)
