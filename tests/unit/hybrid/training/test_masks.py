from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid.errors import ConfigError
from hybrid.training import masks

LENGTHS = st.integers(1, 12)
SIZES = st.integers(1, 5)
PROMPTS = st.one_of(st.none(), st.integers(0, 12))


def _block(position: int, block_size: int, prompt_length: int | None) -> int:
    if prompt_length is None:
        return position // block_size
    if position < prompt_length:
        return 0
    block, last = 1, prompt_length + block_size
    while position >= last:
        block, last = block + 1, last + block_size
    return block


@given(LENGTHS, SIZES, PROMPTS)
def test_blocks_and_block_causal_equal_their_twins(
    length: int, size: int, prompt: int | None
) -> None:
    blocks = masks.block_ids(length, size, prompt)
    expected = [_block(i, size, prompt) for i in range(length)]
    assert blocks.tolist() == expected
    mask = masks.block_causal(blocks)
    assert mask.dtype == torch.bool
    for q in range(length):
        for k in range(length):
            assert mask[q, k] == (expected[k] <= expected[q])


@given(LENGTHS)
def test_full_and_causal_equal_their_twins(length: int) -> None:
    for q in range(length):
        for k in range(length):
            assert masks.full(length)[q, k]
            assert masks.causal(length)[q, k] == (k <= q)


@given(LENGTHS, SIZES, PROMPTS, st.sampled_from(["causal", "block-causal"]))
def test_noisy_clean_equals_its_twin(
    length: int, size: int, prompt: int | None, clean: str
) -> None:
    mask = masks.noisy_clean(masks.block_ids(length, size, prompt), clean)
    assert mask.shape == (2 * length, 2 * length)
    for q in range(2 * length):
        for k in range(2 * length):
            own, other = (_block(i % length, size, prompt) for i in (q, k))
            if q < length and k < length:
                sees = own == other
            elif q < length:
                sees = other < own
            elif k < length:
                sees = False
            elif clean == "causal":
                sees = k <= q
            else:
                sees = other <= own
            assert mask[q, k] == sees, (q, k)


@given(LENGTHS, st.lists(st.integers(0, 11), max_size=3), st.integers(1, 4), st.booleans())
def test_anchored_drafts_equal_their_twin(
    length: int, anchors: list[int], width: int, bidirectional: bool
) -> None:
    anchors = [a % length for a in anchors]
    mask = masks.anchored_drafts(
        length, torch.tensor(anchors, dtype=torch.long), width, bidirectional=bidirectional
    )
    total = length + len(anchors) * width
    assert mask.shape == (total, total)
    for q in range(total):
        for k in range(total):
            if q < length:
                sees = k <= q  # of the clean sequence, for the blocks come later
            elif k < length:
                sees = k < anchors[(q - length) // width]
            else:
                same = (q - length) // width == (k - length) // width
                sees = same and (bidirectional or k <= q)
            assert mask[q, k] == sees, (q, k)


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=3))
def test_padding_is_hidden_and_no_row_is_empty(real: list[list[bool]]) -> None:
    base = masks.block_causal(masks.block_ids(6, 2))
    mask = masks.hide_padding(base, torch.tensor(real))
    for row, flags in enumerate(real):
        for q in range(6):
            for k in range(6):
                sees = bool(base[q, k]) if flags[q] and flags[k] else q == k and not flags[q]
                assert mask[row, q, k] == sees
    assert mask.any(dim=-1).all()


def test_a_block_has_at_least_one_position() -> None:
    with pytest.raises(ConfigError, match="block_size: got 0"):
        masks.block_ids(4, 0)
