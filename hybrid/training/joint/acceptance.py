"""How many drafted tokens a model accepts from itself, measured on given sequences.

Next: hybrid/training/joint/recipe.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid.training.masks import anchored_drafts
from hybrid.training.trainable import Trainable

_ANCHORS_PER_PASS = 16  # bounds the logits: anchors * block * vocabulary


@torch.no_grad()
def accepted_slots(
    trainable: Trainable, tokens: Tensor, anchors: Tensor, block_size: int, mask_token_id: int
) -> Tensor:
    """Draft one block behind each anchor, in one greedy pass, and verify it by the same weights.

    Args:
        trainable: drafts bidirectionally over a causal prefix, and verifies causally.
        tokens: [N] a clean sequence.
        anchors: [A] positions in it.
        block_size: the anchor and block_size - 1 masked slots.
        mask_token_id: input of a slot; never drafted.

    Returns:
        [A, block_size - 1] boolean: the causal pass, behind the drafted tokens before a slot, says
        the token that was drafted there. Decoding accepts the leading run.
    """
    parts = [
        _accepted(trainable, tokens, some, block_size, mask_token_id)
        for some in torch.split(anchors, _ANCHORS_PER_PASS)
    ]
    return torch.cat(parts)


def _accepted(
    trainable: Trainable, tokens: Tensor, anchors: Tensor, width: int, mask_token_id: int
) -> Tensor:
    index = torch.arange(len(tokens), device=tokens.device)
    slots = torch.arange(width, device=tokens.device)
    positions = torch.cat([index, (anchors[:, None] + slots).flatten()])
    keep = torch.arange(len(tokens), len(positions), device=tokens.device)

    def run(blocks: Tensor, *, bidirectional: bool) -> Tensor:
        mask = anchored_drafts(len(tokens), anchors, width, bidirectional=bidirectional)
        ids = torch.cat([tokens, blocks.flatten()])[None]
        return trainable(ids, positions, mask, keep)[0].unflatten(0, blocks.shape)

    blocks = tokens.new_full((len(anchors), width), mask_token_id)
    blocks[:, 0] = tokens[anchors]
    logits = run(blocks, bidirectional=True)
    logits[..., mask_token_id] = float("-inf")
    blocks[:, 1:] = logits[:, 1:].argmax(dim=-1)
    verified = run(blocks, bidirectional=False).argmax(dim=-1)
    return verified[:, :-1] == blocks[:, 1:]
