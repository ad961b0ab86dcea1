"""What a calibration found, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid.router.profile import Profile


def profile_table(profile: Profile) -> str:
    """Return the accepted thresholds, strict to lax, and their evidence."""
    promise = f"risk {profile.risk:g} with confidence {1 - profile.delta:.0%}"
    lines = [
        f"{promise}, domain {profile.domain}, temperature {profile.temperature:g}",
        f"without trust: {profile.lossless_tokens_per_forward:.2f} tokens per forward",
        "",
        "threshold   tokens   disagree   at most   p-value   tokens/forward",
    ]
    for t in profile.thresholds:
        share = t.disagreements / max(t.num_tokens, 1)
        lines.append(
            f"{t.threshold:9.3f}{t.num_tokens:9d}{share:11.4f}{t.upper_bound:10.4f}"
            f"{t.p_value:10.4f}{t.tokens_per_forward:17.2f}"
        )
    return "\n".join(lines)


def check_table(document: Mapping[str, Any]) -> str:
    """Return what a profile was worth on other prompts."""
    size = f"{document['num_prompts']} prompts x {document['max_new_tokens']} tokens"
    profile = document["profile"]
    lines = [
        f"{size}, profile: {profile['domain']}, risk {profile['risk']:g}",
        "",
        "strategy            tokens/forward   x speculative   unverified   disagree   = ar",
    ]
    for row in document["rows"]:
        lines.append(
            f"{row['strategy']:<20}{row['tokens_per_forward']:14.2f}"
            f"{row['against_speculative']:16.2f}{row['num_unverified']:13d}"
            f"{row['disagreement']:11.4f}{row['equal_to_ar']:7d}"
        )
    return "\n".join(lines)
