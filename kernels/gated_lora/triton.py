"""Low-rank updates in one launch: both products of a tile of outputs, adapter by adapter.

A program makes the R inner numbers of its tokens anew for its own columns: they cost little beside
a second launch. Tiles of tokens are as small as tensor cores allow, for a step has few tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid.config import interprets_triton
from hybrid.errors import KernelUnavailableError
from hybrid.kernels import alloc
from hybrid.kernels.aot import AotCase
from hybrid.kernels.checks import require, require_dtype, require_tensor
from hybrid.kernels.launch import launch

BLOCK_N = 16
MAX_BLOCK_R = 64  # larger ranks are done in parts

CONFIGS = [
    triton.Config({"BLOCK_O": 64, "BLOCK_I": 32}, num_warps=4, num_stages=4),
    triton.Config({"BLOCK_O": 128, "BLOCK_I": 32}, num_warps=4, num_stages=4),
    triton.Config({"BLOCK_O": 32, "BLOCK_I": 32}, num_warps=4, num_stages=3),
]
# Without tensor cores a product keeps its operands in registers.
FLOAT32_CONFIGS = [triton.Config({"BLOCK_O": 32, "BLOCK_I": 16}, num_warps=8, num_stages=2)]


@triton.jit
def _gated_lora_kernel(
    base_ptr,  # [N, O]
    x_ptr,  # [N, I]
    a_ptr,  # [E, R, I]
    b_ptr,  # [E, O, R]
    ids_ptr,  # [N]
    out_ptr,  # [N, O]
    num_tokens,
    num_in,
    num_out,
    rank,
    num_adapters,
    BLOCK_N: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    o_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    m_n, m_o = o_n < num_tokens, o_o < num_out
    ids = tl.load(ids_ptr + o_n, mask=m_n, other=-1).to(tl.int32)
    ids = tl.where(ids < num_adapters, ids, -1)
    update = tl.zeros([BLOCK_N, BLOCK_O], tl.float32)
    # From the lowest to the highest adapter of these tokens: one turn if they have one.
    for adapter in range(tl.min(tl.where(ids < 0, num_adapters, ids)), tl.max(ids) + 1):
        m_own = ids == adapter
        if tl.max(m_own.to(tl.int32)) > 0:
            own = tl.zeros([BLOCK_N, BLOCK_O], tl.float32)
            for first in range(0, rank, BLOCK_R):
                o_r = first + tl.arange(0, BLOCK_R)
                m_r = o_r < rank
                inner = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
                for start in range(0, num_in, BLOCK_I):
                    o_i = start + tl.arange(0, BLOCK_I)
                    m_i = o_i < num_in
                    x = tl.load(  # [BLOCK_N, BLOCK_I]
                        x_ptr + o_n[:, None] * num_in + o_i[None, :],
                        mask=m_own[:, None] & m_i[None, :],
                        other=0.0,
                    )
                    a = tl.load(  # [BLOCK_I, BLOCK_R]
                        a_ptr + (adapter * rank + o_r[None, :]) * num_in + o_i[:, None],
                        mask=m_i[:, None] & m_r[None, :],
                        other=0.0,
                    )
                    inner = tl.dot(x, a, inner, input_precision="ieee")
                b = tl.load(  # [BLOCK_R, BLOCK_O]
                    b_ptr + (adapter * num_out + o_o[None, :]) * rank + o_r[:, None],
                    mask=m_r[:, None] & m_o[None, :],
                    other=0.0,
                )
                own = tl.dot(inner.to(b.dtype), b, own, input_precision="ieee")
            update = tl.where(m_own[:, None], own, update)
    p_out = o_n[:, None] * num_out + o_o[None, :]
    m_out = m_n[:, None] & m_o[None, :]
    base = tl.load(base_ptr + p_out, mask=m_out, other=0.0)
    out = tl.where(ids[:, None] < 0, base.to(tl.float32), base.to(tl.float32) + update)
    tl.store(out_ptr + p_out, out.to(out_ptr.dtype.element_ty), mask=m_out)


def gated_lora_triton(base: Tensor, x: Tensor, a: Tensor, b: Tensor, ids: Tensor) -> Tensor:
    """Return base with each token's update in it; see `gated_lora`.

    Raises:
        ConfigError: shapes, dtypes or devices do not match, or 2^31 numbers in a or b.
        KernelUnavailableError: bfloat16 in the interpreter, whose products of it are wrong.
    """
    require_dtype("gated_lora", "base", base)
    num_adapters, rank, num_in = a.shape
    num_tokens, num_out = base.shape
    shapes = {
        "base": (base, (num_tokens, num_out)),
        "x": (x, (num_tokens, num_in)),
        "a": (a, (num_adapters, rank, num_in)),
        "b": (b, (num_adapters, num_out, rank)),
    }
    # 64-bit addresses would cost a third more registers.
    largest = max(a.numel(), b.numel())
    require(largest < 2**31, "gated_lora", f"{largest} numbers in an adapter's half, at most 2^31.")
    for name, (tensor, shape) in shapes.items():
        require_tensor("gated_lora", name, tensor, shape, base.device)
        require_dtype("gated_lora", name, tensor, base.dtype)
    require_tensor("gated_lora", "ids", ids, (num_tokens,), base.device)
    if interprets_triton() and base.dtype == torch.bfloat16:
        raise KernelUnavailableError(
            "gated_lora: Triton's interpreter multiplies bfloat16 wrongly. Interpret it in float32 "
            "or float16, or use a GPU."
        )
    out = alloc.empty(base.shape, dtype=base.dtype, device=base.device)
    if out.numel():
        launch(
            _gated_lora_kernel,
            lambda meta: (triton.cdiv(num_tokens, BLOCK_N), triton.cdiv(num_out, meta["BLOCK_O"])),
            *(t.contiguous() for t in (base, x, a, b, ids)),
            out,
            num_tokens,
            num_in,
            num_out,
            rank,
            num_adapters,
            BLOCK_N=BLOCK_N,
            BLOCK_R=_block_r(rank),
            configs=FLOAT32_CONFIGS if base.dtype == torch.float32 else CONFIGS,
            key=("num_in", "num_out", "rank"),
        )
    return out


def _block_r(rank: int) -> int:
    """Return a whole tile of ranks: tensor cores take 16 at least."""
    return min(max(16, triton.next_power_of_2(rank)), MAX_BLOCK_R)


def aot_cases() -> list[AotCase]:
    """Return every configuration, at small and large ranks."""
    return [
        *(_case("bf16", rank, config) for config in CONFIGS for rank in (16, 64)),
        *(_case("fp32", rank, FLOAT32_CONFIGS[0]) for rank in (16, 64)),
    ]


def _case(dtype: str, rank: int, config: triton.Config) -> AotCase:
    types = dict.fromkeys(("base_ptr", "x_ptr", "a_ptr", "b_ptr", "out_ptr"), f"*{dtype}")
    return AotCase.of(
        f"{dtype}-R{rank}-O{config.kwargs['BLOCK_O']}",
        _gated_lora_kernel,
        {**types, "ids_ptr": "*i32"},
        {"BLOCK_N": BLOCK_N, "BLOCK_R": _block_r(rank), **config.kwargs},
        config,
        unaligned=("num_tokens", "num_adapters"),
        wants_mma=dtype == "bf16",
    )
