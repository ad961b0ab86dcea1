"""Front and choice against a twin that looks at every pair, and by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.eval.pareto import choose, points


def row(name, accuracy, tokens, seconds, *, forwards=10, prefill=2, tpf=1.0, task="t"):
    return {
        "strategy": "s",
        "parameters": {"name": name},
        "task": task,
        "accuracy": accuracy,
        "num_right": round(10 * accuracy),
        "num_items": 10,
        "tokens_per_forward": tpf,
        "seconds": seconds,
        "counts": {
            "num_new_tokens": tokens,
            "num_forwards": forwards,
            "num_prefill_forwards": prefill,
        },
    }


def test_tasks_of_a_setting_are_one_point() -> None:
    rows = [
        row("a", 0.4, 100, 2.0, tpf=2.0, forwards=12, prefill=2, task="t"),
        row("b", 0.6, 50, 1.0),
        row("a", 0.8, 300, 6.0, tpf=1.0, forwards=31, prefill=1, task="u"),
    ]
    first, second = points(rows)
    assert (first["parameters"], second["parameters"]) == ({"name": "a"}, {"name": "b"})
    assert first["quality"] == pytest.approx(0.6)
    assert first["tokens_per_second"] == 400 / 8
    assert first["tokens_per_forward"] == (2.0 * 10 + 1.0 * 30) / 40
    assert (first["num_right"], first["num_items"]) == (12, 20)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12),
    st.integers(0, 4),
)
def test_front_and_choice_against_a_twin(pairs, drop) -> None:
    found = points([row(i, q / 10, speed, 1.0) for i, (q, speed) in enumerate(pairs)])
    for (quality, speed), point in zip(pairs, found, strict=True):
        better = [
            (q, s) for q, s in pairs if (q >= quality and s > speed) or (q > quality and s >= speed)
        ]
        assert point["is_on_front"] == (not better)
    chosen = choose(found, drop / 10)
    enough = [(s, q) for q, s in pairs if q >= max(q for q, _ in pairs) - drop]
    assert (chosen["tokens_per_second"], chosen["quality"]) == (
        max(enough)[0],
        pytest.approx(max(enough)[1] / 10),
    )
    assert chosen["is_on_front"]


def test_a_drop_of_exactly_as_much_is_allowed() -> None:
    rows = [row("a", 0.9, 10, 1.0), row("b", 0.89, 20, 1.0), row("c", 0.88, 90, 1.0)]
    assert choose(points(rows), 0.01)["parameters"] == {"name": "b"}
    assert choose(points(rows), 0.0)["parameters"] == {"name": "a"}
