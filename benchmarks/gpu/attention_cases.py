"""What is timed of attention: decode, verify, draft, prefill and slots that ride.

The keys are those of Llama-3.1-8B (8 kv heads of 128, 32 query heads) unless a name says otherwise.
Next: benchmarks/gpu/kernel_times.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import bias as torch_bias

from benchmarks.gpu.cases import Call, Candidates, Case, Maker
from hybrid.attention.pattern import AttentionPattern, bidirectional, causal, groups
from hybrid.kernels.hybrid_attention import Visible, hybrid_attention

HEADS, GROUPS, DIM = 32, 8, 128
BAR = 0.85


def attention_case(
    name: str,
    pattern: AttentionPattern,
    context: int,
    itemsize: int,
    heads: tuple[int, int, int] = (HEADS, GROUPS, DIM),
    bar: float | None = None,
) -> Case:
    """Return a case.

    Args:
        name: of the case.
        pattern: who sees whom.
        context: positions of each row before the new tokens' own.
        itemsize: bytes of a number.
        heads: H, G, D.
        bar: see `Case`.
    """
    num_heads, num_groups, dim = heads
    batch, num_tokens = len(pattern.prefix_len), pattern.num_tokens
    length = context + num_tokens
    mask = torch.stack(
        [_mask(pattern, row, context, length) for row in range(batch)]
    )  # [B, T, S + T]

    def make(maker: Maker) -> Candidates:
        query = maker.normal(batch, num_tokens, num_heads, dim)
        key, value = maker.normal(2, batch, num_groups, length, dim)
        visible = Visible.build(
            pattern.prefix_len,
            pattern.local,
            start=[context] * batch,
            rows=range(batch),
            is_causal=pattern.is_causal,
            is_full=pattern.is_full,
            positions=pattern.positions,
            device=maker.device,
        )
        turned = query.transpose(1, 2)
        seen = mask[:, None].to(maker.device)
        is_prefill = pattern.is_causal and context == 0
        how = {"is_causal": True} if is_prefill else {"attn_mask": None if mask.all() else seen}

        def sdpa(**how: Any) -> torch.Tensor:
            return F.scaled_dot_product_attention(turned, key, value, enable_gqa=True, **how)

        def lower_right() -> torch.Tensor:
            return sdpa(attn_mask=torch_bias.causal_lower_right(num_tokens, length))

        name = "torch, flash" if is_prefill or mask.all() else "torch, dense mask"
        others: dict[str, Call] = {name: lambda: sdpa(**how)}
        if pattern.is_causal and context and num_tokens > 1:
            others["torch, lower right"] = lower_right
        return Candidates(lambda: hybrid_attention(query, key, value, visible), others)

    numbers = 2 * batch * dim * (num_groups * length + num_heads * num_tokens)
    num_flops = 4 * num_heads * dim * int(mask.sum())
    return Case("hybrid_attention", name, numbers * itemsize, num_flops, make, bar)


def _mask(pattern: AttentionPattern, row: int, context: int, length: int) -> torch.Tensor:
    mask = pattern.row_mask(row, prefix_width=context)
    return torch.ones(pattern.num_tokens, length, dtype=torch.bool) if mask is None else mask


def attention_cases(is_dry: bool, itemsize: int) -> Iterable[Case]:
    """Return all of them."""
    if is_dry:
        tiny = (4, 2, 16)
        yield attention_case("decode-20", causal([20], 1), 20, itemsize, tiny, BAR)
        yield attention_case("verify-20-T3", causal([20], 3), 20, itemsize, tiny)
        yield attention_case("draft-20-T3", bidirectional([20], 3), 20, itemsize, tiny)
        yield attention_case("prefill-20", causal([0], 20), 0, itemsize, tiny)
        yield attention_case("carried-20", groups([[20, 21]], 2), 22, itemsize, tiny)
        return
    for context in (1024, 8192, 32_768):
        for batch in (1, 8):
            # One row is read in less time than two launches take.
            bar = BAR if (context, batch) == (8192, 8) else None
            name, pattern = f"decode-{context}-B{batch}", causal([context] * batch, 1)
            yield attention_case(name, pattern, context, itemsize, bar=bar)
        for num_tokens in (8, 16, 32):
            name = f"verify-{context}-T{num_tokens}"
            yield attention_case(name, causal([context], num_tokens), context, itemsize)
        yield attention_case(f"draft-{context}-T9", bidirectional([context], 9), context, itemsize)
    yield attention_case("prefill-1024", causal([0], 1024), 0, itemsize)
    yield attention_case("prefill-512-after-7680", causal([7680], 512), 7680, itemsize)
    # Behind 9 tokens that are verified: slots for each acceptance point.
    points = [[8192 + point for point in range(9)]]
    yield attention_case("carried-8192-9x9", groups(points, 9), 8201, itemsize)
    yield attention_case("carried-8192-1x9", groups([[8200]], 9), 8201, itemsize)
    small = (9, 3, 64)  # SmolLM2-135M
    yield attention_case("decode-8192-H9-G3-D64", causal([8192], 1), 8192, itemsize, small)
