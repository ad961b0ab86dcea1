"""Finished cells are found again for the same of everything, and for nothing else."""

from __future__ import annotations

import json

import pytest

from hybrid.errors import ConfigError
from hybrid.eval.cells import Cell, Cells, files_stamp

ENVIRONMENT = {
    "git_sha": "abc",
    "is_dirty": False,
    "cpu": "x",
    "date": "today",
    "peak_memory_mib": 1,
}
CELL = Cell({"accuracy": 0.5}, [{"score": 1.0}])


def test_a_cell_is_known_by_everything_but_the_date(tmp_path) -> None:
    path = tmp_path / "deep" / "cells.jsonl"
    cells = Cells(path, ENVIRONMENT, model="m")
    key = cells.key(strategy="ar", task="t")
    assert cells.get(key) is None
    cells.add(key, CELL)
    later = {**ENVIRONMENT, "date": "tomorrow", "peak_memory_mib": 2}
    again = Cells(path, later, model="m")
    assert again.key(task="t", strategy="ar") == key
    assert again.get(key) == CELL
    others = [
        Cells(path, ENVIRONMENT, model="n").key(strategy="ar", task="t"),
        Cells(path, {**ENVIRONMENT, "git_sha": "def"}, model="m").key(strategy="ar", task="t"),
        Cells(path, {**ENVIRONMENT, "cpu": "y"}, model="m").key(strategy="ar", task="t"),
        cells.key(strategy="ar", task="u"),
    ]
    assert len({key, *others}) == 5
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["environment"]["date"] == "today"


def test_local_changes_make_earlier_cells_unusable(tmp_path) -> None:
    path, dirty = tmp_path / "cells.jsonl", {**ENVIRONMENT, "is_dirty": True}
    cells = Cells(path, dirty, model="m")
    cells.add("k", CELL)
    assert cells.get("k") == CELL  # of this run
    again = Cells(path, dirty, model="m")
    assert not again.is_reusing
    assert again.get("k") is None
    # An installed package has no checkout: its version says what it is.
    assert Cells(path, {**ENVIRONMENT, "is_dirty": None}, model="m").get("k") == CELL


def test_half_a_line_costs_one_cell(tmp_path) -> None:
    path = tmp_path / "cells.jsonl"
    cells = Cells(path, ENVIRONMENT)
    cells.add("a", CELL)
    cells.add("b", CELL)
    path.write_bytes(path.read_bytes()[:-20])
    again = Cells(path, ENVIRONMENT)
    assert (again.get("a"), again.get("b")) == (CELL, None)
    again.add("c", CELL)
    last = Cells(path, ENVIRONMENT)
    assert (last.get("a"), last.get("b"), last.get("c")) == (CELL, None, CELL)


def test_nothing_is_kept_without_a_path(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = Cells(None, ENVIRONMENT)
    cells.add("a", CELL)
    assert cells.get("a") == CELL
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_used(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    cells = Cells(tmp_path / "file" / "cells.jsonl", ENVIRONMENT)
    with pytest.raises(ConfigError, match="cannot be written"):
        cells.add("a", CELL)
    with pytest.raises(ConfigError, match="cannot be read"):
        Cells(tmp_path, ENVIRONMENT)


def test_the_stamp_follows_the_files(tmp_path) -> None:
    assert files_stamp("no such model", None) == ""
    file = tmp_path / "sub" / "weights"
    file.parent.mkdir()
    file.write_text("a")
    first = files_stamp(tmp_path)
    assert files_stamp(str(tmp_path)) == first
    file.write_text("ab")
    second = files_stamp(tmp_path)
    assert second != first
    assert files_stamp(file) == second  # a folder is its files
    assert files_stamp(file, file) != second
