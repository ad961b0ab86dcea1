"""The drafter under training: many blocks of one sequence, over one clean pass of the target.

It computes what drafters/dflash.py computes block by block, and is tested against it. Next:
hybrid/training/dflash/recipe.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid.kernels.block_attention import block_attention
from hybrid.models.dflash import Attend, DFlashModel, additive_mask, embed, head
from hybrid.models.linear import DenseLinear, Linear
from hybrid.models.transformer import NativeBackbone
from hybrid.models.weights import Layer
from hybrid.training.masks import anchored_drafts


@dataclass(frozen=True, slots=True)
class Blocks:
    """One sequence, what the target computed at each of its tokens, and where drafts begin.

    Attributes:
        tokens: [S].
        features: [S, F C] outputs of the target's layers, side by side.
        anchors: [N] positions of known tokens that the target has not seen yet: a block begins
            there, and sees the features before.
        logits: [S, V] of the target, None where nobody asks.
    """

    tokens: Tensor
    features: Tensor
    anchors: Tensor
    logits: Tensor | None = None

    def targets(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return indices and tokens [N, K] of what follows each anchor, and which of it exists."""
        index = self.anchors[:, None] + torch.arange(1, count + 1, device=self.anchors.device)
        exists = index < len(self.tokens)
        index = index.clamp(max=len(self.tokens) - 1)
        return index, self.tokens[index], exists


class DFlashTraining(nn.Module):
    """The draft network with its loss. The target is frozen and no parameter of it."""

    def __init__(
        self, model: DFlashModel, backbone: NativeBackbone, decay: float, distillation: float
    ) -> None:
        """Keep the parts.

        Args:
            model: what is trained.
            backbone: the target; its embedding and head serve the draft.
            decay: see `DFlashConfig`.
            distillation: see `DFlashConfig`.
        """
        super().__init__()
        self.model, self.backbone = model, backbone
        self.decay, self.distillation = decay, distillation

    def forward(self, batch: Blocks) -> dict[str, Tensor]:
        """Return the loss: a mean over all masks that have a token to predict, weighed by place."""
        logits = self.logits(batch)  # [N, K, V]
        precise = torch.promote_types(logits.dtype, torch.float32)
        logits = logits.to(precise)
        index, tokens, exists = batch.targets(logits.shape[1])
        losses = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
        losses = losses.view_as(index)
        if self.distillation:
            assert batch.logits is not None
            wanted = batch.logits[index - 1].to(precise)  # row i is for token i + 1
            divergence = F.kl_div(
                logits.log_softmax(dim=-1),
                wanted.log_softmax(dim=-1),
                reduction="none",
                log_target=True,
            ).sum(dim=-1)
            losses = torch.lerp(losses, divergence, self.distillation)
        place = torch.arange(logits.shape[1], device=logits.device)
        weights = torch.exp(-place.to(precise) / self.decay) * exists
        return {"loss": (losses * weights).sum() / weights.sum()}

    def logits(self, batch: Blocks) -> Tensor:
        """Draft behind each anchor. Returns [N, K, V]."""
        spec, device = self.model.spec, batch.tokens.device
        length, width = len(batch.tokens), spec.block_size
        positions = batch.anchors[:, None] + torch.arange(width, device=device)
        ids = torch.full_like(positions, spec.mask_token_id)
        ids[:, 0] = batch.tokens[batch.anchors]
        context = self.model.context(batch.features, torch.arange(length, device=device))
        x = self.model(
            embed(self.backbone, ids.flatten()),
            positions.flatten(),
            self._attend(context, batch.anchors, positions.flatten()),
        )
        masked = x.view(*positions.shape, -1)[:, 1:]
        return head(self.backbone, masked.flatten(0, 1)).view(len(masked), width - 1, -1)

    def _attend(self, context: Tensor, anchors: Tensor, positions: Tensor) -> Attend:
        """Return attention of all blocks to the context before their anchors and to themselves."""
        length, spec = context.shape[3], self.model.spec
        keys_at = torch.cat([torch.arange(length, device=positions.device), positions])
        seen = anchored_drafts(length, anchors, spec.block_size, bidirectional=True)[length:]
        masks = {}
        for window in set(spec.windows):
            near = seen if window is None else seen & (keys_at > positions[:, None] - window)
            masks[window] = additive_mask(near, spec, context.dtype)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            pair = torch.stack([key, value]).transpose(1, 2).to(context.dtype)  # [2, G, N W, D]
            keys, values = torch.cat([context[layer], pair], dim=2)
            return block_attention(
                query.to(context.dtype), keys, values, masks[spec.windows[layer]]
            )

        return attend


@torch.no_grad()
def start_from_target(model: DFlashModel, backbone: NativeBackbone) -> None:
    """Copy what the target knows into a fresh drafter, wherever the shapes agree.

    Layer i becomes the target's layer L - (number of draft layers) + i. The features become the
    last of them, normed as that first layer norms its input: where it is the layer before, the
    first draft layer sees the very keys and values of the target.
    """
    width, last = backbone.hidden_size, backbone.num_layers - len(model.layers)
    weights = {"norm.weight": backbone.norm}
    for index in range(len(model.layers)):
        layer = backbone.layers[max(last + index, 0)]
        found = _layer_weights(layer, backbone)
        weights |= {f"layers.{index}.{name}": value for name, value in found.items()}
    weights["hidden_norm.weight"] = weights["layers.0.input_layernorm.weight"]
    weights["fc.weight"] = torch.zeros_like(model.fc.weight)
    weights["fc.weight"][:, -width:] = torch.eye(width)
    own = model.state_dict()
    for name, value in weights.items():
        if own[name].shape == value.shape:
            own[name].copy_(value)


def _layer_weights(layer: Layer, backbone: NativeBackbone) -> dict[str, Tensor]:
    """Return a target layer's tensors by the names of a draft layer."""
    spec = backbone.spec
    heads, groups = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    q, k, v = torch.split(_dense(layer.qkv), [heads, groups, groups])
    gate, up = _dense(layer.gate_up).chunk(2)
    found = {
        "input_layernorm.weight": layer.input_norm,
        "post_attention_layernorm.weight": layer.post_norm,
        "self_attn.q_proj.weight": q,
        "self_attn.k_proj.weight": k,
        "self_attn.v_proj.weight": v,
        "self_attn.o_proj.weight": _dense(layer.o),
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": _dense(layer.down),
    }
    if layer.q_norm is not None and layer.k_norm is not None:
        found |= {"self_attn.q_norm.weight": layer.q_norm, "self_attn.k_norm.weight": layer.k_norm}
    return found


def _dense(linear: Linear) -> Tensor:
    assert isinstance(linear, DenseLinear)  # the recipe loads the target in float32 or bfloat16
    return linear.weight
