"""An adapter acts in draft passes only; one that does not fit is refused, and said why."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FAMILIES, random_adapter, random_prompts, tiny_backbone
from torch import Tensor

from hybrid import HybridDecoder
from hybrid.attention.pattern import bidirectional, causal
from hybrid.errors import CheckpointError
from hybrid.models.adapter import DiffusionAdapter, load_adapter
from hybrid.models.checkpoint import open_checkpoint
from hybrid.models.draft_config import DraftConfig, base_shape, projection_shapes
from hybrid.models.draft_input import MASKED, LateInput
from hybrid.models.families import spec_from_config
from hybrid.models.loading import load_model
from hybrid.models.tiny import tiny_checkpoint
from hybrid.models.transformer import NativeBackbone
from hybrid.protocols import Entry
from hybrid.training.self_diffusion.draft_model import DraftModel
from hybrid.training.self_diffusion.export import save_adapter
from hybrid.types import Write

PROMPT = random_prompts(12)[0]


def masked_rows(anchors: list[int], width: int) -> Tensor:
    return torch.tensor([[anchor, *[MASKED] * (width - 1)] for anchor in anchors])


def late_input(adapter: DiffusionAdapter) -> LateInput:
    assert isinstance(adapter.draft_input, LateInput)
    return adapter.draft_input


def ar_bits(
    backbone: NativeBackbone, adapter: DiffusionAdapter | None, tokens: list[int]
) -> tuple[Tensor, Tensor]:
    """Decode `tokens` one by one, with a draft pass before each when there is an adapter.

    Returns:
        The logits of every position, and the committed cache.
    """
    cache = backbone.new_cache(1, len(tokens) + 9)
    logits = []
    taps = (0,) if adapter is None else adapter.config.taps
    hidden: dict[int, Tensor] = {}
    for start, token in enumerate(tokens):
        if adapter is not None and hidden:
            width = min(4, adapter.config.num_draft_tokens) + 1
            before = cache.data[..., :start, :].clone()
            u = adapter.draft_input(masked_rows([token], width), hidden)
            backbone.forward(
                None,
                torch.arange(start, start + width)[None],
                bidirectional([start], width),
                cache,
                [0],
                entry=Entry(adapter.config.entry_layer, u, adapter),
            )
            assert torch.equal(cache.data[..., :start, :], before)
            assert cache.lengths == [start]
        out = backbone.forward(
            torch.tensor([[token]]), torch.tensor([[start]]), causal([start], 1), cache, [0],
            write=Write.COMMIT, taps=taps,
        )  # fmt: skip
        assert out.logits is not None
        logits.append(out.logits[0, 0])
        hidden = {layer: value[:, -1] for layer, value in out.hidden.items()}
    return torch.stack(logits), cache.data[:, :, 0, :, : len(tokens)]


def assert_gated(backbone: NativeBackbone, tokens: list[int]) -> None:
    plain = ar_bits(backbone, None, tokens)
    adapter = random_adapter(backbone)
    gated = ar_bits(backbone, adapter, tokens)
    assert torch.equal(plain[0], gated[0])
    assert torch.equal(plain[1], gated[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ar_logits_and_cache_are_the_base_models_bit_for_bit(
    family: str, dtype: torch.dtype
) -> None:
    assert_gated(tiny_backbone(family, dtype), PROMPT)


@pytest.mark.default_model
@pytest.mark.parametrize("precision", ["int4", "bfloat16", "float32"])
def test_gating_on_the_default_model(default_model: Callable[[str], Path], precision: str) -> None:
    backbone = load_model(str(default_model(precision)), dtype=precision).backbone
    assert isinstance(backbone, NativeBackbone)
    assert_gated(backbone, [1, 9690, 198, 2683, 359, 253])


def test_a_draft_pass_changes_the_logits() -> None:
    """The adapter does act where it should: without this, the tests above could not fail."""
    backbone = tiny_backbone()
    adapter = random_adapter(backbone)
    hidden = {n: torch.ones(1, 64) for n in adapter.config.taps}
    u = adapter.draft_input(masked_rows([3], 3), hidden)
    outs = []
    for entry in (Entry(1, u, adapter), Entry(1, u, None)):
        cache = backbone.new_cache(1, 8)
        out = backbone.forward(
            None, torch.arange(3)[None], bidirectional([0], 3), cache, [0], entry=entry
        )
        outs.append(out.logits)
    assert not torch.allclose(*outs, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 7], ids="K{}".format)
def test_draft_input_does_not_depend_on_the_batch(
    num_draft_tokens: int, dtype: torch.dtype
) -> None:
    backbone = tiny_backbone("llama", dtype)
    adapter = random_adapter(backbone)
    generator = torch.Generator().manual_seed(0)
    hidden = {n: torch.randn(5, 64, generator=generator).to(dtype) for n in adapter.config.taps}
    rows = masked_rows([3, 5, 7, 7, 0], num_draft_tokens + 1)
    together = adapter.draft_input(rows, hidden)
    assert together.shape == (5, num_draft_tokens + 1, 64)
    for b in range(5):
        alone = adapter.draft_input(rows[b, None], {n: h[b, None] for n, h in hidden.items()})
        assert torch.equal(together[b], alone[0])


def test_draft_input_is_the_formula() -> None:
    backbone = tiny_backbone()
    adapter = late_input(random_adapter(backbone, num_draft_tokens=3))
    hidden = {n: torch.randn(1, 64, generator=torch.Generator().manual_seed(n)) for n in (0, 2)}
    (u,) = adapter(torch.tensor([[9, MASKED, 5, MASKED]]), hidden)

    def unit(x: Tensor) -> Tensor:
        return x / (x.pow(2).mean() + 1e-6).sqrt()

    emb, p, q = backbone.embedding[9], adapter.project.dense(), adapter.features.dense()
    own = [emb, adapter.mask, backbone.embedding[5], adapter.mask]
    for j in range(4):
        e = own[j] + adapter.slots[j]
        expected = hidden[0][0] + adapter.slots[j] + p @ torch.cat([unit(emb), e])
        expected = expected + q @ torch.cat([unit(hidden[0][0]), unit(hidden[2][0])])
        torch.testing.assert_close(u[j], expected, rtol=1e-4, atol=1e-4)


def test_any_id_may_stand_in_a_prompt() -> None:
    """The mask is a property of the slot: the vocabulary's mask id is a token like any other."""
    base = tiny_backbone()
    backbone: NativeBackbone = object.__new__(NativeBackbone)
    backbone.__dict__.update(base.__dict__)
    backbone.spec = replace(base.spec, mask_token_id=5)
    backbone.mask_token_id = 5
    prompts = [[5], [5, 5, 5], [1, 5, 2], list(range(64))]
    decoder = HybridDecoder(backbone, adapter=random_adapter(backbone))
    plain = HybridDecoder(backbone)
    ours = decoder.generate(prompts, max_new_tokens=24)
    theirs = plain.generate(prompts, strategy="ar", max_new_tokens=24)
    assert [r.token_ids for r in ours] == [r.token_ids for r in theirs]
    assert all(r.stats.num_draft_forwards > 0 for r in ours)
    # The mask id as an anchor enters with its own embedding, as any id does.
    late = late_input(random_adapter(backbone))
    hidden = {n: torch.zeros(1, 64) for n in (0, 2)}
    first = [late(torch.tensor([[token]]), hidden) for token in (5, 6)]
    again = replace(late, mask=late.mask + 1)(torch.tensor([[5]]), hidden)
    assert torch.equal(first[0], again)
    assert not torch.equal(first[0], first[1])


# Folders


def write_adapter(folder: Path, backbone: NativeBackbone, **changes: Any) -> Path:
    config = DraftConfig(3, 1, (0, 2), 2, 4.0, base_shape(backbone))
    tensors = DraftModel(backbone, config).adapter_tensors()
    save_adapter(folder, replace(config, **changes), tensors, base_model="tiny")
    return folder


def test_refuses_the_adapter_of_another_model(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, tiny_backbone())
    other = tiny_backbone(vocab_size=48, num_layers=4)
    with pytest.raises(CheckpointError, match="another model") as error:
        load_adapter(other, folder)
    assert "'vocab_size': (64, 48)" in str(error.value)
    assert "'num_layers': (3, 4)" in str(error.value)
    assert "hidden_size" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "draft_model.safetensors", "draft_config.json"]
)
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "garbage"])
def test_refuses_damaged_files(tmp_path: Path, name: str, damage: str) -> None:
    folder = write_adapter(tmp_path, tiny_backbone())
    path = folder / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        cut = {"empty": b"", "truncated": content[: len(content) // 2], "garbage": b"\xff" * 99}
        path.write_bytes(cut[damage])
    with pytest.raises(CheckpointError, match=f"no file {name}" if damage == "missing" else "read"):
        load_adapter(tiny_backbone(), folder)


def test_refuses_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no file draft_config.json, adapter_model.*train"):
        load_adapter(tiny_backbone(), tmp_path / "none")


@pytest.mark.parametrize(
    "change",
    [
        {"rank": "two"}, {"rank": 0}, {"num_draft_tokens": 0}, {"base": [1, 2]}, {"base": None},
        {"feature_layers": 3}, {"lora_alpha": None}, "a list",
    ],
)  # fmt: skip
def test_refuses_a_nonsense_config(tmp_path: Path, change: Any) -> None:
    folder = write_adapter(tmp_path, tiny_backbone())
    path = folder / "draft_config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps([raw] if change == "a list" else {**raw, **change}))
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_adapter(tiny_backbone(), folder)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"entry_layer": 3}, "entry_layer: got 3, expected 0 to 2"),
        ({"feature_layers": (0, 7)}, r"feature_layers: got \(0, 7\), expected below 3"),
        ({"entry_layer": 2}, None),
        ({"rank": 3}, r"lora_A.weight': got shape \[2, 64\], expected \[3, 64\]"),
        ({"num_draft_tokens": 4}, r"'slots': got shape \[4, 64\], expected \[5, 64\]"),
        ({"feature_layers": (0,)}, r"'features': got shape \[64, 128\], expected \[64, 64\]"),
    ],
)
def test_refuses_files_that_do_not_belong_together(
    tmp_path: Path, changes: dict[str, Any], match: str | None
) -> None:
    backbone = tiny_backbone()
    folder = write_adapter(tmp_path, backbone, **changes)
    if match is None:  # tensors of a layer that is not entered are spare
        assert load_adapter(backbone, folder).layers[1] is backbone.layers[1]
        return
    with pytest.raises(CheckpointError, match=match):
        load_adapter(backbone, folder)


def test_says_which_tensor_is_missing() -> None:
    backbone = tiny_backbone()
    config = DraftConfig(3, 1, (0,), 2, 4.0, base_shape(backbone))
    tensors = DraftModel(backbone, config).adapter_tensors()
    for name in tensors:
        rest = {n: t for n, t in tensors.items() if n != name}
        with pytest.raises(CheckpointError, match=f"no tensor '{name}'"):
            DiffusionAdapter(backbone, config, rest)


@pytest.mark.parametrize("family", FAMILIES)
def test_projection_shapes_are_the_checkpoints(tmp_path: Path, family: str) -> None:
    kind, fields = FAMILIES[family]
    checkpoint = open_checkpoint(tiny_checkpoint(tmp_path, kind, tokenizer=False, **fields))
    for name, shape in projection_shapes(spec_from_config(checkpoint.config)).items():
        block = "self_attn" if name[0] in "qkvo" else "mlp"
        stored = checkpoint.tensors[f"model.layers.1.{block}.{name}.weight"]
        assert tuple(stored.shape) == shape[::-1]


def test_one_folder_serves_every_precision(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, tiny_backbone())
    for dtype in (torch.float32, torch.bfloat16):
        adapter = load_adapter(tiny_backbone("llama", dtype), folder)
        assert late_input(adapter).slots.dtype == adapter.layers[1].input_norm.dtype == dtype
    tensors = DraftModel(tiny_backbone(), adapter.config).adapter_tensors()
    spec, rank = tiny_backbone().spec, adapter.config.rank
    fused = (
        spec.num_heads + 2 * spec.num_kv_heads
    ) * spec.head_dim * 2 + 2 * spec.intermediate_size
    zeros = (spec.num_layers - adapter.config.entry_layer) * fused * rank
    assert adapter.nbytes == 2 * (sum(t.numel() for t in tensors.values()) + zeros), "bfloat16"
