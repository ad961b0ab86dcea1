"""Acceptance in two engines, and wrong numbers that the files alone do not show."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_pairs import DRAFTER, LIMIT, TARGET, copied, own, prompts, top

from hybrid import HybridDecoder
from hybrid.errors import CheckpointError, ConfigError
from hybrid.models.draft_config import DraftConfig, base_shape, lora_prefix, projection_shapes
from hybrid.models.tiny import tiny_checkpoint
from hybrid.pair import engines
from hybrid.pair.diagnosis import Diagnosis, Measuring, diagnose
from hybrid.pair.finding import Finding, Level, has_problem
from hybrid.training.self_diffusion.export import save_adapter

HOW = Measuring(prompts()[:3], LIMIT, "cpu", vllm=False)


def worse(found: Diagnosis) -> list[Finding]:
    return [finding for finding in found.findings if finding.level is not Level.OK]


def test_a_sound_pair_drafts_the_same_in_transformers() -> None:
    found = diagnose(str(TARGET), DRAFTER, HOW)
    assert worse(found) == []
    ours, theirs = found.traces
    assert (ours.engine.split()[0], theirs.engine.split()[0]) == ("hybrid", "transformers")
    assert ours.steps == theirs.steps, "pass by pass, token by token"
    assert ours.acceptance_length > 4
    # The same numbers by another way: the decoder's own statistics of the same answers.
    decoder = HybridDecoder.from_pretrained(TARGET, dtype="float32", drafter=DRAFTER)
    stats = [
        decoder.generate(p, max_new_tokens=LIMIT, ignore_eos=True).stats for p in prompts()[:3]
    ]
    assert sum(s.num_verify_forwards for s in stats) == sum(len(a) - 1 for a in ours.steps)
    assert found.skipped.keys() == {"vllm"}


@pytest.mark.parametrize(
    ("change", "check", "repair"),
    [
        (own(target_layer_ids=[0, 2]), "layers", "layers one higher, [1, 3]"),
        (own(target_layer_ids=[2, 4]), "layers", "layers one lower, [1, 3]"),
        (top(rope_theta=10000.0), "rope", "the target's own rotation"),
    ],
    ids=["too-low", "too-high", "theta"],
)
def test_a_wrong_number_that_loads_is_found(
    change: Any, check: str, repair: str, tmp_path: Path
) -> None:
    found = diagnose(str(TARGET), copied(DRAFTER, tmp_path / "broken", change), HOW)
    (problem,) = [f for f in found.findings if f.level is Level.PROBLEM]
    assert problem.check == check
    assert problem.text.startswith(f"with {repair}, ")
    assert found.traces[0].acceptance_length < 2
    assert found.findings[-1].level is Level.OK, "transformers accepts as little"


def test_a_wrong_mask_is_found_where_the_target_names_the_right_one(tmp_path: Path) -> None:
    broken = copied(DRAFTER, tmp_path / "broken", own(mask_token_id=5))
    target = copied(TARGET, tmp_path / "target", top(pad_token_id=49))
    how = Measuring(HOW.prompts[:1], 24, "cpu", vllm=False)
    found = diagnose(str(target), broken, how)
    assert any(f.check == "mask token" and "with mask id 49" in f.text for f in found.findings)
    # Where nobody names it, what is left to say is that little is accepted.
    found = diagnose(str(TARGET), broken, how)
    assert not any(f.check == "mask token" and f.level is Level.PROBLEM for f in found.findings)
    assert any(f.check == "acceptance" for f in worse(found))


def test_the_last_layer_is_refused(tmp_path: Path) -> None:
    # A drafter that says how many layers its target has is refused, one that does not likewise.
    for name, fields in (("one", {}), ("two", {"num_target_layers": None})):
        broken = copied(
            DRAFTER,
            tmp_path / name,
            lambda c, fields=fields: (c.update(fields), own(target_layer_ids=[2, 5])(c)),
        )
        found = diagnose(str(TARGET), broken, HOW)
        assert {f.check for f in found.findings if f.level is Level.PROBLEM} == {
            "layers",
            "loading",
        }
        assert found.traces == []


def test_causal_blocks_are_measured_as_the_paper_has_them(tmp_path: Path) -> None:
    broken = copied(DRAFTER, tmp_path / "broken", own(causal=True))
    found = diagnose(str(TARGET), broken, HOW)
    assert [f.check for f in worse(found)] == ["causality"]
    assert found.traces[0].acceptance_length > 4


def test_another_targets_drafter_is_not_measured(tmp_path: Path) -> None:
    other = tiny_checkpoint(tmp_path / "other", "qwen3", tokenizer=False)
    found = diagnose(str(other), DRAFTER, Measuring(None, 8, "cpu", vllm=False))
    problems = {f.check for f in found.findings if f.level is Level.PROBLEM}
    assert {"layers", "sizes", "loading"} <= problems
    assert found.traces == []


# vLLM, played by a script


def played(folder: Path, body: str) -> str:
    """Return a program that takes the place of a Python with vLLM."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_vllm_is_asked_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = diagnose(str(TARGET), DRAFTER, HOW).traces[0].steps
    answer = tmp_path / "answer.json"
    body = f'cp "$2" {tmp_path}/request.json && cp {answer} "$3"'
    monkeypatch.setenv("HYBRID_VLLM_PYTHON", played(tmp_path, body))
    how = Measuring(HOW.prompts, LIMIT, "cpu")

    answer.write_text(json.dumps({"version": "9", "steps": steps}))
    found = diagnose(str(TARGET), DRAFTER, how)
    assert worse(found) == []
    assert found.traces[2].engine == "vllm 9"
    asked = json.loads((tmp_path / "request.json").read_text())
    assert asked["engine"]["speculative_config"] == {
        "method": "dflash",
        "model": str(DRAFTER),
        "num_speculative_tokens": 7,
    }
    assert (asked["prompts"], asked["max_new_tokens"]) == (prompts()[:3], LIMIT)

    slow = [[[token] for step in answered for token in step] for answered in steps]
    answer.write_text(json.dumps({"version": "9", "steps": slow}))
    (problem,) = worse(diagnose(str(TARGET), DRAFTER, how))
    assert problem.level is Level.PROBLEM
    assert "1.00 there. They differ first at prompt 0, token " in problem.text

    other = [[[token + 1 for token in step] for step in answered] for answered in steps]
    answer.write_text(json.dumps({"version": "9", "steps": other}))
    (problem,) = worse(diagnose(str(TARGET), DRAFTER, how))
    assert problem.level is Level.PROBLEM, "as much is accepted, of another text"
    assert "the targets themselves differ" in problem.text


def test_a_vllm_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = 'echo "[rank0]: RuntimeError: no such head" >&2; exit 1'
    monkeypatch.setenv("HYBRID_VLLM_PYTHON", played(tmp_path, body))
    found = diagnose(str(TARGET), DRAFTER, Measuring(HOW.prompts, 8, "cpu"))
    assert found.skipped["vllm"] == "vLLM cannot serve this pair: RuntimeError: no such head"
    assert len(found.traces) == 2
    monkeypatch.setenv("HYBRID_VLLM_PYTHON", str(tmp_path / "none"))
    with pytest.raises(CheckpointError, match="does not run"):
        engines.in_vllm(str(tmp_path / "none"), TARGET, DRAFTER, [[1]], 4, 7)


def test_vllm_may_take_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: Any, **__: Any) -> None:
        raise subprocess.TimeoutExpired("python", 1)

    monkeypatch.setattr(subprocess, "run", slow)
    with pytest.raises(CheckpointError, match="does not run"):
        engines.in_vllm("python", TARGET, DRAFTER, [[1]], 4, 7)


def test_a_folder_named_vllm_is_not_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYBRID_VLLM_PYTHON", raising=False)
    (tmp_path / "vllm").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert engines.find_vllm() is None
    (tmp_path / "vllm" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert engines.find_vllm() == sys.executable


# Diffusion adapters


def saved_adapter(folder: Path, target: Path, **fields: Any) -> Path:
    backbone: Any = HybridDecoder.from_pretrained(target, dtype="float32").backbone
    config = DraftConfig(
        4, 0, (), rank=2, lora_alpha=4, base=base_shape(backbone), train_norms=False, **fields
    )
    tensors = {}
    for index in range(backbone.num_layers):
        for name, (inputs, outputs) in projection_shapes(backbone.spec).items():
            prefix = lora_prefix(index, name)
            tensors[f"{prefix}.lora_A.weight"] = torch.zeros(2, inputs)
            tensors[f"{prefix}.lora_B.weight"] = torch.zeros(outputs, 2)
    save_adapter(folder, config, tensors, base_model="T", dtype=torch.float32)
    return folder


def test_an_adapter_is_checked_and_measured_here(tmp_path: Path) -> None:
    folder = saved_adapter(tmp_path / "adapter", TARGET, corruption="uniform")
    found = diagnose(str(TARGET), folder, HOW)
    assert not has_problem(found.findings)
    levels = {f.check: f.level for f in found.findings}
    assert levels["target"] is levels["draft pass"] is levels["served by SGLang's UNO"] is Level.OK
    (ours,) = found.traces
    assert ours.num_draft_tokens == 4
    assert ours.acceptance_length >= 2, "the anchor's own row is the target's"
    assert found.skipped.keys() == {"transformers", "vllm"}


def test_an_adapter_of_another_target_is_named(tmp_path: Path) -> None:
    folder = saved_adapter(tmp_path / "adapter", TARGET, corruption="mask", mask_token_id=49)
    other = tiny_checkpoint(tmp_path / "other", "qwen3", tokenizer=False)
    found = diagnose(str(other), folder, HOW)
    (problem,) = [f for f in found.findings if f.level is Level.PROBLEM]
    assert problem.check == "target"
    assert "hidden_size 48 instead of 64" in problem.text
    assert found.traces == []


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"mask_token_id": 64}, "mask_token_id: got 64"), ({"entry_layer": 9}, "entry_layer: got 9")],
)
def test_an_adapter_that_cannot_be_is_named(
    fields: dict[str, Any], text: str, tmp_path: Path
) -> None:
    folder = saved_adapter(tmp_path / "adapter", TARGET, corruption="mask", mask_token_id=49)
    path = folder / "draft_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    if fields.get("entry_layer"):
        (folder / "draft_model.safetensors").write_bytes(
            (folder / "adapter_model.safetensors").read_bytes()
        )
    found = diagnose(str(TARGET), folder, HOW)
    assert any(text in f.text for f in found.findings if f.level is Level.PROBLEM)
    assert found.traces == []


def test_an_adapter_that_only_we_compute_is_a_note(tmp_path: Path) -> None:
    folder = saved_adapter(tmp_path / "adapter", TARGET, corruption="mask", mask_token_id=49)
    found = diagnose(str(TARGET), folder, HOW)
    (note,) = [f for f in found.findings if f.check == "served by SGLang's UNO"]
    assert note.level is Level.NOTE
    assert "corruption=uniform" in note.text
    (folder / "draft_config.json").unlink()
    found = diagnose(str(TARGET), folder, HOW)
    assert "nothing says how its drafts are made" in found.findings[0].text


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_new_tokens"):
        diagnose(str(TARGET), DRAFTER, Measuring(None, 1, "cpu"))


def test_answers_too_short_for_a_draft_say_nothing_of_it() -> None:
    found = diagnose(str(TARGET), DRAFTER, Measuring(HOW.prompts, 4, "cpu", vllm=False))
    (finding,) = worse(found)
    assert "longer answers" in finding.text
    assert finding.level is Level.PROBLEM
    assert not any(f.check.startswith("acceptance in") for f in found.findings)
