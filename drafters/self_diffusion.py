"""Self-diffusion: the target drafts for itself, in one bidirectional pass over masked slots.

The pass enters late, reads the same cache as the AR mode, and writes its K/V to scratch positions
that the verify pass overwrites. Related: arXiv:2507.11851 (gated LoRA on mask tokens).
Next: verifiers/rejection.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid.attention.pattern import bidirectional
from hybrid.models.adapter import DiffusionAdapter
from hybrid.protocols import Backbone, DraftState, Entry
from hybrid.sampling import argmax, probs, process_logits, sample
from hybrid.types import Plan, Proposal, SequenceState, StepRecord


class SelfDiffusionDrafter:
    """Fills up to K masked slots behind the anchor with the backbone's own later layers."""

    name = "self-diffusion"

    def __init__(self, backbone: Backbone, adapter: DiffusionAdapter) -> None:
        """Keep the parts; the adapter is bound to the backbone."""
        self._backbone, self._adapter = backbone, adapter
        self.taps = adapter.config.taps
        self.max_draft_tokens = adapter.config.num_draft_tokens
        self.preferred_draft_tokens = adapter.config.preferred_draft_tokens or self.max_draft_tokens

    def draft(self, state: DraftState, plan: Plan) -> Proposal:
        """Propose K tokens per row: argmax where the row is greedy, else a draw and its law."""
        rows = state.rows
        logits = self._slot_logits(state, min(plan.num_draft_tokens, self.max_draft_tokens))
        count = logits.shape[1]
        lengths = (count,) * len(rows)
        if all(r.sampling.is_greedy and not r.sampling.has_penalties for r in rows):
            return Proposal(argmax(logits), lengths, num_forwards=1)
        drawn = [self._draw(row, logits[b]) for b, row in enumerate(rows)]
        tokens = torch.tensor([ids for ids, _ in drawn], device=logits.device)
        laws = torch.stack([law for _, law in drawn])
        return Proposal(tokens, lengths, draft_probs=laws, num_forwards=1)

    def observe(self, record: StepRecord) -> None:
        """Learn nothing: the draft depends on the model alone."""

    def reset(self) -> None:
        """Forget nothing: there is no state."""

    def _slot_logits(self, state: DraftState, num_draft_tokens: int) -> Tensor:
        """Run the draft pass. Returns [B, K, V]."""
        device, width = self._backbone.device, num_draft_tokens + 1
        anchors = torch.tensor([row.anchor for row in state.rows], device=device)
        is_masked = torch.arange(width, device=device) > 0
        # The anchor has no K/V yet: it stands at the first scratch position.
        starts = [row.cached_len for row in state.rows]
        positions = torch.tensor(starts, device=device)[:, None] + torch.arange(
            width, device=device
        )
        out = self._backbone.forward(
            None,
            positions,
            bidirectional(starts, width),
            state.cache,
            [row.row for row in state.rows],
            num_logits=width - 1,  # slot 0 holds the anchor; slot j predicts its own position
            entry=Entry(
                self._adapter.config.entry_layer,
                self._adapter.draft_input(anchors, state.hidden, is_masked),
                self._adapter,
            ),
        )
        assert out.logits is not None
        return out.logits

    def _draw(self, row: SequenceState, logits: Tensor) -> tuple[list[int], Tensor]:
        """Choose one row's tokens left to right, with the target's own transforms."""
        eos = self._backbone.eos_token_ids
        tokens: list[int] = []
        laws = []
        for slot in range(logits.shape[0]):
            # Penalties count the tokens drafted so far, as the target's will.
            processed = process_logits(
                logits[slot : slot + 1],
                row.sampling,
                [*row.tokens, *tokens],
                row.num_prompt_tokens,
                (),
                eos,
            )[0]
            if row.sampling.is_greedy:
                token = int(processed.argmax())
                law = torch.zeros_like(processed, dtype=torch.float32)
                law[token] = 1.0
            else:
                law = probs(processed)
                token = sample(law, row.generator)
            tokens.append(token)
            laws.append(law)
        return tokens, torch.stack(laws)
