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
from hybrid.carried import Carried
from hybrid.models.attention import Attention
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
        carried: Carried | None = None,
    ) -> ForwardOutput:
        """Run T new tokens of B rows; see `Backbone.forward`."""
        assert isinstance(cache, KVCache)
        batch, num_tokens = position_ids.shape
        for row, own in zip(rows, position_ids, strict=True):
            if write == Write.REFRESH:
                cache.require_committed(row, int(own.max()) + 1)
            else:
                cache.require(row, num_tokens + (carried.pattern.num_tokens if carried else 0))
        attend = Attention(self, pattern, cache, rows, position_ids, write)
        riding = None if carried is None else _Riding(self, carried, cache, rows, num_tokens)
        for own_features in features or ():
            own_features.begin(self, num_tokens)
        if entry is not None:
            x, first, adapter = entry.hidden.flatten(0, 1), entry.layer, entry.adapter
        else:
            assert input_ids is not None
            x, first, adapter = F.embedding(input_ids.flatten(), self.embedding), 0, None
        layers = self.layers if adapter is None else adapter.layers
        hidden: dict[int, Tensor] = {}
        kept = {*taps, *(() if carried is None else carried.taps)}
        for index in range(first, self.num_layers):
            if riding is not None:
                riding.enter(index, hidden)
            x = self._layer(layers[index], index, x, attend, features)
            if riding is not None:
                riding.layer(index)
            if index in kept:
                hidden[index] = x.view(batch, num_tokens, -1)
        if write == Write.COMMIT:
            for row in rows:
                cache.commit(row, num_tokens)
        if logits_at is not None:
            starts = torch.arange(batch, device=x.device)[:, None] * num_tokens
            x = x[(starts + logits_at).flatten()]
        states = None if riding is None else riding.states
        return ForwardOutput(self._logits(x, batch, num_logits), hidden, states)

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


class _Riding:
    """The slots that a pass carries: they join at a later layer, with layers of their own."""

    def __init__(
        self,
        backbone: NativeBackbone,
        carried: Carried,
        cache: KVCache,
        rows: Sequence[int],
        num_tokens: int,
    ) -> None:
        self._backbone, self._carried = backbone, carried
        self._layers = backbone.layers if carried.adapter is None else carried.adapter.layers
        self._attend = Attention(
            backbone,
            carried.pattern,
            cache,
            rows,
            carried.position_ids,
            Write.SCRATCH,
            num_before=num_tokens,
        )
        self._x: Tensor | None = None

    def enter(self, index: int, hidden: Mapping[int, Tensor]) -> None:
        """Join before their first layer, from what the target's tokens have so far."""
        if index == self._carried.layer:
            self._x = self._carried.inputs(hidden).flatten(0, 1)

    def layer(self, index: int) -> None:
        """Run a layer, once the target's tokens have written their keys there."""
        if self._x is not None:
            self._x = self._backbone._layer(self._layers[index], index, self._x, self._attend, None)

    @property
    def states(self) -> Tensor:
        """[B, S, C] after the last layer that has run."""
        assert self._x is not None
        return self._x.view(len(self._carried.position_ids), -1, self._backbone.hidden_size)
