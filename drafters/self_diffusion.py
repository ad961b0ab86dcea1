"""Self-diffusion: the target drafts for itself, in one bidirectional pass over masked slots.

The pass enters late, reads the same cache as the AR mode, and writes its K/V to scratch positions
that the verify pass overwrites. Related: arXiv:2507.11851 (gated LoRA on mask tokens).
Next: verifiers/rejection.py.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        """Propose K tokens per row: argmax where the row is greedy, else a draw and its law.

        One pass fills all slots; then tokens are chosen left to right, because a slot may ask
        which tokens were chosen before it.
        """
        rows = state.rows
        count = min(plan.num_draft_tokens, self.max_draft_tokens)
        slots = self._slots(state, count)  # [B, K, C]
        head, device = self._adapter.head, self._backbone.device
        before = torch.tensor([row.tokens[-1:-3:-1] for row in rows], device=device)  # [B, 2]
        is_plain = all(r.sampling.is_greedy and not r.sampling.has_penalties for r in rows)
        chosen, laws = [], []
        for slot in range(count):
            logits = head.logits(slots[:, slot], before)
            if is_plain:
                tokens = head.token_ids(argmax(logits))
            else:
                drafted = [[int(t[b]) for t in chosen] for b in range(len(rows))]
                tokens, law = self._draw(rows, drafted, head.over_vocabulary(logits))
                laws.append(law)
            chosen.append(tokens)
            before = torch.stack([tokens, before[:, 0]], dim=1)
        return Proposal(
            torch.stack(chosen, dim=1),
            (count,) * len(rows),
            draft_probs=None if is_plain else torch.stack(laws, dim=1),
            num_forwards=1,
        )

    def observe(self, record: StepRecord) -> None:
        """Learn nothing: the draft depends on the model alone."""

    def reset(self) -> None:
        """Forget nothing: there is no state."""

    def _slots(self, state: DraftState, num_draft_tokens: int) -> Tensor:
        """Run the draft pass. Returns the masked slots' last hidden states [B, K, C]."""
        backbone, width = self._backbone, num_draft_tokens + 1
        device, last = backbone.device, backbone.num_layers - 1
        anchors = torch.tensor([row.anchor for row in state.rows], device=device)
        is_masked = torch.arange(width, device=device) > 0
        # The anchor has no K/V yet: it stands at the first scratch position.
        starts = [row.cached_len for row in state.rows]
        positions = torch.tensor(starts, device=device)[:, None] + torch.arange(
            width, device=device
        )
        out = backbone.forward(
            None,
            positions,
            bidirectional(starts, width),
            state.cache,
            [row.row for row in state.rows],
            num_logits=0,
            taps=(last,),
            entry=Entry(
                self._adapter.config.entry_layer,
                self._adapter.draft_input(anchors, state.hidden, is_masked),
                self._adapter,
            ),
        )
        return out.hidden[last][:, 1:]  # slot 0 holds the anchor; slot j predicts its own position

    def _draw(
        self, rows: Sequence[SequenceState], drafted: Sequence[Sequence[int]], logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Choose a token [B] for each row with the target's own transforms; also the laws [B, V].

        Args:
            rows: the active rows.
            drafted: tokens chosen so far; penalties count them, as the target's will.
            logits: [B, V] of the slot.
        """
        tokens, laws = [], []
        for b, row in enumerate(rows):
            processed = process_logits(
                logits[b : b + 1],
                row.sampling,
                [*row.tokens, *drafted[b]],
                row.num_prompt_tokens,
                (),
                self._backbone.eos_token_ids,
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
        return torch.tensor(tokens, device=logits.device), torch.stack(laws)
