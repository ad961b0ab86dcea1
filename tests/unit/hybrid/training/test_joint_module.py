from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid.models.tiny import tiny_checkpoint
from hybrid.training import masks
from hybrid.training.joint.acceptance import accepted_slots
from hybrid.training.joint.module import JointBatch, JointModule
from hybrid.training.trainable import Trainable, load_trainable

LENGTH, PROMPT, BLOCK, MASK = 14, 4, 3, 39


@pytest.fixture(scope="module")
def trainable(tmp_path_factory: pytest.TempPathFactory) -> Trainable:
    folder = tmp_path_factory.mktemp("joint")
    return load_trainable(
        tiny_checkpoint(folder, "qwen3", num_layers=2, vocab_size=40, tokenizer=False)
    )


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(39, (LENGTH,), generator=torch.Generator().manual_seed(0))


def _two_halves(trainable: Trainable, noisy: Tensor, clean: Tensor) -> tuple[Tensor, Tensor]:
    mask = masks.noisy_clean(masks.block_ids(LENGTH, BLOCK, PROMPT))
    positions = torch.arange(LENGTH).repeat(2)
    with torch.no_grad():
        logits = trainable(torch.cat([noisy, clean])[None], positions, mask)[0]
    return logits[:LENGTH], logits[LENGTH:]


def test_the_clean_half_is_a_plain_causal_pass(trainable: Trainable, tokens: Tensor) -> None:
    noisy = tokens.clone().fill_(MASK)
    _, clean = _two_halves(trainable, noisy, tokens)
    with torch.no_grad():
        plain = trainable.model(input_ids=tokens[None]).logits[0]
    assert torch.allclose(clean, plain, atol=1e-5)


def test_noise_reaches_its_own_block_alone(trainable: Trainable, tokens: Tensor) -> None:
    noisy, clean = _two_halves(trainable, tokens, tokens)
    changed = tokens.clone()
    changed[PROMPT + BLOCK] = MASK  # in the second block of the response
    noisy_after, clean_after = _two_halves(trainable, changed, tokens)
    assert torch.equal(clean_after, clean)
    own = slice(PROMPT + BLOCK, PROMPT + 2 * BLOCK)
    moved = (noisy_after - noisy).abs().amax(dim=-1) > 1e-3
    assert moved[own].all()
    assert int(moved.sum()) == BLOCK


def test_a_clean_token_reaches_later_blocks_and_later_tokens(
    trainable: Trainable, tokens: Tensor
) -> None:
    noisy, clean = _two_halves(trainable, tokens, tokens)
    changed = tokens.clone()
    changed[PROMPT + 1] = MASK
    noisy_after, clean_after = _two_halves(trainable, tokens, changed)
    moved = (clean_after - clean).abs().amax(dim=-1) > 1e-3
    assert moved.nonzero()[:, 0].tolist() == list(range(PROMPT + 1, LENGTH))
    moved = (noisy_after - noisy).abs().amax(dim=-1) > 1e-3
    assert moved.nonzero()[:, 0].tolist() == list(range(PROMPT + BLOCK, LENGTH))


def test_without_masked_tokens_the_ar_loss_is_left(trainable: Trainable, tokens: Tensor) -> None:
    nothing, share = torch.zeros(1, LENGTH, dtype=torch.bool), torch.ones(1, LENGTH)
    blocks = masks.block_ids(LENGTH, BLOCK, PROMPT)
    batch = JointBatch(tokens, blocks, PROMPT, nothing, share, LENGTH - PROMPT)
    scalars = JointModule(trainable, MASK, 0.3)(batch)
    assert scalars["diffusion_loss"].item() == 0
    logits = trainable.model(input_ids=tokens[None]).logits[0, PROMPT - 1 : -1]
    expected = torch.nn.functional.cross_entropy(logits, tokens[PROMPT:])
    assert scalars["loss"].item() == pytest.approx(expected.item(), rel=1e-5)


@torch.no_grad()
def _accepted_one_by_one(model: Any, tokens: list[int], anchor: int, width: int) -> list[bool]:
    """Draft behind one anchor, then verify one token after the other."""
    canvas = torch.tensor([[*tokens[: anchor + 1], *[MASK] * (width - 1)]])
    mask = torch.ones(canvas.shape[1], canvas.shape[1], dtype=torch.bool).tril()
    mask[anchor:, anchor:] = True
    logits = model(input_ids=canvas, attention_mask=mask[None, None]).logits[0, anchor + 1 :]
    logits[:, MASK] = float("-inf")
    drafts, accepted = logits.argmax(dim=-1).tolist(), []
    for done, draft in enumerate(drafts):
        text = torch.tensor([[*tokens[: anchor + 1], *drafts[:done]]])
        accepted.append(int(model(input_ids=text).logits[0, -1].argmax()) == draft)
    return accepted


def test_acceptance_equals_drafting_and_verifying_one_by_one(trainable: Trainable) -> None:
    draw = torch.Generator().manual_seed(3)
    tokens, width = torch.randint(39, (40,), generator=draw), 4
    anchors = torch.arange(1, 40)  # more than one pass, and blocks beyond the end
    found = accepted_slots(trainable, tokens, anchors, width, MASK)
    expected = [
        _accepted_one_by_one(trainable.model, tokens.tolist(), anchor, width)
        for anchor in anchors.tolist()
    ]
    assert found.tolist() == expected
    assert 0 < int(found.sum()) < found.numel()
    assert accepted_slots(trainable, tokens, anchors[:0], width, MASK).shape == (0, width - 1)
