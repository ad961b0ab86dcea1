"""The one place where acceptance length, acceptance rate, TPF and times are computed.

Definitions (docs/glossary.md): acceptance length = tokens committed by decode steps / target passes
of decode (bonus included, prefill excluded); acceptance rate = accepted / drafted; TPF = tokens
committed by decode steps / all backbone passes of decode, draft and denoising passes included;
total TPF counts the prefill and its token too. What was denoised has no acceptance length.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from statistics import median

from hybrid.types import Mode, RowStep, Stats, StepRecord


class RowMeter:
    """Adds up the records of one request. Feed it every record, in order."""

    def __init__(self, index: int, num_prompt_tokens: int) -> None:
        """Start the clock of the request.

        Args:
            index: the request's index in the records' rows.
            num_prompt_tokens: its prompt.
        """
        self._index, self._num_prompt_tokens = index, num_prompt_tokens
        self._started = time.perf_counter()
        self._first: float | None = None
        self._last = self._started
        self._prefill = self._draft = self._verify = self._denoise = 0
        self._new = self._decoded = self._drafted = self._accepted = 0
        self._histogram: list[int] = []
        self._forward_seconds = 0.0

    def restart(self) -> None:
        """Start the clock again, before the first record."""
        self._started = self._last = time.perf_counter()

    def add(self, record: StepRecord) -> RowStep | None:
        """Count a record; return this request's part of it, None when it has none."""
        row = next((r for r in record.rows if r.index == self._index), None)
        if row is None:
            return None
        self._last = time.perf_counter()
        if self._first is None:
            self._first = self._last
        self._forward_seconds += record.forward_seconds + record.draft_seconds
        self._new += len(row.tokens)
        if record.mode == Mode.PREFILL:
            self._prefill += record.num_verify_forwards
            return row
        self._draft += record.num_draft_forwards
        self._verify += record.num_verify_forwards
        self._denoise += record.num_denoise_forwards
        self._decoded += len(row.tokens)
        self._drafted += row.num_drafted
        self._accepted += row.num_accepted
        if row.num_drafted:
            self._histogram += [0] * (row.num_accepted + 1 - len(self._histogram))
            self._histogram[row.num_accepted] += 1
        return row

    def stats(self, peak_memory_mib: float | None = None) -> Stats:
        """Return the numbers so far."""
        first = self._first if self._first is not None else self._last
        seconds = self._last - self._started
        decode = self._draft + self._verify + self._denoise
        return Stats(
            num_prompt_tokens=self._num_prompt_tokens,
            num_new_tokens=self._new,
            num_forwards=self._prefill + decode,
            num_prefill_forwards=self._prefill,
            num_draft_forwards=self._draft,
            num_verify_forwards=self._verify,
            num_denoise_forwards=self._denoise,
            num_drafted=self._drafted,
            num_accepted=self._accepted,
            acceptance_length=0.0 if self._denoise else _ratio(self._decoded, self._verify),
            acceptance_rate=_ratio(self._accepted, self._drafted),
            tokens_per_forward=_ratio(self._decoded, decode),
            total_tokens_per_forward=_ratio(self._new, self._prefill + decode),
            acceptance_histogram=tuple(self._histogram),
            seconds=seconds,
            forward_seconds=self._forward_seconds,
            tokens_per_second=_ratio(self._new, seconds),
            ttft_ms=1000 * (first - self._started),
            tpot_ms=1000 * _ratio(self._last - first, self._decoded),
            peak_memory_mib=peak_rss_mib() if peak_memory_mib is None else peak_memory_mib,
        )


def pooled(parts: Sequence[Stats]) -> dict[str, float]:
    """Return the micro-averaged ratios of several requests (sums divided by sums)."""
    verify = sum(s.num_verify_forwards for s in parts)
    accepted = sum(round(s.acceptance_length * s.num_verify_forwards) for s in parts)
    decodes = [s.num_forwards - s.num_prefill_forwards for s in parts]
    decode = sum(decodes)
    decoded = sum(round(s.tokens_per_forward * n) for s, n in zip(parts, decodes, strict=True))
    return {
        "acceptance_length": _ratio(accepted, verify),
        "acceptance_rate": _ratio(
            sum(s.num_accepted for s in parts), sum(s.num_drafted for s in parts)
        ),
        "tokens_per_forward": _ratio(decoded, decode),
        "tokens_per_second": _ratio(
            sum(s.num_new_tokens for s in parts), sum(s.seconds for s in parts)
        ),
    }


def pooled_histogram(parts: Sequence[Stats]) -> list[int]:
    """Return how many verify passes accepted 0, 1, 2 ... drafted tokens, over all requests."""
    width = max((len(s.acceptance_histogram) for s in parts), default=0)
    total = [0] * width
    for stats in parts:
        for accepted, count in enumerate(stats.acceptance_histogram):
            total[accepted] += count
    return total


def acceptance_by_position(histogram: Sequence[int], num_positions: int) -> list[float]:
    """Return the share of the passes with a draft that accepted at least 1, 2 ... tokens of it.

    A draft with fewer tokens than a position counts as one that was rejected there.

    Args:
        histogram: how many passes accepted 0, 1, 2 ... drafted tokens.
        num_positions: the most tokens drafted in a pass.
    """
    total = sum(histogram)
    return [_ratio(sum(histogram[least:]), total) for least in range(1, num_positions + 1)]


def speedup(seconds_per_token: Sequence[float], baseline: Sequence[float]) -> float:
    """Return how many times faster than `baseline`: the median over the same prompts."""
    return median(b / own for own, b in zip(seconds_per_token, baseline, strict=True))


def peak_rss_mib() -> float:
    """Return the most memory that this process has held so far, MiB; 0 where nobody tells."""
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
