"""`HFBackbone`: any causal language model of transformers as an AR target.

It runs causal passes only, one row at a time, so rows cannot influence each other. It executes no
code that a checkpoint brings. Next: hybrid/decode/step.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hybrid.attention.pattern import AttentionPattern
from hybrid.cache.rows import Rows
from hybrid.carried import Carried
from hybrid.config import is_offline
from hybrid.errors import CapacityError, ConfigError
from hybrid.models.checkpoint import read_json, refuse_foreign_code, token_ids
from hybrid.models.compat import CACHE_NAMES, cache_argument, drop_last, holds_positions
from hybrid.models.pretrained import load_pretrained
from hybrid.protocols import PREFILL_CHUNK, Cache, Entry, ForwardOutput
from hybrid.types import Context, Write

# Models without a position table (ALiBi, recurrent) state no limit.
_NO_LIMIT = 2**31 - 1


class HFCache(Rows):
    """One transformers cache per row, grown by the passes. See `Cache` for the contract.

    Transformers appends what a pass writes, so scratch positions are the last ones of a row; they
    are cropped before the next pass.

    Attributes:
        lengths: committed positions per row.
        capacity: the most positions of a row; memory is taken as rows grow.
        supports_rollback: uncommitted positions can be dropped again.
    """

    def __init__(
        self, config: Any, batch: int, max_len: int, *, supports_rollback: bool = True
    ) -> None:
        super().__init__(batch, max_len)
        self.supports_rollback = supports_rollback
        self._config = config
        self._rows: list[DynamicCache | None] = [None] * batch
        self._scratch = [0] * batch

    def open(self, row: int, num_tokens: int) -> DynamicCache:
        """Return the row's cache without scratch, for a pass that appends `num_tokens`.

        Raises:
            ConfigError: scratch of an earlier pass cannot be dropped.
        """
        self._drop(row, self._scratch[row])
        self._scratch[row] = num_tokens
        cache = self._rows[row]
        if cache is None:
            cache = self._rows[row] = _row_cache(self._config)
        return cache

    def commit(self, row: int, num_tokens: int) -> None:
        """Make the first `num_tokens` scratch positions part of the row."""
        if not 0 <= num_tokens <= self._scratch[row]:
            raise CapacityError(
                f"KV cache: cannot commit {num_tokens} tokens of row {row}, its last pass left "
                f"{self._scratch[row]}."
            )
        self.lengths[row] += num_tokens
        self._scratch[row] -= num_tokens

    def truncate(self, row: int, length: int) -> None:
        """Forget everything at and beyond `length`."""
        self.require_length(row, length)
        self._drop(row, self.lengths[row] + self._scratch[row] - length)
        self.lengths[row], self._scratch[row] = length, 0

    def gather(self, row: int, keep: Sequence[int]) -> None:
        """Commit the scratch positions `keep`: a prefix, for every pass here is a chain."""
        if list(keep) != list(range(len(keep))):
            raise ConfigError(
                f"gather: got offsets {list(keep)}, expected 0, 1, 2, ...: trees need the native "
                "backbone."
            )
        self.commit(row, len(keep))

    def free(self, row: int) -> None:
        """Empty the row."""
        self._rows[row] = None
        self.lengths[row] = self._scratch[row] = 0

    def _drop(self, row: int, num_tokens: int) -> None:
        cache = self._rows[row]
        if num_tokens == 0 or cache is None:
            return
        if not self.supports_rollback:
            raise ConfigError(
                "This model can only decode one token after another: tokens cannot be taken back. "
                'Use strategy="ar".'
            )
        drop_last(cache, num_tokens)


def _row_cache(config: Any) -> DynamicCache:
    """Return an empty cache for one row.

    Sliding layers become full ones: the masks hide what is out of the window, and a full layer can
    be cropped to any length, where a sliding one forgets what a rollback would need.
    """
    cache = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicSlidingWindowLayer:
            cache.layers[index] = DynamicLayer()
    return cache


class HFBackbone:
    """A transformers model behind the `Backbone` contract.

    Attributes:
        model: the transformers model, in eval mode.
        supports_rollback: False for recurrent and linear-attention models, and for "dynamic" RoPE,
            where transformers rotates a token by the length of its pass: they can only decode one
            token after another.
    """

    context = Context.CAUSAL
    can_verify = True
    block_size: int | None = None
    logit_shift = 1
    default_strategy = "speculative"

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        """Wrap `model`.

        Raises:
            ConfigError: its forward takes no cache.
        """
        self.model = model.eval()
        accepted = inspect.signature(model.forward).parameters
        cache_name = cache_argument(model.forward)
        if cache_name is None:
            raise ConfigError(
                f"{type(model).__name__}.forward takes none of {', '.join(CACHE_NAMES)}; "
                "expected a causal language model that decodes with a cache."
            )
        self._cache_name = cache_name
        self._takes_positions = "position_ids" in accepted
        self._takes_logits_to_keep = "logits_to_keep" in accepted
        config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.num_layers: int = config.num_hidden_layers
        self.max_seq_len: int = getattr(config, "max_position_embeddings", None) or _NO_LIMIT
        generation = getattr(model, "generation_config", None)
        eos = getattr(generation, "eos_token_id", None)
        self.eos_token_ids = token_ids(config.eos_token_id if eos is None else eos)
        self.mask_token_id: int | None = getattr(config, "mask_token_id", None)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self._dynamic_ropes: list[Any] = [
            m for m in model.modules() if getattr(m, "rope_type", None) == "dynamic"
        ]
        can_crop = all(map(holds_positions, _row_cache(model.config).layers))
        self.supports_rollback = can_crop and not self._dynamic_ropes
        # Several tokens after others are another thing to some of these: Mamba would start anew.
        self.prefill_chunk = PREFILL_CHUNK if self.supports_rollback else self.max_seq_len

    @classmethod
    def from_path(
        cls, path: str | Path, device: torch.device | str, dtype: torch.dtype
    ) -> HFBackbone:
        """Load a folder or a hub id; code that the checkpoint brings is not executed.

        Raises:
            CheckpointError: it cannot be found, read or matched.
        """
        folder = Path(path)
        if folder.is_dir():
            refuse_foreign_code(read_json(folder / "config.json"), folder / "config.json")
        model = load_pretrained(
            "AutoModelForCausalLM",
            path,
            dtype,
            local_files_only=folder.is_dir() or is_offline(),
        )
        return cls(model.to(device))

    @property
    def weight_nbytes(self) -> int:
        """Bytes of all weights; a tied head counts once."""
        return sum(weight.nbytes for weight in self.model.parameters())

    def cache_nbytes(self, batch: int, max_len: int) -> int:
        """Bytes that a full cache will take, by the config's heads; running states not counted."""
        config = self.model.config.get_text_config(decoder=True)
        num_heads = getattr(config, "num_attention_heads", 0)
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        head_dim = getattr(config, "head_dim", None) or self.hidden_size // max(num_heads, 1)
        per_token = self.num_layers * 2 * num_kv_heads * head_dim * self.dtype.itemsize
        return int(batch * max_len * per_token)

    def new_cache(self, batch: int, max_len: int) -> HFCache:
        """Return a cache of `batch` rows that grow to at most `max_len` positions."""
        return HFCache(self.model.config, batch, max_len, supports_rollback=self.supports_rollback)

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
        features: Sequence[Any] | None = None,
        carried: Carried | None = None,
    ) -> ForwardOutput:
        """Run T new tokens of B rows; see `Backbone.forward`.

        Raises:
            CapacityError: the new tokens do not fit the cache.
            ConfigError: a late entry, logits of chosen tokens, a refresh, a pattern other than
                causal over the whole row, positions that do not continue the row, or drafted tokens
                without rollback.
        """
        assert isinstance(cache, HFCache)
        if entry is not None or carried is not None or input_ids is None:
            raise ConfigError("A late entry needs the native backbone; got one for HFBackbone.")
        if logits_at is not None or write == Write.REFRESH:
            raise ConfigError("Denoising needs the native backbone; got a pass for HFBackbone.")
        num_tokens = input_ids.shape[1]
        if num_tokens > 1 and write == Write.SCRATCH and not self.supports_rollback:
            raise ConfigError(
                f"{type(self.model).__name__} can only decode one token after another, so it "
                f"cannot verify drafts; got a pass of {num_tokens} uncommitted tokens. "
                'Use strategy="ar".'
            )
        for index, row in enumerate(rows):
            cache.require(row, num_tokens)
            _require_causal(pattern, index, cache.lengths[row], position_ids[index])
        logits, hidden = [], []
        with self._tapped(taps) as tapped:
            for index, row in enumerate(rows):
                logits.append(self._run_row(input_ids[index : index + 1], cache, row, num_logits))
                hidden.append(dict(tapped))
                if write == Write.COMMIT:
                    cache.commit(row, num_tokens)
        return ForwardOutput(
            None if num_logits == 0 else torch.cat(logits),
            {layer: torch.cat([own[layer] for own in hidden]) for layer in taps},
        )

    def _run_row(
        self, input_ids: Tensor, cache: HFCache, row: int, num_logits: int | None
    ) -> Tensor:
        num_tokens, start = input_ids.shape[1], cache.lengths[row]
        kwargs: dict[str, Any] = {self._cache_name: cache.open(row, num_tokens)}
        if self._takes_positions:
            # Another row's longer draft may pad this one beyond the table of learned positions.
            positions = torch.arange(start, start + num_tokens, device=self.device)
            positions = positions.clamp(max=self.max_seq_len - 1)
            kwargs["position_ids"] = positions[None]
        for module in self._dynamic_ropes:  # they remember the longest pass, of whatever row
            module.max_seq_len_cached = module.original_max_seq_len
            module.inv_freq = module.original_inv_freq
        num_logits = num_tokens if num_logits is None else max(num_logits, 1)
        if self._takes_logits_to_keep:
            kwargs["logits_to_keep"] = num_logits
        output = self.model(input_ids=input_ids, use_cache=True, return_dict=True, **kwargs)
        logits: Tensor = output.logits[:, -num_logits:]
        return logits

    @contextmanager
    def _tapped(self, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Collect outputs of layers; `output_hidden_states` would give the last after its norm."""
        tapped: dict[int, Tensor] = {}

        def keep(layer: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                tapped[layer] = output if isinstance(output, Tensor) else output[0]

            return hook

        handles = [self._layers()[n].register_forward_hook(keep(n)) for n in taps]
        try:
            yield tapped
        finally:
            for handle in handles:
                handle.remove()

    def _layers(self) -> nn.ModuleList:
        for module in self.model.get_decoder().modules():
            if isinstance(module, nn.ModuleList) and len(module) == self.num_layers:
                return module
        raise ConfigError(
            f"taps: {type(self.model).__name__} has no list of {self.num_layers} layers."
        )


def _require_causal(pattern: AttentionPattern, index: int, length: int, positions: Tensor) -> None:
    """Check that a row's pass is causal and continues the row; padding may follow its tokens.

    Padding runs as ordinary last tokens: nothing before it can see it.
    """
    if pattern.prefix_len[index] != length:
        raise ConfigError(
            f"HFBackbone: row {index} would see {pattern.prefix_len[index]} of {length} cached "
            "positions, expected all. Other patterns need the native backbone."
        )
    num_real = pattern.num_tokens
    if not pattern.is_causal:
        local = pattern.local if pattern.local.ndim == 2 else pattern.local[index]
        is_causal = (local == torch.ones_like(local).tril()).all(dim=1)
        is_padding = (local == torch.eye(len(local), dtype=torch.bool)).all(dim=1)
        num_real = int(is_causal.long().cumprod(0).sum())
        if not is_padding[num_real:].all():
            raise ConfigError(
                "HFBackbone: got a pattern that is not causal; diffusion drafts, trees and blocks "
                "need the native backbone."
            )
    expected = list(range(length, length + num_real))
    if positions[:num_real].tolist() != expected:
        raise ConfigError(
            f"HFBackbone: got positions {positions.tolist()} for row {index}, expected them to "
            f"continue its {length} cached tokens."
        )
