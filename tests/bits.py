"""Logits of a decoder's causal passes, and whether those of one position have the same bits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Positions = dict[tuple[int, int], list[Tensor]]


@dataclass(frozen=True)
class CausalPass:
    """What one row was given: tokens from `start` on, and logits [n, V] of the last n of them."""

    row: int
    start: int
    tokens: list[int]
    logits: Tensor


@contextmanager
def recorded(backbone: Any) -> Iterator[list[CausalPass]]:
    """Collect the passes over text: prefill, AR steps, verification, with or without slots."""
    forward, passes = backbone.forward, []

    def record(
        input_ids: Any, position_ids: Any, pattern: Any, cache: Any, rows: Any, **kwargs: Any
    ) -> Any:
        starts = [cache.lengths[row] for row in rows]
        out = forward(input_ids, position_ids, pattern, cache, rows, **kwargs)
        if kwargs.get("entry") is None and pattern.is_causal and out.logits is not None:
            assert kwargs.get("logits_at") is None
            given = zip(rows, starts, input_ids.tolist(), out.logits.clone(), strict=True)
            passes.extend(CausalPass(*one) for one in given)
        return out

    backbone.forward = record
    try:
        yield passes
    finally:
        del backbone.forward


def decode_alone(
    model: Any, prompts: Sequence[Sequence[int]], **params: Any
) -> tuple[list[list[int]], Positions]:
    """Decode each prompt by itself with `ar`; return texts, and logits by prompt and position."""
    texts, logits = [], {}
    for row, prompt in enumerate(prompts):
        with recorded(model.backbone) as passes:
            answer = model.generate(prompt, strategy="ar", **params).token_ids
        texts.append([*prompt, *answer])
        found = by_position(passes, [texts[-1]])
        logits |= {(row, at): own for (_, at), own in found.items()}
    return texts, logits


def decode_together(
    model: Any,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    logits: Positions,
    **params: Any,
) -> tuple[int, set[int]]:
    """Decode the same as one batch, with drafts.

    Returns:
        At how many positions logits have other bits, and how wide the passes were that verified.
    """
    with recorded(model.backbone) as passes:
        results = model.generate(prompts, **params)
    num_differing = differing(by_position(passes, texts), logits)
    if num_differing == 0:
        answers = [[*p, *r.token_ids] for p, r in zip(prompts, results, strict=True)]
        assert answers == texts
    return num_differing, {len(one.tokens) for one in passes if len(one.logits) > 1}


def by_position(passes: Sequence[CausalPass], texts: Sequence[Sequence[int]]) -> Positions:
    """Return {(row, position): all logits [V] that were computed there behind the row's text}."""
    found: Positions = defaultdict(list)
    for one in passes:
        first = len(one.tokens) - len(one.logits)
        for index, token in enumerate(one.tokens):
            at = one.start + index
            if at >= len(texts[one.row]) or texts[one.row][at] != token:
                break  # a drafted token that was rejected
            if index >= first:
                found[one.row, at].append(one.logits[index - first])
    return found


def differing(ours: Positions, theirs: Positions) -> int:
    """Return at how many positions some logits of `ours` are not those of `theirs`, bit for bit."""
    assert theirs.keys() <= ours.keys()  # a draft may reach beyond the end of an answer
    return sum(
        not all(torch.equal(own, other) for own in ours[at] for other in found)
        for at, found in theirs.items()
    )
