"""The model card of an adapter folder: what it is, how it was made, how well it drafts.

All but code and versions, which are those of the process that writes it, comes from the run's own
files, so a card can be written again at any time.
"""

from __future__ import annotations

import json
import platform
import shlex
from importlib.metadata import version
from pathlib import Path

import torch

from hybrid import __version__
from hybrid.errors import CheckpointError
from hybrid.files import replacing
from hybrid.models.store import DEFAULT_NAME, public_name
from hybrid.revision import Revision, git_revision
from hybrid.training.checkpoint import last_evaluation
from hybrid.training.data import data_sha256
from hybrid.training.self_diffusion.config import SelfDiffusionConfig

_FLAGS = {"data", "output", "model", "steps", "learning_rate", "seed"}  # the others go by --set
_TEMPLATE = """---
{license}base_model: {base}
library_name: peft
tags: [hybrid-decoder, self-speculative-decoding, diffusion, lora]
---

# Diffusion adapter for {base}

It lets the model draft {num_draft_tokens} tokens for itself in {passes}
{slots}, which its own autoregressive mode then verifies.
The adapter acts in draft passes only: the autoregressive logits and the key-value cache stay those
of the base model, bit for bit.

    HybridDecoder.from_pretrained({model!r}, adapter="this folder")

The low-rank weights are a PEFT adapter (`adapter_model.safetensors`). {peft}

## Training

| | |
|---|---|
| data | `{data}`, {num_examples} examples, the last {num_eval} of them held out |
| SHA-256 of the data | `{sha256}` |
| seed | {seed} |
| steps | {steps} |
| hours | {hours:.2f} |
| code | {code} |
| versions | {versions} |

    {command}

## Acceptance

On the held-out examples, whose prompts are not trained on, greedy: share of drafted tokens that
equal the base model's own if those before them do, by position behind the anchor. Expected
acceptance length (leading right tokens of a draft, plus the one that the base model adds):
**{length:.2f}**.

| {header} |
|{rule}|
| {accuracy} |

## Licence

{terms}
"""

_SLOTS = {
    "mask": "over masked slots that see each other",
    "uniform": "over random tokens, the anchor's row with the base weights, attention causal",
}
_TERMS = "That of the base model, from whose answers and weights it was made."
_PLAIN = """That is all of it: stock PEFT
drafts with it (activated LoRA), and so does any server that takes such an adapter."""
_NOT_PLAIN = """On their own they do
not draft: the rest of the draft pass is in `draft_model.safetensors`."""


def write_card(run: Path, config: SelfDiffusionConfig | None = None) -> Path:
    """Write README.md into the adapter folder of a finished run.

    Args:
        run: output folder of the training.
        config: of the run; None is what its last checkpoint was made with.

    Returns:
        The card.

    Raises:
        CheckpointError: the run has no configuration or no evaluation yet.
        ConfigError: its data cannot be read.
    """
    if config is None:
        try:
            config = SelfDiffusionConfig(**json.loads((run / "config.json").read_text("utf-8")))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{run} holds no training run: {error}.") from error
    last = last_evaluation(run, "accuracy_by_position")
    if not last:
        raise CheckpointError(f"{run} has no evaluation yet, expected one in metrics.jsonl.")
    accuracy, card = last["accuracy_by_position"], run / "adapter" / "README.md"
    text = _TEMPLATE.format(
        base=public_name(config.model),
        license="license: apache-2.0\n" if config.model == DEFAULT_NAME else "",
        terms="Apache-2.0, as the base model." if config.model == DEFAULT_NAME else _TERMS,
        model=_shown(config.model),
        num_draft_tokens=config.num_draft_tokens,
        passes="one pass" if config.num_passes == 1 else f"{config.num_passes} passes",
        slots=_SLOTS[config.corruption],
        peft=_NOT_PLAIN if (card.parent / "draft_model.safetensors").exists() else _PLAIN,
        data=config.data.name,
        num_examples=sum(bool(line.strip()) for line in config.data.read_bytes().split(b"\n")),
        num_eval=config.num_eval_sequences,
        sha256=data_sha256(config.data),
        seed=config.seed,
        steps=last["step"],
        hours=last["seconds"] / 3600,
        code=code_row(git_revision()),
        versions=_versions(),
        command=command_line(config),
        length=last["expected_acceptance_length"],
        header=" | ".join(str(i + 1) for i in range(len(accuracy))),
        rule="|".join("---" for _ in accuracy),
        accuracy=" | ".join(f"{100 * share:.0f} %" for share in accuracy),
    )
    with replacing(card) as part:
        part.write_text(text, encoding="utf-8")
    return card


def command_line(config: SelfDiffusionConfig) -> str:
    """Return the command that makes this run; paths are shown by their last part."""
    words = ["hybrid", "train", "self-diffusion"]
    for name, value in config.model_dump(mode="json").items():
        info = SelfDiffusionConfig.model_fields[name]
        if not info.is_required() and getattr(config, name) == info.default:
            continue
        shown = _shown(value) if isinstance(value, str) else json.dumps(value)
        flag = f"--{name.replace('_', '-')}"
        words += [flag, shown] if name in _FLAGS else ["--set", f"{name}={shown}"]
    return shlex.join(words)


def _shown(text: str) -> str:
    path = Path(text)
    return path.name if path.is_absolute() or path.exists() else text


def code_row(revision: Revision) -> str:
    """Return what names the code: the version, and in a checkout the commit."""
    parts = [f"hybrid-decoder {__version__}"]
    if revision.sha is not None:
        parts.append(f"commit {revision.sha}")
    if revision.is_dirty:
        parts.append("modified")
    return ", ".join(parts)


def _versions() -> str:
    found = ", ".join(f"{name} {version(name)}" for name in ("transformers", "safetensors"))
    return (
        f"Python {platform.python_version()}, torch {torch.__version__}, {found}, "
        f"{torch.get_num_threads()} thread(s)"
    )
