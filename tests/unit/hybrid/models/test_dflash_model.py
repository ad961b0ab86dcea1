"""The draft network against transformers' own class, and the layouts that it is stored in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fakes import random_dflash, tiny_backbone
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybrid.attention.pattern import causal
from hybrid.drafters.dflash import DFlashDrafter
from hybrid.errors import CheckpointError, ConfigError
from hybrid.models.dflash import DFlashModel, DFlashSpec, spread_layers
from hybrid.models.dflash_files import dflash_config, dflash_spec, load_dflash, save_dflash
from hybrid.models.spec import RopeSpec
from hybrid.params import SamplingParams
from hybrid.protocols import DraftState
from hybrid.types import Mode, Plan, SequenceState

WIDTH, WINDOW, MASK = 5, 6, 63  # a window never cuts a block: they differ by orders of magnitude


def make_spec(**fields: Any) -> DFlashSpec:
    own: dict[str, Any] = {
        "block_size": WIDTH,
        "mask_token_id": MASK,
        "target_layer_ids": (1, 0),  # their order is part of the format
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 24,
        "norm_eps": 1e-5,
        "max_seq_len": 512,
        "rope": RopeSpec(theta=500.0),
        "windows": (None, None),
        "num_target_layers": 3,
    }
    return DFlashSpec(**{**own, **fields})


def random_model(spec: DFlashSpec, seed: int = 0) -> DFlashModel:
    """A model whose every number matters, norms too."""
    draw = torch.Generator().manual_seed(seed)
    model = DFlashModel(spec).eval().requires_grad_(False)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=draw)
        weight.copy_(noise / weight.shape[-1] ** 0.5 if weight.ndim == 2 else 1 + 0.3 * noise)
    return model


def muse(model: DFlashModel) -> Any:
    """The same network as a class of transformers."""
    library = pytest.importorskip("transformers.models.muse_glimmer_assistant")
    spec = model.spec
    window = next((w for w in spec.windows if w), 513)
    config = library.MuseGlimmerAssistantConfig(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=spec.block_size,
        mask_token_id=spec.mask_token_id,
        target_layer_ids=list(spec.target_layer_ids),
        layer_types=["sliding_attention" if w else "full_attention" for w in spec.windows],
        sliding_window=window - 1,  # a distance, not a number of tokens
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
        max_position_embeddings=spec.max_seq_len,
    )
    theirs = library.MuseGlimmerAssistantModel(config).eval()
    names = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    renamed = {}
    for name, value in model.state_dict().items():
        prefix = next((p for p in names if name.startswith(p)), "")
        renamed[names.get(prefix, "") + name.removeprefix(prefix)] = value
    theirs.load_state_dict(renamed)
    return theirs


def drafted_hidden(drafter: DFlashDrafter, prompt: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the drafter's network is given and gives: features, embeddings, [W, C]."""
    backbone: Any = drafter._backbone
    cache, length = backbone.new_cache(1, 64), len(prompt) - 1
    out = backbone.forward(
        torch.tensor([prompt[:-1]]),
        torch.arange(length)[None],
        causal([0], length),
        cache,
        [0],
        taps=drafter.taps,
    )
    cache.commit(0, length)
    drafter.absorb(cache, [0], out.hidden, [length])
    seen: list[Tensor] = []
    handle = drafter._model.register_forward_hook(lambda _, args, x: seen.extend((args[0], x)))
    params = SamplingParams(max_new_tokens=20)
    row = SequenceState(0, prompt, len(prompt), params, torch.Generator())
    drafter.draft(DraftState([row], cache, {}), Plan(Mode.SPECULATIVE, drafter.max_draft_tokens))
    handle.remove()
    features = torch.cat([out.hidden[n] for n in drafter.taps], dim=-1)
    return features, seen[0], seen[1]


@pytest.mark.parametrize("windows", [(None, None), (WINDOW, None)], ids=["full", "sliding"])
@pytest.mark.parametrize("length", [2, 12])
def test_a_pass_equals_transformers_class(windows: tuple[int | None, ...], length: int) -> None:
    model = random_model(make_spec(windows=windows))
    prompt = [(7 * i) % 60 for i in range(length)]
    features, embeds, ours = drafted_hidden(DFlashDrafter(tiny_backbone(), model), prompt)
    other = muse(model)
    cache = transformers.cache_utils.DFlashCache(config=other.config)
    cache.activate_past_recording()
    cache.set_previous_accepted_tokens(length - 1)
    theirs = other(
        noise_embeds=embeds[None].clone(),
        context_hidden_states=features.clone(),
        position_ids=torch.arange(length - 1 + WIDTH)[None],
        cache=cache,
    ).last_hidden_state[0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
    assert ours.std(dim=0).min() > 1e-3, "all rows alike prove little"


def test_a_narrower_window_changes_the_draft() -> None:
    prompt = [(7 * i) % 60 for i in range(12)]
    full, near = (
        drafted_hidden(DFlashDrafter(tiny_backbone(), random_model(make_spec(windows=w))), prompt)
        for w in ((None, None), (WINDOW, None))
    )
    assert not torch.allclose(full[2], near[2], atol=1e-3)


# On disk


def zlab_config(**changes: Any) -> dict[str, Any]:
    return {**dflash_config(make_spec(), torch.float32), **changes}


def speculators_config(**changes: Any) -> dict[str, Any]:
    config = zlab_config()
    top = {"architectures", "block_size", "dflash_config", "num_target_layers", "dtype"}
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": {k: v for k, v in config.items() if k not in top},
        "draft_vocab_size": 64,
        "block_size": WIDTH,
        "aux_hidden_state_layer_ids": [2, 1],
        "mask_token_id": MASK,
        "sliding_window_non_causal": True,
        "sample_from_anchor": False,
        **changes,
    }


def test_our_files_are_the_public_layout(tmp_path: Path) -> None:
    save_dflash(tmp_path, random_model(make_spec()), torch.bfloat16)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["dflash_config"] == {
        "mask_token_id": MASK,
        "target_layer_ids": [1, 0],
        "causal": False,
    }
    public = """attention_bias attention_dropout block_size dtype head_dim hidden_act hidden_size
        initializer_range intermediate_size layer_types max_position_embeddings max_window_layers
        num_attention_heads num_hidden_layers num_key_value_heads num_target_layers rms_norm_eps
        rope_theta sliding_window tie_word_embeddings use_cache use_sliding_window vocab_size"""
    assert set(public.split()) <= set(config)
    assert (config["block_size"], config["num_target_layers"], config["vocab_size"]) == (5, 3, 64)
    assert (config["dtype"], config["layer_types"]) == ("bfloat16", ["full_attention"] * 2)
    tensors = load_file(tmp_path / "model.safetensors")
    names = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    for index in range(2):
        layer = f"layers.{index}"
        names |= {f"{layer}.{n}_layernorm.weight" for n in ("input", "post_attention")}
        names |= {f"{layer}.self_attn.{n}_proj.weight" for n in "qkvo"}
        names |= {f"{layer}.self_attn.{n}_norm.weight" for n in "qk"}
        names |= {f"{layer}.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    assert set(tensors) == names
    assert tensors["fc.weight"].shape == (64, 128)
    assert tensors["fc.weight"].dtype == torch.bfloat16


def test_files_come_back_as_they_were(tmp_path: Path) -> None:
    rope = RopeSpec(1e4, "yarn", {"factor": 4.0, "original_max_position_embeddings": 128}, 512)
    for name, spec in {
        "plain": make_spec(),
        "other": make_spec(rope=rope, windows=(WINDOW, None), bias=True),
    }.items():
        model = random_model(spec)
        save_dflash(tmp_path / name, model, torch.float32)
        loaded = load_dflash(tmp_path / name)
        assert dflash_config(loaded.spec, torch.float32) == dflash_config(spec, torch.float32)
        assert loaded.spec.windows == spec.windows
        for key, value in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[key], value)
        assert not any(p.requires_grad for p in loaded.parameters())


def test_the_layout_of_transformers_is_read(tmp_path: Path) -> None:
    model = random_model(make_spec(windows=(WINDOW, None)))
    muse(model).save_pretrained(tmp_path)
    loaded = load_dflash(tmp_path)
    assert loaded.spec.windows == (WINDOW, None)
    assert loaded.spec.target_layer_ids == (1, 0)
    assert loaded.spec.num_target_layers is None
    assert loaded.spec.rope.theta == 500.0
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value)


def test_the_layout_of_speculators_is_read(tmp_path: Path) -> None:
    model = random_model(make_spec())
    save_dflash(tmp_path, model, torch.float32)
    (tmp_path / "config.json").write_text(json.dumps(speculators_config()))
    loaded = load_dflash(tmp_path)
    assert loaded.spec.target_layer_ids == (1, 0)  # it counts the embedding as layer 0
    assert (loaded.spec.block_size, loaded.spec.mask_token_id) == (WIDTH, MASK)
    assert torch.equal(loaded.fc.weight, model.fc.weight)


def test_layers_are_spread_as_the_public_drafters_have_them() -> None:
    assert spread_layers(36, 5) == (1, 9, 17, 25, 33)
    assert spread_layers(28, 5) == (1, 7, 13, 19, 25)
    assert spread_layers(4, 2) == (1,)
    for count in range(1, 7):
        for num_layers in range(2, 12):
            ids = spread_layers(num_layers, count)
            assert 1 <= len(ids) <= count
            assert all(0 <= i < num_layers - 1 for i in ids)
    with pytest.raises(ConfigError, match="at least 2"):
        spread_layers(1, 1)
    config = zlab_config(num_target_layers=36)
    del config["dflash_config"]["target_layer_ids"]
    assert dflash_spec(config).target_layer_ids == (1, 33)


@pytest.mark.parametrize("last", [2, 3, -1])
def test_the_last_layer_is_no_feature(last: int) -> None:
    with pytest.raises(ConfigError, match="not the last one"):
        make_spec(target_layer_ids=(0, last))
    # A layout that does not say how many layers the target has is checked against the target.
    silent = random_model(make_spec(target_layer_ids=(0, last), num_target_layers=None))
    with pytest.raises(ConfigError, match="not the last one"):
        DFlashDrafter(tiny_backbone(), silent)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (zlab_config(hidden_act="gelu"), "hidden_act"),
        (zlab_config(dflash_config={**zlab_config()["dflash_config"], "causal": True}), "causal"),
        (zlab_config(dflash_config={**zlab_config()["dflash_config"], "use_swa": 1}), "use_swa"),
        (zlab_config(dflash_config={}), "mask_token_id"),
        (speculators_config(draft_vocab_size=32), "draft_vocab_size"),
        (speculators_config(sample_from_anchor=True), "sample_from_anchor"),
        ({"model_type": "llama"}, "num_hidden_layers"),
    ],
)
def test_other_kinds_are_refused(config: dict[str, Any], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        dflash_spec(config)


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="block_size"):
        make_spec(block_size=1)
    with pytest.raises(ConfigError, match="mask_token_id: got 64"):
        make_spec(mask_token_id=64)


def test_tensors_must_fit_the_config(tmp_path: Path) -> None:
    save_dflash(tmp_path, random_model(make_spec()), torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    for change, match in (
        ({"fc.weight": None}, "fc.weight: got none"),
        ({"fc.weight": torch.zeros(64, 64)}, r"got \[64, 64\], expected \[64, 128\]"),
        ({"d2t": torch.zeros(3)}, "d2t"),
    ):
        changed = {n: t for n, t in {**tensors, **change}.items() if t is not None}
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=match):
            load_dflash(tmp_path)


def test_a_drafter_of_another_target_is_refused() -> None:
    for backbone in (tiny_backbone(hidden_size=32), tiny_backbone(num_layers=4)):
        with pytest.raises(CheckpointError, match="belongs to this target"):
            DFlashDrafter(backbone, random_model(make_spec()))
    with pytest.raises(CheckpointError, match="mask id 63"):
        DFlashDrafter(tiny_backbone(vocab_size=40), random_model(make_spec()))
    assert random_dflash(tiny_backbone()).max_draft_tokens == 7
