"""Targets that draft training does not compute rightly are refused, not trained wrongly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid.errors import ConfigError
from hybrid.training.native import load_native
from hybrid.training.self_diffusion.config import SelfDiffusionConfig

GOLDEN = Path(__file__).parents[3] / "golden"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("llada-rand", "is not autoregressive"),
        ("sdar-rand", "is not autoregressive"),
        ("nemotron-rand", "scales queries"),
    ],
)
def test_refused(model: str, said: str, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"p": [1, 2], "r": [3, 4]}) + "\n")
    config = SelfDiffusionConfig(
        data=data, output=tmp_path / "run", model=str(GOLDEN / model), precision="float32"
    )
    with pytest.raises(ConfigError, match=said):
        load_native(config)
