"""The evidence of a profile as a picture: speed over risk, and what confidences are worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybrid.pictures import new_figure, save_figure
from hybrid.router.profile import Profile


def plot_profile(profile: Profile, path: Path) -> Path:
    """Draw the risk-speed curve and the calibration by position.

    Raises:
        ConfigError: matplotlib is missing.
        CheckpointError: the picture cannot be written.
    """
    figure = new_figure(10, 4.2)
    left, right = figure.subplots(1, 2)
    _speed(left, profile)
    _curves(right, profile)
    return save_figure(figure, path)


def _speed(axes: Any, profile: Profile) -> None:
    tested = profile.thresholds
    observed = [t.disagreements / max(t.num_tokens, 1) for t in tested]
    speeds = [t.tokens_per_forward for t in tested]
    above = [t.upper_bound - o for t, o in zip(tested, observed, strict=True)]
    axes.errorbar(
        observed,
        speeds,
        xerr=[[0.0] * len(above), above],
        marker="o",
        capsize=3,
        label=f"observed, and bound at {1 - profile.delta:.0%}",
    )
    for t, x in zip(tested, observed, strict=True):
        axes.annotate(f"{t.threshold:g}", (x, t.tokens_per_forward), fontsize="small")
    axes.axhline(profile.lossless_tokens_per_forward, color="C7", ls=":", label="nothing trusted")
    axes.axvline(profile.risk, color="C3", ls="--", label=f"risk {profile.risk:g}")
    axes.set_xlabel("share of unverified tokens that disagree with AR")
    axes.set_ylabel("tokens per forward")
    axes.legend(fontsize="small")


def _curves(axes: Any, profile: Profile) -> None:
    confidences = [i / 200 for i in range(201)]
    for slot, curve in sorted(profile.calibration.items()):
        axes.plot(confidences, [curve(c) for c in confidences], label=str(slot))
    axes.plot([0, 1], [0, 1], color="C7", ls=":")
    axes.set_xlabel("confidence of the slot")
    axes.set_ylabel("share that agrees with AR")
    axes.legend(title="slot", fontsize="x-small", ncols=2)
