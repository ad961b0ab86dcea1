"""The trained draft pass is the engine's draft pass, and its gradient is right."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FAMILIES, make_engine, random_adapter, tiny_backbone
from torch import Tensor

from hybrid.decode.loop import prefill
from hybrid.drafters.self_diffusion import SelfDiffusionDrafter
from hybrid.errors import ConfigError
from hybrid.models.adapter import DiffusionAdapter
from hybrid.models.checkpoint import open_checkpoint
from hybrid.models.draft_config import DraftConfig, base_shape
from hybrid.models.families import spec_from_config
from hybrid.models.tiny import tiny_checkpoint
from hybrid.models.transformer import NativeBackbone
from hybrid.params import SamplingParams
from hybrid.protocols import DraftState
from hybrid.training.data import Example
from hybrid.training.self_diffusion.context import target_context
from hybrid.training.self_diffusion.draft_model import DraftModel, SamplerParameters
from hybrid.training.self_diffusion.loss import DraftBatch, DraftLoss
from hybrid.types import Mode, Plan

YARN = (("rope_type", "yarn"), ("factor", 4.0), ("rope_theta", 1e4))
BACKBONES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in FAMILIES},
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "llama-yarn": ("llama", {"rope": YARN}),
}


def draft_model(backbone: NativeBackbone, num_draft_tokens: int = 4, seed: int = 0) -> DraftModel:
    """Return a model none of whose parameters is zero."""
    config = DraftConfig(num_draft_tokens, 1, (0, 1), 3, 6.0, base_shape(backbone))
    model = DraftModel(backbone, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.2 * torch.randn(value.shape, generator=generator))
    return model


def sequence(length: int = 24, vocab_size: int = 64) -> Example:
    ids = torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(3)).tolist()
    return Example(tuple(ids[:4]), tuple(ids[4:]))


def engine_log_probs(model: DraftModel, tokens: list[int], anchor: int) -> Tensor:
    """Draft behind `anchor` with the engine. Returns log-probabilities [K, V]."""
    adapter = DiffusionAdapter(model.backbone, model.config, model.adapter_tensors())
    return engine_draft(adapter, tokens, anchor)[1].log()


def engine_draft(
    adapter: DiffusionAdapter, tokens: list[int], anchor: int
) -> tuple[list[int], Tensor]:
    """Return the tokens [K] that the engine draws behind `anchor`, and their laws [K, V]."""
    drafter = SelfDiffusionDrafter(adapter.backbone, adapter)
    params = SamplingParams(temperature=1, max_new_tokens=20, seed=1)
    engine, (row,) = make_engine(adapter.backbone, drafter, [tokens[:anchor]], params)
    _, hidden = prefill(engine, row)[:2]
    row.tokens[-1] = tokens[anchor]  # the anchor that we want, whatever the target chose
    plan = Plan(Mode.SPECULATIVE, adapter.config.num_draft_tokens)
    proposal = drafter.draft(DraftState([row], engine.cache, hidden), plan)
    assert proposal.draft_probs is not None
    return proposal.tokens[0].tolist(), proposal.draft_probs[0]


@pytest.mark.parametrize("num_draft_tokens", [1, 4, 9], ids="K{}".format)
@pytest.mark.parametrize("name", BACKBONES)
def test_is_the_engines_draft_pass(name: str, num_draft_tokens: int) -> None:
    family, fields = BACKBONES[name]
    backbone = tiny_backbone(family, **fields)
    model = draft_model(backbone, num_draft_tokens)
    example = sequence()
    anchors = torch.tensor([4, 5, 13, 22])  # K = 9 slots reach beyond mistral's window of 6
    with torch.no_grad():
        context = target_context(backbone, model.config, example)
        logits = model(context, anchors, model.head, num_draft_tokens)
    assert logits.shape == (4, num_draft_tokens, 64)
    ours = torch.log_softmax(logits, dim=-1)
    for index, anchor in enumerate(anchors.tolist()):
        expected = engine_log_probs(model, example.tokens, anchor)
        torch.testing.assert_close(ours[index], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [None, 48], ids=["all", "V48"])
def test_the_sampler_head_knows_what_the_engine_chose(size: int | None) -> None:
    backbone = tiny_backbone()
    config = DraftConfig(
        4, 1, (0, 1), 3, 6.0, base_shape(backbone), sampler_size=5, draft_vocab_size=size
    )
    model = DraftModel(backbone, config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.2 * torch.randn(value.shape, generator=generator))
    vocabulary = torch.randperm(64, generator=generator)[: size or 64].sort().values
    tensors = model.adapter_tensors() | ({} if size is None else {"vocabulary": vocabulary.int()})
    anchor, tokens = 9, sequence().tokens
    adapter = DiffusionAdapter(backbone, config, tensors)
    chosen, law = engine_draft(adapter, tokens, anchor)
    assert set(chosen) <= set(vocabulary.tolist())
    ours = true_law(model, [*tokens[: anchor + 1], *chosen, 0], anchor, vocabulary)
    torch.testing.assert_close(ours, law[:, vocabulary], rtol=0, atol=1e-4)
    other = [(chosen[0] + 1) % 64, *chosen[1:]]
    changed = true_law(model, [*tokens[: anchor + 1], *other, 0], anchor, vocabulary)
    assert [bool(torch.allclose(a, b)) for a, b in zip(ours, changed, strict=True)] == [
        True,  # slot 1 does not see itself, slots 2 and 3 see it, slot 4 sees slots 2 and 3
        False,
        False,
        True,
    ]


def test_the_sampler_head_is_its_formula_and_so_is_its_gradient() -> None:
    draw = torch.Generator().manual_seed(0)
    head = SamplerParameters(6, 4).double()
    sizes = {"h": (5, 6), "before": (5, 2, 6), "gate_up": (8, 18), "down": (6, 4)}
    values = {
        name: torch.randn(size, generator=draw, dtype=torch.float64, requires_grad=True)
        for name, size in sizes.items()
    }

    def run(h: Tensor, before: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        weights = {"gate_up": gate_up, "down": down}
        return torch.func.functional_call(head, weights, (h, before))

    h, before, gate_up, down = values.values()
    parts = [x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() for x in (h, *before.unbind(1))]
    gate, up = (torch.cat(parts, dim=1) @ gate_up.T).split(4, dim=1)
    expected = h + (gate / (1 + (-gate).exp()) * up) @ down.T
    torch.testing.assert_close(run(**values), expected, rtol=1e-10, atol=1e-10)
    assert torch.autograd.gradcheck(run, tuple(values.values()))
    start = SamplerParameters(6, 4).double()
    assert torch.equal(start(h, before), h), "it starts as nothing"


def true_law(model: DraftModel, tokens: list[int], anchor: int, vocabulary: Tensor) -> Tensor:
    """Return the trained model's law [4, V'] behind `anchor`, told the tokens that follow it."""
    context = target_context(model.backbone, model.config, Example((tokens[0],), tuple(tokens[1:])))
    with torch.no_grad():
        return model(context, torch.tensor([anchor]), model.head[vocabulary], 4)[0].softmax(dim=-1)


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_an_anchor_does_not_see_the_other_anchors(name: str) -> None:
    backbone = tiny_backbone(name)
    model, example = draft_model(backbone), sequence()
    context = target_context(backbone, model.config, example)
    with torch.no_grad():
        together = model(context, torch.tensor([4, 6, 11]), model.head, 4)
        alone = [model(context, torch.tensor([a]), model.head, 4) for a in (4, 6, 11)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-5)


def test_an_anchor_does_not_see_the_future() -> None:
    backbone = tiny_backbone()
    model, example = draft_model(backbone), sequence()
    changed = Example(example.prompt, (*example.response[:8], *reversed(example.response[8:])))
    anchors = torch.tensor([5, 11])
    with torch.no_grad():
        outs = [
            model(target_context(backbone, model.config, e), anchors, model.head, 4)
            for e in (example, changed)
        ]
    torch.testing.assert_close(*outs, rtol=0, atol=1e-5)


def test_the_random_parameters_change_nothing_at_the_start() -> None:
    """P and the B of each update start at zero, so training starts at the base model's states."""
    backbone = tiny_backbone()
    config = DraftConfig(2, 1, (0,), 3, 6.0, base_shape(backbone))
    torch.manual_seed(0)
    model, other = DraftModel(backbone, config), DraftModel(backbone, config)
    assert not torch.equal(model.mask, other.mask)
    context = target_context(backbone, config, sequence())
    with torch.no_grad():
        ours, theirs = (m(context, torch.tensor([5]), m.head, 2) for m in (model, other))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"entry_layer": 3}, "entry_layer: got 3, expected 0 to 2"),
        ({"feature_layers": (0, 3)}, "feature_layers: got .* below 3"),
    ],
)
def test_refuses_layers_outside_the_model(change: dict[str, Any], match: str) -> None:
    backbone = tiny_backbone()
    fields = {"entry_layer": 1, "feature_layers": (0,), **change}
    with pytest.raises(ConfigError, match=match):
        DraftModel(backbone, DraftConfig(2, rank=2, lora_alpha=2, base={}, **fields))


def test_refuses_weights_that_are_not_dense() -> None:
    base = tiny_backbone()
    packed: NativeBackbone = object.__new__(NativeBackbone)
    packed.__dict__.update(base.__dict__)
    packed.layers = random_adapter(base).layers  # wrapped: any layer that is not dense will do
    with pytest.raises(ConfigError, match="packed 4-bit weights, expected dense ones"):
        DraftModel(packed, DraftConfig(2, 1, (0,), 2, 2.0, {}))


# The gradient against an independent float64 twin: two loops of attention, merged low-rank updates.


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _turn(x: Tensor, position: int) -> Tensor:
    """Rotate one head [D]: pairs (i, i + D/2) turn by position / 10000^(2 i / D)."""
    half = len(x) // 2
    out = list(x)
    for i in range(half):
        angle = position * 10000 ** (-2 * i / len(x))
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = x[i] * cos - x[half + i] * sin
        out[half + i] = x[half + i] * cos + x[i] * sin
    return torch.stack(out)


class Twin:
    """The draft pass of one anchor, float64: formulas as written down, loops everywhere."""

    heads, groups, eps = 4, 2, 1e-6

    def __init__(self, weights: dict[str, Tensor], adapter: dict[str, Tensor], scale: float):
        self.w, self.a, self.scale = weights, adapter, scale

    def _matrix(self, index: int, name: str, draft: bool) -> Tensor:
        block = "self_attn" if name[0] in "qkvo" else "mlp"
        weight = self.w[f"model.layers.{index}.{block}.{name}_proj.weight"]
        if not draft:
            return weight
        prefix = f"base_model.model.model.layers.{index}.{block}.{name}_proj"
        a, b = self.a[f"{prefix}.lora_A.weight"], self.a[f"{prefix}.lora_B.weight"]
        return weight + self.scale * (b @ a)

    def layer(
        self, index: int, x: Tensor, start: int, past: list[tuple[Tensor, Tensor]], draft: bool
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """x [T, C] at positions start ...; `past` holds (keys, values) [G, D] per earlier token."""
        norm = f"layers.{index}.{{}}_norm"
        gains = (
            (self.a[norm.format("input")], self.a[norm.format("post")])
            if draft
            else (
                self.w[f"model.layers.{index}.input_layernorm.weight"],
                self.w[f"model.layers.{index}.post_attention_layernorm.weight"],
            )
        )
        h = _rms(x, gains[0], self.eps)
        q, k, v = (h @ self._matrix(index, n, draft).T for n in "qkv")
        q, k, v = (
            t.view(len(x), n, -1) for t, n in ((q, self.heads), (k, self.groups), (v, self.groups))
        )
        new = [
            (torch.stack([_turn(head, start + t) for head in k[t]]), v[t]) for t in range(len(x))
        ]
        rows = []
        for t in range(len(x)):
            seen = past + (new if draft else new[: t + 1])
            out = []
            for head in range(self.heads):
                group = head * self.groups // self.heads
                query = _turn(q[t, head], start + t)
                scores = torch.stack([query @ key[group] for key, _ in seen])
                share = torch.softmax(scores / math.sqrt(len(query)), dim=0)
                out.append(sum(s * value[group] for s, (_, value) in zip(share, seen, strict=True)))
            rows.append(torch.cat(out))
        x = x + torch.stack(rows) @ self._matrix(index, "o", draft).T
        h = _rms(x, gains[1], self.eps)
        gate = h @ self._matrix(index, "gate", draft).T
        inner = gate * torch.sigmoid(gate) * (h @ self._matrix(index, "up", draft).T)
        return x + inner @ self._matrix(index, "down", draft).T, new

    def loss(
        self, tokens: list[int], anchor: int, count: int, decay: float
    ) -> tuple[Tensor, float]:
        """Return (sum of weighted losses, sum of weights) of one anchor."""
        embedding, one = self.w["model.embed_tokens.weight"], torch.ones(())
        clean, _ = self.layer(0, embedding[tokens[:anchor]], 0, [], draft=False)
        after, cached = self.layer(1, clean, 0, [], draft=False)
        features = torch.cat([_rms(h[-1], one, 1e-6) for h in (clean, after)])
        base = clean[-1] + self.a["features"] @ features
        emb = embedding[tokens[anchor]]
        slots = []
        for j in range(count + 1):
            s = self.a["slots"][j]
            own = (emb if j == 0 else self.a["mask"]) + s
            slots.append(base + s + self.a["project"] @ torch.cat([_rms(emb, one, 1e-6), own]))
        x, _ = self.layer(1, torch.stack(slots), anchor, cached, draft=True)
        logits = _rms(x, self.a["norm.weight"], self.eps) @ self.w["lm_head.weight"].T
        total, weights = torch.zeros(()), 0.0
        for j in range(1, count + 1):
            if anchor + j < len(tokens):
                weight = math.exp(-(j - 1) / decay)
                total = total - weight * torch.log_softmax(logits[j], dim=0)[tokens[anchor + j]]
                weights += weight
        return total, weights


def test_gradient_is_that_of_a_float64_twin(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, vocab_size=16, hidden_size=16, num_layers=2, tokenizer=False)
    checkpoint = open_checkpoint(path)
    backbone = NativeBackbone(spec_from_config(checkpoint.config), checkpoint.tensors)
    model = draft_model(backbone, num_draft_tokens=3)
    example = sequence(11, vocab_size=16)
    anchors = torch.tensor([4, 6, 9])  # the last one has one slot only
    batch = DraftBatch(target_context(backbone, model.config, example), anchors, 3)
    loss = DraftLoss(model, torch.arange(16), decay=2.0)(batch)["loss"]
    loss.backward()
    names = {value.data_ptr(): name for name, value in model.adapter_tensors().items()}
    ours = {names[value.data_ptr()]: value.grad for value in model.parameters()}

    leaves = {n: t.double().requires_grad_() for n, t in model.adapter_tensors().items()}
    weights = {name: checkpoint.tensors[name].double() for name in checkpoint.tensors}
    twin = Twin(weights, leaves, scale=2.0)
    twin.eps = checkpoint.config["rms_norm_eps"]
    parts = [twin.loss(example.tokens, a, 3, decay=2.0) for a in anchors.tolist()]
    expected = sum(part for part, _ in parts) / sum(weight for _, weight in parts)
    expected.backward()

    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert ours.keys() == leaves.keys()
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert leaf.grad.abs().max() > 0, name
        error = (ours[name] - leaf.grad).abs().max() / leaf.grad.abs().max()
        assert error < 1e-4, name
