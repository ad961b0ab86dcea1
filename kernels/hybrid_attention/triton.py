"""One attention kernel for every mask, and the kernel that adds up what its programs found.

A program owns 64 rows of one kv head (row = token x query head of the group), so that grouped
heads share what is read, and a range of key positions. It walks over tiles of keys at fixed
positions: first those that all its rows see, unmasked, then the rest. README.md has the picture.

A token's bits depend on its own keys alone: tiles and ranges begin at fixed positions, a masked key
adds exact zeros, and one tile of rows serves every width. Passes of more than `NARROW` tokens are
divided by position only where it is asked for; others agree with each other, not with narrow ones.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid.config import interprets_triton
from hybrid.kernels.alloc import empty
from hybrid.kernels.aot import AotCase
from hybrid.kernels.checks import require, require_dtype, require_tensor
from hybrid.kernels.hybrid_attention.visible import Visible
from hybrid.kernels.launch import launch

SPLIT_KEYS = 512  # positions of one range
NARROW = 32  # tokens of the widest pass whose keys are divided into ranges
# Tiles and how they run, by padded head dim and bytes of an element. Not by the number of rows, and
# not tuned by measuring: either would decide bits. 64 rows are what one tensor-core product takes.
CONFIGS = {
    (64, 2): triton.Config({"BLOCK_M": 64, "BLOCK_N": 64}, num_warps=4, num_stages=3),
    (128, 2): triton.Config({"BLOCK_M": 64, "BLOCK_N": 64}, num_warps=4, num_stages=3),
    (256, 2): triton.Config({"BLOCK_M": 64, "BLOCK_N": 32}, num_warps=8, num_stages=2),
    (64, 4): triton.Config({"BLOCK_M": 64, "BLOCK_N": 32}, num_warps=8, num_stages=1),
    (128, 4): triton.Config({"BLOCK_M": 16, "BLOCK_N": 32}, num_warps=4, num_stages=2),
    (256, 4): triton.Config({"BLOCK_M": 16, "BLOCK_N": 32}, num_warps=8, num_stages=1),
}
COMBINE = triton.Config({"BLOCK_S": 16}, num_warps=4, num_stages=3)  # ranges added up at a time
# Of the arguments below: they change from pass to pass, and must not compile anew.
COUNTS = ("num_tokens", "num_local", "num_splits", "window")


@triton.jit
def _tanh(x):
    # Below 1 a continued fraction: there 1 - exp(-2x) would lose digits.
    square = x * x
    small = x * (10395 + square * (1260 + square * 21))
    small = small / (10395 + square * (4725 + square * (210 + square)))
    power = tl.exp2(tl.abs(x) * -2.8853900817779268)
    large = (1 - power) / (1 + power)
    return tl.where(square < 1, small, tl.where(x < 0, -large, large))


@triton.jit
def _attend_tile(
    query, acc, row_max, row_sum,  # [M, D], [M, D], [M], [M]
    first, end, max_prefix, start,  # of the tile's keys
    token, prefix, query_pos,  # [M] of the rows
    p_key, p_value, p_table, p_bits, p_positions,
    num_tokens, num_local, window, factor, softcap_scale, softcap,
    stride_cr, stride_cn, stride_bits_t,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr,
    KIND: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    o_n = first + tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    m_load = (o_d < D)[None, :]
    m_n = o_n < end
    if MASKED:
        # Positions between the prefix and the new tokens are not read: they may hold anything.
        m_n = m_n & ((o_n < max_prefix) | (o_n >= start))
        m_load = m_load & m_n[:, None]
    if PAGE_SIZE > 0:
        page = tl.load(p_table + o_n // PAGE_SIZE, mask=m_n, other=0).to(tl.int64)
        offset = page * stride_cr + (o_n % PAGE_SIZE) * stride_cn
    else:
        offset = o_n.to(tl.int64) * stride_cn
    # [N, D]
    key = tl.load(p_key + offset[:, None] + o_d[None, :], mask=m_load, other=0.0)
    value = tl.load(p_value + offset[:, None] + o_d[None, :], mask=m_load, other=0.0)
    if UPCAST:
        key, value = key.to(tl.float32), value.to(tl.float32)
    scores = tl.dot(query, tl.trans(key), input_precision="tf32x3")  # [M, N]
    if HAS_SOFTCAP:
        scores = softcap * _tanh(scores * softcap_scale)
    if MASKED:
        local = o_n - start
        is_local = (local >= 0) & (local < num_local)
        if KIND == "causal":
            seen = local[None, :] <= token[:, None]
        elif KIND == "bits":
            m_word = is_local[None, :] & (token < num_tokens)[:, None]
            p_word = p_bits + (token[:, None] * stride_bits_t + (local // 32)[None, :])
            words = tl.load(p_word, mask=m_word, other=0)
            seen = ((words >> (local % 32)[None, :]) & 1) != 0
        else:
            seen = (token >= 0)[:, None]
        seen = (seen & is_local[None, :]) | (o_n[None, :] < prefix[:, None])
        if HAS_WINDOW:
            position = tl.load(p_positions + local, mask=is_local, other=0)
            position = tl.where(is_local, position, o_n)
            seen = seen & (position[None, :] > query_pos[:, None] - window)
        highest = tl.max(tl.where(seen, scores, float("-inf")), axis=1)
    else:
        highest = tl.max(scores, axis=1)
    # In units of log 2. Written as one fma, not left to the compiler, which could choose otherwise
    # for masked tiles than for unmasked ones.
    new_max = tl.maximum(row_max, highest * factor)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(tl.fma(scores, factor, -shift[:, None]))
    if MASKED:
        weights = tl.where(seen, weights, 0.0)
    decay = tl.exp2(row_max - shift)
    row_sum = row_sum * decay + tl.sum(weights, axis=1)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="tf32x3")
    return acc, new_max, row_sum


@triton.jit(do_not_specialize=COUNTS)
def _hybrid_attention_kernel(
    p_query, p_key, p_value, p_out, p_partial, p_stats,
    p_prefix, p_start, p_positions, p_table, p_bits,
    num_tokens, num_local, num_splits, window, factor, softcap_scale, softcap,
    stride_qb, stride_qt, stride_qh, stride_cr, stride_cg, stride_cn,
    stride_table, stride_bits_b, stride_bits_t,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_KEYS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, KIND: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    i_b, i_g = tl.program_id(1) // G, tl.program_id(1) % G
    i_split = tl.program_id(2)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token, o_d = row // R, tl.arange(0, BLOCK_D)
    m_row = token < num_tokens
    m_out = m_row[:, None] & (o_d < D)[None, :]
    head = i_g * R + row % R

    # [M, D]
    p_q = p_query + i_b.to(tl.int64) * stride_qb + token.to(tl.int64) * stride_qt + head * stride_qh
    query = tl.load(p_q[:, None] + o_d[None, :], mask=m_out, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    # [M]
    p_pos = p_positions + i_b * num_tokens
    prefix = tl.load(p_prefix + i_b * num_tokens + token, mask=m_row, other=0)
    query_pos = tl.load(p_pos + token, mask=m_row, other=0)
    start = tl.load(p_start + i_b)
    p_pages = p_table + i_b * stride_table
    p_k, p_v = p_key + i_g.to(tl.int64) * stride_cg, p_value + i_g.to(tl.int64) * stride_cg
    if PAGE_SIZE == 0:
        cache_row = tl.load(p_pages).to(tl.int64)
        p_k, p_v = p_k + cache_row * stride_cr, p_v + cache_row * stride_cr

    # Which tiles: [begin, dense_stop) everybody sees, then up to the longest prefix, then from the
    # tile of the first new token on.
    min_prefix, max_prefix = tl.min(tl.where(m_row, prefix, 2147483647)), tl.max(prefix)
    end = start + num_local
    if KIND == "causal":
        last_token = (tl.program_id(0) * BLOCK_M + BLOCK_M - 1) // R
        end = tl.minimum(end, start + last_token + 1)
    begin, stop = 0, end
    if SPLIT_KEYS > 0:
        begin = i_split * SPLIT_KEYS
        stop = tl.minimum(end, begin + SPLIT_KEYS)
    first_local = start // BLOCK_N * BLOCK_N
    if HAS_WINDOW:
        lowest = tl.min(tl.where(m_row, query_pos, 2147483647)) - window + 1
        lowest = tl.minimum(tl.maximum(lowest, 0) // BLOCK_N * BLOCK_N, first_local)
        begin = tl.maximum(begin, lowest)
        dense_stop = begin
    else:
        dense_stop = tl.minimum(min_prefix // BLOCK_N * BLOCK_N, stop // BLOCK_N * BLOCK_N)
        dense_stop = tl.maximum(dense_stop, begin)
    num_prefix = tl.cdiv(tl.maximum(tl.minimum(stop, max_prefix) - dense_stop, 0), BLOCK_N)
    first_local = tl.maximum(first_local, dense_stop + num_prefix * BLOCK_N)
    num_masked = num_prefix + tl.cdiv(tl.maximum(stop - first_local, 0), BLOCK_N)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in range(begin, dense_stop, BLOCK_N):
        acc, row_max, row_sum = _attend_tile(
            query, acc, row_max, row_sum, first, end, max_prefix, start, token, prefix, query_pos,
            p_k, p_v, p_pages, p_bits, p_pos, num_tokens, num_local, window,
            factor, softcap_scale, softcap, stride_cr, stride_cn, stride_bits_t,
            D, BLOCK_D, BLOCK_N, PAGE_SIZE, KIND, HAS_WINDOW, HAS_SOFTCAP, UPCAST, False,
        )  # fmt: skip
    p_b = p_bits + i_b.to(tl.int64) * stride_bits_b
    for i_tile in tl.range(0, num_masked, num_stages=None if HAS_WINDOW else 1):
        first = dense_stop + i_tile * BLOCK_N
        if i_tile >= num_prefix:
            first = first_local + (i_tile - num_prefix) * BLOCK_N
        acc, row_max, row_sum = _attend_tile(
            query, acc, row_max, row_sum, first, end, max_prefix, start, token, prefix, query_pos,
            p_k, p_v, p_pages, p_b, p_pos, num_tokens, num_local, window,
            factor, softcap_scale, softcap, stride_cr, stride_cn, stride_bits_t,
            D, BLOCK_D, BLOCK_N, PAGE_SIZE, KIND, HAS_WINDOW, HAS_SOFTCAP, UPCAST, True,
        )  # fmt: skip

    if SPLIT_KEYS > 0:
        i_out = ((i_b * num_splits + i_split).to(tl.int64) * num_tokens + token) * (G * R) + head
        tl.store(p_partial + i_out[:, None] * D + o_d[None, :], acc, mask=m_out)
        tl.store(p_stats + i_out * 2, row_max, mask=m_row)
        tl.store(p_stats + i_out * 2 + 1, row_sum, mask=m_row)
    else:
        i_out = (i_b.to(tl.int64) * num_tokens + token) * (G * R) + head
        out = acc / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
        p_o = p_out + i_out[:, None] * D + o_d[None, :]
        tl.store(p_o, out.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=COUNTS)
def _combine_kernel(
    p_partial, p_stats, p_out, p_start, num_tokens, num_local, num_splits,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    SPLIT_KEYS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    i_row, i_b = tl.program_id(0), tl.program_id(1)
    num_rows = num_tokens * H
    used = tl.cdiv(tl.load(p_start + i_b) + num_local, SPLIT_KEYS)
    o_s, o_d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    top = tl.full([BLOCK_S], float("-inf"), tl.float32)
    for first in range(0, used, BLOCK_S):
        index = (i_b * num_splits + first + o_s).to(tl.int64) * num_rows + i_row
        found = tl.load(p_stats + index * 2, mask=first + o_s < used, other=float("-inf"))
        top = tl.maximum(top, found)
    shift = tl.max(top, axis=0)
    shift = tl.where(shift == float("-inf"), 0.0, shift)
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, used, BLOCK_S):
        m_s = first + o_s < used
        index = (i_b * num_splits + first + o_s).to(tl.int64) * num_rows + i_row
        found = tl.load(p_stats + index * 2, mask=m_s, other=float("-inf"))
        share = tl.exp2(found - shift)
        total += tl.sum(share * tl.load(p_stats + index * 2 + 1, mask=m_s, other=0.0), axis=0)
        # [S, D]
        m_part = m_s[:, None] & (o_d < D)[None, :]
        part = tl.load(p_partial + index[:, None] * D + o_d[None, :], mask=m_part, other=0.0)
        acc += tl.sum(share[:, None] * part, axis=0)
    out = acc / tl.where(total == 0, 1.0, total)
    p_o = p_out + (i_b.to(tl.int64) * num_rows + i_row) * D + o_d
    tl.store(p_o, out.to(p_out.dtype.element_ty), mask=o_d < D)


def hybrid_attention_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Visible,
    window: int | None,
    softcap: float | None,
    scale: float,
    by_position: bool = False,
) -> Tensor:
    """Launch; arguments as `hybrid_attention`."""
    _validate(query, key, value, visible)
    require(scale > 0, "hybrid_attention", f"scale is {scale}, expected a positive number.")
    is_positive = softcap is None or softcap > 0
    require(is_positive, "hybrid_attention", f"softcap is {softcap}, expected more than 0 or None.")
    batch, num_tokens, num_heads, head_dim = query.shape
    num_groups = key.shape[1]
    block_d = max(16, triton.next_power_of_2(head_dim))
    config = CONFIGS[max(block_d, 64), max(query.element_size(), 2)]
    num_splits = 1
    if by_position or num_tokens <= NARROW:
        num_splits = triton.cdiv(max(visible.max_end, 1), SPLIT_KEYS)
    split_keys = SPLIT_KEYS if num_splits > 1 else 0
    device, rows = query.device, num_tokens * num_heads
    out = empty(query.shape, dtype=query.dtype, device=device)
    partial, stats = out, out
    if split_keys:
        partial = empty((batch, num_splits, rows, head_dim), dtype=torch.float32, device=device)
        stats = empty((batch, num_splits, rows, 2), dtype=torch.float32, device=device)
    log2e = math.log2(math.e)
    bits = visible.bits
    grid = (
        triton.cdiv(num_tokens * (num_heads // num_groups), config.kwargs["BLOCK_M"]),
        batch * num_groups,
    )
    launch(
        _hybrid_attention_kernel, (*grid, num_splits), query, key, value, out, partial, stats,
        visible.prefix, visible.start, visible.positions, visible.table, bits,
        num_tokens, visible.num_local, num_splits, window or 0,
        log2e if softcap else scale * log2e,
        scale / softcap if softcap else 0.0, softcap or 0.0,
        *query.stride()[:3], *key.stride()[:3],
        visible.table.stride(0), bits.stride(0) if len(bits) > 1 else 0, bits.stride(1),
        G=num_groups, R=num_heads // num_groups, D=head_dim, BLOCK_D=block_d,
        SPLIT_KEYS=split_keys, PAGE_SIZE=key.shape[2] if visible.is_paged else 0,
        KIND=visible.kind, HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None,
        UPCAST=_upcast(query.dtype), enable_fp_fusion=False, configs=[config], key=(),
    )  # fmt: skip
    if split_keys:
        launch(
            _combine_kernel, (rows, batch), partial, stats, out, visible.start, num_tokens,
            visible.num_local, num_splits, H=num_heads, D=head_dim, BLOCK_D=block_d,
            SPLIT_KEYS=SPLIT_KEYS, enable_fp_fusion=False, configs=[COMBINE], key=(),
        )  # fmt: skip
    return out


def _upcast(dtype: torch.dtype) -> bool:
    """Whether products are computed in float32: the interpreter's are wrong in bfloat16."""
    return dtype == torch.bfloat16 and interprets_triton()


def _validate(query: Tensor, key: Tensor, value: Tensor, visible: Visible) -> None:
    op, found = "hybrid_attention", f"query is {list(query.shape)}, key is {list(key.shape)}"
    have_axes = query.ndim == key.ndim == 4
    require(have_axes, op, f"{found}: expected [B, T, H, D] and [rows, G, S, D].")
    (batch, num_tokens, num_heads, head_dim), (*places, _) = query.shape, key.shape
    require_dtype(op, "query", query)
    require_tensor(op, "query", query, query.shape, visible.prefix.device)
    for name, tensor in (("key", key), ("value", value)):
        require_dtype(op, name, tensor, query.dtype)
        require_tensor(op, name, tensor, (*places, head_dim), query.device)
    require_tensor(op, "visible.prefix", visible.prefix, (batch, num_tokens), query.device)
    fits = head_dim <= 256 and num_heads % key.shape[1] == 0
    found = f"{num_heads} heads of {head_dim}, {key.shape[1]} kv heads"
    require(fits, op, f"{found}: expected as many per kv head, of at most 256.")
    require(key.stride() == value.stride(), op, "key and value must have the same strides.")
    last = query.stride(3), key.stride(3)
    require(last == (1, 1), op, f"the last axis has strides {last}, expected 1.")
    room = key.shape[2] * (visible.table.shape[1] if visible.is_paged else 1)
    needed = visible.max_end
    require(needed <= room, op, f"a row has {needed} keys, the cache has room for {room}.")


_LAUNCHED: dict[str, Any] = {
    "unaligned": (*COUNTS, "stride_table", "stride_bits_b", "stride_bits_t"),
    "options": {"enable_fp_fusion": False},
}


def aot_cases() -> list[AotCase]:
    """Return what `make kernels-aot` compiles: every configuration, each kind of mask."""
    shapes = [  # dtype, D, R, kind, page size, window, softcap, split
        ("bf16", 64, 3, "causal", 0, False, False, True),
        ("bf16", 64, 3, "bits", 0, False, False, False),
        ("fp16", 80, 1, "full", 0, False, False, True),
        ("bf16", 96, 4, "causal", 0, False, False, False),
        ("bf16", 128, 2, "causal", 0, False, False, True),
        ("bf16", 128, 4, "full", 0, False, False, True),
        ("bf16", 128, 4, "bits", 16, True, False, True),
        ("bf16", 128, 8, "causal", 64, False, True, False),
        ("bf16", 256, 2, "causal", 0, True, True, True),
        ("bf16", 256, 2, "bits", 0, False, False, False),
        ("fp32", 64, 3, "causal", 0, False, False, True),
        ("fp32", 128, 4, "bits", 0, False, False, False),
        ("fp32", 256, 4, "causal", 0, False, False, True),
    ]
    cases = [_aot_case(*shape) for shape in shapes]
    for dtype, dim in (("bf16", 64), ("bf16", 128), ("bf16", 256), ("fp16", 80), ("fp32", 128)):
        constexprs = {"H": 32, "D": dim, "BLOCK_D": triton.next_power_of_2(dim),
                      "SPLIT_KEYS": SPLIT_KEYS, **COMBINE.kwargs}  # fmt: skip
        types = {"p_partial": "*fp32", "p_stats": "*fp32", "p_out": f"*{dtype}", "p_start": "*i32"}
        name = f"combine-{dtype}-D{dim}"
        cases.append(AotCase.of(name, _combine_kernel, types, constexprs, COMBINE, **_LAUNCHED))
    return cases


def _aot_case(
    dtype: str, dim: int, per_group: int, kind: str, page: int, win: bool, cap: bool, split: bool
) -> AotCase:
    block_d = max(64, triton.next_power_of_2(dim))
    config = CONFIGS[block_d, 4 if dtype == "fp32" else 2]
    constexprs = {
        "G": 8, "R": per_group, "D": dim, "BLOCK_D": block_d,
        "SPLIT_KEYS": SPLIT_KEYS if split else 0, "PAGE_SIZE": page, "KIND": kind,
        "HAS_WINDOW": win, "HAS_SOFTCAP": cap, "UPCAST": False, **config.kwargs,
    }  # fmt: skip
    types = dict.fromkeys(("p_query", "p_key", "p_value", "p_out"), f"*{dtype}")
    types |= dict.fromkeys(("p_partial", "p_stats"), "*fp32" if split else f"*{dtype}")
    words = ("p_prefix", "p_start", "p_positions", "p_table", "p_bits")
    types |= dict.fromkeys(words, "*i32")
    types |= dict.fromkeys(("factor", "softcap_scale", "softcap"), "fp32")
    extras = [n for n, has in (("paged", page), ("window", win), ("softcap", cap)) if has]
    name = "-".join([dtype, f"D{dim}", f"R{per_group}", kind, *extras, *(["split"] * split)])
    # Queries of 256 numbers, each as two of the tensor cores' (tf32x3), and 16 rows are the fewest:
    # float32 with such heads is for comparing, not for speed.
    is_large = dtype == "fp32" and dim == 256
    return AotCase.of(
        name,
        _hybrid_attention_kernel,
        types,
        constexprs,
        config,
        wants_mma=True,
        spills_allowed=32 if is_large else 0,
        **_LAUNCHED,
    )
