"""A DFlash drafter in every layout: the same numbers, the same drafts, and nothing half-written."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import decoder, random_dflash, random_prompts, tiny_backbone
from repository import ROOT
from safetensors.torch import load_file

from hybrid.drafters.dflash import DFlashDrafter
from hybrid.errors import CheckpointError, ConfigError
from hybrid.export import export as export_module
from hybrid.export.export import ENGINES, export
from hybrid.models.dflash_files import load_dflash, save_dflash
from hybrid.models.spec import RopeSpec
from hybrid.models.tiny import tiny_checkpoint

YARN = RopeSpec(500.0, "yarn", {"factor": 4.0, "original_max_position_embeddings": 128}, 512)
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "other": {"rope": YARN, "windows": (5, None), "target_layer_ids": (1, 0)},
}


@pytest.fixture(params=SHAPES)
def drafter(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder that training leaves."""
    model = random_dflash(tiny_backbone(), **SHAPES[request.param])._model
    save_dflash(tmp_path / "dflash", model, torch.float32)
    card = "---\nbase_model: org/target\ntags: [dflash]\n---\n\n# A card\n"
    (tmp_path / "dflash" / "README.md").write_text(card)
    return tmp_path / "dflash"


def answers(folder: Path) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return what is generated with a drafter and how much of each draft was accepted."""
    backbone = tiny_backbone()
    drafted = decoder(backbone, DFlashDrafter.from_pretrained(backbone, folder))
    results = [drafted.generate(p, max_new_tokens=20) for p in random_prompts(5, 9)]
    return [(r.token_ids, r.stats.acceptance_histogram) for r in results]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_export_has_the_same_tensors_and_drafts(
    engine: str, drafter: Path, tmp_path: Path
) -> None:
    done = export(engine, drafter, tmp_path / "out")
    before, after = load_dflash(drafter), load_dflash(done.folder)
    assert after.spec.windows == before.spec.windows
    assert after.spec.rope == before.spec.rope
    assert after.spec.target_layer_ids == before.spec.target_layer_ids
    assert after.spec.mask_token_id == before.spec.mask_token_id
    assert after.spec.vocab_size == before.spec.vocab_size
    for name, value in before.state_dict().items():
        assert torch.equal(after.state_dict()[name], value)
    assert answers(done.folder) == answers(drafter)
    assert (done.folder / "README.md").read_text().endswith("# A card\n")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_export_keeps_the_dtype(engine: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save_dflash(tmp_path / "dflash", random_dflash(tiny_backbone())._model, dtype)
    export(engine, tmp_path / "dflash", tmp_path / "out", target="T")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {value.dtype for value in tensors.values()} == {dtype}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("first", ENGINES)
@pytest.mark.parametrize("second", ENGINES)
def test_any_layout_is_exported_again(
    first: str, second: str, drafter: Path, tmp_path: Path
) -> None:
    export(first, drafter, tmp_path / "one", target="T")
    export(second, tmp_path / "one", tmp_path / "two", target="T")
    before, after = load_dflash(drafter), load_dflash(tmp_path / "two")
    assert after.spec.target_layer_ids == before.spec.target_layer_ids
    assert after.spec.windows == before.spec.windows
    assert torch.equal(after.fc.weight, before.fc.weight)


def test_transformers_own_class_loads_the_folder(drafter: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("transformers.models.muse_glimmer_assistant")
    export("hf", drafter, tmp_path / "out")
    theirs, said = library.MuseGlimmerAssistantModel.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(said.values()), said
    ours = load_dflash(drafter)
    assert torch.equal(theirs.encoder.fc.weight, ours.fc.weight)
    assert torch.equal(theirs.encoder.output_norm_enc.weight, ours.hidden_norm.weight)
    assert torch.equal(
        theirs.layers[1].self_attn.q_proj.weight, ours.layers[1].self_attn.q_proj.weight
    )
    config, spec = theirs.config, ours.spec
    assert (config.block_size, config.mask_token_id) == (spec.block_size, spec.mask_token_id)
    assert tuple(config.target_layer_ids) == spec.target_layer_ids
    assert config.rope_parameters["rope_theta"] == spec.rope.theta
    assert config.rope_parameters["rope_type"] == spec.rope.kind


def test_layouts_say_outright_what_engines_guess(drafter: Path, tmp_path: Path) -> None:
    ids = list(load_dflash(drafter).spec.target_layer_ids)
    configs = {}
    for engine in ENGINES:
        export(engine, drafter, tmp_path / engine, target="org/target")
        configs[engine] = json.loads((tmp_path / engine / "config.json").read_text())
    for engine in ("vllm", "sglang", "hf"):
        assert configs[engine]["dflash_config"]["causal"] is False
        assert configs[engine]["vocab_size"] == 64
    own = configs["speculators"]
    assert own["sliding_window_non_causal"] is True
    assert own["aux_hidden_state_layer_ids"] == [i + 1 for i in ids]
    assert own["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    (method,) = own["speculators_config"]["proposal_methods"]
    assert method["speculative_tokens"] == own["block_size"] - 1
    assert own["transformer_layer_config"]["vocab_size"] == own["draft_vocab_size"] == 64


def test_commands_serve_what_was_written(drafter: Path, tmp_path: Path) -> None:
    out = tmp_path / "a folder"
    words = shlex.split(export("vllm", drafter, out).command)
    assert words[:3] == ["vllm", "serve", "org/target"]
    assert json.loads(words[words.index("--speculative-config") + 1]) == {
        "method": "dflash",
        "model": str(out),
        "num_speculative_tokens": 7,
    }
    words = shlex.split(export("sglang", drafter, out, target="T", force=True).command)
    assert words[words.index("--model-path") + 1] == "T"
    assert words[words.index("--speculative-algorithm") + 1] == "DFLASH"
    assert words[words.index("--speculative-draft-model-path") + 1] == str(out)
    words = shlex.split(export("speculators", drafter, out, force=True).command)
    assert words == ["vllm", "serve", str(out)]
    words = shlex.split(export("vllm", out, tmp_path / "again").command)
    assert words[:3] == ["vllm", "serve", "org/target"]  # as the speculator says
    code = export("hf", drafter, out, force=True).command
    compile(code, "command", "exec")
    assert repr(str(out)) in code
    (drafter / "README.md").unlink()
    assert " TARGET " in export("vllm", drafter, out, force=True).command
    with pytest.raises(ConfigError, match="Give --target MODEL"):
        export("speculators", drafter, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_nothing_is_replaced_unasked(drafter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is no loss
    export("vllm", drafter, out)
    before = (out / "config.json").read_text()
    with pytest.raises(ConfigError, match="is there already"):
        export("hf", drafter, out)
    assert (out / "config.json").read_text() == before
    export("hf", drafter, out, force=True)
    assert "MuseGlimmer" in (out / "config.json").read_text()
    for foreign in ("notes.txt", "thesis.tex"):
        (tmp_path / "mine").mkdir(exist_ok=True)
        (tmp_path / "mine" / foreign).write_text("mine")
    with pytest.raises(ConfigError, match="holds other things"):
        export("vllm", drafter, tmp_path / "mine", force=True)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"
    target = tiny_checkpoint(tmp_path / "target", "qwen3", tokenizer=False)
    before = (target / "config.json").read_text()
    with pytest.raises(ConfigError, match="holds other things"):  # its name given as the output
        export("vllm", drafter, target, force=True)
    assert (target / "config.json").read_text() == before
    carrying = tmp_path / "carrying"
    for force in (False, True):
        export("hf", drafter, carrying, target=str(target), custom_generate=True, force=force)
    assert (carrying / "custom_generate" / "generate.py").is_file()


def test_a_failure_leaves_what_was_there(
    drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    out = tmp_path / "out"
    export("vllm", drafter, out)
    before = {path.name for path in tmp_path.iterdir()}
    monkeypatch.setattr(export_module, "save_dflash", full)
    for force, where in ((True, out), (False, tmp_path / "new")):
        with pytest.raises(CheckpointError, match="No space left"):
            export("sglang", drafter, where, force=force)
    assert {path.name for path in tmp_path.iterdir()} == before
    assert load_dflash(out).spec.block_size == 8


def test_a_drafter_is_exported_over_itself(drafter: Path) -> None:
    before = load_dflash(drafter).state_dict()
    export("hf", drafter, drafter, force=True)
    after = load_dflash(drafter)
    assert all(torch.equal(after.state_dict()[n], v) for n, v in before.items())


@pytest.mark.parametrize(
    ("spoil", "error", "match"),
    [
        (lambda folder: None, ConfigError, "Did you mean 'vllm'"),
        (lambda folder: (folder / "config.json").unlink(), CheckpointError, "no config.json"),
    ],
)
def test_what_cannot_be_exported_leaves_nothing(
    spoil: Callable[[Path], None], error: type, match: str, drafter: Path, tmp_path: Path
) -> None:
    spoil(drafter)
    engine = "vlm" if error is ConfigError else "vllm"
    with pytest.raises(error, match=match):
        export(engine, drafter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_transformers_has_no_biases(tmp_path: Path) -> None:
    model = random_dflash(tiny_backbone(), bias=True)._model
    save_dflash(tmp_path / "dflash", model, torch.float32)
    with pytest.raises(ConfigError, match="attention biases"):
        export("hf", tmp_path / "dflash", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export("vllm", tmp_path / "dflash", tmp_path / "out")
    assert load_dflash(tmp_path / "out").spec.bias


def test_a_checkpoint_carries_no_drafter_of_another_model(drafter: Path, tmp_path: Path) -> None:
    other = {"hidden_size": 32, "tokenizer": False}
    target = tiny_checkpoint(tmp_path / "target", "llama", **other)
    adapter = ROOT / "hybrid" / "adapters" / "smollm2-135m-instruct"
    for folder, words in (
        (drafter, "made for a target of hidden size"),
        (adapter, "another model"),
    ):
        with pytest.raises(CheckpointError, match=words):
            export("hf", folder, tmp_path / "out", target=str(target), custom_generate=True)
        assert not (tmp_path / "out").exists()


def test_a_checkpoint_carries_its_drafter(drafter: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    target = tiny_checkpoint(tmp_path / "target", "llama", tokenizer=False)
    done = export("hf", drafter, tmp_path / "out", target=str(target), custom_generate=True)
    assert (done.folder / "custom_generate" / "generate.py").is_file()
    model = AutoModelForCausalLM.from_pretrained(done.folder, trust_remote_code=True)
    plain = AutoModelForCausalLM.from_pretrained(target)
    ids = torch.tensor(random_prompts(6))
    expected = plain.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), expected)
    _, plug = vars(model)["_hybrid_plug"]
    assert plug.stats[0].num_drafted > 0, "our loop ran, and drafted"
    compile(done.command, "command", "exec")


def test_only_transformers_knows_custom_generate(drafter: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected 'hf'"):
        export("vllm", drafter, tmp_path / "out", custom_generate=True)
    (drafter / "README.md").unlink()
    with pytest.raises(ConfigError, match="Give --target MODEL"):
        export("hf", drafter, tmp_path / "out", custom_generate=True)
    assert not (tmp_path / "out").exists()
