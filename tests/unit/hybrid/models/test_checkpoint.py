"""Checkpoint folders: what is read, and what each kind of damage says."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from hybrid.errors import CheckpointError
from hybrid.models.checkpoint import INT4_METHOD, Int4Blocks, open_checkpoint
from hybrid.models.tiny import tiny_checkpoint


@pytest.fixture
def folder(tmp_path):
    return tiny_checkpoint(tmp_path / "tiny", tokenizer=False)


def _edit(path, **changes):
    value = json.loads(path.read_text())
    path.write_text(json.dumps({**value, **changes}))


def _blocks(rows=4, columns=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Int4Blocks(
        quants=torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8),
        d=torch.rand(rows, columns // 32, generator=generator).half(),
        m=-torch.rand(rows, columns // 32, generator=generator).half(),
    )


def test_tensors_are_those_of_transformers(folder):
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    checkpoint = open_checkpoint(folder)
    assert checkpoint.path == folder
    assert checkpoint.config["model_type"] == "llama"
    assert set(checkpoint.tensors) == set(expected)
    assert len(checkpoint.tensors) == len(expected)
    assert all(torch.equal(checkpoint.tensors[name], expected[name]) for name in expected)
    with pytest.raises(KeyError):
        checkpoint.tensors["model.none.weight"]


def test_shards_read_as_one(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    whole, shards = open_checkpoint(folder), open_checkpoint(tmp_path / "shards")
    assert set(whole.tensors) == set(shards.tensors)
    assert all(torch.equal(whole.tensors[n], shards.tensors[n]) for n in whole.tensors)


def test_a_missing_shard_is_named(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    victim = max((tmp_path / "shards").glob("*.safetensors"))
    victim.unlink()
    with pytest.raises(CheckpointError, match=f"lacks {victim.name}"):
        open_checkpoint(tmp_path / "shards")


def test_an_index_cannot_point_outside(folder):
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "../other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="beside it"):
        open_checkpoint(folder)


def test_int4_dequantises_by_its_definition():
    blocks = _blocks()
    weight = blocks.dequantize(torch.float64)
    assert blocks.shape == (4, 64)
    for row in range(4):
        for column in range(64):
            byte = int(blocks.quants[row, column // 2])
            q = byte >> 4 if column % 2 else byte & 15
            expected = q * float(blocks.d[row, column // 32]) + float(blocks.m[row, column // 32])
            assert float(weight[row, column]) == pytest.approx(expected, rel=1e-6, abs=1e-7)
    assert torch.equal(
        blocks.dequantize(torch.bfloat16), blocks.dequantize(torch.float32).bfloat16()
    )


def test_int4_weight_is_reassembled_under_its_name(folder):
    blocks, name = _blocks(), "model.layers.0.mlp.up_proj.weight"
    parts = {f"{name}.q4": blocks.quants, f"{name}.d": blocks.d, f"{name}.m": blocks.m}
    save_file({**parts, "model.norm.weight": torch.ones(3)}, folder / "model.safetensors")
    _edit(folder / "config.json", quantization_config={"quant_method": INT4_METHOD})
    tensors = open_checkpoint(folder).tensors
    assert set(tensors) == {name, "model.norm.weight"}
    assert torch.equal(tensors[name].dequantize(torch.float32), blocks.dequantize(torch.float32))

    del parts[f"{name}.m"]
    save_file(parts, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj\.weight\.m"):
        open_checkpoint(folder).tensors[name]


@pytest.mark.parametrize(
    "change",
    [
        {"quants": torch.zeros(4, 31, dtype=torch.uint8)},
        {"quants": torch.zeros(4, 32)},
        {"d": torch.zeros(4, 1).half()},
        {"m": torch.zeros(4, 2)},
    ],
    ids=["columns", "quants-dtype", "d-shape", "m-dtype"],
)
def test_int4_parts_must_fit(change):
    good = _blocks()
    with pytest.raises(CheckpointError, match="4-bit weight"):
        Int4Blocks(**{"quants": good.quants, "d": good.d, "m": good.m, **change})


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": 2}, {"eos_token_id": [3, 4]}, (3, 4)),
        ({"eos_token_id": [5]}, {"temperature": 1.0}, (5,)),
        ({"eos_token_id": None}, None, ()),
    ],
)
def test_eos_ids(folder, config, generation, expected):
    _edit(folder / "config.json", **config)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert open_checkpoint(folder).eos_token_ids == expected


def _no_folder(folder):
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def _truncated(share):
    def damage(folder):
        file = folder / "model.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[: int(len(content) * share)])

    return damage


def _pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_no_folder, "no such folder"),
        (lambda f: (f / "config.json").unlink(), r"has no config\.json"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be read as JSON"),
        (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), "cannot be read as JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "got a JSON list"),
        (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors"),
        (_pickled, "pickled weights"),
        (_truncated(0), "truncated or damaged"),
        (_truncated(0.01), "truncated or damaged"),
        (_truncated(0.99), "truncated or damaged"),
        (
            lambda f: _edit(f / "config.json", quantization_config={"quant_method": "gptq"}),
            "quantised with 'gptq'",
        ),
    ],
    ids=[
        "no-folder", "no-config", "bad-json", "not-text", "json-list", "no-weights", "pickle",
        "empty", "header-cut", "tail-cut", "gptq",
    ],
)  # fmt: skip
def test_damage_is_explained(folder, damage, message):
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_code_in_a_checkpoint_is_not_run(folder, tmp_path):
    witness = tmp_path / "ran"
    (folder / "modeling_evil.py").write_text(f"open({str(witness)!r}, 'w')\n")
    _edit(folder / "config.json", auto_map={"AutoConfig": "modeling_evil.Config"})
    assert open_checkpoint(folder).config["model_type"] == "llama"
    assert not witness.exists()
