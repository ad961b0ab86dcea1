"""`Recipe`: what one way of training adds to the loop that all of them share.

The loop (hybrid/training/loop.py) owns the optimiser, precision, processes, accumulation, clipping,
checkpoints and metrics. A recipe owns its data, its module and its loss. Next:
hybrid/training/loop.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hybrid.streams import RandomStream
from hybrid.training.config import TrainConfig


class Recipe(Protocol):
    """One training recipe, ready to run.

    Attributes:
        config: validated; its class has the recipe's own fields beside those of `TrainConfig`.
        module: what is trained. `module(batch)` returns scalars by name: "loss", the mean over
            the batch that the loop differentiates, and any others, which are logged. Only
            parameters with `requires_grad` reach the optimiser and the checkpoints. A frozen
            target is not a parameter of it.
        data_sha256: of everything that the batches are made from; a run resumes on no other.
    """

    config: TrainConfig
    module: nn.Module
    data_sha256: str

    def batch(self, step: int, index: int) -> Any:
        """Return micro-batch `index` (0 to `config.sequences_per_step` - 1) of step `step`.

        It depends on (seed, step, index) alone, see `generator`: that is what makes a run
        resumable to the exact step, and the same on one process as on many.
        """
        ...

    def evaluate(self) -> dict[str, Any]:
        """Return metrics on held-out data, as JSON types. Draws nothing from global generators."""
        ...

    def export(self, folder: Path) -> Path:
        """Write what was trained, for use, with its card; return its folder (inside `folder`)."""
        ...


def generator(seed: int, step: int, index: int) -> torch.Generator:
    """Return the random numbers of one micro-batch, a CPU generator."""
    return torch.Generator().manual_seed((seed * 1_000_003 + step) * 4_099 + index)


def stream(seed: int, step: int, index: int) -> RandomStream:
    """Return the random numbers of one request, for a recipe or a command that decodes."""
    return RandomStream(generator(seed, step, index).initial_seed() % 2**63)


Scalars = Mapping[str, Tensor]
