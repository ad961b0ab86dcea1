"""From prompts to a profile: fit what confidences are worth, then test thresholds one by one.

Learn then test (arXiv:2110.01052) with the betting bound of hybrid/router/bounds.py. The prompts
are split. The first part is decoded without trust; it tells how often tokens of a slot and a
confidence agree with AR, and where to begin. Each threshold, strict to lax, then decodes the second
part as it would be used, and is accepted if its disagreement is below the risk with confidence
1 - delta; the first that is not ends it. So what is promised is measured on texts that hold
unverified tokens, not on those of AR. Next: hybrid/router/profile.py.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import Field

from hybrid.calibration.evidence import EvidenceFile, Judged, PromptEvidence, collect
from hybrid.config import Config
from hybrid.decoder import HybridDecoder
from hybrid.errors import ConfigError
from hybrid.params import SamplingParams
from hybrid.router.acceptance import AcceptanceModel
from hybrid.router.bounds import betting_p_value, fixed_sequence, upper_bound
from hybrid.router.logistic import LogisticCurve, fit_logistic
from hybrid.router.profile import Profile, Threshold
from hybrid.strategy import Strategy

Progress = Callable[[str, int, int], None]

# Probabilities of agreement at which a token might be trusted. Which of them are tested is decided
# on the first part of the prompts, so the second is not asked more than once per threshold.
GRID = (0.999, 0.995, 0.99, 0.985, 0.98, 0.97, 0.96, 0.95, 0.93, 0.9, 0.85, 0.8)
# Below so many judged tokens a slot has no curve of its own, but shares that of the slots behind.
_LEAST_TOKENS = 50
_PRIOR = tuple(i / 20 for i in range(1, 20))


class CalibrationConfig(Config):
    """What is promised, and how it is tested.

    Attributes:
        risk: share of unverified tokens that AR would not have chosen.
        delta: chance that the promise is wrong.
        domain: what the prompts are, for the record.
        temperature: of decoding; the profile holds for it alone.
        cost: by which the router decides, "forwards" or "measured"; the profile holds for it alone.
        block_size: anchor and drafted tokens together; None is the drafter's own choice. The
            profile holds for it alone.
        max_new_tokens: length of each answer.
        fit_share: of the prompts, for the first part.
        num_thresholds: the most that are tested, each by decoding the second part.
    """

    risk: Annotated[float, Field(gt=0, lt=1)] = 0.02
    delta: Annotated[float, Field(gt=0, lt=1)] = 0.05
    domain: str = "general"
    temperature: Annotated[float, Field(ge=0)] = 0.0
    cost: Literal["measured", "forwards"] = "forwards"
    block_size: Annotated[int, Field(ge=2)] | None = None
    max_new_tokens: Annotated[int, Field(ge=2)] = 64
    fit_share: Annotated[float, Field(gt=0, lt=1)] = 0.4
    num_thresholds: Annotated[int, Field(ge=1)] = 2


def calibrate_profile(
    decoder: HybridDecoder,
    prompts: Sequence[Sequence[int]],
    config: CalibrationConfig,
    output: Path,
    progress: Progress | None = None,
) -> Profile:
    """Calibrate, and write the profile.

    Args:
        decoder: the model with its adapter.
        prompts: token ids, independent draws from the domain in any order.
        config: the promise.
        output: of the profile. Evidence is kept beside it as it comes in, so that an interrupted
            calibration goes on where it stopped.
        progress: called with (what, done, total).

    Raises:
        ConfigError: too few prompts, a drafter without confidences, or no threshold that keeps the
            promise.
        CheckpointError: the profile or its evidence cannot be written.
    """
    num_fit = round(len(prompts) * config.fit_share)
    numbered = list(enumerate(prompts))
    if num_fit < 2 or num_fit == len(prompts):
        raise ConfigError(
            f"prompts: got {len(prompts)}, expected hundreds (700 for a risk of 2 %)."
        )
    params = SamplingParams(
        temperature=config.temperature, max_new_tokens=config.max_new_tokens, seed=0
    )
    base = _profile(decoder, config)
    file = EvidenceFile(
        output.with_name(output.name + ".evidence.jsonl"),
        _conditions(decoder, prompts, config, base),
    )
    base = base.replace(costs=file.keep_costs(base.costs))
    report = progress or (lambda *_: None)

    def decode(
        part: Iterable[tuple[int, Any]], strategy: Strategy, run: str
    ) -> list[PromptEvidence]:
        part, found = list(part), []
        for evidence in collect(decoder, part, params, strategy, run, file):
            found.append(evidence)
            report(run, len(found), len(part))
        return found

    first = decode(numbered[:num_fit], _strategy(base), "fit")
    base = base.replace(
        calibration=fit_curves([token for evidence in first for token in evidence.judged]),
        lossless_tokens_per_forward=speed(first),
        acceptance=counts(first),
    )
    candidates = worth_testing(first, config.risk)
    base = base.replace(most=usual_count(first, base, candidates[0]))
    results: list[Threshold] = []

    def p_values() -> Iterator[float]:
        for threshold in candidates[: config.num_thresholds]:
            seen = decode(numbered[num_fit:], _strategy(base, threshold), f"threshold {threshold}")
            results.append(tested(threshold, seen, config, base.most))
            yield results[-1].p_value

    accepted = results[: fixed_sequence(p_values(), config.delta)]
    if not accepted:
        raise ConfigError(
            f"No threshold keeps a risk of {config.risk} with confidence {1 - config.delta:.2f} on "
            f"these {len(prompts) - num_fit} prompts. Give more prompts, or allow more risk."
        )
    profile: Profile = base.replace(thresholds=tuple(accepted))
    profile.save(output)
    return profile


def fit_curves(judged: Sequence[Judged]) -> dict[int, LogisticCurve]:
    """Return {slot: from a confidence to the probability that the target agrees}.

    Slots with few tokens share one curve with those behind them.

    Raises:
        ConfigError: nothing was judged.
    """
    by_slot: dict[int, list[Judged]] = defaultdict(list)
    for token in judged:
        if token.slot:
            by_slot[token.slot].append(token)
    if not by_slot:
        raise ConfigError(
            "No drafted token came with a confidence: this decoder's drafter does not say how sure "
            "it is. Use an adapter for self-diffusion."
        )
    curves, last = {}, max(by_slot)
    for slot in range(min(by_slot), last + 1):
        own = by_slot[slot]
        if len(own) < _LEAST_TOKENS:
            own = [token for behind in range(slot, last + 1) for token in by_slot[behind]]
        if own:
            # Beside the data, the confidence itself is worth a token at each of a few points, so
            # that a few tokens that all agree are not taken for certainty.
            curves[slot] = fit_logistic(
                [token.confidence for token in own] + list(_PRIOR),
                [1 - token.disagreement for token in own] + list(_PRIOR),
            )
    return curves


def worth_testing(first: Sequence[PromptEvidence], risk: float) -> list[float]:
    """Return the thresholds to test, strict to lax, from the first part of the prompts alone.

    A very strict one leaves so few tokens unverified that nothing can be shown about them, and
    would end the sequence. So it begins with the laxest one whose tokens seem to disagree a quarter
    as often as they may: in use, tokens were seen to disagree twice as often as in this part, where
    a draft is judged up to its first rejection only. Curves of one half of the prompts judge the
    other half, because a curve flatters the data that it was fitted to.
    """
    halves = first[::2], first[1::2]
    scored: list[tuple[float, float]] = []
    for fitted, judged in (halves, halves[::-1]):
        curves = fit_curves([token for evidence in fitted for token in evidence.judged])
        for token in (token for evidence in judged for token in evidence.judged):
            if token.slot in curves:
                scored.append((curves[token.slot](token.confidence), token.disagreement))
    start = 0
    for index, threshold in enumerate(GRID):
        kept = [disagreement for score, disagreement in scored if score >= threshold]
        # One more disagreement than was seen: few tokens prove little.
        if kept and (sum(kept) + 1) / len(kept) <= risk / 4:
            start = index
    return list(GRID[start:])


def counts(first: Sequence[PromptEvidence]) -> dict[str, Any]:
    """Return what a router may begin with: the counts of `AcceptanceModel`."""
    model = AcceptanceModel()
    for evidence in first:
        for token in evidence.judged:
            success = 1 - token.disagreement
            model.learn(token.first_slot, token.index, token.confidence, success)
    return model.to_dict()


def usual_count(first: Sequence[PromptEvidence], profile: Profile, threshold: float) -> float:
    """Return the median number of tokens per prompt that reach a threshold, at least 1."""
    counts = [
        sum(
            profile.score(token.slot, token.confidence) >= threshold
            for token in evidence.judged
            if token.slot
        )
        for evidence in first
    ]
    return float(max(median(counts), 1))


def tested(
    threshold: float, seen: Sequence[PromptEvidence], config: CalibrationConfig, most: float
) -> Threshold:
    """Return the threshold with its evidence.

    Args:
        threshold: that decoded the prompts.
        seen: of each prompt.
        config: the promise.
        most: see `betting_p_value`; chosen before the evidence.
    """
    disagreements = [evidence.disagreement for evidence in seen]
    counts = [evidence.num_unverified for evidence in seen]

    def p_value(share: float) -> float:
        return betting_p_value(disagreements, counts, share, most=most)

    return Threshold(
        threshold=threshold,
        num_prompts=len(seen),
        num_tokens=sum(counts),
        disagreements=sum(disagreements),
        p_value=p_value(config.risk),
        upper_bound=upper_bound(p_value, config.delta),
        tokens_per_forward=speed(seen),
    )


def speed(seen: Sequence[PromptEvidence]) -> float:
    """Return the tokens per forward of all prompts together."""
    forwards = sum(evidence.num_forwards for evidence in seen)
    return sum(evidence.num_tokens for evidence in seen) / max(forwards, 1)


def _profile(decoder: HybridDecoder, config: CalibrationConfig) -> Profile:
    """Return a profile that trusts nothing yet."""
    model, adapter = decoder.identity()
    settings = {"cost": config.cost, "block_size": config.block_size}
    router, costs = decoder.routed(Strategy.preset("hybrid", **settings))
    return Profile(
        router=router.model_dump(mode="json", exclude={"risk"}),
        costs=costs.to_dict(),
        model=model,
        adapter=adapter,
        domain=config.domain,
        temperature=config.temperature,
        risk=config.risk,
        delta=config.delta,
    )


def _strategy(profile: Profile, *thresholds: float) -> Strategy:
    """Return the strategy with thresholds in force all the time: no monitor interferes."""
    untested = {"num_prompts": 1, "num_tokens": 0, "disagreements": 0, "p_value": 1}
    tried = tuple(Threshold(threshold=threshold, **untested) for threshold in thresholds)
    profile = profile.replace(thresholds=tried)
    return Strategy.preset("hybrid", risk=profile.risk, profile=profile, is_monitored=False)


def _conditions(
    decoder: HybridDecoder,
    prompts: Sequence[Sequence[int]],
    config: CalibrationConfig,
    base: Profile,
) -> dict[str, Any]:
    """Return everything that the evidence depends on, but the costs."""
    digest = hashlib.sha256(json.dumps([list(ids) for ids in prompts]).encode()).hexdigest()
    return {
        "model": base.model,
        "adapter": base.adapter,
        "drafter": decoder.drafter_name,
        "router": base.router,
        "dtype": str(decoder.backbone.dtype),
        "prompts": digest[:16],
        **config.model_dump(),
    }
