"""`hybrid doctor`, `hybrid list` and `hybrid plan-memory`."""

from __future__ import annotations

import json

import pytest

from hybrid import registry
from hybrid.cli import doctor as doctor_module
from hybrid.cli import listing


def test_doctor_reports_this_machine(run, monkeypatch, tmp_path) -> None:
    import torch

    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path / "cache"))
    code, out, err = run("doctor", "--json")
    report = json.loads(out)
    assert (code, err, report["problems"]) == (0, "", [])
    assert report["packages"]["torch"] == torch.__version__
    assert report["device"]["threads"] == torch.get_num_threads()
    assert report["folders"]["cache"] == str(tmp_path / "cache")
    assert report["models"] == {}
    assert set(report["kernels"]) == {"attention", "int4 linear", "triton"}
    code, out, _ = run("doctor")
    assert code == 0
    assert "not fetched yet: hybrid models pull default" in out
    assert out.endswith("Ready.\n")


def test_doctor_says_what_is_missing(run, monkeypatch) -> None:
    monkeypatch.setattr(doctor_module, "_torch", lambda: None)
    monkeypatch.setattr(doctor_module, "_version", lambda name: None)
    code, out, _ = run("doctor")
    assert code == 1
    assert "PROBLEM: torch cannot be imported" in out
    assert "PROBLEM: transformers is not installed" in out
    assert out.endswith("Not usable.\n")


def test_doctor_wants_a_writable_cache(run, monkeypatch, tmp_path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path / "file" / "cache"))
    code, out, _ = run("doctor", "--json")
    assert code == 1
    assert "HYBRID_CACHE_DIR" in json.loads(out)["problems"][0]


def test_list_names_what_other_commands_accept(run) -> None:
    pytest.importorskip("hybrid.decoder")
    from hybrid.decoder import HybridDecoder
    from hybrid.models.families import FAMILIES

    code, out, _ = run("list", "--json")
    names = json.loads(out)
    assert code == 0
    assert set(names["drafters"]) == set(registry.names("drafter"))
    assert set(names["verifiers"]) == set(registry.names("verifier"))
    assert set(names["families"]) == set(FAMILIES)
    assert tuple(names["strategies"]) == HybridDecoder.strategies
    assert names["verifiers"]["rejection"].endswith("(lossless)")
    code, out, _ = run("list")
    assert code == 0
    assert all(name in out for kind in names.values() for name in kind)


def test_list_survives_a_plugin_that_cannot_be_loaded(monkeypatch) -> None:
    monkeypatch.setattr(registry, "names", lambda kind: {"broken": "no.such.module:Thing"})
    assert "no.such.module" in listing._about("drafter", "broken")


def test_plan_memory(run, fake) -> None:
    decoder = fake.FakeDecoder()
    args = ("plan-memory", "--max-seq-len", "64", "--batch", "2")
    code, out, _ = run(*args, "--json", decoder=decoder)
    assert (code, json.loads(out)) == (0, decoder.plan_memory(64, 2))
    code, out, _ = run(*args, decoder=decoder)
    assert code == 0
    assert "weights              1.0 MiB" in out
    assert run("plan-memory", "--batch", "0", decoder=decoder)[0] == 2
