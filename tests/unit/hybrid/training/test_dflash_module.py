"""The training pass of the dflash recipe: what a block sees, what it costs, where it starts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import make_engine, random_dflash, random_prompts, tiny_backbone
from torch import Tensor

from hybrid.attention.pattern import causal
from hybrid.decode.loop import prefill
from hybrid.models.transformer import NativeBackbone
from hybrid.params import SamplingParams
from hybrid.training.dflash.module import Blocks, DFlashTraining, start_from_target
from hybrid.types import Write

TOKENS, WIDTH = random_prompts(12)[0], 4
ANCHORS = [1, 2, 6, 9, 10]


def make_blocks(
    backbone: NativeBackbone, layers: tuple[int, ...], anchors: list[int], dtype: torch.dtype
) -> Blocks:
    length = len(TOKENS)
    out = backbone.forward(
        torch.tensor([TOKENS]),
        torch.arange(length)[None],
        causal([0], length),
        backbone.new_cache(1, length),
        [0],
        write=Write.COMMIT,
        taps=layers,
    )
    assert out.logits is not None
    features = torch.cat([out.hidden[n][0] for n in layers], dim=-1).clone()
    return Blocks(torch.tensor(TOKENS), features, torch.tensor(anchors), out.logits[0].clone())


def make_module(
    dtype: torch.dtype = torch.float32, distillation: float = 0.0, **fields: Any
) -> tuple[DFlashTraining, Blocks]:
    backbone = tiny_backbone("qwen3", dtype)
    model = random_dflash(backbone, WIDTH, **fields)._model
    module = DFlashTraining(model, backbone, decay=2.0, distillation=distillation)
    return module, make_blocks(backbone, model.spec.target_layer_ids, ANCHORS, dtype)


@pytest.mark.parametrize("windows", [(None, None), (6, None)], ids=["full", "sliding"])
def test_all_blocks_in_one_pass_are_the_drafters_one_by_one(windows: Any) -> None:
    module, blocks = make_module(torch.float64, windows=windows)
    logits = module.logits(blocks)
    backbone: Any = module.backbone
    drafter = random_dflash(backbone, WIDTH, windows=windows)
    for index, anchor in enumerate(ANCHORS):
        params = SamplingParams(max_new_tokens=20)
        engine, (row,) = make_engine(backbone, drafter, [TOKENS[:anchor]], params)
        prefill(engine, row)
        row.tokens[-1] = TOKENS[anchor]
        with torch.inference_mode():
            own = drafter._logits([row], drafter._memory(engine.cache), WIDTH - 1)[0]
        own = own.clone()
        mask_id = module.model.spec.mask_token_id
        assert (own[:, mask_id] == -math.inf).all()
        own[:, mask_id] = logits[index, :, mask_id]
        torch.testing.assert_close(own, logits[index], rtol=0, atol=1e-9)


def test_a_block_sees_the_features_before_its_anchor_only() -> None:
    module, blocks = make_module()
    before = module.logits(blocks)
    for position in range(len(TOKENS)):
        features = blocks.features.clone()
        features[position] += 1.0
        moved = (module.logits(replace(blocks, features=features)) - before).abs().amax(dim=(1, 2))
        for anchor, change in zip(ANCHORS, moved.tolist(), strict=True):
            assert (change > 1e-3) == (position < anchor)


def test_blocks_do_not_see_each_other() -> None:
    module, blocks = make_module(torch.float64)
    together = module.logits(blocks)
    for index, anchor in enumerate(ANCHORS):
        alone = module.logits(replace(blocks, anchors=torch.tensor([anchor])))
        torch.testing.assert_close(alone[0], together[index], rtol=0, atol=1e-10)


@pytest.mark.parametrize("distillation", [0.0, 0.25, 1.0])
def test_the_loss_equals_a_hand_computation(distillation: float) -> None:
    module, blocks = make_module(torch.float64, distillation)
    loss = module(blocks)["loss"]
    logits, target = module.logits(blocks), blocks.logits
    assert target is not None
    total = weights = 0.0
    for row, anchor in enumerate(ANCHORS):
        for j in range(1, WIDTH):
            at = anchor + j
            if at >= len(TOKENS):  # the last anchors have nothing more to predict
                continue
            q = torch.softmax(logits[row, j - 1], dim=0)
            p = torch.softmax(target[at - 1], dim=0)
            cross_entropy = -math.log(q[TOKENS[at]].item())
            divergence = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist()))  # noqa: B905
            weight = math.exp(-(j - 1) / 2.0)
            total += weight * ((1 - distillation) * cross_entropy + distillation * divergence)
            weights += weight
    assert loss.item() == pytest.approx(total / weights, rel=1e-9)


def test_the_gradient_equals_a_finite_difference() -> None:
    module, blocks = make_module(torch.float64, 0.5)
    module.requires_grad_(True)
    module(blocks)["loss"].backward()
    draw = torch.Generator().manual_seed(0)
    for name, weight in module.named_parameters():
        assert weight.grad is not None, name
        direction = torch.randn(weight.shape, generator=draw, dtype=torch.float64)
        direction /= direction.norm()
        with torch.no_grad():
            losses = []
            for sign in (1, -1):
                weight += sign * 1e-5 * direction
                losses.append(module(blocks)["loss"].item())
                weight -= sign * 1e-5 * direction
        slope = (losses[0] - losses[1]) / 2e-5
        assert slope == pytest.approx((weight.grad * direction).sum().item(), rel=1e-5, abs=1e-8), (
            name
        )


def test_only_the_drafter_is_trained() -> None:
    module, blocks = make_module()
    backbone = module.backbone
    before = [backbone.embedding.clone(), backbone.layers[0].input_norm.clone()]
    assert len(list(module.parameters())) == len(list(module.model.parameters()))
    optimizer = torch.optim.SGD(module.requires_grad_(True).parameters(), lr=0.1)
    first = module(blocks)["loss"]
    first.backward()
    optimizer.step()
    assert module(blocks)["loss"] < first
    assert torch.equal(before[0], backbone.embedding)
    assert torch.equal(before[1], backbone.layers[0].input_norm)
    assert backbone.embedding.grad is None


def test_a_drafter_starts_with_the_targets_own_keys_and_values() -> None:
    """Feature n - 3 is the input of layer n - 2, the first of the two layers that are copied."""
    backbone = tiny_backbone("qwen3", num_layers=4)
    model = random_dflash(backbone, WIDTH, target_layer_ids=(0, 1), intermediate_size=16)._model
    other = model.layers[0].mlp.up_proj.weight.clone()  # type: ignore[union-attr]
    start_from_target(model, backbone)
    cache, length = backbone.new_cache(1, len(TOKENS)), len(TOKENS)
    out = backbone.forward(
        torch.tensor([TOKENS]),
        torch.arange(length)[None],
        causal([0], length),
        cache,
        [0],
        taps=(0, 1),
    )
    features = torch.cat([out.hidden[0][0], out.hidden[1][0]], dim=-1)
    context: Tensor = model.context(features.clone(), torch.arange(length))
    torch.testing.assert_close(context[0], cache.data[2, :, 0, :, :length], rtol=0, atol=1e-5)
    assert torch.equal(model.layers[1].self_attn.o_proj.weight, backbone.layers[3].o.weight)  # type: ignore[union-attr]
    assert torch.equal(model.norm.weight, backbone.norm)
    assert torch.equal(other, model.layers[0].mlp.up_proj.weight), "another shape is left alone"  # type: ignore[union-attr]
