"""`DFlashModel`: a small network that drafts a block from the target's own features.

DFlash (arXiv:2602.06036): Qwen3-like layers whose keys and values are those of projected target
features, one per token in the target's cache, followed by those of the block itself: the anchor and
mask tokens, which all see each other. Embedding and head are the target's. The draft of a block is
one pass. Where the keys lie is the caller's business. Next: drafters/dflash.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid.errors import CheckpointError, ConfigError
from hybrid.models.hf import HFBackbone
from hybrid.models.rope import Rope
from hybrid.models.spec import ModelSpec, RopeSpec
from hybrid.models.transformer import NativeBackbone
from hybrid.protocols import Backbone

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, query [T, H, D], key [T, G, D], value [T, G, D]) -> [T, H D]."""


@dataclass(frozen=True, slots=True)
class DFlashSpec:
    """Shape of a draft network and of the target that it belongs to.

    Attributes:
        block_size: the anchor and the masks behind it; it drafts block_size - 1 tokens.
        mask_token_id: id in the target's embedding that stands for a masked position.
        target_layer_ids: layers of the target whose outputs are the features, in this order.
        vocab_size: V of the target; None where the checkpoint does not say.
        windows: per draft layer, how many positions a token sees backwards (itself included), or
            None.
        num_target_layers: L of the target; None where the checkpoint does not say.
        bias: biases on q, k, v and o.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    vocab_size: int | None
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_seq_len: int
    rope: RopeSpec
    windows: tuple[int | None, ...]
    num_target_layers: int | None = None
    bias: bool = False

    def __post_init__(self) -> None:
        """Check what the config of a checkpoint or of a training run may get wrong.

        Raises:
            ConfigError: a block without masks, or features of layers that cannot serve.
        """
        if self.block_size < 2:
            raise ConfigError(f"block_size: got {self.block_size}, expected at least 2.")
        vocab_size = self.mask_token_id + 1 if self.vocab_size is None else self.vocab_size
        if not 0 <= self.mask_token_id < vocab_size:
            raise ConfigError(
                f"mask_token_id: got {self.mask_token_id}, expected an id of the target's "
                f"embedding, 0 to {vocab_size - 1}."
            )
        if self.num_target_layers is not None:
            self._check_layers(self.num_target_layers)

    def _check_layers(self, num_layers: int) -> None:
        """Refuse features of the last layer: engines disagree whether they are normed or not."""
        ids = self.target_layer_ids
        if not ids or not all(0 <= i < num_layers - 1 for i in ids):
            raise ConfigError(
                f"target_layer_ids: got {list(ids)}, expected layers from 0 to {num_layers - 2}: "
                f"not the last one of the target's {num_layers}."
            )

    def check_target(self, backbone: Backbone | ModelSpec) -> None:
        """Check that this network drafts for `backbone`, or for a model that is so described.

        Raises:
            CheckpointError: it was made for a target of another shape.
            ConfigError: its features are layers that cannot serve.
        """
        own = (self.hidden_size, self.num_target_layers or backbone.num_layers)
        if own != (backbone.hidden_size, backbone.num_layers):
            raise CheckpointError(
                f"The DFlash drafter is made for a target of hidden size {own[0]} and {own[1]} "
                f"layers, got one of {backbone.hidden_size} and {backbone.num_layers}. "
                "Give the drafter that belongs to this target."
            )
        self._check_layers(backbone.num_layers)
        if self.mask_token_id >= backbone.vocab_size:
            raise CheckpointError(
                f"The DFlash drafter's mask id {self.mask_token_id} is not in the target's "
                f"vocabulary of {backbone.vocab_size}."
            )


def spread_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Return up to `count` feature layers, evenly from 1 to n - 3 as the public drafters have them.

    Raises:
        ConfigError: a target of one layer, whose only layer is its last.
    """
    if num_target_layers < 2:
        raise ConfigError(
            f"target_layer_ids: got a target of {num_target_layers} layers, expected at least 2."
        )
    first = min(1, num_target_layers - 2)
    last = max(first, num_target_layers - 3)
    if count == 1:
        return (min(num_target_layers // 2, num_target_layers - 2),)
    return tuple(sorted({round(first + i * (last - first) / (count - 1)) for i in range(count)}))


class RMSNorm(nn.RMSNorm):
    """RMSNorm in the dtype of its input: under autocast the weight is float32, the input not."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class DFlashAttention(nn.Module):
    """Projections of one layer; block and context go through the same k and v."""

    def __init__(self, spec: DFlashSpec) -> None:
        """Create the weights."""
        super().__init__()
        width, heads, groups = spec.hidden_size, spec.num_heads, spec.num_kv_heads
        self.head_dim = spec.head_dim
        self.q_proj = nn.Linear(width, heads * spec.head_dim, bias=spec.bias)
        self.k_proj = nn.Linear(width, groups * spec.head_dim, bias=spec.bias)
        self.v_proj = nn.Linear(width, groups * spec.head_dim, bias=spec.bias)
        self.o_proj = nn.Linear(heads * spec.head_dim, width, bias=spec.bias)
        self.q_norm = RMSNorm(spec.head_dim, eps=spec.norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, eps=spec.norm_eps)

    def key_value(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return K and V, each [T, G, D], of x [T, C]."""
        key = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        return _rotate(key, rotation), self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend, index: int
    ) -> Tensor:
        """Attend from x [T, C]."""
        query = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))
        key, value = self.key_value(x, rotation)
        return self.o_proj(attend(index, _rotate(query, rotation), key, value))


class DFlashMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, spec: DFlashSpec) -> None:
        """Create the weights."""
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, C] to [T, C]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DFlashLayer(nn.Module):
    """One layer; its names are those of the public checkpoints."""

    def __init__(self, spec: DFlashSpec) -> None:
        """Create the weights."""
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, eps=spec.norm_eps)
        self.self_attn = DFlashAttention(spec)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, eps=spec.norm_eps)
        self.mlp = DFlashMLP(spec)

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend, index: int
    ) -> Tensor:
        """Map [T, C] to [T, C]."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, attend, index)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashModel(nn.Module):
    """The draft network without embedding and head. Tokens of any blocks are one flat list."""

    def __init__(self, spec: DFlashSpec) -> None:
        """Create random weights from torch's global generator."""
        super().__init__()
        self.spec = spec
        features = len(spec.target_layer_ids) * spec.hidden_size
        self.fc = nn.Linear(features, spec.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(spec.hidden_size, eps=spec.norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(spec) for _ in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, eps=spec.norm_eps)

    def context(self, features: Tensor, positions: Tensor) -> Tensor:
        """Return keys and values of tokens that the target has in its cache.

        Args:
            features: [T, F C] outputs of the target's layers `target_layer_ids`, side by side.
            positions: [T].

        Returns:
            [L, 2, G, T, D].
        """
        x = self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))
        rotation = self._rotation(positions, x.dtype)
        pairs = []
        for layer in self.layers:
            assert isinstance(layer, DFlashLayer)
            pairs.append(torch.stack(layer.self_attn.key_value(x, rotation)))
        return torch.stack(pairs).transpose(2, 3)

    def forward(self, embeds: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run the tokens of one or several blocks.

        Args:
            embeds: [T, C] the target's embeddings of anchors and masks.
            positions: [T].
            attend: computes attention, over the context and the token's own block.

        Returns:
            [T, C] for the target's head; the row of a mask predicts its own position's token.
        """
        x = embeds.to(self.fc.weight.dtype)
        rotation = self._rotation(positions, x.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, rotation, attend, index)
        return self.norm(x)

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rope = Rope(self.spec.rope, self.spec.head_dim, positions.device)
        cos, sin = (part[0, :, None] for part in rope(positions[None]))  # [T, 1, D/2]
        return torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype)


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    # Rolling by half a head swaps its halves; the sign lies in sin.
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


def embed(backbone: Backbone, ids: Tensor) -> Tensor:
    """Return the target's embeddings [..., C] of `ids`, as its first layer gets them."""
    if isinstance(backbone, HFBackbone):
        return backbone.model.get_input_embeddings()(ids)
    assert isinstance(backbone, NativeBackbone)
    return F.embedding(ids, backbone.embedding)


def head(backbone: Backbone, x: Tensor) -> Tensor:
    """Return the target's logits [T, V] of x [T, C]."""
    x = x.to(backbone.dtype)
    if isinstance(backbone, HFBackbone):
        return backbone.model.get_output_embeddings()(x)
    assert isinstance(backbone, NativeBackbone)
    return backbone.head(x)


def additive_mask(visible: Tensor, spec: DFlashSpec, dtype: torch.dtype) -> Tensor:
    """Return a boolean mask [T, S] as `block_attention` takes it: [H / G * T, S], 0 or -inf."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    mask.masked_fill_(~visible, float("-inf"))
    return mask.repeat(spec.num_heads // spec.num_kv_heads, 1)
