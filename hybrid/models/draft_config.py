"""`DraftConfig`: the shape of a diffusion adapter, and its file `draft_config.json`.

Next: hybrid/models/adapter.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hybrid.errors import CheckpointError
from hybrid.models.lora_files import LowRank
from hybrid.models.spec import ModelSpec

if TYPE_CHECKING:
    from hybrid.models.transformer import NativeBackbone

DRAFT_CONFIG = "draft_config.json"
PEFT_PREFIX = "base_model.model.model.layers"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
CORRUPTIONS = ("mask", "uniform")
DEFAULT_BLOCK_SIZE = 32  # where the checkpoint names none


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Shape of a diffusion adapter.

    Two kinds of draft pass. With `corruption` "mask" its rows are the anchor and K masked slots,
    all see each other, and the row of slot j predicts slot j. With "uniform" they are the anchor
    and K - 1 random tokens, attention is causal, and row i predicts the token behind it, as in AR
    decoding; the anchor's row runs the base weights, so the first token is the target's own.

    Attributes:
        num_draft_tokens: K, tokens drafted by a pass at most.
        entry_layer: first layer of a draft pass; its input is the hidden state that the anchor's
            predecessor had there, so the draft costs (L - entry_layer) / L of a forward. 0 is a
            pass through the whole model, and the slots enter as tokens.
        feature_layers: layers whose outputs at the predecessor are features of the input of late
            entry.
        rank: r of the low-rank updates; 0 where there are none, the model drafts as it is.
        lora_alpha: their scale is lora_alpha / r.
        base: shape of the model it belongs to.
        preferred_draft_tokens: K to use when nobody asks for another; None is all that were
            trained. Few slots carry most of the acceptance, and each costs a row of two passes.
        sampler_size: inner width of the head that tells a slot which tokens were chosen before
            it; 0 is none.
        draft_vocab_size: number of tokens that a draft chooses among; None is all.
        targets: projections with low-rank updates, in PEFT's names.
        train_norms: whether the layers of a draft pass and its head have norms of their own.
        corruption: what stands in the slots, see above.
        mask_token_id: token that stands in a masked slot that enters as a token.
        num_passes: denoising passes of a draft; each but the last tells the next its surest tokens.
        confidence_floor: on a CPU, where each row of a verify pass costs time, a greedy draft ends
            before the slot at which the product of its confidences falls below this, unless
            somebody asks for a number of tokens.
    """

    num_draft_tokens: int
    entry_layer: int
    feature_layers: tuple[int, ...]
    rank: int
    lora_alpha: float
    base: Mapping[str, int]
    preferred_draft_tokens: int | None = None
    sampler_size: int = 0
    draft_vocab_size: int | None = None
    targets: tuple[str, ...] = (*ATTENTION, *MLP)
    train_norms: bool = True
    corruption: str = "mask"
    mask_token_id: int | None = None
    num_passes: int = 1
    confidence_floor: float = 0.0

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers whose outputs a draft needs: the features, and what enters the first layer."""
        if self.entry_layer == 0:
            return ()
        return tuple(sorted({*self.feature_layers, self.entry_layer - 1}))

    @property
    def logit_shift(self) -> int:
        """1 when row i of a draft pass predicts token i + 1, 0 when it predicts token i."""
        return int(self.corruption == "uniform")

    @property
    def is_plain(self) -> bool:
        """Whether the low-rank updates are all there is, so that PEFT alone can draft with it."""
        extras = self.train_norms or self.sampler_size or self.draft_vocab_size is not None
        return self.entry_layer == 0 and not extras

    def num_rows(self, num_draft_tokens: int) -> int:
        """Return the rows of a pass that drafts so many tokens, the anchor's among them."""
        return num_draft_tokens + 1 - self.logit_shift

    def problem(self, spec: ModelSpec) -> str | None:
        """Return what does not fit, in itself or with a model: field, value, what is expected."""
        layers = range(spec.num_layers)
        enters_as_tokens = self.entry_layer == 0
        masks_tokens = enters_as_tokens and self.corruption == "mask"
        preferred, mask_token = self.preferred_draft_tokens, self.mask_token_id
        if self.entry_layer not in layers:
            return f"entry_layer: got {self.entry_layer}, expected 0 to {layers[-1]}."
        if any(layer not in layers for layer in self.feature_layers):
            return f"feature_layers: got {self.feature_layers}, expected below {len(layers)}."
        if enters_as_tokens == bool(self.feature_layers):
            expected = "none with entry_layer 0" if enters_as_tokens else "at least one layer"
            return f"feature_layers: got {self.feature_layers}, expected {expected}."
        if bool(self.targets) != bool(self.rank) or not {*self.targets} <= {*ATTENTION, *MLP}:
            names = ", ".join((*ATTENTION, *MLP))
            return f"targets: got {self.targets}, expected at least one of {names}."
        if self.corruption not in CORRUPTIONS:
            return f"corruption: got {self.corruption!r}, expected {' or '.join(CORRUPTIONS)}."
        if masks_tokens and (mask_token is None or not 0 <= mask_token < spec.vocab_size):
            return f"mask_token_id: got {mask_token}, expected an id below {spec.vocab_size}."
        if not masks_tokens and mask_token is not None:
            return f"mask_token_id: got {mask_token}, expected none: no mask enters as a token."
        if self.num_passes > 1 and (self.corruption != "mask" or self.sampler_size):
            return (
                f"num_passes: got {self.num_passes}, expected 1 with corruption 'uniform' or a "
                "sampler head."
            )
        if self.corruption == "uniform" and not (self.is_plain and self.num_draft_tokens > 1):
            return (
                "corruption: got 'uniform', expected 'mask' unless entry_layer is 0, train_norms "
                "is off, sampler_size 0, draft_vocab_size none and num_draft_tokens at least 2."
            )
        if not 0 <= self.confidence_floor < 1:
            return f"confidence_floor: got {self.confidence_floor}, expected 0 to below 1."
        if preferred is not None and not 1 <= preferred <= self.num_draft_tokens:
            return (
                f"preferred_draft_tokens: got {preferred}, expected 1 to {self.num_draft_tokens}."
            )
        return None

    def differs(self, target: NativeBackbone | ModelSpec) -> dict[str, tuple[int | None, int]]:
        """Return in what a model is not the one it belongs to: {number: (its own, the model's)}."""
        expected = base_shape(target)
        pairs = {name: (self.base.get(name), value) for name, value in expected.items()}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def check_target(self, target: NativeBackbone | ModelSpec) -> None:
        """Check that it belongs to a model.

        Raises:
            CheckpointError: it belongs to another.
        """
        if differs := self.differs(target):
            raise CheckpointError(
                f"Adapter is for another model: {differs} (adapter, model). "
                "Give the adapter that was trained for this checkpoint, or none."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return asdict(self)


def base_shape(target: NativeBackbone | ModelSpec) -> dict[str, int]:
    """Return the numbers by which an adapter recognises its model."""
    s = target if isinstance(target, ModelSpec) else target.spec
    return {
        "vocab_size": s.vocab_size,
        "hidden_size": s.hidden_size,
        "intermediate_size": s.intermediate_size,
        "num_layers": s.num_layers,
        "num_heads": s.num_heads,
        "num_kv_heads": s.num_kv_heads,
    }


def projection_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return {projection: (inputs, outputs)} of the seven layers that can have updates."""
    heads, groups = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    width, inner = spec.hidden_size, spec.intermediate_size
    return {
        "q_proj": (width, heads),
        "k_proj": (width, groups),
        "v_proj": (width, groups),
        "o_proj": (heads, width),
        "gate_proj": (width, inner),
        "up_proj": (width, inner),
        "down_proj": (inner, width),
    }


def lora_prefix(layer: int, projection: str) -> str:
    """Return PEFT's name of a projection: its tensors are `.lora_A.weight`, `.lora_B.weight`."""
    block = "self_attn" if projection in ATTENTION else "mlp"
    return f"{PEFT_PREFIX}.{layer}.{block}.{projection}"


def plain_config(
    backbone: NativeBackbone, updates: Mapping[str, LowRank]
) -> tuple[DraftConfig, dict[str, Tensor]]:
    """Return a draft pass through the whole of a model that knows a mask token.

    Args:
        backbone: the model.
        updates: what a draft pass adds to the model's layers; none is the model as it is.

    Returns:
        Its shape, with the block size of the model, and the tensors of the updates.

    Raises:
        CheckpointError: the updates are not of one rank, or not of the same layers everywhere.
    """
    projections, layers = (*ATTENTION, *MLP), range(backbone.num_layers)
    tensors = {}
    for layer, update in updates.items():
        tensors[f"base_model.model.{layer}.lora_A.weight"] = update.a
        tensors[f"base_model.model.{layer}.lora_B.weight"] = update.b
    targets = tuple(n for n in projections if f"{lora_prefix(0, n)}.lora_A.weight" in tensors)
    wanted = {f"{lora_prefix(n, t)}.lora_{x}.weight" for n in layers for t in targets for x in "AB"}
    shapes = {(update.rank, update.scale) for update in updates.values()}
    if wanted != tensors.keys() or len(shapes) > 1:
        raise CheckpointError(
            f"Adapter: got {len(updates)} updates ({min(updates)}, ...) of (rank, scale) "
            f"{sorted(shapes)}; expected one of each, for the same of {', '.join(projections)} in "
            "all layers."
        )
    rank, scale = shapes.pop() if shapes else (0, 0.0)
    config = DraftConfig(
        num_draft_tokens=(backbone.block_size or DEFAULT_BLOCK_SIZE) - 1,
        entry_layer=0,
        feature_layers=(),
        rank=rank,
        lora_alpha=scale * rank,
        base=base_shape(backbone),
        targets=targets,
        train_norms=False,
        mask_token_id=backbone.mask_token_id,
    )
    return config, tensors


def is_adapter(folder: Path) -> bool:
    """Return whether a folder says how it drafts; PEFT's own files do not."""
    return (folder / DRAFT_CONFIG).is_file()


def read_adapter(folder: Path) -> tuple[DraftConfig, dict[str, Tensor]]:
    """Read an adapter folder without binding it.

    Raises:
        CheckpointError: missing or damaged files.
    """
    names = (DRAFT_CONFIG, "adapter_model.safetensors", "draft_model.safetensors")
    missing = [name for name in names if not (folder / name).is_file()]
    try:
        if names[0] not in missing:
            config = _parse(json.loads((folder / names[0]).read_text(encoding="utf-8")))
            if config.is_plain:
                missing = [name for name in missing if name != names[2]]
        if missing:
            raise CheckpointError(
                f"Adapter {folder}: no file {', '.join(missing)}. Expected a folder as "
                "`hybrid train self-diffusion` writes it."
            )
        tensors = load_file(folder / names[1])
        if not config.is_plain:
            tensors |= load_file(folder / names[2])
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise CheckpointError(
            f"Adapter {folder} cannot be read: {type(error).__name__}: {error}. "
            "Copy or train it again."
        ) from error
    return config, tensors


def _parse(raw: Mapping[str, Any]) -> DraftConfig:
    """Return the configuration; fields that older versions did not write have their defaults."""
    config = DraftConfig(
        num_draft_tokens=int(raw["num_draft_tokens"]),
        entry_layer=int(raw["entry_layer"]),
        feature_layers=tuple(int(layer) for layer in raw["feature_layers"]),
        rank=int(raw["rank"]),
        lora_alpha=float(raw["lora_alpha"]),
        base={str(name): int(size) for name, size in dict(raw["base"]).items()},
        preferred_draft_tokens=_optional_int(raw, "preferred_draft_tokens"),
        sampler_size=int(raw.get("sampler_size", 0)),
        draft_vocab_size=_optional_int(raw, "draft_vocab_size"),
        targets=tuple(str(name) for name in raw.get("targets", (*ATTENTION, *MLP))),
        train_norms=bool(raw.get("train_norms", True)),
        corruption=str(raw.get("corruption", "mask")),
        mask_token_id=_optional_int(raw, "mask_token_id"),
        num_passes=int(raw.get("num_passes", 1)),
        confidence_floor=float(raw.get("confidence_floor", 0.0)),
    )
    if min(config.num_draft_tokens, config.rank, config.num_passes) < 1:
        raise ValueError("num_draft_tokens, rank and num_passes must be at least 1")
    return config


def _optional_int(raw: Mapping[str, Any], name: str) -> int | None:
    value = raw.get(name)
    return None if value is None else int(value)
