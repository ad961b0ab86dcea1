"""`DiffusionAdapter`: what teaches an AR model to fill masked slots, without changing its AR mode.

Low-rank updates (LoRA, arXiv:2106.09685) on the later layers, a norm each, and a learned draft
input. They act in draft passes only; committed tokens never pass through them, so the cache and AR
logits are those of the base model. On disk: a PEFT adapter folder, plus two files for the input:

    adapter_config.json   adapter_model.safetensors    LoRA in PEFT's layout
    draft_config.json     draft_model.safetensors      slots, features, norms

Next: drafters/self_diffusion.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hybrid.errors import CheckpointError
from hybrid.models.checkpoint import Int4Blocks
from hybrid.models.draft_head import DraftHead, SamplerHead, unit_norm
from hybrid.models.linear import DenseLinear, Linear, PackedLinear, make_linear
from hybrid.models.spec import ModelSpec

if TYPE_CHECKING:
    from hybrid.models.transformer import Layer, NativeBackbone

PEFT_PREFIX = "base_model.model.model.layers"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Shape of a diffusion adapter.

    Attributes:
        num_draft_tokens: K, masked slots trained; the pass has K + 1 slots, the anchor first.
        entry_layer: first layer of a draft pass; its input is the hidden state that the anchor's
            predecessor had there, so the draft costs (L - entry_layer) / L of a forward.
        feature_layers: layers whose outputs at the predecessor are features of the input.
        rank: r of the low-rank updates.
        lora_alpha: their scale is lora_alpha / r.
        base: shape of the model it belongs to.
        preferred_draft_tokens: K to use when nobody asks for another; None is all that were
            trained. Few slots carry most of the acceptance, and each costs a row of two passes.
        sampler_size: inner width of the head that tells a slot which tokens were chosen before
            it; 0 is none.
        draft_vocab_size: number of tokens that a draft chooses among; None is all.
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

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers whose outputs a draft needs: the features, and what enters the first layer."""
        return tuple(sorted({*self.feature_layers, self.entry_layer - 1}))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return asdict(self)


def base_shape(backbone: NativeBackbone) -> dict[str, int]:
    """Return the numbers by which an adapter recognises its model."""
    s = backbone.spec
    return {
        "vocab_size": s.vocab_size,
        "hidden_size": s.hidden_size,
        "intermediate_size": s.intermediate_size,
        "num_layers": s.num_layers,
        "num_heads": s.num_heads,
        "num_kv_heads": s.num_kv_heads,
    }


def projection_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return {projection: (inputs, outputs)} of the seven layers that get low-rank updates."""
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


class LoraLinear(Linear):
    """A base layer plus (x A^T) B^T; several adapters of one fused layer lie side by side."""

    def __init__(self, base: Linear, a: Tensor, b: Tensor) -> None:
        """Keep the parts.

        Args:
            base: [I] -> [O].
            a: [R, I], R the sum of the ranks.
            b: [O, R], the scale already in it.
        """
        self.base, self.a, self.b = base, DenseLinear(a), DenseLinear(b)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [N, O] for x [N, I]."""
        return self.base(x).add_(self.b(self.a(x)))

    def dense(self) -> Tensor:
        """Return the weight [O, I] with the update in it, float32."""
        return self.base.dense().float() + self.b.weight.float() @ self.a.weight.float()

    @property
    def nbytes(self) -> int:
        """Bytes of the update alone."""
        return self.a.nbytes + self.b.nbytes


class DiffusionAdapter:
    """An adapter bound to a backbone: wrapped layers, a final norm and the draft input.

    Attributes:
        config: its shape.
        layers: as the backbone's, wrapped from `config.entry_layer` on. Beside packed weights the
            updates are merged into packed copies: on a CPU two small products more cost as much
            as a large one, and a draft may round as it likes.
        head: what turns a slot's last hidden state into tokens.
    """

    def __init__(
        self, backbone: NativeBackbone, config: DraftConfig, tensors: Mapping[str, Tensor]
    ) -> None:
        """Bind `tensors` (names as on disk) to `backbone`.

        Raises:
            CheckpointError: made for another model, or tensors are missing or misshapen.
        """
        expected = base_shape(backbone)
        if dict(config.base) != expected:
            differs = {k: (config.base.get(k), v) for k, v in expected.items()}
            differs = {k: v for k, v in differs.items() if v[0] != v[1]}
            raise CheckpointError(
                f"Adapter is for another model: {differs} (adapter, model). "
                "Give the adapter that was trained for this checkpoint, or none."
            )
        self.config, self._backbone, self._tensors = config, backbone, tensors
        first, width = config.entry_layer, backbone.hidden_size
        last = max(first, *config.feature_layers, 0)
        if first < 1 or min(config.feature_layers, default=0) < 0 or last >= backbone.num_layers:
            raise CheckpointError(
                f"Adapter enters at layer {first} with features of {config.feature_layers}; "
                f"expected layers of a model that has {backbone.num_layers}, entry at least 1."
            )
        self._packs = isinstance(backbone.layers[first].qkv, PackedLinear)
        self.layers = [
            layer if index < first else self._wrap(index, layer)
            for index, layer in enumerate(backbone.layers)
        ]
        self.slots = self._take("slots", config.num_draft_tokens + 1, width)
        self.mask = self._take("mask", width)  # the embedding of a masked slot
        self.project = DenseLinear(self._take("project", width, 2 * width))  # P
        num_features = len(config.feature_layers)
        # Exact: the draft of a row must not depend on how many rows there are.
        self.features = self._exact("features", width, num_features * width)  # Q
        self.head = self._head()
        del self._tensors

    @property
    def nbytes(self) -> int:
        """Bytes beside the backbone's own."""
        layers = self.layers[self.config.entry_layer :]
        linears = [x for y in layers for x in (y.qkv, y.o, y.gate_up, y.down)]
        linears += [self.project, self.features]
        tensors = [self.slots, self.mask, *(t for y in layers for t in (y.input_norm, y.post_norm))]
        own = sum(t.numel() * t.itemsize for t in tensors)
        return own + sum(x.nbytes for x in linears) + self.head.nbytes

    def _take(self, name: str, *shape: int) -> Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"Adapter has no tensor {name!r}. The files are incomplete.")
        value = self._tensors[name]
        if tuple(value.shape) != shape:
            raise CheckpointError(
                f"Adapter tensor {name!r}: got shape {list(value.shape)}, expected {list(shape)} "
                "by draft_config.json. The files do not belong together."
            )
        dtype = self._backbone.dtype if value.is_floating_point() else torch.int64
        return value.to(self._backbone.device, dtype)

    def _exact(self, name: str, *shape: int) -> Linear:
        return DenseLinear(self._take(name, *shape), exact=True)

    def _head(self) -> DraftHead:
        backbone, size, width = self._backbone, self.config.sampler_size, self._backbone.hidden_size
        sampler, vocabulary, output = None, None, backbone.head
        if size:
            gate_up = self._exact("sampler.gate_up", 2 * size, 3 * width)
            sampler = SamplerHead(gate_up, self._exact("sampler.down", width, size))
        if self.config.draft_vocab_size is not None:
            vocabulary = self._take("vocabulary", self.config.draft_vocab_size)
            tied = backbone.spec.tie_embeddings
            rows = (backbone.embedding if tied else backbone.head.dense())[vocabulary]
            weight = Int4Blocks.quantize(rows) if self._packs else rows
            output = make_linear([weight], [None], exact=True)
        norm = self._take("norm.weight", width)
        return DraftHead(
            norm, backbone.spec.norm_eps, output, backbone.embedding, vocabulary, sampler
        )

    def _lora(self, index: int, block: str, names: Sequence[str], base: Linear) -> Linear:
        rank, shapes = self.config.rank, projection_shapes(self._backbone.spec)
        scale = self.config.lora_alpha / rank
        a, b = [], []
        for name in names:
            prefix, (inputs, outputs) = f"{PEFT_PREFIX}.{index}.{block}.{name}", shapes[name]
            a.append(self._take(f"{prefix}.lora_A.weight", rank, inputs))
            b.append(self._take(f"{prefix}.lora_B.weight", outputs, rank) * scale)
        update = LoraLinear(base, torch.cat(a), torch.block_diag(*b))  # type: ignore[no-untyped-call]
        if not self._packs:
            return update
        bias = getattr(base, "bias", None)
        return make_linear([Int4Blocks.quantize(update.dense())], [bias])

    def _wrap(self, index: int, layer: Layer) -> Layer:
        return replace(
            layer,
            input_norm=self._take(f"layers.{index}.input_norm", self._backbone.hidden_size),
            post_norm=self._take(f"layers.{index}.post_norm", self._backbone.hidden_size),
            qkv=self._lora(index, "self_attn", ATTENTION[:3], layer.qkv),
            o=self._lora(index, "self_attn", ATTENTION[3:], layer.o),
            gate_up=self._lora(index, "mlp", MLP[:2], layer.gate_up),
            down=self._lora(index, "mlp", MLP[2:], layer.down),
        )

    def draft_input(
        self, anchors: Tensor, hidden: Mapping[int, Tensor], is_masked: Tensor
    ) -> Tensor:
        """Return the hidden states that enter layer `entry_layer`.

        u_j = h + s_j + P [norm(emb(anchor)); e_j] + Q [norm(f_1); ...], with h and f the hidden
        states of the anchor's predecessor, and e_j the anchor's embedding, or the learned mask
        vector where the slot is masked, plus s_j.

        Args:
            anchors: [B] token ids.
            hidden: {layer: [B, C]} for `config.taps`.
            is_masked: [K' + 1] boolean, K' <= K; a property of the slot, never of a token id, so
                a prompt may hold the vocabulary's mask id.

        Returns:
            [B, K' + 1, C].
        """
        backbone, count = self._backbone, is_masked.shape[0]
        anchor = F.embedding(anchors, backbone.embedding)  # [B, C]
        slots = self.slots[:count]
        own = torch.where(is_masked[:, None], self.mask, anchor[:, None]) + slots  # [B, K'+1, C]
        seen = unit_norm(anchor)[:, None].expand_as(own)
        features = torch.cat([unit_norm(hidden[n]) for n in self.config.feature_layers], dim=-1)
        base = hidden[self.config.entry_layer - 1] + self.features(features)
        joined = torch.cat([seen, own], dim=-1)
        return base[:, None] + slots + self.project(joined.flatten(0, 1)).view_as(own)


def load_adapter(backbone: NativeBackbone, path: str | Path) -> DiffusionAdapter:
    """Load an adapter folder.

    Raises:
        CheckpointError: missing or damaged files, or an adapter for another model.
    """
    folder = Path(path)
    config, tensors = read_adapter(folder)
    return DiffusionAdapter(backbone, config, tensors)


def read_adapter(folder: Path) -> tuple[DraftConfig, dict[str, Tensor]]:
    """Read an adapter folder without binding it.

    Raises:
        CheckpointError: missing or damaged files.
    """
    names = ("draft_config.json", "adapter_model.safetensors", "draft_model.safetensors")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"Adapter {folder}: no file {', '.join(missing)}. Expected a folder as "
            "`hybrid train self-diffusion` writes it."
        )
    try:
        config = _parse_config(json.loads((folder / names[0]).read_text(encoding="utf-8")))
        tensors = {**load_file(folder / names[1]), **load_file(folder / names[2])}
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise CheckpointError(
            f"Adapter {folder} cannot be read: {type(error).__name__}: {error}. "
            "Copy or train it again."
        ) from error
    return config, tensors


def _parse_config(raw: Mapping[str, Any]) -> DraftConfig:
    config = DraftConfig(
        num_draft_tokens=int(raw["num_draft_tokens"]),
        entry_layer=int(raw["entry_layer"]),
        feature_layers=tuple(int(layer) for layer in raw["feature_layers"]),
        rank=int(raw["rank"]),
        lora_alpha=float(raw["lora_alpha"]),
        base={str(name): int(size) for name, size in dict(raw["base"]).items()},
        preferred_draft_tokens=raw.get("preferred_draft_tokens"),
        sampler_size=int(raw.get("sampler_size", 0)),
        draft_vocab_size=raw.get("draft_vocab_size"),
    )
    if config.num_draft_tokens < 1 or config.rank < 1:
        raise ValueError("num_draft_tokens and rank must be at least 1")
    return config
