"""Verification in four stages, each for all rows at once; no law is ever written to memory.

1. Tiles of logits: the best of each and the mass beside it, for target and draft.
2. Per row: the tokens' likelihood ratios; the token rule ends here.
3. Tiles again: how much the target owes there to the tokens of that tile. For the token rule in one
   position, for the block rule in each, because each has its own test.
4. Per row: the block rule ends here; the tile of the next token, and the token in that tile.

Exponentials are float32, what decides is float64.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid.kernels import alloc
from hybrid.kernels.aot import AotCase
from hybrid.kernels.launch import launch
from hybrid.kernels.verify.reference import Rule, Verified

# Not tuned: other tiles sum in another order, and a seed would give another token.
BLOCK_V = 4096
CONFIGS = [triton.Config({"BLOCK_V": BLOCK_V}, num_warps=8)]
_NONE = tl.constexpr(2147483647)

# Stages 2 to 4 share their arguments. With T = K + 1 and S tiles:
#   target [B, T, V]; draft [B, K, V] or None; tokens [B, K]; num_tokens [B]; uniform [B, T]
#   tiles [4, B, T, S] float32: best logit and the mass beside it, of the target, of the draft
#   law [5, B, T] float64: top logit and total mass of the target, of the draft; chance to be kept
#   owed [B, R, S] float64: R is K for the block rule, 1 for the token rule
#   accepted [B] and next_token [B] int64


@triton.jit
def _mass_kernel(
    logits_ptr,  # [B, T, V]
    num_tokens_ptr,  # [B]
    tiles_ptr,  # [2, B, width, S]
    stride_b,  # of logits
    stride_t,
    width,
    vocab_size,  # V
    BLOCK_V: tl.constexpr,
):
    i_b, i_t, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if i_t > tl.load(num_tokens_ptr + i_b):
        return
    o_v = i_s * BLOCK_V + tl.arange(0, BLOCK_V)
    p_row = logits_ptr + i_b * stride_b + i_t.to(tl.int64) * stride_t
    x = tl.load(p_row + o_v, mask=o_v < vocab_size, other=-float("inf")).to(tl.float32)
    best = tl.max(x, axis=0)
    mass = tl.sum(tl.where(x == -float("inf"), 0.0, tl.exp(x - best)), axis=0)
    p_out = tiles_ptr + (i_b * width + i_t) * tl.num_programs(2) + i_s
    tl.store(p_out, best)
    tl.store(p_out + tl.num_programs(0) * width * tl.num_programs(2), mass)


@triton.jit
def _chances(logits_ptr, tiles_ptr, law_ptr, token, o_t, num_rows, stride_t, step, o_s, num_tiles):
    """Combine the tiles of a row's first laws; return the probability of the token in each [T].

    Pointers are to the row's own [T, V], [T, S] and [T].
    """
    mask = (o_t < num_rows)[:, None] & (o_s < num_tiles)[None, :]
    p_tile = tiles_ptr + o_t[:, None] * num_tiles + o_s[None, :]
    best = tl.load(p_tile, mask=mask, other=-float("inf"))
    mass = tl.load(p_tile + step * num_tiles, mask=mask, other=0.0)
    top = tl.max(best, axis=1)
    total = tl.sum((mass * tl.exp(best - top[:, None])).to(tl.float64), axis=1)
    tl.store(law_ptr + o_t, top.to(tl.float64), mask=o_t < num_rows)
    tl.store(law_ptr + step + o_t, total, mask=o_t < num_rows)
    x = tl.load(logits_ptr + o_t * stride_t + token, mask=o_t < num_rows, other=0.0)
    return tl.exp((x.to(tl.float32) - top).to(tl.float64)) / total


@triton.jit
def _ratio_kernel(
    target_ptr,
    draft_ptr,
    tokens_ptr,
    num_tokens_ptr,
    uniform_ptr,
    tiles_ptr,
    law_ptr,
    owed_ptr,
    accepted_ptr,
    next_token_ptr,
    stride_tb,
    stride_tt,
    stride_db,
    stride_dt,
    width,
    vocab_size,
    num_tiles,
    BY_BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    i_b = tl.program_id(0).to(tl.int64)
    num_tokens = tl.load(num_tokens_ptr + i_b)
    step = tl.num_programs(0).to(tl.int64) * width
    o_t, o_s = tl.arange(0, BLOCK_T).to(tl.int64), tl.arange(0, BLOCK_S)
    m_t = o_t < num_tokens
    p_tiles, p_law = tiles_ptr + i_b * width * num_tiles, law_ptr + i_b * width
    token = tl.load(tokens_ptr + i_b * (width - 1) + o_t, mask=m_t, other=0)
    p_row = target_ptr + i_b * stride_tb
    ratio = _chances(
        p_row, p_tiles, p_law, token, o_t, num_tokens + 1, stride_tt, step, o_s, num_tiles
    )
    impossible = 0
    if draft_ptr is not None:
        p_tiles += 2 * step * num_tiles
        p_law += 2 * step
        p_row = draft_ptr + i_b * stride_db
        drawn = _chances(
            p_row, p_tiles, p_law, token, o_t, num_tokens, stride_dt, step, o_s, num_tiles
        )
        ratio = ratio / drawn
        impossible = tl.max((m_t & ((drawn > 0) == 0)).to(tl.int32), axis=0)

    keep = tl.full([BLOCK_T], 1.0, tl.float64)
    if BY_BLOCK:
        kept = tl.full([], 1.0, tl.float64)
        for i in range(num_tokens):
            kept *= tl.sum(tl.where(o_t == i, ratio, 0.0), axis=0)
            kept = tl.where(kept > 1, 1.0, kept)  # NaN stays NaN
            keep = tl.where(o_t == i + 1, kept, keep)
        accepted = tl.full([], 0, tl.int64)  # stage 4 decides
    else:
        u = tl.load(uniform_ptr + i_b * width + o_t, mask=m_t, other=0.0)
        rejected = m_t & ((u < ratio) == 0)  # NaN rejects
        accepted = tl.min(tl.where(rejected, o_t, num_tokens.to(tl.int64)), axis=0)
    tl.store(law_ptr + 4 * step + i_b * width + o_t, keep, mask=o_t <= num_tokens)
    tl.store(accepted_ptr + i_b, tl.where(impossible > 0, -1, accepted))


@triton.jit
def _weights(target_ptr, draft_ptr, token_ptr, law_ptr, step, o_v, vocab_size, is_whole):
    """What the target owes to the ids: its law times the chance to be kept, less the draft's.

    With `is_whole`, the target's own law, in units of its best token. Pointers are to the
    position's own [V], [V], [1] and [1].
    """
    x = tl.load(target_ptr + o_v, mask=o_v < vocab_size, other=-float("inf")).to(tl.float32)
    law = tl.exp(x - tl.load(law_ptr).to(tl.float32)).to(tl.float64)
    if draft_ptr is not None:
        num_drafted = tl.where(is_whole, 0, vocab_size)
        y = tl.load(draft_ptr + o_v, mask=o_v < num_drafted, other=-float("inf")).to(tl.float32)
        drawn = tl.exp(y - tl.load(law_ptr + 2 * step).to(tl.float32)).to(tl.float64)
        drawn *= 1 / tl.load(law_ptr + 3 * step)
    else:
        token = tl.load(token_ptr, mask=is_whole == 0, other=-1)
        drawn = tl.where(o_v == token, 1.0, 0.0).to(tl.float64)
    owed = law * (tl.load(law_ptr + 4 * step) / tl.load(law_ptr + step)) - drawn
    return tl.where(is_whole, law, tl.where(owed < 0, 0.0, owed))  # NaN stays NaN


@triton.jit
def _owed_kernel(
    target_ptr,
    draft_ptr,
    tokens_ptr,
    num_tokens_ptr,
    uniform_ptr,
    tiles_ptr,
    law_ptr,
    owed_ptr,
    accepted_ptr,
    next_token_ptr,
    stride_tb,
    stride_tt,
    stride_db,
    stride_dt,
    width,
    vocab_size,
    num_tiles,
    BY_BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    i_b, i_r, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    accepted = tl.load(accepted_ptr + i_b)
    i_t = i_r.to(tl.int64) if BY_BLOCK else accepted
    if (accepted < 0) | (i_t >= tl.load(num_tokens_ptr + i_b)):
        return
    if draft_ptr is not None:
        draft_ptr += i_b * stride_db + i_t * stride_dt
    owed = _weights(
        target_ptr + i_b * stride_tb + i_t * stride_tt,
        draft_ptr,
        tokens_ptr + i_b * (width - 1) + i_t,
        law_ptr + i_b * width + i_t,
        tl.num_programs(0).to(tl.int64) * width,
        i_s * BLOCK_V + tl.arange(0, BLOCK_V),
        vocab_size,
        tl.full([], 0, tl.int1),
    )
    p_out = owed_ptr + (i_b * tl.num_programs(1) + i_r) * num_tiles + i_s
    tl.store(p_out, tl.sum(owed, axis=0))


@triton.jit
def _accept_by_block(uniform_ptr, keep_ptr, owed_ptr, num_tokens, o_t, o_s, num_tiles):
    """The longest prefix that passes its own test; pointers are to the row's [T], [T], [K, S]."""
    mask = (o_t < num_tokens)[:, None] & (o_s < num_tiles)[None, :]
    owed = tl.load(owed_ptr + o_t[:, None] * num_tiles + o_s[None, :], mask=mask, other=0.0)
    mass = tl.sum(owed, axis=1)
    keep = tl.load(keep_ptr + o_t, mask=o_t <= num_tokens, other=1.0)
    odds = tl.where(mass > 0, mass / (mass + 1 - keep), 0.0)
    odds = tl.where(o_t == num_tokens, keep, odds)
    m_prefix = (o_t > 0) & (o_t <= num_tokens)
    u = tl.load(uniform_ptr + o_t - 1, mask=m_prefix, other=0.0)
    return tl.max(tl.where(m_prefix & (u < odds), o_t, 0), axis=0)


@triton.jit
def _at_quantile(weights, index, before, quantile):
    """The first index of positive weight at which the running sum passes the quantile."""
    hit = (weights > 0) & (before + tl.cumsum(weights, axis=0) > quantile)
    first = tl.min(tl.where(hit, index, _NONE), axis=0)
    # Rounding may leave the very last quantile beyond the last sum.
    return tl.where(first == _NONE, tl.max(tl.where(weights > 0, index, -1), axis=0), first)


@triton.jit
def _draw_kernel(
    target_ptr,
    draft_ptr,
    tokens_ptr,
    num_tokens_ptr,
    uniform_ptr,
    tiles_ptr,
    law_ptr,
    owed_ptr,
    accepted_ptr,
    next_token_ptr,
    stride_tb,
    stride_tt,
    stride_db,
    stride_dt,
    width,
    vocab_size,
    num_tiles,
    BY_BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    i_b = tl.program_id(0).to(tl.int64)
    num_tokens, accepted = tl.load(num_tokens_ptr + i_b), tl.load(accepted_ptr + i_b)
    if accepted < 0:
        tl.store(next_token_ptr + i_b, -1)
        return
    step = tl.num_programs(0).to(tl.int64) * width
    o_t, o_s = tl.arange(0, BLOCK_T).to(tl.int64), tl.arange(0, BLOCK_S)
    p_uniform, p_owed = uniform_ptr + i_b * width, owed_ptr + i_b * num_tiles
    if BY_BLOCK:
        p_owed = owed_ptr + i_b * (width - 1) * num_tiles
        p_keep = law_ptr + 4 * step + i_b * width
        accepted = _accept_by_block(p_uniform, p_keep, p_owed, num_tokens, o_t, o_s, num_tiles)
        tl.store(accepted_ptr + i_b, accepted)
        p_owed += accepted * num_tiles

    # The mass of each tile: of what is owed, or of the target's whole law.
    num_owing = tl.where(accepted < num_tokens, num_tiles, 0)
    masses = tl.load(p_owed + o_s, mask=o_s < num_owing, other=0.0)
    is_whole = tl.sum(masses, axis=0) == 0  # all accepted, or equal up to rounding
    p_law, p_tile = law_ptr + i_b * width + accepted, tiles_ptr + o_s
    p_tile += (i_b * width + accepted) * num_tiles
    best = tl.load(p_tile, mask=o_s < num_tiles, other=-float("inf"))
    law = tl.load(p_tile + step * num_tiles, mask=o_s < num_tiles, other=0.0)
    law *= tl.exp(best - tl.load(p_law).to(tl.float32))
    masses = tl.where(is_whole, law.to(tl.float64), masses)
    total = tl.sum(masses, axis=0)
    if ((total > 0) & (total < float("inf"))) == 0:
        tl.store(next_token_ptr + i_b, -1)
        return
    quantile = tl.load(p_uniform + num_tokens) * total
    tile = _at_quantile(masses, o_s, 0.0, quantile)
    before = tl.sum(tl.where(o_s < tile, masses, 0.0), axis=0)
    o_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    p_row, p_token = target_ptr + i_b * stride_tb, tokens_ptr + i_b * (width - 1) + accepted
    p_row += accepted * stride_tt
    if draft_ptr is not None:
        draft_ptr += i_b * stride_db + accepted * stride_dt
    weights = _weights(p_row, draft_ptr, p_token, p_law, step, o_v, vocab_size, is_whole)
    token = _at_quantile(weights, o_v, before, quantile)
    tl.store(next_token_ptr + i_b, token.to(tl.int64))


def verify_triton(
    target_logits: Tensor,
    tokens: Tensor,
    num_tokens: Tensor,
    uniforms: Tensor,
    draft_logits: Tensor | None,
    rule: Rule,
) -> Verified:
    """Judge every row; see `verify`, which has checked the arguments."""
    batch, width, vocab_size = target_logits.shape
    num_tiles = triton.cdiv(vocab_size, BLOCK_V)
    num_owed = width - 1 if rule == "block" else min(width - 1, 1)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return alloc.empty(shape, dtype=dtype, device=target_logits.device)

    accepted, next_token = (empty(batch, dtype=torch.int64) for _ in range(2))
    if not batch:
        return Verified(accepted, next_token)
    tiles = empty(4, batch, width, num_tiles, dtype=torch.float32)
    law = empty(5, batch, width, dtype=torch.float64)
    owed = empty(batch, num_owed, num_tiles, dtype=torch.float64)
    target = _in_rows(target_logits)
    draft = None if draft_logits is None or width == 1 else _in_rows(draft_logits)
    num_tokens = num_tokens.contiguous()
    for logits, own in ((target, tiles[:2]), (draft, tiles[2:])):
        if logits is not None:
            args = (logits, num_tokens, own, *logits.stride()[:2], width, vocab_size)
            grid = (batch, logits.shape[1], num_tiles)
            launch(_mass_kernel, grid, *args, configs=CONFIGS, key=())

    def stage(kernel: Any, *grid: int) -> None:
        launch(
            kernel,
            grid,
            target,
            draft,
            tokens.contiguous(),
            num_tokens,
            uniforms.contiguous(),
            *(tiles, law, owed, accepted, next_token),
            *target.stride()[:2],
            *((0, 0) if draft is None else draft.stride()[:2]),
            *(width, vocab_size, num_tiles),
            BY_BLOCK=rule == "block",
            BLOCK_T=triton.next_power_of_2(width),
            BLOCK_S=triton.next_power_of_2(num_tiles),
            configs=CONFIGS,
            key=(),
        )

    stage(_ratio_kernel, batch)
    if owed.numel():
        stage(_owed_kernel, *owed.shape)
    stage(_draw_kernel, batch)
    return Verified(accepted, next_token)


def _in_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(2) == 1 else logits.contiguous()


def aot_cases() -> list[AotCase]:
    """Return the four stages for both rules, with draft laws and without, for 15 drafted tokens."""
    cases = [_case(_mass_kernel, dtype, "", has_draft=False) for dtype in ("bf16", "fp32")]
    for kernel in (_ratio_kernel, _owed_kernel, _draw_kernel):
        for dtype in ("bf16", "fp32"):
            for rule in ("rejection", "block"):
                cases += [_case(kernel, dtype, rule, has_draft=given) for given in (True, False)]
    return cases


def _case(kernel: Any, dtype: str, rule: str, *, has_draft: bool) -> AotCase:
    names = kernel.arg_names
    types = {name: "*fp32" for name in names if name.endswith("_ptr")}
    types |= dict.fromkeys(("logits_ptr", "target_ptr", "draft_ptr"), f"*{dtype}")
    types |= dict.fromkeys(
        ("tokens_ptr", "num_tokens_ptr", "accepted_ptr", "next_token_ptr"), "*i64"
    )
    types |= dict.fromkeys(("uniform_ptr", "law_ptr", "owed_ptr"), "*fp64")
    values: dict[str, int | None] = {
        "BY_BLOCK": rule == "block",
        "BLOCK_T": 16,
        "BLOCK_S": 64,
        "BLOCK_V": BLOCK_V,
    }
    if not has_draft:
        values |= {"draft_ptr": None}
    laws = f"-{rule}-{'laws' if has_draft else 'points'}" if rule else ""
    return AotCase.of(
        f"{kernel.__name__.strip('_').removesuffix('_kernel')}-{dtype}{laws}",
        kernel,
        types,
        {name: value for name, value in values.items() if name in names},
        CONFIGS[0],
        unaligned=("width", "num_tiles"),
    )
