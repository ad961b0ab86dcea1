"""From samples to the rows of a report: speed, ratios, equality, and where the time went.

Equality is computed, never claimed. Nothing here prints or measures. Next: hybrid/cli/bench.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, cast

from hybrid.bench.candidates import Candidate, DecoderCandidate, Reference
from hybrid.bench.runner import Sample
from hybrid.metrics import acceptance_by_position, pooled, pooled_histogram, speedup
from hybrid.types import Mode, Stats, StepRecord

Samples = Mapping[str, Sequence[Sample]]


def report_rows(
    candidates: Sequence[Candidate],
    samples: Samples,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    categories: Sequence[str | None] | None = None,
) -> list[dict[str, Any]]:
    """Return one row of JSON types per candidate.

    Args:
        candidates: what was measured.
        samples: from `measure`.
        prompts: token ids, in the order of the samples.
        max_new_tokens: of each answer.
        categories: of each prompt.
    """
    baselines = [c.name for c in candidates if c.engine != "hybrid"]
    max_seq_len = max(map(len, prompts)) + max_new_tokens
    rows = []
    for candidate in candidates:
        own = samples[candidate.name]
        row = {
            "name": candidate.name,
            "engine": candidate.engine,
            "version": candidate.version,
            "dtype": candidate.dtype,
            "num_tokens": [len(s.answer.tokens) for s in own],
            "seconds": [round(s.seconds, 6) for s in own],
            "tokens_per_second": _quantiles([1 / s.seconds_per_token for s in own]),
            "ratios": {name: ratio(own, samples[name]) for name in baselines},
            **_equality(candidate, reference_of(candidate, candidates), samples, prompts),
        }
        ar = own_ar(candidate, candidates)
        if ar is not None:
            row["ratios"]["ar"] = ratio(own, samples[ar.name])
        if isinstance(candidate, DecoderCandidate):
            row |= _engine_numbers(candidate, own, max_seq_len)
        if isinstance(candidate, DecoderCandidate) and categories is not None:
            matches = row.get("greedy_match_by_prompt")
            ar_samples = None if ar is None else samples[ar.name]
            row["by_category"] = _by_category(own, ar_samples, matches, categories)
        rows.append(row)
    return rows


def ratio(samples: Sequence[Sample], baseline: Sequence[Sample]) -> float:
    """Return how many times faster than `baseline`: the median over prompts of time per token."""
    own, other = ([s.seconds_per_token for s in side] for side in (samples, baseline))
    return speedup(own, other)


def own_ar(candidate: Candidate, candidates: Sequence[Candidate]) -> Candidate | None:
    """Return our own `ar` in the candidate's precision; None for other engines or without one."""
    if candidate.engine != "hybrid":
        return None
    same = (c for c in candidates if c.dtype == candidate.dtype)
    return next((c for c in same if getattr(c, "strategy", None) == "ar"), None)


def reference_of(candidate: Candidate, candidates: Sequence[Candidate]) -> Reference | None:
    """Return what this candidate's tokens must equal.

    In float32 that is transformers. In other precisions two engines round differently, so it is
    our own `ar` in the same precision. Baselines are compared with nothing.
    """
    if candidate.engine != "hybrid":
        return None
    for other in candidates:
        if candidate.dtype == "float32" and other.engine == "transformers":
            return cast("Reference", other)
    ar = own_ar(candidate, candidates)
    return None if ar is candidate else cast("Reference | None", ar)


def first_divergence(
    prompt: Sequence[int], expected: Sequence[int], got: Sequence[int], reference: Reference
) -> dict[str, Any] | None:
    """Return where two answers to a prompt part, None when they are equal.

    Returns:
        position, the two token ids (None past an answer's end), and margin: by how much the
        reference's most probable token beats the next one there, in its logits.
    """
    if tuple(expected) == tuple(got):
        return None
    pairs = zip(expected, got, strict=False)
    shorter = min(len(expected), len(got))
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    top = reference.next_logits([*prompt, *expected[:position]]).float().topk(2).values
    return {
        "position": position,
        "expected": expected[position] if position < len(expected) else None,
        "got": got[position] if position < len(got) else None,
        "margin": float(top[0] - top[1]),
    }


def _equality(
    candidate: Candidate,
    reference: Reference | None,
    samples: Samples,
    prompts: Sequence[Sequence[int]],
) -> dict[str, Any]:
    if reference is None:
        return {"reference": None, "greedy_match": None}
    found = []
    expected, got = samples[reference.name], samples[candidate.name]
    for index, (prompt, e, g) in enumerate(zip(prompts, expected, got, strict=True)):
        divergence = first_divergence(prompt, e.answer.tokens, g.answer.tokens, reference)
        if divergence is not None:
            found.append({"prompt": index, **divergence})
    parted = {divergence["prompt"] for divergence in found}
    return {
        "reference": reference.name,
        "greedy_match": not found,
        "greedy_match_by_prompt": [index not in parted for index in range(len(prompts))],
        "num_greedy_match": len(prompts) - len(found),
        "first_divergence": found[0] if found else None,
        "largest_margin": max((d["margin"] for d in found), default=None),
    }


def _by_category(
    samples: Sequence[Sample],
    ar: Sequence[Sample] | None,
    matches: Sequence[bool] | None,
    categories: Sequence[str | None],
) -> dict[str, dict[str, Any]]:
    found = {}
    for category in sorted({c for c in categories if c is not None}):
        members = [i for i, c in enumerate(categories) if c == category]
        own = [samples[i] for i in members]
        found[category] = {
            "num_prompts": len(members),
            "acceptance_length": pooled(_stats(own))["acceptance_length"],
            "ratio_to_ar": None if ar is None else ratio(own, [ar[i] for i in members]),
            "num_greedy_match": None if matches is None else sum(matches[i] for i in members),
        }
    return found


def _stats(samples: Sequence[Sample]) -> list[Stats]:
    return [s.answer.stats for s in samples if s.answer.stats is not None]


def _engine_numbers(
    candidate: DecoderCandidate, samples: Sequence[Sample], max_seq_len: int
) -> dict[str, Any]:
    stats = _stats(samples)
    records = [record for s in samples for record in s.answer.records]
    numbers, histogram = pooled(stats), pooled_histogram(stats)
    num_draft_tokens = max((row.num_drafted for r in records for row in r.rows), default=0)
    # On a GPU a pass returns before it has run, so the records' times are not those of passes.
    is_cpu = candidate.decoder.backbone.device.type == "cpu"
    seconds = sum(s.seconds for s in samples)
    return {
        "strategy": candidate.strategy,
        "parameters": candidate.parameters,
        "drafter": candidate.drafter,
        "verifier": candidate.verifier,
        "num_draft_tokens": num_draft_tokens,
        "acceptance_length": numbers["acceptance_length"],
        "acceptance_rate": numbers["acceptance_rate"],
        "acceptance_histogram": histogram,
        "acceptance_by_position": acceptance_by_position(histogram, num_draft_tokens),
        "tokens_per_forward": numbers["tokens_per_forward"],
        "forwards": {
            "prefill": sum(s.num_prefill_forwards for s in stats),
            "draft": sum(s.num_draft_forwards for s in stats),
            "verify": sum(s.num_verify_forwards for s in stats),
            "denoise": sum(s.num_denoise_forwards for s in stats),
        },
        "loop_overhead": 1 - forward_seconds(records) / seconds if is_cpu else None,
        "ms_per_forward": ms_per_forward(records) if is_cpu else None,
        "ttft_ms": _quantiles([s.ttft_ms for s in stats]),
        "tpot_ms": _quantiles([s.tpot_ms for s in stats]),
        "planned_memory_mib": candidate.decoder.plan_memory(max_seq_len)["total"] / 2**20,
    }


def forward_seconds(records: Sequence[StepRecord]) -> float:
    """Return the time of all backbone passes; a draft without a pass (n-gram lookup) is none."""
    return sum(
        r.forward_seconds + (r.draft_seconds if r.num_draft_forwards else 0) for r in records
    )


def ms_per_forward(records: Sequence[StepRecord]) -> dict[str, float]:
    """Return the median time of a pass: target passes by width (tokens), and draft passes."""
    times: dict[str, list[float]] = defaultdict(list)
    for record in records:
        if record.mode == Mode.PREFILL or record.width == 0:  # 0: no pass ran
            continue
        times[str(record.width)].append(record.forward_seconds)
        if record.num_draft_forwards:
            times["draft"].append(record.draft_seconds / record.num_draft_forwards)
    widths = sorted(times, key=lambda width: (width == "draft", len(width), width))
    return {width: 1000 * median(times[width]) for width in widths}


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return {"p20": at(0.2), "p50": at(0.5), "p80": at(0.8)}
