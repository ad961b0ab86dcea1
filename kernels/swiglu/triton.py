"""The gate of an MLP, element by element."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hybrid.kernels import alloc
from hybrid.kernels.aot import AotCase
from hybrid.kernels.checks import require, require_dtype, require_tensor
from hybrid.kernels.launch import launch

# No sum in it: whichever is fastest gives the same bits.
CONFIGS = [
    triton.Config({"BLOCK_I": 1024}, num_warps=4),
    triton.Config({"BLOCK_I": 512}, num_warps=4),
    triton.Config({"BLOCK_I": 2048}, num_warps=8),
]


@triton.jit
def _swiglu_kernel(
    gate_up_ptr,  # [N, 2 I]
    out_ptr,  # [N, I]
    width,  # I
    BLOCK_I: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    o_i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    m_i = o_i < width
    p_gate = gate_up_ptr + i_n * 2 * width + o_i
    gate = tl.load(p_gate, mask=m_i, other=0.0).to(tl.float32)
    up = tl.load(p_gate + width, mask=m_i, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + i_n * width + o_i, out.to(out_ptr.dtype.element_ty), mask=m_i)


def swiglu_triton(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up; see `swiglu`.

    Raises:
        ConfigError: not a matrix of an even width.
    """
    shape = tuple(gate_up.shape)
    found = f"gate_up is {list(shape)}, expected [N, 2 I]."
    require(len(shape) == 2 and shape[1] % 2 == 0, "swiglu", found)
    require_tensor("swiglu", "gate_up", gate_up, shape, gate_up.device)
    require_dtype("swiglu", "gate_up", gate_up)
    num_tokens, width = shape[0], shape[1] // 2
    out = alloc.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        launch(
            _swiglu_kernel,
            lambda meta: (num_tokens, triton.cdiv(width, meta["BLOCK_I"])),
            gate_up.contiguous(),
            out,
            width,
            configs=CONFIGS,
            key=("width",),
        )
    return out


def aot_cases() -> list[AotCase]:
    """Return every configuration, and float32."""
    return [_case("bf16", config) for config in CONFIGS] + [_case("fp32", CONFIGS[0])]


def _case(dtype: str, config: triton.Config) -> AotCase:
    types = dict.fromkeys(("gate_up_ptr", "out_ptr"), f"*{dtype}")
    name = f"{dtype}-I{config.kwargs['BLOCK_I']}"
    return AotCase.of(name, _swiglu_kernel, types, config.kwargs, config)
