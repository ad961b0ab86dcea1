"""Statistics of softmax laws: tiles of the vocabulary side by side, then their tiny combination.

What is kept of a tile leaves its best token out of the sums, so that a law that is almost certain
has its entropy and its doubt to full precision: 1 + 1e-9 would round to 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid.kernels import alloc
from hybrid.kernels.aot import AotCase
from hybrid.kernels.launch import launch
from hybrid.kernels.logits_stats.reference import LogitsStats

# Tiles lie at fixed ids and nothing is measured: a row's bits do not depend on its batch.
BLOCK_V = 4096
CONFIGS = [triton.Config({"BLOCK_V": BLOCK_V}, num_warps=8)]
_COMBINE = [triton.Config({}, num_warps=1)]
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit(do_not_specialize=["suppressed"])
def _logits_tile_kernel(
    logits_ptr,  # [N, V]
    temperature_ptr,  # [N]
    sums_ptr,  # [4, N, S] float32: best, second, rest, weighted
    argmax_ptr,  # [N, S] int32
    stride_n,  # of logits
    vocab_size,  # V
    suppressed,  # id or -1
    BLOCK_V: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    i_s = tl.program_id(1)
    num_rows, num_tiles = tl.num_programs(0), tl.num_programs(1)
    o_v = i_s * BLOCK_V + tl.arange(0, BLOCK_V)
    m_v = (o_v < vocab_size) & (o_v != suppressed)
    x = tl.load(logits_ptr + i_n * stride_n + o_v, mask=m_v, other=-float("inf")).to(tl.float32)
    temperature = tl.maximum(tl.load(temperature_ptr + i_n), _TINY)

    best = tl.max(x, axis=0)
    argmax = tl.min(tl.where(x == best, o_v, vocab_size - 1), axis=0)
    is_best = (o_v == argmax) & (x == best)
    second = tl.max(tl.where(is_best, -float("inf"), x), axis=0)
    z = (x - best) / temperature
    e = tl.where(is_best | (x == -float("inf")), 0.0, tl.exp(z))
    p_out = sums_ptr + i_n * num_tiles + i_s
    step = num_rows.to(tl.int64) * num_tiles
    tl.store(p_out, best)
    tl.store(p_out + step, second)
    tl.store(p_out + 2 * step, tl.sum(e, axis=0))
    tl.store(p_out + 3 * step, tl.sum(tl.where(e > 0, e * z, 0.0), axis=0))
    tl.store(argmax_ptr + i_n * num_tiles + i_s, argmax)


@triton.jit
def _logits_combine_kernel(
    sums_ptr,  # [4, N, S]
    tile_argmax_ptr,  # [N, S]
    temperature_ptr,  # [N]
    argmax_ptr,  # [N] int64
    stats_ptr,  # [4, N] float32: probability, margin, entropy, logsumexp
    num_tiles,  # S
    BLOCK_S: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0).to(tl.int64)
    o_s = tl.arange(0, BLOCK_S)
    m_s = o_s < num_tiles
    temperature = tl.maximum(tl.load(temperature_ptr + i_n), _TINY)
    p_in = sums_ptr + i_n * num_tiles + o_s
    step = num_rows * num_tiles
    best = tl.load(p_in, mask=m_s, other=-float("inf"))
    second = tl.load(p_in + step, mask=m_s, other=-float("inf"))
    rest = tl.load(p_in + 2 * step, mask=m_s, other=0.0)
    weighted = tl.load(p_in + 3 * step, mask=m_s, other=0.0)
    argmax = tl.load(tile_argmax_ptr + i_n * num_tiles + o_s, mask=m_s, other=2147483647)

    top = tl.max(best, axis=0)
    # Tiles without a possible token name any id; the first of them names 0.
    token = tl.min(tl.where(best == top, argmax, 2147483647), axis=0)
    is_winner = (argmax == token) & (best > -float("inf"))  # none: all that follows is NaN
    below = (best - top) / temperature
    scale = tl.exp(below)
    # In units of the best token's weight: all others, and the sum of weight times distance.
    others = tl.sum(tl.where(is_winner, rest, scale * (1 + rest)), axis=0)
    distance = tl.sum(tl.where(scale > 0, scale * (weighted + below * (1 + rest)), 0.0), axis=0)
    next_best = tl.max(tl.where(is_winner, second, best), axis=0)

    probability = 1 / (1 + others)
    grown = 1 + others
    log_total = tl.where(grown == 1, others, tl.log(grown) * others / (grown - 1))  # log1p
    p_out = stats_ptr + i_n
    tl.store(argmax_ptr + i_n, token.to(tl.int64))
    tl.store(p_out, probability)
    tl.store(p_out + num_rows, probability * (1 - tl.exp((next_best - top) / temperature)))
    tl.store(p_out + 2 * num_rows, log_total - distance * probability)
    logsumexp = top / temperature + log_total
    tl.store(p_out + 3 * num_rows, tl.where(top == -float("inf"), top, logsumexp))


def logits_stats_triton(
    logits: Tensor, temperatures: Tensor, suppressed: int | None
) -> LogitsStats:
    """Return the statistics; see `logits_stats`, which has checked the arguments."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, BLOCK_V)
    device = logits.device
    sums = alloc.empty((4, num_rows, num_tiles), dtype=torch.float32, device=device)
    tile_argmax = alloc.empty((num_rows, num_tiles), dtype=torch.int32, device=device)
    argmax = alloc.empty((num_rows,), dtype=torch.int64, device=device)
    stats = alloc.empty((4, num_rows), dtype=torch.float32, device=device)
    if num_rows:
        launch(
            _logits_tile_kernel,
            (num_rows, num_tiles),
            logits,
            temperatures,
            sums,
            tile_argmax,
            logits.stride(0),
            vocab_size,
            -1 if suppressed is None else suppressed,
            configs=CONFIGS,
            key=(),
        )
        launch(
            _logits_combine_kernel,
            (num_rows,),
            sums,
            tile_argmax,
            temperatures,
            argmax,
            stats,
            num_tiles,
            BLOCK_S=triton.next_power_of_2(num_tiles),
            configs=_COMBINE,
            key=(),
        )
    return LogitsStats(argmax, *stats)


def aot_cases() -> list[AotCase]:
    """Return both kernels, the first for each dtype of logits."""
    return [_tile_case(dtype) for dtype in ("bf16", "fp16", "fp32")] + [
        _combine_case(vocab_size) for vocab_size in (49_152, 151_936)
    ]


def _tile_case(dtype: str) -> AotCase:
    types = {"logits_ptr": f"*{dtype}", "argmax_ptr": "*i32"}
    types |= dict.fromkeys(("temperature_ptr", "sums_ptr"), "*fp32")
    return AotCase.of(
        f"tile-{dtype}",
        _logits_tile_kernel,
        types,
        {"BLOCK_V": BLOCK_V},
        CONFIGS[0],
        unaligned=("suppressed",),
    )


def _combine_case(vocab_size: int) -> AotCase:
    types = {"tile_argmax_ptr": "*i32", "argmax_ptr": "*i64"}
    types |= dict.fromkeys(("sums_ptr", "temperature_ptr", "stats_ptr"), "*fp32")
    return AotCase.of(
        f"combine-V{vocab_size}",
        _logits_combine_kernel,
        types,
        {"BLOCK_S": triton.next_power_of_2(triton.cdiv(vocab_size, BLOCK_V))},
        _COMBINE[0],
        unaligned=("num_tiles",),
    )
