"""Errors that a user or a plugin can cause. Messages say what, got, expected, what to do.

An ``assert`` anywhere else in the project guards our own invariants only.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HybridError(Exception):
    """Base of every error raised on purpose by this project."""


class ConfigError(HybridError, ValueError):
    """A parameter, keyword, prompt or configuration value is not usable."""


class CheckpointError(HybridError):
    """A model, adapter or tokenizer cannot be found, fetched, read or matched."""


class ProposalError(HybridError):
    """A drafter returned a proposal that breaks its contract."""


class KernelUnavailableError(HybridError):
    """A kernel was forced that cannot run on this device."""


class CapacityError(HybridError):
    """The request does not fit the context window or the preallocated memory."""


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the closest choice; list them all when none is close."""
    options = sorted(choices)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Choose from: {', '.join(options)}." if options else ""
