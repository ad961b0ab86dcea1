"""Sampling and truncation without a sort: a program per row looks for the last token that is kept.

What a truncation keeps is given by the largest distance to the best logit and by how many of the
tokens at that very distance. Distances are floats at or above 0, whose bits order like integers, so
the place is found by bisection over integers; each probe is one read of the row, and snaps to
distances that occur, so that the search ends after about as many probes as the tokens near the
boundary have distances.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid.kernels import alloc
from hybrid.kernels.aot import AotCase
from hybrid.kernels.launch import launch

# Not tuned: other tiles sum in another order, and a seed would give another token.
CONFIGS = [triton.Config({"BLOCK_V": 4096}, num_warps=16)]
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
# exp(-104) is 0 in float32: who is farther is never drawn. As bits.
_FARTHEST = tl.constexpr(0x42D00000)
_NONE = tl.constexpr(2147483647)


@triton.jit
def _distances(p_row, o_v, vocab_size, best, temperature):
    """Distances of the ids to the best as integers; impossible ones are farthest."""
    x = tl.load(p_row + o_v, mask=o_v < vocab_size, other=-float("inf")).to(tl.float32)
    # Rounded as a division is, not approximated: ties are those of the reference.
    far = tl.abs(tl.div_rn(x - best, temperature))
    return far.to(tl.int32, bitcast=True)


@triton.jit
def _weight(distance):
    return tl.exp(-distance.to(tl.float32, bitcast=True))


@triton.jit
def _probe(p_row, vocab_size, best, temperature, pivot, BLOCK_V: tl.constexpr):
    """Count and mass of the tokens within `pivot`, the farthest of them, the nearest beyond."""
    count = tl.zeros([BLOCK_V], tl.int32)
    mass = tl.zeros([BLOCK_V], tl.float32)
    inner = tl.full([BLOCK_V], -1, tl.int32)
    outer = tl.full([BLOCK_V], _NONE, tl.int32)
    for start in range(0, vocab_size, BLOCK_V):
        o_v = start + tl.arange(0, BLOCK_V)
        distance = _distances(p_row, o_v, vocab_size, best, temperature)
        within = distance <= pivot
        count += within.to(tl.int32)
        mass += tl.where(within, _weight(distance), 0.0)
        inner = tl.maximum(inner, tl.where(within, distance, -1))
        outer = tl.minimum(outer, tl.where(within, _NONE, distance))
    total = tl.sum(mass.to(tl.float64), axis=0)
    return tl.sum(count, axis=0), total, tl.max(inner, axis=0), tl.min(outer, axis=0)


@triton.jit
def _search(p_row, vocab_size, best, temperature, last, count, mass, BLOCK_V: tl.constexpr):
    """The least distance within which there are `count` tokens and `mass`; `last` has both.

    Returns it, and how many tokens and how much mass are strictly within it.
    """
    low, high = -1, last
    num_nearer, mass_nearer = 0, tl.full([], 0.0, tl.float64)
    while high - low > 1:
        pivot = low + (high - low) // 2
        found, found_mass, inner, outer = _probe(
            p_row, vocab_size, best, temperature, pivot, BLOCK_V
        )
        if (found >= count) & (found_mass >= mass):
            high = inner
        else:
            low = outer - 1
            num_nearer = found
            mass_nearer = found_mass
    return high, num_nearer, mass_nearer


@triton.jit
def _last_kept(p_row, vocab_size, best, temperature, top_k, top_p, farthest, BLOCK_V: tl.constexpr):
    """The distance of the farthest tokens that are kept, and how many of those may stay."""
    num_possible, mass, last, beyond = _probe(
        p_row, vocab_size, best, temperature, _FARTHEST, BLOCK_V
    )
    room = num_possible
    if (top_k > 0) & (top_k < num_possible):
        no_mass = tl.full([], 0.0, tl.float64)
        last, nearer, mass = _search(
            p_row, vocab_size, best, temperature, last, top_k, no_mass, BLOCK_V
        )
        room = top_k - nearer
        mass += room * _weight(last).to(tl.float64)
    if top_p < 1:
        needed = top_p * mass
        reached, nearer, mass = _search(
            p_row, vocab_size, best, temperature, last, 0, needed, BLOCK_V
        )
        ties = tl.ceil((needed - mass) / _weight(reached).to(tl.float64)).to(tl.int32)
        ties = tl.maximum(ties, 1)
        room = tl.where(reached == last, tl.minimum(room, ties), ties)
        last = reached
    if farthest < last:
        last = farthest
        room = num_possible
    return last, room


@triton.jit
def _best_of(p_row, vocab_size, BLOCK_V: tl.constexpr):
    """The best logit, and whether the row is a law."""
    tile_best = tl.full([BLOCK_V], -float("inf"), tl.float32)
    num_nan = tl.zeros([BLOCK_V], tl.int32)
    for start in range(0, vocab_size, BLOCK_V):
        o_v = start + tl.arange(0, BLOCK_V)
        x = tl.load(p_row + o_v, mask=o_v < vocab_size, other=-float("inf")).to(tl.float32)
        tile_best = tl.maximum(tile_best, x)
        num_nan += (x != x).to(tl.int32)
    best = tl.max(tile_best, axis=0)
    return best, (tl.sum(num_nan, axis=0) == 0) & (tl.abs(best) != float("inf"))


@triton.jit
def _cut(p_row, i_n, vocab_size, best, temperature_ptr, top_k_ptr, top_p_ptr, farthest_ptr,
         BLOCK_V: tl.constexpr):  # fmt: skip
    """Temperature of a row, distance of the farthest tokens that are kept, how many of those."""
    temperature, top_k = tl.load(temperature_ptr + i_n), tl.load(top_k_ptr + i_n)
    top_k = tl.where(temperature == 0, 1, top_k)
    temperature = tl.where(temperature == 0, 1.0, tl.maximum(temperature, _TINY))
    # The absolute value, because -log(1) is -0, whose bits are no small integer.
    farthest = tl.abs(tl.load(farthest_ptr + i_n)).to(tl.int32, bitcast=True)
    top_p = tl.load(top_p_ptr + i_n)
    last, room = _last_kept(p_row, vocab_size, best, temperature, top_k, top_p, farthest, BLOCK_V)
    return temperature, last, room


@triton.jit
def _draw(p_row, vocab_size, best, temperature, last, room, u, BLOCK_V: tl.constexpr):
    """The token at quantile `u`, in the order of the ids; float64, so that no quantile is lost."""
    tile_mass = tl.zeros([BLOCK_V], tl.float64)
    tile_ties = tl.zeros([BLOCK_V], tl.int32)
    for start in range(0, vocab_size, BLOCK_V):
        o_v = start + tl.arange(0, BLOCK_V)
        distance = _distances(p_row, o_v, vocab_size, best, temperature)
        tile_mass += tl.where(distance < last, _weight(distance), 0.0).to(tl.float64)
        tile_ties += (distance == last).to(tl.int32)
    ties = tl.minimum(tl.sum(tile_ties, axis=0), room)
    quantile = u * (tl.sum(tile_mass, axis=0) + ties * _weight(last).to(tl.float64))
    before = tl.full([], 0.0, tl.float64)
    token, last_id = _NONE, -1
    for start in range(0, vocab_size, BLOCK_V):
        o_v = start + tl.arange(0, BLOCK_V)
        distance = _distances(p_row, o_v, vocab_size, best, temperature)
        tie = (distance == last).to(tl.int32)
        kept = (distance < last) | ((tie > 0) & (tl.cumsum(tie, axis=0) <= room))
        weight = tl.where(kept, _weight(distance), 0.0).to(tl.float64)
        hit = (weight > 0) & (before + tl.cumsum(weight, axis=0) > quantile)
        token = tl.minimum(token, tl.min(tl.where(hit, o_v, _NONE), axis=0))
        last_id = tl.maximum(last_id, tl.max(tl.where(weight > 0, o_v, -1), axis=0))
        before += tl.sum(weight, axis=0)
        room -= tl.sum(tie, axis=0)
    # Rounding may leave the very last quantile beyond the last sum.
    return tl.where(token == _NONE, last_id, token)


@triton.jit
def _sample_kernel(
    logits_ptr,  # [N, V]
    uniform_ptr,  # [N] float64
    temperature_ptr,  # [N]
    top_k_ptr,  # [N]
    top_p_ptr,  # [N] float64
    farthest_ptr,  # [N]
    token_ptr,  # [N] int64
    stride_n,  # of logits
    vocab_size,  # V
    BLOCK_V: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    p_row = logits_ptr + i_n * stride_n
    best, is_law = _best_of(p_row, vocab_size, BLOCK_V)
    if not is_law:
        tl.store(token_ptr + i_n, -1)
        return

    temperature, last, room = _cut(
        p_row, i_n, vocab_size, best, temperature_ptr, top_k_ptr, top_p_ptr, farthest_ptr, BLOCK_V
    )
    u = tl.load(uniform_ptr + i_n)
    token = _draw(p_row, vocab_size, best, temperature, last, room, u, BLOCK_V)
    tl.store(token_ptr + i_n, token.to(tl.int64))


@triton.jit
def _truncate_kernel(
    logits_ptr,  # [N, V]
    temperature_ptr,  # [N]
    top_k_ptr,  # [N]
    top_p_ptr,  # [N] float64
    farthest_ptr,  # [N]
    out_ptr,  # [N, V] float32
    stride_n,  # of logits
    vocab_size,  # V
    BLOCK_V: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    p_row, p_out = logits_ptr + i_n * stride_n, out_ptr + i_n * vocab_size
    best, is_law = _best_of(p_row, vocab_size, BLOCK_V)
    temperature, last, room = 1.0, -1, 0
    if is_law:
        temperature, last, room = _cut(
            p_row, i_n, vocab_size, best, temperature_ptr, top_k_ptr, top_p_ptr, farthest_ptr,
            BLOCK_V,
        )  # fmt: skip
    dropped = tl.where(is_law, -float("inf"), float("nan"))
    for start in range(0, vocab_size, BLOCK_V):
        o_v = start + tl.arange(0, BLOCK_V)
        distance = _distances(p_row, o_v, vocab_size, best, temperature)
        tie = (distance == last).to(tl.int32)
        kept = (distance < last) | ((tie > 0) & (tl.cumsum(tie, axis=0) <= room))
        out = tl.where(kept & is_law, -distance.to(tl.float32, bitcast=True), dropped)
        tl.store(p_out + o_v, out, mask=o_v < vocab_size)
        room -= tl.sum(tie, axis=0)


def sample_triton(
    logits: Tensor,
    uniforms: Tensor,
    temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    farthest: Tensor,
) -> Tensor:
    """Draw a token of each row; see `sample`, which has checked the arguments."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_rows, vocab_size = logits.shape
    tokens = alloc.empty((num_rows,), dtype=torch.int64, device=logits.device)
    if num_rows:
        launch(
            _sample_kernel,
            (num_rows,),
            logits,
            uniforms,
            temperatures,
            top_k,
            top_p,
            farthest,
            tokens,
            logits.stride(0),
            vocab_size,
            configs=CONFIGS,
            key=(),
        )
    return tokens


def truncate_triton(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, farthest: Tensor
) -> Tensor:
    """Return the logits of each row's law; see `truncate`, which has checked the arguments."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_rows, vocab_size = logits.shape
    out = alloc.empty((num_rows, vocab_size), dtype=torch.float32, device=logits.device)
    if num_rows:
        launch(
            _truncate_kernel,
            (num_rows,),
            logits,
            temperatures,
            top_k,
            top_p,
            farthest,
            out,
            logits.stride(0),
            vocab_size,
            configs=CONFIGS,
            key=(),
        )
    return out


def aot_cases() -> list[AotCase]:
    """Return the kernels for each dtype of logits; penalised ones are float32."""
    draws = [_case(dtype, _sample_kernel, dtype) for dtype in ("bf16", "fp16", "fp32")]
    return [*draws, _case("truncate-fp32", _truncate_kernel, "fp32")]


def _case(name: str, kernel: triton.JITFunction, dtype: str) -> AotCase:
    types = {
        "logits_ptr": f"*{dtype}",
        "uniform_ptr": "*fp64",
        "temperature_ptr": "*fp32",
        "top_k_ptr": "*i32",
        "top_p_ptr": "*fp64",
        "farthest_ptr": "*fp32",
        "token_ptr": "*i64",
        "out_ptr": "*fp32",
    }
    own = {argument: kind for argument, kind in types.items() if argument in kernel.arg_names}
    return AotCase.of(name, kernel, own, CONFIGS[0].kwargs, CONFIGS[0])
