"""Decode with one language model that switches attention masks: diffusion drafts, AR verifies.

The public names below are loaded on first use, so that ``import hybrid`` and ``hybrid --help``
stay fast. Next: hybrid/decoder.py.
"""

from __future__ import annotations

from pathlib import Path as _Path
from typing import TYPE_CHECKING, Any

# The sibling folders drafters/, verifiers/ and kernels/ are sub-packages of ``hybrid``. In a wheel
# they already lie below it; in a source checkout this lets the import system find them.
_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "kernels").is_dir():
    __path__.append(str(_root))
del _Path, _root

__version__ = "0.1.0"

_LAZY = {
    "CapacityError": "hybrid.errors",
    "CheckpointError": "hybrid.errors",
    "ConfigError": "hybrid.errors",
    "DrafterWarning": "hybrid.decode.fallback",
    "GenerationResult": "hybrid.types",
    "HybridDecoder": "hybrid.decoder",
    "HybridError": "hybrid.errors",
    "KernelUnavailableError": "hybrid.errors",
    "ProposalError": "hybrid.errors",
    "SamplingParams": "hybrid.params",
    "Source": "hybrid.types",
    "StepRecord": "hybrid.types",
    "Strategy": "hybrid.strategy",
    "StreamEvent": "hybrid.types",
}

__all__ = ["__version__", *_LAZY]

if TYPE_CHECKING:
    from hybrid.decode.fallback import DrafterWarning as DrafterWarning
    from hybrid.decoder import HybridDecoder as HybridDecoder
    from hybrid.errors import CapacityError as CapacityError
    from hybrid.errors import CheckpointError as CheckpointError
    from hybrid.errors import ConfigError as ConfigError
    from hybrid.errors import HybridError as HybridError
    from hybrid.errors import KernelUnavailableError as KernelUnavailableError
    from hybrid.errors import ProposalError as ProposalError
    from hybrid.params import SamplingParams as SamplingParams
    from hybrid.strategy import Strategy as Strategy
    from hybrid.types import GenerationResult as GenerationResult
    from hybrid.types import Source as Source
    from hybrid.types import StepRecord as StepRecord
    from hybrid.types import StreamEvent as StreamEvent


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the lazy names too."""
    return sorted({*globals(), *_LAZY})
