"""`diagnose`: is this drafter the target's, and does it draft as well when served as in training?

First the files, then measurements: what is accepted in this project, in transformers and in vLLM,
and where they first differ. Next: hybrid/cli/doctor_pair.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from hybrid.bench.prompts import PROMPTS, encode_prompts
from hybrid.decoder import HybridDecoder
from hybrid.drafters.dflash import DFlashDrafter
from hybrid.errors import CheckpointError, ConfigError
from hybrid.models.adapter import load_adapter
from hybrid.models.dflash_files import load_dflash
from hybrid.models.draft_config import is_adapter
from hybrid.models.fetch import Progress
from hybrid.models.loading import LoadedModel, load_model
from hybrid.models.transformer import NativeBackbone
from hybrid.pair import engines
from hybrid.pair.adapter_checks import check_adapter
from hybrid.pair.checks import Pair, check_pair
from hybrid.pair.finding import Finding, Level
from hybrid.pair.probes import GOOD, Probe, is_clearly_better, probes, without_causality
from hybrid.pair.trace import Trace, first_difference, similar
from hybrid.protocols import Backbone
from hybrid.training.mask_token import Vocabulary, choose_mask_token

_NUM_PROMPTS = 4
_RANDOM_PROMPT = 16  # ids, where there is no tokenizer


@dataclass
class Diagnosis:
    """What came out.

    Attributes:
        findings: of the files, then of the measurements.
        traces: of the engines that ran, this project's first.
        skipped: {engine: why it was not measured}.
    """

    findings: list[Finding] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Measuring:
    """How the engines are asked.

    Attributes:
        prompts: texts or the fields of a line, as `hybrid bench` reads them; None is a few of its
            own, or random ids where the target has no tokenizer.
        max_new_tokens: of each answer.
        device: of this project's run.
        vllm: also in vLLM, where there is one.
    """

    prompts: Sequence[Any] | None = None
    max_new_tokens: int = 64
    device: str = "auto"
    vllm: bool = True


def diagnose(
    target: str, drafter: Path, how: Measuring, *, progress: Progress | None = None
) -> Diagnosis:
    """Check a target and a DFlash drafter, or a diffusion adapter, in float32.

    Args:
        target: "default", a Hugging Face folder, a GGUF file or a hub id.
        drafter: folder of the drafter, as it would be served, or of the adapter.
        how: the measurements.
        progress: see `hybrid.models.store.resolve`.

    Raises:
        CheckpointError: the target, or the drafter's files, cannot be read.
        ConfigError: a bad prompt, device or limit.
    """
    if how.max_new_tokens < 2:
        raise ConfigError(f"max_new_tokens: got {how.max_new_tokens}, expected at least 2.")
    if is_adapter(drafter) or (drafter / "adapter_config.json").is_file():
        return _diagnose_adapter(target, drafter, how, progress)
    loaded = load_model(target, device=how.device, dtype="float32", progress=progress)
    pair = Pair.read(loaded.path, drafter)
    found = Diagnosis(check_pair(pair))
    prompts = _prompts(loaded, how)
    ours = _ours(found, loaded, drafter, pair, prompts, how)
    python, size = engines.find_vllm() if how.vllm else None, pair.own.get("block_size")
    if python is None:
        found.skipped["vllm"] = "no Python with vLLM; name one with HYBRID_VLLM_PYTHON"
    elif isinstance(size, int) and size > 1:
        asked = (loaded.path, drafter, prompts, how.max_new_tokens, size - 1)
        _try(found, "vllm", lambda: engines.in_vllm(python, *asked))
    if ours is not None and any(ours.histogram):
        found.findings += [_compared(ours, other) for other in found.traces[1:]]
    return found


def _ours(
    found: Diagnosis,
    loaded: LoadedModel,
    drafter: Path,
    pair: Pair,
    prompts: list[list[int]],
    how: Measuring,
) -> Trace | None:
    """Measure here and in transformers; undo the usual mistakes where little is accepted."""
    backbone = cast(Backbone, loaded.backbone)

    def measured(config: Any) -> Trace:
        model = load_dflash(drafter, config=config)
        decoder = HybridDecoder(backbone, loaded.tokenizer, drafter=DFlashDrafter(backbone, model))
        count = model.spec.block_size - 1
        return engines.in_ours(decoder, prompts, how.max_new_tokens, count)

    config = without_causality(pair.drafter)
    ours = _try(found, "hybrid", lambda: measured(config))
    if ours is not None:
        model = load_dflash(drafter, config=config)
        asked = (loaded.path, model, prompts, how.max_new_tokens, backbone.device)
        _try(found, "transformers", lambda: engines.in_transformers(*asked))
    if ours is None or 0 < ours.acceptance_length < GOOD:
        undone = [
            (trace, probe)
            for probe in probes(pair, _mask_tokens(loaded))
            if (trace := _quietly(partial(measured, probe.config))) is not None
        ]
        best = max(undone, key=lambda entry: entry[0].acceptance_length, default=None)
        if best is not None and is_clearly_better(best[0], ours):
            found.findings.append(_undone(*best, ours))
    if ours is not None and ours.acceptance_length < GOOD:
        found.findings.append(_low(ours))
    return ours


def _try(found: Diagnosis, engine: str, measure: Callable[[], Trace]) -> Trace | None:
    """Keep what an engine measures, or why it does not."""
    try:
        trace = measure()
    except (CheckpointError, ConfigError) as error:
        found.skipped[engine] = str(error)
        if engine == "hybrid":  # it computes what the paper describes, or says what it does not
            found.findings.append(Finding("loading", Level.PROBLEM, str(error)))
        return None
    found.traces.append(trace)
    return trace


def _quietly(measure: Callable[[], Trace]) -> Trace | None:
    try:
        return measure()
    except (CheckpointError, ConfigError):  # a config that this drafter cannot have
        return None


def _undone(probed: Trace, probe: Probe, ours: Trace | None) -> Finding:
    now = "cannot be used" if ours is None else f"makes it {ours.acceptance_length:.2f}"
    text = (
        f"with {probe.text}, {probed.acceptance_length:.2f} tokens per pass are accepted; what "
        f"config.json says {now}. Write what works"
    )
    return Finding(probe.check, Level.PROBLEM, text)


def _compared(ours: Trace, other: Trace) -> Finding:
    name, difference = f"acceptance in {other.engine}", first_difference(ours, other)
    lengths = f"{ours.acceptance_length:.2f} here, {other.acceptance_length:.2f} there"
    if difference is None:
        return Finding(name, Level.OK, f"the same drafts are accepted: {lengths}")
    if similar(ours, other) and ours.same_tokens(other):
        text = f"{lengths}; single passes differ, as near ties do. The first at {difference}"
        return Finding(name, Level.NOTE, text)
    return Finding(name, Level.PROBLEM, f"{lengths}. They differ first at {difference}")


def _low(ours: Trace) -> Finding:
    if not any(ours.histogram):
        text = "no pass had room for a whole draft, so nothing is known: ask for longer answers"
        return Finding("acceptance", Level.PROBLEM, text)
    text = (
        f"{ours.acceptance_length:.2f} tokens per pass is little: prompts unlike those of the "
        "training, a drafter trained too shortly, or one of another target"
    )
    return Finding("acceptance", Level.NOTE, text)


def _mask_tokens(loaded: LoadedModel) -> list[int]:
    """Return the id that training would take for a mask, if there is one."""
    backbone = cast(Backbone, loaded.backbone)
    known = Vocabulary(
        loaded.path, loaded.tokenizer, backbone.vocab_size, tuple(backbone.eos_token_ids)
    )
    try:
        return [choose_mask_token(known, None, ())]
    except ConfigError:
        return []


def _prompts(loaded: LoadedModel, how: Measuring) -> list[list[int]]:
    backbone = cast(Backbone, loaded.backbone)
    if how.prompts is not None or loaded.tokenizer is not None:
        asked = PROMPTS[:_NUM_PROMPTS] if how.prompts is None else how.prompts
        return encode_prompts(asked, loaded)
    draw = random.Random(0)
    return [
        [draw.randrange(backbone.vocab_size) for _ in range(_RANDOM_PROMPT)]
        for _ in range(_NUM_PROMPTS)
    ]


def _diagnose_adapter(
    target: str, adapter: Path, how: Measuring, progress: Progress | None
) -> Diagnosis:
    loaded = load_model(target, device=how.device, dtype="float32", progress=progress)
    findings, num_draft_tokens = check_adapter(loaded, adapter)
    found = Diagnosis(findings)
    found.skipped = dict.fromkeys(("transformers", "vllm"), "drafts with no adapter of this kind")
    if num_draft_tokens is None:
        return found

    def measured() -> Trace:
        assert isinstance(loaded.backbone, NativeBackbone)
        decoder = HybridDecoder(
            loaded.backbone,
            loaded.tokenizer,
            adapter=load_adapter(loaded.backbone, adapter),
            drafter="self-diffusion",
            num_draft_tokens=num_draft_tokens,
        )
        prompts = _prompts(loaded, how)
        return engines.in_ours(decoder, prompts, how.max_new_tokens, num_draft_tokens)

    ours = _try(found, "hybrid", measured)
    if ours is not None and ours.acceptance_length < GOOD:
        found.findings.append(_low(ours))
    return found
