"""The definitions of docs/glossary.md on a history computed by hand."""

from __future__ import annotations

import pytest

from hybrid.metrics import RowMeter, peak_rss_mib, pooled, pooled_histogram
from hybrid.types import Mode, RowStep, Source, Stats, StepRecord


def step(index, num_tokens, num_drafted=0, num_accepted=0, finish_reason=None):
    return RowStep(
        index,
        (5,) * num_tokens,
        (Source.AR,) * num_tokens,
        num_drafted=num_drafted,
        num_accepted=num_accepted,
        finish_reason=finish_reason,
    )


HISTORY = [
    StepRecord(Mode.PREFILL, (step(0, 1),), num_verify_forwards=2, forward_seconds=1.0),
    StepRecord(Mode.PREFILL, (step(1, 1),), forward_seconds=5.0),
    # Row 0: 4 drafted, 3 accepted, 4 committed. Row 1 gets no draft.
    StepRecord(
        Mode.SPECULATIVE,
        (step(0, 4, 4, 3), step(1, 1)),
        num_draft_forwards=1,
        forward_seconds=0.2,
        draft_seconds=0.1,
    ),
    StepRecord(
        Mode.SPECULATIVE,
        (step(0, 1, 4, 0), step(1, 1, 4, 0, "stop")),
        num_draft_forwards=1,
        forward_seconds=0.2,
        draft_seconds=0.1,
    ),
    StepRecord(Mode.AR, (step(0, 1),), forward_seconds=0.1),
    # The limit cuts a fully accepted draft: 4 accepted, 3 committed.
    StepRecord(
        Mode.SPECULATIVE,
        (step(0, 3, 4, 4, "length"),),
        num_draft_forwards=1,
        forward_seconds=0.2,
        draft_seconds=0.1,
    ),
]


def meters():
    made = [RowMeter(0, 10), RowMeter(1, 20)]
    for record in HISTORY:
        for meter in made:
            meter.add(record)
    return made


def test_row_numbers_by_hand():
    stats = meters()[0].stats()
    assert stats.num_prompt_tokens == 10
    assert stats.num_new_tokens == 1 + 4 + 1 + 1 + 3
    assert (stats.num_prefill_forwards, stats.num_draft_forwards, stats.num_verify_forwards) == (
        2,
        3,
        4,
    )
    assert stats.num_forwards == 9
    assert (stats.num_drafted, stats.num_accepted) == (12, 7)
    assert stats.acceptance_length == 9 / 4  # bonus included, prefill excluded, AR steps included
    assert stats.acceptance_rate == 7 / 12
    assert stats.tokens_per_forward == 9 / 7
    assert stats.total_tokens_per_forward == 10 / 9
    assert stats.acceptance_histogram == (1, 0, 0, 1, 1)
    assert stats.forward_seconds == pytest.approx(1.0 + 0.3 + 0.3 + 0.1 + 0.3)


def test_a_row_counts_only_its_own_steps():
    stats = meters()[1].stats()
    assert (stats.num_new_tokens, stats.num_prefill_forwards) == (3, 1)
    assert (stats.num_draft_forwards, stats.num_verify_forwards) == (2, 2)
    assert (stats.num_drafted, stats.num_accepted) == (4, 0)
    assert stats.acceptance_histogram == (1,)  # the step without a draft says nothing of drafts


def test_add_returns_the_rows_own_part():
    meter = RowMeter(1, 20)
    assert meter.add(HISTORY[0]) is None
    assert meter.add(HISTORY[1]) is HISTORY[1].rows[0]
    assert meter.add(HISTORY[2]) is HISTORY[2].rows[1]


def test_times(monkeypatch):
    clock = iter([100.0, 100.25, 101.25, 102.25])
    monkeypatch.setattr("hybrid.metrics.time.perf_counter", lambda: next(clock))
    meter = RowMeter(0, 10)
    for record in (HISTORY[0], HISTORY[2], HISTORY[3]):
        meter.add(record)
    stats = meter.stats(peak_memory_mib=12.5)
    assert stats.ttft_ms == 250
    assert stats.seconds == 2.25
    assert stats.tpot_ms == 2000 / 5  # after the first token: 5 more in 2 seconds
    assert stats.tokens_per_second == 6 / 2.25
    assert stats.peak_memory_mib == 12.5


def test_an_empty_history_has_no_division_by_zero():
    stats = RowMeter(0, 3).stats()
    assert (stats.num_new_tokens, stats.acceptance_length, stats.tokens_per_forward) == (
        0,
        0.0,
        0.0,
    )
    assert stats.ttft_ms == stats.tpot_ms == 0.0


def test_pooled_ratios_are_sums_over_sums():
    numbers = pooled([meter.stats() for meter in meters()])
    assert numbers["acceptance_length"] == (9 + 2) / (4 + 2)
    assert numbers["acceptance_rate"] == 7 / 16
    assert numbers["tokens_per_forward"] == (9 + 2) / (4 + 2 + 3 + 2)
    assert numbers["tokens_per_second"] > 0
    assert pooled([]) == dict.fromkeys(numbers, 0.0)


def test_histograms_add_up():
    parts = [Stats(acceptance_histogram=h) for h in ((1, 2), (), (0, 0, 5))]
    assert pooled_histogram(parts) == [1, 2, 5]
    assert pooled_histogram([]) == []


def test_peak_memory_is_in_mib():
    assert 10 < peak_rss_mib() < 2**20


def test_unverified_tokens_are_counted_as_far_as_they_were_committed():
    """By hand; passes are counted under the mode of the row, not of the whole step."""
    meter = RowMeter(0, 10)
    fields = {"num_drafted": 3, "num_accepted": 3, "num_unverified": 2, "finish_reason": None}
    first = RowStep(
        0,
        (5,) * 4,
        (Source.DIFFUSION_ONLY,) * 2 + (Source.DRAFT_VERIFIED, Source.BONUS),
        mode=Mode.DIFFUSION_ONLY,
        disagreements=(0.25, 1.0),
        **fields,
    )
    cut = RowStep(  # the first of them ended the row
        0,
        (5,),
        (Source.DIFFUSION_ONLY,),
        mode=Mode.DIFFUSION_ONLY,
        disagreements=(0.5, 1.0),
        **{**fields, "finish_reason": "stop"},
    )
    other = RowStep(1, (5,), (Source.AR,), mode=Mode.ONE_PASS)
    fused = RowStep(0, (5,), (Source.AR,), mode=Mode.FUSED)
    for record in (
        StepRecord(Mode.PREFILL, (step(0, 1),)),
        StepRecord(Mode.DIFFUSION_ONLY, (first, other), num_draft_forwards=1),
        StepRecord(Mode.ONE_PASS, (fused, other)),
        StepRecord(Mode.DIFFUSION_ONLY, (cut,), num_draft_forwards=1),
    ):
        meter.add(record)
    stats = meter.stats()
    assert (stats.num_unverified, stats.num_unverified_disagreeing) == (3, 0.25 + 1.0 + 0.5)
    assert stats.forwards_by_mode == {"diffusion-only": 4, "fused": 1}
    assert (stats.num_drafted, stats.num_accepted) == (6, 6)
    assert stats.acceptance_histogram == (0, 0, 0, 2)
