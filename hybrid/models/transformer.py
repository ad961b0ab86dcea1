"""`NativeBackbone`: the one decoder, written once, run under any attention pattern.

RMSNorm, RoPE, grouped-query attention, SwiGLU (arXiv:2307.09288; q/k norm as in Qwen3). It is fused
where that pays: one product for q, k, v, one for gate and up, keys written straight into the cache.
It does not know which mode a pass serves. Next: hybrid/decode/step.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.attention.pattern import AttentionPattern
from hybrid.cache.kv_cache import KVCache, padded
from hybrid.kernels.block_attention import block_attention, token_attention
from hybrid.models.checkpoint import Weight
from hybrid.models.feature_cache import FeatureCache
from hybrid.models.moe import swiglu
from hybrid.models.rope import Rope
from hybrid.models.spec import ModelSpec
from hybrid.models.weights import Layer, Weights
from hybrid.protocols import PREFILL_CHUNK, Cache, Entry, ForwardOutput
from hybrid.types import Write


class NativeBackbone:
    """A decoder-only transformer over a `KVCache`. See `Backbone` for the contract."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Weight],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        exact: bool = False,
        reorder: bool = False,
    ) -> None:
        """Fuse and place the weights.

        Args:
            spec: the architecture.
            weights: canonical name to tensor (`model.layers.N.self_attn.q_proj.weight`, ...).
            device: where to run.
            dtype: of activations and dense weights.
            exact: on a CPU, give a token's logits the same bits in a pass of one row as among
                others in float32 too (packed 4-bit and bfloat16 always do); AR decoding in
                float32 gets slower.
            reorder: on a CPU, hold dense weights in the order that its kernels read: several times
                faster, no gradient. A tied head is then a second copy of the embedding.

        Raises:
            CheckpointError: a tensor is missing or has the wrong shape.
        """
        self.spec, self.device, self.dtype = spec, torch.device(device), dtype
        self.vocab_size, self.hidden_size = spec.vocab_size, spec.hidden_size
        self.num_layers, self.max_seq_len = spec.num_layers, spec.max_seq_len
        # Frequencies that follow the length of a pass must see the prompt whole.
        is_dynamic = spec.rope.kind == "dynamic"
        self.prefill_chunk = spec.max_seq_len if is_dynamic else PREFILL_CHUNK
        self.eos_token_ids, self.mask_token_id = spec.eos_token_ids, spec.mask_token_id
        self.context, self.can_verify = spec.context, spec.can_verify
        self.block_size, self.logit_shift = spec.block_size, spec.logit_shift
        self.default_strategy = spec.default_strategy
        take = Weights(spec, weights, self.device, dtype, exact=exact, reorder=reorder)
        self.embedding = take.dense("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        self.layers = [take.layer(index) for index in range(spec.num_layers)]
        self.norm = take.dense("model.norm.weight", spec.hidden_size)
        self.head = take.head(self.embedding)
        self.rope = Rope(spec.rope, spec.head_dim, self.device)

    @property
    def weight_nbytes(self) -> int:
        """Bytes of all weights; a tied head counts once."""
        linears = [x for y in self.layers for x in (y.qkv, y.o, y.gate_up, y.down)]
        tied = getattr(self.head, "weight", None) is self.embedding
        total = sum(x.nbytes for x in linears) + (0 if tied else self.head.nbytes)
        total += sum(x.experts.nbytes for x in self.layers if x.experts is not None)
        return total + self.embedding.numel() * self.embedding.element_size()

    def cache_nbytes(self, batch: int, max_len: int) -> int:
        """Bytes that `new_cache` will take."""
        s = self.spec
        per_token = s.num_layers * 2 * s.num_kv_heads * s.head_dim * self.dtype.itemsize
        return batch * padded(max_len) * per_token

    def new_cache(self, batch: int, max_len: int) -> KVCache:
        """Allocate a cache of `batch` rows and `max_len` positions."""
        s = self.spec
        return KVCache(
            s.num_layers,
            batch,
            s.num_kv_heads,
            max_len,
            s.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor,
        pattern: AttentionPattern,
        cache: Cache,
        rows: Sequence[int],
        *,
        write: Write = Write.SCRATCH,
        num_logits: int | None = None,
        logits_at: Tensor | None = None,
        taps: Sequence[int] = (),
        entry: Entry | None = None,
        features: Sequence[FeatureCache] | None = None,
    ) -> ForwardOutput:
        """Run T new tokens of B rows; see `Backbone.forward`."""
        assert isinstance(cache, KVCache)
        batch, num_tokens = position_ids.shape
        for row, own in zip(rows, position_ids, strict=True):
            if write == Write.REFRESH:
                cache.require_committed(row, int(own.max()) + 1)
            else:
                cache.require(row, num_tokens)
        attend = Attention(self, pattern, cache, rows, position_ids, write)
        for own_features in features or ():
            own_features.begin(self, num_tokens)
        if entry is not None:
            x, first, adapter = entry.hidden.flatten(0, 1), entry.layer, entry.adapter
        else:
            assert input_ids is not None
            x, first, adapter = F.embedding(input_ids.flatten(), self.embedding), 0, None
        layers = self.layers if adapter is None else adapter.layers
        hidden = {}
        for index in range(first, self.num_layers):
            x = self._layer(layers[index], index, x, attend, features)
            if index in taps:
                hidden[index] = x.view(batch, num_tokens, -1)
        if write == Write.COMMIT:
            for row in rows:
                cache.commit(row, num_tokens)
        if logits_at is not None:
            starts = torch.arange(batch, device=x.device)[:, None] * num_tokens
            x = x[(starts + logits_at).flatten()]
        return ForwardOutput(self._logits(x, batch, num_logits), hidden)

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalise the last dimension (arXiv:1910.07467) in the activations' dtype."""
        return F.rms_norm(x, (x.shape[-1],), weight, self.spec.norm_eps)

    def mlp(self, layer: Layer, x: Tensor) -> Tensor:
        """Return what the MLP of a layer, and its experts, add to x [N, C]."""
        h = self.rms_norm(x, layer.post_norm)
        update = swiglu(h, layer.gate_up, layer.down)
        return update if layer.experts is None else update + layer.experts(h)

    def _layer(
        self,
        layer: Layer,
        index: int,
        x: Tensor,
        attend: Attention,
        features: Sequence[FeatureCache] | None,
    ) -> Tensor:
        if features is not None:
            rows = zip(features, torch.split(x, attend.num_tokens), strict=True)
            return torch.cat(
                [f.layer(layer, index, own, attend, b) for b, (f, own) in enumerate(rows)]
            )
        x = x + layer.o(attend(layer, index, layer.qkv(self.rms_norm(x, layer.input_norm))))
        return x + self.mlp(layer, x)

    def _logits(self, x: Tensor, batch: int, num_logits: int | None) -> Tensor | None:
        if num_logits == 0:
            return None
        if num_logits is not None:
            x = x.view(batch, -1, self.hidden_size)[:, -num_logits:].flatten(0, 1)
        return self.head(self.rms_norm(x, self.norm)).view(batch, -1, self.vocab_size)


class Attention:
    """What all layers of one pass share: rotations, masks, and where keys go."""

    def __init__(
        self,
        backbone: NativeBackbone,
        pattern: AttentionPattern,
        cache: KVCache,
        rows: Sequence[int],
        position_ids: Tensor,
        write: Write,
    ) -> None:
        self.backbone, self.pattern, self.cache, self.rows = backbone, pattern, cache, rows
        self.position_ids, self.num_tokens = position_ids, position_ids.shape[1]
        self.refreshes, prefill = write == Write.REFRESH, write == Write.COMMIT
        s = backbone.spec
        self.num_rotated = s.num_heads + s.num_kv_heads
        # The frequencies of a length-dependent scaling follow what AR decoding would have used:
        # the length of the whole prompt in a prefill, one's own position afterwards.
        seq_len = position_ids + 1
        if prefill:
            seq_len = seq_len.amax(dim=1, keepdim=True).expand_as(seq_len)
        cos, sin = backbone.rope(position_ids, seq_len)  # [B, T, D/2]
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

    def __call__(self, layer: Layer, index: int, qkv: Tensor) -> Tensor:
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
            self.cache.write(index, row, new)
            prefix = self.pattern.row_prefix(batch_row)
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

    def _keys(
        self, index: int, row: int, prefix: int, pair: Tensor, width: int
    ) -> tuple[Tensor, Tensor]:
        """Return K, V [G, width, D]: the visible prefix, the new tokens, and whatever follows."""
        if prefix == self.cache.lengths[row]:
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
        # Rolling by half its width swaps the halves; the sign lies in self.sin.
        swapped = rotated.roll(dim // 2, dims=-1)
        torch.addcmul(rotated * self.cos[tokens], swapped, self.sin[tokens], out=rotated)
        if self.query_scale is not None:
            qkv[:, : s.num_heads].mul_(self.query_scale[tokens])

    def _mask(self, batch_row: int, window: int | None, width: int) -> Tensor | None:
        """Return what `block_attention` or `token_attention` takes, computed once per pass."""
        key = (batch_row, window)
        if key not in self._masks:
            visible = self.pattern.row_mask(batch_row, window=window)
            is_open = visible is None and not self.token_by_token
            self._masks[key] = None if is_open else self._additive(batch_row, visible, width)
        return self._masks[key]

    def _additive(self, batch_row: int, visible: Tensor | None, width: int) -> Tensor:
        backbone, num_seen = self.backbone, self.pattern.row_prefix(batch_row) + self.num_tokens
        mask = torch.zeros(self.num_tokens, width, dtype=backbone.dtype, device=backbone.device)
        mask[:, num_seen:] = float("-inf")
        if visible is not None:
            mask[:, :num_seen].masked_fill_(~visible.to(backbone.device), float("-inf"))
        if self.token_by_token:
            return mask[:, None, None]
        return mask.repeat(backbone.spec.num_heads // backbone.spec.num_kv_heads, 1)
