"""What every recipe has to do, checked in the same words for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from hybrid.training.loop import train

each_precision = pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("float32", torch.float32)]
)


def check_evaluates_in(
    dtype: torch.dtype, recipe: Any, watched: nn.Module, out: Callable[[Any], Any]
) -> None:
    """`out` takes the tensor from what `watched` returns."""
    seen = set()
    watched.register_forward_hook(lambda module, args, result: seen.add(out(result).dtype))
    recipe.evaluate()
    assert seen == {dtype}


def check_card_shows_the_last_evaluation(recipe: Any, names: Sequence[str]) -> None:
    """The recipe has two steps and evaluates after each; its export must not once more."""
    rows: list[dict[str, Any]] = []
    measured, evaluate = [], recipe.evaluate

    def counted() -> dict[str, Any]:
        measured.append(evaluate())
        return measured[-1]

    recipe.evaluate = counted
    card = (train(recipe, rows.append) / "README.md").read_text()
    assert len(measured) == 2
    for name in names:
        assert f"| {rows[-1][name]} |" in card
    recipe.config.output.joinpath("metrics.jsonl").unlink()
    card = (recipe.export(recipe.config.output) / "README.md").read_text()
    assert "| not measured |" in card


def check_card_names_a_hub_model_whole(recipe: Any, **update: str) -> None:
    recipe.config = recipe.config.model_copy(update={"model": "some/base", **update})
    card = (recipe.export(recipe.config.output) / "README.md").read_text()
    assert "base_model: some/base\n" in card
    for field, value in {"model": "some/base", **update}.items():
        assert f'"{field}": "{value}"' in card
