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
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybrid import pictures
from hybrid.errors import CheckpointError, ConfigError
from hybrid.training import plot
from hybrid.training.checkpoint import (
    MetricsLog,
    load_checkpoint,
    model_sha256,
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
    hashes: dict[str, str]  # of data and model
    waiting: Any  # a group of patient processes; None where there is one process
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
            micro-batches or GPUs for the processes, or a missing package.
        CheckpointError: the checkpoint or the target cannot be read, or a file not be written.
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
            if is_due:
                _from_main_process(run, None)
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


def autocast(config: TrainConfig, device: torch.device) -> torch.autocast:
    """Return the precision in which a run computes, for what its recipe computes by itself."""
    return torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16")


def _check(recipe: Recipe, accelerator: Any) -> torch.device:
    """Return the device of the module."""
    config, count = recipe.config, accelerator.num_processes
    if config.sequences_per_step % count:
        raise ConfigError(
            f"sequences_per_step: got {config.sequences_per_step} for {count} processes, expected "
            f"a multiple of {count}."
        )
    device = next(recipe.module.parameters()).device
    if count > 1 and ":" in config.device:
        raise ConfigError(
            f"device: got {config.device} for {count} processes, expected one device for each. "
            "Give device=auto, or start one process."
        )
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
    hashes = {"data_sha256": recipe.data_sha256, "model_sha256": model_sha256(config.model)}
    state = load_checkpoint(config, hashes)
    if state is not None:
        _restore(recipe, parameters, optimizer, state)
        step = state["step"]
    if accelerator.gather(torch.tensor([step], device=device)).unique().numel() > 1:
        raise ConfigError(
            f"output: not all processes found the same checkpoint in {config.output}. Give a "
            "folder that all machines share."
        )
    module = accelerator.prepare_model(recipe.module).train()
    waiting = None
    if accelerator.num_processes > 1:
        # NCCL gives up after ten minutes and takes the process with it, even one that is writing.
        # gloo waits, and still notices at once when the other side is gone.
        waiting = torch.distributed.new_group(backend="gloo", timeout=timedelta(days=7))
    return _Run(recipe, accelerator, module, parameters, optimizer, device, hashes, waiting, step)


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
            with autocast(config, run.device):
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
    save_checkpoint(run.recipe.config, run.hashes, state)


def _finish(run: _Run) -> Path:
    run.recipe.module.eval()
    exported = ""
    if run.accelerator.is_main_process:
        output = run.recipe.config.output
        exported = str(run.recipe.export(output))
        if pictures.is_available():
            plot.plot_metrics(output)
    return Path(_from_main_process(run, exported))


def _from_main_process(run: _Run, value: Any) -> Any:
    """Return the main process's value; the others wait for it, however long it writes."""
    values = [value]
    if run.waiting is not None:
        torch.distributed.broadcast_object_list(values, src=0, group=run.waiting)
    return values[0]
