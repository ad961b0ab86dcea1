"""A model that fills masks by itself drafts without an adapter: passes, laws and thresholds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from fakes import make_engine, random_adapter, random_prompts, tiny_backbone
from torch import Tensor

from hybrid.attention.pattern import AttentionPattern
from hybrid.decode.loop import prefill, run
from hybrid.drafters.self_diffusion import SelfDiffusionDrafter
from hybrid.errors import ConfigError
from hybrid.models.draft_input import MASKED, reveal_sure
from hybrid.models.transformer import NativeBackbone
from hybrid.params import SamplingParams
from hybrid.protocols import DraftState
from hybrid.streams import RandomStream
from hybrid.types import Mode, Plan, Proposal

MASK, BLOCK = 9, 7


def hybrid_backbone(**fields: Any) -> NativeBackbone:
    """Return a random model that says of itself that it fills masks."""
    twin: NativeBackbone = object.__new__(NativeBackbone)
    twin.__dict__.update(tiny_backbone().__dict__)
    own = {"mask_token_id": MASK, "logit_shift": 0, "block_size": BLOCK, **fields}
    twin.__dict__.update(own)
    twin.spec = dataclasses.replace(twin.spec, **own)
    return twin


def prepared(
    prompts: list[list[int]], params: SamplingParams, **settings: Any
) -> tuple[SelfDiffusionDrafter, DraftState]:
    backbone = hybrid_backbone()
    drafter = SelfDiffusionDrafter(backbone, **settings)
    engine, rows = make_engine(backbone, drafter, prompts, params, num_draft_tokens=31)
    engine.barred = (MASK,)
    for row in rows:
        prefill(engine, row)
    return drafter, DraftState(rows, engine.cache, {})


def propose(drafter: SelfDiffusionDrafter, state: DraftState) -> Proposal:
    return drafter.draft(state, Plan(Mode.SPECULATIVE, drafter.max_draft_tokens))


def filled(prompt: list[int], block: list[int]) -> Tensor:
    """Return the logits [K, V] of a block's slots: one pass over everything, no cache.

    The prompt is causal, the block sees the prompt and itself; no slot may be the mask token.
    """
    backbone, tokens = tiny_backbone(), [*prompt, *block]
    local = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    local[len(prompt) :] = True
    out = backbone.forward(
        torch.tensor([tokens]),
        torch.arange(len(tokens))[None],
        AttentionPattern((0,), local),
        backbone.new_cache(1, len(tokens)),
        [0],
    )
    assert out.logits is not None
    logits = out.logits[0, len(prompt) + 1 :].clone()
    logits[:, MASK] = float("-inf")
    return logits


def linear_draft(prompt: list[int], anchor: int, threshold: float) -> tuple[list[int], int]:
    """Return the slots and the passes of `linear_spec_generate`, as its description has it."""
    block, passes = [anchor, *[MASK] * (BLOCK - 1)], 0
    masked = list(range(1, BLOCK))
    while masked:
        probs = filled(prompt, block).softmax(-1)
        passes += 1
        sure = {j: float(probs[j - 1].max()) for j in masked}
        fill = [j for j in masked if threshold == 0 or sure[j] >= threshold]
        for j in fill or [max(masked, key=lambda j: sure[j])]:
            block[j] = int(probs[j - 1].argmax())
        masked = [j for j in masked if block[j] == MASK]
    return block[1:], passes


@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.12, 0.9])
@pytest.mark.parametrize("length", [1, 9, 17])
def test_the_draft_is_the_published_one(length: int, threshold: float) -> None:
    prompt = random_prompts(length, seed=length)[0]
    params = SamplingParams(max_new_tokens=30)
    drafter, state = prepared([prompt], params, threshold=threshold)
    proposal = propose(drafter, state)
    tokens, passes = linear_draft(prompt, state.rows[0].anchor, threshold)
    assert proposal.tokens.tolist() == [tokens]
    assert proposal.num_forwards == passes
    assert proposal.draft_probs is None
    assert (drafter.max_draft_tokens, drafter.preferred_draft_tokens) == (BLOCK - 1, BLOCK - 1)
    if threshold == 0.9:
        assert passes == BLOCK - 1, "nothing here is that sure: a slot per pass"
    if threshold == 0:
        assert passes == 1


def test_thresholds_between_need_a_number_of_passes_between() -> None:
    passes = {linear_draft(p, p[0], 0.12)[1] for p in random_prompts(9, 5, 17, 4, 30)}
    assert len(passes) > 1, "else the test above proves little"
    assert passes != {1, BLOCK - 1}


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("threshold", [0.0, 0.12])
def test_a_row_does_not_depend_on_the_batch(threshold: float, temperature: float) -> None:
    """Rows need different numbers of passes."""
    params = SamplingParams(temperature=temperature, seed=7, max_new_tokens=30)
    prompts = random_prompts(9, 1, 17, 4, seed=3)
    together = propose(*prepared(prompts, params, threshold=threshold))
    passes = []
    for b, prompt in enumerate(prompts):
        alone = propose(*prepared([prompt], params, threshold=threshold))
        passes.append(alone.num_forwards)
        assert torch.equal(together.tokens[b], alone.tokens[0])
        if temperature > 0:
            assert together.draft_probs is not None
            assert alone.draft_probs is not None
            torch.testing.assert_close(together.draft_probs[b], alone.draft_probs[0])
    assert together.num_forwards == max(passes)
    assert len(set(passes)) > (threshold > 0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("block_size", "threshold"), [(2, 0.0), (7, 0.0), (7, 0.1), (40, 0.05)])
def test_the_answer_is_the_targets(block_size: int, threshold: float, temperature: float) -> None:
    backbone, prompts = hybrid_backbone(), random_prompts(9, 1, 17)
    params = SamplingParams(temperature=temperature, seed=5, max_new_tokens=24)
    drafter = SelfDiffusionDrafter(backbone, block_size=block_size, threshold=threshold)
    assert drafter.max_draft_tokens == block_size - 1
    engine, rows = make_engine(
        backbone, drafter, prompts, params, num_draft_tokens=drafter.max_draft_tokens
    )
    engine.barred = (MASK,)
    records = list(run(engine, rows))
    assert sum(r.num_draft_forwards for r in records) > 0
    if temperature:
        assert all(row.num_new_tokens == 24 and MASK not in row.tokens[-24:] for row in rows)
        return
    for row, prompt in zip(rows, prompts, strict=True):
        tokens = list(prompt)
        while len(tokens) < len(prompt) + 24:
            logits = _causal_logits(tokens)
            logits[MASK] = float("-inf")
            tokens.append(int(logits.argmax()))
        assert row.tokens == tokens


def _causal_logits(tokens: list[int]) -> Tensor:
    backbone = tiny_backbone()
    local = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    out = backbone.forward(
        torch.tensor([tokens]),
        torch.arange(len(tokens))[None],
        AttentionPattern((0,), local),
        backbone.new_cache(1, len(tokens)),
        [0],
    )
    assert out.logits is not None
    return out.logits[0, -1].clone()


def test_tokens_of_earlier_passes_are_certain_and_the_rest_is_drawn() -> None:
    prompt, params = random_prompts(9)[0], SamplingParams(temperature=1.5, max_new_tokens=30)
    drafter, state = prepared([prompt], params, threshold=0.12)
    row, laws, drafts = state.rows[0], [], []
    row.tokens[-1] = 5  # with this anchor two passes fill three slots, the last one the others
    for seed in range(20):
        row.stream = RandomStream(seed)
        proposal = propose(drafter, state)
        assert proposal.draft_probs is not None
        laws.append(proposal.draft_probs[0])
        drafts.append(proposal.tokens[0])
        assert (laws[-1].gather(1, drafts[-1][:, None]) > 0).all()
    assert all(torch.equal(law, laws[0]) for law in laws), "no law depends on a draw"
    is_certain = laws[0].amax(dim=1) == 1
    assert is_certain.sum() == 3
    block = [5, *torch.where(is_certain, drafts[0], MASK).tolist()]
    expected = (filled(prompt, block) / 1.5).softmax(-1)[~is_certain]
    torch.testing.assert_close(laws[0][~is_certain], expected, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(d[is_certain], drafts[0][is_certain]) for d in drafts)
    assert len({tuple(d.tolist()) for d in drafts}) > 10


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_the_mask_token_is_never_drafted(threshold: float) -> None:
    """Even where the model is sure of it: it says nothing about the text."""
    drafter, state = prepared([[1, 2, 3]], SamplingParams(max_new_tokens=30), threshold=threshold)
    says = torch.zeros(64)
    says[MASK], says[5] = 30.0, 20.0
    head = drafter._adapter.head
    drafter._adapter.head = dataclasses.replace(
        head,
        output=lambda x: says.repeat(len(x), 1),  # type: ignore[arg-type]
    )
    proposal = propose(drafter, state)
    assert proposal.tokens.tolist() == [[5] * (BLOCK - 1)]
    assert proposal.num_forwards == 1


def test_the_mask_id_may_stand_in_a_prompt_and_be_the_anchor() -> None:
    prompt = [MASK, 4, MASK]
    drafter, state = prepared([prompt], SamplingParams(max_new_tokens=30), threshold=0.1)
    state.rows[0].tokens[-1] = MASK
    tokens = propose(drafter, state).tokens[0].tolist()
    block, masked = [MASK, *[MASK] * (BLOCK - 1)], set(range(1, BLOCK))
    while masked:  # as above, with a bitmap: the anchor is no slot
        best, ids = filled(prompt, block).softmax(-1).max(-1)
        fill = [j for j in masked if best[j - 1] >= 0.1]
        for j in fill or [max(masked, key=lambda j: float(best[j - 1]))]:
            block[j] = int(ids[j - 1])
            masked.discard(j)
    assert tokens == block[1:]


def test_reveal_sure_by_hand() -> None:
    """Equal to the threshold is sure; the best slot is told if none is; a last slot is not told."""
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.25, 0.25, 0.5], [0.3, 0.3, 0.4]])
    logits, none = probs.log().repeat(3, 1, 1), [MASKED] * 4
    known = torch.tensor([none, [MASKED, 7, 7, MASKED], [7, 7, MASKED, 7]])
    vocabulary = torch.tensor([10, 20, 30])
    at_half = reveal_sure(logits, vocabulary, known, 0.5)
    assert at_half.tolist() == [[10, 20, 30, MASKED], [10, 7, 7, MASKED], [7, 7, MASKED, 7]]
    none_sure = reveal_sure(logits, None, known, 0.9)
    assert none_sure.tolist() == [[MASKED, 1, MASKED, MASKED], [0, 7, 7, MASKED], [7, 7, MASKED, 7]]
    all_sure = reveal_sure(logits, None, known, 0.1)
    assert torch.equal(all_sure, known), "no pass follows, so nothing is told"


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not fill masks by itself"):
        SelfDiffusionDrafter(tiny_backbone())
    with pytest.raises(ConfigError, match="from the token before it"):
        SelfDiffusionDrafter(hybrid_backbone(logit_shift=1))
    late = random_adapter(tiny_backbone(), 5)
    with pytest.raises(ConfigError, match="block_size: got 7, expected at most 6"):
        SelfDiffusionDrafter(tiny_backbone(), late, block_size=7)
    assert SelfDiffusionDrafter(tiny_backbone(), late, block_size=3).preferred_draft_tokens == 2
    sampler = random_adapter(tiny_backbone(), 5, sampler_size=4)
    uniform = random_adapter(
        tiny_backbone(), 5, entry_layer=0, corruption="uniform", train_norms=False
    )
    for adapter in (sampler, uniform):
        with pytest.raises(ConfigError, match=r"threshold: got 0.5, expected 0"):
            SelfDiffusionDrafter(tiny_backbone(), adapter, threshold=0.5)
    assert SelfDiffusionDrafter(hybrid_backbone(block_size=None)).max_draft_tokens == 31
