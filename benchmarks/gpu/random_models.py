"""Models of known shapes with random weights, made on the device: for speed, and nothing else.

Next: benchmarks/gpu/end_to_end.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hybrid.models.adapter import DiffusionAdapter
from hybrid.models.draft_config import (
    ATTENTION,
    MLP,
    DraftConfig,
    base_shape,
    lora_prefix,
    projection_shapes,
)
from hybrid.models.spec import ModelSpec, RopeSpec
from hybrid.models.transformer import NativeBackbone

NUM_SLOTS = 8
RANK = 32


def _spec(
    vocab: int, width: int, inner: int, layers: int, heads: tuple[int, int, int], *,
    tied: bool, theta: float, qk_norm: bool = False,
) -> ModelSpec:  # fmt: skip
    num_heads, num_kv_heads, head_dim = heads
    return ModelSpec(
        family="qwen3" if qk_norm else "llama",
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=1e-5,
        max_seq_len=8192,
        rope=RopeSpec(theta=theta, max_seq_len=8192),
        sliding_windows=(None,) * layers,
        tie_embeddings=tied,
        qk_norm=qk_norm,
    )


SHAPES = {  # the one that matters most comes first: the time may not last
    "Llama-3.1-8B": _spec(128_256, 4096, 14_336, 32, (32, 8, 128), tied=False, theta=5e5),
    "Qwen3-0.6B": _spec(151_936, 1024, 3072, 28, (16, 8, 128), tied=True, theta=1e6, qk_norm=True),
    "SmolLM2-135M": _spec(49_152, 576, 1536, 30, (9, 3, 64), tied=True, theta=1e5),
}
DRY_SHAPES = {"tiny": _spec(96, 32, 64, 3, (4, 2, 8), tied=False, theta=1e4, qk_norm=True)}


class RandomTensors(Mapping[str, Tensor]):
    """Tensors by name; each is drawn when it is taken, so that none lies about.

    Norms are ones with some noise, the rest is normal, divided by its width so that activations
    keep their size.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], generator: torch.Generator, dtype: torch.dtype
    ) -> None:
        """Keep the shapes."""
        self._shapes, self._generator, self._dtype = shapes, generator, dtype

    def __getitem__(self, name: str) -> Tensor:
        """Draw one."""
        shape, device = self._shapes[name], self._generator.device
        out = torch.empty(shape, dtype=self._dtype, device=device)
        if len(shape) == 1:
            return out.normal_(1.0, 0.1, generator=self._generator)
        return out.normal_(0.0, shape[-1] ** -0.5, generator=self._generator)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._shapes)

    def __len__(self) -> int:
        """Return their number."""
        return len(self._shapes)


def backbone_of(
    spec: ModelSpec, generator: torch.Generator, dtype: torch.dtype, *, exact: bool = False
) -> NativeBackbone:
    """Return a model of this shape; the same generator gives the same weights."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "model.norm.weight": (spec.hidden_size,),
    }
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{norm}.weight"] = (spec.hidden_size,)
        for name, (inputs, outputs) in projection_shapes(spec).items():
            part = "self_attn" if name in ATTENTION else "mlp"
            shapes[f"{prefix}.{part}.{name}.weight"] = (outputs, inputs)
        for norm in ("q_norm", "k_norm") if spec.qk_norm else ():
            shapes[f"{prefix}.self_attn.{norm}.weight"] = (spec.head_dim,)
    tensors = RandomTensors(shapes, generator, dtype)
    return NativeBackbone(spec, tensors, device=generator.device, dtype=dtype, exact=exact)


def adapter_of(backbone: NativeBackbone, generator: torch.Generator) -> DiffusionAdapter:
    """Return an adapter like the shipped one: it enters after two thirds of the layers.

    It drafts over the whole vocabulary and has no sampler head.
    """
    num_layers, width = backbone.num_layers, backbone.hidden_size
    entry = max(1, 2 * num_layers // 3)
    features = tuple(sorted({0, num_layers // 3, entry - 1, num_layers - 1}))
    config = DraftConfig(
        num_draft_tokens=NUM_SLOTS,
        entry_layer=entry,
        feature_layers=features,
        rank=min(RANK, width // 4),
        lora_alpha=float(RANK),
        base=base_shape(backbone),
    )
    shapes: dict[str, tuple[int, ...]] = {
        "slots": (NUM_SLOTS + 1, width),
        "mask": (width,),
        "project": (width, 2 * width),
        "features": (width, len(features) * width),
        "norm.weight": (width,),
    }
    for layer in range(entry, num_layers):
        shapes[f"layers.{layer}.input_norm"] = shapes[f"layers.{layer}.post_norm"] = (width,)
        for name in (*ATTENTION, *MLP):
            inputs, outputs = projection_shapes(backbone.spec)[name]
            prefix = lora_prefix(layer, name)
            shapes[f"{prefix}.lora_A.weight"] = (config.rank, inputs)
            shapes[f"{prefix}.lora_B.weight"] = (outputs, config.rank)
    return DiffusionAdapter(backbone, config, RandomTensors(shapes, generator, backbone.dtype))


def shapes(is_dry: bool) -> dict[str, ModelSpec]:
    """Return the models of a run by name."""
    return DRY_SHAPES if is_dry else SHAPES
