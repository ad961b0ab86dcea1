"""The joint recipe: autoregression and block diffusion in one fine-tune (Nemotron-style).

One pass over `[noisy | clean]` gives both losses: the clean half is a plain causal pass, and each
noisy block is filled from its own visible tokens and the clean ones before it. The model then
drafts with one mask and verifies with the other. Next: hybrid/training/joint/module.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid.errors import ConfigError
from hybrid.models.loading import choose_device
from hybrid.training.checkpoint import last_evaluation
from hybrid.training.config import TrainConfig
from hybrid.training.data import Example, data_sha256, read_examples, split_examples
from hybrid.training.joint.acceptance import accepted_slots
from hybrid.training.joint.card import card
from hybrid.training.joint.config import JointConfig
from hybrid.training.joint.module import JointBatch, JointModule
from hybrid.training.loop import autocast
from hybrid.training.mask_token import Vocabulary, choose_mask_token
from hybrid.training.masks import block_ids
from hybrid.training.recipe import generator
from hybrid.training.trainable import LoraOptions, Trainable, load_trainable

_ANCHOR_STRIDE = 8


class JointRecipe:
    """See `hybrid.training.recipe.Recipe`."""

    def __init__(
        self,
        config: JointConfig,
        trainable: Trainable,
        train: list[Example],
        held_out: list[Example],
        data_sha256: str,
    ) -> None:
        """Keep the parts, and choose the mask token."""
        used = {token for example in (*train, *held_out) for token in example.tokens}
        ids = Vocabulary(
            trainable.path, trainable.tokenizer, trainable.vocab_size, trainable.eos_token_ids
        )
        mask_token_id = choose_mask_token(ids, config.mask_token_id, used)
        self.config, self.data_sha256 = config, data_sha256
        self.module = JointModule(trainable, mask_token_id, config.alpha)
        self._train, self._held_out = train, held_out

    def batch(self, step: int, index: int) -> JointBatch:
        """Return one random sequence under random noise."""
        config = self.config
        count = config.sequences_per_step
        # All micro-batches of a step know which sequences the others have, for the normalisation.
        draw = generator(config.seed, step, count)
        picks = torch.randint(len(self._train), (count,), generator=draw).tolist()
        lengths = [self._num_learned(self._train[pick]) for pick in picks]
        noise = generator(config.seed, step, index)
        return self._noised(self._train[picks[index]], sum(lengths) / count, noise)

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Return losses per held-out token, and how the model accepts its own one-pass drafts.

        `accuracy_by_position` is the share of slots at which the causal pass, behind the drafted
        tokens before it, says the drafted token. The expected acceptance length is 1 plus the mean
        number of leading such slots. Every eighth position of a response is an anchor.
        """
        sums: dict[str, float] = {"ar_loss": 0.0, "diffusion_loss": 0.0}
        accepted = []
        for number, example in enumerate(self._held_out):
            noise = torch.Generator().manual_seed(number)  # the same at every evaluation
            with autocast(self.config, self.module.trainable.device):
                losses = self.module(self._noised(example, 1.0, noise))
                accepted.append(self._accepted(example))
            sums = {name: value + losses[name].item() for name, value in sums.items()}
        total = sum(map(self._num_learned, self._held_out))
        slots = torch.cat(accepted).double()
        num_anchors = max(len(slots), 1)
        shares = slots.sum(dim=0) / num_anchors
        leading = slots.cumprod(dim=1).sum() / num_anchors
        return {
            **{f"eval_{name}": round(value / total, 5) for name, value in sums.items()},
            "accuracy_by_position": [round(share, 4) for share in shares.tolist()],
            "expected_acceptance_length": round(1 + leading.item(), 4),
        }

    def export(self, folder: Path) -> Path:
        """Write `model`, a checkpoint for AR decoding and self-drafting, or `adapter`."""
        config, trainable = self.config, self.module.trainable
        info = {
            "mask_token_id": self.module.mask_token_id,
            "block_size": config.block_size,
            "dlm_paradigm": "block_diff",
        }
        is_adapter = trainable.is_lora and not config.merge
        target = folder / ("adapter" if is_adapter else "model")
        results = last_evaluation(config.output, "expected_acceptance_length")
        trainable.save(
            target,
            info,
            dtype=getattr(torch, config.export_dtype),
            merge=config.merge,
            card=card(config, info, self.data_sha256, results),
        )
        return target

    def _num_learned(self, example: Example) -> int:
        return len(example.tokens) - self._first(example)

    def _first(self, example: Example) -> int:
        """The first token that is learned; nothing comes before token 0, so it is given."""
        return len(example.prompt) if self.config.train_on == "response" else 1

    def _noised(
        self, example: Example, num_tokens: float, generator: torch.Generator
    ) -> JointBatch:
        config, tokens = self.config, torch.tensor(example.tokens)
        prompt_length = len(example.prompt) if config.train_on == "response" else None
        blocks = block_ids(len(tokens), config.block_size, prompt_length)
        first = self._first(example)
        masked, share = draw_noise(config, blocks, first, generator)
        return JointBatch(tokens, blocks, first, masked, share, num_tokens)

    def _accepted(self, example: Example) -> Tensor:
        trainable, width = self.module.trainable, self.config.block_size
        tokens = torch.tensor(example.tokens, device=trainable.device)
        room = max(trainable.max_length - width + 1, 0)  # a whole block must fit
        possible = torch.arange(min(len(tokens) - 1, room), device=trainable.device)
        anchors = possible[len(example.prompt) :: _ANCHOR_STRIDE]
        return accepted_slots(trainable, tokens, anchors, width, self.module.mask_token_id)


def draw_noise(
    config: JointConfig, blocks: Tensor, first: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return which tokens are masked, and with what probability each was to be, both [R, N].

    Args:
        config: how; R is 2 with `complementary`, else 1.
        blocks: [N].
        first: tokens before it are never masked.
        generator: of the micro-batch.
    """
    # With complements both t and 1 - t are shares.
    most = 1 - config.min_noise if config.complementary else 1.0
    count = int(blocks[-1]) + 1
    shares = torch.rand(count, generator=generator, dtype=torch.float64)
    shares = config.min_noise + (most - config.min_noise) * shares
    share = shares[blocks] if config.noise == "block" else shares[:1].expand(len(blocks))
    masked = torch.rand(len(blocks), generator=generator, dtype=torch.float64) < share
    if config.complementary:
        masked, share = torch.stack([masked, ~masked]), torch.stack([share, 1 - share])
    else:
        masked, share = masked[None], share[None]
    masked[:, :first] = False
    return masked, share


def build(config: TrainConfig) -> JointRecipe:
    """Load the data and the model.

    Raises:
        ConfigError: bad data or options.
        CheckpointError: the model cannot be read.
    """
    assert isinstance(config, JointConfig)
    sha256 = data_sha256(config.data)  # before the model: it may have to be fetched
    lora = None
    if config.rank is not None:
        lora = LoraOptions(config.rank, config.lora_alpha, config.targets, config.seed)
    elif config.targets:
        raise ConfigError("targets: without a rank all weights are trained. Give a rank.")
    trainable = load_trainable(config.model, lora=lora, device=choose_device(config.device))
    examples = read_examples(
        config.data,
        vocab_size=trainable.vocab_size,
        max_length=min(config.max_length, trainable.max_length),
        tokenizer=trainable.tokenizer,
    )
    train, held_out = split_examples(examples, config.num_eval_sequences)
    return JointRecipe(config, trainable, train, held_out, sha256)
