"""Exact verification of drafted tokens where the logits are."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid.kernels import dispatch
from hybrid.kernels.checks import require, require_dtype, require_tensor
from hybrid.kernels.verify.reference import Rule, Verified, verify_reference

__all__ = ["verify"]


def verify(
    target_logits: Tensor,
    tokens: Tensor,
    num_tokens: Tensor,
    uniforms: Tensor,
    *,
    draft_logits: Tensor | None = None,
    rule: Rule = "rejection",
) -> Verified:
    """Accept a prefix of each row's draft and draw the next token; the output law is the target's.

    Speculative sampling (arXiv:2211.17192, Algorithm 1) or block verification (arXiv:2403.10444,
    Algorithm 2), as in `hybrid.verifiers`: the same uniform numbers give the same verdicts, but
    where one falls within float32's rounding of a threshold. Sampled rows only: greedy ones
    compare tokens with `logits_stats`. Nothing is read back: the caller looks for -1.

    Args:
        target_logits: [B, K+1, V], transformed (temperature, truncation); -inf is impossible.
        tokens: [B, K] int64, drafted ids.
        num_tokens: [B] integers, how many of them each row has, 0 ... K.
        uniforms: [B, K+1] float64 in [0, 1); of a row with n tokens the first n decide, the next
            one draws. `hybrid.kernels.philox` makes them on the device.
        draft_logits: [B, K, V], of the laws that the tokens were drawn from; None is a point mass
            on each token.
        rule: "rejection" or "block".

    Returns:
        num_accepted [B] and next_token [B], int64. next_token is -1 if the target's logits hold NaN
        or exclude every token; both are -1 if draft_logits exclude a token that was drafted.

    Raises:
        ConfigError: shapes, dtypes or devices do not match, or there is no such rule.
    """
    require(rule in ("rejection", "block"), "verify", f"got rule {rule!r}: 'rejection' or 'block'.")
    found = f"target_logits are {list(target_logits.shape)}, expected [B, K+1, V]."
    require(target_logits.ndim == 3 and target_logits.shape[1] > 0, "verify", found)
    batch, width, vocab_size = target_logits.shape
    device = target_logits.device
    require_tensor("verify", "target_logits", target_logits, (batch, width, vocab_size), device)
    require_tensor("verify", "tokens", tokens, (batch, width - 1), device)
    require_dtype("verify", "tokens", tokens, torch.int64)
    require_tensor("verify", "num_tokens", num_tokens, (batch,), device)
    require_tensor("verify", "uniforms", uniforms, (batch, width), device)
    require_dtype("verify", "uniforms", uniforms, torch.float64)
    if draft_logits is not None:
        shape = (batch, width - 1, vocab_size)
        require_tensor("verify", "draft_logits", draft_logits, shape, device)
    if dispatch.choose("verify", device) == "reference":
        return verify_reference(target_logits, tokens, num_tokens, uniforms, draft_logits, rule)
    from hybrid.kernels.verify.triton import verify_triton

    return verify_triton(target_logits, tokens, num_tokens, uniforms, draft_logits, rule)
