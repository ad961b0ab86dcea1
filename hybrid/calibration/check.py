"""What a profile is worth on prompts that it has not seen: speed and disagreement, side by side.

Next: hybrid/calibration/calibrate.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hybrid.decoder import HybridDecoder
from hybrid.metrics import pooled
from hybrid.params import SamplingParams
from hybrid.router.config import RouterConfig
from hybrid.router.profile import Profile
from hybrid.strategy import Strategy
from hybrid.types import GenerationResult

Progress = Callable[[str, int, int], None]


def check_profile(
    decoder: HybridDecoder,
    prompts: Sequence[Sequence[int]],
    profile: Path,
    *,
    max_new_tokens: int = 64,
    risks: Sequence[float] = (),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Decode every prompt by each strategy in turn, and compare.

    Each prompt goes through "ar" (the texts that the others are compared with), "speculative",
    "hybrid" without risk and with it, routed as the profile was calibrated.

    Args:
        decoder: the model with its adapter.
        prompts: token ids.
        profile: to check.
        max_new_tokens: length of each answer.
        risks: more risks to decode with, at least that of the profile.
        progress: called with (what, done, total).

    Returns:
        JSON types: `rows`, one per strategy, and what they were measured on.

    Raises:
        CheckpointError: the profile cannot be read.
        ConfigError: it is for another model, adapter or temperature.
    """
    found = Profile.load(profile)
    params = SamplingParams(temperature=found.temperature, max_new_tokens=max_new_tokens, seed=0)
    same: dict[str, Any] = {"profile": profile}  # without risk, routed as with it
    if found.router is not None:
        config = RouterConfig(**found.router)
        same |= {"cost": config.cost, "block_size": config.num_draft_tokens + 1}
    strategies = {
        "ar": Strategy.preset("ar"),
        "speculative": Strategy.preset("speculative"),
        "hybrid risk=0": Strategy.preset("hybrid", **same),
    }
    for risk in sorted({found.risk, *risks}):
        strategies[f"hybrid risk={risk}"] = Strategy.preset("hybrid", risk=risk, profile=profile)
    results: dict[str, list[GenerationResult]] = {name: [] for name in strategies}
    for index, prompt in enumerate(prompts, start=1):
        for name, strategy in strategies.items():
            results[name].append(decoder.generate(list(prompt), params, strategy=strategy))
        if progress is not None:
            progress("prompts", index, len(prompts))
    lossless = pooled([r.stats for r in results["speculative"]])["tokens_per_forward"]
    return {
        "kind": "risk",
        "profile": {"domain": found.domain, "risk": found.risk, "delta": found.delta},
        "num_prompts": len(prompts),
        "max_new_tokens": max_new_tokens,
        "rows": [_row(name, own, results["ar"], lossless) for name, own in results.items()],
    }


def _row(
    name: str,
    results: Sequence[GenerationResult],
    reference: Sequence[GenerationResult],
    lossless: float,
) -> dict[str, Any]:
    stats = [result.stats for result in results]
    unverified = sum(s.num_unverified for s in stats)
    disagreeing = sum(s.num_unverified_disagreeing for s in stats)
    speed = pooled(stats)["tokens_per_forward"]
    by_mode: dict[str, int] = {}
    for s in stats:
        for mode, count in s.forwards_by_mode.items():
            by_mode[mode] = by_mode.get(mode, 0) + count
    pairs = zip(results, reference, strict=True)
    return {
        "strategy": name,
        "tokens_per_forward": speed,
        "against_speculative": speed / lossless if lossless else 0.0,
        "num_tokens": sum(s.num_new_tokens for s in stats),
        "num_unverified": unverified,
        "num_unverified_disagreeing": disagreeing,
        "disagreement": disagreeing / unverified if unverified else 0.0,
        "equal_to_ar": sum(own.token_ids == ar.token_ids for own, ar in pairs),
        "forwards_by_mode": by_mode,
    }
