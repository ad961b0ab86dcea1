"""Norms, rotation and cache rows of a fused q, k, v product: a program has some heads of a token.

Each number is loaded twice, for itself and as the partner in the rotation of another; the second
load comes from the cache of the multiprocessor. In return any width of rotation is the same code.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hybrid.kernels import alloc
from hybrid.kernels.aot import AotCase
from hybrid.kernels.checks import require, require_dtype, require_tensor
from hybrid.kernels.launch import launch

# One only: the norms are sums, and another layout could sum in another order.
CONFIGS = [triton.Config({"BLOCK_H": 4}, num_warps=4)]


@triton.jit
def _qkv_rope_append_kernel(
    qkv_ptr,  # [N, (H + 2 G) D]
    cos_ptr,  # [N, D'/2]
    sin_ptr,  # [N, D'/2]
    q_weight_ptr,  # [D] or None
    k_weight_ptr,  # [D] or None
    q_scale_ptr,  # [N] or None
    rows_ptr,  # [N]
    slots_ptr,  # [N]
    query_ptr,  # [N, H, D]
    cache_ptr,  # [2, B, G, S, D]
    stride_half,
    stride_row,
    stride_group,
    stride_slot,
    eps,
    NUM_HEADS: tl.constexpr,  # H
    NUM_GROUPS: tl.constexpr,  # G
    HEAD_DIM: tl.constexpr,  # D
    HALF: tl.constexpr,  # D'/2
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_d = tl.arange(0, BLOCK_D)
    # The dimension that each is rotated with; one that is not rotated goes with itself.
    o_p = tl.where(o_d < HALF, o_d + HALF, tl.where(o_d < 2 * HALF, o_d - HALF, o_d))
    m_q, m_v = o_h < NUM_HEADS, o_h >= NUM_HEADS + NUM_GROUPS
    m_d = o_d < HEAD_DIM
    m_x = (o_h < NUM_HEADS + 2 * NUM_GROUPS)[:, None] & m_d[None, :]
    p_head = qkv_ptr + (i_n * (NUM_HEADS + 2 * NUM_GROUPS) + o_h)[:, None] * HEAD_DIM
    x = tl.load(p_head + o_d[None, :], mask=m_x, other=0.0).to(tl.float32)  # [BLOCK_H, BLOCK_D]
    own, partner = x, tl.load(p_head + o_p[None, :], mask=m_x, other=0.0).to(tl.float32)
    if q_weight_ptr is not None:
        q_own = tl.load(q_weight_ptr + o_d, mask=m_d, other=0.0).to(tl.float32)
        k_own = tl.load(k_weight_ptr + o_d, mask=m_d, other=0.0).to(tl.float32)
        q_partner = tl.load(q_weight_ptr + o_p, mask=m_d, other=0.0).to(tl.float32)
        k_partner = tl.load(k_weight_ptr + o_p, mask=m_d, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        own = own * factor * tl.where(m_q[:, None], q_own[None, :], k_own[None, :])
        partner = partner * factor * tl.where(m_q[:, None], q_partner[None, :], k_partner[None, :])
    m_turned = o_d < 2 * HALF
    p_angle = i_n * HALF + tl.where(o_d < HALF, o_d, o_d - HALF)
    cos = tl.load(cos_ptr + p_angle, mask=m_turned, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + p_angle, mask=m_turned, other=0.0).to(tl.float32)
    sin = tl.where(o_d < HALF, -sin, sin)
    out = own * cos[None, :] + partner * sin[None, :]
    if q_scale_ptr is not None:
        out = tl.where(m_q[:, None], out * tl.load(q_scale_ptr + i_n), out)
    out = tl.where(m_v[:, None], x, out)

    p_query = query_ptr + (i_n * NUM_HEADS + o_h)[:, None] * HEAD_DIM + o_d[None, :]
    tl.store(p_query, out.to(query_ptr.dtype.element_ty), mask=m_x & m_q[:, None])
    row = tl.load(rows_ptr + i_n).to(tl.int64)
    slot = tl.load(slots_ptr + i_n).to(tl.int64)
    i_half = m_v.to(tl.int64)
    i_group = o_h.to(tl.int64) - NUM_HEADS - i_half * NUM_GROUPS
    p_place = row * stride_row + slot * stride_slot + i_half * stride_half + i_group * stride_group
    # Heads of k and v, of a token that has a row.
    m_kept = m_x & (tl.minimum(o_h - NUM_HEADS, row) >= 0)[:, None]
    p_cache = cache_ptr + p_place[:, None] + o_d[None, :]
    tl.store(p_cache, out.to(cache_ptr.dtype.element_ty), mask=m_kept)


def qkv_rope_append_triton(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    rows: Tensor,
    slots: Tensor,
    *,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 1e-6,
    query_scale: Tensor | None = None,
) -> Tensor:
    """Return rotated queries, write keys and values; see `qkv_rope_append`.

    Raises:
        ConfigError: shapes or devices do not match.
    """
    _check(qkv, cos, sin, cache, rows, slots, norms, query_scale)
    num_tokens, num_groups, head_dim = len(qkv), cache.shape[2], cache.shape[4]
    num_heads = qkv.shape[1] // head_dim - 2 * num_groups
    out = alloc.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight = (None, None) if norms is None else (w.contiguous() for w in norms)
    if num_tokens:
        launch(
            _qkv_rope_append_kernel,
            lambda meta: (num_tokens, triton.cdiv(num_heads + 2 * num_groups, meta["BLOCK_H"])),
            *(t.contiguous() for t in (qkv, cos, sin)),
            q_weight,
            k_weight,
            None if query_scale is None else query_scale.contiguous(),
            rows.contiguous(),
            slots.contiguous(),
            out,
            cache,
            *cache.stride()[:4],
            eps,
            NUM_HEADS=num_heads,
            NUM_GROUPS=num_groups,
            HEAD_DIM=head_dim,
            HALF=cos.shape[1],
            BLOCK_D=triton.next_power_of_2(head_dim),
            configs=CONFIGS,
            key=(),
        )
    return out


def _check(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    rows: Tensor,
    slots: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    query_scale: Tensor | None,
) -> None:
    op, device = "qkv_rope_append", qkv.device
    found = f"the cache is {list(cache.shape)} with strides {list(cache.stride())}"
    is_layer = cache.dim() == 5 and cache.shape[0] == 2 and cache.stride(4) == 1
    require(is_layer, op, f"{found}, expected [2, B, G, S, D] with adjacent dimensions.")
    require_dtype(op, "qkv", qkv)
    num_groups, head_dim = cache.shape[2], cache.shape[4]
    num_tokens, width = qkv.shape
    heads, rest = divmod(width, head_dim)
    found = f"qkv is {num_tokens} rows of {width}, expected (H + 2 G) D of"
    fits = rest == 0 and heads > 2 * num_groups
    require(fits, op, f"{found} G = {num_groups} and D = {head_dim}.")
    half = cos.shape[-1]
    require(2 * half <= head_dim, op, f"cos has {half} angles, D is {head_dim}.")
    tensors = {
        "qkv": (qkv, (num_tokens, width)),
        "cos": (cos, (num_tokens, half)),
        "sin": (sin, (num_tokens, half)),
        "cache": (cache, tuple(cache.shape)),
        "rows": (rows, (num_tokens,)),
        "slots": (slots, (num_tokens,)),
    }
    if norms is not None:
        tensors |= {"norms[0]": (norms[0], (head_dim,)), "norms[1]": (norms[1], (head_dim,))}
    if query_scale is not None:
        tensors["query_scale"] = (query_scale, (num_tokens,))
    for name, (tensor, shape) in tensors.items():
        require_tensor(op, name, tensor, shape, device)


def aot_cases() -> list[AotCase]:
    """Return the head dimensions of common models, with and without norms and factors."""
    return [
        _case("bf16", 9, 3, 64, 32),
        _case("bf16", 32, 8, 128, 64),
        _case("bf16", 32, 8, 128, 64, has_scale=True),
        _case("bf16", 16, 8, 128, 64, has_norms=True),
        _case("bf16", 32, 32, 80, 16),
        _case("bf16", 8, 4, 256, 128, has_norms=True),
        _case("fp32", 16, 8, 128, 64, has_norms=True),
    ]


def _case(
    dtype: str,
    num_heads: int,
    num_groups: int,
    head_dim: int,
    half: int,
    *,
    has_norms: bool = False,
    has_scale: bool = False,
) -> AotCase:
    constexprs: dict[str, int | None] = {
        "NUM_HEADS": num_heads,
        "NUM_GROUPS": num_groups,
        "HEAD_DIM": head_dim,
        "HALF": half,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        **CONFIGS[0].kwargs,
    }
    if not has_norms:
        constexprs |= {"q_weight_ptr": None, "k_weight_ptr": None}
    if not has_scale:
        constexprs |= {"q_scale_ptr": None}
    extras = "-norms" * has_norms + "-scale" * has_scale
    names = ("qkv_ptr", "q_weight_ptr", "k_weight_ptr", "query_ptr", "cache_ptr")
    types = dict.fromkeys(names, f"*{dtype}") | dict.fromkeys(("rows_ptr", "slots_ptr"), "*i32")
    types |= dict.fromkeys(("cos_ptr", "sin_ptr", "q_scale_ptr"), "*fp32")
    return AotCase.of(
        f"{dtype}-H{num_heads}-G{num_groups}-D{head_dim}{extras}",
        _qkv_rope_append_kernel,
        {**types, "eps": "fp32"},
        constexprs,
        CONFIGS[0],
    )
