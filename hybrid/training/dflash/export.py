"""Write a drafter's folder: config.json and weights that other engines load, and the card."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from hybrid import __version__
from hybrid.files import replacing
from hybrid.models.dflash import DFlashModel
from hybrid.models.dflash_files import save_dflash
from hybrid.models.store import public_name
from hybrid.training.checkpoint import last_evaluation
from hybrid.training.dflash.config import DFlashConfig

_TEMPLATE = """---
base_model: {base}
tags: [hybrid-decoder, speculative-decoding, dflash]
---

# DFlash drafter for {base}

A network of {num_layers} layers that drafts {count} tokens in one pass, from what {base} computes
at its layers {ids}. {base} verifies the draft: its answers stay its own. Embedding and head are
those of {base}, the mask is its token {mask_token_id}.

    HybridDecoder.from_pretrained(MODEL, drafter="dflash:this folder")

The layout is the public one, so other engines load the folder unchanged:
`--speculative-config '{{"method": "dflash", "model": FOLDER, "num_speculative_tokens": {count}}}'`
in vLLM.

## Acceptance on {num_eval} held-out examples

Share of drafts that equal {base}'s own tokens up to each position. Expected acceptance length
(leading right tokens, plus the one that {base} adds): **{length}**.

| {header} |
|{rule}|
| {shares} |

## How to make it

`hybrid train dflash --config config.json`, hybrid-decoder {version}, with data of SHA-256
`{sha256}` and this configuration:

```json
{config}
```
"""


def export_dflash(folder: Path, config: DFlashConfig, model: DFlashModel, sha256: str) -> None:
    """Write the drafter, and a card from the run's last evaluation.

    Raises:
        CheckpointError: as `save_dflash`.
    """
    save_dflash(folder, model, getattr(torch, config.export_dtype))
    with replacing(folder / "README.md") as part:
        part.write_text(_card(config, model, sha256), encoding="utf-8")


def _card(config: DFlashConfig, model: DFlashModel, sha256: str) -> str:
    values = config.model_dump(mode="json", exclude_defaults=True, exclude={"output"})
    values["data"] = config.data.name
    if "model" in values:
        values["model"] = public_name(config.model)
    last = last_evaluation(config.output, "acceptance_by_position")
    shares = last.get("acceptance_by_position", [])
    spec = model.spec
    return _TEMPLATE.format(
        base=public_name(config.model),
        num_layers=spec.num_layers,
        count=spec.block_size - 1,
        ids=", ".join(map(str, spec.target_layer_ids)),
        mask_token_id=spec.mask_token_id,
        num_eval=config.num_eval_sequences,
        length=last.get("expected_acceptance_length", "not measured"),
        header=" | ".join(str(i + 1) for i in range(len(shares))),
        rule="|".join("---" for _ in shares),
        shares=" | ".join(f"{100 * share:.0f} %" for share in shares),
        version=__version__,
        sha256=sha256,
        config=json.dumps(values, indent=2),
    )
