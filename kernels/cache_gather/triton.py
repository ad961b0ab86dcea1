"""Kept positions of a cache, packed together in place: one program per layer, half, head and row.

Offsets ascend, so the k-th is at least k: what a tile of positions writes lies before whatever
later tiles read, and within a tile everything is read before anything is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid.kernels.aot import AotCase
from hybrid.kernels.checks import require, require_tensor
from hybrid.kernels.launch import launch

# One only: moving again what has been moved, to measure it, would spoil the cache.
CONFIGS = [triton.Config({"BLOCK_M": 16}, num_warps=4)]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _cache_gather_kernel(
    data_ptr,  # [L, 2, B, G, S, D] as integers
    rows_ptr,  # [R]
    starts_ptr,  # [R]
    keep_ptr,  # [R, M]
    width,  # M
    num_rows,  # B
    num_groups,  # G
    num_slots,  # S
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_half, i_r = tl.program_id(0).to(tl.int64) // num_groups, tl.program_id(1)
    i_g = tl.program_id(0) % num_groups
    row = tl.load(rows_ptr + i_r).to(tl.int64)
    start = tl.load(starts_ptr + i_r).to(tl.int64)
    p_start = data_ptr + (((i_half * num_rows + row) * num_groups + i_g) * num_slots + start) * (
        HEAD_DIM
    )
    o_d = tl.arange(0, BLOCK_D)
    for first in range(0, width, BLOCK_M):
        o_m = first + tl.arange(0, BLOCK_M)
        kept = tl.load(keep_ptr + i_r * width + o_m, mask=o_m < width, other=-1).to(tl.int64)
        # What is in its place already is not touched.
        m_move = (kept > o_m)[:, None] & (o_d < HEAD_DIM)[None, :]
        states = tl.load(p_start + kept[:, None] * HEAD_DIM + o_d[None, :], mask=m_move)
        tl.debug_barrier()
        tl.store(p_start + o_m[:, None] * HEAD_DIM + o_d[None, :], states, mask=m_move)
        tl.debug_barrier()


def cache_gather_triton(data: Tensor, rows: Tensor, starts: Tensor, keep: Tensor) -> None:
    """Move each row's kept positions to its start; see `cache_gather`.

    Raises:
        ConfigError: shapes or devices do not match, or the cache is not contiguous.
    """
    found = f"data is {list(data.shape)} with strides {list(data.stride())}"
    is_whole = data.dim() == 6 and data.shape[1] == 2 and data.is_contiguous()
    require(is_whole, "cache_gather", f"{found}, expected a whole [L, 2, B, G, S, D].")
    num_layers, _, num_rows, num_groups, num_slots, head_dim = data.shape
    num_moved, width = len(rows), keep.shape[-1]
    require_tensor("cache_gather", "rows", rows, (num_moved,), data.device)
    require_tensor("cache_gather", "starts", starts, (num_moved,), data.device)
    require_tensor("cache_gather", "keep", keep, (num_moved, width), data.device)
    if num_moved and width and data.numel():
        launch(
            _cache_gather_kernel,
            (num_layers * 2 * num_groups, num_moved),
            data.view(_BITS[data.itemsize]),
            rows.contiguous(),
            starts.contiguous(),
            keep.contiguous(),
            width,
            num_rows,
            num_groups,
            num_slots,
            HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            configs=CONFIGS,
            key=(),
        )


def aot_cases() -> list[AotCase]:
    """Return common head dimensions, and numbers of every size that a cache has."""
    shapes = (("i16", 64), ("i16", 80), ("i16", 256), ("i32", 128), ("i64", 128))
    return [_case(*shape) for shape in shapes]


def _case(dtype: str, head_dim: int) -> AotCase:
    types = dict.fromkeys(("rows_ptr", "starts_ptr", "keep_ptr"), "*i64")
    block = {"HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim)}
    return AotCase.of(
        f"{dtype}-D{head_dim}",
        _cache_gather_kernel,
        {**types, "data_ptr": f"*{dtype}"},
        {**block, **CONFIGS[0].kwargs},
        CONFIGS[0],
        # `KVCache.gather` copies all its numbers at once: the start lies behind the row.
        unaligned=("starts_ptr", "width", "num_rows", "num_groups"),
    )
