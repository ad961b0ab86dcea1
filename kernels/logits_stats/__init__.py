"""What a decoder asks of logits without wanting the probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid.kernels import dispatch
from hybrid.kernels.checks import require
from hybrid.kernels.logits_stats.reference import LogitsStats, logits_stats_reference
from hybrid.kernels.rows import per_row, require_logits

__all__ = ["logits_stats"]


def logits_stats(
    logits: Tensor, *, temperature: float | Tensor = 1.0, suppressed: int | None = None
) -> LogitsStats:
    """Describe the law softmax(logits / temperature) of each row in one read of the logits.

    Args:
        logits: [N, V], any float dtype; -inf is an impossible token.
        temperature: above 0; one for all rows, or [N].
        suppressed: an id that counts as impossible, such as the mask token's.

    Returns:
        Five tensors [N]. A row without a possible token has argmax 0, logsumexp -inf, and NaN; a
        row that holds NaN or +inf has no meaningful numbers.

    Raises:
        ConfigError: shapes or devices do not match, or an argument is out of range.
    """
    require_logits("logits_stats", logits)
    if not isinstance(temperature, Tensor):
        problem = f"temperature is {temperature}, expected a number above 0."
        require(temperature > 0, "logits_stats", problem)
    vocab_size = logits.shape[1]
    problem = f"suppressed is {suppressed}, expected None or an id below {vocab_size}."
    require(suppressed is None or 0 <= suppressed < vocab_size, "logits_stats", problem)
    temperatures = per_row("logits_stats", "temperature", temperature, logits, torch.float32)
    if dispatch.choose("logits_stats", logits.device) == "reference":
        return logits_stats_reference(logits, temperatures, suppressed)
    from hybrid.kernels.logits_stats.triton import logits_stats_triton

    return logits_stats_triton(logits, temperatures, suppressed)
