"""DFlash: a small network drafts a block from what the target computed at every token so far.

arXiv:2602.06036. Its keys and values of the context are kept in a cache of its own, one per call;
each target pass adds the tokens that it committed. A draft is one pass of the network over the
anchor and K masks, whose K/V are scratch. Next: hybrid/models/dflash.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hybrid.cache.kv_cache import KVCache
from hybrid.drafters.drawing import draw_tokens, take_numbers
from hybrid.kernels.block_attention import block_attention
from hybrid.models.dflash import Attend, DFlashModel, additive_mask, embed, head
from hybrid.models.dflash_files import load_dflash
from hybrid.protocols import Backbone, Cache, DraftState
from hybrid.sampling import argmax
from hybrid.transfer import send
from hybrid.types import Plan, Proposal, SequenceState, StepRecord


class DFlashDrafter:
    """Fills up to K masks behind the anchor with a draft network and the target's head."""

    name = "dflash"

    def __init__(self, backbone: Backbone, model: DFlashModel) -> None:
        """Bind a draft network to its target.

        Args:
            backbone: the target; its embedding and head serve the draft.
            model: moved to the target's device and dtype.

        Raises:
            CheckpointError: the network was made for a target of another shape.
            ConfigError: its features are layers that cannot serve.
        """
        model.spec.check_target(backbone)
        self._backbone = backbone
        self._model = model.to(backbone.device, backbone.dtype).eval()
        self.taps = model.spec.target_layer_ids
        self.max_draft_tokens = model.spec.block_size - 1
        self.mask_token_id = model.spec.mask_token_id
        # Its own keys and values live as long as the cache of the call that they belong to.
        self._memories: WeakKeyDictionary[Cache, KVCache] = WeakKeyDictionary()

    @classmethod
    def from_pretrained(cls, backbone: Backbone, path: str | Path) -> DFlashDrafter:
        """Load a folder in the layout of z-lab, transformers or speculators.

        Raises:
            CheckpointError: see `load_dflash` and the constructor.
            ConfigError: see the same.
        """
        return cls(backbone, load_dflash(path, device=backbone.device, dtype=backbone.dtype))

    @torch.inference_mode()
    def absorb(
        self,
        cache: Cache,
        rows: Sequence[int],
        hidden: dict[int, Tensor],
        num_tokens: Sequence[int],
    ) -> None:
        """Keep the keys and values of what has just joined the target's cache."""
        features = torch.cat([hidden[layer] for layer in self.taps], dim=-1)  # [B, T, F C]
        batch, width = features.shape[:2]
        starts = [cache.lengths[row] - n for row, n in zip(rows, num_tokens, strict=True)]
        positions = self._positions(starts, width)
        context = self._model.context(features.flatten(0, 1), positions)
        context = context.view(*context.shape[:3], batch, width, -1)  # [L, 2, G, B, T, D]
        memory = self._memory(cache)
        for b, (row, start, count) in enumerate(zip(rows, starts, num_tokens, strict=True)):
            if start > memory.lengths[row]:  # an earlier call failed: this row drafts no more
                continue
            memory.truncate(row, start)  # a new text in a row that was freed
            memory.require(row, count)
            for layer, own in enumerate(context):
                memory.write(layer, row, own[:, :, b, :count])
            memory.commit(row, count)

    @torch.inference_mode()
    def draft(self, state: DraftState, plan: Plan) -> Proposal:
        """Propose K tokens per row: argmax where the row is greedy, else a draw and its law."""
        rows, count = state.rows, min(plan.num_draft_tokens, self.max_draft_tokens)
        memory = self._memory(state.cache)
        lengths = tuple(count if memory.lengths[row.row] == row.cached_len else 0 for row in rows)
        logits = self._logits(rows, memory, count)
        if all(r.sampling.is_greedy and not r.sampling.has_penalties for r in rows):
            return Proposal(argmax(logits), lengths)
        tokens, laws = self._draw(rows, logits)
        return Proposal(tokens, lengths, draft_probs=laws)

    def observe(self, record: StepRecord) -> None:
        """Learn nothing: the draft depends on the model alone."""

    def reset(self) -> None:
        """Forget nothing: what is kept of a call goes with its cache."""

    def _logits(self, rows: Sequence[SequenceState], memory: KVCache, count: int) -> Tensor:
        """Run the network over the anchor and `count` masks of each row. Returns [B, K, V]."""
        mask_id, width = self._model.spec.mask_token_id, count + 1
        ids = send([[row.anchor] + [mask_id] * count for row in rows], self._backbone.device)
        positions = self._positions([memory.lengths[row.row] for row in rows], width)
        x = self._model(
            embed(self._backbone, ids).flatten(0, 1),
            positions,
            self._attend([row.row for row in rows], memory, width),
        )
        masked = x.view(len(rows), width, -1)[:, 1:]  # a mask predicts its own position
        logits = head(self._backbone, masked.flatten(0, 1)).view(len(rows), count, -1)
        logits[..., mask_id] = float("-inf")  # no answer
        return logits

    def _attend(self, rows: Sequence[int], memory: KVCache, width: int) -> Attend:
        """Return attention of each row's block to the row's context and to the block itself."""
        spec, lengths = self._model.spec, [memory.lengths[row] for row in rows]
        masks = {
            window: [None if window is None else self._near(n, width, window) for n in lengths]
            for window in set(spec.windows)
        }

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            outs = []
            for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
                own = slice(b * width, (b + 1) * width)
                memory.write(layer, row, torch.stack([key[own], value[own]]).transpose(1, 2))
                keys, values = memory.read(layer, row, length + width)
                mask = masks[spec.windows[layer]][b]
                outs.append(block_attention(query[own], keys, values, mask))
            return torch.cat(outs)

        return attend

    def _near(self, length: int, width: int, window: int) -> Tensor:
        """Return the mask of a block behind `length` tokens that sees `window` backwards."""
        positions = torch.arange(length + width, device=self._backbone.device)
        visible = positions > positions[length:, None] - window
        return additive_mask(visible, self._model.spec, self._backbone.dtype)

    def _positions(self, starts: Sequence[int], width: int) -> Tensor:
        """Return [B T] positions of `width` tokens from each start on."""
        device = self._backbone.device
        return (send(starts, device)[:, None] + torch.arange(width, device=device)).flatten()

    def _memory(self, cache: Cache) -> KVCache:
        if cache not in self._memories:
            spec = self._model.spec
            self._memories[cache] = KVCache(
                spec.num_layers,
                len(cache.lengths),
                spec.num_kv_heads,
                cache.capacity,
                spec.head_dim,
                dtype=self._backbone.dtype,
                device=self._backbone.device,
            )
        return self._memories[cache]

    def _draw(self, rows: Sequence[SequenceState], logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the tokens [B, K] left to right; also their laws [B, K, V]."""
        numbers = take_numbers(rows, [logits.shape[1]] * len(rows), logits.device)
        tokens = torch.empty(len(rows), 0, dtype=torch.long, device=logits.device)
        laws = []
        for slot in range(logits.shape[1]):
            eos = self._backbone.eos_token_ids
            token, law = draw_tokens(logits[:, slot], rows, tokens, eos, numbers[:, slot])
            tokens = torch.cat([tokens, token[:, None]], dim=1)
            laws.append(law)
        return tokens, torch.stack(laws, dim=1)
