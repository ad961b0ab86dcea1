"""`hybrid doctor`, `hybrid list` and `hybrid plan-memory`."""

from __future__ import annotations

import json
import sys

from repository import ROOT

from hybrid import registry
from hybrid.cli import doctor as doctor_module
from hybrid.cli import listing
from hybrid.config import parse_setting, spell_settings
from hybrid.kernels import dispatch
from hybrid.strategy import Strategy


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
    assert set(report["kernels"]["cpu"]) >= {"attention", "float32 products", "int4 products"}
    assert report["kernels"]["operations"] == {
        name: {"implementation": implementation, "why": why}
        for name, implementation, why in dispatch.listing()
    }
    code, out, _ = run("doctor")
    assert code == 0
    assert all(f"  {name:<18}{where}: {why}\n" in out for name, where, why in dispatch.listing())
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


def test_doctor_survives_what_cannot_be_imported(run, monkeypatch) -> None:
    """`None` in sys.modules makes an import fail, as a broken library does."""
    monkeypatch.setattr(doctor_module, "_torch", lambda: None)
    code, out, _ = run("doctor", "--json")
    assert (code, json.loads(out)["kernels"]) == (1, {})
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "hybrid.models.linear", None)
    code, out, _ = run("doctor")
    assert code == 0
    assert "float32 products  not available: import of hybrid.models.linear halted" in out


def test_doctor_finds_a_triton_that_is_broken(run, monkeypatch) -> None:
    """It is found, so a GPU's operations are to run on it, and then it cannot be imported."""
    lines = [("verify", "triton", "compiled for this GPU"), ("sample", "reference", "no GPU")]
    monkeypatch.setattr(dispatch, "listing", lambda: lines)
    assert run("doctor")[0] == 0
    monkeypatch.setitem(sys.modules, "triton", None)
    code, out, _ = run("doctor")
    assert code == 1
    assert "PROBLEM: triton cannot be imported: " in out
    assert "verify            triton: compiled for this GPU" in out
    monkeypatch.setattr(dispatch, "listing", lambda: lines[1:])
    assert run("doctor")[0] == 0, "nothing is to run on it"


def test_doctor_fits_a_narrow_terminal(run, monkeypatch) -> None:
    why = "the GPU has compute capability 7.5, the kernels need 8.0"
    monkeypatch.setattr(dispatch, "listing", lambda: [("verify", "reference", why)])
    _, whole, _ = run("doctor")
    assert f"verify            reference: {why}" in whole, "what is piped is not wrapped"
    monkeypatch.setattr(doctor_module, "_width", lambda: 40)
    _, out, _ = run("doctor")
    assert out.split() == whole.split()
    operations = out[out.index("operations of") : out.index("folders:")].splitlines()[1:]
    assert len(operations) > 2
    assert max(map(len, operations)) <= 40


def test_doctor_wants_a_writable_cache(run, monkeypatch, tmp_path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path / "file" / "cache"))
    code, out, _ = run("doctor", "--json")
    assert code == 1
    assert "HYBRID_CACHE_DIR" in json.loads(out)["problems"][0]


def test_list_names_what_other_commands_accept(run) -> None:
    from hybrid.models.family_table import FAMILIES

    code, out, _ = run("list", "--json")
    names = json.loads(out)
    assert code == 0
    assert set(names["drafters"]) == set(registry.names("drafter"))
    assert set(names["verifiers"]) == set(registry.names("verifier"))
    assert set(names["families"]) == set(FAMILIES)
    assert set(names["presets"]) == set(registry.names("preset"))
    assert names["verifiers"]["rejection"].endswith("(lossless)")
    code, out, _ = run("list")
    assert code == 0
    assert all(name in out for kind in names.values() for name in kind)


def test_list_shows_one_kind(run) -> None:
    code, out, _ = run("list", "drafters")
    assert code == 0
    assert out.startswith("drafters:\n")
    assert "families" not in out
    code, _, err = run("list", "famlies")
    assert code == 1
    assert "Did you mean 'families'?" in err


def test_list_families_tells_what_cannot_verify_from_what_can(run) -> None:
    code, out, _ = run("list", "families")
    assert code == 0
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines()[2:]}
    assert lines["llama"] == ["causal", "exact", "yes", "speculative"]
    assert lines["llada"] == ["bidirectional", "approximate", "no", "llada"]
    assert lines["sdar"] == ["block-causal", "exact", "no", "sdar"]
    assert lines["nemotron_labs_diffusion"] == ["causal", "exact", "yes", "speculative"]
    code, out, _ = run("list", "families", "--json")
    families = json.loads(out)["families"]
    assert set(families) == set(lines)
    assert families["Dream"] == {
        "context": "bidirectional",
        "cache": "approximate",
        "can_verify": False,
        "default_strategy": "dream",
    }


def test_list_presets_tells_models_and_parameters(run) -> None:
    code, out, _ = run("list", "presets")
    assert code == 0
    lines = [line.strip() for line in out.splitlines()]
    at = next(i for i, line in enumerate(lines) if line.startswith("fast-dllm  "))
    assert "arXiv:2505.22618" in lines[at]
    assert lines[at + 1] == "For models that fill masks, bidirectional."
    assert lines[at + 2] == "block_size=32 threshold=null factor=null steps=null cache=dual"
    assert lines[1].startswith("ar ")
    assert lines[2] == "For models that verify."
    assert lines[3].startswith("speculative ")  # ar has no parameters

    code, out, _ = run("list", "presets", "--json")
    presets = json.loads(out)["presets"]
    assert set(presets) == set(registry.names("preset"))
    assert presets["sdar"]["models"] == "models that fill masks, block-causal"
    assert presets["speculative"]["models"] == "models that verify"
    assert presets["diffusion-gemma"]["models"] == "models that decode by their own code"
    assert presets["llada"]["parameters"] == {
        "steps": None,
        "block_size": None,
        "remasking": "low_confidence",
        "cfg_scale": 0.0,
        "temperature": None,
    }
    assert all(entry["about"] for entry in presets.values())
    # What is listed as a default is a value that `--set` takes.
    for name, entry in presets.items():
        given = spell_settings(entry["parameters"]).split()
        chosen = Strategy.preset(name, **dict(parse_setting(text, "") for text in given))
        assert chosen.settings.model_dump(mode="json") == entry["parameters"]


def test_the_page_about_presets_names_them_all() -> None:
    page = (ROOT / "docs" / "presets.md").read_text(encoding="utf-8")
    assert [name for name in registry.names("preset") if f"`{name}`" not in page] == []


def test_the_overview_has_a_line_per_preset(run) -> None:
    code, out, _ = run("list")
    assert code == 0
    assert sum("LLaDA (arXiv:2502.09992)" in line for line in out.splitlines()) == 1
    assert "remasking" not in out


def test_list_survives_a_plugin_that_cannot_be_loaded(monkeypatch) -> None:
    monkeypatch.setattr(registry, "names", lambda kind: {"broken": "no.such.module:Thing"})
    assert "no.such.module" in listing._about("drafter", "broken")
    assert "no.such.module" in listing._presets()["broken"]["about"]
    (line,) = listing._preset_lines(listing._presets())
    assert line.startswith("broken  ")


def test_plan_memory(run, fake) -> None:
    decoder = fake.FakeDecoder()
    args = ("plan-memory", "--max-seq-len", "64", "--batch", "2")
    code, out, _ = run(*args, "--json", decoder=decoder)
    assert (code, json.loads(out)) == (0, decoder.plan_memory(64, 2))
    code, out, _ = run(*args, decoder=decoder)
    assert code == 0
    assert "weights              1.0 MiB" in out
    assert run("plan-memory", "--batch", "0", decoder=decoder)[0] == 2
