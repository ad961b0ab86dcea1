"""Names of drafters, verifiers and presets, as strings so that nothing is imported before use.

Other packages add theirs through the entry-point groups ``hybrid.drafters``, ``hybrid.verifiers``
and ``hybrid.presets``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from hybrid.errors import ConfigError, did_you_mean

DRAFTERS: Mapping[str, str] = MappingProxyType(
    {
        "none": "hybrid.drafters.none:NoDrafter",
        "ngram": "hybrid.drafters.ngram:NgramDrafter",
        "self-diffusion": "hybrid.drafters.self_diffusion:SelfDiffusionDrafter",
        "combined": "hybrid.drafters.combined:CombinedDrafter",
        "dflash": "hybrid.drafters.dflash:DFlashDrafter",
    }
)
VERIFIERS: Mapping[str, str] = MappingProxyType(
    {
        "greedy": "hybrid.verifiers.greedy:GreedyVerifier",
        "rejection": "hybrid.verifiers.rejection:RejectionVerifier",
        "block": "hybrid.verifiers.block:BlockVerifier",
    }
)
PRESETS: Mapping[str, str] = MappingProxyType(
    {
        "ar": "hybrid.strategy:Ar",
        "speculative": "hybrid.strategy:Speculative",
        "hybrid": "hybrid.strategy:Hybrid",
        "ngram": "hybrid.strategy:Ngram",
        "dflash": "hybrid.strategy:DFlash",
        "llada": "hybrid.drafters.denoise.presets:LLaDA",
        "dream": "hybrid.drafters.denoise.presets:Dream",
        "fast-dllm": "hybrid.drafters.denoise.presets:FastDLLM",
        "d3llm": "hybrid.drafters.denoise.presets:D3LLM",
        "slowfast": "hybrid.drafters.denoise.presets:SlowFast",
        "sdar": "hybrid.drafters.denoise.block_presets:SDAR",
        "llada2": "hybrid.drafters.denoise.block_presets:LLaDA2",
        "llada2.1": "hybrid.drafters.denoise.block_presets:LLaDA21",
        "d2f": "hybrid.drafters.denoise.block_presets:D2F",
        "fast-dllm-v2": "hybrid.drafters.denoise.block_presets:FastDLLMv2",
        "nemotron": "hybrid.drafters.denoise.block_presets:Nemotron",
        "dllm-cache": "hybrid.drafters.denoise.cached_presets:DLLMCache",
        "entropy-cache": "hybrid.drafters.denoise.cached_presets:EntropyCache",
        "eb": "hybrid.drafters.denoise.presets:EntropyBound",
        "free-cache": "hybrid.drafters.denoise.cached_presets:FreeCache",
        "wedlm": "hybrid.drafters.denoise.wedlm:WeDLM",
        "ssd": "hybrid.drafters.denoise.ssd:SSD",
        "guided": "hybrid.drafters.denoise.guided:Guided",
        "diffusion-gemma": "hybrid.models.diffusion_gemma:CanvasSettings",
    }
)
_BUILT_IN = {"drafter": DRAFTERS, "verifier": VERIFIERS, "preset": PRESETS}


def names(kind: str) -> dict[str, str]:
    """Return {name: "module:attribute"} of one kind: "drafter", "verifier" or "preset"."""
    found = {e.name: e.value for e in entry_points(group=f"hybrid.{kind}s")}
    return {**found, **_BUILT_IN[kind]}


def load(kind: str, name: str) -> Any:
    """Return the class registered as `name`.

    Raises:
        ConfigError: no such name, or its module cannot be imported.
    """
    # Built-in names first: reading entry points takes milliseconds.
    table = _BUILT_IN[kind] if name in _BUILT_IN[kind] else names(kind)
    if name not in table:
        raise ConfigError(f"Unknown {kind} {name!r}.{did_you_mean(name, table)}")
    module, _, attribute = table[name].partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{kind} {name!r} ({table[name]}) cannot be loaded: {error}") from error
