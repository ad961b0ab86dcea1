"""From a folder to a running model: where it goes, what is read, how much memory that takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_checkpoints import tiny_diffusion
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybrid.errors import ConfigError
from hybrid.models.checkpoint import open_checkpoint
from hybrid.models.elementwise import gate, gate_in_parts
from hybrid.models.families import spec_from_config
from hybrid.models.linear import DenseLinear
from hybrid.models.loading import load_model
from hybrid.models.name_maps import LLADA, Renamed, canonical
from hybrid.models.tiny import tiny_checkpoint
from hybrid.models.transformer import NativeBackbone


@pytest.mark.parametrize(
    "device_map", ["cpu", torch.device("cpu"), {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}]
)
def test_a_device_map_may_name_one_device(device_map: Any, tmp_path: Path) -> None:
    path = tiny_diffusion(tmp_path, "dream")
    assert load_model(path, device_map=device_map).backbone.device == torch.device("cpu")
    assert load_model(path, device_map="auto").backbone.device.type in {"cpu", "cuda"}


@pytest.mark.parametrize(
    ("device_map", "device", "message"),
    [
        ({"model": 0, "lm_head": "cpu"}, "auto", "expected 'auto' or one device"),
        ("balanced", "auto", "device_map: got 'balanced', expected 'auto' or one device"),
        ("sequential", "auto", "expected 'auto' or one device"),
        ({}, "auto", "expected 'auto' or one device"),
        ("cuda", "cpu", "device_map: got 'cuda' beside device 'cpu'"),
        ("gpu", "auto", "device: got 'gpu', expected auto, cpu, cuda"),
    ],
)
def test_other_device_maps_are_refused(
    device_map: Any, device: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path, device=device, device_map=device_map)


def test_shards_and_one_file_are_the_same_model(tmp_path: Path) -> None:
    whole = tiny_diffusion(tmp_path / "whole", "llada2")
    tensors, shards = load_file(whole / "model.safetensors"), tmp_path / "shards"
    shards.mkdir()
    (shards / "config.json").write_bytes((whole / "config.json").read_bytes())
    names = sorted(tensors)
    where = {name: f"model-{n % 3 + 1}-of-3.safetensors" for n, name in enumerate(names)}
    for file in set(where.values()):
        part = {name: tensors[name] for name in names if where[name] == file}
        save_file(part, str(shards / file))
    index = json.dumps({"weight_map": where})
    (shards / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    first, second = (load_model(path, device="cpu").backbone for path in (whole, shards))
    assert isinstance(first, NativeBackbone)
    assert isinstance(second, NativeBackbone)
    for ours, theirs in zip(first.layers, second.layers, strict=True):
        assert torch.equal(ours.qkv.dense(), theirs.qkv.dense())
        assert torch.equal(ours.down.dense(), theirs.down.dense())


@pytest.mark.parametrize(
    ("dtype", "expected"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_dtype(dtype: str, expected: torch.dtype, tmp_path: Path) -> None:
    backbone = load_model(tiny_diffusion(tmp_path, "llada2"), device="cpu", dtype=dtype).backbone
    assert isinstance(backbone, NativeBackbone)
    assert (backbone.dtype, backbone.embedding.dtype) == (expected, expected)
    experts = backbone.layers[1].experts
    assert experts is not None
    assert experts._router.dense().dtype == torch.float32  # the choice is not rounded


def test_exact_reaches_every_layer(tmp_path: Path) -> None:
    """Of a model with experts, in the layout that a CPU decodes with."""
    path = tiny_diffusion(tmp_path, "llada2")
    for exact in (False, True):
        backbone = load_model(path, device="cpu", dtype="bfloat16", exact=exact).backbone
        assert isinstance(backbone, NativeBackbone)
        assert backbone.exact is exact
        experts = backbone.layers[1].experts
        assert experts is not None
        gates = {backbone.elementwise.gate, experts._gate}
        assert gates == {gate_in_parts if exact else gate}
        layers: list[Any] = [x for y in backbone.layers for x in (y.qkv, y.o, y.gate_up, y.down)]
        layers = [x for x in layers if x.nbytes]  # not the MLP of a layer that has experts alone
        layers += [x for pair in experts.experts for x in pair]
        assert {x._is_exact for x in (*layers, experts._router, backbone.head)} == {exact}


def test_exact_is_refused_where_nothing_is_arranged(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "gpt2", tokenizer=False)
    with pytest.raises(ConfigError, match=r"exact: it needs .* native backbone .* got .*gpt2"):
        load_model(path, device="cpu", exact=True)
    with pytest.raises(ConfigError, match="exact: got device meta, .* no kernels for meta"):
        DenseLinear(torch.empty(2, 2, device="meta"), exact=True)


class Counting(dict[str, Tensor]):
    """Tensors that note which of them were taken."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self.taken: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.taken.append(name)
        return super().__getitem__(name)


def test_renamed_tensors_are_read_when_they_are_taken(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_diffusion(tmp_path, "llada"))
    stored = Counting({name: checkpoint.tensors[name] for name in checkpoint.tensors})
    renamed = Renamed(stored, LLADA)
    assert "lm_head.weight" in renamed
    assert "model.transformer.ff_out.weight" not in renamed
    assert len(renamed) == len(set(renamed)) == len(stored)
    assert stored.taken == []
    assert renamed["lm_head.weight"] is stored["model.transformer.ff_out.weight"]
    stored.taken.clear()
    NativeBackbone(spec_from_config(checkpoint.config), renamed)
    assert sorted(stored.taken) == sorted(stored)  # each once


def test_names_of_low_rank_updates_are_mapped_too() -> None:
    name = "base_model.model.model.transformer.blocks.3.attn_out.lora_A.weight"
    expected = "base_model.model.model.layers.3.self_attn.o_proj.lora_A.weight"
    assert canonical(name, LLADA) == expected


_MEASURE = """
import sys
from pathlib import Path
import torch
from hybrid.models.loading import load_model

def kib(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))

load_model(sys.argv[1], device="cpu")  # what a first load brings in beside the model
Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
before = kib("VmRSS")
model = load_model(sys.argv[2], device="cpu")
print(1024 * (kib("VmHWM") - before))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_peaks_at_little_more_than_the_model(tmp_path: Path) -> None:
    """In the reordered layout, which copies every weight; the embedding stays in the file."""
    small = tiny_diffusion(tmp_path / "small", "dream")
    large = tiny_diffusion(
        tmp_path / "large",
        "dream",
        vocab_size=4096,
        hidden_size=768,
        head_dim=192,
        intermediate_size=2304,
        num_hidden_layers=8,
    )
    size = (large / "model.safetensors").stat().st_size
    assert size > 200e6
    command = [sys.executable, "-c", _MEASURE, str(small), str(large)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    peak = int(done.stdout)
    assert 0.8 * size < peak < 1.2 * size
