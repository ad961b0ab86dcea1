"""d3LLM: distil a teacher's decoding order (arXiv:2601.07568), in `hybrid train d3llm`.

Taken from the paper and its published settings: the teacher commits one token per forward, block
by block, most confident first; the student sees one block as the trajectory passed it, everything
before it clean, everything behind it masked; the mask ratio is uniform in [current, max] with
current growing linearly; the block grows over the run; loss and its weights (see `D3LLMModule`).
Different here: the windows begin at multiples of their own length and the last may be short; their
length changes in stages instead of continuously; and the mask token is never decoded.
Next: hybrid/training/d2f/recipe.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid.training import masks
from hybrid.training.config import TrainConfig
from hybrid.training.d3llm.batches import (
    StudentBatch,
    least_mask_ratio,
    student_batch,
    window_size,
)
from hybrid.training.d3llm.config import D3LLMConfig
from hybrid.training.d3llm.teacher import canvas_of, teacher_trajectories
from hybrid.training.data import Example
from hybrid.training.loop import autocast
from hybrid.training.masked_diffusion import Setting, export, full_attention, prepare
from hybrid.training.recipe import Scalars, generator
from hybrid.training.trainable import Trainable
from hybrid.training.trajectory import Trajectory, decode, decoding_metrics, entropy_at_most


class D3LLMModule(nn.Module):
    """The student and its loss.

    loss = (CE on the masked + CE on the complement + w H) / 4, each CE a mean over its tokens; H is
    the mean entropy, at a temperature, of the masked tokens that the student predicts right.
    """

    def __init__(self, trainable: Trainable, config: D3LLMConfig) -> None:
        super().__init__()
        self.trainable = trainable
        self.config = config

    def forward(self, batch: StudentBatch) -> Scalars:
        """Return "loss" and its parts: "masked", "complement", "entropy"."""
        logits, targets, masked = self.block_logits(batch)
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")  # [2, n]
        masked_loss, complement = (losses * masked).sum(dim=1) / masked.sum(dim=1).clamp(min=1)
        log_probs = (logits[0] / self.config.entropy_temperature).log_softmax(dim=-1)
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
        right = masked[0] & (logits[0].argmax(dim=-1) == targets[0])
        certainty = (entropy * right).sum() / right.sum().clamp(min=1)
        loss = (masked_loss + complement + self.config.entropy_weight * certainty) / 4
        parts = {"masked": masked_loss, "complement": complement, "entropy": certainty}
        return {"loss": loss, **{name: value.detach() for name, value in parts.items()}}

    def block_logits(self, batch: StudentBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return float32 logits [2, n, V] of the block, its targets [2, n] and masks [2, n]."""
        device = self.trainable.device
        where = batch.masked.any(dim=0).nonzero()[:, 0]
        positions = torch.arange(batch.input_ids.shape[1], device=device)
        logits = self.trainable(
            batch.input_ids.to(device),
            positions,
            masks.full(len(positions)).to(device),
            keep=(where - self.config.logit_shift).to(device),
        )
        targets = batch.targets[where].expand(2, -1)
        return logits.float(), targets.to(device), batch.masked[:, where].to(device)


class D3LLMRecipe:
    """See `hybrid.training.recipe.Recipe`."""

    def __init__(
        self, config: D3LLMConfig, setting: Setting, trajectories: Sequence[Trajectory]
    ) -> None:
        """Take the teacher's trajectories, of the training examples and then of the held-out."""
        self.config = config
        self.module = D3LLMModule(setting.trainable, config)
        self.data_sha256 = _sha256(setting, trajectories)
        self._setting = setting
        split = len(setting.train)
        self._train = list(zip(setting.train, trajectories[:split], strict=True))
        self._held_out = list(zip(setting.held_out, trajectories[split:], strict=True))

    def batch(self, step: int, index: int) -> StudentBatch:
        """Return a random block of a random sequence; see `Recipe.batch`."""
        config, draw = self.config, generator(self.config.seed, step, index)
        progress = step / config.steps
        chosen = self._train[int(torch.randint(len(self._train), (), generator=draw))]
        least = least_mask_ratio(config.mask_ratio_start, config.mask_ratio_max, progress)
        size = window_size(config.window_sizes, progress)
        return self._student(*chosen, size, least, draw)

    def _student(
        self,
        example: Example,
        trajectory: Trajectory,
        size: int,
        least_ratio: float,
        draw: torch.Generator,
    ) -> StudentBatch:
        starts = range(0, self.config.response_length, size)
        start = starts[int(torch.randint(len(starts), (), generator=draw))]
        block = range(start, min(start + size, self.config.response_length))
        spread = self.config.mask_ratio_max - least_ratio
        ratio = least_ratio + spread * float(torch.rand((), generator=draw))
        return student_batch(example.prompt, trajectory, block, ratio, self._setting.mask_token_id)

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Return the loss per hidden token of held-out blocks, and how the student decodes.

        The blocks and their masks are the same in every evaluation.
        """
        total = count = 0.0
        with autocast(self.config, self._setting.trainable.device):
            for index, (example, trajectory) in enumerate(self._held_out):
                draw = generator(self.config.seed, self.config.steps, index)
                batch = self._student(example, trajectory, self.config.block_size, 0.0, draw)
                logits, targets, masked = self.module.block_logits(batch)
                losses = F.cross_entropy(logits[0], targets[0], reduction="none")
                total += float(losses[masked[0]].sum())
                count += float(masked[0].sum())
            return {"held_out_loss": round(total / count, 5), **self._decoding()}

    def _decoding(self) -> dict[str, Any]:
        trainable, canvas = self._setting.trainable, canvas_of(self.config, self._setting)
        some = self._held_out[: self.config.num_decoded]
        prompts = [example.prompt for example, _ in some]
        rule = entropy_at_most(self.config.entropy_threshold)
        denoise = full_attention(trainable, canvas)
        decoded = decode(denoise, prompts, canvas, rule, trainable.device)
        expected = [trajectory.tokens for _, trajectory in some]
        return decoding_metrics(decoded, expected, trainable.eos_token_ids)

    def export(self, folder: Path) -> Path:
        """Write a checkpoint or a PEFT adapter with its card; see `Recipe.export`."""
        what = (
            "A masked-diffusion model that commits more tokens per forward: it was distilled from "
            "its teacher's own decoding order (d3LLM, arXiv:2601.07568). Decode with full "
            f"attention, committing tokens of an entropy up to {self.config.entropy_threshold}."
        )
        return export(self.config, self._setting, folder, recipe="d3llm", what=what)


def build(config: TrainConfig) -> D3LLMRecipe:
    """Load model and data, and decode the teacher's trajectories into the run folder.

    Raises:
        ConfigError: bad data, a prompt that leaves no room for a response, no mask token, or a
            teacher of another vocabulary.
        CheckpointError: a model cannot be loaded, or the trajectories not be written.
    """
    assert isinstance(config, D3LLMConfig)
    setting = prepare(config)
    return D3LLMRecipe(config, setting, teacher_trajectories(config, setting))


def _sha256(setting: Setting, trajectories: Sequence[Trajectory]) -> str:
    digest = hashlib.sha256()
    examples = (*setting.train, *setting.held_out)
    for example, trajectory in zip(examples, trajectories, strict=True):
        parts = [list(example.prompt), trajectory.tokens, trajectory.steps]
        digest.update(json.dumps(parts).encode())
    return digest.hexdigest()
