"""One step's loss and gradient of d3llm and d2f, against a float64 transformer written by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hybrid.models.tiny import tiny_checkpoint
from hybrid.training import masks
from hybrid.training.d2f.config import D2FConfig
from hybrid.training.d2f.recipe import D2FModule, NoisyBatch
from hybrid.training.d3llm.batches import student_batch
from hybrid.training.d3llm.config import D3LLMConfig
from hybrid.training.d3llm.recipe import D3LLMModule
from hybrid.training.trainable import LoraOptions, Trainable, load_trainable
from hybrid.training.trajectory import Trajectory

VOCAB, MASK, HEADS, GROUPS, SIZE = 20, 19, 2, 1, 8
RANK, ALPHA = 2, 6.0
PROMPT = [3, 1, 4]
TRAJECTORY = Trajectory((7, 2, 9, 11, 5, 6, 8, 1), (1, 4, 2, 3, 6, 8, 5, 7))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(
        tmp_path_factory.mktemp("two-layers"),
        vocab_size=VOCAB,
        hidden_size=HEADS * SIZE,
        num_layers=2,
        num_heads=HEADS,
        num_kv_heads=GROUPS,
        tokenizer=False,
    )


def hand_logits(w: dict[str, Tensor], ids: list[int], sees: Callable[[int, int], bool]) -> Tensor:
    """Llama in float64: logits [T, V] of one sequence, `sees(query, key)` being the mask."""
    length = len(ids)
    x = w["model.embed_tokens.weight"][ids]
    angles = torch.arange(length).double()[:, None] * 10000.0 ** (
        -torch.arange(0, SIZE, 2).double() / SIZE
    )
    cos, sin = (f(angles).repeat(1, 2) for f in (torch.cos, torch.sin))
    hidden = torch.tensor([[not sees(q, k) for k in range(length)] for q in range(length)])

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(dim=-1, keepdim=True) + 1e-6).sqrt() * w[f"model.{name}.weight"]

    def rotate(x: Tensor) -> Tensor:
        first, second = x[:, : SIZE // 2], x[:, SIZE // 2 :]
        return x * cos + torch.cat([-second, first], dim=1) * sin

    for layer in range(2):
        name = f"layers.{layer}"
        q, k, v = (
            norm(x, f"{name}.input_layernorm") @ w[f"model.{name}.self_attn.{p}_proj.weight"].T
            for p in "qkv"
        )
        heads = []
        for head in range(HEADS):
            own = slice(head * SIZE, (head + 1) * SIZE)
            group = head * GROUPS // HEADS
            shared = slice(group * SIZE, (group + 1) * SIZE)
            scores = rotate(q[:, own]) @ rotate(k[:, shared]).T / math.sqrt(SIZE)
            heads.append(scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ v[:, shared])
        x = x + torch.cat(heads, dim=1) @ w[f"model.{name}.self_attn.o_proj.weight"].T
        y = norm(x, f"{name}.post_attention_layernorm")
        gate, up, down = (w[f"model.{name}.mlp.{p}_proj.weight"] for p in ("gate", "up", "down"))
        x = x + (nn.functional.silu(y @ gate.T) * (y @ up.T)) @ down.T
    return norm(x, "norm") @ w["lm_head.weight"].T


def full(query: int, key: int) -> bool:
    return True


def block_causal(query: int, key: int) -> bool:
    """A prompt of 3 and blocks of 4."""
    blocks = [-1 if index < 3 else (index - 3) // 4 for index in (query, key)]
    return blocks[0] >= blocks[1]


def leaves(module: nn.Module) -> dict[str, Tensor]:
    """Float64 copies of the trained parameters."""
    return {
        name: p.detach().double().requires_grad_()
        for name, p in module.named_parameters()
        if p.requires_grad
    }


def assert_same_gradients(module: nn.Module, copies: dict[str, Tensor]) -> None:
    largest = max(float(copy.grad.abs().max()) for copy in copies.values() if copy.grad is not None)
    for name, parameter in module.named_parameters():
        if name in copies:
            assert parameter.grad is not None, name
            expected = copies[name].grad
            assert expected is not None
            assert expected.abs().max() > 0, name
            error = (parameter.grad.double() - expected).abs().max()
            assert error < 2e-5 * largest, name
        else:
            assert parameter.grad is None, name


def with_lora(trainable: Trainable) -> None:
    """Updates that do something: PEFT's B is zero at first, and then A has no gradient."""
    draw = torch.Generator().manual_seed(2)
    for name, parameter in trainable.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=draw)


def merged(trainable: Trainable, copies: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights by their names in the checkpoint: W + alpha / r B A."""
    weights = {}
    for name, parameter in trainable.named_parameters():
        plain = name.removeprefix("model.base_model.model.").replace(".base_layer", "")
        if "lora" not in name:
            weights[plain] = parameter.detach().double()
    for name in copies:
        if "lora_A" in name:
            plain = name.removeprefix("trainable.model.base_model.model.")
            plain = plain.replace(".lora_A.default", "")
            update = copies[name.replace("lora_A", "lora_B")] @ copies[name]
            weights[plain] = weights[plain] + ALPHA / RANK * update
    return weights


@pytest.mark.parametrize("logit_shift", [0, 1])
def test_d3llm_step(folder: Path, logit_shift: int) -> None:
    config = D3LLMConfig(
        data=folder,
        output=folder,
        response_length=8,
        block_size=4,
        window_sizes=(4,),
        logit_shift=logit_shift,
        entropy_weight=1.5,
        entropy_temperature=0.7,
    )
    module = D3LLMModule(load_trainable(folder), config)
    copies = leaves(module)
    weights = {name.removeprefix("trainable.model."): copy for name, copy in copies.items()}
    tokens = list(TRAJECTORY.tokens)
    rows = [[3, 1, 4, 7, MASK, 9, MASK, *[MASK] * 4], [3, 1, 4, MASK, 2, MASK, 11, *[MASK] * 4]]
    for token in range(MASK):  # until a visible token is predicted right: it must not count
        rows[0][3] = tokens[0] = token
        first = hand_logits(weights, rows[0], full).log_softmax(dim=-1)
        if int(first[3 - logit_shift].argmax()) == token:
            break
    else:
        pytest.fail("no token predicts itself")
    # One of the masked tokens is predicted right, so that the entropy term is there.
    tokens[1] = rows[1][4] = int(first[4 - logit_shift].argmax())
    second = hand_logits(weights, rows[1], full).log_softmax(dim=-1)
    trajectory = Trajectory(tuple(tokens), TRAJECTORY.steps)
    batch = student_batch(PROMPT, trajectory, range(4), 0.5, MASK)
    assert batch.input_ids.tolist() == rows

    masked = -(first[4 - logit_shift, tokens[1]] + first[6 - logit_shift, 11]) / 2
    complement = -(second[3 - logit_shift, tokens[0]] + second[5 - logit_shift, 9]) / 2
    tempered = (first / 0.7).log_softmax(dim=-1)
    right = [i for i in (4, 6) if int(first[i - logit_shift].argmax()) == [3, 1, 4, *tokens][i]]
    assert 4 in right
    entropy = -sum(
        (tempered[i - logit_shift].exp() * tempered[i - logit_shift]).sum() for i in right
    )
    loss = (masked + complement + 1.5 * entropy / len(right)) / 4
    loss.backward()

    found = module(batch)
    found["loss"].backward()
    entropy = entropy / len(right)
    parts = {"loss": loss, "masked": masked, "complement": complement, "entropy": entropy}
    for name, value in parts.items():
        assert found[name].item() == pytest.approx(value.item(), rel=1e-5)
    assert_same_gradients(module, copies)


@pytest.mark.parametrize("logit_shift", [0, 1])
def test_d2f_step(folder: Path, logit_shift: int) -> None:
    config = D2FConfig(data=folder, output=folder, block_size=4, logit_shift=logit_shift)
    trainable = load_trainable(folder, lora=LoraOptions(RANK, ALPHA))
    with_lora(trainable)
    module = D2FModule(trainable, config)
    copies = leaves(module)
    ids = [3, 1, 4, 7, MASK, 9, 11, MASK, 6, MASK, MASK]
    hidden, ratio = [4, 7, 9, 10], [0.0] * 3 + [0.3] * 4 + [0.6] * 4
    batch = NoisyBatch(
        torch.tensor([ids]),
        torch.tensor([index in hidden for index in range(11)]),
        torch.tensor(ratio),
        masks.block_ids(11, 4, 3),
    )
    teacher = hand_logits(merged(trainable, {}), ids, full).softmax(dim=-1)
    student = hand_logits(merged(trainable, copies), ids, block_causal).log_softmax(dim=-1)
    rows = [(index - logit_shift, ratio[index]) for index in hidden]
    loss = -sum((teacher[row] * student[row]).sum() / share for row, share in rows) / len(rows)
    loss.backward()

    found = module(batch)["loss"]
    found.backward()
    assert found.item() == pytest.approx(loss.item(), rel=1e-5)
    assert_same_gradients(module, copies)
