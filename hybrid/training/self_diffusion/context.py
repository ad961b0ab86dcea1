"""What the frozen target knows of a sequence: K/V, entry states and features, computed once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid.attention.pattern import causal
from hybrid.models.draft_config import DraftConfig
from hybrid.models.transformer import NativeBackbone
from hybrid.training.data import Example
from hybrid.types import Write


@dataclass(frozen=True, slots=True)
class TargetContext:
    """One sequence as the draft pass sees it.

    Attributes:
        tokens: [S].
        first_anchor: index of the first response token.
        key_value: [L - entry, 2, G, S, D] of the layers that a draft pass runs.
        hidden: {layer: [S, C]} for the adapter's taps, and of the last layer.
    """

    tokens: Tensor
    first_anchor: int
    key_value: Tensor
    hidden: dict[int, Tensor]


def target_context(
    backbone: NativeBackbone, config: DraftConfig, example: Example
) -> TargetContext:
    """Run the target over an example. Nothing here needs a gradient."""
    tokens = torch.tensor(example.tokens, device=backbone.device)
    length = tokens.shape[0]
    cache = backbone.new_cache(1, length)
    out = backbone.forward(
        tokens[None],
        torch.arange(length, device=backbone.device)[None],
        causal([0], length),
        cache,
        [0],
        write=Write.COMMIT,
        num_logits=0,
        taps=sorted({*config.taps, backbone.num_layers - 1}),
    )
    # Tensors made in inference mode cannot take part in autograd; their clones can.
    return TargetContext(
        tokens,
        len(example.prompt),
        cache.data[config.entry_layer :, :, 0, :, :length].clone(),
        {layer: value[0].clone() for layer, value in out.hidden.items()},
    )
