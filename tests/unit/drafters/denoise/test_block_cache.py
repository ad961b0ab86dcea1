"""What block-causal caches hold, what passes they plan, and how long prompts are split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from block_twins import MASK, Text, decode, model, start

from hybrid.attention.pattern import AttentionPattern
from hybrid.decode.canvas import Block, Canvas, Pass, PassKind
from hybrid.decode.denoise import denoise
from hybrid.drafters.denoise.block_cache import BlockCache, CausalCache, SubBlockCache
from hybrid.drafters.denoise.block_grid import Grid
from hybrid.drafters.denoise.block_presets import (
    D2F,
    SDAR,
    FastDLLMv2,
    LLaDA2,
    LLaDA21,
    Nemotron,
)
from hybrid.types import Mode, Write


def numbers(plan: Pass) -> tuple[list[int], list[int], list[int], int, int]:
    """Return positions, targets, the positions whose logits are read, prefix and what is kept."""
    read = plan.positions[plan.rows].tolist()
    return plan.positions.tolist(), plan.targets.tolist(), read, plan.prefix, plan.num_kept


def span(start: int, end: int) -> list[int]:
    return list(range(start, end))


def test_grid() -> None:
    absolute, behind = Grid(4), Grid(4, origin=6)
    assert [absolute.start(p) for p in (0, 3, 4, 11)] == [0, 0, 4, 8]
    assert [absolute.end(p) for p in (0, 3, 4, 11)] == [4, 4, 8, 12]
    assert [behind.start(p) for p in (0, 5, 6, 9, 10)] == [0, 0, 6, 6, 10]
    assert [behind.end(p) for p in (0, 5, 6, 9, 10)] == [6, 6, 10, 10, 14]
    assert absolute.ids(torch.tensor([0, 3, 4, 8])).tolist() == [0, 0, 1, 2]
    assert behind.ids(torch.tensor([0, 1, 5, 6, 9, 10])).tolist() == [-1, -1, -1, 0, 0, 1]


def test_prompt_and_first_block_share_a_pass_and_finished_blocks_the_next() -> None:
    canvas, cache = Canvas(span(0, 6), 12, MASK), BlockCache(Grid(4), 0)
    plan = cache.plan(canvas, [Block(4, 8)])
    assert numbers(plan) == (span(0, 8), [6, 7], [6, 7], 0, 4)
    assert plan.local is not None
    assert plan.local.tolist() == [[q // 4 >= k // 4 for k in range(8)] for q in range(8)]
    canvas.commit(torch.tensor([7]), torch.tensor([1]))
    plan = cache.plan(canvas, [Block(4, 8)])
    assert numbers(plan) == (span(4, 8), [6], [6], 4, 0)
    assert plan.local is None
    canvas.commit(torch.tensor([6]), torch.tensor([1]))
    plan = cache.plan(canvas, [Block(8, 12)])
    assert numbers(plan) == (span(4, 12), span(8, 12), span(8, 12), 4, 4)
    assert plan.kind == PassKind.DENOISE


def test_shifted_logits_feed_the_last_clean_token_while_its_successor_is_masked() -> None:
    canvas, cache = Canvas([1, 2, 3], 7, MASK), BlockCache(Grid(2, origin=3), 1)
    both = [Block(3, 5), Block(5, 7)]
    assert numbers(cache.plan(canvas, both)) == (span(0, 7), span(3, 7), span(2, 6), 0, 3)
    plan = cache.plan(canvas, both)
    assert numbers(plan) == (span(2, 7), span(3, 7), span(2, 6), 2, 1)
    assert plan.local is not None
    assert plan.local[0].tolist() == [True, False, False, False, False]
    canvas.commit(torch.tensor([3]), torch.tensor([1]))
    assert numbers(cache.plan(canvas, both)) == (span(3, 7), [4, 5, 6], [3, 4, 5], 3, 0)
    canvas.commit(torch.tensor([4]), torch.tensor([1]))
    # The block in front is finished; it is fed once more and kept.
    assert numbers(cache.plan(canvas, [Block(5, 7)])) == (span(3, 7), [5, 6], [4, 5], 3, 2)


def test_only_the_first_slot_of_a_block_needs_the_block_before_alone() -> None:
    canvas, cache = Canvas(span(0, 8), 16, MASK), BlockCache(Grid(4), 1)
    assert numbers(cache.plan(canvas, [Block(8, 9)])) == (span(0, 8), [8], [7], 0, 8)


def test_rewriting_predicts_every_slot_but_the_prompts() -> None:
    canvas = Canvas(span(0, 6), 8, MASK)
    cache = BlockCache(Grid(4), 0, chunk=512, rewrites=True)
    canvas.commit(torch.tensor([6]), torch.tensor([1]))
    assert numbers(cache.plan(canvas, [Block(4, 8)])) == (span(0, 8), [6, 7], [6, 7], 0, 4)


def test_long_prompts_are_split_between_blocks() -> None:
    canvas, cache = Canvas(span(0, 22), 24, MASK), BlockCache(Grid(4), 0, chunk=10)
    plans = [cache.plan(canvas, [Block(20, 24)]) for _ in range(4)]
    assert [numbers(p) for p in plans] == [
        (span(0, 8), [], [], 0, 8),
        (span(8, 16), [], [], 8, 8),
        (span(16, 24), [22, 23], [22, 23], 16, 4),
        (span(20, 24), [22, 23], [22, 23], 20, 0),
    ]
    assert [p.kind.value for p in plans] == ["prefill", "prefill", "denoise", "denoise"]


def test_the_last_chunk_shares_its_pass_with_the_open_block() -> None:
    canvas, cache = Canvas(span(0, 10), 12, MASK), BlockCache(Grid(4), 0, chunk=8)
    assert numbers(cache.plan(canvas, [Block(8, 12)])) == (span(0, 12), [10, 11], [10, 11], 0, 8)


def test_what_must_be_seen_whole_is_fed_whole() -> None:
    canvas, cache = Canvas(span(0, 40), 64, MASK), BlockCache(Grid(16), 0, chunk=10)
    assert numbers(cache.plan(canvas, [Block(32, 48)]))[0] == span(0, 48)
    canvas, cache = Canvas(span(0, 40), 48, MASK), BlockCache(Grid(8, origin=40), 0)
    assert numbers(cache.plan(canvas, [Block(40, 48)]))[0] == span(0, 48)


def test_causal_passes_write_and_predict_the_seed() -> None:
    canvas, cache = Canvas(span(0, 5), 9, MASK), CausalCache(chunk=3)
    seed, rest = [Block(5, 6)], [Block(5, 9)]
    plans = [cache.plan(canvas, seed), cache.plan(canvas, seed)]
    assert [numbers(p) for p in plans] == [([0, 1, 2], [], [], 0, 3), ([3, 4], [5], [4], 3, 2)]
    assert all(p.is_causal and p.kind == PassKind.PREFILL for p in plans)
    canvas.commit(torch.tensor([5]), torch.tensor([1]))
    plan = cache.plan(canvas, rest)
    assert numbers(plan) == (span(5, 9), [6, 7, 8], [6, 7, 8], 5, 0)
    assert not plan.is_causal
    assert plan.local is None
    plans = [cache.plan(canvas, [Block(9, 10)]) for _ in range(2)]
    assert [numbers(p) for p in plans] == [([5, 6, 7], [], [], 5, 3), ([8], [9], [8], 8, 1)]
    assert all(p.is_causal and p.kind == PassKind.COMMIT for p in plans)


EXACT = [
    pytest.param(SDAR(block_size=4), 0, id="sdar"),
    pytest.param(SDAR(block_size=4), 1, id="sdar-shifted"),
    pytest.param(LLaDA2(block_size=8, threshold=0.4), 0, id="llada2"),
    pytest.param(LLaDA21(block_size=4, threshold=0.4, edit_threshold=0.2), 0, id="llada2.1"),
    pytest.param(D2F(block_size=4, confidence_threshold=0.4), 0, id="d2f"),
    pytest.param(D2F(block_size=4, confidence_threshold=0.4), 1, id="d2f-shifted"),
    pytest.param(FastDLLMv2(block_size=8, sub_block_size=4), 1, id="fast-dllm-v2"),
    pytest.param(Nemotron(block_size=4), 0, id="nemotron"),
]


def recomputed(backbone: Any, preset: Any, tokens: torch.Tensor, num_prompt: int) -> torch.Tensor:
    """Return K and V [L, 2, G, n, D] of one pass over clean tokens, under the system's mask."""
    at = torch.arange(len(tokens))
    if isinstance(preset, Nemotron):
        ids = at
    elif isinstance(preset, D2F):
        ids = (at - num_prompt + preset.block_size).clamp(min=0) // preset.block_size
    else:
        ids = at // preset.block_size
    cache = backbone.new_cache(1, len(tokens))
    pattern = AttentionPattern((0,), ids[:, None] >= ids)
    backbone.forward(tokens[None], at[None], pattern, cache, [0])
    return cache.data[:, :, 0, :, : len(tokens)]


@pytest.mark.parametrize(("preset", "shift"), EXACT)
@pytest.mark.parametrize("chunk", [512, 6])
def test_cached_equals_recomputed_after_every_pass(preset: Any, shift: int, chunk: int) -> None:
    backbone = model(shift, prefill_chunk=chunk)
    prompts = [span(3, 3 + n) for n in (1, 4, 9, 16)]
    rows, cache = start(backbone, preset, prompts, 13)
    lengths = set()
    for _ in denoise(backbone, cache, rows):
        for row in rows:
            length = cache.lengths[row.state.row]
            if length:
                lengths.add(length)
                assert not row.canvas.masked[:length].any()
                held = cache.data[:, :, row.state.row, :, :length]
                fresh = recomputed(
                    backbone, preset, row.canvas.tokens[:length], row.canvas.num_prompt
                )
                torch.testing.assert_close(held, fresh, rtol=1e-10, atol=1e-10)
    assert max(lengths) >= 16 + 8


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(("preset", "shift"), EXACT)
def test_chunks_change_no_token(preset: Any, shift: int, temperature: float) -> None:
    prompts = [[5 + i % 11 for i in range(n)] for n in (37, 20, 3)]
    asked = {"limit": 9, "temperature": temperature}
    tokens, passes = decode(model(shift), preset, prompts, **asked)
    split, more = decode(model(shift, prefill_chunk=10), preset, prompts, **asked)
    assert split == tokens
    if isinstance(preset, D2F):  # a prompt that sees itself whole cannot be split
        assert more == passes
    else:
        assert more[0] > passes[0]


def test_chunks_are_prefill_and_no_step_of_a_block() -> None:
    preset = SDAR(block_size=4, steps=2, strategy="sequential")
    rows, cache = start(model(prefill_chunk=10), preset, [span(0, 22)], 6)
    records = list(denoise(model(prefill_chunk=10), cache, rows))
    assert [(r.mode, r.width, len(r.rows[0].tokens)) for r in records] == [
        (Mode.PREFILL, 8, 0),
        (Mode.PREFILL, 8, 0),
        (Mode.DIFFUSION, 8, 2),
        (Mode.DIFFUSION, 8, 2),
        (Mode.DIFFUSION, 4, 2),
    ]


def test_sub_block_passes_refresh_the_sub_block_alone() -> None:
    canvas, cache = Canvas(span(0, 9), 16, MASK), SubBlockCache(Grid(8), 1)
    plan = cache.plan(canvas, [Block(8, 12)])
    assert numbers(plan) == (span(0, 16), [9, 10, 11], [8, 9, 10], 0, 16)
    canvas.commit(torch.tensor([9, 10]), torch.tensor([1, 1]))
    plan = cache.plan(canvas, [Block(8, 12)])
    assert numbers(plan) == (span(8, 12), [11], [10], 16, 0)
    assert plan.write == Write.REFRESH
    canvas.commit(torch.tensor([11]), torch.tensor([1]))
    plan = cache.plan(canvas, [Block(12, 16)])  # its first slot is predicted from outside
    assert numbers(plan) == (span(8, 16), span(12, 16), span(11, 15), 8, 8)
    assert plan.write == Write.SCRATCH


def sub_block_twin(backbone: Any, prompt: list[int], num_blocks: int, threshold: float) -> Any:
    """Fast-dLLM v2 with its cache within a block: blocks of 8, sub-blocks of 4, no policies."""
    text = Text(backbone, prompt, num_blocks * 8)
    cache, calls = backbone.new_cache(1, num_blocks * 8), 0

    def run(start: int, end: int, prefix: int, write: Write) -> list[tuple[int, float]]:
        out = backbone.forward(
            torch.tensor([text.tokens[start:end]]),
            torch.arange(start, end)[None],
            AttentionPattern((prefix,), torch.ones(end - start, end - start, dtype=torch.bool)),
            cache,
            [0],
            write=write,
        )
        logits = out.logits[0].clone()
        logits[:, MASK] = float("-inf")
        best = logits.softmax(dim=1).max(dim=1)
        said = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return [(0, 0.0)] * start + said  # by position

    for begin in range(0, num_blocks * 8, 8):
        if len(prompt) >= begin + 8:
            run(begin, begin + 8, begin, Write.COMMIT)
            continue
        if text.masked[begin]:
            cache.truncate(0, begin - 8)
            text.put(begin, run(begin - 8, begin, begin - 8, Write.COMMIT)[-1][0])
            calls += 1
        is_held = False
        for sub in (begin, begin + 4):
            while at := text.slots(sub, sub + 4):
                if is_held and not text.masked[sub]:
                    said = run(sub, sub + 4, begin + 8, Write.REFRESH)
                else:
                    cache.truncate(0, begin)
                    said = run(begin, begin + 8, begin, Write.COMMIT)
                    is_held = True
                calls += 1
                sure = [i for i in at if said[i - 1][1] > threshold]
                for i in sure or [max(at, key=lambda i: said[i - 1][1])]:
                    text.put(i, said[i - 1][0])
    return text.tokens[len(prompt) :], calls


@pytest.mark.parametrize("num_prompt", [1, 5, 8, 11, 16])
@pytest.mark.parametrize("threshold", [0.3, 1.0])
def test_sub_block_cache_is_the_twins(num_prompt: int, threshold: float) -> None:
    backbone, prompt = model(1), span(2, 2 + num_prompt)
    num_blocks = num_prompt // 8 + 3
    limit = num_blocks * 8 - num_prompt
    expected, calls = sub_block_twin(backbone, prompt, num_blocks, threshold)
    preset = FastDLLMv2(block_size=8, sub_block_size=4, threshold=threshold, sub_block_cache=True)
    (tokens,), (passes,) = decode(backbone, preset, [prompt], limit)
    assert tokens == expected
    assert passes == calls
    batch, _ = decode(backbone, preset, [prompt, span(1, 7), prompt], limit)
    assert batch[0] == batch[2] == tokens


def test_a_sub_block_that_is_the_block_is_as_good_as_no_cache() -> None:
    backbone, prompt = model(1), span(2, 7)
    plain = FastDLLMv2(block_size=8, sub_block_size=8, threshold=0.6)
    assert decode(backbone, plain, [prompt], 19) == decode(
        backbone, plain.replace(sub_block_cache=True), [prompt], 19
    )
