"""`PlainPass`: the operations of a pass in plain PyTorch: rotations, masks, and where keys go.

What a CPU runs, tuned for exact bits, and the slow twin of hybrid/models/kernel_pass.py.
Next: kernels/block_attention/reference.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.attention.pattern import AttentionPattern
from hybrid.cache.kv_cache import KVCache, padded
from hybrid.kernels.block_attention import block_attention, token_attention
from hybrid.models.passes import Operations
from hybrid.models.weights import Layer
from hybrid.types import Write

if TYPE_CHECKING:
    from hybrid.models.transformer import NativeBackbone


class PlainPass(Operations):
    """What all layers of one pass share: rotations, masks, and where keys go."""

    def __init__(
        self,
        backbone: NativeBackbone,
        pattern: AttentionPattern,
        cache: KVCache,
        rows: Sequence[int],
        position_ids: Tensor,
        write: Write,
        num_before: int = 0,
    ) -> None:
        """Prepare a pass.

        Args:
            backbone: whose layers it runs.
            pattern: who sees whom.
            cache: of all rows.
            rows: cache row of each batch row.
            position_ids: [B, T].
            write: where keys go.
            num_before: tokens of the same pass whose keys lie between the cached ones and those of
                these T: the target's, before the slots that it carries.
        """
        self.backbone, self.pattern, self.cache, self.rows = backbone, pattern, cache, rows
        self.num_before = num_before
        self.position_ids, self.num_tokens = position_ids, position_ids.shape[1]
        self.refreshes = write == Write.REFRESH
        s = backbone.spec
        self.num_rotated = s.num_heads + s.num_kv_heads
        cos, sin = backbone.rotation(position_ids, write)  # [B, T, D/2]
        dtype = backbone.dtype
        self.cos = torch.cat([cos, cos], dim=-1).to(dtype).flatten(0, 1)[:, None]  # [B*T, 1, D]
        self.sin = torch.cat([-sin, sin], dim=-1).to(dtype).flatten(0, 1)[:, None]
        scale = backbone.rope.query_scale(position_ids)
        self.query_scale = None if scale is None else scale.to(dtype).flatten()[:, None, None]
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}
        # Attention rounds differently by the number of queries and keys in a product. A verify
        # pass in which each token is a product of its own gives the bits of AR decoding, in any
        # precision, and is no slower on a CPU; a prefill is too wide for that.
        self.token_by_token = (
            pattern.is_causal and write == Write.SCRATCH and backbone.device.type == "cpu"
        )
        if self.token_by_token:
            for batch_row, row in enumerate(rows):
                end = pattern.row_prefix(batch_row) + self.num_tokens
                cache.blank(row, end, padded(end))

    def norm(self, x: Tensor, weight: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the norm of x + update, and the sum."""
        backbone = self.backbone
        return backbone.elementwise.norm(x, update, weight, backbone.spec.norm_eps)

    def mlp(self, layer: Layer, x: Tensor) -> Tensor:
        """Return what the MLP of a layer, and its experts, make of normed x [N, C]."""
        update = layer.down(self.backbone.elementwise.gate(layer.gate_up(x)))
        return update if layer.experts is None else update + layer.experts(x)

    def attend(self, layer: Layer, index: int, qkv: Tensor) -> Tensor:
        """Rotate, write K/V to scratch, attend. qkv: [B*T, (H + 2G) D] -> [B*T, H D]."""
        s = self.backbone.spec
        qkv = qkv.view(-1, self.num_rotated + s.num_kv_heads, s.head_dim)
        self.rotate(layer, qkv)
        outs = []
        for batch_row, row in enumerate(self.rows):
            own = qkv[batch_row * self.num_tokens : (batch_row + 1) * self.num_tokens]
            pair = own[:, s.num_heads :].view(self.num_tokens, 2, s.num_kv_heads, s.head_dim)
            query, new = own[:, : s.num_heads], pair.permute(1, 2, 0, 3)
            if self.refreshes:
                self.cache.refresh(index, row, self.position_ids[batch_row], new)
                length = self.pattern.row_prefix(batch_row)
                outs.append(block_attention(query, *self.cache.read(index, row, length), None))
                continue
            self.cache.write(index, row, new, self.num_before)
            prefix = self._prefix(batch_row)
            width = prefix + self.num_tokens
            if self.token_by_token:
                width = padded(width)
            keys, values = self._keys(index, row, prefix, pair, width)
            mask = self._mask(batch_row, layer.window, width)
            if self.token_by_token:
                assert mask is not None
                outs.append(token_attention(query, keys, values, mask, prefix + 1))
            else:
                outs.append(block_attention(query, keys, values, mask))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _prefix(self, batch_row: int) -> int:
        """Return how many positions before the new tokens there are keys for."""
        if self.num_before:
            return self.cache.lengths[self.rows[batch_row]] + self.num_before
        return self.pattern.row_prefix(batch_row)

    def _keys(
        self, index: int, row: int, prefix: int, pair: Tensor, width: int
    ) -> tuple[Tensor, Tensor]:
        """Return K, V [G, width, D]: the visible prefix, the new tokens, and whatever follows."""
        if prefix == self.cache.lengths[row] + self.num_before:
            return self.cache.read(index, row, width)
        # A pass that hides part of the cache: the visible prefix and the new tokens, side by side.
        keys, values = self.cache.read(index, row, prefix)
        new = F.pad(pair, (0, 0, 0, 0, 0, 0, 0, width - prefix - self.num_tokens))
        new_keys, new_values = new.permute(1, 2, 0, 3)
        return torch.cat([keys, new_keys], dim=1), torch.cat([values, new_values], dim=1)

    def rotate(self, layer: Layer, qkv: Tensor, tokens: Tensor | slice = slice(None)) -> None:
        """Normalise and rotate queries and keys [N, H + 2G, D] of some tokens of B*T, in place."""
        s, dim = self.backbone.spec, self.backbone.rope.dim
        if layer.q_norm is not None and layer.k_norm is not None:
            norm = self.backbone.rms_norm
            qkv[:, : s.num_heads] = norm(qkv[:, : s.num_heads], layer.q_norm)
            keys = slice(s.num_heads, self.num_rotated)
            qkv[:, keys] = norm(qkv[:, keys], layer.k_norm)
        rotated = qkv[:, : self.num_rotated, :dim]
        self.backbone.elementwise.rotate(rotated, self.cos[tokens], self.sin[tokens])
        if self.query_scale is not None:
            qkv[:, : s.num_heads].mul_(self.query_scale[tokens])

    def _mask(self, batch_row: int, window: int | None, width: int) -> Tensor | None:
        """Return what `block_attention` or `token_attention` takes, computed once per pass."""
        key = (batch_row, window)
        if key not in self._masks:
            prefix = self._prefix(batch_row)
            visible = self.pattern.row_mask(batch_row, window=window, prefix_width=prefix)
            is_open = visible is None and not self.token_by_token
            self._masks[key] = None if is_open else self._additive(batch_row, visible, width)
        return self._masks[key]

    def _additive(self, batch_row: int, visible: Tensor | None, width: int) -> Tensor:
        backbone, num_seen = self.backbone, self._prefix(batch_row) + self.num_tokens
        mask = torch.zeros(self.num_tokens, width, dtype=backbone.dtype, device=backbone.device)
        mask[:, num_seen:] = float("-inf")
        if visible is not None:
            mask[:, :num_seen].masked_fill_(~visible.to(backbone.device), float("-inf"))
        if self.token_by_token:
            return mask[:, None, None]
        return mask.repeat(backbone.spec.num_heads // backbone.spec.num_kv_heads, 1)
