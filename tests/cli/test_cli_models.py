"""`hybrid models` on an empty cache with two stand-in models; nothing is fetched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid.models import store


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(cache) -> Path:
    folder = cache / "models" / "tiny-0123"
    for precision in ("int4", "float32"):
        (folder / precision).mkdir(parents=True)
        (folder / precision / "config.json").write_text("{}")
    return folder


def test_list(run, cache, model) -> None:
    code, out, err = run("models", "list", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == [
        {
            "name": "tiny-0123",
            "path": str(model),
            "precisions": ["int4", "float32"],
            "num_bytes": 4,
        }
    ]
    code, out, _ = run("models", "list")
    assert code == 0
    assert "int4, float32" in out
    assert "4 bytes" in out


def test_empty_list(run, cache) -> None:
    assert run("models", "list", "--json") == (0, "[]\n", "")
    assert "hybrid models pull default" in run("models", "list")[1]


def test_path(run, model) -> None:
    assert run("models", "path", "tiny-0123") == (0, f"{model}\n", "")
    code, out, _ = run("models", "path", "tiny-0123", "--precision", "int4")
    assert (code, out) == (0, f"{model / 'int4'}\n")
    code, out, err = run("models", "path", "tiny-012")
    assert (code, out) == (1, "")
    assert "Did you mean 'tiny-0123'?" in err


def test_remove(run, model) -> None:
    assert run("models", "remove", "tiny-0123") == (0, "Removed tiny-0123, freed 4 bytes.\n", "")
    assert not model.exists()
    code, _, err = run("models", "remove", "tiny-0123")
    assert code == 1
    assert "is not in" in err


def test_pull_prints_the_folder_alone_on_stdout(run, cache, monkeypatch, tmp_path) -> None:
    asked = []

    def resolve(name, precision, *, progress):
        asked.append((name, precision))
        progress("Downloading", 1, 2)
        progress("Downloading", 2, 2)
        return tmp_path

    monkeypatch.setattr(store, "resolve", resolve)
    assert run("models", "pull") == (0, f"{tmp_path}\n", "Downloading ...\n")
    assert run("models", "pull", "org/name", "--precision", "float32")[0] == 0
    assert asked == [("default", "int4"), ("org/name", "float32")]


def test_errors_are_one_line(run, cache, monkeypatch) -> None:
    monkeypatch.setenv("HYBRID_OFFLINE", "1")
    code, out, err = run("models", "pull", "org/name")
    assert (code, out) == (1, "")
    assert err.startswith("Error: Model 'org/name' cannot be fetched")
    assert "Traceback" not in err
    code, _, err = run("models", "pull", "default", "--precision", "int9")
    assert code == 1
    assert "Did you mean 'int4'?" in err
