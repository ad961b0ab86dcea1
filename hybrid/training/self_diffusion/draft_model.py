"""`DraftModel`: the draft pass as a differentiable module, many anchors over one clean context.

It computes what drafters/self_diffusion.py computes with the engine's layers, and is tested
against it. Next: hybrid/training/self_diffusion/recipe.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid.errors import ConfigError
from hybrid.models.draft_config import (
    ATTENTION,
    MLP,
    DraftConfig,
    lora_prefix,
    projection_shapes,
)
from hybrid.models.draft_head import SamplerHead
from hybrid.models.draft_input import MASKED, LateInput, TokenInput
from hybrid.models.linear import DenseLinear, Linear
from hybrid.models.transformer import NativeBackbone
from hybrid.models.weights import Layer
from hybrid.training.self_diffusion.context import TargetContext

Masks = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class _Pass:
    """What the layers of one draft pass share.

    Attributes:
        rotation: cosines and sines [N T, 1, D].
        masks: for each sliding window, see `DraftModel._masks`.
        gate: [N T, 1], 0 where a row runs the base weights; None when all rows are updated.
    """

    rotation: tuple[Tensor, Tensor]
    masks: dict[int | None, Masks]
    gate: Tensor | None


class LoraPair(nn.Module):
    """A and B of one projection; B starts at zero, so training starts at the base model."""

    def __init__(self, in_features: int, out_features: int, rank: int) -> None:
        """Create [r, I] and [O, r]."""
        super().__init__()
        self.a = nn.Parameter(torch.empty(rank, in_features))
        self.b = nn.Parameter(torch.zeros(out_features, rank))
        nn.init.kaiming_uniform_(self.a, a=5**0.5)


class DraftLayer(nn.Module):
    """Trainable part of one layer: low-rank updates, and two norms if it has its own."""

    def __init__(self, backbone: NativeBackbone, layer: Layer, config: DraftConfig) -> None:
        """Start as the base layer."""
        super().__init__()
        self.lora = nn.ModuleDict(
            {
                name: LoraPair(*shape, config.rank)
                for name, shape in projection_shapes(backbone.spec).items()
                if name in config.targets
            }
        )
        self.input_norm, self.post_norm = layer.input_norm, layer.post_norm
        if config.train_norms:
            self.input_norm = nn.Parameter(layer.input_norm.float().clone())
            self.post_norm = nn.Parameter(layer.post_norm.float().clone())


class SamplerParameters(nn.Module):
    """The weights of a `SamplerHead`, which is the formula; it starts as nothing at all."""

    def __init__(self, width: int, size: int) -> None:
        """Create [2 I, 3 C] and [C, I]."""
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2 * size, 3 * width))
        self.down = nn.Parameter(torch.zeros(width, size))
        nn.init.kaiming_uniform_(self.gate_up, a=5**0.5)

    def forward(self, h: Tensor, before: Tensor) -> Tensor:
        """Return [N, C] for states [N, C] and embeddings [N, 2, C], the nearer token first."""
        gate_up, down = (DenseLinear(p.to(h.dtype)) for p in (self.gate_up, self.down))
        return SamplerHead(gate_up, down)(h, before)


class DraftModel(nn.Module):
    """Adapter parameters around a frozen backbone with dense weights."""

    def __init__(self, backbone: NativeBackbone, config: DraftConfig) -> None:
        """Create the parameters; torch's global seed decides their values.

        Raises:
            ConfigError: options that do not fit the model or each other, or packed weights.
        """
        super().__init__()
        _check(backbone, config)
        self.backbone, self.config = backbone, config
        width = backbone.hidden_size
        assert isinstance(backbone.head, DenseLinear)
        self.head = backbone.head.weight  # [V, C], frozen
        self.layers = nn.ModuleList(
            DraftLayer(backbone, layer, config) for layer in backbone.layers[config.entry_layer :]
        )
        self.norm = backbone.norm
        if config.train_norms:
            self.norm = nn.Parameter(backbone.norm.float().clone())
        if config.entry_layer > 0:
            self.slots = nn.Parameter(torch.zeros(config.num_draft_tokens + 1, width))
            self.mask = nn.Parameter(torch.randn(width) * backbone.embedding.float().std())
            self.project = nn.Parameter(torch.zeros(width, 2 * width))
            self.features = nn.Parameter(torch.zeros(width, len(config.feature_layers) * width))
        size = config.sampler_size
        self.sampler = SamplerParameters(width, size) if size else None

    def forward(
        self,
        context: TargetContext,
        anchors: Tensor,
        head: Tensor,
        num_draft_tokens: int,
        shown: Tensor | None = None,
    ) -> Tensor:
        """Draft behind each anchor; a sampler head is told the true tokens before each slot.

        A draft that is wrong in one slot is worthless in the next, so the truth is what a slot
        sees wherever it counts.

        Args:
            context: the sequence.
            anchors: [N] positions; each needs a predecessor.
            head: [V', C] rows of the output head to score.
            num_draft_tokens: K', at most the configuration's K.
            shown: [N, T - 1] ids of the rows behind the anchor's, or `MASKED`; None masks all.

        Returns:
            [N, K', V'] logits of the drafted tokens.
        """
        config, count = self.config, self.config.num_rows(num_draft_tokens)  # T
        if shown is None:
            shown = anchors.new_full((len(anchors), count - 1), MASKED)
        rows = torch.cat([context.tokens[anchors][:, None], shown], dim=1)
        x = self._input(context, anchors, rows).flatten(0, 1)  # [N T, C]
        positions = anchors[:, None] + torch.arange(count, device=anchors.device)
        bases = self.backbone.layers[config.entry_layer :]
        masks = {w: self._masks(context, positions, w) for w in {base.window for base in bases}}
        gate = None
        if config.corruption == "uniform":
            gate = (positions > anchors[:, None]).to(x.dtype).view(-1, 1)
        shared = _Pass(self._rotation(positions), masks, gate)
        for layer, base, key_value in zip(self.layers, bases, context.key_value, strict=True):
            assert isinstance(layer, DraftLayer)
            x = self._layer(layer, base, x, key_value, shared)
        x = x.view(len(anchors), count, -1)[:, 1 - config.logit_shift :].flatten(0, 1)  # [N K', C]
        if self.sampler is not None:
            before = torch.stack([positions[:, :-1], positions[:, :-1] - 1], dim=-1).flatten(0, 1)
            tokens = context.tokens[before.clamp(max=len(context.tokens) - 1)]
            x = self.sampler(x, F.embedding(tokens, self.backbone.embedding))
        logits = F.linear(self._rms_norm(x, self.norm), head)
        return logits.view(len(anchors), num_draft_tokens, -1)

    def _input(self, context: TargetContext, anchors: Tensor, rows: Tensor) -> Tensor:
        """Return [N, T, C] for rows [N, T]; see `hybrid.models.draft_input`."""
        config, backbone = self.config, self.backbone
        hidden = {layer: context.hidden[layer][anchors - 1] for layer in config.taps}
        if config.entry_layer == 0:
            return TokenInput(backbone.embedding, config.mask_token_id)(rows, hidden)
        enter = LateInput(
            backbone.embedding,
            config.entry_layer - 1,
            config.feature_layers,
            slots=self.slots.to(backbone.dtype),
            mask=self.mask.to(backbone.dtype),
            project=DenseLinear(self.project.to(backbone.dtype)),
            features=DenseLinear(self.features.to(backbone.dtype)),
        )
        return enter(rows, hidden)

    def _layer(
        self, layer: DraftLayer, base: Layer, x: Tensor, key_value: Tensor, shared: _Pass
    ) -> Tensor:
        h = self._rms_norm(x, layer.input_norm)
        qkv = self._project(layer, base.qkv, ATTENTION[:3], h, shared.gate)
        attended = self._attend(base, qkv, key_value, shared)
        x = x + self._project(layer, base.o, ATTENTION[3:], attended, shared.gate)
        h = self._rms_norm(x, layer.post_norm)
        gate_up = self._project(layer, base.gate_up, MLP[:2], h, shared.gate)
        gate, up = gate_up.chunk(2, dim=-1)
        return x + self._project(layer, base.down, MLP[2:], F.silu(gate) * up, shared.gate)

    def _project(
        self,
        layer: DraftLayer,
        base: Linear,
        names: tuple[str, ...],
        x: Tensor,
        gate: Tensor | None,
    ) -> Tensor:
        assert isinstance(base, DenseLinear)
        y = F.linear(x, base.weight, base.bias)
        if not any(name in layer.lora for name in names):
            return y
        scale = self.config.lora_alpha / self.config.rank
        shapes = projection_shapes(self.backbone.spec)
        updates = []
        for name in names:
            if name not in layer.lora:
                updates.append(x.new_zeros(len(x), shapes[name][1]))
                continue
            pair = layer.lora[name]
            assert isinstance(pair, LoraPair)
            down = F.linear(x, pair.a.to(x.dtype))
            updates.append(F.linear(down, (pair.b * scale).to(x.dtype)))
        update = torch.cat(updates, dim=-1)
        return y + (update if gate is None else update * gate)

    def _attend(
        self,
        base: Layer,
        qkv: Tensor,
        key_value: Tensor,
        shared: _Pass,
    ) -> Tensor:
        s = self.backbone.spec
        qkv = qkv.view(len(qkv), -1, s.head_dim)
        sizes = [s.num_heads, s.num_kv_heads, s.num_kv_heads]
        q, k, v = torch.split(qkv, sizes, dim=1)
        if base.q_norm is not None and base.k_norm is not None:
            q, k = self._rms_norm(q, base.q_norm), self._rms_norm(k, base.k_norm)
        q, k = _rotate(q, shared.rotation), _rotate(k, shared.rotation)
        return _two_part_attention(q, k, v, key_value, shared.masks[base.window])

    def _masks(self, context: TargetContext, positions: Tensor, window: int | None) -> Masks:
        """Return what the rows see: the context before their anchor, and rows of their own pass.

        A sliding window hides keys that are too far back, from each row others.

        Returns:
            [N, 1 or T H/G, S] for the context; [T H/G, T] for the pass, None for all.
        """
        dtype, anchors = self.backbone.dtype, positions[:, :1]
        is_causal = self.config.corruption == "uniform"
        keys = torch.arange(len(context.tokens), device=positions.device)
        visible = (keys < anchors)[:, None]
        if window is None and not is_causal:
            return _additive(visible, dtype), None
        per_group = self.backbone.spec.num_heads // self.backbone.spec.num_kv_heads
        rows = torch.arange(positions.shape[1], device=positions.device)
        own = rows <= (rows[:, None] if is_causal else rows[-1:, None])
        if window is not None:
            visible = visible & (keys > positions[..., None] - window)
            visible = visible.repeat_interleave(per_group, dim=1)
            own = own & (rows > rows[:, None] - window)
        own = own.expand(len(rows), -1).repeat_interleave(per_group, dim=0)
        return _additive(visible, dtype), _additive(own, dtype)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.backbone.rope(positions, positions + 1)
        cos, sin = cos.to(self.backbone.dtype), sin.to(self.backbone.dtype)
        halves = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        return halves[0].flatten(0, 1)[:, None], halves[1].flatten(0, 1)[:, None]

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), self.backbone.spec.norm_eps)

    def adapter_tensors(self) -> dict[str, Tensor]:
        """Return the tensors under their names on disk, float32."""
        tensors = {}
        if self.config.train_norms:
            tensors["norm.weight"] = self.norm
        if self.config.entry_layer > 0:
            for name in ("slots", "mask", "project", "features"):
                tensors[name] = getattr(self, name)
        if self.sampler is not None:
            tensors |= {f"sampler.{n}": p for n, p in self.sampler.named_parameters()}
        for offset, layer in enumerate(self.layers):
            index = self.config.entry_layer + offset
            assert isinstance(layer, DraftLayer)
            if self.config.train_norms:
                tensors[f"layers.{index}.input_norm"] = layer.input_norm
                tensors[f"layers.{index}.post_norm"] = layer.post_norm
            for name, pair in layer.lora.items():
                assert isinstance(pair, LoraPair)
                tensors[f"{lora_prefix(index, name)}.lora_A.weight"] = pair.a
                tensors[f"{lora_prefix(index, name)}.lora_B.weight"] = pair.b
        return {name: value.detach() for name, value in tensors.items()}

    def load_adapter_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the parameters to tensors named as `adapter_tensors` names them, of its shapes."""
        for name, parameter in self.adapter_tensors().items():
            parameter.copy_(tensors[name])


def _check(backbone: NativeBackbone, config: DraftConfig) -> None:
    if problem := config.problem(backbone.spec):
        raise ConfigError(problem)
    entered = backbone.layers[config.entry_layer :]
    linears = [x for layer in entered for x in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    if not all(isinstance(x, DenseLinear) for x in [*linears, backbone.head]):
        raise ConfigError(
            "model: got packed 4-bit weights, expected dense ones. Train on the same model in "
            "bfloat16; the adapter fits both."
        )


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, float("-inf"))


def _two_part_attention(q: Tensor, k: Tensor, v: Tensor, key_value: Tensor, masks: Masks) -> Tensor:
    """Attend to the shared context and to the slots of one's own anchor, in one softmax.

    A dense mask over all anchors' slots would cost N times the second part.

    Args:
        q: [N (K+1), H, D].
        k: [N (K+1), G, D].
        v: [N (K+1), G, D].
        key_value: [2, G, S, D] of the context.
        masks: see `DraftModel._masks`.

    Returns:
        [N (K+1), H D].
    """
    mask, own_mask = masks
    num_anchors, _, length = mask.shape
    num_groups, head_dim = k.shape[1:]
    per_group, count = q.shape[1] // num_groups, len(q) // num_anchors
    # [G, N, (K+1) H/G, D]: the queries of one anchor and one kv head are the rows of a matrix.
    q = q.view(num_anchors, count, num_groups, per_group, head_dim).permute(2, 0, 1, 3, 4)
    q = q.reshape(num_groups, num_anchors, count * per_group, head_dim) * head_dim**-0.5
    own_k, own_v = (
        t.view(num_anchors, count, num_groups, head_dim).permute(2, 0, 1, 3) for t in (k, v)
    )
    flat = q.flatten(1, 2)
    scores = (flat @ key_value[0].transpose(1, 2)).view(*q.shape[:3], length) + mask
    own = q @ own_k.transpose(2, 3)  # [G, N, (K+1) H/G, K+1]
    if own_mask is not None:
        own = own + own_mask
    weights = torch.softmax(torch.cat([scores, own], dim=-1), dim=-1, dtype=torch.float32)
    weights = weights.to(q.dtype)
    out = (weights[..., :length].flatten(1, 2) @ key_value[1]).view_as(q)
    out = out + weights[..., length:] @ own_v
    out = out.view(num_groups, num_anchors, count, per_group, head_dim).permute(1, 2, 0, 3, 4)
    return out.reshape(num_anchors * count, -1)
