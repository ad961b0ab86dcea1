"""`FeatureCache`: what each layer added to the tokens of one row, reused in the passes after it.

dLLM-Cache (arXiv:2506.06295), for models whose tokens all see each other. Keys and values stay in
the row's KV cache; the outputs of attention and MLP are held here, one object per row and request.
Next: hybrid/models/transformer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.kernels.block_attention import block_attention
from hybrid.models.attention import PlainPass
from hybrid.models.weights import Layer

if TYPE_CHECKING:
    from hybrid.models.transformer import NativeBackbone


class FeatureCache:
    """Prompt and response are computed anew every so many passes, each on its own clock.

    Between its refreshes a share of the response is computed in each layer: the tokens whose values
    have turned most from the cached ones. The others get their new values, but keep their keys and
    outputs. The first layer, where what has changed enters, computes the whole response in every
    pass, as the reference does. With both intervals 1 nothing is reused.
    """

    def __init__(
        self, num_prompt: int, prompt_interval: int, response_interval: int, transfer_ratio: float
    ) -> None:
        """Begin empty: the first pass computes everything.

        Args:
            num_prompt: leading tokens that follow `prompt_interval`.
            prompt_interval: passes from one refresh of the prompt to the next.
            response_interval: likewise for what is behind it.
            transfer_ratio: share of the response that each pass between them computes.
        """
        self._num_prompt, self._transfer_ratio = num_prompt, transfer_ratio
        self._intervals = prompt_interval, response_interval
        self._num_passes = 0
        self._is_due = True, True
        self._outputs: Tensor | None = None  # [L, 2, S, C]

    def begin(self, backbone: NativeBackbone, num_tokens: int) -> None:
        """Begin a pass over the first `num_tokens` tokens of the row; the first has them all."""
        if self._outputs is None:
            shape = backbone.num_layers, 2, num_tokens, backbone.hidden_size
            self._outputs = torch.zeros(shape, dtype=backbone.dtype, device=backbone.device)
        prompt_is_due, response_is_due = (self._num_passes % n == 0 for n in self._intervals)
        self._is_due = prompt_is_due, response_is_due
        self._num_passes += 1

    def layer(
        self, layer: Layer, index: int, x: Tensor, attend: PlainPass, batch_row: int
    ) -> Tensor:
        """Run a layer on one row, [T, C] -> [T, C].

        Args:
            layer: weights.
            index: of the layer.
            x: hidden states.
            attend: what the layers of the pass share.
            batch_row: which row of the pass.
        """
        assert self._outputs is not None
        attention, mlp = self._outputs[index, :, : len(x)]
        computed = self._attend(layer, index, x, attend, batch_row, attention)
        x = x + attention
        if len(computed):
            h, _ = attend.norm(x[computed], layer.post_norm, None)
            mlp[computed] = attend.mlp(layer, h)
        return x + mlp

    def _attend(
        self,
        layer: Layer,
        index: int,
        x: Tensor,
        attend: PlainPass,
        batch_row: int,
        outputs: Tensor,
    ) -> Tensor:
        """Renew K/V and outputs [T, C] of attention; return which tokens got new outputs."""
        prompt_is_due, response_is_due = self._is_due[0], self._is_due[1] or index == 0
        first = 0 if prompt_is_due else self._num_prompt
        end = len(x) if response_is_due or self._transfer_ratio else self._num_prompt
        fed, num_fed = torch.arange(first, end, device=x.device), end - first
        if not num_fed:
            return fed
        spec, row = attend.backbone.spec, attend.rows[batch_row]
        qkv = layer.qkv(attend.backbone.rms_norm(x[fed], layer.input_norm))
        qkv = qkv.view(num_fed, -1, spec.head_dim)
        attend.rotate(layer, qkv, batch_row * len(x) + fed)
        new = qkv[:, spec.num_heads :].view(num_fed, 2, spec.num_kv_heads, -1).permute(1, 2, 0, 3)
        keys, values = attend.cache.read(index, row, len(x))
        chosen = fed - first
        if not response_is_due and end > self._num_prompt:
            num_sure = self._num_prompt - first
            turned = self._most_turned(new[1, :, num_sure:], values[:, self._num_prompt : end])
            chosen = torch.cat([chosen[:num_sure], turned + num_sure])
            is_chosen = torch.zeros(num_fed, 1, dtype=torch.bool, device=fed.device)
            is_chosen[chosen] = True
            new[0] = torch.where(is_chosen, new[0], keys[:, fed])
        attend.cache.refresh(index, row, fed, new)
        if len(chosen):
            query = qkv[chosen, : spec.num_heads]
            outputs[fed[chosen]] = layer.o(block_attention(query, keys, values, None))
        return fed[chosen]

    def _most_turned(self, new: Tensor, cached: Tensor) -> Tensor:
        """Choose the share of the tokens whose values [G, n, D] are least like the cached ones."""
        new, cached = (v.transpose(0, 1).flatten(1) for v in (new, cached))
        similarity = F.cosine_similarity(new, cached, dim=-1)
        count = int(len(similarity) * self._transfer_ratio)
        return similarity.topk(count, largest=False).indices


class FeaturePass(PlainPass):
    """A pass whose layers reuse what each row's `FeatureCache` holds.

    Not on the kernels: which tokens are computed differs by row and layer.
    """

    def __init__(self, features: Sequence[FeatureCache], *args: Any) -> None:
        """Begin a pass of every row; `args` are those of `PlainPass`."""
        super().__init__(*args)
        self._features = features
        for own in features:
            own.begin(self.backbone, self.num_tokens)

    def layer(
        self, layer: Layer, index: int, x: Tensor, update: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Run a layer row by row; nothing is left to add."""
        rows = zip(self._features, torch.split(x, self.num_tokens), strict=True)
        outs = [own.layer(layer, index, part, self, b) for b, (own, part) in enumerate(rows)]
        return torch.cat(outs), None
