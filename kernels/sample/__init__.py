"""One token per row from a tempered and truncated law, and that law itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybrid.kernels import dispatch
from hybrid.kernels.rows import per_row, require_logits
from hybrid.kernels.sample.reference import sample_reference, truncate_reference

__all__ = ["sample", "truncate"]


def sample(
    logits: Tensor,
    uniforms: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
) -> Tensor:
    """Draw the token at quantile `uniforms` of each row's law, in the order of the ids.

    The law is that of `hybrid.sampling.process_logits`: temperature, top_k, top_p, min_p, each on
    what the one before it left; among equal logits the lower id stays. A token is drawn as by
    `hybrid.sampling.inverse_cdf`. Each argument is one number for all rows, or [N].

    Args:
        logits: [N, V], any float dtype; -inf is an impossible token.
        uniforms: [N] in [0, 1).
        temperature: 0 takes the best token, ties to the lowest id.
        top_k: 0 keeps all.
        top_p: 1 keeps all.
        min_p: 0 keeps all.

    Returns:
        [N] int64; -1 for a row that holds NaN or +inf, or excludes every token.

    Raises:
        ConfigError: shapes or devices do not match.
    """
    law = _law(logits, temperature, top_k, top_p, min_p)
    arguments = per_row("sample", "uniforms", uniforms, logits, torch.float64), *law
    if dispatch.choose("sample", logits.device) == "reference":
        return sample_reference(logits, *arguments)
    from hybrid.kernels.sample.triton import sample_triton

    return sample_triton(logits, *arguments)


def truncate(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
) -> Tensor:
    """Return the logits of the law that `sample` draws from, -inf where a token is dropped.

    What is left of a row is (logit - best) / temperature. Tokens whose probability is 0 in float32
    are dropped, too. The arguments are those of `sample`.

    Returns:
        [N, V] float32; NaN in a row that holds NaN or +inf, or excludes every token.

    Raises:
        ConfigError: shapes or devices do not match.
    """
    arguments = _law(logits, temperature, top_k, top_p, min_p)
    if dispatch.choose("sample", logits.device) == "reference":
        return truncate_reference(logits, *arguments)
    from hybrid.kernels.sample.triton import truncate_triton

    return truncate_triton(logits, *arguments)


def _law(
    logits: Tensor,
    temperature: float | Tensor,
    top_k: int | Tensor,
    top_p: float | Tensor,
    min_p: float | Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what shapes each row's law: temperatures, top_k, top_p, -log(min_p)."""
    require_logits("sample", logits)
    if isinstance(min_p, Tensor):
        farthest: float | Tensor = -min_p.double().log()
    else:
        farthest = -math.log(min_p) if min_p > 0 else math.inf
    return (
        per_row("sample", "temperature", temperature, logits, torch.float32),
        per_row("sample", "top_k", top_k, logits, torch.int32),
        per_row("sample", "top_p", top_p, logits, torch.float64),
        per_row("sample", "min_p", farthest, logits, torch.float32),
    )
