"""What a drafter would accept if its config.json said something else.

A wrong number is silent: the drafter loads and drafts nonsense. So where little is accepted, the
usual mistakes are undone one by one. Next: hybrid/pair/diagnosis.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hybrid.models.checkpoint import token_ids
from hybrid.pair.checks import Pair
from hybrid.pair.trace import Trace

GOOD = 2.0
"""Tokens per pass from which on nothing is probed: a drafter with a wrong number is far below."""
_CLEARLY = 1.3


@dataclass(frozen=True, slots=True)
class Probe:
    """A changed config.

    Attributes:
        check: whose number was changed.
        text: how.
        config: in place of the drafter's config.json.
    """

    check: str
    text: str
    config: Mapping[str, Any]


def without_causality(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the same drafter without a causal mask, as this project computes it."""
    nested = {k: v for k, v in (config.get("dflash_config") or {}).items() if k != "causal"}
    return {**config, "dflash_config": nested}


def probes(pair: Pair, mask_tokens: Iterable[int]) -> Iterator[Probe]:
    """Return the mistakes that a drafter's config may have, undone.

    Args:
        pair: the drafter and its target.
        mask_tokens: ids that the target could have for a mask, besides what its config names.
    """
    ids = pair.layer_ids or ()
    for shift, word in ((-1, "lower"), (1, "higher")):
        moved = [i + shift for i in ids]
        if moved and min(moved) >= 0 and max(moved) < pair.num_layers - 1:
            yield Probe("layers", f"layers one {word}, {moved}", _nested(pair, moved, None))
    rope = {k: pair.target.get(k) for k in ("rope_theta", "rope_scaling", "rope_parameters")}
    if any(pair.layers.get(k) != v for k, v in rope.items()):
        yield Probe("rope", "the target's own rotation", _layers(pair, rope))
    named = [pair.target.get(f"{name}_token_id") for name in ("mask", "pad", "bos", "eos")]
    known = dict.fromkeys([*(i for value in named for i in token_ids(value)), *mask_tokens])
    for token in known:
        if token != pair.own.get("mask_token_id"):
            yield Probe("mask token", f"mask id {token}", _nested(pair, None, token))


def is_clearly_better(probed: Trace, as_it_is: Trace | None) -> bool:
    """Return whether a changed config accepts so much more that the change must be right."""
    least = 0.0 if as_it_is is None else _CLEARLY * as_it_is.acceptance_length
    return probed.acceptance_length > max(least, GOOD)


def _nested(pair: Pair, layer_ids: list[int] | None, mask_token: int | None) -> dict[str, Any]:
    config = without_causality(pair.drafter)
    if layer_ids is not None:
        config.pop("aux_hidden_state_layer_ids", None)
        config["dflash_config"]["target_layer_ids"] = layer_ids
    if mask_token is not None:
        config["dflash_config"]["mask_token_id"] = mask_token
    return config


def _layers(pair: Pair, fields: Mapping[str, Any]) -> dict[str, Any]:
    config = without_causality(pair.drafter)
    if "transformer_layer_config" in config:
        return {**config, "transformer_layer_config": {**pair.layers, **fields}}
    return {**config, **fields}
