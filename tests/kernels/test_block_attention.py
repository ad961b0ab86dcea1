"""block_attention against its float64 twin, and the twin against a third way to say it."""

from __future__ import annotations

import pytest
import torch

from hybrid.attention.pattern import bidirectional, block_causal, causal, groups, padded, tree
from hybrid.kernels.block_attention import (
    KEY_TILE,
    block_attention,
    dense_mask_attention,
    token_attention,
)

# The error of one float32 or bfloat16 softmax-weighted mean of values of size 1.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}
PATTERNS = {
    "causal": lambda prefix, t: causal([prefix], t),
    "bidirectional": lambda prefix, t: bidirectional([prefix], t),
    "blocks": lambda prefix, t: block_causal([prefix], t, 3, 1),
    "tree": lambda prefix, t: tree([prefix], [(i - 1) // 2 if i else -1 for i in range(t)]),
    "padded": lambda prefix, t: padded(causal([prefix], t), [max(t - 2, 1)]),
}
SHAPES = [  # prefix, new tokens, query heads, kv heads, head dim
    (0, 1, 1, 1, 4),
    (5, 1, 6, 2, 16),
    (0, 3, 9, 3, 64),
    (63, 2, 4, 4, 8),
    (65, 7, 8, 1, 80),
    (127, 33, 4, 2, 24),
]


def tensors(prefix, num_tokens, heads, groups, dim, dtype, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(num_tokens, heads, dim, generator=generator, dtype=torch.float64)
    pair = torch.randn(
        2, groups, prefix + num_tokens, dim, generator=generator, dtype=torch.float64
    )
    return (query * scale).to(dtype), (pair[0] * scale).to(dtype), pair[1].to(dtype)


def additive(visible, heads, groups, dtype):
    if visible is None:
        return None
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, float("-inf"))
    return mask.repeat(heads // groups, 1)


def visible_of(pattern, prefix, num_tokens):
    mask = pattern.row_mask(0)
    return torch.ones(num_tokens, prefix + num_tokens, dtype=torch.bool) if mask is None else mask


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "P{}-T{}-H{}-G{}-D{}".format(*s))
def test_equals_the_twin(shape, name, dtype):
    prefix, num_tokens, heads, groups, dim = shape
    pattern = PATTERNS[name](prefix, num_tokens)
    query, key, value = tensors(*shape, dtype)
    mask = additive(pattern.row_mask(0), heads, groups, dtype)
    out = block_attention(query, key, value, mask)
    assert out.shape == (num_tokens, heads * dim)
    assert out.dtype == dtype
    expected = dense_mask_attention(query, key, value, visible_of(pattern, prefix, num_tokens))
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[dtype])


def test_groups_of_slots_behind_candidates():
    pattern, shape = groups([[5, 6, 8]], 4), (9, 12, 4, 2, 8)  # 5 cached, 4 candidates
    query, key, value = tensors(*shape, torch.float32)
    mask = pattern.row_mask(0, prefix_width=9)
    out = block_attention(query, key, value, additive(mask, 4, 2, torch.float32))
    expected = dense_mask_attention(query, key, value, mask)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_no_mask_sees_everything(num_tokens):
    query, key, value = tensors(6, num_tokens, 4, 2, 8, torch.float32)
    out = block_attention(query, key, value, None)
    everything = torch.ones(num_tokens, 6 + num_tokens, dtype=torch.bool)
    expected = dense_mask_attention(query, key, value, everything)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_views_into_a_cache_and_a_fused_product(num_tokens):
    """As the model calls it: keys are strided views, the query a slice of q, k, v."""
    heads, groups, dim, prefix = 4, 2, 8, 3
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(2, 2, groups, 20, dim, generator=generator)
    fused = torch.randn(num_tokens, heads + 2 * groups, dim, generator=generator)
    key, value = data[0, :, :, : prefix + num_tokens]
    query = fused[:, :heads]
    visible = visible_of(causal([prefix], num_tokens), prefix, num_tokens)
    out = block_attention(query, key, value, additive(visible, heads, groups, torch.float32))
    expected = dense_mask_attention(query, key, value, visible)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)


def test_extreme_scores_stay_finite():
    query, key, value = tensors(4, 3, 2, 1, 8, torch.float32, scale=50.0)
    visible = causal([4], 3).row_mask(0)
    out = block_attention(query, key, value, additive(visible, 2, 1, torch.float32))
    assert out.isfinite().all()
    expected = dense_mask_attention(query, key, value, visible)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-3)


def test_hidden_keys_have_no_influence():
    shape = (4, 3, 4, 2, 8)
    query, key, value = tensors(*shape, torch.float32)
    mask = additive(causal([4], 3).row_mask(0), 4, 2, torch.float32)
    before = block_attention(query, key, value, mask)
    key[:, -1], value[:, -1] = 1e4, -1e4  # the last token, which tokens 0 and 1 do not see
    after = block_attention(query, key, value, mask)
    assert torch.equal(before[:2], after[:2])
    assert not torch.allclose(before[2], after[2])


def test_the_twin_is_a_weighted_mean():
    """By hand: two keys, scores ln 3 and 0, so weights 3/4 and 1/4; one query head per kv head."""
    log3 = torch.tensor(3.0, dtype=torch.float64).log()
    query = torch.tensor([[[1.0]], [[1.0]]], dtype=torch.float64) * log3
    key = torch.tensor([[[1.0], [0.0]]], dtype=torch.float64)
    value = torch.tensor([[[8.0], [0.0]]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [False, True]])
    out = dense_mask_attention(query, key, value, mask)
    torch.testing.assert_close(out, torch.tensor([[6.0], [0.0]], dtype=torch.float64))
    block = block_attention(query, key, value, additive(mask, 1, 1, torch.float64))
    torch.testing.assert_close(block, out)


def test_any_memory_order_of_torchs_kernel_will_do(monkeypatch):
    """Some of torch's attention kernels return [B, T, H, D] memory under [B, H, T, D] strides."""
    import torch.nn.functional as F

    plain = F.scaled_dot_product_attention

    def transposed(*args, **kwargs):
        out = plain(*args, **kwargs)
        return out.transpose(1, 2).contiguous().transpose(1, 2)

    query, key, value = torch.randn(3, 4, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    expected = [block_attention(query[:n], key, value, None) for n in (1, 3)]
    monkeypatch.setattr(F, "scaled_dot_product_attention", transposed)
    for count, want in zip((1, 3), expected, strict=True):
        assert torch.equal(block_attention(query[:count], key, value, None), want)


def each_token(query, key, value, prefix, width):
    """Run `token_attention` causally over `width` keys, those behind a token masked."""
    num_tokens = query.shape[0]
    seen = torch.arange(width) <= prefix + torch.arange(num_tokens)[:, None]
    mask = torch.zeros(num_tokens, width, dtype=query.dtype).masked_fill(~seen, float("-inf"))
    return token_attention(query, key[:, :width], value[:, :width], mask[:, None, None], prefix + 1)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "P{}-T{}-H{}-G{}-D{}".format(*s))
def test_token_attention_equals_the_twin(shape, dtype):
    prefix, num_tokens, heads, groups, dim = shape
    query, key, value = tensors(*shape, dtype)
    width = -(-(prefix + num_tokens) // KEY_TILE) * KEY_TILE
    room = (0, 0, 0, width - key.shape[1])
    keys, values = (torch.nn.functional.pad(t, room, value=9.0) for t in (key, value))
    out = each_token(query, keys, values, prefix, width)
    seen = visible_of(causal([prefix], num_tokens), prefix, num_tokens)
    expected = dense_mask_attention(query, key, value, seen)
    assert out.shape == (num_tokens, heads * dim)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "groups", "dim"), [(9, 3, 64), (4, 4, 16), (6, 1, 80), (8, 2, 128), (35, 5, 64)]
)
def test_a_tokens_bits_are_its_own(heads, groups, dim, dtype, num_threads):
    """Whatever stands beside it, however many keys lie masked behind it, on whatever thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for prefix in (0, 1, 14, 15, 16, 40, 121, 130, 174, 185, 255, 300, 511):
            query, key, value = tensors(prefix + 32, 8, heads, groups, dim, dtype, seed=prefix)
            width = -(-(prefix + 8) // KEY_TILE) * KEY_TILE
            together = each_token(query, key, value, prefix, width)
            for token in range(8):
                own = -(-(prefix + token + 1) // KEY_TILE) * KEY_TILE
                alone = each_token(query[token : token + 1], key, value, prefix + token, own)
                assert torch.equal(together[token], alone[0]), f"prefix {prefix}, token {token}"
    finally:
        torch.set_num_threads(before)
