"""Write a GGUF model as a Hugging Face folder: config, safetensors, tokenizer.

It writes into an empty folder and does not know the cache. Next: hybrid/models/store.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hybrid.errors import CheckpointError
from hybrid.models.checkpoint import (
    INT4_GROUP,
    INT4_METHOD,
    Checkpoint,
    Int4Blocks,
    Int8Blocks,
    Weight,
)
from hybrid.models.fetch import Progress, first_line
from hybrid.models.gguf import open_gguf, read_gguf

_SHARD_BYTES = 4 << 30


def convert_gguf(
    gguf: Path, folder: Path, precision: str, progress: Progress | None = None
) -> None:
    """Write the model of a GGUF file into `folder`.

    Args:
        gguf: the file.
        folder: an empty folder.
        precision: "int4" keeps Q4_1 and Q8_0 blocks as they are, the rest in bfloat16; "float32"
            and "bfloat16" are dense and load in plain transformers.
        progress: called per tensor.

    Raises:
        CheckpointError: the GGUF or its tokenizer cannot be read.
        OSError: the folder cannot be written.
    """
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    reader = open_gguf(gguf)
    checkpoint = read_gguf(gguf, dtype, keep_blocks=precision == "int4", reader=reader)
    has_blocks = _write_tensors(checkpoint, folder, progress)
    config = {**checkpoint.config, "dtype": str(dtype).removeprefix("torch.")}
    if has_blocks:
        quantization = {"quant_method": INT4_METHOD, "bits": 4, "group_size": INT4_GROUP}
        config["quantization_config"] = quantization
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", checkpoint.generation_config)
    if "tokenizer.ggml.tokens" in reader.fields:
        pre = reader.fields.get("tokenizer.ggml.pre")
        _write_tokenizer(gguf, folder, pre.contents() if pre else None)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_tensors(checkpoint: Checkpoint, folder: Path, progress: Progress | None) -> bool:
    """Write safetensors, sharded so that a large model never lies in memory whole."""
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    num_shards, has_blocks = 0, False

    def flush() -> None:
        nonlocal num_shards
        num_shards += 1
        name = f"model-{num_shards:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    for done, (name, tensor) in enumerate(checkpoint.tensors.items(), start=1):
        has_blocks |= not isinstance(tensor, Tensor)
        shard.update(_on_disk(name, tensor))
        if sum(t.nbytes for t in shard.values()) >= _SHARD_BYTES:
            flush()
        if progress is not None:
            progress("Converting", done, len(checkpoint.tensors))
    if shard:
        flush()
    if num_shards == 1:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
    else:
        index = {"metadata": {}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)
    return has_blocks


def _on_disk(name: str, weight: Weight) -> dict[str, Tensor]:
    if isinstance(weight, Int4Blocks):
        return {f"{name}.q4": weight.quants, f"{name}.d": weight.d, f"{name}.m": weight.m}
    if isinstance(weight, Int8Blocks):
        return {f"{name}.q8": weight.quants, f"{name}.d": weight.d}
    return {name: weight}


def _write_tokenizer(gguf: Path, folder: Path, pre: str | None) -> None:
    """Save the tokenizer that the GGUF carries, chat template included.

    `pre` is llama.cpp's name of the pre-tokenizer.
    """
    from tokenizers.pre_tokenizers import Digits, Sequence
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, local_files_only=True, trust_remote_code=False
        )
        if pre == "smollm":
            # transformers drops this first half of the model's own pre-tokenizer; without it,
            # white space before a digit is cut otherwise than in the training data.
            rest = tokenizer.backend_tokenizer.pre_tokenizer
            digits = Digits(individual_digits=True)
            tokenizer.backend_tokenizer.pre_tokenizer = Sequence([digits, rest])
        tokenizer.save_pretrained(folder)
    # transformers raises many kinds for a tokenizer that it does not understand.
    except Exception as error:
        raise CheckpointError(
            f"{gguf}: its tokenizer cannot be read ({first_line(error)}). Use the model's "
            "Hugging Face folder instead."
        ) from error
