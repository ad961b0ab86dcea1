"""`export`: a drafter or an adapter as another engine loads it. Next: hybrid/cli/export.py."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hybrid.errors import ConfigError, HybridError, did_you_mean
from hybrid.export import serving
from hybrid.export.layouts import save_speculators, save_transformers
from hybrid.files import replacing_folder
from hybrid.models.checkpoint import open_checkpoint, read_json
from hybrid.models.dflash_files import dflash_spec, load_dflash, save_dflash
from hybrid.models.draft_config import DraftConfig, is_adapter, read_adapter
from hybrid.models.families import spec_from_config, why_not_native
from hybrid.models.store import resolve
from hybrid.plug.carried import FOLDER, write_custom_generate
from hybrid.training.self_diffusion.export import save_adapter

ENGINES = ("vllm", "sglang", "speculators", "hf")
UNKNOWN_TARGET = "TARGET"  # in a command, where nobody says


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written.

    Attributes:
        folder: where it lies.
        kind: "dflash" or "adapter".
        command: what serves it; Python for transformers and PEFT.
    """

    folder: Path
    kind: str
    command: str


def export(
    engine: str,
    folder: Path,
    output: Path,
    *,
    target: str | None = None,
    custom_generate: bool = False,
    force: bool = False,
) -> Exported:
    """Write a trained folder in the layout of an engine; it appears whole or not at all.

    Args:
        engine: one of `ENGINES`.
        folder: a DFlash drafter in any layout, or a diffusion adapter.
        output: folder to write.
        target: model that it drafts for, a folder or hub id; None is what the folder says.
        custom_generate: with engine "hf", write the target itself, as a checkpoint that carries
            the drafter or adapter and a `generate` that decodes with this project; it may be any.
        force: replace what `output` holds, if that was exported before.

    Raises:
        ConfigError: an unknown engine, a kind that the engine does not serve, no target where one
            must be named, or `output` is there.
        CheckpointError: the folder cannot be read, or `output` not be written.
    """
    if engine not in ENGINES:
        raise ConfigError(f"engine: got {engine!r}.{did_you_mean(engine, ENGINES)}")
    if force and any(output.glob("*")) and not _is_export(output):
        raise ConfigError(
            f"--force: {output} holds other things than a drafter or an adapter, and would lose "
            "them. Give another folder."
        )
    if custom_generate:
        if engine != "hf":
            raise ConfigError(f"custom_generate: got engine {engine!r}, expected 'hf'.")
        return _export_target(folder, output, target, force)
    if is_adapter(folder):
        return _export_adapter(engine, folder, output, target, force)
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{folder} is a PEFT adapter already, with no draft pass described in it. "
            "Serve it as it is."
        )
    return _export_drafter(engine, folder, output, target, force)


def _is_export(folder: Path) -> bool:
    """Whether a folder holds what this module writes; a target's own checkpoint is no export."""
    if (folder / ".git").exists():
        return False
    if is_adapter(folder) or (folder / FOLDER / "generate.py").is_file():
        return True
    try:
        dflash_spec(read_json(folder / "config.json"))
    except HybridError:
        return False
    return True


def _export_drafter(
    engine: str, folder: Path, output: Path, target: str | None, force: bool
) -> Exported:
    model, dtype = load_dflash(folder), stored_dtype(folder)
    name = target or _named_target(folder)
    if engine == "speculators" and name is None:
        raise ConfigError(
            "target: got none, expected a folder or a hub id: a speculator names its target. "
            "Give --target MODEL."
        )
    name = name or UNKNOWN_TARGET
    card = folder / "README.md"
    text = card.read_bytes() if card.is_file() else None
    with replacing_folder(output, force=force) as part:
        if engine == "hf":
            save_transformers(part, model, dtype)
        elif engine == "speculators":
            save_speculators(part, model, dtype, name)
        else:
            save_dflash(part, model, dtype)
        if text is not None:
            (part / card.name).write_bytes(text)
    command = {
        "vllm": serving.vllm(output, name, model.spec.block_size - 1),
        "sglang": serving.sglang(output, name),
        "speculators": serving.speculators(output),
        "hf": serving.transformers_drafter(output, name),
    }[engine]
    return Exported(output, "dflash", command)


def _export_adapter(
    engine: str, folder: Path, output: Path, target: str | None, force: bool
) -> Exported:
    config, tensors = read_adapter(folder)
    if problem := why_not_served(config, engine):
        raise ConfigError(f"{folder}: {problem}")
    name = target or _named_target(folder) or UNKNOWN_TARGET
    dtype = next(iter(tensors.values())).dtype
    with replacing_folder(output, force=force) as part:
        save_adapter(part, config, tensors, base_model=name, dtype=dtype)
    command = (
        serving.peft_adapter(output, name)
        if engine == "hf"
        else serving.sglang_uno(output, name, config.num_draft_tokens)
    )
    return Exported(output, "adapter", command)


def _export_target(folder: Path, output: Path, target: str | None, force: bool) -> Exported:
    name = target or _named_target(folder)
    if name is None:
        raise ConfigError(
            "target: got none, expected the model whose checkpoint is to carry the drafter. "
            "Give --target MODEL."
        )
    # What cannot be read, or drafts for another model, is not carried.
    drafts_itself = is_adapter(folder)
    own = read_adapter(folder)[0] if drafts_itself else load_dflash(folder).spec
    checkpoint = resolve(name, "float32")
    config = read_json(checkpoint / "config.json")
    if why_not_native(config) is None:
        own.check_target(spec_from_config(config))
    with replacing_folder(output, force=force) as part:
        shutil.copytree(checkpoint, part, dirs_exist_ok=True)
        write_custom_generate(
            part,
            drafter=None if drafts_itself else folder,
            adapter=folder if drafts_itself else None,
        )
    kind = "adapter" if drafts_itself else "dflash"
    return Exported(output, kind, serving.custom_generate(output))


def why_not_served(config: DraftConfig, engine: str) -> str | None:
    """Return why an engine cannot draft with a diffusion adapter; None where it can."""
    if not config.is_plain:
        extras = [
            f"slots that enter at layer {config.entry_layer} through learned inputs",
            "norms of its own",
            "a sampler head",
            f"a draft vocabulary of {config.draft_vocab_size}",
        ]
        has = (
            config.entry_layer > 0,
            config.train_norms,
            config.sampler_size > 0,
            config.draft_vocab_size is not None,
        )
        listed = ", ".join(what for what, is_so in zip(extras, has, strict=True) if is_so)
        return (
            f"the adapter has {listed}, which no other engine computes: PEFT would load its "
            "low-rank updates and draft nonsense. Expected a plain adapter; train one with "
            "entry_layer=0 train_norms=false sampler_size=0."
        )
    if engine in {"vllm", "speculators"}:
        return (
            "vLLM has no drafts by the target's own adapter. Export it for sglang or hf, or train "
            "a DFlash drafter (`hybrid train dflash`) for vLLM."
        )
    if engine == "sglang" and config.corruption != "uniform":
        return (
            "the adapter was trained on masked slots, but SGLang's UNO drafts from random tokens "
            "under causal attention. Train it with corruption=uniform."
        )
    return None


def stored_dtype(folder: Path) -> torch.dtype:
    """Return the dtype of a folder's weights, by their first tensor."""
    first = next(iter(open_checkpoint(folder).tensors.values()))
    return first.dtype if isinstance(first, Tensor) else torch.float32


def _named_target(folder: Path) -> str | None:
    """Return the target that an adapter's or speculator's config names, or the card of training."""
    config, card = folder / "adapter_config.json", folder / "README.md"
    if config.is_file():
        return read_json(config).get("base_model_name_or_path")
    if (config := folder / "config.json").is_file():
        speculator = read_json(config).get("speculators_config") or {}
        if verifier := speculator.get("verifier"):
            return verifier.get("name_or_path")
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    found = re.search(r"^base_model: *(\S+)$", text, re.MULTILINE)
    return found[1] if found else None
