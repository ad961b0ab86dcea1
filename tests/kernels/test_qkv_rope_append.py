"""qkv_rope_append against transformers' rotation, a float64 twin, and the backbone's own way."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tolerances import assert_as_close_as_torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hybrid.errors import ConfigError
from hybrid.kernels import dispatch
from hybrid.kernels.qkv_rope_append import qkv_rope_append

# Triton's interpreter computes wrongly in bfloat16.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
EPS = 1e-6
SHAPES = [  # tokens, query heads, kv heads, head dim, rotated dims
    (1, 1, 1, 2, 2),
    (3, 9, 3, 64, 64),
    (2, 4, 1, 80, 32),  # part of the head
    (5, 6, 2, 96, 96),
    (1, 8, 8, 63, 30),
    (2, 3, 2, 128, 128),
    (1, 2, 1, 16, 0),
    (2, 4, 2, 256, 256),
]


class Case:
    """Inputs of one call; every place of the cache that it must not touch holds 7."""

    def __init__(self, shape, dtype, device, has_norms=False, has_scale=False):
        num_tokens, heads, groups, dim, rotated = shape
        generator = torch.Generator().manual_seed(sum(shape))

        def draw(*size):
            return torch.randn(size, generator=generator)

        self.qkv = draw(num_tokens, (heads + 2 * groups) * dim).to(device, dtype)
        angles = 100 * draw(num_tokens, rotated // 2)
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)
        num_slots = max(16, num_tokens)
        self.cache = torch.full((2, 3, groups, num_slots, dim), 7.0).to(device, dtype)
        places = torch.randperm(3 * num_slots, generator=generator)[:num_tokens]
        self.rows, self.slots = (t.to(device) for t in (places // num_slots, places % num_slots))
        weights = [(1 + draw(dim) / 4).to(device, dtype) for _ in range(2)]
        self.norms = tuple(weights) if has_norms else None
        self.scale = (1 + draw(num_tokens).abs()).to(device) if has_scale else None

    def __call__(self, implementation):
        """Return the queries and the cache."""
        cache = self.cache.clone()
        with dispatch.force("qkv_rope_append", implementation):
            query = qkv_rope_append(
                self.qkv,
                self.cos,
                self.sin,
                cache,
                self.rows,
                self.slots,
                norms=self.norms,
                eps=EPS,
                query_scale=self.scale,
            )
        assert dispatch.last("qkv_rope_append") == implementation
        return query, cache

    def twin(self, dtype):
        """The same step by step in one dtype, rounded at every step, as eager code does."""
        groups, dim = self.cache.shape[2], self.cache.shape[4]
        heads = self.qkv.to(dtype).view(len(self.qkv), -1, dim)
        query, key, value = heads.split([heads.shape[1] - 2 * groups, groups, groups], dim=1)
        if self.norms is not None:
            query, key = (
                F.rms_norm(t, (dim,), w.to(dtype), EPS)
                for t, w in zip((query, key), self.norms, strict=True)
            )
        cos, sin = (torch.cat([t, t], dim=-1).to(dtype) for t in (self.cos, self.sin))
        width = cos.shape[1]
        turned = apply_rotary_pos_emb(
            query[None, ..., :width].transpose(1, 2),
            key[None, ..., :width].transpose(1, 2),
            cos[None],
            sin[None],
        )
        query, key = (
            torch.cat([t[0].transpose(0, 1), whole[..., width:]], dim=-1)
            for t, whole in zip(turned, (query, key), strict=True)
        )
        if self.scale is not None:
            query = query * self.scale.to(dtype)[:, None, None]
        cache = self.cache.to(dtype)
        for token, (row, slot) in enumerate(
            zip(self.rows.tolist(), self.slots.tolist(), strict=True)
        ):
            cache[0, row, :, slot], cache[1, row, :, slot] = key[token], value[token]
        return query, cache


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("extras", ["", "norms", "scale", "norms scale"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "N{}-H{}-G{}-D{}-R{}".format(*s))
def test_kernel_is_as_close_as_torch(shape, extras, dtype, device):
    assert_as_close(Case(shape, dtype, device, "norms" in extras, "scale" in extras))


@pytest.mark.parametrize("num_tokens", [63, 65, 127])
def test_many_tokens(num_tokens, device):
    assert_as_close(Case((num_tokens, 3, 1, 8, 4), torch.float16, device, True, True))


def assert_as_close(case):
    dtype = case.qkv.dtype
    for got, same, want in zip(
        case("triton"), case.twin(dtype), case.twin(torch.float64), strict=True
    ):
        assert_as_close_as_torch(got, same, want)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "N{}-H{}-G{}-D{}-R{}".format(*s))
def test_reference_is_the_twin(shape):
    case = Case(shape, torch.float32, "cpu", has_norms=True, has_scale=True)
    for got, want in zip(case("reference"), case.twin(torch.float32), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_by_hand(implementation, device):
    """A quarter turn: (1, 2) becomes (-2, 1), what lies beyond is not turned, v never."""
    qkv = torch.tensor([[1.0, 2.0, 5.0, 3.0, 4.0, 6.0, 8.0, 9.0, 10.0]], device=device)
    cos, sin = torch.zeros(1, 1, device=device), torch.ones(1, 1, device=device)
    cache = torch.zeros(2, 1, 1, 2, 3, device=device)
    row, slot = (torch.tensor([i], device=device) for i in (0, 1))
    with dispatch.force("qkv_rope_append", implementation):
        query = qkv_rope_append(qkv, cos, sin, cache, row, slot)
    assert query.tolist() == [[[-2.0, 1.0, 5.0]]]
    expected = [[[[[0.0] * 3, [-4.0, 3.0, 6.0]]]], [[[[0.0] * 3, [8.0, 9.0, 10.0]]]]]
    assert cache.tolist() == expected


def test_values_and_untouched_places_keep_their_bits(device):
    case = Case((4, 4, 2, 16, 16), torch.float16, device, has_norms=True)
    _, cache = case("triton")
    values = case.qkv.view(4, 8, 16)[:, 6:]
    assert torch.equal(cache[1, case.rows, :, case.slots], values)
    cache[:, case.rows, :, case.slots] = 7.0
    assert torch.equal(cache, case.cache)


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_a_token_without_a_row_is_only_rotated(implementation, device):
    case = Case((4, 4, 2, 16, 16), torch.float32, device)
    query, whole = case(implementation)
    row, slot = int(case.rows[2]), int(case.slots[2])
    case.rows[2] = -1
    without, cache = case(implementation)
    assert torch.equal(without, query)
    assert (cache[:, row, :, slot] == 7.0).all()
    cache[:, row, :, slot] = whole[:, row, :, slot]
    assert torch.equal(cache, whole)


@pytest.mark.parametrize("has_norms", [False, True])
def test_a_tokens_bits_are_its_own(has_norms, device):
    case = Case((5, 3, 1, 64, 64), torch.float32, device, has_norms=has_norms)
    query, cache = case("triton")
    for token in range(5):
        own = slice(token, token + 1)
        alone = Case((5, 3, 1, 64, 64), torch.float32, device, has_norms=has_norms)
        alone.qkv, alone.cos, alone.sin = case.qkv[own], case.cos[own], case.sin[own]
        alone.rows, alone.slots = case.rows[own], case.slots[own]
        own_query, own_cache = alone("triton")
        assert torch.equal(own_query[0], query[token])
        place = (slice(None), int(case.rows[token]), slice(None), int(case.slots[token]))
        assert torch.equal(own_cache[place], cache[place])


def test_one_layer_of_a_cache_and_pages(device):
    """Strides are the cache's: a layer of [L, 2, B, G, S, D], and pages instead of rows."""
    case = Case((3, 4, 2, 16, 16), torch.float32, device)
    _, expected = case("triton")
    layers = torch.full((4, *case.cache.shape), 7.0, device=device)
    pages = torch.full((3, 2, 2, 16, 16), 7.0, device=device)  # [pages, 2, G, S, D]
    for cache in (layers[2], pages.transpose(0, 1)):
        with dispatch.force("qkv_rope_append", "triton"):
            qkv_rope_append(case.qkv, case.cos, case.sin, cache, case.rows, case.slots)
        assert torch.equal(cache, expected)
    assert (layers[[0, 1, 3]] == 7.0).all()


def test_nothing_in_nothing_out(device):
    case = Case((1, 4, 2, 16, 16), torch.float32, device)
    for name in ("qkv", "cos", "sin", "rows", "slots"):
        setattr(case, name, getattr(case, name)[:0])
    query, cache = case("triton")
    assert query.shape == (0, 4, 16)
    assert torch.equal(cache, case.cache)


def test_refuses(device):
    case = Case((2, 4, 2, 16, 16), torch.float32, device)
    qkv, cos, sin, cache, rows, slots = (
        case.qkv,
        case.cos,
        case.sin,
        case.cache,
        case.rows,
        case.slots,
    )
    for args, extras, message in [
        ((qkv[:, :70], cos, sin, cache, rows, slots), {}, "qkv is 2 rows of 70"),
        ((qkv[:, :64], cos, sin, cache, rows, slots), {}, "qkv is 2 rows of 64"),
        ((qkv, cos, sin[:, :4], cache, rows, slots), {}, "sin is \\[2, 4\\]"),
        ((qkv, cos, sin, cache[0], rows, slots), {}, "expected \\[2, B, G, S, D\\]"),
        ((qkv, cos, sin, cache.mT.contiguous().mT, rows, slots), {}, "adjacent"),
        ((qkv, cos, sin, cache, rows[:1], slots), {}, "rows is \\[1\\]"),
        ((qkv, cos, sin, cache, rows, slots), {"query_scale": cos[0]}, "query_scale is \\[8\\]"),
        ((qkv, cos, sin, cache, rows, slots), {"norms": (cos[0], cos[0])}, "norms\\[0\\]"),
        ((qkv, cos.repeat(1, 2), sin, cache, rows, slots), {}, "cos has 16 angles, D is 16"),
        ((qkv.clone().requires_grad_(), cos, sin, cache, rows, slots), {}, "qkv requires a grad"),
        (
            (qkv, cos, sin, cache, rows, slots),
            {"norms": (torch.ones(16, device=device, requires_grad=True),) * 2},
            "norms\\[0\\] requires a gradient",
        ),
    ]:
        with (
            dispatch.force("qkv_rope_append", "triton"),
            pytest.raises(ConfigError, match=message),
        ):
            qkv_rope_append(*args, **extras)
    assert math.isclose(float(cache.sum()), 7.0 * cache.numel())
