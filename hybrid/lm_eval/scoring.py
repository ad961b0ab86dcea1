"""How likely a target finds given tokens: causal passes over a context and what may follow it.

The context is cached once. Each continuation runs behind it as a draft does in the decode step, the
context's last token in front, and is taken back. Next: hybrid/lm_eval/model.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hybrid.attention.pattern import causal
from hybrid.protocols import Backbone, Cache
from hybrid.types import Write


def log_likelihoods(
    backbone: Backbone, context: Sequence[int], continuations: Sequence[Sequence[int]]
) -> list[tuple[float, bool]]:
    """Return how likely each continuation of a context is.

    Args:
        backbone: the target.
        context: at least one token.
        continuations: of the same context, each by itself.

    Returns:
        Of each continuation the sum of its tokens' log-probabilities (nats), and whether greedy
        decoding would write it.
    """
    # A state that cannot be rolled back is made anew for every continuation.
    shared = context[:-1] if getattr(backbone, "supports_rollback", True) else context[:0]
    cache = backbone.new_cache(1, len(context) + max(map(len, continuations)))
    for _ in _passes(backbone, cache, shared, 0):
        pass
    found = [(0.0, True)] * len(continuations)
    for inputs, members in _by_inputs(continuations).items():
        if shared:
            cache.truncate(0, len(shared))
        else:
            cache.free(0)
        start = 0
        fed = [*context[len(shared) :], *inputs]
        for logits in _passes(backbone, cache, fed, len(inputs) + 1):
            log_probs = logits.float().log_softmax(dim=-1)
            for member in members:
                tokens = continuations[member][start : start + len(logits)]
                wanted = torch.tensor(tokens, dtype=torch.long, device=logits.device)
                rows = log_probs[: len(wanted)]
                total, is_greedy = found[member]
                total += float(rows.gather(1, wanted[:, None]).sum())
                found[member] = total, is_greedy and bool((rows.argmax(dim=1) == wanted).all())
            start += len(logits)
    return found


def _by_inputs(continuations: Sequence[Sequence[int]]) -> dict[tuple[int, ...], list[int]]:
    """Return which continuations are fed alike: their last tokens are judged, and not fed."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, tokens in enumerate(continuations):
        groups.setdefault(tuple(tokens[:-1]), []).append(index)
    return groups


def _passes(
    backbone: Backbone, cache: Cache, tokens: Sequence[int], num_logits: int
) -> Iterator[Tensor]:
    """Commit tokens to row 0 of the cache, chunk by chunk.

    Yields:
        Logits [n, V] of the last `num_logits` tokens of each chunk, or of all that it has.
    """
    size = backbone.prefill_chunk
    for first in range(0, len(tokens), size):
        chunk = torch.tensor([tokens[first : first + size]], device=backbone.device)
        start = cache.lengths[0]
        out = backbone.forward(
            chunk,
            torch.arange(start, start + chunk.shape[1], device=chunk.device)[None],
            causal([start], chunk.shape[1]),
            cache,
            [0],
            write=Write.COMMIT,
            num_logits=min(num_logits, chunk.shape[1]),
        )
        if out.logits is not None:
            yield out.logits[0]
