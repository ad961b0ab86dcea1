"""hybrid_attention against the float64 twin of block_attention, under the masks of every mode."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tolerances import assert_as_close_as_torch

from hybrid.attention.pattern import bidirectional, block_causal, causal, groups, padded, tree
from hybrid.errors import ConfigError, KernelUnavailableError
from hybrid.kernels import dispatch
from hybrid.kernels.block_attention import dense_mask_attention
from hybrid.kernels.hybrid_attention import Visible, hybrid_attention
from hybrid.kernels.hybrid_attention.visible import pack

DTYPES = [torch.float32, torch.float16]
DTYPES += [torch.bfloat16] if torch.cuda.is_available() else []  # wrong in the interpreter
IMPLEMENTATIONS = ["triton", "reference"]
PATTERNS = {
    "causal": causal,
    "bidirectional": bidirectional,
    "blocks": lambda prefix, t: block_causal(prefix, t, 3, 1),
    "tree": lambda prefix, t: tree(prefix, [(i - 1) // 2 if i else -1 for i in range(t)]),
    "padded": lambda prefix, t: padded(causal(prefix, t), [max(t - 2 * i, 1) for i in range(2)]),
}
SHAPES = [  # prefixes of two rows, new tokens, query heads, kv heads, head dim
    ((0, 1), 1, 1, 1, 64),
    ((0, 63), 7, 3, 1, 64),
    ((65, 3), 33, 4, 2, 16),
    ((127, 64), 3, 6, 2, 80),
    ((513, 505), 5, 4, 2, 64),  # two ranges of positions, the second row's new tokens in the first
    ((0, 7), 63, 1, 1, 16),
    ((30, 0), 65, 3, 1, 16),
    ((520, 1), 127, 2, 2, 16),
]


class Case:
    """Two rows (or more) of a cache full of NaN but for what they may read."""

    def __init__(self, pattern, heads, kv_heads, dim, dtype, *, start=None, rows=None, scale=1.0):
        generator = torch.Generator().manual_seed(0)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.pattern, num_tokens = pattern, pattern.num_tokens
        batch = len(pattern.prefix_len)
        prefixes = [pattern.row_prefix(row) for row in range(batch)]
        self.start = list(start or prefixes)
        self.rows = list(rows or reversed(range(batch)))
        shape = (2, max(self.rows) + 1, kv_heads, max(self.start) + num_tokens + 9, dim)
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        cache = torch.full_like(values, float("nan"))
        for row, prefix, first in zip(self.rows, prefixes, self.start, strict=True):
            for part in (slice(0, prefix), slice(first, first + num_tokens)):
                cache[:, row, :, part] = values[:, row, :, part]
        cache[0] *= scale
        query = torch.randn(batch, num_tokens, heads + 3, dim, generator=generator)
        self.query = query.to(self.device, dtype)[:, :, :heads]  # a slice of a fused product
        self.key, self.value = cache.to(self.device, dtype)

    def visible(self, **changes):
        p = self.pattern
        given = {
            "start": self.start,
            "rows": self.rows,
            "is_causal": p.is_causal,
            "is_full": p.is_full,
            "positions": p.positions,
            "device": self.device,
        }
        return Visible.build(p.prefix_len, p.local, **{**given, **changes})

    def masks(self, window=None):
        """Each row's dense mask, by the pattern itself."""
        for row, first in enumerate(self.start):
            mask = self.pattern.row_mask(row, window=window, prefix_width=first)
            width = first + self.pattern.num_tokens
            yield torch.ones(self.pattern.num_tokens, width, dtype=bool) if mask is None else mask

    def _each(self, compute, window, dtype):
        outs = []
        for row, mask in enumerate(self.masks(window)):
            key, value = (
                t[self.rows[row], :, : mask.shape[1]].to(dtype).nan_to_num()
                for t in (self.key, self.value)
            )
            outs.append(compute(self.query[row].to(dtype), key, value, mask.to(self.device)))
        return torch.stack(outs).view(self.query.shape)

    def twin(self, window=None):
        return self._each(dense_mask_attention, window, torch.float64)

    def by_torch(self, window=None):
        def compute(query, key, value, mask):
            key, value = (t.repeat_interleave(query.shape[1] // len(key), 0) for t in (key, value))
            out = F.scaled_dot_product_attention(query.transpose(0, 1), key, value, attn_mask=mask)
            return out.transpose(0, 1)

        return self._each(compute, window, self.query.dtype)

    def run(self, implementation="triton", visible=None, **options):
        with dispatch.force("hybrid_attention", implementation):
            out = hybrid_attention(
                self.query, self.key, self.value, visible or self.visible(), **options
            )
        assert dispatch.last("hybrid_attention") == implementation
        assert out.dtype == self.query.dtype
        return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "P{}-T{}-H{}-G{}-D{}".format(*s))
def test_equals_the_twin(shape, name, dtype):
    prefixes, num_tokens, heads, kv_heads, dim = shape
    case = Case(PATTERNS[name](prefixes, num_tokens), heads, kv_heads, dim, dtype)
    twin, by_torch = case.twin(), case.by_torch()
    for implementation in IMPLEMENTATIONS:
        assert_as_close_as_torch(case.run(implementation), by_torch, twin)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["causal", "tree"])
@pytest.mark.parametrize(
    ("prefixes", "num_tokens"),
    [([5], 1024), ([8200, 0], 2)],  # 17 ranges: more than are added up at a time
    ids=["many new", "many cached"],
)
def test_long(prefixes, num_tokens, name, dtype):
    case = Case(PATTERNS[name](prefixes, num_tokens), 1, 1, 16, dtype)
    assert_as_close_as_torch(case.run(), case.by_torch(), case.twin())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["causal", "tree"])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_head_dims(dim, name, dtype):
    case = Case(PATTERNS[name]([530, 1], 4), 2, 1, dim, dtype)
    assert_as_close_as_torch(case.run(), case.by_torch(), case.twin())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("prefixes", "num_tokens"), [((100, 7), 37), ((560, 0), 5)], ids=["one range", "two"]
)
@pytest.mark.parametrize("window", [1, 20, 64, 5000])
def test_sliding_window(window, prefixes, num_tokens, implementation):
    case = Case(causal(prefixes, num_tokens), 4, 2, 16, torch.float32)
    out = case.run(implementation, window=window)
    assert_as_close_as_torch(out, case.by_torch(window), case.twin(window))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, 6])
def test_slots_that_ride_behind_the_targets_tokens(implementation, window):
    """Each group sees what is cached and those of the target's 4 tokens that it takes for true."""
    pattern = groups([[70, 71, 74], [3, 4, 7]], 4)
    case = Case(pattern, 4, 2, 16, torch.float32, start=[74, 7])
    out = case.run(implementation, window=window)
    assert_as_close_as_torch(out, case.by_torch(window), case.twin(window))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_part_of_the_cache_is_hidden_and_never_read(implementation):
    """Between the prefix and the new tokens' keys the cache is NaN."""
    case = Case(bidirectional([40, 0], 5), 4, 2, 16, torch.float32, start=[640, 129])
    assert_as_close_as_torch(case.run(implementation), case.by_torch(), case.twin())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_refreshed_positions_lie_in_the_prefix(implementation):
    case = Case(bidirectional([77, 5], 6), 4, 2, 16, torch.float32)
    visible = Visible.build(
        [77, 5], None, start=[77, 5], rows=case.rows, num_tokens=6, device=case.device
    )
    out = case.run(implementation, visible)
    for row, length in enumerate([77, 5]):
        keys, values = (t[case.rows[row], :, :length].cpu() for t in (case.key, case.value))
        everything = torch.ones(6, length, dtype=torch.bool)
        twin = dense_mask_attention(case.query[row].cpu(), keys, values, everything)
        got = out[row].flatten(1).cpu().double()
        torch.testing.assert_close(got, twin, rtol=0, atol=2e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_token_that_sees_nothing_gets_zeros(implementation):
    pattern = causal([0, 0], 3)
    local = pattern.local.clone()
    local[1] = False
    case = Case(pattern, 2, 1, 16, torch.float32)
    visible = Visible.build([0, 0], local, start=[0, 0], rows=[0, 1], device=case.device)
    out = case.run(implementation, visible)
    assert (out[:, 1] == 0).all()
    assert (out[:, [0, 2]] != 0).all()
    assert out.isfinite().all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("prefix", "window"), [(40, None), (560, 64), (0, 2)])
def test_softcap_and_scale(prefix, window, implementation):
    case = Case(causal([prefix], 3), 2, 1, 16, torch.float32, rows=[0], scale=4.0)
    out = case.run(implementation, softcap=3.0, scale=0.5, window=window)
    (mask,) = case.masks(window)
    query = case.query[0].double().cpu().transpose(0, 1)
    keys, values = (t[0, :, : prefix + 3].double().cpu() for t in (case.key, case.value))
    scores = 3.0 * torch.tanh(query @ keys.transpose(1, 2) * 0.5 / 3.0)
    weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1)
    expected = (weights @ values).transpose(0, 1)[None]
    assert_as_close_as_torch(out.cpu(), expected.float(), expected)
    assert not torch.allclose(out, case.run(implementation, scale=0.5, window=window), atol=1e-2)


def test_pages_in_any_order_give_the_same_bits():
    case = Case(causal([70, 530], 5), 4, 2, 16, torch.float32)
    expected = case.run()
    size = 16
    num_pages = -(-case.key.shape[2] // size)
    padded_pair = [
        F.pad(t, (0, 0, 0, num_pages * size - t.shape[2])) for t in (case.key, case.value)
    ]
    order = torch.randperm(2 * num_pages, generator=torch.Generator().manual_seed(1))
    pool = []
    for cache in padded_pair:
        pages = cache.unflatten(2, (num_pages, size)).transpose(1, 2).flatten(0, 1)
        scattered = torch.full_like(pages, float("nan"))
        scattered[order] = pages
        pool.append(scattered)
    # Only the pages that a row has; the second row's list is longer.
    tables = [
        order[row * num_pages : row * num_pages + -(-(start + 5) // size)].tolist()
        for row, start in zip(case.rows, case.start, strict=True)
    ]
    visible = case.visible(rows=None, pages=tables)
    case.key, case.value = pool
    assert torch.equal(case.run("triton", visible), expected)
    assert_as_close_as_torch(case.run("reference", visible), expected, expected.double())


@pytest.mark.parametrize("first", [60, 508])
def test_a_tokens_bits_are_its_own(first, monkeypatch):
    """Alone as in AR decoding or in a verify pass, across a tile's end and across a range's.

    A tensor core computes a row by itself; the interpreter's matrix product, a CPU library's, sums
    in another order by the row's place. So here it is done row by row.
    """
    if not torch.cuda.is_available():
        monkeypatch.setattr("numpy.matmul", lambda a, b, dtype: np.stack([row @ b for row in a]))
    case = Case(causal([first], 8), 3, 1, 64, torch.float32, rows=[0])
    together = case.run()
    query = case.query
    for token in range(8):
        case.query = query[:, token : token + 1]
        alone = Visible.build(
            [first + token], torch.ones(1, 1, dtype=torch.bool), start=[first + token], rows=[0],
            is_causal=True, device=case.device,
        )  # fmt: skip
        assert torch.equal(case.run("triton", alone)[0, 0], together[0, token]), f"token {token}"


def test_a_wide_pass_has_the_bits_of_narrow_ones_if_asked(monkeypatch):
    """33 tokens whose keys end in the second range: alone, and with one program for all keys."""
    if not torch.cuda.is_available():
        monkeypatch.setattr("numpy.matmul", lambda a, b, dtype: np.stack([row @ b for row in a]))
    case = Case(causal([520], 33), 1, 1, 16, torch.float32, rows=[0])
    wide, undivided = case.run(by_position=True), case.run()
    query, differ = case.query, False
    for token in (0, 32):
        case.query = query[:, token : token + 1]
        alone = Visible.build(
            [520 + token], torch.ones(1, 1, dtype=torch.bool), start=[520 + token], rows=[0],
            is_causal=True, device=case.device,
        )  # fmt: skip
        own = case.run("triton", alone)[0, 0]
        assert torch.equal(own, wide[0, token]), f"token {token}"
        differ |= not torch.equal(own, undivided[0, token])
    assert differ, "the test would not see a difference"


# Of a key that is masked: its weight is set to 0 afterwards.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
def test_extreme_scores():
    case = Case(causal([30, 70], 5), 4, 2, 16, torch.float16, scale=200.0)
    assert_as_close_as_torch(case.run(), case.by_torch(), case.twin())


def test_bfloat16_is_computed_in_float32_where_it_is_interpreted():
    """A GPU rounds to nearest; the interpreter cuts, so it may be off by one unit."""
    case = Case(causal([30, 70], 5), 4, 2, 16, torch.bfloat16)
    torch.testing.assert_close(case.run().double(), case.twin(), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 65])
def test_bits(num_tokens):
    local = torch.rand(num_tokens, num_tokens, generator=torch.Generator().manual_seed(2)) < 0.5
    local[0, -1] = True
    words = pack(local)
    assert words.shape == (1, num_tokens, -(-num_tokens // 32))
    for query in range(num_tokens):
        for key in range(num_tokens):
            word = int(words[0, query, key // 32]) % 2**32
            assert bool(word >> key % 32 & 1) == bool(local[query, key])


def test_what_does_not_fit_is_refused():
    case = Case(causal([3, 4], 2), 4, 2, 16, torch.float32)
    with pytest.raises(ConfigError, match=r"prefixes of 3 to 3 positions, expected at most 2"):
        case.visible(start=[2, 4])
    with pytest.raises(ConfigError, match="expected one"):
        case.visible(pages=[[0], [1]])
    with pytest.raises(ConfigError, match="scale is -1"):
        case.run(scale=-1.0)
    with pytest.raises(ConfigError, match="softcap is 0"):
        case.run(softcap=0.0)
    with pytest.raises(ConfigError, match="a row has 92 keys, the cache has room for 15"):
        case.run("triton", case.visible(start=[3, 90]))
    visible, query, key = case.visible(), case.query, case.key
    for wrong, message in [
        (key[..., :8], r"key is \[2, 2, 15, 8\] on .*, expected \[2, 2, 15, 16\]"),
        (key[0], r"key is \[2, 15, 16\]: expected \[B, T, H, D\] and \[rows, G, S, D\]"),
        (key[:1], r"value is \[2, 2, 15, 16\] on .*, expected \[1, 2, 15, 16\]"),
        (key.half(), r"key is torch.float16, expected torch.float32"),
    ]:
        case.key = wrong
        with pytest.raises(ConfigError, match=message):
            case.run("triton", visible)
    case.key = key
    for name in ("query", "key", "value"):
        given = getattr(case, name)
        setattr(case, name, given.clone().requires_grad_())
        with pytest.raises(ConfigError, match=f"{name} requires a gradient"):
            case.run("triton", visible)
        setattr(case, name, given)
    case.query = query[:1]
    with pytest.raises(ConfigError, match=r"visible.prefix is \[2, 2\]"):
        case.run("triton", visible)
    case.query = query.half()
    with pytest.raises(ConfigError, match=r"key is torch.float32"):
        case.run("triton", visible)
    case.query = query[:, :, :3]
    with pytest.raises(ConfigError, match="3 heads of 16, 2 kv heads"):
        case.run("triton", visible)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so it can be forced")
def test_cannot_be_forced_without_a_gpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    case = Case(causal([3, 4], 2), 4, 2, 16, torch.float32)
    with pytest.raises(KernelUnavailableError, match="cannot run on cpu: no GPU"):
        case.run()
