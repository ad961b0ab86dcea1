"""The training loop that all recipes share: optimiser, precision, processes, checkpoints, metrics.

One process or many, as `accelerate launch` or `torchrun` starts them: each takes its share of a
step's micro-batches, and their gradients are averaged. Whatever a micro-batch needs follows from
(seed, step, index), so a run that was killed goes on as if it had not been. Next:
hybrid/training/checkpoint.py.
"""

from __future__ import annotations

import atexit
import math
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.errors import CheckpointError, ConfigError
from hybrid.training import plot
from hybrid.training.checkpoint import (
    MetricsLog,
    load_checkpoint,
    only_run_in,
    save_checkpoint,
)
from hybrid.training.config import TrainConfig
from hybrid.training.recipe import Recipe, generator

Report = Callable[[dict[str, Any]], None]


@dataclass(slots=True)
class _Run:
    """Everything that a step touches."""

    recipe: Recipe
    accelerator: Any
    module: nn.Module  # the recipe's, wrapped where there are several processes
    parameters: dict[str, nn.Parameter]  # the trained ones
    optimizer: torch.optim.Optimizer
    device: torch.device
    step: int = 0


def train(recipe: Recipe, report: Report = lambda row: None) -> Path:
    """Run a recipe, from the last checkpoint in its output folder if there is one.

    Args:
        recipe: what to train, see `hybrid.training.recipes.build`.
        report: called on the main process with the metrics of each step, which are also written to
            metrics.jsonl. When it raises KeyboardInterrupt the step is saved first.

    Returns:
        What the recipe exported.

    Raises:
        ConfigError: an output folder of another run, a loss that is not a number any more, too few
            micro-batches for the processes, or a missing package.
        CheckpointError: the checkpoint cannot be read, or a file not be written.
    """
    config, accelerator = recipe.config, this_process()
    with ExitStack() as stack:
        device = _check(recipe, accelerator)
        # Dropout and the like draw from the global streams: they are the caller's again afterwards.
        devices = [device] if device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices=devices))
        if accelerator.is_main_process:
            stack.enter_context(only_run_in(config.output))
        run = _start(recipe, accelerator, device)
        if accelerator.is_main_process:
            log = MetricsLog(config, run.step)
            stack.callback(log.close)
        while run.step < config.steps:
            row = _train_step(run)
            run.step += 1
            is_due = run.step % config.eval_every == 0 or run.step == config.steps
            if is_due:
                row |= _evaluate(recipe)
            if accelerator.is_main_process:
                row = log.append(run.step, row)  # before the checkpoint, which vouches for it
                if is_due:
                    _save(run)
                try:
                    report(row)
                except KeyboardInterrupt:  # between two steps, so nothing is half done
                    _save(run)
                    raise
        return _finish(run)


def this_process() -> Any:
    """Return the `accelerate.Accelerator` of this process; from then on "cuda" is its own GPU.

    Raises:
        ConfigError: accelerate is missing, or configured for more than data parallelism.
    """
    try:
        from accelerate import Accelerator, DistributedDataParallelKwargs
    except ImportError as error:
        raise ConfigError(
            "Training needs accelerate, which is not installed: pip install 'hybrid-decoder[train]'"
        ) from error
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),  # else processes on CPUs would not find each other
        device_placement=False,  # the recipe knows where its module belongs
        mixed_precision="no",  # it is config.precision that decides on autocast
        # A recipe may leave parameters out of a step.
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    kind = accelerator.distributed_type.value
    if kind not in {"NO", "MULTI_CPU", "MULTI_GPU"}:
        raise ConfigError(
            f"accelerate: got {kind}, expected data-parallel processes on CPUs or GPUs. Run "
            "`accelerate config` or give `accelerate launch` other flags."
        )
    if accelerator.num_processes > 1:
        atexit.register(accelerator.end_training)  # else their threads abort the interpreter
    return accelerator


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the rate of a step, counted from 0: linear warm-up, then linear to 0."""
    warm = min(1.0, (step + 1) / config.warmup_steps)
    return config.learning_rate * warm * (1 - step / config.steps)


def _check(recipe: Recipe, accelerator: Any) -> torch.device:
    """Return the device of the module."""
    config, count = recipe.config, accelerator.num_processes
    if config.sequences_per_step % count:
        raise ConfigError(
            f"sequences_per_step: got {config.sequences_per_step} for {count} processes, expected "
            f"a multiple of {count}."
        )
    device = next(recipe.module.parameters()).device
    if count > 1 and device.type != accelerator.device.type:
        raise ConfigError(
            f"device: got a module on {device} in processes that accelerate put on "
            f"{accelerator.device}. Give device=auto, or ACCELERATE_USE_CPU=true for CPUs."
        )
    return device


def _start(recipe: Recipe, accelerator: Any, device: torch.device) -> _Run:
    config = recipe.config
    parameters = {n: p for n, p in recipe.module.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        parameters.values(),
        lr=config.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=config.weight_decay,
    )
    step = 0
    state = load_checkpoint(config, recipe.data_sha256)
    if state is not None:
        _restore(recipe, parameters, optimizer, state)
        step = state["step"]
    if accelerator.gather(torch.tensor([step], device=device)).unique().numel() > 1:
        raise ConfigError(
            f"output: not all processes found the same checkpoint in {config.output}. Give a "
            "folder that all machines share."
        )
    module = accelerator.prepare_model(recipe.module).train()
    return _Run(recipe, accelerator, module, parameters, optimizer, device, step)


def _restore(
    recipe: Recipe,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
) -> None:
    try:
        if state["model"].keys() != parameters.keys():
            names = ", ".join(sorted(state["model"].keys() ^ parameters.keys()))
            raise KeyError(f"only one of the two has {names}")
        recipe.module.load_state_dict(state["model"], strict=False)  # the frozen rest is not in it
        optimizer.load_state_dict(state["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{recipe.config.output}: the checkpoint does not fit this model: {error}. "
            "Give another output folder."
        ) from error


def _train_step(run: _Run) -> dict[str, Any]:
    config, process = run.recipe.config, run.accelerator
    rate = learning_rate(config, run.step)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    run.optimizer.zero_grad(set_to_none=True)
    mine = range(process.process_index, config.sequences_per_step, process.num_processes)
    rows = []
    for index in mine:
        # The complement: not the numbers that the batch itself is drawn with.
        torch.manual_seed(2**64 - 1 - generator(config.seed, run.step, index).initial_seed())
        batch = run.recipe.batch(run.step, index)
        # Processes meet in the last backward pass only.
        with nullcontext() if index == mine[-1] else process.no_sync(run.module):
            with torch.autocast(run.device.type, torch.bfloat16, config.precision == "bf16"):
                scalars = run.module(batch)
            (scalars["loss"] / len(mine)).backward()
        rows.append({name: value.detach() for name, value in scalars.items()})
    means = _means(rows, process)
    norm = nn.utils.clip_grad_norm_(run.parameters.values(), config.clip).item()
    if not (math.isfinite(means["loss"]) and math.isfinite(norm)):
        raise ConfigError(
            f"learning_rate: the loss is {means['loss']} at step {run.step + 1}, its gradient's "
            f"norm {norm}, expected numbers. Give a rate lower than {config.learning_rate} and "
            "another output folder."
        )
    run.optimizer.step()
    row = {**means, "grad_norm": norm, "learning_rate": rate}
    return {name: float(f"{value:.6g}") for name, value in row.items()}


def _means(rows: list[dict[str, Tensor]], process: Any) -> dict[str, float]:
    """Return the mean of each scalar over all micro-batches of all processes."""
    table = torch.stack([torch.stack([v.double() for v in row.values()]) for row in rows])
    means = process.reduce(table.mean(dim=0), "mean").tolist()
    return dict(zip(rows[0], means, strict=True))


def _evaluate(recipe: Recipe) -> dict[str, Any]:
    # On every process: one that evaluates alone keeps the others waiting until they time out.
    recipe.module.eval()
    with torch.no_grad():
        metrics = recipe.evaluate()
    recipe.module.train()
    return metrics


def _save(run: _Run) -> None:
    state = {
        "step": run.step,
        "model": {name: value.detach() for name, value in run.parameters.items()},
        "optimizer": run.optimizer.state_dict(),
    }
    save_checkpoint(run.recipe.config, run.recipe.data_sha256, state)


def _finish(run: _Run) -> Path:
    from accelerate.utils import broadcast_object_list

    run.recipe.module.eval()  # a card may evaluate once more
    exported = [""]
    if run.accelerator.is_main_process:
        output = run.recipe.config.output
        exported = [str(run.recipe.export(output))]
        if plot.is_available():
            plot.plot_metrics(output)
    broadcast_object_list(exported)
    return Path(exported[0])
