"""`ModelSpec`: what the one native decoder must know of a checkpoint. Families translate to it.

Next: hybrid/models/families.py, hybrid/models/transformer.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (arXiv:2104.09864) and its scaling.

    Attributes:
        theta: base of the frequencies.
        kind: "default", "linear", "dynamic", "yarn" or "llama3".
        params: the scaling's own numbers under transformers' names (factor, ...).
        max_seq_len: `max_position_embeddings` of the checkpoint ("dynamic" needs it).
    """

    theta: float = 10000.0
    kind: str = "default"
    params: Mapping[str, Any] = field(default_factory=dict)
    max_seq_len: int = 2048


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer: RMSNorm, RoPE, GQA, SwiGLU.

    Attributes:
        family: key of hybrid/models/families.py.
        sliding_windows: per layer, how many positions a token sees (itself included), or None.
        qk_norm: RMSNorm over each head of q and k before RoPE (Qwen3).
        qkv_bias: biases on q, k, v.
        o_bias: bias on the attention output.
        mlp_bias: biases on gate, up and down.
        logit_shift: see `Backbone`.
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
    eos_token_ids: tuple[int, ...] = ()
    mask_token_id: int | None = None
    logit_shift: int = 1
