"""The model card of a jointly trained model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid import __version__
from hybrid.models.store import public_name
from hybrid.training.joint.config import JointConfig

_TEMPLATE = """---
base_model: {base}
tags: [hybrid-decoder, block-diffusion, self-speculative-decoding]
---

# {base}, autoregressive and diffusion

Fine-tuned jointly: with a causal mask it is an autoregressive model, with a bidirectional mask over
blocks of {block_size} it fills masked tokens (id {mask_token_id}) behind a causal prefix. Its
answers are not those of {base}: the weights changed.

## Results on {num_eval} held-out examples

| | |
|---|---|
| autoregressive loss | {ar} |
| diffusion loss | {diffusion} |
| expected acceptance length of its own one-pass drafts | {length} |

## How to make it

`hybrid train joint --config config.json`, hybrid-decoder {version}, with data of SHA-256
`{sha256}` and this configuration:

```json
{config}
```
"""


def card(
    config: JointConfig, info: Mapping[str, Any], sha256: str, results: Mapping[str, Any]
) -> str:
    """Return README.md; paths are shown by their last part."""
    values = config.model_dump(mode="json", exclude_defaults=True)
    values |= {name: Path(values[name]).name for name in ("data", "output")}
    if "model" in values:
        values["model"] = public_name(config.model)
    return _TEMPLATE.format(
        base=public_name(config.model),
        block_size=info["block_size"],
        mask_token_id=info["mask_token_id"],
        num_eval=config.num_eval_sequences,
        ar=results.get("eval_ar_loss", "not measured"),
        diffusion=results.get("eval_diffusion_loss", "not measured"),
        length=results.get("expected_acceptance_length", "not measured"),
        version=__version__,
        sha256=sha256,
        config=json.dumps(values, indent=2),
    )
