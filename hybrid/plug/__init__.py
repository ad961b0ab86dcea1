"""Plugs into transformers: drafters for `model.generate`, and checkpoints that bring their own.

Next: hybrid/plug/generate.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

_LAZY = {
    "DFlashAssistant": "hybrid.plug.assistant",
    "Plug": "hybrid.plug.generate",
    "PlugWarning": "hybrid.plug.generate",
    "attach": "hybrid.plug.generate",
    "carried_generate": "hybrid.plug.carried",
    "detach": "hybrid.plug.generate",
    "write_custom_generate": "hybrid.plug.carried",
}

__all__ = [*_LAZY]

if TYPE_CHECKING:
    from hybrid.plug.assistant import DFlashAssistant as DFlashAssistant
    from hybrid.plug.carried import carried_generate as carried_generate
    from hybrid.plug.carried import write_custom_generate as write_custom_generate
    from hybrid.plug.generate import Plug as Plug
    from hybrid.plug.generate import PlugWarning as PlugWarning
    from hybrid.plug.generate import attach as attach
    from hybrid.plug.generate import detach as detach


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
