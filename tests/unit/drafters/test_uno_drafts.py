"""Drafts of tokens, of random tokens, and of several passes: what they propose, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import make_engine, random_adapter, random_prompts, tiny_backbone
from torch import Tensor

from hybrid import HybridDecoder
from hybrid.attention.pattern import causal
from hybrid.decode.loop import prefill
from hybrid.drafters.self_diffusion import SelfDiffusionDrafter
from hybrid.models.draft_input import MASKED, noise, reveal
from hybrid.models.transformer import NativeBackbone
from hybrid.params import SamplingParams
from hybrid.protocols import DraftState
from hybrid.sampling import process_logits
from hybrid.streams import RandomStream
from hybrid.types import Mode, Plan, Proposal

K = 6
KINDS: dict[str, dict[str, Any]] = {
    "tokens": {"entry_layer": 0, "mask_token_id": 9},
    "tokens-plain": {"entry_layer": 0, "mask_token_id": 9, "train_norms": False},
    "tokens-sampler": {"entry_layer": 0, "mask_token_id": 9, "sampler_size": 5},
    "tokens-passes": {"entry_layer": 0, "mask_token_id": 9, "num_passes": 3},
    "late-passes": {"num_passes": 2},
    "uniform": {"entry_layer": 0, "corruption": "uniform", "train_norms": False},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def prepared(
    kind: str,
    prompts: list[list[int]],
    params: SamplingParams,
    backbone: NativeBackbone | None = None,
) -> tuple[SelfDiffusionDrafter, DraftState]:
    backbone = backbone or tiny_backbone()
    drafter = SelfDiffusionDrafter(backbone, random_adapter(backbone, K, seed=3, **KINDS[kind]))
    engine, rows = make_engine(backbone, drafter, prompts, params, num_draft_tokens=K)
    taps = [prefill(engine, row)[1] for row in rows]
    hidden = {layer: torch.cat([t[layer] for t in taps]) for layer in drafter.taps}
    return drafter, DraftState(rows, engine.cache, hidden)


def propose(drafter: SelfDiffusionDrafter, state: DraftState, count: int = K) -> Proposal:
    return drafter.draft(state, Plan(Mode.SPECULATIVE, count))


def slot_logits(drafter: SelfDiffusionDrafter, state: DraftState, known: Tensor) -> Tensor:
    slots = drafter._slots(state, known)
    return drafter._adapter.head.logits(slots.flatten(0, 1), None).view(*known.shape, -1)


PROMPT = random_prompts(9)[0]


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@each_kind
def test_a_row_does_not_depend_on_the_batch(
    kind: str, temperature: float, precision: torch.dtype
) -> None:
    backbone = tiny_backbone("llama", precision)
    params = SamplingParams(temperature=temperature, seed=7, max_new_tokens=30)
    prompts = random_prompts(9, 1, 17, 4)
    together = propose(*prepared(kind, prompts, params, backbone))
    for b, prompt in enumerate(prompts):
        alone = propose(*prepared(kind, [prompt], params, backbone))
        assert torch.equal(together.tokens[b], alone.tokens[0])
        if temperature > 0:
            assert together.draft_probs is not None
            assert alone.draft_probs is not None
            # Updates of rank 2 may round otherwise beside other rows, once in a thousand.
            torch.testing.assert_close(
                together.draft_probs[b], alone.draft_probs[0], rtol=0.05, atol=1e-3
            )


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral-window"])
@each_kind
def test_the_answer_is_the_targets(kind: str, family: str) -> None:
    backbone = tiny_backbone(family)
    adapter = random_adapter(backbone, K, seed=3, **KINDS[kind])
    decoder = HybridDecoder(backbone, adapter=adapter, drafter="self-diffusion")
    prompts = random_prompts(9, 1, 17)
    ours = decoder.generate(prompts, max_new_tokens=24)
    plain = decoder.generate(prompts, strategy="ar", max_new_tokens=24)
    assert [r.token_ids for r in ours] == [r.token_ids for r in plain]
    for result in ours:
        stats = result.stats
        assert stats.num_draft_forwards > 0
        # The first token of a random draft is the target's own, so it is always accepted.
        if kind == "uniform":
            assert stats.acceptance_histogram[0] == 0


def test_random_tokens_follow_from_seed_and_position() -> None:
    params = SamplingParams(max_new_tokens=30, seed=5)
    seen = []
    for seed, prompt in [(5, PROMPT), (5, PROMPT), (6, PROMPT), (5, random_prompts(9, 9)[1])]:
        drafter, state = prepared("uniform", [prompt], params)
        state.rows[0].sampling = SamplingParams(max_new_tokens=30, seed=seed)
        forward = drafter._adapter.draft_input
        rows: list[Tensor] = []
        drafter._adapter.draft_input = lambda r, h, rows=rows, forward=forward: (  # type: ignore[assignment]
            rows.append(r) or forward(r, h)
        )
        propose(drafter, state)
        assert rows[0].shape == (1, K), "the anchor and K - 1 random tokens draft K"
        assert rows[0][0, 0] == state.rows[0].anchor
        seen.append(rows[0][0, 1:].tolist())
    assert seen[0] == seen[1] == seen[3] == noise(5, 9, K - 1, 64)
    assert seen[2] != seen[0]
    drawn = [token for position in range(400) for token in noise(0, position, K - 1, 64)]
    counts = torch.bincount(torch.tensor(drawn), minlength=64)
    assert len(counts) == 64
    assert counts.min() > 0, "uniform over the vocabulary: 31 expected of each"
    assert counts.max() < 31 + 6 * 31**0.5


def test_the_first_law_of_a_random_draft_is_the_targets() -> None:
    params = SamplingParams(temperature=0.8, top_k=20, seed=2, max_new_tokens=30)
    drafter, state = prepared("uniform", [PROMPT], params)
    row, backbone = state.rows[0], tiny_backbone()
    proposal = propose(drafter, state)
    _, after = prepared("uniform", [[*PROMPT, row.anchor]], params)
    cache: Any = after.cache
    assert cache.lengths == [10]
    tokens = torch.tensor([[*PROMPT, row.anchor]])
    logits = backbone.forward(
        tokens, torch.arange(10)[None], causal([0], 10), backbone.new_cache(1, 10), [0]
    ).logits
    assert logits is not None
    expected = process_logits(logits[0, -1:], params, row.tokens, 9, (), ())
    assert proposal.draft_probs is not None
    torch.testing.assert_close(
        proposal.draft_probs[0, 0], expected[0].softmax(-1), rtol=1e-4, atol=1e-5
    )


@each_kind
def test_fewer_tokens_than_trained(kind: str) -> None:
    for count in (1, 2, K - 1):
        drafter, state = prepared(kind, [PROMPT], SamplingParams(max_new_tokens=30))
        proposal = propose(drafter, state, count)
        assert proposal.tokens.shape == (1, count)
        assert proposal.num_tokens == (count,)
    if kind == "uniform":  # causal, so that a shorter draft is the beginning of a longer one
        assert torch.equal(proposal.tokens, propose(drafter, state).tokens[:, : K - 1])


@pytest.mark.parametrize("kind", ["tokens-passes", "late-passes"])
def test_each_pass_tells_the_next_its_surest_tokens(kind: str) -> None:
    passes = KINDS[kind]["num_passes"]
    drafter, state = prepared(kind, [PROMPT], SamplingParams(max_new_tokens=30))
    tokens, known = [MASKED] * K, torch.full((1, K), MASKED)
    for done in range(1, passes + 1):
        logits = slot_logits(drafter, state, known)[0]
        share, best = logits.softmax(-1).max(-1)
        free = [j for j in range(K) if tokens[j] == MASKED]
        free.sort(key=lambda j: -share[j].item())
        wanted = K * done // passes - sum(t != MASKED for t in tokens)
        for j in free[:wanted]:
            tokens[j] = int(best[j])
        known = torch.tensor([tokens])
    proposal = propose(drafter, state)
    assert proposal.tokens.tolist() == [tokens]
    assert proposal.num_forwards == passes
    once = slot_logits(drafter, state, torch.full((1, K), MASKED))[0]
    assert not torch.allclose(once, logits, atol=0.1), "a later pass sees what is known"
    for count in (1, 2):  # never more passes than tokens
        assert propose(drafter, state, count).num_forwards == min(count, passes)


@pytest.mark.parametrize("kind", ["tokens-passes", "late-passes"])
def test_tokens_of_earlier_passes_are_not_drawn(kind: str) -> None:
    """Else the law of a slot before them would depend on a draw behind it, and be a wrong one."""
    params = SamplingParams(temperature=1.5, seed=0, max_new_tokens=30)
    drafter, state = prepared(kind, [PROMPT], params)
    row, laws, drafts = state.rows[0], [], []
    for seed in range(20):
        row.stream = RandomStream(seed)
        proposal = propose(drafter, state)
        assert proposal.draft_probs is not None
        laws.append(proposal.draft_probs[0])
        drafts.append(proposal.tokens[0])
        chosen = laws[-1].gather(1, drafts[-1][:, None])[:, 0]
        assert (chosen > 0).all()
    assert all(torch.equal(law, laws[0]) for law in laws), "no law depends on a draw"
    is_certain = laws[0].amax(dim=1) == 1
    passes = KINDS[kind]["num_passes"]
    assert is_certain.sum() == K * (passes - 1) // passes
    assert all(torch.equal(d[is_certain], drafts[0][is_certain]) for d in drafts)
    assert len({tuple(d.tolist()) for d in drafts}) > 10


def test_reveal_by_hand() -> None:
    logits = torch.tensor(
        [[[0.0, 3.0, 0.0], [9.0, 0.0, 0.0], [0.0, 0.0, 1.0], [5.0, 0.0, 0.0]]]
    ).repeat(2, 1, 1)
    vocabulary = torch.tensor([10, 20, 30])
    known = torch.tensor([[MASKED] * 4, [MASKED, MASKED, 7, MASKED]])
    one = reveal(logits, vocabulary, known, 2)
    assert one.tolist() == [[MASKED, 10, MASKED, 10], [MASKED, 10, 7, MASKED]]
    assert reveal(logits, None, one, 3).tolist() == [[1, 10, MASKED, 10], [MASKED, 10, 7, 0]]
