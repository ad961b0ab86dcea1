"""`NativeBackbone`: the one decoder, written once, run under any attention pattern.

RMSNorm, RoPE, grouped-query attention, SwiGLU (arXiv:2307.09288; q/k norm as in Qwen3). It is fused
where that pays: one product for q, k, v, one for gate and up, keys written straight into the cache.
It does not know which mode a pass serves. Next: hybrid/decode/step.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.attention.pattern import AttentionPattern
from hybrid.cache.kv_cache import KVCache, padded
from hybrid.errors import CheckpointError
from hybrid.kernels.block_attention import block_attention, token_attention
from hybrid.models.checkpoint import Weight
from hybrid.models.linear import Linear, make_linear
from hybrid.models.rope import Rope
from hybrid.models.spec import ModelSpec
from hybrid.protocols import PREFILL_CHUNK, Cache, Entry, ForwardOutput
from hybrid.types import Write


@dataclass(slots=True)
class Layer:
    """Weights of one layer. `qkv`, `o`, `gate_up`, `down` may be wrapped by an adapter."""

    input_norm: Tensor
    qkv: Linear
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    window: int | None


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
        self.logit_shift = spec.logit_shift
        take = _Weights(spec, weights, self.device, dtype, exact=exact, reorder=reorder)
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
        taps: Sequence[int] = (),
        entry: Entry | None = None,
    ) -> ForwardOutput:
        """Run T new tokens of B rows; see `Backbone.forward`."""
        assert isinstance(cache, KVCache)
        batch, num_tokens = position_ids.shape
        for row in rows:
            cache.require(row, num_tokens)
        attend = _Attention(self, pattern, cache, rows, position_ids, prefill=write == Write.COMMIT)
        if entry is not None:
            x, first, adapter = entry.hidden.flatten(0, 1), entry.layer, entry.adapter
        else:
            assert input_ids is not None
            x, first, adapter = F.embedding(input_ids.flatten(), self.embedding), 0, None
        layers = self.layers if adapter is None else adapter.layers
        hidden = {}
        for index in range(first, self.num_layers):
            x = self._layer(layers[index], index, x, attend)
            if index in taps:
                hidden[index] = x.view(batch, num_tokens, -1)
        if write == Write.COMMIT:
            for row in rows:
                cache.commit(row, num_tokens)
        return ForwardOutput(self._logits(x, batch, num_logits), hidden)

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalise the last dimension (arXiv:1910.07467) in the activations' dtype."""
        return F.rms_norm(x, (x.shape[-1],), weight, self.spec.norm_eps)

    def _layer(self, layer: Layer, index: int, x: Tensor, attend: _Attention) -> Tensor:
        x = x + layer.o(attend(layer, index, layer.qkv(self.rms_norm(x, layer.input_norm))))
        gate, up = layer.gate_up(self.rms_norm(x, layer.post_norm)).chunk(2, dim=-1)
        return x + layer.down(F.silu(gate).mul_(up))

    def _logits(self, x: Tensor, batch: int, num_logits: int | None) -> Tensor | None:
        if num_logits == 0:
            return None
        if num_logits is not None:
            x = x.view(batch, -1, self.hidden_size)[:, -num_logits:].flatten(0, 1)
        return self.head(self.rms_norm(x, self.norm)).view(batch, -1, self.vocab_size)


class _Attention:
    """What all layers of one pass share: rotations, masks, and where keys go."""

    def __init__(
        self,
        backbone: NativeBackbone,
        pattern: AttentionPattern,
        cache: KVCache,
        rows: Sequence[int],
        position_ids: Tensor,
        *,
        prefill: bool,
    ) -> None:
        self.backbone, self.pattern, self.cache, self.rows = backbone, pattern, cache, rows
        self.num_tokens = position_ids.shape[1]
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
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}
        # Attention rounds differently by the number of queries and keys in a product. A verify
        # pass in which each token is a product of its own gives the bits of AR decoding, in any
        # precision, and is no slower on a CPU; a prefill is too wide for that.
        self.token_by_token = pattern.is_causal and not prefill and backbone.device.type == "cpu"
        if self.token_by_token:
            for batch_row, row in enumerate(rows):
                end = pattern.row_prefix(batch_row) + self.num_tokens
                cache.blank(row, end, padded(end))

    def __call__(self, layer: Layer, index: int, qkv: Tensor) -> Tensor:
        """Rotate, write K/V to scratch, attend. qkv: [B*T, (H + 2G) D] -> [B*T, H D]."""
        s = self.backbone.spec
        qkv = qkv.view(-1, self.num_rotated + s.num_kv_heads, s.head_dim)
        self._rotate(layer, qkv)
        outs = []
        for batch_row, row in enumerate(self.rows):
            own = qkv[batch_row * self.num_tokens : (batch_row + 1) * self.num_tokens]
            pair = own[:, s.num_heads :].view(self.num_tokens, 2, s.num_kv_heads, s.head_dim)
            self.cache.write(index, row, pair.permute(1, 2, 0, 3))
            prefix = self.pattern.row_prefix(batch_row)
            width = prefix + self.num_tokens
            if self.token_by_token:
                width = padded(width)
            keys, values = self._keys(index, row, prefix, pair, width)
            query, mask = own[:, : s.num_heads], self._mask(batch_row, layer.window, width)
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

    def _rotate(self, layer: Layer, qkv: Tensor) -> None:
        s = self.backbone.spec
        if layer.q_norm is not None and layer.k_norm is not None:
            norm = self.backbone.rms_norm
            qkv[:, : s.num_heads] = norm(qkv[:, : s.num_heads], layer.q_norm)
            keys = slice(s.num_heads, self.num_rotated)
            qkv[:, keys] = norm(qkv[:, keys], layer.k_norm)
        rotated = qkv[:, : self.num_rotated]
        # Rolling by half a head swaps its halves; the sign lies in self.sin.
        swapped = rotated.roll(s.head_dim // 2, dims=-1)
        torch.addcmul(rotated * self.cos, swapped, self.sin, out=rotated)

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


class _Weights:
    """Takes tensors by canonical name, checks their shapes, places and fuses them."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Weight],
        device: torch.device,
        dtype: torch.dtype,
        *,
        exact: bool,
        reorder: bool,
    ) -> None:
        self.spec, self.weights, self.device, self.dtype = spec, weights, device, dtype
        self.exact, self.reorder = exact, reorder

    def get(self, name: str, *shape: int) -> Weight:
        if name not in self.weights:
            raise CheckpointError(
                f"Checkpoint has no tensor {name!r}, which {self.spec.family} needs. "
                "The files are incomplete or of another architecture."
            )
        value = self.weights[name]
        if tuple(value.shape) != shape:
            raise CheckpointError(
                f"{name}: got shape {list(value.shape)}, expected {list(shape)} by config.json."
            )
        if not isinstance(value, Tensor):
            on_cpu = self.device.type == "cpu" and self.dtype == torch.bfloat16
            return value if on_cpu else value.dequantize(self.dtype).to(self.device)
        return value.to(self.device, self.dtype)

    def dense(self, name: str, *shape: int) -> Tensor:
        value = self.get(name, *shape)
        return value if isinstance(value, Tensor) else value.dequantize(self.dtype)

    def linear(self, prefix: str, parts: Mapping[str, int], width: int, *, bias: bool) -> Linear:
        weights = [self.get(f"{prefix}.{n}.weight", size, width) for n, size in parts.items()]
        biases = [
            self.dense(f"{prefix}.{n}.bias", size) if bias else None for n, size in parts.items()
        ]
        return make_linear(weights, biases, exact=self.exact, reorder=self.reorder)

    def layer(self, index: int) -> Layer:
        s, prefix = self.spec, f"model.layers.{index}"
        heads, groups = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        qkv = {"q_proj": heads, "k_proj": groups, "v_proj": groups}
        gate_up = {"gate_proj": s.intermediate_size, "up_proj": s.intermediate_size}
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        norms = [
            self.dense(f"{attention}.{n}.weight", s.head_dim) if s.qk_norm else None
            for n in ("q_norm", "k_norm")
        ]
        return Layer(
            input_norm=self.dense(f"{prefix}.input_layernorm.weight", s.hidden_size),
            qkv=self.linear(attention, qkv, s.hidden_size, bias=s.qkv_bias),
            o=self.linear(attention, {"o_proj": s.hidden_size}, heads, bias=s.o_bias),
            post_norm=self.dense(f"{prefix}.post_attention_layernorm.weight", s.hidden_size),
            gate_up=self.linear(mlp, gate_up, s.hidden_size, bias=s.mlp_bias),
            down=self.linear(
                mlp, {"down_proj": s.hidden_size}, s.intermediate_size, bias=s.mlp_bias
            ),
            q_norm=norms[0],
            k_norm=norms[1],
            window=s.sliding_windows[index],
        )

    def head(self, embedding: Tensor) -> Linear:
        name = "model.embed_tokens.weight" if self.spec.tie_embeddings else "lm_head.weight"
        weight = self.get(name, self.spec.vocab_size, self.spec.hidden_size)
        if self.spec.tie_embeddings and isinstance(weight, Tensor):
            weight = embedding  # not a second copy
        return make_linear([weight], [None], exact=self.exact, reorder=self.reorder)
