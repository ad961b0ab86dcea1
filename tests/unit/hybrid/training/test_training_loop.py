"""The loop on a toy: equal to a twin written by hand, on one process and on two."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_recipe import (
    KilledError,
    ToyRecipe,
    child,
    curve,
    kill_at,
    toy,
    weights,
)

from hybrid import pictures
from hybrid.errors import ConfigError
from hybrid.training import plot
from hybrid.training.loop import learning_rate, this_process, train

Make = Callable[..., ToyRecipe]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return partial(toy, tmp_path)


def twin(recipe: ToyRecipe) -> tuple[list[Tensor], list[float], list[float]]:
    """AdamW by its formulas, on the gradient of all micro-batches at once."""
    config, module = recipe.config, recipe.module
    values = [p.detach().clone() for p in (module.weight, module.bias, module.first)]
    m, v = ([torch.zeros_like(p) for p in values] for _ in range(2))
    losses, norms = [], []
    for t in range(1, config.steps + 1):
        for p in values:
            p.requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for index in range(config.sequences_per_step):
            _, x, y = recipe.batch(t - 1, index)
            error = x @ values[0] + values[1] - y + (values[2] if index == 0 else 0)
            total = total + error.square().mean() / config.sequences_per_step
        grads = torch.autograd.grad(total, values)
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
        rate = config.learning_rate * min(t / config.warmup_steps, 1) * (1 - (t - 1) / config.steps)
        for i, grad in enumerate(grads):
            g = grad * min(1.0, config.clip / (norm + 1e-6))
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.95 * v[i] + 0.05 * g * g
            p = values[i].detach() * (1 - rate * config.weight_decay)
            update = m[i] / (1 - 0.9**t) / ((v[i] / (1 - 0.95**t)).sqrt() + 1e-8)
            values[i] = p - rate * update
        losses.append(total.item())
        norms.append(norm)
    return values, losses, norms


@pytest.mark.parametrize("clip", [1e9, 0.5], ids=["unclipped", "clipped"])
def test_equals_a_twin_written_by_hand(make: Make, clip: float) -> None:
    recipe = make(clip=clip)
    values, losses, norms = twin(recipe)
    assert min(norms) > 0.5, "so that clipping at 0.5 always acts"
    train(recipe)
    for value, name in zip(values, ("weight", "bias", "first"), strict=True):
        torch.testing.assert_close(weights(recipe)[name], value, rtol=0, atol=1e-12)
    assert [row["loss"] for row in curve(recipe)] == pytest.approx(losses, rel=1e-5)
    assert [row["grad_norm"] for row in curve(recipe)] == pytest.approx(norms, rel=1e-5)


def test_several_micro_batches_equal_one_big_batch(make: Make) -> None:
    # Micro-batch 0 differs from the others, so the parameter of its own is left out here.
    several, one = make("several"), make("one", sequences_per_step=1, merge=4)
    for recipe in (several, one):
        recipe.module.first.requires_grad_(False).zero_()
        train(recipe)
    for name, value in weights(one).items():
        torch.testing.assert_close(weights(several)[name], value, rtol=0, atol=1e-12)


def test_learning_rate_warms_up_and_falls_to_zero(make: Make) -> None:
    config = make(steps=100, warmup_steps=10, learning_rate=1.0).config
    rates = [learning_rate(config, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1 - 0.09)
    assert rates[50] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(0.01)
    assert max(rates) == rates[9]


def test_bf16_computes_under_autocast_and_keeps_float32_parameters(make: Make) -> None:
    seen = {}
    for precision in ("bf16", "float32"):
        recipe = make(precision, precision=precision, dtype="float32")
        train(recipe)
        seen[precision] = set(recipe.module.seen)
        assert {value.dtype for value in weights(recipe).values()} == {torch.float32}
    assert seen == {"bf16": {torch.bfloat16}, "float32": {torch.float32}}


def test_evaluates_in_its_own_mode_and_logs_what_it_gets(make: Make) -> None:
    recipe = make(dropout=0.5)
    train(recipe)
    assert recipe.modes == [False] * 3
    measured = [row["step"] for row in curve(recipe) if "accuracy_by_position" in row]
    assert measured == [4, 8, 10]
    assert {"loss", "error", "grad_norm", "learning_rate", "step"} <= set(curve(recipe)[0])


@pytest.mark.slow
def test_two_processes_equal_one(make: Make) -> None:
    fields = {"dropout": 0.5, "precision": "float32"}
    one, two = make("one", **fields), make("two", **fields, export_seconds=2.0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    world |= {"LOCAL_WORLD_SIZE": "2"}
    if torch.cuda.is_available():
        world |= {"ACCELERATE_USE_CPU": "true"}
    ranks = [
        child(two.config, stdout=subprocess.PIPE, RANK=rank, LOCAL_RANK=rank, **world)
        for rank in ("0", "1")
    ]
    train(one)
    reports = [rank.communicate(timeout=60)[0].split() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert reports == [[str(step) for step in range(1, 11)], []], "the first alone reports"
    assert [row.keys() for row in curve(two)] == [row.keys() for row in curve(one)]
    for ours, theirs in zip(curve(two), curve(one), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["error"] == pytest.approx(theirs["error"], rel=1e-5)
    for name, value in weights(one).items():
        torch.testing.assert_close(weights(two)[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("factor", "what"), [(math.nan, "nan"), (math.inf, "inf")])
def test_a_loss_that_is_no_number_stops_the_run(make: Make, factor: float, what: str) -> None:
    with pytest.raises(KilledError):
        train(make(), kill_at(5))
    broken = make()
    broken.module.factor = factor
    with pytest.raises(ConfigError, match=f"the loss is {what} at step 5"):
        train(broken)
    state = torch.load(broken.config.output / "checkpoint.pt", weights_only=True)
    assert state["step"] == 4
    assert all(value.isfinite().all() for value in state["model"].values())


def test_a_gradient_that_is_no_number_stops_the_run(make: Make) -> None:
    """The square root of zero is a number, its derivative none."""
    recipe = make()
    recipe.module.register_forward_hook(
        lambda module, args, out: {**out, "loss": (out["loss"] * 0).sqrt()}
    )
    with pytest.raises(ConfigError, match=r"the loss is 0\.0 at step 1, its gradient's norm nan"):
        train(recipe)


def test_refuses_micro_batches_that_do_not_divide_among_processes(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = this_process()
    monkeypatch.setattr("hybrid.training.loop.this_process", lambda: process)
    monkeypatch.setattr(type(process), "num_processes", 3)
    with pytest.raises(ConfigError, match="sequences_per_step: got 4 for 3 processes"):
        train(make())
    assert not make().config.output.exists()


def test_refuses_several_processes_on_one_device(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = this_process()
    monkeypatch.setattr("hybrid.training.loop.this_process", lambda: process)
    monkeypatch.setattr(type(process), "num_processes", 2)
    with pytest.raises(ConfigError, match="device: got cuda:0 for 2 processes.*device=auto"):
        train(make(device="cuda:0"))


@pytest.mark.parametrize(
    ("package", "fields", "match"),
    [
        ("accelerate", {}, r"needs accelerate.*hybrid-decoder\[train\]"),
        ("torch.utils.tensorboard", {"tensorboard": True}, r"hybrid-decoder\[tensorboard\]"),
    ],
)
def test_a_missing_package_is_named(
    make: Make, monkeypatch: pytest.MonkeyPatch, package: str, fields: dict[str, Any], match: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=match):
        train(make(**fields), lambda row: pytest.fail("ran a step"))


def test_draws_its_curves_if_it_can(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, drawn = make(), []
    monkeypatch.setattr(plot, "plot_metrics", drawn.append)
    for can in (False, True):
        monkeypatch.setattr(pictures, "is_available", lambda can=can: can)
        train(recipe)
        assert drawn == [recipe.config.output] * can
