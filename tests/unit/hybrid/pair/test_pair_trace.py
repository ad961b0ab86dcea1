"""What is counted of a trace, and where two of them differ."""

from __future__ import annotations

import pytest

from hybrid.pair.trace import Trace, first_difference, similar


def trace(*answers: list[int], name: str = "a", first: int = 0, k: int = 3) -> Trace:
    """A trace of passes of so many tokens; the tokens are 0, 1, 2 ... from `first` on."""
    steps = []
    for lengths in answers:
        at, passes = first, []
        for length in lengths:
            passes.append(tuple(range(at, at + length)))
            at += length
        steps.append(passes)
    return Trace(name, steps, k)


def test_passes_near_the_limit_and_the_prefill_do_not_count() -> None:
    # 14 tokens: passes start at 1, 3, 7, 8 and 12; a whole one of 4 fits behind 10 at most.
    found = trace([1, 2, 4, 1, 4, 2])
    assert [start for start, _ in found.whole_passes(found.steps[0])] == [1, 3, 7, 8]
    assert found.histogram == [1, 1, 0, 2]
    assert found.acceptance_length == pytest.approx((2 + 4 + 1 + 4) / 4)
    assert found.by_position == [0.75, 0.5, 0.5]


def test_an_answer_too_short_for_a_draft_counts_nothing() -> None:
    found = trace([1, 2])
    assert (found.histogram, found.acceptance_length) == ([0, 0, 0, 0], 0.0)


def test_equal_traces_do_not_differ() -> None:
    assert first_difference(trace([1, 2, 4, 3], [1, 4, 4]), trace([1, 2, 4, 3], [1, 4, 4])) is None


def test_how_the_limit_cuts_is_no_difference() -> None:
    assert first_difference(trace([1, 4, 4, 1]), trace([1, 4, 3, 2])) is not None
    assert first_difference(trace([1, 4, 4, 2, 1]), trace([1, 4, 4, 1, 2])) is None


def test_the_first_difference_is_named() -> None:
    ours, theirs = trace([1, 2, 4, 4, 4]), trace([1, 2, 1, 3, 4, 4], name="b")
    found = first_difference(ours, theirs)
    assert found == "prompt 0, token 3: of the draft there a accepts 3 tokens, b 0"
    later = first_difference(trace([1, 4, 4], [1, 4, 4]), trace([1, 4, 4], [1, 3, 1, 4], name="b"))
    assert later is not None
    assert later.startswith("prompt 1, token 1:")


def test_other_tokens_are_not_the_drafters_fault() -> None:
    ours, theirs = trace([1, 4, 4]), trace([1, 4, 4], name="b", first=7)
    found = first_difference(ours, theirs)
    assert found is not None
    assert found.startswith("prompt 0, token 0: a says 0, b 7: the targets themselves differ")
    assert not ours.same_tokens(theirs)
    assert ours.same_tokens(trace([1, 1, 3, 4]))


def test_similar_is_within_a_tenth() -> None:
    ours = trace([1, *[4] * 10, 4])
    assert similar(ours, ours)
    assert not similar(ours, trace([1, *[3] * 13, 4]))
