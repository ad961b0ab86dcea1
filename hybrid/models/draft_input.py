"""What stands in the rows of a draft pass, and how it enters the model.

Rows are token ids, the anchor first; `MASKED` is a slot about which nothing is known. It is no id,
so a prompt may hold any id of the vocabulary, the mask token among them.
Next: drafters/self_diffusion.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.models.draft_head import unit_norm
from hybrid.models.linear import Linear

MASKED = -1


@dataclass(frozen=True, slots=True)
class TokenInput:
    """Rows enter layer 0 as tokens.

    Attributes:
        embedding: [V, C] of the target.
        mask_token_id: stands in a masked slot; None where no slot is ever masked.
    """

    embedding: Tensor
    mask_token_id: int | None

    def __call__(self, rows: Tensor, hidden: Mapping[int, Tensor]) -> Tensor:
        """Return [B, T, C] for rows [B, T]; `hidden` does not matter."""
        if self.mask_token_id is not None:
            rows = rows.masked_fill(rows == MASKED, self.mask_token_id)
        return F.embedding(rows, self.embedding)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that are not the target's."""
        return 0


@dataclass(frozen=True, slots=True)
class LateInput:
    """Rows enter a later layer, beginning with what the anchor's predecessor had there.

    u_j = h + s_j + P [norm(emb(anchor)); e_j] + Q [norm(f_1); ...], with h and f hidden states of
    the predecessor, and e_j the embedding of the row's token, or the learned mask vector where the
    slot is masked, plus s_j.

    Attributes:
        embedding: [V, C] of the target.
        entry: layer whose output is h.
        feature_layers: layers whose outputs are f.
        slots: [K + 1, C], s.
        mask: [C], the embedding of a masked slot.
        project: [2 C] -> [C], P.
        features: [F C] -> [C], Q.
    """

    embedding: Tensor
    entry: int
    feature_layers: Sequence[int]
    slots: Tensor
    mask: Tensor
    project: Linear
    features: Linear

    def __call__(self, rows: Tensor, hidden: Mapping[int, Tensor]) -> Tensor:
        """Return [B, T, C].

        Args:
            rows: [B, T] ids or `MASKED`, T <= K + 1.
            hidden: {layer: [B, C]} of the anchors' predecessors.
        """
        tokens = F.embedding(rows.clamp(min=0), self.embedding)  # [B, T, C]
        slots = self.slots[: rows.shape[1]]
        own = torch.where((rows == MASKED)[..., None], self.mask, tokens) + slots
        seen = unit_norm(tokens[:, 0])[:, None].expand_as(own)
        features = torch.cat([unit_norm(hidden[n]) for n in self.feature_layers], dim=-1)
        base = hidden[self.entry] + self.features(features)
        joined = torch.cat([seen, own], dim=-1)
        return base[:, None] + slots + self.project(joined.flatten(0, 1)).view_as(own)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that are not the target's."""
        own = sum(t.numel() * t.itemsize for t in (self.slots, self.mask))
        return own + self.project.nbytes + self.features.nbytes


def noise(seed: int, position: int, count: int, vocab_size: int) -> list[int]:
    """Return the random tokens of a draft whose anchor stands at `position`.

    They follow from the arguments alone: a draft can be repeated, whatever is decoded beside it.
    """
    draw = torch.Generator().manual_seed((seed * 1_000_003 + position) % 2**63)
    return torch.randint(vocab_size, (count,), generator=draw).tolist()


def reveal_sure(
    logits: Tensor, vocabulary: Tensor | None, known: Tensor, threshold: float
) -> Tensor:
    """Fill in the slots whose most probable token reaches `threshold`, at least the surest.

    A row that this would complete stays as it is: its last tokens are not told to a pass, they are
    the draft's.

    Args:
        logits: [B, K, V'] of the slots.
        vocabulary: see `reveal`.
        known: [B, K] ids or `MASKED`, a masked slot in each row.
        threshold: a probability.

    Returns:
        [B, K].
    """
    best, tokens = _surest(logits, vocabulary)
    is_masked = known == MASKED
    best = best.masked_fill(~is_masked, -1.0)
    is_sure = (best >= threshold) & is_masked
    is_sure.scatter_(1, best.argmax(dim=1, keepdim=True), True)
    completes = (is_sure == is_masked).all(dim=1, keepdim=True)
    return torch.where(is_sure & ~completes, tokens, known)


def reveal(logits: Tensor, vocabulary: Tensor | None, known: Tensor, num_known: int) -> Tensor:
    """Fill in the slots whose most probable token is the surest, until `num_known` are known.

    Args:
        logits: [B, K, V'] of the slots.
        vocabulary: [V'] ids of their columns; None when they are the vocabulary.
        known: [B, K] ids or `MASKED`. What is known stays.
        num_known: per row.

    Returns:
        [B, K].
    """
    best, tokens = _surest(logits, vocabulary)
    is_known = known != MASKED
    surest = best.masked_fill(is_known, 2.0).topk(num_known, dim=1).indices
    tokens = torch.where(is_known, known, tokens)
    return torch.full_like(known, MASKED).scatter(1, surest, tokens.gather(1, surest))


def _surest(logits: Tensor, vocabulary: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the probability and the id of each slot's most probable token, [B, K] both."""
    best, column = logits.float().softmax(dim=-1).max(dim=-1)
    return best, column if vocabulary is None else vocabulary[column]
