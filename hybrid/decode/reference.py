"""Slow plain greedy decoding, the oracle that tests compare every strategy with.

Each token runs the whole sequence afresh: nothing cached, nothing drafted, no stop rule but EOS.
Next: hybrid/decode/step.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybrid.attention.pattern import causal
from hybrid.protocols import Backbone


def reference_greedy(
    backbone: Backbone,
    prompt: Sequence[int],
    max_new_tokens: int,
    eos_token_ids: Sequence[int] = (),
) -> list[int]:
    """Return the new tokens of greedy AR decoding, the EOS included."""
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        tokens.append(int(reference_logits(backbone, tokens)[-1].argmax()))
        if tokens[-1] in eos_token_ids:
            break
    return tokens[len(prompt) :]


def reference_logits(backbone: Backbone, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits of one fresh causal pass, [T, V]."""
    inputs = torch.tensor([list(tokens)], device=backbone.device)
    positions = torch.arange(len(tokens), device=backbone.device)[None]
    pattern, cache = causal([0], len(tokens)), backbone.new_cache(1, len(tokens))
    logits = backbone.forward(inputs, positions, pattern, cache, [0]).logits
    assert logits is not None
    return logits[0]
