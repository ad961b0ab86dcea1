"""A plain adapter drafts the same tokens in stock PEFT (activated LoRA) as here."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import make_engine, random_adapter, random_prompts
from peft import PeftConfig, PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from hybrid.decode.loop import prefill
from hybrid.drafters.self_diffusion import SelfDiffusionDrafter
from hybrid.models.adapter import load_adapter
from hybrid.models.checkpoint import open_checkpoint
from hybrid.models.draft_config import DraftConfig
from hybrid.models.draft_input import noise
from hybrid.models.families import spec_from_config
from hybrid.models.tiny import tiny_checkpoint
from hybrid.models.transformer import NativeBackbone
from hybrid.params import SamplingParams
from hybrid.protocols import DraftState
from hybrid.training.self_diffusion.draft_model import DraftModel
from hybrid.training.self_diffusion.export import save_adapter
from hybrid.types import Mode, Plan

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 24}),
}
ALL = DraftConfig.__dataclass_fields__["targets"].default
K, MASK = 5, 7


def plain_config(base: dict[str, int], **fields: Any) -> DraftConfig:
    own = {"rank": 3, "lora_alpha": 6.0, "train_norms": False, **fields}
    if fields["corruption"] == "mask":
        own["mask_token_id"] = MASK
    return DraftConfig(K, 0, (), base=base, **own)


def exported(
    tmp_path: Path, family: str, corruption: str, targets: tuple[str, ...] = ALL
) -> tuple[Path, Path, NativeBackbone]:
    """Return a model, a plain adapter's folder as training exports it, and our backbone."""
    kind, fields = FAMILIES[family]
    path = tiny_checkpoint(tmp_path / "model", kind, tokenizer=False, **fields)
    checkpoint = open_checkpoint(path)
    backbone = NativeBackbone(spec_from_config(checkpoint.config), checkpoint.tensors)
    base = random_adapter(backbone).config.base
    model = DraftModel(backbone, plain_config(dict(base), corruption=corruption, targets=targets))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.3 * torch.randn(value.shape, generator=generator))
    folder = tmp_path / "adapter"
    save_adapter(
        folder, model.config, model.adapter_tensors(), base_model="tiny", dtype=torch.float32
    )
    return path, folder, backbone


def our_draft(backbone: NativeBackbone, folder: Path, prompt: list[int]) -> tuple[int, list[int]]:
    """Return the anchor behind a prompt and what the engine's drafter proposes behind it."""
    drafter = SelfDiffusionDrafter(backbone, load_adapter(backbone, folder))
    engine, (row,) = make_engine(backbone, drafter, [prompt], SamplingParams(max_new_tokens=20))
    prefill(engine, row)
    proposal = drafter.draft(DraftState([row], engine.cache, {}), Plan(Mode.SPECULATIVE, K))
    assert proposal.draft_probs is None
    assert proposal.num_forwards == 1
    return row.anchor, proposal.tokens[0].tolist()


def cached(model: Any, forward: Any, cache: Any, ids: list[int], **kwargs: Any) -> Tensor:
    """Run `ids` over a transformers cache. Returns logits [T, V]."""
    names = inspect.signature(model.forward).parameters  # transformers 5.24 renamed it
    kwargs["cache" if "cache" in names else "past_key_values"] = cache
    logits: Tensor = forward(input_ids=torch.tensor([ids]), use_cache=True, **kwargs).logits[0]
    return logits


@pytest.mark.parametrize("targets", [ALL, ("q_proj", "v_proj", "down_proj")], ids=["all", "some"])
@pytest.mark.parametrize("corruption", ["mask", "uniform"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_activated_lora_drafts_the_same_tokens(
    tmp_path: Path, family: str, corruption: str, targets: tuple[str, ...]
) -> None:
    path, folder, backbone = exported(tmp_path, family, corruption, targets)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = PeftConfig.from_pretrained(folder)
    config.alora_invocation_tokens = [0]  # any: each call says by itself which rows are updated
    peft = PeftModel.from_pretrained(base, folder, config=config).eval()
    num_changed = 0
    for prompt in random_prompts(9, 1, 14):
        anchor, drafted = our_draft(backbone, folder, prompt)
        cache = DynamicCache(config=base.config)
        with peft.disable_adapter():
            logits = cached(base, peft, cache, prompt)
        assert int(logits[-1].argmax()) == anchor
        length = len(prompt)
        if corruption == "mask":
            # [anchor, K masks], all of them updated; row j predicts its own token.
            rows = [anchor, *[MASK] * K]
            everything = torch.zeros(1, 1, K + 1, length + K + 1)
            out = cached(base, peft, cache, rows, alora_offsets=[K + 1], attention_mask=everything)
            out = out[1:]
            out[:, MASK] = float("-inf")  # no answer
        else:
            # [anchor, K - 1 random tokens], the anchor not updated; row i predicts the next token.
            rows = [anchor, *noise(0, length, K - 1, backbone.vocab_size)]
            out = cached(base, peft, cache, rows, alora_offsets=[K - 1])
            clean = plain(torch.tensor([[*prompt, anchor]])).logits[0, -1]
            torch.testing.assert_close(out[0], clean, rtol=1e-4, atol=1e-4)
        assert out.argmax(dim=-1).tolist() == drafted
        ar = plain(torch.tensor([[*prompt, anchor, *drafted]])).logits[0, length:].argmax(-1)
        if corruption == "uniform":
            assert drafted[0] == int(ar[0]), "the clean token is the target's"
        num_changed += drafted[1:] != ar[1:K].tolist()
    assert num_changed > 0, "an adapter that does nothing would prove nothing"


@pytest.mark.parametrize("corruption", ["mask", "uniform"])
def test_the_folder_is_an_ordinary_peft_adapter(tmp_path: Path, corruption: str) -> None:
    path, folder, _ = exported(tmp_path, "llama", corruption, ("q_proj", "down_proj"))
    names = {"adapter_config.json", "adapter_model.safetensors", "draft_config.json"}
    assert {p.name for p in folder.iterdir()} == names
    raw = json.loads((folder / "adapter_config.json").read_text())
    assert not [name for name in raw if "alora" in name], "servers take plain LoRA only"
    assert raw["target_modules"] == ["q_proj", "down_proj"]
    assert "layers_to_transform" not in raw
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    peft = PeftModel.from_pretrained(base, folder)
    saved = load_file(folder / "adapter_model.safetensors")
    theirs = {n.replace(".default.", "."): p for n, p in peft.named_parameters() if "lora" in n}
    assert theirs.keys() == saved.keys()
    assert len(saved) == 2 * 2 * 3
    assert all(torch.equal(theirs[name], saved[name]) for name in saved)


def test_a_plain_adapter_replaces_one_that_was_not(tmp_path: Path) -> None:
    _, folder, backbone = exported(tmp_path, "llama", "mask")
    (folder / "draft_model.safetensors").write_bytes(b"of another run")
    config = load_adapter(backbone, folder).config
    model = DraftModel(backbone, config)
    save_adapter(folder, config, model.adapter_tensors(), base_model="tiny")
    assert not (folder / "draft_model.safetensors").exists()
