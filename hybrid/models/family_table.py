"""The model families: what each `model_type` means beyond its config file.

A family is a translation of the config and a map of tensor names; no modelling code is its own.
Next: hybrid/models/families.py, which reads configs by this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from hybrid.models import config_fields, name_maps
from hybrid.models.spec import MoeSpec
from hybrid.types import Context


@dataclass(frozen=True, slots=True)
class Family:
    """What one `model_type` means beyond its config file.

    Attributes:
        defaults: values of keys that the config leaves out, as transformers' class has them.
        qkv_bias: q, k, v have biases; None means the config's `attention_bias` says so.
        o_bias: the attention output has one; None as above.
        has_mlp_bias: the config's `mlp_bias` counts.
        qk_norm: q and k are normalised per head; None means the config's `qk_norm` says so.
        window: which layers slide: "none", "all", "layers" (`use_sliding_window` and friends) or
            "never": the same fields, and they must switch it off. A window counts back from a
            token; who fills masks also looks forward.
        has_partial_rope: the config's `partial_rotary_factor` counts.
        translate: from the family's own field names to transformers'.
        moe: reads the experts from the translated config.
        names: from the family's tensor names to canonical ones.
        mask_token_id: where the config has none and the vocabulary is that large.
        eos_token_id: likewise.
        block_size: where the config has none under `block_size_key`; None is none in any case.
        context, can_verify, logit_shift, default_strategy: see `Backbone`.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | None = False
    o_bias: bool | None = False
    has_mlp_bias: bool = False
    qk_norm: bool | None = False
    window: str = "none"
    has_partial_rope: bool = False
    translate: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    moe: Callable[[Mapping[str, Any]], MoeSpec] | None = None
    names: name_maps.NameMap = field(default_factory=dict)
    mask_token_id: int | None = None
    eos_token_id: int | None = None
    context: Context = Context.CAUSAL
    can_verify: bool = True
    block_size: int | None = None
    block_size_key: str = "block_size"
    logit_shift: int = 1
    default_strategy: str = "speculative"

    @property
    def has_exact_cache(self) -> bool:
        """Whether cached K/V are those that a pass over everything would compute."""
        return self.context is not Context.BIDIRECTIONAL


_LLAMA = Family(
    {"max_position_embeddings": 2048, "eos_token_id": 2},
    qkv_bias=None,
    o_bias=None,
    has_mlp_bias=True,
)
_QWEN2 = Family(
    {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
    qkv_bias=True,
    window="layers",
)
_QWEN3 = Family(
    {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
    },
    qkv_bias=None,
    o_bias=None,
    qk_norm=True,
    window="layers",
)
_MISTRAL = Family(
    {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "eos_token_id": 2,
    },
    window="all",
)
_MINISTRAL3 = Family(
    {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    window="all",
)


def _bidirectional(family: Family) -> Family:
    """Return a family of the same layout that is trained as LLaDA is: no blocks, no order."""
    return replace(
        family,
        window="never" if family.window == "layers" else family.window,
        context=Context.BIDIRECTIONAL,
        can_verify=False,
        logit_shift=0,
        default_strategy="llada",
    )


_SDAR = replace(
    _QWEN3,
    window="never",
    mask_token_id=151669,
    eos_token_id=151643,
    context=Context.BLOCK_CAUSAL,
    can_verify=False,
    block_size=4,
    logit_shift=0,
    default_strategy="sdar",
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": _LLAMA,
        "qwen2": _QWEN2,
        "qwen3": _QWEN3,
        "mistral": _MISTRAL,
        "ministral3": _MINISTRAL3,
        "llada": _bidirectional(
            Family(
                {"rms_norm_eps": 1e-5},
                qkv_bias=None,
                translate=config_fields.llada,
                names=name_maps.LLADA,
                mask_token_id=126336,
                eos_token_id=126081,
            )
        ),
        "Dream": replace(
            _QWEN2,
            window="never",
            mask_token_id=151666,
            eos_token_id=151643,
            context=Context.BIDIRECTIONAL,
            can_verify=False,
            default_strategy="dream",
        ),
        "Fast_dLLM_Qwen": replace(
            _QWEN2,
            window="never",
            mask_token_id=151665,
            eos_token_id=151645,
            context=Context.BLOCK_CAUSAL,
            can_verify=False,
            block_size=32,
            block_size_key="bd_size",
            default_strategy="fast-dllm-v2",
        ),
        "sdar": _SDAR,
        "sdar_moe": replace(
            _SDAR,
            defaults={"num_key_value_heads": 4, "max_position_embeddings": 32768},
            moe=config_fields.qwen3_moe,
        ),
        "llada2_moe": Family(
            {
                "partial_rotary_factor": 0.5,
                "max_position_embeddings": 32768,
                "use_qk_norm": True,
            },
            qkv_bias=None,
            qk_norm=None,
            window="never",
            has_partial_rope=True,
            translate=config_fields.llada2,
            moe=config_fields.llada2_moe,
            names=name_maps.LLADA2,
            mask_token_id=156895,
            eos_token_id=156892,
            context=Context.BLOCK_CAUSAL,
            can_verify=False,
            block_size=32,
            logit_shift=0,
            default_strategy="llada2",
        ),
        "nemotron_labs_diffusion": replace(
            _MINISTRAL3,
            window="none",
            names=name_maps.NEMOTRON,
            mask_token_id=100,
            block_size=32,
            logit_shift=0,
        ),
        "wedlm": replace(
            _QWEN2,
            window="never",
            defaults={**_QWEN2.defaults, "attention_bias": True},
            qkv_bias=None,
            qk_norm=None,
            logit_shift=0,
            default_strategy="wedlm",
        ),
        "a2d-llama": _bidirectional(_LLAMA),
        "a2d-qwen2": _bidirectional(_QWEN2),
        "a2d-qwen3": _bidirectional(_QWEN3),
    }
)
