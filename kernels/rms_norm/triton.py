"""RMS norm of a sum: one program per row, which it reads once and keeps."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hybrid.kernels import alloc
from hybrid.kernels.aot import AotCase
from hybrid.kernels.checks import require, require_dtype, require_tensor
from hybrid.kernels.launch import launch

MAX_WIDTH = 16384  # beyond it a row no longer fits the registers of one program

# Chosen by the width of a row and never by measuring: another number of warps sums in another
# order, and a row's bits would change from one run to the next.
CONFIGS = {
    2048: triton.Config({}, num_warps=4),
    8192: triton.Config({}, num_warps=8),
    MAX_WIDTH: triton.Config({}, num_warps=16),
}


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [N, C]
    residual_ptr,  # [N, C] or None
    weight_ptr,  # [C] or None
    out_ptr,  # [N, C]
    sum_ptr,  # [N, C], None without a residual
    width,  # C
    eps,
    BLOCK_C: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, BLOCK_C)
    m_c = o_c < width
    p_row = i_n * width + o_c
    total = tl.load(x_ptr + p_row, mask=m_c, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + p_row, mask=m_c, other=0.0)
        total = (total.to(tl.float32) + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + p_row, total, mask=m_c)
    wide = total.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    if weight_ptr is not None:
        normed = normed * tl.load(weight_ptr + o_c, mask=m_c, other=0.0).to(tl.float32)
    tl.store(out_ptr + p_row, normed.to(out_ptr.dtype.element_ty), mask=m_c)


def rms_norm_triton(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual and the sum itself; see `rms_norm`.

    Raises:
        ConfigError: shapes or devices do not match, or C is above `MAX_WIDTH`.
    """
    width = x.shape[-1]
    require_tensor("rms_norm", "x", x, tuple(x.shape), x.device)
    require_dtype("rms_norm", "x", x)
    require(0 < width <= MAX_WIDTH, "rms_norm", f"C is {width}, expected 1 to {MAX_WIDTH}.")
    if weight is not None:
        require_tensor("rms_norm", "weight", weight, (width,), x.device)
    total = x
    if residual is not None:
        require_tensor("rms_norm", "residual", residual, tuple(x.shape), x.device)
        require_dtype("rms_norm", "residual", residual, x.dtype)
        residual = residual.contiguous()
        total = alloc.empty(x.shape, dtype=x.dtype, device=x.device)
    out = alloc.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        launch(
            _rms_norm_kernel,
            (x.numel() // width,),
            x.contiguous(),
            residual,
            None if weight is None else weight.contiguous(),
            out,
            None if residual is None else total,
            width,
            eps,
            BLOCK_C=triton.next_power_of_2(width),
            configs=[_config(width)],
            key=(),
        )
    return out, total


def _config(width: int) -> triton.Config:
    return next(config for limit, config in CONFIGS.items() if width <= limit)


def aot_cases() -> list[AotCase]:
    """Return the widths of common models, with and without a sum."""
    return [
        _case(name, width, has_residual)
        for name, width in (("bf16", 576), ("bf16", 4096), ("bf16", MAX_WIDTH), ("fp32", MAX_WIDTH))
        for has_residual in (False, True)
    ]


def _case(dtype: str, width: int, has_residual: bool) -> AotCase:
    pointers = ("x_ptr", "weight_ptr", "out_ptr", "residual_ptr", "sum_ptr")
    constexprs: dict[str, int | None] = {"BLOCK_C": triton.next_power_of_2(width)}
    if not has_residual:
        constexprs |= {"residual_ptr": None, "sum_ptr": None}
    return AotCase.of(
        f"{dtype}-C{width}" + ("-sum" if has_residual else ""),
        _rms_norm_kernel,
        {**dict.fromkeys(pointers, f"*{dtype}"), "eps": "fp32"},
        constexprs,
        _config(width),
    )
