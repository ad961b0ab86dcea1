"""Checkpoints that bring our `generate`: a folder `custom_generate` beside the weights.

`from_pretrained(CHECKPOINT, trust_remote_code=True)` reads it, and `generate` of that model is
ours. What drafts lies in the same folder. Next: hybrid/plug/generate.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hybrid import __version__
from hybrid.errors import CheckpointError, ConfigError
from hybrid.files import replacing
from hybrid.models.fetch import is_hub_id, snapshot
from hybrid.plug.generate import Plug

FOLDER = "custom_generate"
_FILE = '''"""`generate` by hybrid-decoder. Read by from_pretrained(..., trust_remote_code=True)."""

try:
    from hybrid.plug import carried_generate
except ImportError as error:
    raise ImportError(
        "This checkpoint decodes with hybrid-decoder, which is not installed: pip install "
        "hybrid-decoder. Without trust_remote_code=True transformers decodes it alone."
    ) from error

SETTINGS = {settings!r}


def generate(*args, model, **kwargs):
    """Take what transformers' `model.generate` takes, return what it returns."""
    return carried_generate(model, SETTINGS, *args, **kwargs)
'''


def write_custom_generate(
    folder: str | Path,
    *,
    drafter: str | Path | None = None,
    strategy: str | None = None,
    adapter: str | Path | None = None,
    num_draft_tokens: int | None = None,
) -> Path:
    """Let a saved checkpoint bring our `generate`.

    Args:
        folder: of the checkpoint.
        drafter: a name, or the folder of a DFlash drafter as a `Path` or "dflash:FOLDER", which is
            copied into the checkpoint; see `attach`.
        strategy: name of a verified preset.
        adapter: folder of a diffusion adapter, copied likewise.
        num_draft_tokens: K.

    Returns:
        The folder that was written.

    Raises:
        ConfigError: the folder holds no checkpoint, or what is to be copied is no folder.
        CheckpointError: a file cannot be written.
    """
    checkpoint = Path(folder)
    if not (checkpoint / "config.json").is_file():
        raise ConfigError(
            f"custom_generate: {checkpoint} has no config.json, expected the folder of a saved "
            "model."
        )
    if isinstance(drafter, str) and drafter.startswith("dflash:"):
        drafter = Path(drafter.removeprefix("dflash:"))
    own = checkpoint / FOLDER
    settings: dict[str, Any] = {"strategy": strategy, "num_draft_tokens": num_draft_tokens}
    settings["adapter"] = None if adapter is None else _copied(Path(adapter), own / "adapter")
    settings["drafter"] = drafter
    if isinstance(drafter, Path):
        settings["drafter"] = "dflash:" + _copied(drafter, own / "drafter")
    _write(own / "requirements.txt", f"hybrid-decoder>={__version__}\n")
    given = {name: value for name, value in settings.items() if value is not None}
    _write(own / "generate.py", _FILE.replace("{settings!r}", repr(given)))
    return own


def carried_generate(
    model: PreTrainedModel, settings: Mapping[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Run `generate` by the settings that a checkpoint brings; called by the file that it carries.

    The plug is made at the first call, and kept with the model.

    Raises:
        CheckpointError: what drafts is not in the checkpoint that the model was loaded from.
        ConfigError: see `attach`.
    """
    made = vars(model).get("_hybrid_plug")
    if made is None or made[0] != settings:
        made = vars(model)["_hybrid_plug"] = dict(settings), Plug(model, **_found(model, settings))
    return made[1].generate(*args, **kwargs)


def _found(model: PreTrainedModel, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a plug, with the folders where they lie on this machine."""
    found = dict.fromkeys(("drafter", "strategy", "adapter", "num_draft_tokens"))
    found.update(settings)
    name = str(found["drafter"] or "")
    if found["adapter"]:
        found["adapter"] = _folder(model) / found["adapter"]
    if name.startswith("dflash:"):
        found["drafter"] = _folder(model) / name.removeprefix("dflash:")
    return found


def _folder(model: PreTrainedModel) -> Path:
    """Return the folder `custom_generate` of the checkpoint that a model was loaded from.

    Raises:
        CheckpointError: it brings none, or is on the hub and cannot be fetched.
    """
    checkpoint = Path(model.name_or_path)
    if is_hub_id(model.name_or_path) and not checkpoint.is_dir():
        # The commit that the weights are of, which are here already.
        checkpoint = snapshot(model.name_or_path, getattr(model.config, "_commit_hash", None))
    if not (checkpoint / FOLDER).is_dir():
        raise CheckpointError(
            f"{FOLDER}: what drafts lies beside the weights, and {type(model).__name__} comes from "
            f"{model.name_or_path or 'no checkpoint'}. Load the model from the checkpoint that "
            "brings it, or use hybrid.plug.attach."
        )
    return checkpoint / FOLDER


def _copied(source: Path, target: Path) -> str:
    """Copy a folder; return its name."""
    if not source.is_dir():
        raise ConfigError(f"custom_generate: got {source}, expected a folder. Give its path.")
    try:
        shutil.copytree(source, target, dirs_exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}. Free some space.") from error
    return target.name


def _write(path: Path, text: str) -> None:
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")
