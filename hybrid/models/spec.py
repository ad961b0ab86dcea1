"""`ModelSpec`: what the one native decoder must know of a checkpoint. Families translate to it.

Next: hybrid/models/family_table.py, hybrid/models/transformer.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybrid.types import Context


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (arXiv:2104.09864) and its scaling.

    Attributes:
        theta: base of the frequencies.
        kind: "default", "linear", "dynamic", "yarn" or "llama3".
        params: the scaling's own numbers under transformers' names (factor, ...).
        max_seq_len: `max_position_embeddings` of the checkpoint ("dynamic" needs it).
        fraction: of a head that is rotated, its first dimensions.
    """

    theta: float = 10000.0
    kind: str = "default"
    params: Mapping[str, Any] = field(default_factory=dict)
    max_seq_len: int = 2048
    fraction: float = 1.0


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture of experts in place of the MLP of some layers.

    Attributes:
        layers: per layer, whether it has one.
        num_experts: E.
        num_chosen: experts per token.
        intermediate_size: width of an expert.
        shared_size: width of the experts that every token visits, together; 0 is none.
        scoring: "softmax" (Qwen3) or "sigmoid" (LLaDA2, DeepSeek-V3, arXiv:2412.19437).
        has_bias: a bias per expert takes part in the choice, not in the weights.
        num_groups: the experts form groups, the best of which are kept before the choice.
        num_chosen_groups: how many.
        normalize: the weights of a token sum to `scale`.
        scale: factor on the weights.
    """

    layers: tuple[bool, ...]
    num_experts: int
    num_chosen: int
    intermediate_size: int
    shared_size: int = 0
    scoring: str = "softmax"
    has_bias: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    normalize: bool = True
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer: RMSNorm, RoPE, GQA, SwiGLU or a mixture of experts.

    Attributes:
        family: key of hybrid/models/families.py.
        sliding_windows: per layer, how many positions a token sees (itself included), or None.
        qk_norm: RMSNorm over each head of q and k before RoPE (Qwen3).
        qkv_bias: biases on q, k, v.
        o_bias: bias on the attention output.
        mlp_bias: biases on gate, up and down.
        moe: None when every layer has an MLP.
        context, can_verify, block_size, logit_shift, default_strategy: see `Backbone`.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_seq_len: int
    rope: RopeSpec
    sliding_windows: tuple[int | None, ...]
    tie_embeddings: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    moe: MoeSpec | None = None
    eos_token_ids: tuple[int, ...] = ()
    mask_token_id: int | None = None
    context: Context = Context.CAUSAL
    can_verify: bool = True
    block_size: int | None = None
    logit_shift: int = 1
    default_strategy: str = "speculative"
