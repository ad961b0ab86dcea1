"""From logits to a token: penalties, temperature, truncation, one draw.

Knows tensors and `SamplingParams`; knows no model, no cache, no verifier. Every row is computed by
itself, so row i of a verify pass holds the same numbers as the same row alone. Random draws come
from a CPU generator and the choice is made on the CPU in float64: the device never decides.
Next: verifiers/rejection.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hybrid.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from hybrid.params import SamplingParams

# The nucleus is nearly always this small; only a wider one pays for sorting the vocabulary.
_NUCLEUS_GUESS = 1024


def process_logits(
    logits: Tensor,
    params: SamplingParams,
    history: Sequence[int],
    num_prompt_tokens: int,
    drafted: Sequence[int] = (),
    eos_token_ids: Sequence[int] = (),
) -> Tensor:
    """Apply the request's transforms; softmax of the result is the distribution to sample.

    Order: repetition, presence and frequency penalty; `min_new_tokens`; then, unless greedy,
    temperature, top_k, top_p, min_p, each on what the one before it left. Dropped tokens become
    -inf, at least one stays, and among equal logits the lower id stays. A temperature also shifts
    each row so that its largest logit is 0, which changes no probability and lets no temperature,
    however low, overflow.

    Args:
        logits: [R, V], any float dtype; row i is for the token after `history + drafted[:i]`.
        params: the request's parameters.
        history: prompt and generated tokens.
        num_prompt_tokens: how many of `history` are the prompt.
        drafted: at least R-1 tokens that follow `history`.
        eos_token_ids: the checkpoint's ids that end an answer.

    Returns:
        [R, V] float32; `logits` itself, in its own dtype, when the request is greedy and nothing
        else applies.
    """
    num_generated = len(history) - num_prompt_tokens
    num_barred = min(max(params.min_new_tokens - num_generated, 0), logits.shape[0])
    if params.is_greedy and not params.has_penalties and not num_barred:
        return logits
    logits = logits.to(torch.float32)
    if params.has_penalties:
        logits = _penalise(logits, params, history, num_prompt_tokens, drafted)
    if num_barred:
        eos = () if params.ignore_eos else tuple(eos_token_ids)
        barred = [t for t in {*params.stop_token_ids, *eos} if t < logits.shape[1]]
        logits = logits.clone()
        logits[:num_barred, barred] = -math.inf
    return logits if params.is_greedy else _temper_and_truncate(logits, params)


def _penalise(
    logits: Tensor,
    params: SamplingParams,
    history: Sequence[int],
    num_prompt_tokens: int,
    drafted: Sequence[int],
) -> Tensor:
    num_rows, vocab_size = logits.shape
    seen = torch.zeros(vocab_size, dtype=torch.bool)
    seen[list(history)] = True
    generated = torch.tensor(history[num_prompt_tokens:], dtype=torch.long)
    counts = torch.bincount(generated, minlength=vocab_size)
    seen, counts = seen.to(logits.device), counts.to(logits.device)
    rows = []
    for i in range(num_rows):
        if i > 0:
            seen[drafted[i - 1]] = True
            counts[drafted[i - 1]] += 1
        row, penalty = logits[i], params.repetition_penalty
        row = torch.where(seen, torch.where(row > 0, row / penalty, row * penalty), row)
        row = row - params.presence_penalty * (counts > 0) - params.frequency_penalty * counts
        rows.append(row)
    return torch.stack(rows)


def _temper_and_truncate(logits: Tensor, params: SamplingParams) -> Tensor:
    temperature = max(params.temperature, torch.finfo(torch.float32).tiny)
    logits = (logits - logits.amax(dim=1, keepdim=True)) / temperature
    if 0 < params.top_k < logits.shape[1]:
        ranked = logits.topk(params.top_k).values
        counts = torch.full_like(ranked[:, :1], params.top_k, dtype=torch.long)
        logits = logits.masked_fill(~_largest(logits, ranked, counts), -math.inf)
    if params.top_p < 1:
        logits = logits.masked_fill(~_nucleus(logits, params.top_p), -math.inf)
    if params.min_p > 0:  # the largest logit is 0, so min_p times its probability is log(min_p)
        logits = logits.masked_fill(logits < math.log(params.min_p), -math.inf)
    return logits


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Return [R, V] bool: the smallest set of most probable tokens that reaches `top_p`."""
    log_probs = torch.log_softmax(logits, dim=1)
    vocab_size = logits.shape[1]
    for width in (min(_NUCLEUS_GUESS, vocab_size), vocab_size):
        ranked = log_probs.topk(width).values
        reached = ranked.double().exp().cumsum(dim=1)
        if bool((reached[:, -1] >= top_p).all()):
            break
    counts = (reached[:, :-1] < top_p).sum(dim=1, keepdim=True) + 1
    return _largest(log_probs, ranked, counts)


def _largest(values: Tensor, ranked: Tensor, counts: Tensor) -> Tensor:
    """Return [R, V] bool with the `counts` [R, 1] largest values of each row, ties to the lower id.

    `ranked` [R, M] holds each row's largest values in descending order, M >= counts.
    """
    threshold = ranked.gather(1, counts - 1)
    keep = values >= threshold
    if bool((keep.sum(dim=1, keepdim=True) == counts).all()):
        return keep
    above, ties = values > threshold, values == threshold
    room = counts - above.sum(dim=1, keepdim=True)
    return above | (ties & (ties.cumsum(dim=1) <= room))


def argmax(logits: Tensor) -> Tensor:
    """Return the most probable token [...] of logits [..., V], ties to the lowest id."""
    # torch's argmax of a short float is five times slower on a CPU than the cast and float32's.
    return (logits.float() if logits.dtype.itemsize < 4 else logits).argmax(dim=-1)


def probs(processed: Tensor) -> Tensor:
    """Return the float32 distribution [..., V] of processed logits [..., V]."""
    return torch.softmax(processed, dim=-1, dtype=torch.float32)


def uniform(generator: torch.Generator) -> float:
    """Draw one number in [0, 1), a multiple of 2**-53, from a CPU generator."""
    return torch.rand((), generator=generator, dtype=torch.float64).item()


def inverse_cdf(weights: Tensor, u: float) -> int:
    """Return the token at quantile `u` in [0, 1) of `weights`; never one whose weight is 0.

    Args:
        weights: [V] non-negative, need not add up to 1.
        u: the quantile.

    Raises:
        ConfigError: the weights do not add up to a positive, finite number.
    """
    cdf = weights.to("cpu", torch.float64).cumsum(dim=0)
    total = cdf[-1].item()
    if not 0 < total < math.inf:
        raise ConfigError(
            f"Token probabilities: got a sum of {total}, expected a positive number. The model's "
            "logits hold NaN or exclude every token; try dtype='float32' or check the checkpoint."
        )
    # The first entry above the quantile: a token of weight 0 equals its predecessor's entry.
    return int(torch.searchsorted(cdf, u * total, right=True))


def sample(probs: Tensor, generator: torch.Generator) -> int:
    """Draw a token from `probs` [V] with one uniform number of the CPU generator.

    Raises:
        ConfigError: as `inverse_cdf`.
    """
    return inverse_cdf(probs, uniform(generator))


def token_logprobs(
    logits: Tensor, tokens: Sequence[int], top_n: int
) -> tuple[tuple[float, ...], tuple[dict[int, float], ...]]:
    """Return log-probabilities (nats) under the unmodified target distribution.

    Args:
        logits: [R, V] before any transform.
        tokens: R chosen ids.
        top_n: how many of the most probable tokens to report per row; 0 gives empty dicts.

    Returns:
        One log-probability per token, and per token {id: log-probability}, most probable first.
    """
    log_probs = torch.log_softmax(logits.to(torch.float32), dim=1)
    index = torch.tensor(tokens, dtype=torch.long, device=logits.device).unsqueeze(1)
    chosen = tuple(log_probs.gather(1, index).squeeze(1).tolist())
    top_n = min(top_n, logits.shape[1])
    if top_n == 0:
        return chosen, tuple({} for _ in chosen)
    ranked = log_probs.topk(top_n).values
    keep = _largest(log_probs, ranked, torch.full_like(index, top_n))
    ids = keep.nonzero()[:, 1].view(-1, top_n)
    values, order = log_probs.gather(1, ids).sort(dim=1, descending=True, stable=True)
    rows = zip(ids.gather(1, order).tolist(), values.tolist(), strict=True)
    return chosen, tuple(dict(zip(i, v, strict=True)) for i, v in rows)
