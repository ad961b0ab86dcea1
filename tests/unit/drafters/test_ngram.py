"""Prompt lookup against a brute-force twin."""

from __future__ import annotations

import random

import pytest
import torch

from hybrid.drafters.ngram import NgramDrafter
from hybrid.errors import ConfigError
from hybrid.params import SamplingParams
from hybrid.protocols import Drafter, DraftState
from hybrid.streams import RandomStream
from hybrid.types import Mode, Plan, SequenceState


def state(*rows):
    return DraftState(
        [
            SequenceState(i, list(tokens), 1, SamplingParams(), RandomStream(0))
            for i, tokens in enumerate(rows)
        ],
        cache=None,
        hidden={},
    )


def propose(drafter, tokens, num_draft=8):
    proposal = drafter.draft(state(tokens), Plan(Mode.SPECULATIVE, num_draft))
    assert proposal.tokens.shape == (1, proposal.num_tokens[0])
    return proposal.tokens[0].tolist()


def twin(tokens, num_draft, max_ngram, min_ngram):
    for n in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + num_draft]
    return []


def test_agrees_with_brute_force():
    rng = random.Random(0)
    num_matched = 0
    for _ in range(600):
        max_ngram = rng.randint(1, 4)
        min_ngram = rng.randint(1, max_ngram)
        tokens = [rng.randrange(rng.choice([2, 4, 9])) for _ in range(rng.randint(1, 25))]
        num_draft = rng.randint(1, 6)
        drafter = NgramDrafter(6, max_ngram, min_ngram)
        wanted = twin(tokens, num_draft, max_ngram, min_ngram)
        assert propose(drafter, tokens, num_draft) == wanted
        num_matched += bool(wanted)
    assert 100 < num_matched < 590


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        ([1, 2, 3, 9, 8, 1, 2, 3], [9, 8, 1, 2, 3]),  # the longest match
        ([5, 1, 5, 2, 5], [2, 5]),  # the most recent match
        ([1, 2, 7, 3, 2, 8, 1, 2], [7, 3, 2, 8, 1, 2]),  # longer beats more recent
        ([4, 4, 4], [4]),  # the suffix may overlap its match
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_by_hand(tokens, wanted):
    assert propose(NgramDrafter(), tokens) == wanted


def test_limits_of_plan_and_drafter():
    tokens = [1, 2, 3, 4, 5, 6, 1]
    assert propose(NgramDrafter(max_draft_tokens=3), tokens, 8) == [2, 3, 4]
    assert propose(NgramDrafter(), tokens, 2) == [2, 3]
    assert propose(NgramDrafter(), tokens, 0) == []


def test_min_ngram_ignores_shorter_matches():
    assert propose(NgramDrafter(min_ngram=2), [1, 2, 3, 1]) == []
    assert propose(NgramDrafter(min_ngram=2), [1]) == []


def test_ragged_rows_are_independent_and_state_is_untouched():
    rows = [[1, 2, 3, 1], [7, 8], [5, 5]]
    given = state(*rows)
    proposal = NgramDrafter().draft(given, Plan(Mode.SPECULATIVE, 8))
    assert proposal.num_tokens == (3, 0, 1)
    assert proposal.tokens.shape == (3, 3)
    assert proposal.tokens.dtype == torch.long
    assert proposal.draft_probs is None
    assert proposal.num_forwards == 0
    assert proposal.tokens[0].tolist() == [2, 3, 1]
    assert proposal.tokens[2, :1].tolist() == [5]
    assert [r.tokens for r in given.rows] == rows


def test_no_match_in_any_row_is_an_empty_proposal():
    proposal = NgramDrafter().draft(state([1, 2], [3]), Plan(Mode.SPECULATIVE, 4))
    assert proposal.tokens.shape == (2, 0)
    assert proposal.num_tokens == (0, 0)


def test_rows_may_be_swapped_for_others():
    drafter = NgramDrafter()
    assert propose(drafter, [1, 2, 1]) == [2, 1]
    assert propose(drafter, [3, 4, 5, 4]) == [5, 4]
    drafter.reset()
    assert propose(drafter, [1, 2, 1]) == [2, 1]


def test_it_is_a_drafter():
    drafter = NgramDrafter()
    assert isinstance(drafter, Drafter)
    assert (drafter.name, drafter.taps, drafter.max_draft_tokens) == ("ngram", (), 7)


@pytest.mark.parametrize(
    "arguments",
    [{"max_draft_tokens": 0}, {"min_ngram": 0}, {"max_ngram": 2, "min_ngram": 3}],
)
def test_bad_limits(arguments):
    with pytest.raises(ConfigError, match="expected"):
        NgramDrafter(**arguments)
