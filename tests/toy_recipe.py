"""A recipe that is a linear regression, in float64 so that what must be equal is equal.

As a program it trains itself: its configuration is the argument, its output the steps.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.training.checkpoint import read_metrics
from hybrid.training.config import TrainConfig
from hybrid.training.loop import train
from hybrid.training.recipe import generator

TRUTH = torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
Batch = tuple[int, Tensor, Tensor]


class ToyConfig(TrainConfig):
    merge: int = 1  # micro-batches that make one
    dropout: float = 0.0
    inputs: int = 3
    dtype: str = "float64"
    keep_contexts: bool = False
    export_seconds: float = 0.0  # longer than processes wait for each other by then


class Toy(nn.Module):
    """y = dropout(x) W + b, and a parameter that only micro-batch 0 uses."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(config.seed)
        dtype = getattr(torch, config.dtype)
        self.weight = nn.Parameter(torch.randn(config.inputs, 1, generator=draw).to(dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype))
        self.first = nn.Parameter(torch.ones(1, dtype=dtype))
        self.frozen = nn.Parameter(torch.ones(1, dtype=dtype), requires_grad=False)
        self.dropout = nn.Dropout(config.dropout)
        self.seen: list[torch.dtype] = []
        self.factor = 1.0

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        assert self.training
        index, x, y = batch
        product = self.dropout(x) @ self.weight
        self.seen.append(product.dtype)
        error = (product + self.bias) * self.frozen - y
        if index == 0:
            error = error + self.first
        return {"loss": error.square().mean() * self.factor, "error": error.mean()}


class ToyRecipe:
    data_sha256 = "of-the-toy"

    def __init__(self, config: ToyConfig) -> None:
        self.config, self.module = config, Toy(config)
        self.modes: list[bool] = []

    def batch(self, step: int, index: int) -> Batch:
        indices = range(index * self.config.merge, (index + 1) * self.config.merge)
        draws = [generator(self.config.seed, step, i) for i in indices]
        x = torch.cat([torch.randn(4, 3, generator=draw, dtype=torch.float64) for draw in draws])
        x = x.to(self.module.weight.dtype)
        return index, x, x @ TRUTH.to(x.dtype)

    def evaluate(self) -> dict[str, Any]:
        self.modes.append(self.module.training or torch.is_grad_enabled())
        is_last = len(self.modes) * self.config.eval_every >= self.config.steps
        if is_last and self.config.export_seconds:
            patience = timedelta(seconds=self.config.export_seconds / 4)
            torch.distributed.distributed_c10d._set_pg_timeout(patience)
        distance = (self.module.weight - TRUTH).abs().flatten().tolist()
        return {"accuracy_by_position": [1 / (1 + d) for d in distance]}

    def export(self, folder: Path) -> Path:
        time.sleep(self.config.export_seconds)
        (folder / "result").mkdir(exist_ok=True)
        torch.save(self.module.state_dict(), folder / "result" / "weights.pt")
        return folder / "result"


Make = Callable[..., ToyRecipe]


def toy(folder: Path, output: str = "run", **fields: Any) -> ToyRecipe:
    """A recipe of 10 steps; keywords are fields of its configuration."""
    defaults = {
        "steps": 10, "warmup_steps": 3, "eval_every": 4, "learning_rate": 0.1, "seed": 3,
        "sequences_per_step": 4, "weight_decay": 0.01,
    }  # fmt: skip
    paths = {"data": folder / "data.jsonl", "output": folder / output}
    return ToyRecipe(ToyConfig(**{**defaults, **paths, **fields}))


class KilledError(Exception):
    pass


def kill_at(
    step: int, error: type[BaseException] = KilledError
) -> Callable[[dict[str, Any]], None]:
    def report(row: dict[str, Any]) -> None:
        if row["step"] == step:
            raise error

    return report


def weights(recipe: ToyRecipe) -> dict[str, Tensor]:
    return torch.load(recipe.config.output / "result" / "weights.pt", weights_only=True)


def numbers(recipe: ToyRecipe) -> dict[str, Any]:
    return {name: value.tolist() for name, value in weights(recipe).items()}


def curve(recipe: ToyRecipe) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in r.items() if k != "seconds"} for r in read_metrics(recipe.config.output)
    ]


def assert_same_run(one: ToyRecipe, other: ToyRecipe) -> None:
    """Bit for bit."""
    assert curve(one) == curve(other)
    assert [row["step"] for row in curve(one)] == list(range(1, one.config.steps + 1))
    assert numbers(one) == numbers(other)


def child(config: ToyConfig, stdout: int, **env: str) -> subprocess.Popen[str]:
    """Train in a process of its own; it prints the steps."""
    args = [sys.executable, __file__, config.model_dump_json()]
    return subprocess.Popen(args, stdout=stdout, text=True, env={**os.environ, **env})


def _print_step(row: dict[str, Any]) -> None:
    sys.stdout.write(f"{row['step']}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(ToyRecipe(ToyConfig.model_validate_json(sys.argv[1])), _print_step)
