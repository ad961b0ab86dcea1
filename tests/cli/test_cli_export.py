"""`hybrid export` and `hybrid doctor --target --drafter`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from dflash_pairs import DRAFTER, PROMPTS, TARGET, copied, own

from hybrid.models.dflash_files import load_dflash

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYBRID_VLLM_PYTHON", raising=False)


def test_export_writes_and_prints_the_command(run: Run, tmp_path: Path) -> None:
    args = ("export", "vllm", str(DRAFTER), "-o", str(tmp_path / "out"), "--target", "org/target")
    code, out, err = run(*args)
    assert (code, shlex.split(out)[:3]) == (0, ["vllm", "serve", "org/target"])
    assert str(tmp_path / "out") in err
    assert load_dflash(tmp_path / "out").spec.block_size == 8
    code, _, err = run(*args)
    assert (code, "is there already" in err) == (1, True)
    code, out, _ = run(*args, "--force", "--json")
    assert code == 0
    assert json.loads(out) == {
        "folder": str(tmp_path / "out"),
        "kind": "dflash",
        "command": shlex.join(shlex.split(json.loads(out)["command"])),
    }


def test_export_refuses_what_no_engine_knows(run: Run, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    code, _, err = run("export", "vlmm", str(DRAFTER), "-o", out)
    assert (code, "Did you mean 'vllm'?" in err) == (1, True)
    code, _, err = run("export", "sglang", str(DRAFTER), "-o", out, "--custom-generate")
    assert (code, "expected 'hf'" in err) == (1, True)
    assert run("export", "vllm", str(DRAFTER))[0] == 2


def test_doctor_of_a_pair(run: Run) -> None:
    args = ("doctor", "--target", str(TARGET), "--drafter", str(DRAFTER), "-n", "24")
    code, out, _ = run(*args, "--prompts", str(PROMPTS), "--device", "cpu")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "ok       layout: public (dflash_config)"
    assert lines[-1] == "The pair is sound."
    assert [line.split()[0] for line in lines if line.startswith("  ")] == [
        "hybrid",
        "transformers",
        "vllm",
    ]
    assert "HYBRID_VLLM_PYTHON" in out


def test_doctor_of_a_broken_pair(run: Run, tmp_path: Path) -> None:
    broken = copied(DRAFTER, tmp_path / "broken", own(causal=True, target_layer_ids=[0, 2]))
    args = ("doctor", "--target", str(TARGET), "--drafter", str(broken), "--prompts", str(PROMPTS))
    code, out, _ = run(*args, "-n", "24", "--json")
    report = json.loads(out)
    assert (code, report["ok"]) == (1, False)
    problems = [f["check"] for f in report["findings"] if f["level"] == "problem"]
    assert problems == ["causality", "layers"]
    ours = report["engines"][0]
    assert len(ours["acceptance_by_position"]) == 7
    assert ours["acceptance_length"] < 2
    assert ours["num_passes"] > 0


def test_doctor_without_a_drafter_is_about_the_installation(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("doctor", "--target", str(TARGET), "--json")
    assert (code, "packages" in json.loads(out)) == (0, True)
    code, _, err = run("doctor", "--drafter", str(tmp_path), "--target", str(TARGET))
    assert (code, "config.json" in err) == (1, True)
