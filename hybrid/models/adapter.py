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
from hybrid.models.linear import Linear

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
    """

    num_draft_tokens: int
    entry_layer: int
    feature_layers: tuple[int, ...]
    rank: int
    lora_alpha: float
    base: Mapping[str, int]

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


class LoraLinear(Linear):
    """A base layer plus (x A^T) B^T; several adapters of one fused layer lie side by side."""

    def __init__(self, base: Linear, a: Tensor, b: Tensor) -> None:
        """Keep the parts.

        Args:
            base: [I] -> [O].
            a: [R, I], R the sum of the ranks.
            b: [O, R], the scale already in it.
        """
        self.base, self.a, self.b = base, a, b
        self.out_features = base.out_features

    def __call__(self, x: Tensor) -> Tensor:
        """Return [N, O] for x [N, I]."""
        return torch.addmm(self.base(x), F.linear(x, self.a), self.b.t())

    @property
    def nbytes(self) -> int:
        """Bytes of the update alone."""
        return (self.a.numel() + self.b.numel()) * self.a.element_size()


class DiffusionAdapter:
    """An adapter bound to a backbone: wrapped layers, a final norm and the draft input.

    Attributes:
        config: its shape.
        layers: as the backbone's, wrapped from `config.entry_layer` on.
        norm: [C] final norm of a draft pass.
    """

    def __init__(
        self, backbone: NativeBackbone, config: DraftConfig, tensors: Mapping[str, Tensor]
    ) -> None:
        """Bind `tensors` (names as on disk) to `backbone`.

        Raises:
            CheckpointError: made for another model, or tensors are missing.
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
        first = config.entry_layer
        self.layers = [
            layer if index < first else self._wrap(index, layer)
            for index, layer in enumerate(backbone.layers)
        ]
        self.norm = self._take("norm.weight")
        self.slots = self._take("slots")  # [K + 1, C]
        self.mask = self._take("mask")  # [C], the embedding of a masked slot
        self.project = self._take("project")  # [C, 2 C], P
        self.features = self._take("features")  # [C, F * C], Q
        self.nbytes = sum(t.numel() * t.element_size() for t in tensors.values())
        del self._tensors

    def _take(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"Adapter has no tensor {name!r}. The files are incomplete.")
        return self._tensors[name].to(self._backbone.device, self._backbone.dtype)

    def _lora(self, index: int, block: str, names: Sequence[str], base: Linear) -> Linear:
        scale = self.config.lora_alpha / self.config.rank
        prefix = f"{PEFT_PREFIX}.{index}.{block}"
        a = [self._take(f"{prefix}.{n}.lora_A.weight") for n in names]
        b = [self._take(f"{prefix}.{n}.lora_B.weight") * scale for n in names]
        return LoraLinear(base, torch.cat(a), torch.block_diag(*b))

    def _wrap(self, index: int, layer: Layer) -> Layer:
        return replace(
            layer,
            input_norm=self._take(f"layers.{index}.input_norm"),
            post_norm=self._take(f"layers.{index}.post_norm"),
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
        base = hidden[self.config.entry_layer - 1] + F.linear(features, self.features)
        return base[:, None] + slots + F.linear(torch.cat([seen, own], dim=-1), self.project)


def unit_norm(x: Tensor) -> Tensor:
    """RMS norm without a weight: features of different layers come to one scale."""
    return F.rms_norm(x, (x.shape[-1],), None, 1e-6)


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
    try:
        raw = json.loads((folder / "draft_config.json").read_text(encoding="utf-8"))
        config = DraftConfig(**{**raw, "feature_layers": tuple(raw["feature_layers"])})
        tensors = load_file(folder / "adapter_model.safetensors")
        tensors.update(load_file(folder / "draft_model.safetensors"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"Adapter {folder}: no file {Path(str(error.filename)).name}. Expected a folder with "
            "draft_config.json, draft_model.safetensors and adapter_model.safetensors, as "
            "`hybrid train self-diffusion` writes it."
        ) from error
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"Adapter {folder} cannot be read: {error}") from error
    return config, tensors
