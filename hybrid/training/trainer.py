"""Train a diffusion adapter: anchors of one sequence share one clean pass of the frozen target.

Deterministic and resumable: step n draws its sequences and anchors from (seed, n) alone, so a run
that was killed goes on as if it had not been. Next: hybrid/training/draft_model.py.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.errors import CheckpointError, ConfigError
from hybrid.models.adapter import DraftConfig, base_shape
from hybrid.models.loading import load_model
from hybrid.models.transformer import NativeBackbone
from hybrid.training.config import SelfDiffusionConfig
from hybrid.training.context import TargetContext, target_context
from hybrid.training.data import Example, read_examples
from hybrid.training.draft_model import DraftModel
from hybrid.training.export import save_adapter, write_json

Report = Callable[[dict[str, Any]], None]


@dataclass(slots=True)
class Run:
    """Everything that a step touches."""

    config: SelfDiffusionConfig
    model: DraftModel
    optimizer: torch.optim.Optimizer
    train: list[Example]
    held_out: list[Example]
    vocabulary: Tensor  # [V'] ids that occur in the responses
    head: Tensor  # [V', C] their rows of the output head
    contexts: dict[int, TargetContext]  # by index in `train`, when the configuration keeps them
    step: int = 0

    def context(self, index: int) -> TargetContext:
        """Return what the target knows of a training sequence."""
        if index in self.contexts:
            return self.contexts[index]
        context = target_context(self.model.backbone, self.model.config, self.train[index])
        if self.config.keep_contexts:
            self.contexts[index] = context
        return context


def train_self_diffusion(config: SelfDiffusionConfig, report: Report = lambda row: None) -> Path:
    """Run the recipe, from the last checkpoint in `config.output` if there is one.

    Args:
        config: validated configuration.
        report: called with the metrics of a step or an evaluation; also written to metrics.jsonl.

    Returns:
        The adapter folder.

    Raises:
        ConfigError: bad data, or an output folder of another configuration.
        CheckpointError: the target or the checkpoint cannot be read.
    """
    run = _prepare(config)
    _resume(run)
    metrics = config.output / "metrics.jsonl"
    started = time.perf_counter()
    while run.step < config.steps:
        row = _train_step(run)
        run.step += 1
        if run.step % config.eval_every == 0 or run.step == config.steps:
            row |= evaluate(run)
            _save(run)
        row |= {"step": run.step, "seconds": round(time.perf_counter() - started, 2)}
        with metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        report(row)
    adapter = config.output / "adapter"
    save_adapter(adapter, run.model.config, run.model.adapter_tensors(), base_model=config.model)
    return adapter


def _prepare(config: SelfDiffusionConfig) -> Run:
    loaded = load_model(config.model, dtype="bfloat16")
    backbone = loaded.backbone
    if not isinstance(backbone, NativeBackbone):
        raise ConfigError(
            f"model: {config.model} runs on the Hugging Face backbone, expected a native family "
            "(`hybrid list`)."
        )
    examples = read_examples(
        config.data,
        vocab_size=backbone.vocab_size,
        max_length=min(config.max_length, backbone.max_seq_len),
        tokenizer=loaded.tokenizer,
    )
    if len(examples) <= config.num_eval_sequences:
        raise ConfigError(
            f"data: got {len(examples)} examples, expected more than num_eval_sequences "
            f"({config.num_eval_sequences})."
        )
    split = len(examples) - config.num_eval_sequences
    draft_config = DraftConfig(
        num_draft_tokens=config.num_draft_tokens,
        entry_layer=config.entry_layer,
        feature_layers=config.feature_layers,
        rank=config.rank,
        lora_alpha=config.lora_alpha,
        base=base_shape(backbone),
    )
    torch.manual_seed(config.seed)
    model = DraftModel(backbone, draft_config)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    train, held_out = examples[:split], examples[split:]
    vocabulary = torch.tensor(sorted({t for e in examples for t in e.response}))
    config.output.mkdir(parents=True, exist_ok=True)
    head = _head(model)[vocabulary]
    return Run(config, model, optimizer, train, held_out, vocabulary, head, {})


def _train_step(run: Run) -> dict[str, Any]:
    config = run.config
    rate = learning_rate(config, run.step)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    run.optimizer.zero_grad(set_to_none=True)
    draw = torch.Generator().manual_seed(config.seed * 1_000_003 + run.step)
    total = 0.0
    for _ in range(config.sequences_per_step):
        context = run.context(int(torch.randint(len(run.train), (), generator=draw)))
        anchors = draw_anchors(context, config.anchors_per_sequence, draw)
        loss = draft_loss(run.model, context, anchors, run.vocabulary, run.head, config.decay)
        (loss / config.sequences_per_step).backward()  # type: ignore[no-untyped-call]
        total += loss.item() / config.sequences_per_step
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), config.clip)
    run.optimizer.step()
    return {"loss": round(total, 5), "grad_norm": round(norm.item(), 4), "learning_rate": rate}


def learning_rate(config: SelfDiffusionConfig, step: int) -> float:
    """Return the rate of a step: linear warm-up, then linear to 0."""
    warm = min(1.0, (step + 1) / config.warmup_steps)
    return config.learning_rate * warm * (1 - step / config.steps)


def draw_anchors(context: TargetContext, count: int, generator: torch.Generator) -> Tensor:
    """Return up to `count` distinct anchor positions of the response, ascending."""
    # The last token has nothing to predict.
    possible = torch.arange(context.first_anchor, len(context.tokens) - 1)
    chosen = torch.randperm(len(possible), generator=generator)[:count]
    return possible[chosen].sort().values


def draft_loss(
    model: DraftModel,
    context: TargetContext,
    anchors: Tensor,
    vocabulary: Tensor,
    head: Tensor,
    decay: float,
) -> Tensor:
    """Return the cross-entropy of the slots, slot j weighing exp(-(j - 1) / decay).

    Slots beyond the end of the sequence count nothing.
    """
    logits = model(context, anchors, head).float()  # [N, K, V']
    targets, exists = slot_targets(context, anchors, logits.shape[1])
    classes = torch.searchsorted(vocabulary, targets)
    losses = F.cross_entropy(logits.flatten(0, 1), classes.flatten(), reduction="none")
    weights = torch.exp(-torch.arange(logits.shape[1]) / decay) * exists
    return (losses.view_as(weights) * weights).sum() / weights.sum()


def slot_targets(context: TargetContext, anchors: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the tokens [N, K] that follow each anchor, and which of them exist."""
    index = anchors[:, None] + torch.arange(1, count + 1)
    exists = index < len(context.tokens)
    return context.tokens[index.clamp(max=len(context.tokens) - 1)], exists


@torch.no_grad()
def evaluate(run: Run) -> dict[str, Any]:
    """Return acceptance by position and expected acceptance length on the held-out sequences.

    Every eighth position of a response is an anchor. The expected acceptance length is 1 plus the mean
    number of leading slots that equal the target's own tokens, over the whole vocabulary.
    """
    count = run.model.config.num_draft_tokens
    hits, leading, totals = torch.zeros(count), torch.zeros(count), torch.zeros(count)
    for example in run.held_out:
        context = target_context(run.model.backbone, run.model.config, example)
        anchors = torch.arange(context.first_anchor, len(context.tokens) - 1)[::8]
        predicted = run.model(context, anchors, _head(run.model)).argmax(dim=-1)
        targets, exists = slot_targets(context, anchors, count)
        right = (predicted == targets) & exists
        hits += right.sum(dim=0)
        leading += right.long().cumprod(dim=1).sum(dim=0)
        totals += exists.sum(dim=0)
    first = max(float(totals[0]), 1.0)
    return {
        "accuracy_by_position": [round(v, 4) for v in (hits / totals.clamp(min=1)).tolist()],
        "expected_acceptance_length": round(1 + float(leading.sum()) / first, 4),
    }


def _head(model: DraftModel) -> Tensor:
    head: Tensor = model.backbone.head.weight  # type: ignore[attr-defined]
    return head


def _save(run: Run) -> None:
    path = run.config.output / "checkpoint.pt"
    part = path.with_suffix(".part")
    torch.save(
        {
            "step": run.step,
            "model": run.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "config": run.config.model_dump(mode="json"),
        },
        part,
    )
    os.replace(part, path)
    write_json(run.config.output / "config.json", run.config.model_dump(mode="json"))


def _resume(run: Run) -> None:
    path = run.config.output / "checkpoint.pt"
    if not path.is_file():
        return
    try:
        saved = torch.load(path, weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise CheckpointError(
            f"{path} cannot be read: {error}. Remove it to start over."
        ) from error
    current = run.config.model_dump(mode="json")
    differs = sorted(k for k in current if saved["config"].get(k) != current[k] and k != "output")
    if differs:
        raise ConfigError(
            f"output: {run.config.output} holds a run with other values of {', '.join(differs)}. "
            "Give another folder, or the same values to resume."
        )
    run.model.load_state_dict(saved["model"])
    run.optimizer.load_state_dict(saved["optimizer"])
    run.step = saved["step"]
    _drop_metrics_after(run.config.output / "metrics.jsonl", run.step)


def _drop_metrics_after(path: Path, step: int) -> None:
    """Forget the lines of steps that will be run again."""
    if path.is_file():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        part = path.with_suffix(".part")
        part.write_text("".join(kept), encoding="utf-8")
        os.replace(part, path)
