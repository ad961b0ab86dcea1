"""What the files of a diffusion adapter say, held against its target.

Next: hybrid/pair/diagnosis.py.
"""

from __future__ import annotations

from pathlib import Path

from hybrid.export.export import why_not_served
from hybrid.models.draft_config import DRAFT_CONFIG, DraftConfig, is_adapter, read_adapter
from hybrid.models.loading import LoadedModel
from hybrid.models.transformer import NativeBackbone
from hybrid.pair.finding import Finding, Level, has_problem


def check_adapter(loaded: LoadedModel, folder: Path) -> tuple[list[Finding], int | None]:
    """Return what is said of an adapter, and how many tokens it drafts; None if it cannot draft.

    Raises:
        CheckpointError: its files are missing or damaged.
    """
    backbone = loaded.backbone
    if not isinstance(backbone, NativeBackbone):
        text = "the target runs on transformers' own code, where adapters do not draft"
        return [Finding("target", Level.PROBLEM, text)], None
    if not is_adapter(folder):
        text = f"a PEFT folder without {DRAFT_CONFIG}: nothing says how its drafts are made"
        return [Finding("layout", Level.PROBLEM, text)], None
    config, _ = read_adapter(folder)
    findings = [_target(config, backbone), _draft_pass(config, backbone)]
    for engine in ("sglang", "hf"):
        reason = why_not_served(config, engine)
        name = "PEFT" if engine == "hf" else "SGLang's UNO"
        level, text = (Level.NOTE, reason) if reason else (Level.OK, f"`hybrid export {engine}`")
        findings.append(Finding(f"served by {name}", level, text))
    if has_problem(findings):
        return findings, None
    return findings, config.preferred_draft_tokens or config.num_draft_tokens


def _target(config: DraftConfig, backbone: NativeBackbone) -> Finding:
    differs = config.differs(backbone)
    if not differs:
        return Finding("target", Level.OK, "made for a target of this shape")
    listed = ", ".join(f"{name} {own} instead of {its}" for name, (own, its) in differs.items())
    return Finding("target", Level.PROBLEM, f"made for another target: {listed}")


def _draft_pass(config: DraftConfig, backbone: NativeBackbone) -> Finding:
    problem = config.problem(backbone.spec)
    if problem is not None:
        return Finding("draft pass", Level.PROBLEM, problem)
    rows = "random tokens" if config.corruption == "uniform" else "masked slots"
    text = f"{config.num_draft_tokens} tokens from {rows}, from layer {config.entry_layer} on"
    return Finding("draft pass", Level.OK, text)
