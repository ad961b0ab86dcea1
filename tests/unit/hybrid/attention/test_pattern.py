"""Every mask of every mode against an independent two-loop twin."""

from __future__ import annotations

import pytest
import torch

from hybrid.attention.pattern import (
    AttentionPattern,
    bidirectional,
    block_causal,
    causal,
    full_sequence,
    groups,
    padded,
    tree,
)
from hybrid.errors import ConfigError


def twin(num_tokens, prefix, sees, window=None, width=None):
    """Build a row's mask cell by cell; `sees(query, key)` is about new tokens.

    `prefix` is a number, or one per query; `width` is how many cached columns there are.
    """
    limits = [prefix] * num_tokens if isinstance(prefix, int) else list(prefix)
    width = max(limits) if width is None else width
    mask = []
    for query in range(num_tokens):
        row = []
        for key in range(width + num_tokens):
            visible = key < limits[query] if key < width else sees(query, key - width)
            if window is not None and width + query - key >= window:
                visible = False
            row.append(bool(visible))
        mask.append(row)
    return mask


def dense(pattern, row, window=None):
    """A row's mask as lists; None hides nothing."""
    mask = pattern.row_mask(row, window=window)
    if mask is None:
        width = pattern.row_prefix(row) + pattern.num_tokens
        return [[True] * width] * pattern.num_tokens
    assert mask.dtype == torch.bool
    return mask.tolist()


def is_ancestor(parents, query, key):
    while query != key and query >= 0:
        query = parents[query]
    return query == key


PARENTS = [-1, 0, 0, 1, 1, 2, -1, 6]
PREFIXES = (0, 1, 5)
CASES = [
    *[(f"causal-{t}", causal(PREFIXES, t), lambda q, k: k <= q) for t in (1, 2, 7)],
    *[(f"bidirectional-{t}", bidirectional(PREFIXES, t), lambda q, k: True) for t in (1, 4)],
    ("full-sequence", full_sequence(3, 6), lambda q, k: True),
    *[
        (
            f"block-{size}-offset-{offset}",
            block_causal(PREFIXES, 7, size, offset),
            lambda q, k, s=size, o=offset: (k + o) // s <= (q + o) // s,
        )
        for size, offset in ((1, 0), (2, 0), (3, 1), (4, 3), (3, 5), (8, 0))
    ],
    ("tree", tree(PREFIXES, PARENTS), lambda q, k: is_ancestor(PARENTS, q, k)),
    ("tree-chain", tree(PREFIXES, [-1, 0, 1, 2]), lambda q, k: k <= q),
]


@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
@pytest.mark.parametrize(("pattern", "sees"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_mask_equals_the_twin(pattern, sees, window):
    for row, prefix in enumerate(pattern.prefix_len):
        expected = twin(pattern.num_tokens, prefix, sees, window)
        assert dense(pattern, row, window) == expected
        assert pattern.row_prefix(row) == prefix


def test_full_sequence_sees_no_cache():
    assert full_sequence(2, 3).prefix_len == (0, 0)


def test_only_causal_claims_to_be_causal():
    assert causal([0], 3).is_causal
    for pattern in (
        bidirectional([0], 3),
        block_causal([0], 3, 2),
        tree([0], [-1]),
        groups([[0, 1]], 2),
    ):
        assert not pattern.is_causal
    assert not padded(causal([0], 3), [2]).is_causal


def one_pass_twin(cached, num_candidates, points, size, window, *, is_causal):
    """ALGORITHMS A.9, cell by cell over the whole pass: candidates d_0 (the anchor), d_1, ..., then
    a group of slots for each point j, whose first slot stands where d_j does.

    Returns the rows of the slots; columns are what is cached, the candidates, the slots.
    """
    positions = [cached + i for i in range(num_candidates)]
    group = [None] * num_candidates
    for g, point in enumerate(points):
        positions += [cached + point + i for i in range(size)]
        group += [g] * size
    mask = []
    for query in range(num_candidates, len(positions)):
        row = []
        for key in range(cached + len(positions)):
            if key < cached:
                at, visible = key, True
            else:
                other = key - cached
                at = positions[other]
                if group[other] is None:
                    visible = other < points[group[query]]  # d_0 .. d_(j-1)
                else:
                    visible = group[other] == group[query]
                    visible = visible and (not is_causal or at <= positions[query])
            row.append(visible and (window is None or positions[query] - at < window))
        mask.append(row)
    return mask


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("points", [(0,), (2,), (0, 1, 2, 3), (1, 3)], ids=str)
@pytest.mark.parametrize("size", [1, 3])
def test_groups_ride_behind_the_candidates(size, points, window, is_causal):
    cached, num_candidates = (0, 5), 4
    starts = [[length + j for j in points] for length in cached]
    pattern = groups(starts, size, is_causal=is_causal)
    assert pattern.num_tokens == len(points) * size
    for row, length in enumerate(cached):
        mask = pattern.row_mask(row, window=window, prefix_width=length + num_candidates)
        expected = one_pass_twin(length, num_candidates, points, size, window, is_causal=is_causal)
        assert mask.tolist() == expected


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("kind", ["causal", "bidirectional", "block"])
def test_padding_is_hidden_both_ways(kind, left, window):
    num_tokens, prefixes, num_valid = 5, (2, 0, 7, 1), (5, 3, 1, 0)
    pattern, sees = {
        "causal": (causal(prefixes, num_tokens), lambda q, k: k <= q),
        "bidirectional": (bidirectional(prefixes, num_tokens), lambda q, k: True),
        "block": (block_causal(prefixes, num_tokens, 2), lambda q, k: k // 2 <= q // 2),
    }[kind]
    hidden = padded(pattern, num_valid, left=left)
    assert hidden.prefix_len == prefixes
    for row, count in enumerate(num_valid):
        real = range(num_tokens - count, num_tokens) if left else range(count)

        def visible(query, key, real=real):
            if query in real:
                return key in real and sees(query, key)
            return query == key  # padding sees itself, so that its softmax is defined

        assert dense(hidden, row, window) == twin(num_tokens, prefixes[row], visible, window)


@pytest.mark.parametrize("window", [None, 2])
def test_tokens_of_a_row_may_see_different_prefixes(window):
    local = torch.ones(3, 3, dtype=torch.bool).tril()
    pattern = AttentionPattern(((0, 2, 4), (1, 1, 1)), local)
    for row, limits in enumerate(pattern.prefix_len):
        assert pattern.row_prefix(row) == max(limits)
        assert dense(pattern, row, window) == twin(3, limits, lambda q, k: k <= q, window)


def test_a_lone_token_with_its_own_limit_gets_a_mask():
    pattern = AttentionPattern(((2,),), torch.ones(1, 1, dtype=torch.bool))
    assert pattern.row_mask(0).tolist() == [[True] * 3]


def test_a_lone_token_needs_no_mask_unless_the_window_is_narrow():
    pattern = causal([6], 1)
    assert pattern.row_mask(0) is None
    assert pattern.row_mask(0, window=7) is None
    assert pattern.row_mask(0, window=6).tolist() == [[False] + [True] * 6]


def test_no_query_is_blind():
    for _, pattern, _ in CASES:
        for row in range(len(pattern.prefix_len)):
            for window in (None, 1, 3):
                assert all(any(cells) for cells in dense(pattern, row, window))


@pytest.mark.parametrize("size", [0, -1])
def test_block_size_must_be_positive(size):
    with pytest.raises(ConfigError, match=f"block_size: got {size}, expected at least 1"):
        block_causal([0], 4, size)


@pytest.mark.parametrize("parents", [[0], [-1, 2, 1], [-1, 1]])
def test_a_parent_comes_first(parents):
    with pytest.raises(ConfigError, match="expected an earlier token or -1"):
        tree([0], parents)


def test_a_parent_below_minus_one_is_refused():
    with pytest.raises(ConfigError, match="parents: token 1 has parent -2"):
        tree([0], [-1, -2])
