"""D2F: a block-causal student of a bidirectional teacher (arXiv:2508.09192), `hybrid train d2f`.

Taken from the paper and its published settings: teacher and student are one model, the updates off
and on, and read the same noisy sequence; the teacher sees all of it, the student the prompt, the
blocks before and its own; later blocks are masked at least as much as earlier ones, as they are
when blocks are decoded side by side; each masked token's cross-entropy with the teacher's
distribution is divided by its block's mask ratio. Different here: no dropout, so that a resumed run
equals an uninterrupted one, and a sequence in which chance masks nothing has one token masked.
Next: hybrid/training/loop.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid.training import masks
from hybrid.training.config import TrainConfig
from hybrid.training.d2f.config import D2FConfig
from hybrid.training.data import Example
from hybrid.training.loop import autocast
from hybrid.training.masked_diffusion import Setting, block_causal, export, prepare
from hybrid.training.recipe import Scalars, generator
from hybrid.training.trainable import Trainable
from hybrid.training.trajectory import (
    Canvas,
    Trajectory,
    confidence_above,
    decode,
    decoding_metrics,
)


@dataclass(frozen=True, slots=True)
class NoisyBatch:
    """One sequence with part of its response masked.

    Attributes:
        input_ids: [1, T].
        masked: [T] the hidden positions.
        mask_ratio: [T] probability with which each was hidden, 0 in the prompt.
        blocks: [T] the prompt is block 0.
    """

    input_ids: Tensor
    masked: Tensor
    mask_ratio: Tensor
    blocks: Tensor


def rising_ratios(num_blocks: int, least: float, most: float, draw: torch.Generator) -> Tensor:
    """Return mask ratios [n] that never fall: the first uniform in [least, most], none above most.

    Each of the others adds a uniform share of what an even rise to `most` would add.
    """
    first = least + (most - least) * torch.rand((), generator=draw)
    rise = (most - first) / max(num_blocks - 1, 1)
    added = torch.rand(num_blocks - 1, generator=draw) * rise
    return torch.cat([first[None], first + added.cumsum(dim=0)]).clamp(max=most)


def noisy_batch(
    example: Example, config: D2FConfig, mask_token_id: int, draw: torch.Generator
) -> NoisyBatch:
    """Mask each token of the response with the ratio of its block."""
    tokens = torch.tensor(example.tokens)
    blocks = masks.block_ids(len(tokens), config.block_size, len(example.prompt))
    ratios = rising_ratios(int(blocks[-1]), config.mask_ratio_min, config.mask_ratio_max, draw)
    mask_ratio = torch.cat([torch.zeros(1), ratios])[blocks]
    masked = torch.rand(len(tokens), generator=draw) < mask_ratio
    if not masked.any():
        index = int(torch.randint(len(example.response), (), generator=draw))
        masked[len(example.prompt) + index] = True
    input_ids = torch.where(masked, mask_token_id, tokens)
    return NoisyBatch(input_ids[None], masked, mask_ratio, blocks)


class D2FModule(nn.Module):
    """The student, its frozen teacher, and the loss."""

    def __init__(self, trainable: Trainable, config: D2FConfig) -> None:
        super().__init__()
        self.trainable = trainable
        self.config = config

    def forward(self, batch: NoisyBatch) -> Scalars:
        """Return "loss", the mean over the masked tokens of CE(teacher, student) / mask ratio."""
        device = self.trainable.device
        ids, blocks = batch.input_ids.to(device), batch.blocks.to(device)
        positions = torch.arange(ids.shape[1], device=device)
        keep = batch.masked.nonzero()[:, 0].to(device) - self.config.logit_shift
        teacher = self.trainable.teacher(ids, positions, masks.full(len(blocks)).to(device), keep)
        student = self.trainable(ids, positions, masks.block_causal(blocks), keep)
        wanted = teacher[0].float().softmax(dim=-1)
        losses = F.cross_entropy(student[0].float(), wanted, reduction="none")
        return {"loss": (losses / batch.mask_ratio[batch.masked].to(device)).mean()}


class D2FRecipe:
    """See `hybrid.training.recipe.Recipe`."""

    def __init__(self, config: D2FConfig, setting: Setting) -> None:
        self.config = config
        self.module = D2FModule(setting.trainable, config)
        self.data_sha256 = setting.data_sha256
        self._setting = setting

    def batch(self, step: int, index: int) -> NoisyBatch:
        """Return a random sequence under random noise; see `Recipe.batch`."""
        draw = generator(self.config.seed, step, index)
        train = self._setting.train
        example = train[int(torch.randint(len(train), (), generator=draw))]
        return noisy_batch(example, self.config, self._setting.mask_token_id, draw)

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Return the loss of the held-out sequences, and how the student decodes their prompts.

        The noise is the same in every evaluation. Decoded is one block after the other, under the
        block-causal mask; the responses of the data are what it should agree with.
        """
        losses = []
        some = self._setting.held_out[: self.config.num_decoded]
        with autocast(self.config, self._setting.trainable.device):
            for index, example in enumerate(self._setting.held_out):
                draw = generator(self.config.seed, self.config.steps, index)
                batch = noisy_batch(example, self.config, self._setting.mask_token_id, draw)
                losses.append(float(self.module(batch)["loss"]))
            decoded = [self._decode(example) for example in some]
        expected = [example.response for example in some]
        eos_token_ids = self._setting.trainable.eos_token_ids
        return {
            "held_out_loss": round(sum(losses) / len(losses), 5),
            **decoding_metrics(decoded, expected, eos_token_ids),
        }

    def _decode(self, example: Example) -> Trajectory:
        config, trainable = self.config, self._setting.trainable
        canvas = Canvas(
            len(example.response),
            config.block_size,
            self._setting.mask_token_id,
            config.logit_shift,
        )
        rule = confidence_above(config.confidence_threshold)
        denoise = block_causal(trainable, canvas)
        return decode(denoise, [example.prompt], canvas, rule, trainable.device)[0]

    def export(self, folder: Path) -> Path:
        """Write a checkpoint or a PEFT adapter with its card; see `Recipe.export`."""
        what = (
            "A block-causal masked-diffusion model, distilled from its own bidirectional mode "
            "(D2F, arXiv:2508.09192). Decode in blocks that see the prompt, the blocks before them "
            "and themselves, so that finished blocks can be cached."
        )
        return export(self.config, self._setting, folder, recipe="d2f", what=what)


def build(config: TrainConfig) -> D2FRecipe:
    """Load model and data.

    Raises:
        ConfigError: bad data, or no mask token.
        CheckpointError: the model cannot be loaded.
    """
    assert isinstance(config, D2FConfig)
    return D2FRecipe(config, prepare(config, keep_teacher=True))
