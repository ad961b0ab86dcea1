"""`JointModule`: the loss of one pass over `[noisy | clean]`. Next: acceptance.py beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid.training import masks
from hybrid.training.trainable import Trainable


@dataclass(frozen=True, slots=True)
class JointBatch:
    """One sequence and its noise.

    Attributes:
        tokens: [N].
        blocks: [N], see `hybrid.training.masks.block_ids`.
        first: index of the first token that is learned; at least 1.
        masked: [R, N] which tokens each of R noisy copies hides; none before `first`.
        share: [R, N] the probability with which each was to be hidden.
        num_tokens: what the sums are divided by, see `JointModule`.
    """

    tokens: Tensor
    blocks: Tensor
    first: int
    masked: Tensor
    share: Tensor
    num_tokens: float


class JointModule(nn.Module):
    """alpha * diffusion loss + autoregressive loss, of one sequence.

    Both are sums over the sequence's learned tokens, divided by the mean number of learned tokens
    of the step's sequences. The mean over the step's micro-batches, which the loop takes, is then
    the mean over all tokens of the step: long sequences count for more, each token the same.
    """

    def __init__(self, trainable: Trainable, mask_token_id: int, alpha: float) -> None:
        """Take the model that is trained."""
        super().__init__()
        self.trainable, self.mask_token_id, self.alpha = trainable, mask_token_id, alpha

    def forward(self, batch: JointBatch) -> dict[str, Tensor]:
        """Return "loss" and its parts, "ar_loss" and "diffusion_loss"."""
        device = self.trainable.device
        tokens, masked = batch.tokens.to(device), batch.masked.to(device)
        copies, length = masked.shape
        noisy = tokens.expand(copies, -1).masked_fill(masked, self.mask_token_id)
        ids = torch.cat([noisy, tokens.expand(copies, -1)], dim=1)
        index = torch.arange(length, device=device)
        # The noisy half predicts its own positions, the clean half the next ones.
        hidden = masked.any(dim=0).nonzero()[:, 0]
        keep = torch.cat([hidden, length + index[batch.first - 1 : -1]])
        mask = masks.noisy_clean(batch.blocks.to(device))
        logits = self.trainable(ids, index.repeat(2), mask, keep)
        filled, following = logits.split([len(hidden), length - batch.first], dim=1)
        fills = _losses(filled, tokens[hidden])
        weights = (masked / batch.share.to(device))[:, hidden].to(fills.dtype)
        divisor = copies * batch.num_tokens
        diffusion = (fills * weights).sum() / divisor
        autoregressive = _losses(following, tokens[batch.first :]).sum() / divisor
        return {
            "loss": self.alpha * diffusion + autoregressive,
            "ar_loss": autoregressive.detach(),
            "diffusion_loss": diffusion.detach(),
        }


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropies [R, T] of logits [R, T, V] with targets [T]."""
    if logits.dtype != torch.float64:
        logits = logits.float()
    targets = targets.expand(len(logits), -1)
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
