"""The gradient of one step against a small transformer written out by hand, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid.models.tiny import tiny_checkpoint
from hybrid.training.joint.module import JointBatch, JointModule
from hybrid.training.masks import block_ids
from hybrid.training.trainable import Trainable, load_trainable

HEADS, KV_HEADS, DIM, EPS, THETA = 4, 2, 4, 1e-6, 10_000.0
MASK, ALPHA, PROMPT, BLOCK = 31, 0.3, 3, 3


class _ExactRope(nn.Module):
    """The cosines and sines in float64, for any positions."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = _angles(position_ids)
        return cos, sin


def _angles(positions: Tensor) -> tuple[Tensor, Tensor]:
    frequencies = THETA ** -(torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    angles = positions[..., None].double() * frequencies
    return torch.cat([angles, angles], dim=-1).cos(), torch.cat([angles, angles], dim=-1).sin()


@pytest.fixture
def trainable(tmp_path: Path) -> Trainable:
    """Two layers in float64; transformers would round norms and angles to float32."""
    path = tiny_checkpoint(
        tmp_path, num_layers=2, hidden_size=HEADS * DIM, vocab_size=32, tokenizer=False
    )
    loaded = load_trainable(path, dtype=torch.float64)
    inner = loaded.model.model
    assert inner.config.rms_norm_eps == EPS
    for layer in inner.layers:
        layer.input_layernorm = _exact_norm(layer.input_layernorm)
        layer.post_attention_layernorm = _exact_norm(layer.post_attention_layernorm)
    inner.norm = _exact_norm(inner.norm)
    inner.rotary_emb = _ExactRope()
    return loaded


def _exact_norm(norm: nn.Module) -> nn.Module:
    exact = nn.RMSNorm(HEADS * DIM, eps=EPS, dtype=torch.float64)
    exact.load_state_dict(norm.state_dict())
    return exact


def _norm(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * gain


def _rotate(x: Tensor, positions: Tensor) -> Tensor:
    cos, sin = _angles(positions)
    half = DIM // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos[:, None] + turned * sin[:, None]


def _by_hand(
    w: Mapping[str, Tensor], ids: Tensor, positions: Tensor, num_bidirectional: int
) -> Tensor:
    """Logits [T, V] of a causal sequence whose last tokens see each other."""
    length = len(ids)
    x = w["model.embed_tokens.weight"][ids]
    for layer in ("model.layers.0", "model.layers.1"):
        h = _norm(x, w[f"{layer}.input_layernorm.weight"])
        q, k, v = (
            (h @ w[f"{layer}.self_attn.{n}_proj.weight"].T).view(length, -1, DIM) for n in "qkv"
        )
        q, k = _rotate(q, positions), _rotate(k, positions)
        rows = []
        for i in range(length):
            seen = length if i >= length - num_bidirectional else i + 1
            heads = []
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                scores = k[:seen, group] @ q[i, head] / DIM**0.5
                heads.append(torch.softmax(scores, dim=0) @ v[:seen, group])
            rows.append(torch.cat(heads))
        x = x + torch.stack(rows) @ w[f"{layer}.self_attn.o_proj.weight"].T
        h = _norm(x, w[f"{layer}.post_attention_layernorm.weight"])
        gate, up = (h @ w[f"{layer}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ w[f"{layer}.mlp.down_proj.weight"].T
    return _norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def _loss_by_hand(w: Mapping[str, Tensor], batch: JointBatch) -> tuple[Tensor, Tensor]:
    """Each block in a pass of its own: no noisy half, no mask of two halves."""
    tokens, index = batch.tokens, torch.arange(len(batch.tokens))
    causal = torch.log_softmax(_by_hand(w, tokens, index, 0), dim=-1)
    ar = -sum(causal[i - 1, tokens[i]] for i in range(batch.first, len(tokens)))
    diffusion = torch.zeros((), dtype=torch.float64)
    for masked, share in zip(batch.masked, batch.share, strict=True):
        for start in range(PROMPT, len(tokens), BLOCK):
            end = min(start + BLOCK, len(tokens))
            ids = tokens[:end].clone()
            ids[start:][masked[start:end]] = MASK
            filled = torch.log_softmax(_by_hand(w, ids, index[:end], end - start), dim=-1)
            for i in range(start, end):
                if masked[i]:
                    diffusion = diffusion - filled[i, tokens[i]] / share[i]
    return ar / batch.num_tokens, diffusion / len(batch.masked) / batch.num_tokens


@pytest.mark.parametrize("copies", [1, 2])
def test_loss_and_gradient_equal_those_by_hand(trainable: Trainable, copies: int) -> None:
    draw = torch.Generator().manual_seed(4)
    tokens = torch.randint(31, (11,), generator=draw)
    masked = torch.rand(copies, 11, generator=draw) < 0.6
    masked[:, :PROMPT] = False
    share = 0.2 + 0.8 * torch.rand(copies, 11, generator=draw, dtype=torch.float64)
    batch = JointBatch(tokens, block_ids(11, BLOCK, PROMPT), PROMPT, masked, share, 5.5)
    assert 3 < int(masked[0].sum()) < 8
    scalars = JointModule(trainable, MASK, ALPHA)(batch)
    scalars["loss"].backward()

    weights = {
        name: value.detach().clone().requires_grad_()
        for name, value in trainable.model.named_parameters()
    }
    # An averaged causal loss is that of any copy.
    ar, diffusion = _loss_by_hand(weights, batch)
    (ALPHA * diffusion + ar).backward()
    assert scalars["ar_loss"].item() == pytest.approx(ar.item(), rel=1e-12)
    assert scalars["diffusion_loss"].item() == pytest.approx(diffusion.item(), rel=1e-12)
    for name, value in trainable.model.named_parameters():
        expected = weights[name].grad
        assert expected is not None
        assert value.grad is not None
        assert (value.grad - expected).norm() <= 1e-9 * expected.norm(), name
