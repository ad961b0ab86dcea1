"""A linear layer in tiles that no count of rows decides.

A program owns a tile of tokens by a tile of outputs and walks along the input in order. Where the
outputs alone are too few programs, the input is divided into ranges, and a second kernel adds up
what they gave, in their order. Tiles and ranges follow from the shape and the dtype of the weight,
nothing is measured, and a token's tile is full of zeros where there are no other tokens.
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

# By bytes of an element. 64 tokens are the rows of one tensor-core product, so that up to 64 read
# the weight once and one costs no more. Without tensor cores every row costs: there it is 16.
CONFIGS = {
    2: triton.Config({"BLOCK_N": 64, "BLOCK_O": 128, "BLOCK_I": 64}, num_warps=4, num_stages=4),
    4: triton.Config({"BLOCK_N": 16, "BLOCK_O": 64, "BLOCK_I": 32}, num_warps=4, num_stages=2),
}
COMBINE = triton.Config({"BLOCK_O": 256}, num_warps=4, num_stages=1)
PROGRAMS = 128  # fewer tiles of outputs than this are divided along the input, about one per SM,
MIN_RANGE = 512  # into ranges of at least so many inputs
# Arguments that change from pass to pass: a kernel made for one value could sum differently.
COUNTS = ("num_tokens",)


@triton.jit(do_not_specialize=COUNTS)
def _linear_kernel(
    x_ptr,  # [N, I]
    weight_ptr,  # [O, I]
    bias_ptr,  # [O] or None
    out_ptr,  # [N, O]; of ranges [S, N, O] float32
    num_tokens,
    num_in,
    num_out,
    RANGE: tl.constexpr,  # inputs of one range; 0 if a program takes all
    BLOCK_N: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    # Neighbours share a tile of weights.
    first_n, first_o = tl.program_id(0).to(tl.int64) * BLOCK_N, tl.program_id(1) * BLOCK_O
    i_range = tl.program_id(2)
    o_n, o_o, o_i = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_I)
    m_n, m_o = first_n + o_n < num_tokens, first_o + o_o < num_out
    p_x = x_ptr + first_n * num_in + (o_n[:, None] * num_in + o_i[None, :])
    p_weight = weight_ptr + first_o.to(tl.int64) * num_in + (o_o[:, None] * num_in + o_i[None, :])
    begin, stop = 0, num_in
    if RANGE > 0:
        begin = i_range * RANGE
        stop = tl.minimum(begin + RANGE, num_in)
    acc = tl.zeros([BLOCK_N, BLOCK_O], tl.float32)
    for start in range(begin, stop, BLOCK_I):
        m_i = start + o_i < num_in
        # [BLOCK_N, BLOCK_I], [BLOCK_O, BLOCK_I]
        x = tl.load(p_x + start, mask=m_n[:, None] & m_i[None, :], other=0.0)
        weight = tl.load(p_weight + start, mask=m_o[:, None] & m_i[None, :], other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + first_o + o_o, mask=m_o, other=0.0).to(tl.float32)[None, :]
    row = i_range.to(tl.int64) * num_tokens + first_n + o_n
    p_out = out_ptr + row[:, None] * num_out + first_o + o_o[None, :]
    tl.store(p_out, acc.to(out_ptr.dtype.element_ty), mask=m_n[:, None] & m_o[None, :])


@triton.jit(do_not_specialize=COUNTS)
def _combine_kernel(
    partial_ptr,  # [S, N, O] float32
    bias_ptr,  # [O] or None
    out_ptr,  # [N, O]
    num_tokens,
    num_out,
    NUM_RANGES: tl.constexpr,  # S
    BLOCK_O: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    o_o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    m_o = o_o < num_out
    acc = tl.zeros([BLOCK_O], tl.float32)
    for i_range in tl.static_range(NUM_RANGES):
        p_part = partial_ptr + (i_range * num_tokens.to(tl.int64) + i_n) * num_out + o_o
        acc += tl.load(p_part, mask=m_o, other=0.0)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + o_o, mask=m_o, other=0.0).to(tl.float32)
    tl.store(out_ptr + i_n * num_out + o_o, acc.to(out_ptr.dtype.element_ty), mask=m_o)


def range_of(num_out: int, num_in: int, config: triton.Config) -> int:
    """Return how many inputs one program takes, by the shape of the weight alone."""
    block = config.kwargs["BLOCK_I"]
    num_tiles = triton.cdiv(max(num_out, 1), config.kwargs["BLOCK_O"])
    num_ranges = min(triton.cdiv(PROGRAMS, num_tiles), num_in // MIN_RANGE)
    size = triton.cdiv(num_in, max(num_ranges, 1))
    return max(triton.cdiv(size, block), 1) * block


def linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b; see `linear`.

    Raises:
        ConfigError: shapes, dtypes or devices do not match.
        KernelUnavailableError: bfloat16 in the interpreter, whose products of it are wrong.
    """
    _check(x, weight, bias)
    (num_tokens, num_in), num_out = x.shape, weight.shape[0]
    config = CONFIGS[x.element_size()]
    size = range_of(num_out, num_in, config)
    num_ranges = max(triton.cdiv(num_in, size), 1)
    out = alloc.empty((num_tokens, num_out), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    x, weight = (_aligned(t) for t in (x, weight))
    bias = None if bias is None else bias.contiguous()
    is_divided, into = num_ranges > 1, out
    if is_divided:
        shape = (num_ranges, num_tokens, num_out)
        into = alloc.empty(shape, dtype=torch.float32, device=x.device)
    launch(
        _linear_kernel,
        lambda meta: (
            triton.cdiv(num_tokens, meta["BLOCK_N"]),
            triton.cdiv(num_out, meta["BLOCK_O"]),
            num_ranges,
        ),
        x,
        weight,
        None if is_divided else bias,
        into,
        num_tokens,
        num_in,
        num_out,
        RANGE=size if is_divided else 0,
        configs=[config],
        key=(),
    )
    if is_divided:
        launch(
            _combine_kernel,
            lambda meta: (num_tokens, triton.cdiv(num_out, meta["BLOCK_O"])),
            into,
            bias,
            out,
            num_tokens,
            num_out,
            NUM_RANGES=num_ranges,
            configs=[COMBINE],
            key=(),
        )
    return out


def _aligned(tensor: Tensor) -> Tensor:
    """Return a tensor that begins at 16 bytes: no other kernel is made for one that does not."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    require(
        x.ndim == weight.ndim == 2,
        "linear",
        f"x is {list(x.shape)}, weight is {list(weight.shape)}, expected [N, I] and [O, I].",
    )
    require_dtype("linear", "x", x)
    num_out, num_in = weight.shape
    for name, tensor, shape in (
        ("x", x, (len(x), num_in)),
        ("weight", weight, (num_out, num_in)),
        ("bias", bias, (num_out,)),
    ):
        if tensor is not None:
            require_tensor("linear", name, tensor, shape, x.device)
            require_dtype("linear", name, tensor, x.dtype)
    if interprets_triton() and x.dtype == torch.bfloat16:
        raise KernelUnavailableError(
            "linear: Triton's interpreter multiplies bfloat16 wrongly. Interpret it in float32 or "
            "float16, or use a GPU."
        )


def aot_cases() -> list[AotCase]:
    """Return both tiles, undivided and in ranges, with and without a bias."""
    cases = [
        _case(dtype, width, is_divided)
        for dtype, width in (("bf16", 2), ("fp16", 2), ("fp32", 4))
        for is_divided in (False, True)
    ]
    for dtype in ("bf16", "fp32"):
        types = {"partial_ptr": "*fp32", "bias_ptr": f"*{dtype}", "out_ptr": f"*{dtype}"}
        constexprs = {"NUM_RANGES": 4, **COMBINE.kwargs}
        name = f"combine-{dtype}"
        cases.append(
            AotCase.of(name, _combine_kernel, types, constexprs, COMBINE, unaligned=COUNTS)
        )
    return cases


def _case(dtype: str, width: int, is_divided: bool) -> AotCase:
    config = CONFIGS[width]
    types = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "out_ptr"), f"*{dtype}")
    constexprs = {"RANGE": range_of(4096, 4096, config) if is_divided else 0, **config.kwargs}
    if is_divided:
        types["out_ptr"], constexprs["bias_ptr"] = "*fp32", None
    return AotCase.of(
        f"{dtype}-ranges" if is_divided else dtype,
        _linear_kernel,
        types,
        constexprs,
        config,
        unaligned=COUNTS,
        wants_mma=width == 2,
    )
