"""What the self-diffusion drafter proposes, and under which law, computed again by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import make_engine, random_adapter, random_prompts, tiny_backbone
from torch import Tensor

from hybrid.decode.loop import prefill
from hybrid.drafters.self_diffusion import SelfDiffusionDrafter
from hybrid.models.transformer import NativeBackbone
from hybrid.params import SamplingParams
from hybrid.protocols import DraftState
from hybrid.sampling import process_logits
from hybrid.streams import RandomStream
from hybrid.types import Mode, Plan, Proposal

K, SEED = 7, 17  # an adapter that drafts several different tokens


def prepared(
    prompts: list[list[int]], params: SamplingParams, backbone: NativeBackbone | None = None
) -> tuple[SelfDiffusionDrafter, DraftState]:
    """Prefill `prompts` and return a drafter with what it may look at."""
    backbone = backbone or tiny_backbone()
    drafter = SelfDiffusionDrafter(backbone, random_adapter(backbone, K, seed=SEED))
    engine, rows = make_engine(backbone, drafter, prompts, params, num_draft_tokens=K)
    taps = [prefill(engine, row)[1] for row in rows]
    hidden = {layer: torch.cat([t[layer] for t in taps]) for layer in drafter.taps}
    return drafter, DraftState(rows, engine.cache, hidden)


def propose(drafter: SelfDiffusionDrafter, state: DraftState, count: int = K) -> Proposal:
    return drafter.draft(state, Plan(Mode.SPECULATIVE, count))


def raw_logits(prompt: list[int]) -> Tensor:
    """Return the logits [K, V] of the draft behind `prompt` and its greedy next token."""
    base = tiny_backbone()
    twin: Any = object.__new__(NativeBackbone)
    twin.__dict__.update(base.__dict__)
    seen = []
    twin.forward = lambda *args, **kwargs: seen.append(base.forward(*args, **kwargs)) or seen[-1]
    drafter, state = prepared([prompt], SamplingParams(max_new_tokens=30), twin)
    propose(drafter, state)
    slots = seen[-1].hidden[base.num_layers - 1][0, 1:]
    logits = base.head(base.rms_norm(slots, random_adapter(base, K, seed=SEED).head.norm))
    assert logits.shape == (K, 64)
    return logits


PROMPT = random_prompts(9)[0]


def test_a_greedy_draft_is_the_argmax_and_a_point_mass() -> None:
    drafter, state = prepared([PROMPT], SamplingParams(max_new_tokens=30))
    proposal = propose(drafter, state)
    assert proposal.tokens.tolist() == [raw_logits(PROMPT).argmax(dim=1).tolist()]
    assert len(set(proposal.tokens[0].tolist())) > 2
    assert proposal.draft_probs is None
    assert proposal.num_tokens == (K,)
    assert proposal.num_forwards == 1


LAWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.1},
    "repetition": {"repetition_penalty": 1.4},
    "presence-frequency": {"presence_penalty": 0.5, "frequency_penalty": 1.5},
    "min-new-tokens": {"min_new_tokens": 4, "stop_token_ids": (3, 4, 5)},
    "all": {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize("fields", LAWS.values(), ids=LAWS.keys())
def test_the_law_of_each_token_is_that_of_the_targets_transforms(fields: dict[str, Any]) -> None:
    params = SamplingParams(**{"temperature": 1.0, "seed": 4, "max_new_tokens": 30, **fields})
    drafter, state = prepared([PROMPT], params)
    row = state.rows[0]
    row.tokens[-1] = prepared([PROMPT], SamplingParams())[1].rows[0].tokens[-1]
    before = list(row.tokens)
    proposal = propose(drafter, state)
    drawn, laws = proposal.tokens[0].tolist(), proposal.draft_probs
    assert laws is not None
    assert row.tokens == before, "a drafter never changes the state"
    # All slots at once, as the target's rows are processed in the verify pass.
    expected = process_logits(raw_logits(PROMPT), params, before, len(PROMPT), drawn, ())
    torch.testing.assert_close(laws[0], expected.softmax(dim=1).float(), rtol=1e-4, atol=1e-5)
    assert (laws[0].gather(1, proposal.tokens[0][:, None]) > 0).all()


@pytest.mark.parametrize("fields", [{}, {"top_k": 3}, {"frequency_penalty": 2.0}])
def test_tokens_are_drawn_from_the_law_that_is_reported(fields: dict[str, Any]) -> None:
    """Slot 0 over 1,000 seeds: 5 standard deviations, one false alarm in a million per token."""
    params = SamplingParams(temperature=1.5, seed=0, max_new_tokens=30, **fields)
    drafter, state = prepared([PROMPT], params)
    row, num_draws = state.rows[0], 1000
    counts = torch.zeros(64)
    for seed in range(num_draws):
        row.stream = RandomStream(seed)
        proposal = propose(drafter, state, count=1)
        counts[proposal.tokens[0, 0]] += 1
    assert proposal.draft_probs is not None
    law = proposal.draft_probs[0, 0]
    sigma = (law * (1 - law) / num_draws).sqrt()
    assert ((counts / num_draws - law).abs() <= 5 * sigma + 1e-9).all()
    assert (counts > 0).sum() >= 3


def test_a_greedy_row_with_penalties_counts_what_it_drafted() -> None:
    params = SamplingParams(frequency_penalty=100.0, max_new_tokens=30)
    drafter, state = prepared([PROMPT], params)
    proposal = propose(drafter, state)
    drawn = proposal.tokens[0].tolist()
    assert len(set(drawn)) == K, "no token twice"
    assert proposal.draft_probs is not None
    assert proposal.draft_probs[0].argmax(dim=1).tolist() == drawn
    assert (proposal.draft_probs.sum(dim=2) == 1).all()
    assert (proposal.draft_probs.amax(dim=2) == 1).all()


@pytest.mark.parametrize("count", [1, 2, 6])
def test_fewer_tokens_than_trained(count: int) -> None:
    """A shorter pass is a pass of its own: fewer slots see each other."""
    drafter, state = prepared([PROMPT], SamplingParams(max_new_tokens=30))
    proposal = propose(drafter, state, count)
    assert proposal.tokens.shape == (1, count)
    assert proposal.num_tokens == (count,)


def test_never_more_tokens_than_trained() -> None:
    drafter, state = prepared([PROMPT], SamplingParams(max_new_tokens=30))
    assert drafter.max_draft_tokens == K
    assert propose(drafter, state, 50).tokens.shape == (1, K)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 2, K], ids="K{}".format)
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_a_row_does_not_depend_on_the_batch(
    temperature: float, count: int, dtype: torch.dtype
) -> None:
    backbone = tiny_backbone("llama", dtype)
    params = SamplingParams(temperature=temperature, seed=7, max_new_tokens=30)
    prompts = random_prompts(9, 1, 17, 4)
    together = propose(*prepared(prompts, params, backbone), count)
    for b, prompt in enumerate(prompts):
        alone = propose(*prepared([prompt], params, backbone), count)
        assert torch.equal(together.tokens[b], alone.tokens[0])
        if temperature > 0:
            assert together.draft_probs is not None
            assert alone.draft_probs is not None
            # Some CPUs round a float32 product of few rows otherwise than one of many.
            is_float32 = dtype == torch.float32
            close = {"rtol": 1e-5, "atol": 1e-6} if is_float32 else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(together.draft_probs[b], alone.draft_probs[0], **close)


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    prompts = random_prompts(9, 5)
    drafter, state = prepared(prompts, SamplingParams(max_new_tokens=30))
    greedy = propose(drafter, state)
    state.rows[1].sampling = SamplingParams(temperature=1.0, max_new_tokens=30)
    mixed = propose(drafter, state)
    assert mixed.tokens[0].tolist() == greedy.tokens[0].tolist()
    assert mixed.draft_probs is not None
    assert mixed.draft_probs[0].amax(dim=1).eq(1).all(), "a greedy row's law is a point mass"
    assert (mixed.draft_probs[1].amax(dim=1) < 1).any()


def test_a_draft_leaves_the_committed_cache_alone() -> None:
    drafter, state = prepared(random_prompts(9, 5), SamplingParams(max_new_tokens=30))
    cache: Any = state.cache
    before, lengths = cache.data.clone(), list(cache.lengths)
    propose(drafter, state)
    assert cache.lengths == lengths == [9, 5]
    for row, length in enumerate(lengths):
        assert torch.equal(cache.data[:, :, row, :, :length], before[:, :, row, :, :length])
    assert not torch.equal(cache.data, before), "it does write scratch"


def test_a_draft_ends_where_it_is_no_longer_confident() -> None:
    params = SamplingParams(max_new_tokens=30)
    prompts = random_prompts(9, 5, 17, 4)
    drafter, state = prepared(prompts, params)
    whole = propose(drafter, state)
    floor = 1.4e-3  # between the products of the rows at the second slot
    stopping = SelfDiffusionDrafter(tiny_backbone(), random_adapter(tiny_backbone(), K, seed=SEED))
    stopping._floor = floor
    proposal = propose(stopping, state)
    for b in range(len(prompts)):
        count, certainty = 0, 1.0
        for p in raw_laws(drafter, state)[b].amax(dim=1).tolist():
            certainty *= p
            if certainty < floor:
                break
            count += 1
        assert proposal.num_tokens[b] == count
        assert torch.equal(proposal.tokens[b, :count], whole.tokens[b, :count])
    assert min(proposal.num_tokens) > 0 or max(proposal.num_tokens) > 0
    assert len(set(proposal.num_tokens)) > 1, "rows stop by themselves"
    assert proposal.tokens.shape[1] == max(proposal.num_tokens)
    stopping._floor = 0.999
    assert propose(stopping, state).num_tokens == (0,) * len(prompts)


def raw_laws(drafter: SelfDiffusionDrafter, state: DraftState) -> Tensor:
    """Return the laws [B, K, V] of the slots."""
    slots = drafter._slots(state, torch.full((len(state.rows), K), -1))
    head = drafter._adapter.head
    return head.logits(slots.flatten(0, 1), None).view(*slots.shape[:2], -1).softmax(dim=-1)
