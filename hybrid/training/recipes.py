"""Names of recipes, kept as strings so that nothing is imported before use.

Next: hybrid/training/recipe.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from hybrid.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from hybrid.training.config import TrainConfig
    from hybrid.training.recipe import Recipe


class Entry(NamedTuple):
    """Where a recipe is, what it does in one line, and the precision in which it reads a model."""

    package: str
    config: str
    about: str
    precision: str = "bfloat16"


RECIPES: Mapping[str, Entry] = MappingProxyType(
    {
        "self-diffusion": Entry(
            "hybrid.training.self_diffusion",
            "SelfDiffusionConfig",
            "Teach a model to draft for itself; its own weights stay as they are.",
        ),
        "dflash": Entry(
            "hybrid.training.dflash",
            "DFlashConfig",
            "Train a small block-diffusion drafter on a model's features.",
        ),
        "joint": Entry(
            "hybrid.training.joint",
            "JointConfig",
            "Fine-tune a whole model on the AR and the diffusion loss together.",
            "float32",
        ),
        "d3llm": Entry(
            "hybrid.training.d3llm",
            "D3LLMConfig",
            "Distil the order in which a diffusion model fills its masks.",
            "float32",
        ),
        "d2f": Entry(
            "hybrid.training.d2f",
            "D2FConfig",
            "Distil a bidirectional diffusion model into a block-causal one.",
            "float32",
        ),
    }
)


def config_class(name: str) -> type[TrainConfig]:
    """Return the configuration class of a recipe.

    Raises:
        ConfigError: no such recipe.
    """
    entry = _entry(name)
    found: type[TrainConfig] = getattr(import_module(f"{entry.package}.config"), entry.config)
    return found


def build(name: str, config: TrainConfig) -> Recipe:
    """Load what a recipe needs, on this process's own device; `hybrid.training.loop.train` runs it.

    Raises:
        ConfigError: no such recipe, bad data or values, or a missing package.
        CheckpointError: the target cannot be read.
    """
    from hybrid.training.loop import this_process

    this_process()  # before anything is loaded: "cuda" is a GPU of its own for each process
    built: Recipe = import_module(f"{_entry(name).package}.recipe").build(config)
    return built


def _entry(name: str) -> Entry:
    if name not in RECIPES:
        raise ConfigError(f"Unknown recipe {name!r}.{did_you_mean(name, RECIPES)}")
    return RECIPES[name]
