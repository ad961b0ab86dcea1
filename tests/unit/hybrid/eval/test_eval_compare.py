"""The gate: what counts as worse, and what cannot be compared."""

from __future__ import annotations

import json

import pytest

from hybrid.errors import ConfigError
from hybrid.eval.compare import Drop, compare, read_report, table_of


def row(accuracy=0.9, tpf=2.0, **changes):
    return {
        "task": "t",
        "strategy": "s",
        "parameters": {"a": 1, "b": 2},
        "digest": "d",
        "accuracy": accuracy,
        "tokens_per_forward": tpf,
        **changes,
    }


def drops(old, new, max_drop=0.01):
    return compare({"rows": [old]}, {"rows": new}, max_drop)


def test_accuracy_drops_by_its_difference() -> None:
    assert drops(row(0.9), [row(0.89)]) == []  # exactly as much as allowed
    assert drops(row(0.9), [row(0.88)]) == [Drop("t", "s a=1 b=2", "accuracy", 0.9, 0.88)]
    assert drops(row(0.9), [row(0.88)], 0.05) == []
    assert drops(row(0.9), [row(1.0)], 0) == []


def test_tpf_drops_by_its_share() -> None:
    assert drops(row(tpf=4.0), [row(tpf=3.96)]) == []
    assert drops(row(tpf=4.0), [row(tpf=3.95)]) == [Drop("t", "s a=1 b=2", "TPF", 4.0, 3.95)]
    assert len(drops(row(0.9, 4.0), [row(0.5, 2.0)])) == 2


def test_rows_are_matched_by_task_strategy_and_parameters() -> None:
    assert drops(row(), [row(parameters={"b": 2, "a": 1})]) == []
    for other in ({"task": "u"}, {"strategy": "r"}, {"parameters": {}}):
        assert drops(row(), [row(**other)]) == [Drop("t", "s a=1 b=2", "missing")]
    assert drops(row(), [row(), row(0.1, task="new")]) == []
    assert drops(row(), [row(digest="e")]) == [Drop("t", "s a=1 b=2", "other questions")]


def test_the_table_names_numbers() -> None:
    table = table_of(drops(row(0.9), [row(0.5)]) + [Drop("t", "s", "missing")], 0.01)
    assert table.title == "Dropped by more than 0.01"
    assert table.rows == (
        ("s a=1 b=2", "t", "accuracy", "0.9", "0.5"),
        ("s", "t", "missing", "-", "-"),
    )


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"rows": [{"task": "t"}]}', '{"rows": [1]}'])
def test_what_is_no_report(tmp_path, content) -> None:
    path = tmp_path / "old.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="old.json"):
        read_report(path)
    path.write_text(json.dumps({"rows": [row()]}))
    assert read_report(path)["rows"] == [row()]
    with pytest.raises(ConfigError, match="cannot be read"):
        read_report(tmp_path / "none.json")
