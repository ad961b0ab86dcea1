"""Philox uniform numbers: one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid.kernels import alloc
from hybrid.kernels.aot import AotCase
from hybrid.kernels.launch import launch

CONFIGS = [triton.Config({}, num_warps=1)]


@triton.jit(do_not_specialize=["count"])
def _philox_kernel(
    seeds_ptr,  # [B] int64
    offsets_ptr,  # [B] int64
    out_ptr,  # [B, count] float64
    count,
    BLOCK_N: tl.constexpr,
):
    i_b = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BLOCK_N)
    at = tl.load(offsets_ptr + i_b) + o_n
    low, high = (at & 0xFFFFFFFF).to(tl.uint32), ((at >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = low * 0
    first, second, _, _ = tl.philox(tl.load(seeds_ptr + i_b), low, high, zero, zero)
    # 27 and 26 bits: the 53 of a float64.
    number = (first >> 5).to(tl.float64) * 67108864.0 + (second >> 6).to(tl.float64)
    tl.store(out_ptr + i_b * count + o_n, number * 1.1102230246251565e-16, mask=o_n < count)


def philox_triton(seeds: Tensor, offsets: Tensor, count: int) -> Tensor:
    """Return uniform numbers; see `philox`, which has checked the arguments."""
    out = alloc.empty((len(seeds), count), dtype=torch.float64, device=seeds.device)
    if out.numel():
        launch(
            _philox_kernel,
            (len(seeds),),
            seeds.contiguous(),
            offsets.contiguous(),
            out,
            count,
            BLOCK_N=triton.next_power_of_2(count),
            configs=CONFIGS,
            key=(),
        )
    return out


def aot_cases() -> list[AotCase]:
    """Return the numbers of a step that drafts 15 tokens."""
    types = {"seeds_ptr": "*i64", "offsets_ptr": "*i64", "out_ptr": "*fp64"}
    tile = {"BLOCK_N": 16}
    return [AotCase.of("n16", _philox_kernel, types, tile, CONFIGS[0], unaligned=("count",))]
