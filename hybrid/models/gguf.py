"""Read a GGUF file: its metadata as a Hugging Face config, its tensors under transformers' names.

Q4_1 and Q8_0 matrices can keep their blocks; everything else is dequantised when it is asked for.
Next: hybrid/models/store.py, which turns the result into a folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hybrid.errors import CheckpointError
from hybrid.models.checkpoint import INT4_GROUP, Checkpoint, Int4Blocks, Int8Blocks, Weight

if TYPE_CHECKING:
    from gguf import GGUFReader

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_Q4_1_BYTES = 20  # d and m as float16, then 16 bytes of nibbles
_Q8_0_BYTES = 34  # d as float16, then 32 signed bytes


def read_gguf(
    path: str | Path,
    dtype: torch.dtype,
    *,
    keep_blocks: bool = True,
    reader: GGUFReader | None = None,
) -> Checkpoint:
    """Open a GGUF file (memory mapped); tensors are decoded when they are asked for.

    Args:
        path: the file.
        dtype: of every tensor that is not kept in blocks.
        keep_blocks: keep Q4_1 matrices as `Int4Blocks` and Q8_0 ones as `Int8Blocks`; otherwise
            dequantise them too.
        reader: result of `open_gguf`, when the caller has it; parsing a vocabulary takes seconds.

    Raises:
        CheckpointError: not a GGUF, truncated, or of an architecture that is not read here.
    """
    file = Path(path)
    reader = reader or open_gguf(file)
    metadata = _Metadata(file, reader)
    config = _config(metadata, {t.name for t in reader.tensors})
    factors = next((t for t in reader.tensors if t.name == _ROPE_FACTORS), None)
    if factors is not None:
        config["rope_parameters"] = _llama3_rope(file, config, np.array(factors.data))
    special = _special_tokens(metadata)
    return Checkpoint(
        path=file,
        config={**config, **special},
        tensors=_GGUFTensors(file, reader, config, dtype, keep_blocks),
        generation_config=special,
    )


def open_gguf(path: str | Path) -> GGUFReader:
    """Parse the header of a GGUF file and map the rest into memory.

    Raises:
        CheckpointError: no such file, not a GGUF, or truncated.
    """
    from gguf import GGUFReader

    file = Path(path)
    if not file.is_file():
        raise CheckpointError(f"GGUF file {file} does not exist. Check the path.")
    try:
        return GGUFReader(file)
    # The reader parses by slicing a memory map: damage shows as any of these.
    except (OSError, ValueError, KeyError, IndexError, OverflowError, TypeError) as error:
        raise CheckpointError(
            f"{file} is not a GGUF file or is truncated ({error}). Download it again."
        ) from error


class _Metadata:
    """The key-value part of a GGUF file."""

    def __init__(self, file: Path, reader: GGUFReader) -> None:
        self.file = file
        self._fields = reader.fields
        self.arch: str = self.require("general.architecture")
        if self.arch not in _CLASSES:
            raise CheckpointError(
                f"{file}: architecture {self.arch!r} is not read from GGUF. Expected one of "
                f"{', '.join(_CLASSES)}; use the model's safetensors instead."
            )

    def get(self, key: str, default: Any = None) -> Any:
        """Value of `key`; `{arch}` in it stands for the architecture."""
        found = self._fields.get(key.replace("{arch}", getattr(self, "arch", "")))
        if found is None:
            return default
        value = found.contents()
        # Metadata is float32: 1e-05 must not become 9.999999747378752e-06.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.file} lacks the metadata {key!r}. Convert it again.")
        return value


def _config(metadata: _Metadata, names: set[str]) -> dict[str, Any]:
    arch = metadata.arch
    hidden, heads = (
        metadata.require(f"{{arch}}.{key}") for key in ("embedding_length", "attention.head_count")
    )
    head_dim = metadata.get("{arch}.attention.key_length")
    if head_dim is None and arch in ("llama", "mistral"):
        head_dim = metadata.get("{arch}.rope.dimension_count")
    window = metadata.get("{arch}.attention.sliding_window")
    config = {
        "architectures": [_CLASSES[arch]],
        "model_type": arch,
        "vocab_size": metadata.get("{arch}.vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": metadata.require("{arch}.feed_forward_length"),
        "num_hidden_layers": metadata.require("{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim or hidden // heads,
        "hidden_act": "silu",
        "rms_norm_eps": metadata.require("{arch}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.require("{arch}.context_length"),
        "rope_parameters": _rope(metadata),
        "tie_word_embeddings": "output.weight" not in names,
        "initializer_range": 0.02,
        "use_cache": True,
    }
    if arch in ("llama", "qwen3"):
        config["attention_bias"] = "blk.0.attn_q.bias" in names
    if arch == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in names
    if window:
        config |= {"sliding_window": window, "use_sliding_window": True}
    elif arch == "mistral":
        config["sliding_window"] = None
    if config["vocab_size"] is None:
        config["vocab_size"] = len(metadata.require("tokenizer.ggml.tokens"))
    return config


def _special_tokens(metadata: _Metadata) -> dict[str, Any]:
    key = "tokenizer.ggml.{}_token_id"
    # A chat model may end its turn with another id than a text.
    ends = [metadata.get(key.format(kind)) for kind in ("eos", "eot")]
    ends = list(dict.fromkeys(i for i in ends if i is not None))
    ids = {
        "bos_token_id": metadata.get(key.format("bos")),
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": metadata.get(key.format("padding")),
    }
    return {name: value for name, value in ids.items() if value is not None}


def _rope(metadata: _Metadata) -> dict[str, Any]:
    rope = {"rope_theta": metadata.get("{arch}.rope.freq_base", 10000.0)}
    kind = metadata.get("{arch}.rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", **rope}
    if kind not in ("linear", "yarn"):
        raise CheckpointError(
            f"{metadata.file}: RoPE scaling {kind!r} is not read from GGUF. Expected none, linear "
            "or yarn; use the model's safetensors instead."
        )
    rope = {"rope_type": kind, **rope, "factor": metadata.require("{arch}.rope.scaling.factor")}
    original = metadata.get("{arch}.rope.scaling.original_context_length")
    if kind == "yarn" and original:
        rope["original_max_position_embeddings"] = original
    return rope


def _llama3_rope(file: Path, config: Mapping[str, Any], factors: np.ndarray) -> dict[str, Any]:
    """Recover Llama 3's RoPE numbers: the file holds only the divisor of each frequency.

    Every published Llama 3 uses the same three other numbers; they are checked, not assumed.
    """
    low, high, original = 1.0, 4.0, 8192
    theta, dim, factor = config["rope_parameters"]["rope_theta"], config["head_dim"], factors.max()
    turns = original / (2 * np.pi * theta ** (np.arange(0, dim, 2) / dim))
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise CheckpointError(
            f"{file}: its RoPE divisors ({_ROPE_FACTORS}) are not those of Llama 3. Use the "
            "model's safetensors instead."
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": float(factor),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


class _GGUFTensors(Mapping[str, Weight]):
    """The tensors of an open GGUF file under transformers' names."""

    def __init__(
        self,
        file: Path,
        reader: GGUFReader,
        config: Mapping[str, Any],
        dtype: torch.dtype,
        keep_blocks: bool,
    ) -> None:
        self._tensors = {
            _hf_name(file, t.name): t for t in reader.tensors if t.name != _ROPE_FACTORS
        }
        _check_complete(file, config, self._tensors)
        self._dtype = dtype
        self._keep_blocks = keep_blocks
        # llama.cpp interleaves the two halves of each rotary head of q and k of this family only.
        permuted = config["model_type"] in ("llama", "mistral")
        self._heads = {
            "q_proj": config["num_attention_heads"] if permuted else 0,
            "k_proj": config["num_key_value_heads"] if permuted else 0,
        }

    def __getitem__(self, name: str) -> Weight:
        tensor = self._tensors[name]
        # name is [...]."q_proj"."weight" for a projection, "model"."norm"."weight" and such else.
        module = name.split(".")[-2]
        data = np.asarray(tensor.data)
        heads = self._heads.get(module, 0)
        if heads:
            data = data[_undo_permutation(data.shape[0], heads)]
        if self._keep_blocks and tensor.tensor_type.name == "Q4_1":
            return _q4_1_blocks(data)
        if self._keep_blocks and tensor.tensor_type.name == "Q8_0":
            return _q8_0_blocks(data)
        from gguf.quants import dequantize

        try:
            values = dequantize(data, tensor.tensor_type)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{name}: quantisation {tensor.tensor_type.name} cannot be read. Use another "
                "quantisation of the model, such as Q4_1, Q8_0 or F16."
            ) from error
        # A copy: the memory map is read-only and goes away with the reader.
        return torch.from_numpy(np.array(values)).to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _hf_name(file: Path, name: str) -> str:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _IN_LAYER:
        raise CheckpointError(
            f"{file}: tensor {name!r} belongs to a variant of the architecture that is not read "
            "from GGUF. Use the model's safetensors instead."
        )
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"


def _check_complete(file: Path, config: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse one part of a split file: what is missing would be noise."""
    optional = {"attn_q_norm", "attn_k_norm"} if config["model_type"] != "qwen3" else set()
    parts = [part for name, part in _IN_LAYER.items() if name not in optional]
    expected = {"model.embed_tokens.weight", "model.norm.weight"} | {
        f"model.layers.{layer}.{part}.weight"
        for layer in range(config["num_hidden_layers"])
        for part in parts
    }
    missing = sorted(expected.difference(names))
    if missing:
        raise CheckpointError(
            f"{file} lacks {len(missing)} tensors, {missing[0]!r} for one. Expected the whole "
            "model: merge a split GGUF first (llama-gguf-split --merge), or download it again."
        )


def _undo_permutation(rows: int, heads: int) -> np.ndarray:
    """Indices that put llama.cpp's q or k rows back into transformers' order."""
    order: np.ndarray = np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    return order


def _q4_1_blocks(data: np.ndarray) -> Int4Blocks:
    """Split Q4_1 bytes [O, I/32 * 20] into parts; byte j of a block holds elements j, j + 16."""
    rows = data.shape[0]
    blocks = data.reshape(rows, -1, _Q4_1_BYTES)  # [O, I/32, 20]
    scales = np.ascontiguousarray(blocks[..., :4]).view(np.float16)  # [O, I/32, 2]
    packed = blocks[..., 4:]
    levels = np.concatenate((packed & 15, packed >> 4), axis=-1)  # [O, I/32, 32]
    quants = levels[..., 0::2] | levels[..., 1::2] << 4
    return Int4Blocks(
        quants=torch.from_numpy(quants.reshape(rows, blocks.shape[1] * INT4_GROUP // 2)),
        d=torch.from_numpy(scales[..., 0].copy()),
        m=torch.from_numpy(scales[..., 1].copy()),
    )


def _q8_0_blocks(data: np.ndarray) -> Int8Blocks:
    """Split Q8_0 bytes [O, I/32 * 34] into parts."""
    rows = data.shape[0]
    blocks = data.reshape(rows, -1, _Q8_0_BYTES)  # [O, I/32, 34]
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)
    quants = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return Int8Blocks(
        quants=torch.from_numpy(quants.reshape(rows, blocks.shape[1] * INT4_GROUP)),
        d=torch.from_numpy(scales[..., 0].copy()),
    )
