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
from hybrid.cache.pool import CachePool, pooled
from hybrid.carried import Carried
from hybrid.config import cuda_graphs_enabled
from hybrid.errors import ConfigError
from hybrid.kernels.dispatch import choose
from hybrid.models.attention import PlainPass
from hybrid.models.checkpoint import Weight
from hybrid.models.elementwise import Elementwise
from hybrid.models.feature_cache import FeatureCache, FeaturePass
from hybrid.models.graphs import CudaRecorder, Graphs
from hybrid.models.kernel_pass import MAX_HEAD_DIM, MAX_WIDTH, run_on_kernels
from hybrid.models.passes import Plan, named_tensors, run_pass
from hybrid.models.rope import Rope
from hybrid.models.spec import ModelSpec
from hybrid.models.weights import Weights
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
        compile: bool = False,
        reorder: bool = False,
        share: bool = False,
    ) -> None:
        """Fuse and place the weights.

        Args:
            spec: the architecture.
            weights: canonical name to tensor (`model.layers.N.self_attn.q_proj.weight`, ...).
            device: where to run.
            dtype: of activations and dense weights.
            exact: give a token's logits the same bits whatever shares its pass (docs/exact.md). On
                a CPU those of packed 4-bit layers have them anyway.
            compile: on a CPU, compile what is neither a product nor attention.
            reorder: on a CPU, hold dense weights in the order that its kernels read: several times
                faster, no gradient. A tied head is then a second copy of the embedding.
            share: compute with the very tensors that are given, in place of copies that are fused.

        Raises:
            CheckpointError: a tensor is missing or has the wrong shape.
            ConfigError: exact on a GPU where the kernels do not run the model; compile on a GPU,
                with exact, or where torch cannot.
        """
        self.spec, self.device, self.dtype = spec, torch.device(device), dtype
        if compile and self.device.type != "cpu":
            raise ConfigError(
                f"compile: got {self.device}, expected a CPU: on a GPU kernels run. Leave it out."
            )
        self.exact, self.elementwise = exact, Elementwise(exact=exact, compiled=compile)
        self.vocab_size, self.hidden_size = spec.vocab_size, spec.hidden_size
        self.num_layers, self.max_seq_len = spec.num_layers, spec.max_seq_len
        # Frequencies that follow the length of a pass must see the prompt whole.
        is_dynamic = spec.rope.kind == "dynamic"
        self.prefill_chunk = spec.max_seq_len if is_dynamic else PREFILL_CHUNK
        self.eos_token_ids, self.mask_token_id = spec.eos_token_ids, spec.mask_token_id
        self.context, self.can_verify = spec.context, spec.can_verify
        self.block_size, self.logit_shift = spec.block_size, spec.logit_shift
        self.default_strategy = spec.default_strategy
        take = Weights(spec, weights, self.device, dtype, exact=exact, reorder=reorder, share=share)
        self.embedding = take.dense("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        self.layers = [take.layer(index) for index in range(spec.num_layers)]
        self.norm = take.dense("model.norm.weight", spec.hidden_size)
        self.head = take.head(self.embedding)
        self.rope = Rope(spec.rope, spec.head_dim, self.device)
        fits = spec.head_dim <= MAX_HEAD_DIM and spec.hidden_size <= MAX_WIDTH
        self._fits_kernels = fits and dtype != torch.float64
        if exact and self.device.type != "cpu" and not self._fits_kernels:
            raise ConfigError(
                f"exact: got {dtype}, heads of {spec.head_dim} and a width of {spec.hidden_size}, "
                f"expected at most 32 bits, {MAX_HEAD_DIM} and {MAX_WIDTH}. Leave exact out."
            )
        # Experts, and frequencies that follow the length, are chosen on the host.
        self.reads_nothing_back = spec.moe is None and not is_dynamic
        self.graphs: Graphs | None = None
        self.pool: CachePool | None = None
        if self.device.type == "cuda":
            graphs = Graphs(CudaRecorder(self.device))
            self.graphs = graphs if cuda_graphs_enabled() else None
            self.pool = CachePool(graphs.forget)

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
        num_positions = padded(max_len) if self.pool is None else pooled(max_len)
        return batch * num_positions * per_token

    @property
    def runs_kernels(self) -> bool:
        """Whether passes run on the kernels, all but those with features."""
        return self._fits_kernels and choose("hybrid_attention", self.device) == "triton"

    @property
    def idle_nbytes(self) -> int:
        """Bytes of earlier caches, kept for the next one and freed for it if need be."""
        return 0 if self.pool is None else self.pool.idle_nbytes

    def new_cache(self, batch: int, max_len: int) -> KVCache:
        """Return a cache of `batch` rows and `max_len` positions."""
        s = self.spec
        make = KVCache if self.pool is None else self.pool.new_cache
        size = s.num_layers, batch, s.num_kv_heads, max_len, s.head_dim
        return make(*size, dtype=self.dtype, device=self.device)

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
        self._check(position_ids, cache, rows, write, carried)
        plan = Plan.of(self, taps, num_logits, entry, carried)
        tensors = named_tensors(input_ids, logits_at, entry, carried)
        given = pattern, cache, rows, position_ids, write
        if features is not None:
            out = run_pass(self, plan, tensors, FeaturePass(features, self, *given), None)
        elif self.runs_kernels:
            out = run_on_kernels(self, plan, tensors, *given, carried)
        else:
            slots = None
            if carried is not None:
                own = carried.pattern, cache, rows, carried.position_ids, Write.SCRATCH
                slots = PlainPass(self, *own, num_before=position_ids.shape[1])
            out = run_pass(self, plan, tensors, PlainPass(self, *given), slots)
        if write == Write.COMMIT:
            for row in rows:
                cache.commit(row, position_ids.shape[1])
        return out

    def rotation(self, position_ids: Tensor, write: Write) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of a pass, [B, T, D'/2] float32 each; see `Rope`."""
        # The frequencies of a length-dependent scaling follow what AR decoding would have used:
        # the length of the whole prompt in a prefill, one's own position afterwards.
        seq_len = position_ids + 1
        if write == Write.COMMIT:
            seq_len = seq_len.amax(dim=1, keepdim=True).expand_as(seq_len)
        return self.rope(position_ids, seq_len)

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalise the last dimension (arXiv:1910.07467) in the activations' dtype."""
        return F.rms_norm(x, (x.shape[-1],), weight, self.spec.norm_eps)

    def _check(
        self,
        position_ids: Tensor,
        cache: KVCache,
        rows: Sequence[int],
        write: Write,
        carried: Carried | None,
    ) -> None:
        """Check that a pass has its place in the cache, before it changes anything."""
        num_tokens = position_ids.shape[1] + (0 if carried is None else carried.pattern.num_tokens)
        if write == Write.REFRESH:
            for row, last in zip(rows, position_ids.amax(dim=1).tolist(), strict=True):
                cache.require_committed(row, last + 1)
            return
        for row in rows:
            cache.require(row, num_tokens)
