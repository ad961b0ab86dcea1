"""A target and a DFlash drafter that fits it, and ways to break the drafter's config."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from repository import ROOT

PAIR = ROOT / "tests" / "fixtures" / "dflash-pair"
TARGET, DRAFTER, PROMPTS = PAIR / "target", PAIR / "dflash", PAIR / "prompts.jsonl"
LIMIT = 40  # tokens of an answer; the drafter learned that many


def copied(
    source: Path, folder: Path, change: Callable[[dict[str, Any]], Any] | None = None
) -> Path:
    """Copy a model's folder and change its config.json."""
    shutil.copytree(source, folder)
    if change is not None:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))
    return folder


def own(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    """Return a change of fields of `dflash_config`."""
    return lambda config: config["dflash_config"].update(fields)


def top(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    """Return a change of fields of the config itself."""
    return lambda config: config.update(fields)


def prompts() -> list[list[int]]:
    """Token ids on which the pair accepts much."""
    return [json.loads(line)["p"] for line in PROMPTS.read_text().splitlines()]
