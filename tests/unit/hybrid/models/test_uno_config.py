"""Which draft passes there are; what contradicts itself is refused, and said why."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import random_adapter, tiny_backbone

from hybrid.errors import CheckpointError, ConfigError
from hybrid.models.adapter import DiffusionAdapter, load_adapter
from hybrid.models.draft_config import DraftConfig, base_shape, read_adapter
from hybrid.models.loading import SHIPPED_ADAPTERS
from hybrid.training.self_diffusion.draft_model import DraftModel
from hybrid.training.self_diffusion.export import save_adapter

TOKENS: dict[str, Any] = {"entry_layer": 0, "feature_layers": (), "mask_token_id": 9}
UNIFORM: dict[str, Any] = {
    "entry_layer": 0, "feature_layers": (), "corruption": "uniform", "train_norms": False
}  # fmt: skip
LATE: dict[str, Any] = {"entry_layer": 1, "feature_layers": (0, 2)}


def config(**fields: Any) -> DraftConfig:
    own = {"rank": 2, "lora_alpha": 4.0, "base": base_shape(tiny_backbone()), **fields}
    return DraftConfig(3, **own)


def saved(folder: Path, shape: DraftConfig) -> Path:
    model = DraftModel(tiny_backbone(), shape)
    save_adapter(folder, shape, model.adapter_tensors(), base_model="tiny", dtype=torch.float32)
    return folder


@pytest.mark.parametrize(
    "fields",
    [
        LATE,
        {**LATE, "num_passes": 3, "train_norms": False, "targets": ("o_proj",)},
        TOKENS,
        {**TOKENS, "train_norms": False, "preferred_draft_tokens": 2},
        {**TOKENS, "sampler_size": 4},
        {**UNIFORM, "targets": ("q_proj", "up_proj")},
    ],
)
def test_what_is_saved_is_what_is_loaded(tmp_path: Path, fields: dict[str, Any]) -> None:
    shape = config(**fields)
    folder = saved(tmp_path, shape)
    adapter = load_adapter(tiny_backbone(), folder)
    assert adapter.config == shape
    assert (folder / "draft_model.safetensors").exists() != shape.is_plain
    tensors = DraftModel(tiny_backbone(), shape).adapter_tensors()
    for name in tensors:
        rest = {n: t for n, t in tensors.items() if n != name}
        with pytest.raises(CheckpointError, match=f"no tensor '{name}'"):
            DiffusionAdapter(tiny_backbone(), shape, rest)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LATE, {"entry_layer": -1}, "entry_layer: got -1, expected 0 to 2"),
    (LATE, {"feature_layers": (-1,)}, r"feature_layers: got \(-1,\), expected below 3"),
    (LATE, {"feature_layers": ()}, r"feature_layers: got \(\), expected at least one layer"),
    (LATE, {"mask_token_id": 9}, "mask_token_id: got 9, expected none"),
    (LATE, {"corruption": "uniform"}, "corruption: got 'uniform', expected 'mask' unless entry"),
    (LATE, {"num_passes": 2, "sampler_size": 4}, "num_passes: got 2, expected 1 with"),
    (LATE, {"preferred_draft_tokens": 4}, "preferred_draft_tokens: got 4, expected 1 to 3"),
    (TOKENS, {"feature_layers": (1,)}, "expected none with entry_layer 0"),
    (TOKENS, {"mask_token_id": None}, "mask_token_id: got None, expected an id below 64"),
    (TOKENS, {"mask_token_id": 64}, "mask_token_id: got 64, expected an id below 64"),
    (TOKENS, {"mask_token_id": -1}, "mask_token_id: got -1, expected an id below 64"),
    (TOKENS, {"targets": ()}, r"targets: got \(\), expected at least one of q_proj, k_proj"),
    (TOKENS, {"targets": ("q",)}, r"targets: got \('q',\), expected at least one of q_proj"),
    (TOKENS, {"corruption": "noise"}, "corruption: got 'noise', expected mask or uniform"),
    (UNIFORM, {"mask_token_id": 9}, "mask_token_id: got 9, expected none"),
    (UNIFORM, {"train_norms": True}, "got 'uniform', expected 'mask' unless .* train_norms"),
    (UNIFORM, {"sampler_size": 4}, "got 'uniform', expected 'mask' unless .* sampler_size 0"),
    (UNIFORM, {"draft_vocab_size": 32}, "got 'uniform', .* unless .* draft_vocab_size none"),
    (UNIFORM, {"num_draft_tokens": 1}, "got 'uniform', .* num_draft_tokens at least 2"),
    (UNIFORM, {"num_passes": 2}, "num_passes: got 2, expected 1 with corruption 'uniform'"),
]


@pytest.mark.parametrize(("fields", "change", "match"), REFUSED)
def test_contradictions_are_refused(
    tmp_path: Path, fields: dict[str, Any], change: dict[str, Any], match: str
) -> None:
    shape = config(**fields)
    path = saved(tmp_path, shape) / "draft_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    if shape.is_plain:  # what a folder that claims more would need
        save = tmp_path / "draft_model.safetensors"
        save.write_bytes((tmp_path / "adapter_model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=match):
        load_adapter(tiny_backbone(), tmp_path)
    with pytest.raises(ConfigError, match=match):
        DraftModel(tiny_backbone(), dataclasses.replace(shape, **change))


@pytest.mark.parametrize("change", [{"num_passes": 0}, {"targets": 3}, {"mask_token_id": "x"}])
def test_nonsense_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = saved(tmp_path, config(**TOKENS)) / "draft_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_adapter(tiny_backbone(), tmp_path)


def test_folders_of_older_versions_are_read(tmp_path: Path) -> None:
    """They know nothing of the fields that came later."""
    shipped, tensors = read_adapter(SHIPPED_ADAPTERS["default"])
    assert shipped.entry_layer > 0
    assert (shipped.corruption, shipped.num_passes, shipped.train_norms) == ("mask", 1, True)
    assert len(shipped.targets) == 7
    assert not shipped.is_plain
    assert "slots" in tensors
    path = saved(tmp_path, config(**LATE)) / "draft_config.json"
    raw = json.loads(path.read_text())
    first = ("num_draft_tokens", "entry_layer", "feature_layers", "rank", "lora_alpha", "base")
    path.write_text(json.dumps({name: raw[name] for name in first}))
    assert load_adapter(tiny_backbone(), tmp_path).config == config(**LATE)


def test_bytes_are_those_of_what_is_not_the_targets() -> None:
    backbone = tiny_backbone()
    s = backbone.spec
    plain = random_adapter(backbone, **TOKENS, train_norms=False, targets=("o_proj", "down_proj"))
    heads, inner, width = s.num_heads * s.head_dim, s.intermediate_size, s.hidden_size
    assert plain.nbytes == 4 * s.num_layers * 2 * (heads + width + inner + width)
    norms = random_adapter(backbone, **TOKENS, targets=("o_proj", "down_proj"))
    assert norms.nbytes - plain.nbytes == 4 * (2 * s.num_layers + 1) * width


def test_only_a_random_draft_is_gated_by_row() -> None:
    backbone = tiny_backbone()
    masked = random_adapter(backbone, **TOKENS, train_norms=False)
    assert masked.for_pass(4) is masked
    adapter = random_adapter(backbone, **UNIFORM, targets=("o_proj", "v_proj"))
    layers = adapter.for_pass(3).layers
    x = torch.randn(6, backbone.hidden_size, generator=torch.Generator().manual_seed(0))
    for base, wrapped, gated in zip(backbone.layers, adapter.layers, layers, strict=True):
        assert gated.gate_up is base.gate_up
        y = gated.qkv(x)
        assert torch.equal(y[[1, 2, 4, 5]], wrapped.qkv(x)[[1, 2, 4, 5]])
        torch.testing.assert_close(y[[0, 3]], base.qkv(x)[[0, 3]])
        v = s = backbone.spec.num_kv_heads * backbone.spec.head_dim
        torch.testing.assert_close(y[:, :-v], base.qkv(x)[:, :-s])
        assert not torch.allclose(y[[1, 2, 4, 5], -v:], base.qkv(x)[[1, 2, 4, 5], -v:])
