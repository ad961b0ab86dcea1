"""Train a diffusion adapter: anchors of one sequence share one clean pass of the frozen target.

Deterministic and resumable: step n draws its sequences and anchors from (seed, n) alone, so a run
that was killed goes on as if it had not been. Next: hybrid/training/self_diffusion/draft_model.py.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count as count_from_zero
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.errors import CheckpointError, ConfigError
from hybrid.models.adapter import DraftConfig, base_shape
from hybrid.models.loading import load_model
from hybrid.models.transformer import NativeBackbone
from hybrid.training.self_diffusion.card import write_card
from hybrid.training.checkpoint import (
    append_metrics,
    forget_metrics_after,
    load_checkpoint,
    save_checkpoint,
)
from hybrid.training.self_diffusion.config import SelfDiffusionConfig
from hybrid.training.self_diffusion.context import TargetContext, target_context
from hybrid.training.data import Example, data_sha256, read_examples
from hybrid.training.recipe import generator
from hybrid.training.self_diffusion.draft_model import DraftModel
from hybrid.training.self_diffusion.export import base_name, save_adapter

Report = Callable[[dict[str, Any]], None]


@dataclass(slots=True)
class Run:
    """Everything that a step touches."""

    config: SelfDiffusionConfig
    model: DraftModel
    optimizer: torch.optim.Optimizer
    train: list[Example]
    held_out: list[Example]
    vocabulary: Tensor  # [V'] ids that the draft chooses among, ascending
    head: Tensor  # [V', C] their rows of the output head
    data_sha256: str
    contexts: dict[int, TargetContext] = field(default_factory=dict)  # by index in `train`
    step: int = 0
    seconds: float = 0.0  # until `step`, over all processes that took part

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
        report: called with the metrics of each step, which are also written to metrics.jsonl. When
            it raises KeyboardInterrupt the step is saved first.

    Returns:
        The adapter folder.

    Raises:
        ConfigError: bad data, an output folder of another configuration, or a loss that is not a
            number any more.
        CheckpointError: the target or the checkpoint cannot be read, or a file not be written.
    """
    run = _prepare(config)
    _resume(run)
    started = time.perf_counter() - run.seconds
    while run.step < config.steps:
        row = _train_step(run)
        run.step += 1
        if run.step % config.eval_every == 0 or run.step == config.steps:
            row |= evaluate(run)
            _save(run)
        row |= {"step": run.step, "seconds": round(time.perf_counter() - started, 2)}
        append_metrics(config.output, row)
        try:
            report(row)
        except KeyboardInterrupt:  # between two steps, so nothing is half done
            _save(run)
            raise
    adapter = config.output / "adapter"
    save_adapter(
        adapter,
        run.model.config,
        {**run.model.adapter_tensors(), **vocabulary_tensor(run)},
        base_model=base_name(config.model),
    )
    write_card(config.output)
    return adapter


def vocabulary_tensor(run: Run) -> dict[str, Tensor]:
    """Return the draft's vocabulary as a tensor of the adapter; nothing where it is everything."""
    return {} if run.config.draft_vocab_size is None else {"vocabulary": run.vocabulary.int()}


def _prepare(config: SelfDiffusionConfig) -> Run:
    sha256 = data_sha256(config.data)  # before the model: it may have to be fetched
    loaded = load_model(config.model, device=config.device, dtype="bfloat16")
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
        sampler_size=config.sampler_size,
        draft_vocab_size=config.draft_vocab_size,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = DraftModel(backbone, draft_config).to(backbone.device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    train, held_out = examples[:split], examples[split:]
    vocabulary = draft_vocabulary(train, config.draft_vocab_size).to(backbone.device)
    return Run(
        config, model, optimizer, train, held_out, vocabulary, model.head[vocabulary], sha256
    )


def _train_step(run: Run) -> dict[str, Any]:
    config = run.config
    rate = learning_rate(config, run.step)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    run.optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for index in range(config.sequences_per_step):
        draw = generator(config.seed, run.step, index)
        is_short = bool(torch.rand((), generator=draw) < config.short_share)
        count = min(config.num_draft_tokens, config.short_draft_tokens if is_short else 1 << 30)
        context = run.context(int(torch.randint(len(run.train), (), generator=draw)))
        anchors = draw_anchors(context, config.anchors_per_sequence, draw)
        loss = draft_loss(run, context, anchors, count)
        (loss / config.sequences_per_step).backward()  # type: ignore[no-untyped-call]
        total += loss.item() / config.sequences_per_step
    if not math.isfinite(total):
        raise ConfigError(
            f"learning_rate: the loss is {total} at step {run.step + 1}, expected a number. Give a "
            f"rate lower than {config.learning_rate} and another output folder."
        )
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
    return possible[chosen].sort().values.to(context.tokens.device)


def draft_vocabulary(examples: Sequence[Example], size: int | None) -> Tensor:
    """Return the ids of the `size` most frequent response tokens, ascending; None: of all.

    Where fewer occur, the lowest ids fill up.
    """
    counts = Counter(t for e in examples for t in e.response)
    ranked = [token for token, _ in counts.most_common(size)]
    missing = 0 if size is None else size - len(ranked)
    others = (t for t in count_from_zero() if t not in counts)
    return torch.tensor(sorted([*ranked, *islice(others, missing)]))


def draft_loss(run: Run, context: TargetContext, anchors: Tensor, count: int) -> Tensor:
    """Return the mean loss of `count` slots behind each anchor, slot j weighing exp(-(j - 1) / decay).

    Slots beyond the end of the sequence count nothing, nor does the cross-entropy with a token
    that the draft cannot choose.
    """
    config, vocabulary = run.config, run.vocabulary
    logits = run.model(context, anchors, run.head, count).float()  # [N, K, V']
    targets, exists = slot_targets(context, anchors, count)
    classes = torch.searchsorted(vocabulary, targets).clamp(max=len(vocabulary) - 1)
    known = exists & (vocabulary[classes] == targets)
    weights = torch.exp(-torch.arange(count, device=logits.device) / config.decay)
    losses = F.cross_entropy(logits.flatten(0, 1), classes.flatten(), reduction="none")
    losses = losses.view_as(targets) * known * (1 - config.distillation)
    if config.distillation > 0:
        before = (anchors[:, None] + torch.arange(count, device=anchors.device)).clamp(
            max=len(context.tokens) - 1
        )
        law = target_law(run, context)[before - context.first_anchor + 1]
        soft = -(law * F.log_softmax(logits, dim=-1)).sum(dim=-1)
        losses = losses + soft * exists * config.distillation
    return (losses * weights).sum() / (weights * exists).sum()


def target_law(run: Run, context: TargetContext) -> Tensor:
    """Return the target's distribution over the draft's vocabulary after each position.

    Returns:
        [S - first_anchor + 1, V'], beginning with the position before the first anchor.
    """
    backbone = run.model.backbone
    last = context.hidden[backbone.num_layers - 1][context.first_anchor - 1 :]
    return F.linear(backbone.rms_norm(last, backbone.norm), run.head).float().softmax(dim=-1)


def slot_targets(context: TargetContext, anchors: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the tokens [N, K] that follow each anchor, and which of them exist."""
    index = anchors[:, None] + torch.arange(1, count + 1, device=anchors.device)
    exists = index < len(context.tokens)
    return context.tokens[index.clamp(max=len(context.tokens) - 1)], exists


@torch.no_grad()
def evaluate(run: Run) -> dict[str, Any]:
    """Return acceptance by position and expected acceptance length on the held-out sequences.

    A response is decoded as the engine would: a draft begins behind the token that the last one
    ended with. The expected acceptance length is 1 plus the mean number of leading slots that
    equal the target's own tokens; acceptance by position is the share of drafts that got so far.
    """
    count = run.model.config.num_draft_tokens
    reached, num_drafts = torch.zeros(count), 0
    for example in run.held_out:
        context = target_context(run.model.backbone, run.model.config, example)
        lengths = leading_lengths(run, context, count)
        at = 0
        while at < len(lengths):
            reached[: lengths[at]] += 1
            num_drafts += 1
            at += lengths[at] + 1
    shares = reached / max(num_drafts, 1)
    return {
        "acceptance_by_position": [round(v, 4) for v in shares.tolist()],
        "expected_acceptance_length": round(1 + float(shares.sum()), 4),
    }


def leading_lengths(run: Run, context: TargetContext, count: int) -> list[int]:
    """Return how many drafted tokens are right behind each position that has a follower."""
    lengths: list[int] = []
    anchors = torch.arange(context.first_anchor, len(context.tokens) - 1)
    for part in anchors.to(context.tokens.device).split(64):
        predicted = run.vocabulary[run.model(context, part, run.head, count).argmax(dim=-1)]
        targets, exists = slot_targets(context, part, count)
        right = (predicted == targets) & exists
        lengths += right.long().cumprod(dim=1).sum(dim=1).tolist()
    return lengths


def _save(run: Run) -> None:
    state = {
        "step": run.step,
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
    }
    save_checkpoint(run.config, run.data_sha256, state)


def _resume(run: Run) -> None:
    state = load_checkpoint(run.config, run.data_sha256)
    if state is not None:
        try:
            run.model.load_state_dict(state["model"])
            run.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{run.config.output}: the checkpoint does not fit this model: {error}. "
                "Give another output folder."
            ) from error
        run.step = state["step"]
    run.seconds = forget_metrics_after(run.config.output, run.step)
