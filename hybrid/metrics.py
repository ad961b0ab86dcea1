"""The one place where acceptance length, acceptance rate, TPF and times are computed.

Definitions (docs/glossary.md): acceptance length = tokens committed by decode steps / target passes
of decode (bonus included, prefill excluded); acceptance rate = accepted / drafted; TPF = tokens
committed by decode steps / all backbone passes of decode, draft and denoising passes included;
total TPF counts the prefill and its token too. What was denoised has no acceptance length. Tokens
that were committed unverified count as accepted; `num_unverified_disagreeing` adds up the
probabilities with which the target would have rejected them. `forwards_by_mode` splits the passes
of decode, draft passes included, by the mode of their step.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from hybrid.errors import ConfigError
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
        self._new = self._decoded = self._drafted = self._accepted = self._unverified = 0
        self._disagreeing = 0.0
        self._by_mode: Counter[str] = Counter()
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
        num_unverified = min(row.num_unverified, len(row.tokens))  # a stop rule may end it before
        self._unverified += num_unverified
        self._disagreeing += sum(row.disagreements[:num_unverified])
        passes = (
            record.num_draft_forwards + record.num_verify_forwards + record.num_denoise_forwards
        )
        mode = record.mode if record.mode == Mode.DIFFUSION else row.mode
        self._by_mode[mode.value] += passes
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
            num_unverified=self._unverified,
            num_unverified_disagreeing=self._disagreeing,
            forwards_by_mode=dict(self._by_mode),
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


def total_tokens_per_forward(parts: Sequence[Stats]) -> float:
    """Return the micro-averaged total TPF of several requests: prefills and their tokens count."""
    return _ratio(sum(s.num_new_tokens for s in parts), sum(s.num_forwards for s in parts))


def aup(
    tpf: Sequence[float],
    accuracy: Sequence[float],
    best: float,
    *,
    alpha: float = 3.0,
    max_loss: float = 5.0,
) -> float:
    """Return the accuracy under parallelism of one method on one task (arXiv:2601.07568).

    The area under its curve of accuracy over TPF, where what is less accurate than `best` counts
    less. Left of the first point the curve is flat, and not weighted. Points that lose more than
    `max_loss` are left out.

    Args:
        tpf: tokens per forward at each setting of the method, in any order.
        accuracy: percent, at each setting.
        best: percent, of any method on this task.
        alpha: how fast the weight falls.
        max_loss: percent points that a setting may lose against the one with the smallest TPF.

    Raises:
        ConfigError: no points, a TPF that is not above 0, a percentage outside 0 to 100, or the
            fastest setting loses more than `max_loss`: then the method has no AUP.
    """
    if not tpf or len(tpf) != len(accuracy):
        raise ConfigError(
            f"AUP: got {len(tpf)} TPF and {len(accuracy)} accuracies, expected as many, at least 1."
        )
    if min(tpf) <= 0:
        raise ConfigError(
            f"AUP: got TPF {min(tpf):g}, expected more than 0. Answers of one token have no decode "
            "step: allow longer ones."
        )
    wrong = next((y for y in (*accuracy, best) if not 0 <= y <= 100), None)
    if wrong is not None:
        raise ConfigError(f"AUP: got an accuracy of {wrong:g}, expected percent from 0 to 100.")
    points = sorted(zip(tpf, accuracy, strict=True), key=lambda point: point[0])
    first, last = points[0][1], points[-1][1]
    if first - last > max_loss:
        raise ConfigError(
            f"AUP: the fastest setting (TPF {points[-1][0]:g}) has {last:g} %, which is "
            f"{first - last:g} points below the slowest (TPF {points[0][0]:g}, {first:g} %), "
            f"expected at most {max_loss:g}. Leave out the settings that lose more."
        )
    kept = [(x, y) for x, y in points if y >= first - max_loss]

    def weighted(y: float) -> float:
        return y if y >= best else y * math.exp(-alpha * (1 - y / best))

    area = kept[0][0] * kept[0][1]
    for (x0, y0), (x1, y1) in pairwise(kept):
        area += 0.5 * (x1 - x0) * (weighted(y1) + weighted(y0))
    return area


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
