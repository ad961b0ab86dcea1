"""Which settings are worth having: the front of quality and speed, and the one to take.

Next: hybrid/cli/sweep.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybrid.eval.grid import label

Rows = Sequence[Mapping[str, Any]]


def points(rows: Rows) -> list[dict[str, Any]]:
    """Return one point per setting from the rows of its tasks, in their order.

    `quality` is the mean of the tasks' accuracies, each task counting alike; `tokens_per_second`
    and `tokens_per_forward` are sums over sums. `is_on_front` says whether no other point is at
    least as good in quality and in tokens per second and better in one of them.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(label(row), []).append(row)
    found = [_point(own) for own in groups.values()]
    for point in found:
        point["is_on_front"] = not any(_beats(other, point) for other in found)
    return found


def choose(found: Rows, max_drop: float) -> Mapping[str, Any]:
    """Return the fastest point whose quality is at most `max_drop` below the best quality.

    Args:
        found: from `points`.
        max_drop: a share: 0.01 is one percent point.
    """
    best = max(point["quality"] for point in found)
    # The differences of shares of a few items are rounded: 0.9 - 0.89 is more than 0.01.
    enough = [p for p in found if p["quality"] >= best - max_drop - 1e-9]
    return max(enough, key=lambda p: (p["tokens_per_second"], p["quality"]))


def _point(rows: Rows) -> dict[str, Any]:
    tokens = sum(row["counts"]["num_new_tokens"] for row in rows)
    seconds = sum(row["seconds"] for row in rows)
    decoded = forwards = 0.0
    for row in rows:
        counts = row["counts"]
        decode = counts["num_forwards"] - counts["num_prefill_forwards"]
        decoded += row["tokens_per_forward"] * decode
        forwards += decode
    return {
        "strategy": rows[0]["strategy"],
        "parameters": rows[0]["parameters"],
        "quality": sum(row["accuracy"] for row in rows) / len(rows),
        "num_right": sum(row["num_right"] for row in rows),
        "num_items": sum(row["num_items"] for row in rows),
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "tokens_per_forward": decoded / forwards if forwards else 0.0,
    }


def _beats(other: Mapping[str, Any], point: Mapping[str, Any]) -> bool:
    names = ("quality", "tokens_per_second")
    at_least = all(other[name] >= point[name] for name in names)
    return at_least and any(other[name] > point[name] for name in names)
