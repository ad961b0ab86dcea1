"""What the recipes for masked-diffusion models share: settings, data, decoding, export.

Such a model fills mask tokens under bidirectional attention: LLaDA (arXiv:2502.09992), Dream, or an
autoregressive architecture that was trained so. Next: hybrid/training/d3llm/recipe.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from hybrid import __version__
from hybrid.errors import ConfigError
from hybrid.models.checkpoint import read_json
from hybrid.models.loading import choose_device
from hybrid.models.store import public_name
from hybrid.training import masks
from hybrid.training.checkpoint import last_evaluation
from hybrid.training.config import Positive, Rate, TrainConfig
from hybrid.training.data import Example, data_sha256, read_examples, split_examples
from hybrid.training.trainable import LoraOptions, Trainable, load_trainable
from hybrid.training.trajectory import Canvas, Denoiser

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


class MaskedDiffusionConfig(TrainConfig):
    """The fields of `TrainConfig`, and these.

    Attributes:
        mask_token_id: None takes the one in the checkpoint's config.json.
        logit_shift: 1 when row i predicts token i + 1 (Dream), 0 when it predicts token i (LLaDA).
        block_size: positions that are decoded together, counted from the end of the prompt.
        rank: r of low-rank updates; None trains all weights.
        lora_alpha: scale of the updates is lora_alpha / rank.
        targets: linear layers with updates ("q_proj", ...); none is all of them but the head.
        merge: export a checkpoint with the updates in its weights, not a PEFT adapter.
        export_dtype: of the exported weights.
        num_decoded: held-out prompts that an evaluation decodes.
    """

    mask_token_id: Annotated[int, Field(ge=0)] | None = None
    logit_shift: Literal[0, 1] = 0
    block_size: Positive = 32
    rank: Positive | None = 256
    lora_alpha: Rate = 256.0
    targets: tuple[str, ...] = ()
    merge: bool = True
    export_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    num_decoded: Positive = 4


@dataclass(frozen=True, slots=True)
class Setting:
    """A loaded model and its data.

    Attributes:
        trainable: the model.
        data_sha256: of the data file.
        mask_token_id: what hides a token.
        train: examples to learn from.
        held_out: the last ones of the file.
    """

    trainable: Trainable
    data_sha256: str
    mask_token_id: int
    train: list[Example]
    held_out: list[Example]


def prepare(config: MaskedDiffusionConfig, *, keep_teacher: bool = False) -> Setting:
    """Load the model and the data.

    Raises:
        ConfigError: bad data or too little of it, or no usable mask token.
        CheckpointError: the model cannot be loaded.
    """
    sha256 = data_sha256(config.data)  # before the model: it may have to be fetched
    lora = None
    if config.rank is not None:
        lora = LoraOptions(config.rank, config.lora_alpha, config.targets, config.seed)
    device = choose_device(config.device)
    trainable = load_trainable(config.model, lora=lora, device=device, keep_teacher=keep_teacher)
    examples = read_examples(
        config.data,
        vocab_size=trainable.vocab_size,
        max_length=min(config.max_length, trainable.max_length),
        tokenizer=trainable.tokenizer,
    )
    train, held_out = split_examples(examples, config.num_eval_sequences)
    mask_token_id = _mask_token_id(config, trainable)
    for number, example in enumerate(examples, start=1):
        if mask_token_id in example.response:
            raise ConfigError(
                f"data: example {number} answers with the mask token {mask_token_id}, expected "
                "responses without masks."
            )
    return Setting(trainable, sha256, mask_token_id, train, held_out)


def _mask_token_id(config: MaskedDiffusionConfig, trainable: Trainable) -> int:
    found = config.mask_token_id
    if found is None:
        found = read_json(trainable.path / "config.json").get("mask_token_id")
    if not isinstance(found, int) or not 0 <= found < trainable.vocab_size:
        raise ConfigError(
            f"mask_token_id: got {found!r}, expected an id from 0 to {trainable.vocab_size - 1}: "
            "the token that the model was trained to fill."
        )
    return found


def full_attention(forward: Forward, canvas: Canvas) -> Denoiser:
    """Return the model as `decode` calls it, every token seeing its whole row."""

    def denoise(ids: Tensor, prompt_lens: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        real = positions < prompt_lens[:, None] + canvas.response_length
        mask = masks.full(ids.shape[1]).to(ids.device)
        return forward(ids, positions, masks.hide_padding(mask, real))

    return denoise


def block_causal(forward: Forward, canvas: Canvas) -> Denoiser:
    """Return the model as `decode` calls it, under D2F's mask; rows of one prompt length."""

    def denoise(ids: Tensor, prompt_lens: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        blocks = masks.block_ids(ids.shape[1], canvas.block_size, int(prompt_lens[0]))
        return forward(ids, positions, masks.block_causal(blocks).to(ids.device))

    return denoise


_MEASURED = ("held_out_loss", "tokens_per_forward", "agreement")
_CARD = """---
base_model: {base}
tags: [hybrid-decoder, masked-diffusion, {recipe}]
---

# {base}, trained by {recipe}

{what}

| | |
|---|---|
| mask token | id {mask_token_id} |
| logit shift | {logit_shift} |
| block size | {block_size} |

## Results on {num_eval} held-out examples

| | |
|---|---|
{results}

## How to make it

`hybrid train {recipe} --config config.json`, hybrid-decoder {version}, with data of SHA-256
`{sha256}` and this configuration:

```json
{config}
```
"""


def export(
    config: MaskedDiffusionConfig,
    setting: Setting,
    folder: Path,
    *,
    recipe: str,
    what: str,
) -> Path:
    """Write `model`, or `adapter`, with a card from the run's last evaluation; return its folder.

    Args:
        config: of the run.
        setting: its model.
        folder: where to.
        recipe: its name.
        what: what the model is and how to decode with it, for the card.

    Raises:
        CheckpointError: it cannot be written; what was there before is intact.
    """
    info = {
        "mask_token_id": setting.mask_token_id,
        "logit_shift": config.logit_shift,
        "block_size": config.block_size,
    }
    values = config.model_dump(mode="json", exclude_defaults=True)
    values |= {name: Path(values[name]).name for name in ("data", "output")}
    values |= {name: public_name(values[name]) for name in values.keys() & {"model", "teacher"}}
    last = last_evaluation(config.output, _MEASURED[0])
    card = _CARD.format(
        base=public_name(config.model),
        recipe=recipe,
        what=what,
        **info,
        num_eval=config.num_eval_sequences,
        results="\n".join(f"| {n} | {last.get(n, 'not measured')} |" for n in _MEASURED),
        version=__version__,
        sha256=setting.data_sha256,
        config=json.dumps(values, indent=2),
    )
    is_adapter = setting.trainable.is_lora and not config.merge
    target = folder / ("adapter" if is_adapter else "model")
    dtype = getattr(torch, config.export_dtype)
    setting.trainable.save(target, info, dtype=dtype, merge=config.merge, card=card)
    return target
