"""`DraftLoss`: how far the slots of draft passes are from the tokens that really follow.

Next: hybrid/training/self_diffusion/recipe.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid.models.draft_input import MASKED
from hybrid.training.self_diffusion.context import TargetContext
from hybrid.training.self_diffusion.draft_model import DraftModel


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """Draft passes behind anchors of one sequence.

    Attributes:
        context: the sequence.
        anchors: [N] positions in it, ascending.
        num_draft_tokens: K', tokens drafted behind each.
        shown: [N, T - 1] what stands in the rows behind the anchor's, ids or `MASKED`; None masks
            all of them.
    """

    context: TargetContext
    anchors: Tensor
    num_draft_tokens: int
    shown: Tensor | None = None


class DraftLoss(nn.Module):
    """The loss of a draft model's slots, over the tokens that the draft chooses among."""

    def __init__(
        self, model: DraftModel, vocabulary: Tensor, *, decay: float, distillation: float = 0.0
    ) -> None:
        """Keep the parts.

        Args:
            model: its parameters are trained.
            vocabulary: [V'] ids, ascending.
            decay: slot j weighs exp(-(j - 1) / decay).
            distillation: share of the cross-entropy with the target's distribution.
        """
        super().__init__()
        self.model, self.vocabulary = model, vocabulary
        self.head = model.head[vocabulary]  # [V', C]
        self.decay, self.distillation = decay, distillation

    def forward(self, batch: DraftBatch) -> dict[str, Tensor]:
        """Return the mean "loss" of the slots.

        Slots beyond the end of the sequence count nothing, nor does the cross-entropy with a token
        that the draft cannot choose, nor a slot that is not drafted: one whose token is shown, or
        that the base weights fill.
        """
        count, shown = batch.num_draft_tokens, batch.shown
        logits = self.model(batch.context, batch.anchors, self.head, count, shown)
        logits = logits.float()  # [N, K', V']
        targets, exists = slot_targets(batch.context, batch.anchors, count)
        slots = torch.arange(count, device=logits.device)
        if shown is not None:
            is_uniform = self.model.config.corruption == "uniform"
            exists = exists & (slots > 0 if is_uniform else shown == MASKED)
        classes = torch.searchsorted(self.vocabulary, targets).clamp(max=len(self.vocabulary) - 1)
        known = exists & (self.vocabulary[classes] == targets)
        losses = F.cross_entropy(logits.flatten(0, 1), classes.flatten(), reduction="none")
        losses = losses.view_as(targets) * known * (1 - self.distillation)
        if self.distillation > 0:
            soft = -(self._target_law(batch) * F.log_softmax(logits, dim=-1)).sum(dim=-1)
            losses = losses + soft * exists * self.distillation
        weights = torch.exp(-slots / self.decay)
        total = (weights * exists).sum().clamp(min=torch.finfo(weights.dtype).tiny)
        return {"loss": (losses * weights).sum() / total}

    def _target_law(self, batch: DraftBatch) -> Tensor:
        """Return the target's distribution [N, K', V'] over the draft's vocabulary at each slot."""
        context, backbone = batch.context, self.model.backbone
        # One row per position, then one per slot: slots of several anchors share positions.
        first = context.first_anchor - 1
        last = context.hidden[backbone.num_layers - 1][first:]
        law = F.linear(backbone.rms_norm(last, backbone.norm), self.head).float().softmax(dim=-1)
        slots = torch.arange(batch.num_draft_tokens, device=batch.anchors.device)
        before = (batch.anchors[:, None] + slots).clamp(max=len(context.tokens) - 1)
        return law[before - first]


def slot_targets(context: TargetContext, anchors: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the tokens [N, K] that follow each anchor, and which of them exist."""
    index = anchors[:, None] + torch.arange(1, count + 1, device=anchors.device)
    exists = index < len(context.tokens)
    return context.tokens[index.clamp(max=len(context.tokens) - 1)], exists
