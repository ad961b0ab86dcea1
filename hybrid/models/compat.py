"""What transformers 5.16 to 5.24 call by different names: here, and nowhere else.

5.24 says `cache` where 5.23 and before say `past_key_values`, and recurrent models `cache_params`.
Reading an argument, passing one and refusing one all go by the same list. Next:
hybrid/models/hf.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers.cache_utils import DynamicLayer

CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """Return the name under which `forward` takes its cache, None where it takes none."""
    accepted = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in accepted), None)


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among keyword arguments, None where there is none."""
    return next((arguments[n] for n in CACHE_NAMES if arguments.get(n) is not None), None)


def drop_last(cache: Any, num_tokens: int) -> None:
    """Take the last tokens back out of a transformers cache.

    A length to keep, which the same method took once, is an error since 5.24; and a crop of
    nothing is not always nothing.
    """
    if num_tokens:
        cache.crop(-num_tokens)


def holds_positions(layer: Any) -> bool:
    """Whether a layer of a cache is a list of positions that can be cropped to any length.

    By type: transformers' own `is_croppable` is younger than 5.16. A `DummyLayer` belongs to a
    layer that keeps nothing.
    """
    return type(layer) is DynamicLayer or type(layer).__name__ == "DummyLayer"
