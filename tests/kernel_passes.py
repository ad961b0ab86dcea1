"""Passes of every kind on tiny models, for the kernels and for records of them.

They run where kernels do: on a GPU, or in Triton's interpreter, which takes a tenth of a second for
a token. So models and passes are as small as they can be.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from diffusion_checkpoints import tiny_diffusion
from fakes import random_adapter
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid.attention.pattern import bidirectional, block_causal, causal, padded, tree
from hybrid.cache.kv_cache import KVCache
from hybrid.drafters.self_diffusion import SelfDiffusionDrafter
from hybrid.kernels import dispatch
from hybrid.models.checkpoint import open_checkpoint
from hybrid.models.families import spec_from_config
from hybrid.models.family_table import FAMILIES
from hybrid.models.graphs import LIMIT, CudaRecorder, Graphs
from hybrid.models.name_maps import Renamed
from hybrid.models.tiny import tiny_checkpoint
from hybrid.models.transformer import NativeBackbone
from hybrid.params import SamplingParams
from hybrid.protocols import DraftState, Entry, ForwardOutput
from hybrid.streams import RandomStream
from hybrid.types import SequenceState, Write

DEVICE = dispatch.default_device()
VOCAB, MASK, WINDOW = 32, 31, 4
SMALL: dict[str, Any] = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-yarn": ("llama", {"rope": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-dynamic": (
        "llama",
        {
            "rope": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            "max_position_embeddings": 8,
        },
    ),
    "qwen2-biases-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3-norms": ("qwen3", {"head_dim": 24}),
    "mistral-window": ("mistral", {"sliding_window": WINDOW}),
    "nemotron-query-scale": ("nemotron", {}),
    "llada2-partial-rotary-moe": ("llada2", {}),
}
LENGTHS = (9, 5)  # cached tokens of each row: more than the window


@cache
def model(
    name: str, dtype: torch.dtype = torch.float32, device: torch.device = DEVICE, **fields: Any
) -> NativeBackbone:
    """Return a random model of `MODELS`, where kernels run."""
    family, own = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        if family in {"nemotron", "llada2"}:
            checkpoint = open_checkpoint(tiny_diffusion(Path(folder), family))
        else:
            own = {**SMALL, "vocab_size": VOCAB, "tokenizer": False, **own, **fields}
            checkpoint = open_checkpoint(tiny_checkpoint(folder, family, **own))
        spec = spec_from_config(checkpoint.config)
        weights = Renamed(checkpoint.tensors, FAMILIES[spec.family].names)
        # What cuBLAS makes of a row depends on the rows beside it.
        exact = device.type == "cuda" and dtype != torch.float64
        made = NativeBackbone(spec, weights, dtype=dtype, device=device, exact=exact)
        made.graphs = None  # `recording` alone records
        return made


def filled_cache(backbone: NativeBackbone, lengths: tuple[int, ...] = LENGTHS) -> KVCache:
    """Return a cache of random K/V, NaN where nothing is committed."""
    made = backbone.new_cache(len(lengths), max(lengths) + 24)
    draw = torch.Generator().manual_seed(sum(lengths))
    made.data.copy_(torch.randn(made.data.shape, generator=draw))
    for row, length in enumerate(lengths):
        made.data[:, :, row, :, length:] = float("nan")
        made.commit(row, length)
    return made


Arguments = dict[str, Any]


def _tokens(backbone: NativeBackbone, batch: int, width: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, backbone.vocab_size - 1, (batch, width), generator=draw)


def _ordinary(backbone: NativeBackbone, pattern: Any, starts: list[int], seed: int) -> Arguments:
    width = pattern.num_tokens
    positions = torch.tensor(starts)[:, None] + torch.arange(width)
    tokens = _tokens(backbone, len(starts), width, seed)
    return {"input_ids": tokens, "position_ids": positions, "pattern": pattern}


def _ragged(backbone: NativeBackbone, starts: list[int], seed: int) -> Arguments:
    pattern = padded(causal(starts, 3), [3 - b % 2 for b in range(len(starts))])
    return _ordinary(backbone, pattern, starts, seed)


def _refresh(backbone: NativeBackbone, starts: list[int], seed: int) -> Arguments:
    pattern = bidirectional(starts, 2)
    tokens = _tokens(backbone, len(starts), 2, seed)
    positions = torch.tensor([[n - 2, n - 4] for n in starts])
    given = {"input_ids": tokens, "position_ids": positions, "pattern": pattern}
    return {**given, "write": Write.REFRESH}


ADAPTERS: dict[str, dict[str, Any]] = {
    "late": {"feature_layers": (0, 1)},
    "shared-norms": {"feature_layers": (0, 1), "train_norms": False},
    "uniform": {"entry_layer": 0, "corruption": "uniform", "train_norms": False},
}


@cache
def drafter(backbone: NativeBackbone, kind: str = "late") -> SelfDiffusionDrafter:
    return SelfDiffusionDrafter(backbone, random_adapter(backbone, 3, **ADAPTERS[kind]))


def _entering(
    backbone: NativeBackbone, starts: list[int], seed: int, kind: str = "late"
) -> Arguments:
    adapter, draw = drafter(backbone, kind)._adapter, torch.Generator().manual_seed(seed)
    hidden = torch.randn(len(starts), 3, backbone.hidden_size, generator=draw)
    first = adapter.config.entry_layer
    entry = Entry(first, hidden.to(DEVICE, backbone.dtype), adapter.for_pass(3))
    pattern = causal if kind == "uniform" else bidirectional
    return {**_ordinary(backbone, pattern(starts, 3), starts, seed), "entry": entry}


def _carrying(
    backbone: NativeBackbone, starts: list[int], seed: int, adapter: str = "late", width: int = 2
) -> Arguments:
    given = _ordinary(backbone, causal(starts, width), starts, seed)
    draw, params = torch.Generator().manual_seed(seed), SamplingParams()
    rows = [
        SequenceState(b, [1] * (n + 1), 1, params, RandomStream(0)) for b, n in enumerate(starts)
    ]
    hidden = {
        n: torch.randn(len(starts), backbone.hidden_size, generator=draw).to(DEVICE, backbone.dtype)
        for n in (0, 1)
    }
    points = [(0, 1), (1,)] * len(starts)
    state = DraftState(rows, None, hidden)  # type: ignore[arg-type]
    carried = drafter(backbone, adapter).carry(state, given["input_ids"], points[: len(starts)], 1)
    return {**given, "carried": carried}


def _hidden_prefix(backbone: NativeBackbone, starts: list[int], seed: int) -> Arguments:
    return _ordinary(backbone, bidirectional([n - 3 for n in starts], 3), starts, seed)


def _of(make: Callable[[list[int]], Any]) -> Callable[..., Arguments]:
    return lambda backbone, starts, seed: _ordinary(backbone, make(starts), starts, seed)


PASSES: dict[str, Callable[[NativeBackbone, list[int], int], Arguments]] = {
    "ar": _of(lambda starts: causal(starts, 1)),
    "verify": _of(lambda starts: causal(starts, 3)),
    "draft": _of(lambda starts: bidirectional(starts, 3)),
    "block-causal": _of(lambda starts: block_causal(starts, 3, 2)),
    "tree": _of(lambda starts: tree(starts, [-1, 0, 0])),
    "ragged": _ragged,
    "hidden-prefix": _hidden_prefix,
    "refresh": _refresh,
    "late-entry": _entering,
    "random-tokens": partial(_entering, kind="uniform"),
    "carrying": _carrying,
    "wide-carrying": partial(_carrying, width=3),
    "carrying-shared-norms": partial(_carrying, adapter="shared-norms"),
    "carrying-uniform": partial(_carrying, adapter="uniform"),
}


def run(
    backbone: NativeBackbone, made: KVCache, kind: str, rows: Sequence[int], seed: int = 0
) -> dict[str, Tensor]:
    """Run a pass of `PASSES` on some rows: what it returns, and their keys, old and new."""
    given = PASSES[kind](backbone, [made.lengths[row] for row in rows], seed)
    given = {n: v.to(DEVICE) if isinstance(v, Tensor) else v for n, v in given.items()}
    out = backbone.forward(cache=made, rows=rows, taps=(backbone.num_layers - 1,), **given)
    assert out.logits is not None
    found = {"logits": out.logits, **{f"tap {n}": states for n, states in out.hidden.items()}}
    num_new = 0 if kind == "refresh" else out.logits.shape[1]
    if out.carried is not None:
        found["slots"], num_new = out.carried, num_new + out.carried.shape[1]
    for row in rows:  # slots have no keys in the layers before they enter
        own, length = made.data[:, :, row], made.lengths[row]
        found[f"old keys {row}"] = own[..., :length, :].clone()
        found[f"new keys {row}"] = own[-1, :, :, length : length + num_new].clone()
    return found


class _ReadsNothingBack(TorchDispatchMode):
    """Raises where the host would wait for a number of the device."""

    _READS = (
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten.equal.default,
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._READS:
            raise AssertionError(f"{func} reads from the device")
        return func(*args, **(kwargs or {}))


class StandIn:
    """Records a pass as the function that it is, and runs that again for a replay.

    So it is as strict as a CUDA graph: the function sees the tensors that it was recorded with and
    no others, may not read numbers from them, and may not ask the cache.
    """

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0

    def __call__(self, function: Callable[[], ForwardOutput]) -> Callable[[], ForwardOutput]:
        out = self._strictly(function)
        self.num_recorded += 1
        is_first = True

        def replay() -> ForwardOutput:
            nonlocal is_first
            if is_first:  # recorded a moment ago, with these numbers
                is_first = False
                return out
            self.num_replayed += 1
            again = self._strictly(function)
            for ours, new in zip(_flat(out), _flat(again), strict=True):
                ours.copy_(new)
            return out

        return replay

    @staticmethod
    def _strictly(function: Callable[[], ForwardOutput]) -> ForwardOutput:
        def refuse(*args: Any) -> Any:
            raise AssertionError("a recorded pass asks the host")

        with (
            _ReadsNothingBack(),
            mock.patch.object(torch.Tensor, "tolist", refuse),
            mock.patch.object(KVCache, "lengths", property(refuse), create=True),
        ):
            return function()


def _flat(out: ForwardOutput) -> list[Tensor]:
    tensors = [out.logits, *out.hidden.values(), out.carried]
    return [tensor for tensor in tensors if tensor is not None]


def recording(backbone: NativeBackbone, limit: int = LIMIT) -> NativeBackbone:
    """Return the backbone, recording its passes: as CUDA graphs on a GPU, else by `StandIn`."""
    twin = copy.copy(backbone)
    recorder = CudaRecorder(DEVICE) if DEVICE.type == "cuda" else StandIn()
    twin.graphs = Graphs(recorder, limit)
    return twin
