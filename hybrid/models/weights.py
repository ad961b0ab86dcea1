"""From a checkpoint's tensors to the layers of the native backbone: checked, placed and fused.

Next: hybrid/models/transformer.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid.errors import CheckpointError
from hybrid.models.checkpoint import Weight
from hybrid.models.linear import DenseLinear, Linear, make_linear
from hybrid.models.moe import Experts
from hybrid.models.spec import ModelSpec, MoeSpec


@dataclass(slots=True)
class Layer:
    """Weights of one layer. `qkv`, `o`, `gate_up`, `down` may be wrapped by an adapter.

    `gate_up` and `down` are the MLP that every token goes through. Beside routed experts those are
    the shared experts, of width 0 where there are none.
    """

    input_norm: Tensor
    qkv: Linear
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    window: int | None
    experts: Experts | None = None


class Weights:
    """Takes tensors by canonical name; each is read when it is taken, layer by layer.

    So loading needs little more memory than the model.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Weight],
        device: torch.device,
        dtype: torch.dtype,
        *,
        exact: bool,
        reorder: bool,
        share: bool,
    ) -> None:
        """Hold what all tensors need; the arguments are those of `NativeBackbone`."""
        self.spec, self.weights, self.device, self.dtype = spec, weights, device, dtype
        self.exact, self.reorder, self.share = exact, reorder, share

    def dense(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor, its blocks dequantised if it is in blocks.

        Raises:
            CheckpointError: it is missing or has another shape, as for the other methods.
        """
        dtype = dtype or self.dtype
        value = self._get(name, *shape)
        return (value if isinstance(value, Tensor) else value.dequantize(dtype)).to(
            self.device, dtype
        )

    def head(self, embedding: Tensor) -> Linear:
        """Return the output head; a tied dense one is the embedding, not a second copy."""
        name = "model.embed_tokens.weight" if self.spec.tie_embeddings else "lm_head.weight"
        weight = self._get(name, self.spec.vocab_size, self.spec.hidden_size)
        is_shared = self.spec.tie_embeddings and isinstance(weight, Tensor)
        weight = embedding if is_shared else self._placed(weight)
        return make_linear([weight], [None], exact=self.exact, reorder=self.reorder)

    def layer(self, index: int) -> Layer:
        """Return one layer."""
        s, prefix = self.spec, f"model.layers.{index}"
        heads, groups = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        qkv = {"q_proj": heads, "k_proj": groups, "v_proj": groups}
        attention = f"{prefix}.self_attn"
        norms = [
            self.dense(f"{attention}.{n}.weight", s.head_dim) if s.qk_norm else None
            for n in ("q_norm", "k_norm")
        ]
        experts, mlp, size = None, f"{prefix}.mlp", s.intermediate_size
        if s.moe is not None and s.moe.layers[index]:
            experts = self._experts(mlp, s.moe)
            mlp, size = f"{mlp}.shared_experts", s.moe.shared_size
        gate_up, down = self._mlp(mlp, size)
        return Layer(
            input_norm=self.dense(f"{prefix}.input_layernorm.weight", s.hidden_size),
            qkv=self._linear(attention, qkv, s.hidden_size, fused="qkv_proj", bias=s.qkv_bias),
            o=self._linear(attention, {"o_proj": s.hidden_size}, heads, bias=s.o_bias),
            post_norm=self.dense(f"{prefix}.post_attention_layernorm.weight", s.hidden_size),
            gate_up=gate_up,
            down=down,
            q_norm=norms[0],
            k_norm=norms[1],
            window=s.sliding_windows[index],
            experts=experts,
        )

    def _mlp(self, prefix: str, size: int, *, steady: bool = False) -> tuple[Linear, Linear]:
        """Return gate and up, and down, of an MLP; without a width it takes no tensors."""
        s, parts = self.spec, {"gate_proj": size, "up_proj": size}
        if size == 0:
            nothing = torch.empty(0, s.hidden_size, dtype=self.dtype, device=self.device)
            return DenseLinear(nothing), DenseLinear(nothing.T)
        gate_up = self._linear(
            prefix, parts, s.hidden_size, fused="gate_up_proj", bias=s.mlp_bias, steady=steady
        )
        parts = {"down_proj": s.hidden_size}
        return gate_up, self._linear(prefix, parts, size, bias=s.mlp_bias, steady=steady)

    def _experts(self, prefix: str, moe: MoeSpec) -> Experts:
        shape, float32 = (moe.num_experts, self.spec.hidden_size), torch.float32
        router = self.dense(f"{prefix}.gate.weight", *shape, dtype=float32)
        bias = None
        if moe.has_bias:
            bias = self.dense(f"{prefix}.gate.expert_bias", moe.num_experts, dtype=float32)
        experts = [
            self._mlp(f"{prefix}.experts.{index}", moe.intermediate_size, steady=True)
            for index in range(moe.num_experts)
        ]
        chooser = DenseLinear(router, steady=True, exact=self.exact)
        return Experts(moe, chooser, bias, experts, exact=self.exact)

    def _linear(
        self,
        prefix: str,
        parts: Mapping[str, int],
        width: int,
        *,
        bias: bool,
        fused: str = "",
        steady: bool = False,
    ) -> Linear:
        """Return one layer for parts stacked along the output; a checkpoint may hold them so."""
        if f"{prefix}.{fused}.weight" in self.weights:
            parts = {fused: sum(parts.values())}
        weights = [
            self._placed(self._get(f"{prefix}.{n}.weight", size, width))
            for n, size in parts.items()
        ]
        biases = [
            self.dense(f"{prefix}.{n}.bias", size) if bias else None for n, size in parts.items()
        ]
        return make_linear(
            weights,
            biases,
            steady=steady,
            exact=self.exact,
            reorder=self.reorder,
            share=self.share,
        )

    def _placed(self, value: Weight) -> Weight:
        """Return a weight where it belongs, in its blocks where a layer can compute with them."""
        if not isinstance(value, Tensor):
            on_cpu = self.device.type == "cpu" and self.dtype == torch.bfloat16
            return value if on_cpu else value.dequantize(self.dtype).to(self.device)
        return value.to(self.device, self.dtype)

    def _get(self, name: str, *shape: int) -> Weight:
        if name not in self.weights:
            raise CheckpointError(
                f"Checkpoint has no tensor {name!r}, which {self.spec.family} needs. "
                "The files are incomplete or of another architecture."
            )
        value = self.weights[name]
        if tuple(value.shape) != shape:
            raise CheckpointError(
                f"{name}: got shape {list(value.shape)}, expected {list(shape)} by config.json."
            )
        return value
