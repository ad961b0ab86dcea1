"""DFlash checkpoints on disk: the layouts that other engines read and write, and ours among them.

Ours is the one of the method's authors, which vLLM, SGLang and others load unchanged. Read are also
the layout of transformers (`muse_glimmer_assistant`) and the one of speculators. Next:
hybrid/models/dflash.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from hybrid.errors import CheckpointError
from hybrid.files import replacing, write_json
from hybrid.models.checkpoint import open_checkpoint
from hybrid.models.dflash import DFlashModel, DFlashSpec, spread_layers
from hybrid.models.rope import parse_rope

_MUSE = "muse_glimmer_assistant"
_RENAMED = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
# Of `dflash_config`; any other key that is set changes what the network computes.
_KNOWN = {
    "mask_token",
    "mask_token_id",
    "target_layer_ids",
    "block_size",
    "num_target_layers",
    "use_aux_hidden_state",
}


def load_dflash(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    config: Mapping[str, Any] | None = None,
) -> DFlashModel:
    """Read a drafter's folder, in any of the three layouts.

    Args:
        path: the folder.
        device: of the weights.
        dtype: of the weights.
        config: what to go by in place of the folder's config.json.

    Raises:
        CheckpointError: it cannot be read, is no DFlash drafter, or is one of a kind that is not
            computed here (causal blocks, a vocabulary or embedding of its own, ...).
        ConfigError: its numbers make no sense, or a feature is the target's last layer.
    """
    checkpoint = open_checkpoint(path)
    with torch.device("meta"):  # shapes only: the weights are the file's
        model = DFlashModel(dflash_spec(checkpoint.config if config is None else config))
    tensors = {_own_name(name): value for name, value in checkpoint.tensors.items()}
    expected = {name: list(value.shape) for name, value in model.state_dict().items()}
    got = {name: list(value.shape) for name, value in tensors.items()}
    if got != expected:
        names = sorted(n for n in {*got, *expected} if got.get(n) != expected.get(n))
        raise CheckpointError(
            f"{path}: {len(names)} tensors do not fit its config.json, the first is {names[0]}: "
            f"got {got.get(names[0], 'none')}, expected {expected.get(names[0], 'none')}. "
            "Expected a DFlash drafter that uses its target's embedding and head."
        )
    own = {n: t.to(device, dtype) for n, t in tensors.items() if isinstance(t, Tensor)}
    model.load_state_dict(own, assign=True)
    return model.eval().requires_grad_(False)


def save_dflash(folder: Path, model: DFlashModel, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json and model.safetensors; each appears whole or not at all.

    Args:
        folder: created if need be.
        model: the drafter.
        dtype: of the tensors on disk.

    Raises:
        CheckpointError: a file cannot be written.
    """
    tensors = {n: t.detach().to("cpu", dtype).contiguous() for n, t in model.state_dict().items()}
    with replacing(folder / "model.safetensors") as part:
        # Not save_file: its files are readable by their owner alone.
        part.write_bytes(save(tensors, metadata={"format": "pt"}))
    write_json(folder / "config.json", dflash_config(model.spec, dtype))


def dflash_spec(config: Mapping[str, Any]) -> DFlashSpec:
    """Translate a drafter's config.json.

    Raises:
        CheckpointError: not a DFlash drafter, or of a kind that is not computed here.
        ConfigError: see `DFlashSpec`.
    """
    layers = config.get("transformer_layer_config") or config  # speculators nests it
    own = {**config, **(config.get("dflash_config") or {})}
    _check_kind(config, layers)
    try:
        num_layers, num_target_layers = layers["num_hidden_layers"], own.get("num_target_layers")
        heads = layers["num_attention_heads"]
        return DFlashSpec(
            block_size=own["block_size"],
            mask_token_id=own["mask_token_id"],
            target_layer_ids=_feature_layers(own, num_layers),
            vocab_size=layers.get("vocab_size"),
            hidden_size=layers["hidden_size"],
            intermediate_size=layers["intermediate_size"],
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=layers.get("num_key_value_heads") or heads,
            head_dim=layers.get("head_dim") or layers["hidden_size"] // heads,
            norm_eps=layers["rms_norm_eps"],
            max_seq_len=layers["max_position_embeddings"],
            rope=parse_rope(layers),
            windows=_windows(layers),
            num_target_layers=num_target_layers,
            bias=bool(layers.get("attention_bias")),
        )
    except KeyError as error:
        raise CheckpointError(
            f"config.json has no {error}, which a DFlash drafter needs. Expected "
            "`dflash_config`, or the layout of transformers or speculators."
        ) from None


def dflash_config(spec: DFlashSpec, dtype: torch.dtype) -> dict[str, Any]:
    """Return the config.json of a drafter; it says outright that blocks are not causal."""
    scaling = {"rope_type": spec.rope.kind, **spec.rope.params}
    window = next((w for w in spec.windows if w is not None), None)
    types = ["full_attention" if w is None else "sliding_attention" for w in spec.windows]
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": spec.block_size,
        "num_target_layers": spec.num_target_layers,
        "dflash_config": {
            "mask_token_id": spec.mask_token_id,
            "target_layer_ids": list(spec.target_layer_ids),
            # Where it is missing, some engines fall back to causal blocks and accept less.
            "causal": False,
        },
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.max_seq_len,
        "rope_theta": spec.rope.theta,
        "rope_scaling": None if spec.rope.kind == "default" else scaling,
        "layer_types": types,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": spec.num_layers,
        "hidden_act": "silu",
        "attention_bias": spec.bias,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": str(dtype).removeprefix("torch."),
    }


def _own_name(name: str) -> str:
    for theirs, ours in _RENAMED.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _feature_layers(own: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    if "aux_hidden_state_layer_ids" in own:  # speculators counts the embedding as layer 0
        return tuple(i - 1 for i in own["aux_hidden_state_layer_ids"])
    ids = own.get("target_layer_ids")
    return spread_layers(own["num_target_layers"], num_layers) if ids is None else tuple(ids)


def _windows(layers: Mapping[str, Any]) -> tuple[int | None, ...]:
    types = layers.get("layer_types") or ["full_attention"] * layers["num_hidden_layers"]
    window = layers.get("sliding_window")
    # Transformers' own class counts the distance to the farthest visible token, others the tokens.
    more = 1 if layers.get("model_type") == _MUSE else 0
    return tuple(window + more if t == "sliding_attention" and window else None for t in types)


def _check_kind(config: Mapping[str, Any], layers: Mapping[str, Any]) -> None:
    own = config.get("dflash_config") or {}
    vocab_size = config.get("draft_vocab_size")
    odd = [key for key, value in own.items() if value and key not in _KNOWN]
    odd += [k for k in ("sample_from_anchor", "final_logit_softcapping") if config.get(k)]
    if vocab_size is not None and vocab_size != layers.get("vocab_size"):
        odd.append("draft_vocab_size")
    if layers.get("hidden_act", "silu") != "silu":
        odd.append("hidden_act")
    if odd:
        raise CheckpointError(
            f"config.json: {odd[0]} asks for a kind of DFlash drafter that is not computed here. "
            "Expected blocks without causal mask, SiLU, and the target's vocabulary."
        )
