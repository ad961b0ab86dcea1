"""Every option of the draft pass: the trained one is the engine's, and trains what it should."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fakes import make_engine, random_prompts, tiny_backbone

from hybrid.decode.loop import prefill
from hybrid.drafters.self_diffusion import SelfDiffusionDrafter
from hybrid.models.adapter import DiffusionAdapter
from hybrid.models.draft_config import DraftConfig, base_shape
from hybrid.models.draft_input import MASKED, noise
from hybrid.models.transformer import NativeBackbone
from hybrid.params import SamplingParams
from hybrid.protocols import DraftState
from hybrid.training.data import Example
from hybrid.training.self_diffusion.context import target_context
from hybrid.training.self_diffusion.draft_model import DraftModel
from hybrid.training.self_diffusion.loss import DraftBatch, DraftLoss
from hybrid.training.self_diffusion.recipe import draw_shown

TOKENS = random_prompts(24)[0]
SEQUENCE = Example(tuple(TOKENS[:4]), tuple(TOKENS[4:]))
BACKBONES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("qwen3", {}),
    "mistral-window": ("mistral-window", {}),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "late": {},
    "late-targets": {"targets": ("k_proj", "gate_proj"), "train_norms": False},
    "late-passes": {"num_passes": 2, "draft_vocab_size": 64},
    "tokens": {"entry_layer": 0, "mask_token_id": 9},
    "tokens-plain": {"entry_layer": 0, "mask_token_id": 9, "train_norms": False},
    "tokens-targets": {"entry_layer": 0, "mask_token_id": 9, "targets": ("q_proj", "v_proj")},
    "tokens-passes": {"entry_layer": 0, "mask_token_id": 9, "num_passes": 3},
    "tokens-sampler": {"entry_layer": 0, "mask_token_id": 9, "sampler_size": 5},
    "uniform": {"entry_layer": 0, "corruption": "uniform", "train_norms": False},
    "uniform-targets": {
        "entry_layer": 0, "corruption": "uniform", "train_norms": False, "targets": ("down_proj",)
    },
}  # fmt: skip


def draft_model(backbone: NativeBackbone, num_draft_tokens: int = 4, **fields: Any) -> DraftModel:
    """Return a model none of whose parameters is zero."""
    own = {"entry_layer": 1, "rank": 3, "lora_alpha": 6.0, **fields}
    own["feature_layers"] = (0, 1) if own["entry_layer"] else ()
    config = DraftConfig(num_draft_tokens, base=base_shape(backbone), **own)
    model = DraftModel(backbone, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.2 * torch.randn(value.shape, generator=generator))
    return model


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", BACKBONES)
def test_every_option_is_the_engines_draft_pass(name: str, option: str) -> None:
    family, fields = BACKBONES[name]
    backbone, count, anchor = tiny_backbone(family, **fields), 9, 13
    model = draft_model(backbone, count, **OPTIONS[option])
    shown = torch.full((1, count), MASKED)
    if model.config.corruption == "uniform":
        shown = torch.tensor([noise(0, anchor, count - 1, 64)])
    elif model.config.num_passes > 1:
        shown[0, [1, 2, 7]] = torch.tensor([5, 9, 60])  # the mask token among what is known

    tensors = model.adapter_tensors()
    if model.config.draft_vocab_size is not None:
        tensors["vocabulary"] = torch.arange(64)
    drafter = SelfDiffusionDrafter(backbone, DiffusionAdapter(backbone, model.config, tensors))
    engine, (row,) = make_engine(
        backbone, drafter, [TOKENS[:anchor]], SamplingParams(max_new_tokens=20)
    )
    _, hidden = prefill(engine, row)[:2]
    row.tokens[-1] = TOKENS[anchor]
    known = shown if shown.shape[1] == count else torch.full((1, count), MASKED)
    slots = drafter._slots(DraftState([row], engine.cache, hidden), known)[0]
    before = torch.tensor([[TOKENS[anchor + j], TOKENS[anchor + j - 1]] for j in range(count)])
    expected = drafter._adapter.head.logits(slots, before)
    with torch.no_grad():
        context = target_context(backbone, model.config, SEQUENCE)
        ours = model(context, torch.tensor([anchor]), model.head, count, shown)[0]
        others = model(context, torch.tensor([5, anchor]), model.head, count, shown.expand(2, -1))[
            1
        ]
    assert ours.shape == (count, 64)
    if model.config.mask_token_id is not None:  # learned like any other token, but never drafted
        ours[:, model.config.mask_token_id] = others[:, model.config.mask_token_id] = float("-inf")
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(ours, others, rtol=0, atol=1e-4)


@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_reach_what_is_trained_and_nothing_else(option: str) -> None:
    backbone, anchors = tiny_backbone(), torch.tensor([4, 9, 13])
    model = draft_model(backbone, 4, **OPTIONS[option])
    weights = [backbone.embedding, backbone.norm, model.head]
    for layer in backbone.layers:
        linears = (layer.qkv, layer.o, layer.gate_up, layer.down)
        weights += [layer.input_norm, layer.post_norm, *(x.dense() for x in linears)]
    before = [weight.clone() for weight in weights]
    context = target_context(backbone, model.config, SEQUENCE)
    generator = torch.Generator().manual_seed(0)
    shown = draw_shown(model.config, context, anchors, 4, generator)
    batch = DraftBatch(context, anchors, 4, shown)
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    DraftLoss(model, torch.arange(64), decay=2.0)(batch)["loss"].backward()
    optimiser.step()
    trained = {id(value) for value in model.parameters()}
    assert {t.data_ptr() for t in model.adapter_tensors().values()} == {
        value.data_ptr() for value in model.parameters()
    }
    assert all(value.grad is not None and value.grad.any() for value in model.parameters())
    assert not any(id(weight) in trained or weight.requires_grad for weight in weights)
    assert all(torch.equal(a, b) for a, b in zip(before, weights, strict=True))


def test_the_anchor_of_a_random_draft_runs_the_base_model() -> None:
    backbone, anchors = tiny_backbone(), torch.tensor([6, 9])
    model = draft_model(backbone, 4, **OPTIONS["uniform"])
    context = target_context(backbone, model.config, SEQUENCE)
    shown = torch.tensor([[1, 2, 3], [4, 5, 6]])
    logits = model(context, anchors, model.head, 4, shown)
    last = context.hidden[backbone.num_layers - 1][anchors]
    expected = backbone.head(backbone.rms_norm(last, backbone.norm))
    torch.testing.assert_close(logits[:, 0], expected, rtol=0, atol=1e-4)
    assert logits[:, 0].sum().backward() is None
    assert not any(value.grad.any() for value in model.parameters() if value.grad is not None)
    # So what the anchor's row predicts costs nothing: the loss is that of the rows behind it.
    loss = DraftLoss(model, torch.arange(64), decay=2.0)
    ours = loss(DraftBatch(context, anchors, 4, shown))["loss"]
    total = weights = 0.0
    for n, anchor in enumerate(anchors.tolist()):
        for j in range(1, 4):
            weight = math.exp(-j / 2.0)
            log_probs = logits[n, j].log_softmax(dim=-1)
            total -= weight * log_probs[TOKENS[anchor + j + 1]].item()
            weights += weight
    assert ours.item() == pytest.approx(total / weights, rel=1e-5)
