"""From logits to a token: penalties, temperature, truncation, one draw.

Knows tensors and `SamplingParams`; knows no model, no cache, no verifier. Every row is computed by
itself, so row i of a verify pass holds the same numbers as the same row alone. Random numbers are
those of each row's stream. A choice is made on the CPU in float64, or by kernels where the logits
are, with nothing read back: hybrid/transfer.py says which.
Next: verifiers/rejection.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hybrid.errors import ConfigError
from hybrid.kernels.logits_stats import logits_stats
from hybrid.kernels.philox import philox
from hybrid.kernels.sample import sample as sample_kernel
from hybrid.kernels.sample import truncate
from hybrid.transfer import decides_on_device, send
from hybrid.types import CERTAINTY

if TYPE_CHECKING:
    from torch import Tensor

    from hybrid.params import SamplingParams
    from hybrid.streams import RandomStream

# The nucleus is nearly always this small; only a wider one pays for sorting the vocabulary.
_NUCLEUS_GUESS = 1024


def process_logits(
    logits: Tensor,
    params: SamplingParams,
    history: Sequence[int],
    num_prompt_tokens: int,
    drafted: Sequence[int] | Tensor = (),
    eos_token_ids: Sequence[int] = (),
    *,
    first: int = 0,
) -> Tensor:
    """Apply the request's transforms; softmax of the result is the distribution to sample.

    Order: repetition, presence and frequency penalty; `min_new_tokens`; then, unless greedy,
    temperature, top_k, top_p, min_p, each on what the one before it left. Dropped tokens become
    -inf, at least one stays, and among equal logits the lower id stays. A temperature also shifts
    each row so that its largest logit is 0, which changes no probability and lets no temperature,
    however low, overflow.

    Args:
        logits: [R, V], any float dtype; row i is for the token after `history` and the first
            `first + i` drafted tokens.
        params: the request's parameters.
        history: prompt and generated tokens.
        num_prompt_tokens: how many of `history` are the prompt.
        drafted: at least `first` + R - 1 tokens that follow `history`, on any device.
        eos_token_ids: the checkpoint's ids that end an answer.
        first: how many drafted tokens come before row 0.

    Returns:
        [R, V] float32; `logits` itself, in its own dtype, when the request is greedy and nothing
        else applies.
    """
    num_generated = len(history) - num_prompt_tokens + first
    num_barred = min(max(params.min_new_tokens - num_generated, 0), logits.shape[0])
    if params.is_greedy and not params.has_penalties and not num_barred:
        return logits
    logits = logits.to(torch.float32)
    if params.has_penalties:
        generated = history[num_prompt_tokens:]
        logits = _penalise(logits, params, history[:num_prompt_tokens], generated, drafted, first)
    if num_barred:
        eos = () if params.ignore_eos else tuple(eos_token_ids)
        barred = [t for t in {*params.stop_token_ids, *eos} if t < logits.shape[1]]
        logits = logits.clone()
        logits[:num_barred].index_fill_(1, send(barred, logits.device), -math.inf)
    return logits if params.is_greedy else _temper_and_truncate(logits, params)


def _penalise(
    logits: Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    generated: Sequence[int],
    drafted: Sequence[int] | Tensor,
    first: int,
) -> Tensor:
    num_rows, device = len(logits), logits.device
    drafted = drafted if isinstance(drafted, torch.Tensor) else send(drafted, device)
    drafted = drafted.to(device, torch.long, non_blocking=True)
    # How often each token was generated before each row [R, V]: in float32, exact as integers are.
    counts = torch.zeros_like(logits)
    ids = torch.cat([send(generated, device), drafted[:first]])
    counts[0].index_add_(0, ids, torch.ones_like(ids, dtype=torch.float32))
    between = drafted[first : first + num_rows - 1, None]
    counts[1:].scatter_(1, between, 1.0)
    counts = counts.cumsum(dim=0)
    in_prompt = torch.zeros_like(logits[0], dtype=torch.bool)
    in_prompt.index_fill_(0, send(prompt, device), True)
    seen, penalty = in_prompt | (counts > 0), params.repetition_penalty
    logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    return logits - params.presence_penalty * (counts > 0) - params.frequency_penalty * counts


def _temper_and_truncate(logits: Tensor, params: SamplingParams) -> Tensor:
    if decides_on_device(logits.device):
        return truncate(
            logits,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
        )
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
    widths = (min(_NUCLEUS_GUESS, vocab_size), vocab_size)
    for width in widths:
        ranked = log_probs.topk(width).values
        reached = ranked.double().exp().cumsum(dim=1)
        if width == vocab_size or bool((reached[:, -1] >= top_p).all()):
            break
    counts = (reached[:, :-1] < top_p).sum(dim=1, keepdim=True) + 1
    return _largest(log_probs, ranked, counts)


def _largest(values: Tensor, ranked: Tensor, counts: Tensor) -> Tensor:
    """Return [R, V] bool with the `counts` [R, 1] largest values of each row, ties to the lower id.

    `ranked` [R, M] holds each row's largest values in descending order, M >= counts.
    """
    threshold = ranked.gather(1, counts - 1)
    keep = values >= threshold
    if not bool((keep.sum(1, keepdim=True) != counts).any()):  # no ties
        return keep
    above, ties = values > threshold, values == threshold
    room = counts - above.sum(dim=1, keepdim=True)
    return above | (ties & (ties.cumsum(dim=1) <= room))


def argmax(logits: Tensor) -> Tensor:
    """Return the most probable token [...] of logits [..., V], ties to the lowest id."""
    if decides_on_device(logits.device):
        return logits_stats(logits.flatten(0, -2)).argmax.view(logits.shape[:-1])
    # torch's argmax of a short float is five times slower on a CPU than the cast and float32's.
    return (logits.float() if logits.dtype.itemsize < 4 else logits).argmax(dim=-1)


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy [...] of softmax(logits [..., V]), nats, float32."""
    if decides_on_device(logits.device):
        return logits_stats(logits.flatten(0, -2)).entropy.view(logits.shape[:-1])
    return torch.special.entr(logits.float().softmax(dim=-1)).sum(dim=-1)


def certainty(logits: Tensor) -> dict[str, Tensor]:
    """Return `entropy`, `confidence` and `margin` [...] of logits [..., V]; see `Proposal`."""
    if decides_on_device(logits.device):
        stats = logits_stats(logits.flatten(0, -2))
        columns = (stats.entropy, stats.probability, stats.margin)
    else:
        laws = logits.float().softmax(dim=-1)
        best = laws.topk(2, dim=-1).values
        columns = (
            torch.special.entr(laws).sum(dim=-1),
            best[..., 0],
            best[..., 0] - best[..., 1],
        )
    return {n: own.view(logits.shape[:-1]) for n, own in zip(CERTAINTY, columns, strict=True)}


def probs(processed: Tensor) -> Tensor:
    """Return the float32 distribution [..., V] of processed logits [..., V]."""
    return torch.softmax(processed, dim=-1, dtype=torch.float32)


def uniforms(
    streams: Sequence[RandomStream], counts: Sequence[int], width: int, device: torch.device
) -> Tensor:
    """Draw `counts[b]` numbers in [0, 1) of each stream, where they are needed.

    Returns:
        [B, width] float64, width >= counts. What a row has beyond its count it has not drawn.
    """
    if decides_on_device(device):
        places = [(s.seed, s.take(count)) for s, count in zip(streams, counts, strict=True)]
        seeds, offsets = send(places, device).view(-1, 2).unbind(dim=1)
        return philox(seeds, offsets, width)
    drawn = [
        [stream.uniform() if i < count else 0.0 for i in range(width)]
        for stream, count in zip(streams, counts, strict=True)
    ]
    return torch.tensor(drawn, dtype=torch.float64).view(len(streams), width).to(device)


def draw(
    processed: Tensor, laws: Tensor | None, numbers: Tensor, is_greedy: Sequence[bool]
) -> Tensor:
    """Choose a token [N] of each row, where the logits are.

    Args:
        processed: [N, V] logits after the transforms.
        laws: [N, V] their `probs`, None where nobody has them yet.
        numbers: [N] float64, the quantile of each row's token.
        is_greedy: per row; then it is the argmax.

    Raises:
        ConfigError: as `inverse_cdf`. On a device that decides, a row without a law gets -1.
    """
    if decides_on_device(processed.device):
        temperature = send([not greedy for greedy in is_greedy], processed.device, torch.float32)
        return sample_kernel(processed, numbers, temperature=temperature)
    laws = probs(processed) if laws is None else laws
    rows = zip(processed, laws, numbers.tolist(), is_greedy, strict=True)
    tokens = [int(argmax(row)) if greedy else inverse_cdf(law, u) for row, law, u, greedy in rows]
    return torch.tensor(tokens, dtype=torch.long, device=processed.device)


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


def sample(probs: Tensor, stream: RandomStream) -> int:
    """Draw a token from `probs` [V] with the next number of the stream.

    Raises:
        ConfigError: as `inverse_cdf`.
    """
    return inverse_cdf(probs, stream.uniform())


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
