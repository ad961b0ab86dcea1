"""`DraftHead`: how a draft pass turns a slot's last hidden state into a choice of token.

Final norm, then the rows of the output head that the draft chooses among: a draft over the 10,000
most frequent tokens reads a fifth of the head and loses almost no acceptance. A sampler head tells
each slot which tokens were chosen before it (arXiv:2507.11851): what a parallel pass cannot know.
Next: drafters/self_diffusion.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.models.linear import Linear


@dataclass(frozen=True, slots=True)
class SamplerHead:
    """s = h + W_down SwiGLU(W_gate_up [norm(h); norm(e_1); norm(e_2)]).

    e_1 and e_2 are the embeddings of the tokens one and two places back.
    """

    gate_up: Linear
    down: Linear

    def __call__(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Return [N, C] for states [N, C] and embeddings [N, 2, C], the nearer token first."""
        joined = torch.cat([unit_norm(hidden), unit_norm(before).flatten(1)], dim=-1)
        gate, up = self.gate_up(joined).chunk(2, dim=-1)
        return hidden + self.down(F.silu(gate).mul_(up))


@dataclass(frozen=True, slots=True)
class DraftHead:
    """What follows the last layer of a draft pass.

    Attributes:
        norm: [C] weight of the final norm.
        norm_eps: of it.
        output: [C] -> [V'].
        embedding: [V, C] of the target.
        vocabulary: [V'] ids of the output's rows, ascending; None when they are the vocabulary.
        sampler: None when the slots are independent.
        barred: row of the output that is never drafted, the mask token's.
    """

    norm: Tensor
    norm_eps: float
    output: Linear
    embedding: Tensor
    vocabulary: Tensor | None
    sampler: SamplerHead | None
    barred: int | None = None

    def logits(self, hidden: Tensor, before: Tensor | None) -> Tensor:
        """Return [N, V'] scores of each slot's tokens.

        Args:
            hidden: [N, C] states after the last layer.
            before: [N, 2] ids of the tokens before each slot, the nearer one first; None where
                there is no sampler head to ask for them.
        """
        if self.sampler is not None:
            assert before is not None
            hidden = self.sampler(hidden, F.embedding(before, self.embedding))
        logits = self.output(F.rms_norm(hidden, hidden.shape[-1:], self.norm, self.norm_eps))
        if self.barred is not None:
            logits[:, self.barred] = float("-inf")
        return logits

    def token_ids(self, index: Tensor) -> Tensor:
        """Return the ids of rows of the output."""
        return index if self.vocabulary is None else self.vocabulary[index]

    def over_vocabulary(self, logits: Tensor) -> Tensor:
        """Return [N, V] from [N, V']: a token that the draft cannot choose gets -inf."""
        if self.vocabulary is None:
            return logits
        full = logits.new_full((len(logits), len(self.embedding)), float("-inf"))
        return full.index_copy_(1, self.vocabulary, logits)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that are not the target's, the norm apart."""
        parts = [] if self.vocabulary is None else [self.output]
        parts += [] if self.sampler is None else [self.sampler.gate_up, self.sampler.down]
        ids = 0 if self.vocabulary is None else self.vocabulary.numel() * 8
        return sum(part.nbytes for part in parts) + ids


def unit_norm(x: Tensor) -> Tensor:
    """RMS norm without a weight: features of different layers come to one scale."""
    return F.rms_norm(x, (x.shape[-1],), None, 1e-6)
