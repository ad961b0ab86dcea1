"""`DiffusionAdapter`: what teaches an AR model to fill masked slots, without changing its AR mode.

Low-rank updates (LoRA, arXiv:2106.09685) on the layers of a draft pass, norms of their own, and a
learned draft input. They act in draft passes only; committed tokens never pass through them, so the
cache and AR logits are those of the base model. On disk: a PEFT adapter folder, plus the shape of
the draft pass and, unless the adapter is plain, what PEFT does not know:

    adapter_config.json   adapter_model.safetensors    LoRA in PEFT's layout
    draft_config.json     draft_model.safetensors      slots, features, norms, head

A model that was trained to fill masks beside its AR mode (Nemotron-Labs-Diffusion) drafts with its
own layers, or with those of a PEFT folder that has neither of the two files.

Next: drafters/self_diffusion.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid.errors import CheckpointError, ConfigError
from hybrid.kernels import dispatch
from hybrid.kernels.gated_lora import gated_lora
from hybrid.models.checkpoint import INT4_GROUP, Int4Blocks
from hybrid.models.draft_config import (
    ATTENTION,
    DRAFT_CONFIG,
    MLP,
    DraftConfig,
    lora_prefix,
    plain_config,
    projection_shapes,
    read_adapter,
)
from hybrid.models.draft_head import DraftHead, SamplerHead
from hybrid.models.draft_input import LateInput, TokenInput
from hybrid.models.family_table import FAMILIES
from hybrid.models.linear import (
    PACKED_ROWS,
    DenseLinear,
    Linear,
    PackedLinear,
    StackedLinear,
    make_linear,
)
from hybrid.models.lora_files import LowRank, is_peft, read_updates
from hybrid.models.transformer import NativeBackbone
from hybrid.models.weights import Layer
from hybrid.protocols import Backbone


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

    def __call__(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return [N, O] for x [N, I]; on a GPU the update is one launch.

        Args:
            x: [N, I].
            ids: [N] int32, -1 for rows that get the base layer's output, 0 for the others. Only
                where `runs_gated`; None is all 0.
        """
        y = self.base(x)
        if not self.runs_gated(x.device):
            assert ids is None
            return y.add_(self.b(self.a(x)))
        ids = _gates(len(x), 0, x.device) if ids is None else ids
        return gated_lora(y, x, self.a.weight[None], self.b.weight[None], ids)

    def shares(self, base: Linear) -> bool:
        """Return whether `base` is wrapped, and rows may have ids."""
        return self.base is base and self.runs_gated(self.a.weight.device)

    def behind(self, num_base: int, x: Tensor) -> Tensor:
        """Return [N, O]: the update is added behind the first rows alone."""
        return self(x, _gates(len(x), 0, x.device, num_base))

    @staticmethod
    def runs_gated(device: torch.device) -> bool:
        """Whether rows may have ids: a kernel adds the update, not two products and a sum."""
        return dispatch.choose("gated_lora", device) == "triton"

    def dense(self) -> Tensor:
        """Return the weight [O, I] with the update in it, float32."""
        return self.base.dense().float() + self.b.weight.float() @ self.a.weight.float()

    @property
    def nbytes(self) -> int:
        """Bytes of the update alone."""
        return self.a.nbytes + self.b.nbytes


class AnchorGated(Linear):
    """A wrapped layer, but the base layer for the first row of every pass."""

    def __init__(self, base: Linear, wrapped: Linear, num_rows: int) -> None:
        """Keep the parts; every `num_rows` rows of an input are a pass."""
        self.base, self.wrapped, self.num_rows = base, wrapped, num_rows

    def __call__(self, x: Tensor) -> Tensor:
        """Return [N, O] for x [N, I]."""
        if isinstance(self.wrapped, LoraLinear) and LoraLinear.runs_gated(x.device):
            return self.wrapped(x, _gates(len(x), self.num_rows, x.device))
        y = self.wrapped(x)
        y[:: self.num_rows] = self.base(x[:: self.num_rows].contiguous())
        return y

    def shares(self, base: Linear) -> bool:
        """Return whether what is wrapped does."""
        return isinstance(self.wrapped, LoraLinear) and self.wrapped.shares(base)

    def behind(self, num_base: int, x: Tensor) -> Tensor:
        """Return [N, O]: passes begin behind the first rows."""
        assert isinstance(self.wrapped, LoraLinear)
        return self.wrapped(x, _gates(len(x), self.num_rows, x.device, num_base))


@cache  # a captured pass keeps its address
def _gates(
    num_rows: int, num_rows_per_pass: int, device: torch.device, num_base: int = 0
) -> Tensor:
    """Return [N] ids: -1 for the first `num_base` rows, behind them 0.

    But for the first row of every pass, if those have a length: -1, too.
    """
    ids = torch.zeros(num_rows, dtype=torch.int32, device=device)
    ids[:num_base] = -1
    if num_rows_per_pass:
        ids[num_base::num_rows_per_pass] = -1
    return ids


@dataclass(frozen=True, slots=True)
class GatedLayers:
    """What a backbone asks of an adapter, for passes of one length."""

    layers: list[Layer]


class DiffusionAdapter:
    """An adapter bound to a backbone: wrapped layers, a final norm and the draft input.

    Attributes:
        config: its shape.
        backbone: whose later layers it runs.
        layers: as the backbone's, wrapped from `config.entry_layer` on. Where a CPU decodes, the
            updates are merged into packed 4-bit copies, whatever the backbone's precision: two
            small products more cost as much as a large one, and a draft may round as it likes.
        draft_input: how rows of token ids enter `config.entry_layer`.
        head: what turns a slot's last hidden state into tokens.
        folder: where it was loaded from, None otherwise.
    """

    folder: Path | None = None

    def __init__(
        self,
        backbone: NativeBackbone,
        config: DraftConfig,
        tensors: Mapping[str, Tensor],
        *,
        may_round: bool = True,
    ) -> None:
        """Bind `tensors` (names as on disk) to `backbone`.

        Args:
            backbone: whose layers it wraps.
            config: its shape.
            tensors: its weights.
            may_round: False leaves the updates unmerged on a CPU too, in the backbone's precision:
                drafts are then those of other implementations.

        Raises:
            CheckpointError: made for another model, or tensors are missing or misshapen.
        """
        config.check_target(backbone)
        if problem := config.problem(backbone.spec):
            raise CheckpointError(f"Adapter: {problem} Its {DRAFT_CONFIG} is damaged.")
        self.config, self.backbone, self._tensors = config, backbone, tensors
        self._gated: dict[int, GatedLayers] = {}
        # Plain weights are there to be trained, or on a GPU: no second copy of them.
        is_trainable = isinstance(
            backbone.layers[config.entry_layer].qkv, (DenseLinear, StackedLinear)
        )
        self._merges = may_round and not is_trainable
        self.layers = [
            layer if index < config.entry_layer else self._wrap(index, layer)
            for index, layer in enumerate(backbone.layers)
        ]
        self.draft_input = self._input()
        self.head = self._head()
        del self._tensors

    def for_pass(self, num_rows: int) -> DiffusionAdapter | GatedLayers:
        """Return what a draft pass of `num_rows` rows runs: the wrapped layers.

        In a pass with random tokens the row of the anchor runs the base model's.
        """
        if self.config.corruption != "uniform":
            return self
        if num_rows not in self._gated:
            layers = []
            for base, layer in zip(self.backbone.layers, self.layers, strict=True):
                gated: dict[str, Any] = {
                    name: AnchorGated(getattr(base, name), wrapped, num_rows)
                    for name, wrapped in _wrapped(base, layer).items()
                }
                layers.append(replace(layer, **gated))
            self._gated[num_rows] = GatedLayers(layers)
        return self._gated[num_rows]

    @property
    def nbytes(self) -> int:
        """Bytes beside the backbone's own."""
        tensors = [self.head.norm] if self.config.train_norms else []
        own = self.head.nbytes + self.draft_input.nbytes
        for base, layer in zip(self.backbone.layers, self.layers, strict=True):
            own += sum(wrapped.nbytes for wrapped in _wrapped(base, layer).values())
            if layer.input_norm is not base.input_norm:
                tensors += [layer.input_norm, layer.post_norm]
        return own + sum(t.numel() * t.itemsize for t in tensors)

    def _take(self, name: str, *shape: int) -> Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"Adapter has no tensor {name!r}. The files are incomplete.")
        value = self._tensors[name]
        if tuple(value.shape) != shape:
            raise CheckpointError(
                f"Adapter tensor {name!r}: got shape {list(value.shape)}, expected {list(shape)} "
                "by draft_config.json. The files do not belong together."
            )
        dtype = self.backbone.dtype if value.is_floating_point() else torch.int64
        return value.to(self.backbone.device, dtype)

    def _linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return a layer of the adapter's own, packed where updates are merged.

        Steady: the draft of a row must not depend on how many rows there are.
        """
        fits = weight.shape[0] % PACKED_ROWS == 0 and weight.shape[1] % INT4_GROUP == 0
        if self._merges and fits:
            return PackedLinear([Int4Blocks.quantize(weight)], bias)
        weight = weight.to(self.backbone.dtype)
        exact = self.backbone.exact
        return make_linear([weight], [bias], steady=True, exact=exact, reorder=self._merges)

    def _input(self) -> TokenInput | LateInput:
        config, embedding = self.config, self.backbone.embedding
        if config.entry_layer == 0:
            return TokenInput(embedding, config.mask_token_id)
        width, num_features = self.backbone.hidden_size, len(config.feature_layers)
        return LateInput(
            embedding,
            config.entry_layer - 1,
            config.feature_layers,
            slots=self._take("slots", config.num_draft_tokens + 1, width),
            mask=self._take("mask", width),
            project=self._linear(self._take("project", width, 2 * width)),
            features=self._linear(self._take("features", width, num_features * width)),
        )

    def _head(self) -> DraftHead:
        backbone, size, width = self.backbone, self.config.sampler_size, self.backbone.hidden_size
        sampler, vocabulary, output = None, None, backbone.head
        if size:
            gate_up = self._linear(self._take("sampler.gate_up", 2 * size, 3 * width))
            down = self._linear(self._take("sampler.down", width, size))
            sampler = SamplerHead(gate_up, down)
        if self.config.draft_vocab_size is not None:
            vocabulary = self._take("vocabulary", self.config.draft_vocab_size)
            tied = backbone.spec.tie_embeddings
            rows = (backbone.embedding if tied else backbone.head.dense())[vocabulary]
            output = self._linear(rows)
        norm = self._take("norm.weight", width) if self.config.train_norms else backbone.norm
        barred = self.config.mask_token_id
        if vocabulary is not None and barred is not None:
            found = (vocabulary == barred).nonzero().flatten().tolist()
            barred = found[0] if found else None
        return DraftHead(
            norm, backbone.spec.norm_eps, output, backbone.embedding, vocabulary, sampler, barred
        )

    def _lora(self, index: int, names: Sequence[str], base: Linear) -> Linear:
        config, shapes = self.config, projection_shapes(self.backbone.spec)
        if not {*names} & {*config.targets}:
            return base
        scale = config.lora_alpha / config.rank
        a, b = [], []
        for name in names:
            prefix, (inputs, outputs) = lora_prefix(index, name), shapes[name]
            if name in config.targets:
                a.append(self._take(f"{prefix}.lora_A.weight", config.rank, inputs))
                b.append(self._take(f"{prefix}.lora_B.weight", outputs, config.rank) * scale)
            else:
                b.append(self.backbone.norm.new_zeros(outputs, 0))
        update = LoraLinear(base, torch.cat(a), torch.block_diag(*b))  # type: ignore[no-untyped-call]
        return self._linear(update.dense(), base.bias) if self._merges else update

    def _wrap(self, index: int, layer: Layer) -> Layer:
        norms: dict[str, Any] = {}
        if self.config.train_norms:
            for name in ("input_norm", "post_norm"):
                norms[name] = self._take(f"layers.{index}.{name}", self.backbone.hidden_size)
        return replace(
            layer,
            qkv=self._lora(index, ATTENTION[:3], layer.qkv),
            o=self._lora(index, ATTENTION[3:], layer.o),
            gate_up=self._lora(index, MLP[:2], layer.gate_up),
            down=self._lora(index, MLP[2:], layer.down),
            **norms,
        )


def _wrapped(base: Layer, layer: Layer) -> dict[str, Linear]:
    """Return {field: linear} of what an adapter has wrapped in a layer."""
    linears = {name: getattr(layer, name) for name in ("qkv", "o", "gate_up", "down")}
    return {name: x for name, x in linears.items() if x is not getattr(base, name)}


def load_adapter(backbone: NativeBackbone, path: str | Path) -> DiffusionAdapter:
    """Load an adapter folder: this project's, or PEFT's for a model that fills masks by itself.

    Raises:
        CheckpointError: missing or damaged files, or an adapter for another model.
        ConfigError: a PEFT folder for a model that cannot draft by itself.
    """
    folder = Path(path)
    if is_peft(folder) and backbone.mask_token_id is not None:
        updates = read_updates(folder, FAMILIES[backbone.spec.family].names)
        adapter = _plain_drafts(backbone, updates)
    else:
        adapter = DiffusionAdapter(backbone, *read_adapter(folder))
    adapter.folder = folder
    return adapter


def own_drafts(backbone: Backbone) -> DiffusionAdapter:
    """Return what a model drafts with that fills masks by itself: its layers as they are.

    Raises:
        ConfigError: it does not, or not through the native backbone.
    """
    return _plain_drafts(backbone, {})


def _plain_drafts(backbone: Backbone, updates: Mapping[str, LowRank]) -> DiffusionAdapter:
    if not isinstance(backbone, NativeBackbone) or backbone.mask_token_id is None:
        raise ConfigError(
            "self-diffusion: this model does not fill masks by itself. Give the folder of a "
            "diffusion adapter (see `hybrid train self-diffusion`) or use drafter='ngram'."
        )
    if backbone.logit_shift:
        raise ConfigError(
            "self-diffusion: this model predicts a masked slot from the token before it, expected "
            "one that predicts it in place. Use one of its own presets (`hybrid list presets`)."
        )
    config, tensors = plain_config(backbone, updates)
    return DiffusionAdapter(backbone, config, tensors, may_round=False)
