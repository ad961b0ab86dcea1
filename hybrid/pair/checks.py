"""What the files of a DFlash drafter say, held against its target's. No model is loaded.

Each check is a function of the `Pair` that yields (level, text): what is not as it should be, and
at the end what is there, which counts where all is well. Next: hybrid/pair/engines.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hybrid.errors import CheckpointError
from hybrid.models.checkpoint import open_checkpoint, read_json, token_ids
from hybrid.models.rope import parse_rope
from hybrid.pair.finding import Finding, Level

Said = Iterator[tuple[Level, str]]
_SLIDING = "sliding_attention"


@dataclass(frozen=True)
class Pair:
    """A target's config and a drafter's config and tensors.

    Attributes:
        target: config.json of the target; of its text part where it has several.
        drafter: config.json of the drafter.
        shapes: of the drafter's tensors.
        dtypes: that the drafter's tensors have.
    """

    target: Mapping[str, Any]
    drafter: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: frozenset[str]

    @classmethod
    def read(cls, target: Path, drafter: Path) -> Pair:
        """Read the files.

        Raises:
            CheckpointError: a folder or its files are missing or damaged.
        """
        config, checkpoint = read_json(target / "config.json"), open_checkpoint(drafter)
        tensors = dict(checkpoint.tensors)
        dtypes = {str(getattr(t, "dtype", "?")).removeprefix("torch.") for t in tensors.values()}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        own = config.get("text_config") or config
        return cls(own, checkpoint.config, shapes, frozenset(dtypes))

    @property
    def nested(self) -> Mapping[str, Any]:
        """`dflash_config`."""
        return self.drafter.get("dflash_config") or {}

    @property
    def own(self) -> Mapping[str, Any]:
        """What the drafter says of itself; `dflash_config` goes before the top."""
        return {**self.drafter, **self.nested}

    @property
    def layers(self) -> Mapping[str, Any]:
        """The shape of the drafter's layers, which speculators nests."""
        return self.drafter.get("transformer_layer_config") or self.drafter

    @property
    def num_layers(self) -> int:
        """L of the target."""
        return int(self.target.get("num_hidden_layers", 0))

    @cached_property
    def layer_ids(self) -> tuple[int, ...] | None:
        """Layers of the target whose outputs are the features, from 0; None where none is named."""
        aux = self.own.get("aux_hidden_state_layer_ids")
        ids = self.own.get("target_layer_ids") if aux is None else [i - 1 for i in aux]
        return None if ids is None else tuple(ids)


def check_pair(pair: Pair) -> list[Finding]:
    """Return what each check says of a pair, in the order in which a first mistake shows."""
    findings = []
    for name, check in _CHECKS.items():
        said = list(check(pair))
        worse = [entry for entry in said if entry[0] is not Level.OK]
        findings += [Finding(name, level, text) for level, text in worse or said]
    return findings


def _ok(text: str) -> tuple[Level, str]:
    return Level.OK, text


def _note(text: str) -> tuple[Level, str]:
    return Level.NOTE, text


def _problem(text: str) -> tuple[Level, str]:
    return Level.PROBLEM, text


def _layout(pair: Pair) -> Said:
    if "speculators_model_type" in pair.drafter:
        yield _ok("speculators")
    elif pair.drafter.get("model_type") == "muse_glimmer_assistant":
        yield _ok("transformers (muse_glimmer_assistant)")
    elif pair.nested:
        yield _ok("public (dflash_config)")
    else:
        yield _problem(
            "config.json has neither dflash_config nor the fields of transformers or speculators: "
            "this is no DFlash drafter"
        )


def _layer_ids(pair: Pair) -> Said:
    ids, last = pair.layer_ids, pair.num_layers - 1
    stated, aux = pair.own.get("target_layer_ids"), pair.own.get("aux_hidden_state_layer_ids")
    if stated is not None and aux is not None and [i + 1 for i in stated] != list(aux):
        yield _problem(
            f"target_layer_ids {list(stated)} and aux_hidden_state_layer_ids {list(aux)} name "
            f"different layers: the second counts the embedding as 0, so it should be "
            f"{[i + 1 for i in stated]}"
        )
    said = pair.own.get("num_target_layers")
    if said is not None and said != pair.num_layers:
        yield _problem(f"made for a target of {said} layers, this one has {pair.num_layers}")
    if not ids:
        yield _note("no layers are named, so engines spread them by their own rule: name them")
        return
    lower = [i - 1 for i in ids]
    if min(ids) < 0:
        yield _problem(
            f"layer {min(ids)} is none: the ids {list(ids)} are one too low. Speculators counts "
            "the embedding as 0, the other layouts count layers from 0"
        )
    if max(ids) > last:
        yield _problem(
            f"layer {max(ids)} of a target with layers 0 to {last}: ids counted from 1 are one too "
            f"high, these would be {lower}"
        )
    if last in ids:
        yield _problem(
            f"layer {last} is the target's last: transformers hands it out after the final norm, "
            f"vLLM before it. Train on other layers; if these were counted from 1, {lower} are "
            "meant"
        )
    yield _ok(f"outputs of layers {list(ids)} of 0 to {last}")


def _mask_token(pair: Pair) -> Said:
    outer, inner = pair.drafter.get("mask_token_id"), pair.nested.get("mask_token_id")
    mask, size = pair.own.get("mask_token_id"), pair.target.get("vocab_size", 0)
    if mask is None:
        yield _problem("config.json names no mask_token_id")
        return
    if None not in (outer, inner) and outer != inner:
        yield _problem(f"mask_token_id is {outer} and, in dflash_config, {inner}: keep one")
    if not 0 <= mask < size:
        yield _problem(
            f"mask id {mask} is not in the target's table of {size} rows: it cannot be embedded. "
            "Give the id that the drafter was trained with"
        )
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        if mask in token_ids(pair.target.get(name)):
            yield _note(f"mask id {mask} is the target's {name}: was it trained so?")
    yield _ok(f"{mask}, a row of the target's {size}")


def _rope(pair: Pair) -> Said:
    if not {"rope_theta", "rope_parameters", "rope_scaling"} & pair.layers.keys():
        yield _problem("no rope_theta is given, and engines assume different ones: write it")
        return
    if pair.layers.get("rope_interleaved") or pair.layers.get("rope_interleave"):
        yield _problem("pairs of neighbours are rotated; DFlash rotates halves of a head")
    try:
        own = parse_rope(pair.layers)
    except (CheckpointError, KeyError) as error:
        yield _problem(str(error))
        return
    try:
        target = parse_rope(pair.target, may_be_partial=True)
    except (CheckpointError, KeyError):
        yield _note(f"the target's rotation is of another kind than theta {own.theta:g}")
        return
    if own.theta != target.theta:
        yield _note(
            f"theta {own.theta:g}, the target's is {target.theta:g}: right only if trained so"
        )
    if (own.kind, dict(own.params)) != (target.kind, dict(target.params)):
        yield _note(f"scaling {own.kind!r}, the target's is {target.kind!r}: trained so?")
    yield _ok(f"theta {own.theta:g}, {own.kind}, as the target")


def _causality(pair: Pair) -> Said:
    causal, is_causal = pair.nested.get("causal"), pair.drafter.get("is_causal")
    non_causal = pair.drafter.get("sliding_window_non_causal")
    slides = _SLIDING in (pair.layers.get("layer_types") or ())
    if causal or is_causal:
        yield _problem(
            "blocks are marked causal: vLLM then hides later slots from earlier ones, which a "
            "drafter that was trained as DFlash has seen. Write dflash_config.causal=false"
        )
    if non_causal is False:
        yield _problem(
            "sliding_window_non_causal is false: vLLM then makes every layer's blocks causal, "
            "sliding or not, and accepts less without a word. Write true"
        )
    if causal is None and non_causal is None:
        said = _problem if slides else _note
        more = ", and makes these sliding layers causal" if slides else ""
        yield said(
            f"nothing says that blocks are not causal: vLLM goes by the layers' types{more}. Write "
            "dflash_config.causal=false (`hybrid export` does)"
        )
    yield _ok("blocks are marked as not causal")


def _sizes(pair: Pair) -> Said:
    width, own = pair.target.get("hidden_size"), pair.layers.get("hidden_size")
    if own != width:
        yield _problem(
            f"hidden size {own}, the target's is {width}: embedding and head are the target's"
        )
    fc = pair.shapes.get("fc.weight") or pair.shapes.get("encoder.fc.weight")
    num_features = len(pair.layer_ids or ())
    if fc is not None and num_features and fc != (own, num_features * (width or 0)):
        yield _problem(
            f"fc.weight is {list(fc)}, but {num_features} features of {width} make "
            f"{[own, num_features * (width or 0)]}"
        )
    yield _ok(f"hidden size {own}, {num_features} features")


def _vocabulary(pair: Pair) -> Said:
    size, own = pair.target.get("vocab_size"), pair.layers.get("vocab_size")
    reduced = pair.drafter.get("draft_vocab_size")
    if own is None:
        yield _note(f"no vocab_size is given, and vLLM assumes one: write {size}")
    elif own != size:
        yield _problem(f"vocab_size {own}, the target's is {size}: another target's drafter?")
    if reduced not in (None, own):
        has = "d2t" in pair.shapes
        yield _problem(
            f"a vocabulary of its own of {reduced} tokens"
            + ("" if has else " without the table d2t that maps it")
            + ": vLLM computes it, transformers and this project do not"
        )
    brought = [n for n in ("lm_head.weight", "embed_tokens.weight") if n in pair.shapes]
    if brought and reduced in (None, own):
        yield _problem(
            f"it brings {' and '.join(brought)}: some engines use it in place of the target's. "
            "Remove it unless it was trained"
        )
    yield _ok(f"the target's {size} tokens")


def _block_size(pair: Pair) -> Said:
    size = pair.own.get("block_size")
    if not isinstance(size, int) or size < 2:
        yield _problem(f"block_size: got {size}, expected at least 2")
        return
    for method in (pair.drafter.get("speculators_config") or {}).get("proposal_methods") or ():
        count = method.get("speculative_tokens")
        if count != size - 1:
            yield _note(f"speculative_tokens is {count}: blocks of {size} can draft {size - 1}")
    yield _ok(f"{size}: the anchor and {size - 1} drafted tokens")


def _dtype(pair: Pair) -> Said:
    said = str(pair.drafter.get("dtype") or pair.drafter.get("torch_dtype") or "")
    target = str(pair.target.get("dtype") or pair.target.get("torch_dtype") or "")
    found = ", ".join(sorted(pair.dtypes))
    if said and found != said:
        yield _note(f"config.json says {said}, the weights are {found}")
    if "float16" in (found, target) and target and found != target:
        yield _note(f"{found}, the target {target}: vLLM runs the drafter in the target's")
    yield _ok(found)


def _windows(pair: Pair) -> Said:
    types = set(pair.layers.get("layer_types") or ())
    if len(types) > 1:
        yield _note(
            "sliding and full layers are mixed: vLLM needs VLLM_USE_V2_MODEL_RUNNER=1 for that"
        )
    yield _ok("all layers alike")


_CHECKS: Mapping[str, Callable[[Pair], Said]] = {
    "layout": _layout,
    "layers": _layer_ids,
    "mask token": _mask_token,
    "rope": _rope,
    "causality": _causality,
    "sizes": _sizes,
    "vocabulary": _vocabulary,
    "block size": _block_size,
    "dtype": _dtype,
    "windows": _windows,
}
