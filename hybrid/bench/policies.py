"""What denoising policies cost beside the forwards themselves, and whether they keep on to memory.

A run of a preset is recorded once: every pass, and what was asked of the cache between two passes.
Then whole runs of the preset and bare replays take turns. A replay gives the same tensors to the
same `backbone.forward`, and no policy is asked. A bare forward gives logits for every token that it
is fed, as a model called by itself does; a lean one only for those that the preset asks for, which
is part of what a preset saves. Next: hybrid/cli/bench_policies.py.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor

from hybrid.attention.pattern import AttentionPattern
from hybrid.bench.candidates import SEED
from hybrid.bench.runner import Clock, rotated
from hybrid.decode.policies import DenoisePreset
from hybrid.decoder import HybridDecoder
from hybrid.errors import ConfigError
from hybrid.models.families import spec_from_config
from hybrid.models.transformer import NativeBackbone
from hybrid.protocols import Backbone, Cache, ForwardOutput
from hybrid.strategy import Strategy
from hybrid.types import StreamEvent

BAR = 1.05
"""A forward with its policies may take so many times as long as a bare one."""
NUM_PROMPT_TOKENS = 32
# LLaDA-8B (arXiv:2502.09992) with an eighth of its width and vocabulary, and 4 of its 32 layers.
_LLADA: dict[str, Any] = {
    "model_type": "llada",
    "vocab_size": 126464 // 8,
    "embedding_size": 126464 // 8,
    "d_model": 4096 // 8,
    "mlp_hidden_size": 12288 // 8,
    "n_heads": 32 // 8,
    "n_kv_heads": 32 // 8,
    "n_layers": 4,
    "max_sequence_length": 4096,
    "mask_token_id": 126336 // 8,
    "rope_theta": 500000.0,
}

_Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def random_llada(**fields: Any) -> NativeBackbone:
    """Return a small random model of LLaDA's proportions, CPU, float32.

    Args:
        **fields: of its config.json, in place of the usual ones.
    """
    spec = spec_from_config({**_LLADA, **fields})
    width, heads = spec.hidden_size, spec.num_heads * spec.head_dim
    generator = torch.Generator().manual_seed(SEED)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    weights = {"model.norm.weight": torch.ones(width)}
    for name in ("model.embed_tokens", "lm_head"):
        weights[f"{name}.weight"] = matrix(spec.vocab_size, width)
    for index in range(spec.num_layers):
        layer = f"model.layers.{index}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{name}.weight"] = torch.ones(width)
        for name in ("q_proj", "k_proj", "v_proj"):
            weights[f"{layer}.self_attn.{name}.weight"] = matrix(heads, width)
        weights[f"{layer}.self_attn.o_proj.weight"] = matrix(width, heads)
        for name in ("gate_proj", "up_proj"):
            weights[f"{layer}.mlp.{name}.weight"] = matrix(spec.intermediate_size, width)
        weights[f"{layer}.mlp.down_proj.weight"] = matrix(width, spec.intermediate_size)
    return NativeBackbone(spec, weights, reorder=True)


def denoising(decoder: HybridDecoder) -> list[str]:
    """Return the names of the denoising presets that the decoder can run as they are."""
    names = []
    for name in decoder.strategies:
        settings = decoder.resolve_strategy(name).settings
        if isinstance(settings, DenoisePreset):
            with suppress(ConfigError):  # one that needs a second model, say
                settings.start(decoder.backbone, NUM_PROMPT_TOKENS, 1)
                names.append(name)
    return names


def measure_policies(
    decoder: HybridDecoder,
    strategies: Sequence[str | Strategy],
    *,
    max_new_tokens: int,
    num_runs: int,
    progress: Callable[[int, int], None] | None = None,
    clock: Clock = time.perf_counter,
) -> list[dict[str, Any]]:
    """Measure presets one after the other; return a row of JSON types for each.

    `ratio` is the median over the runs of time per forward over that of a bare forward,
    `lean_ratio` of a lean one. The bytes
    per forward are what each forward leaves behind, in tensors and in Python objects, in the second
    half of a run. What a pass allocates and frees again is not among them; the tokens of the answer
    are. Below 0 the plan of a pass got smaller, with ever fewer masked slots to name.

    Args:
        decoder: on a CPU: elsewhere a forward returns before it has run.
        strategies: denoising presets.
        max_new_tokens: of the answer to a random prompt; EOS does not end it.
        num_runs: timed runs of each side.
        progress: called with (presets done, presets).
        clock: seconds.

    Raises:
        ConfigError: a preset that this model cannot run.
    """
    decoder = copy(decoder)
    decoder.tokenizer = None  # text would be made of every token
    generator = torch.Generator().manual_seed(SEED)
    size = (NUM_PROMPT_TOKENS,)
    prompt = torch.randint(decoder.backbone.vocab_size, size, generator=generator).tolist()
    rows = []
    for done, strategy in enumerate(strategies, start=1):
        request = {
            "prompt": prompt,
            "strategy": decoder.resolve_strategy(strategy),
            "max_new_tokens": max_new_tokens,
            "ignore_eos": True,
            "seed": SEED,
        }
        rows.append(_measure(decoder, request, num_runs, clock))
        if progress is not None:
            progress(done, len(strategies))
    return rows


def _measure(
    decoder: HybridDecoder, request: dict[str, Any], num_runs: int, clock: Clock
) -> dict[str, Any]:
    recording = Recording(decoder.backbone)
    recorded = copy(decoder)
    recorded.backbone = cast("Backbone", recording)
    num_events = sum(1 for _ in recorded.stream(**request))

    def run_preset() -> float:
        started = clock()
        decoder.generate(**request)
        return clock() - started

    seconds: dict[Callable[[], float], list[float]] = {
        run_preset: [],
        lambda: recording.replay(clock, is_lean=False): [],
        lambda: recording.replay(clock, is_lean=True): [],
    }
    for turn in range(-1, num_runs):  # the first turn warms up
        for run in rotated(list(seconds), turn):
            taken = run()
            if turn >= 0:
                seconds[run].append(taken)
    own, bare, lean = seconds.values()
    ratios, lean_ratios = ([a / b for a, b in zip(own, s, strict=True)] for s in (bare, lean))
    tensors, objects = _growth(decoder.stream(**request), num_events)
    strategy: Strategy = request["strategy"]
    return {
        "strategy": strategy.name,
        "parameters": strategy.settings.model_dump(mode="json", exclude_unset=True),
        "num_forwards": recording.num_forwards,
        "ms_per_forward": 1000 * median(own) / recording.num_forwards,
        "bare_ms_per_forward": 1000 * median(bare) / recording.num_forwards,
        "ratios": [round(ratio, 5) for ratio in ratios],
        "ratio": median(ratios),
        "lean_ratio": median(lean_ratios),
        "tensor_bytes_per_forward": round(tensors, 1),
        "python_bytes_per_forward": round(objects, 1),
    }


class Recording:
    """A backbone that remembers its passes and what was asked of its cache."""

    def __init__(self, backbone: Backbone) -> None:
        """Record what is asked of `backbone` through this object."""
        self._backbone = backbone
        self._calls: list[_Call] = []
        self._size: tuple[int, int] = (1, 1)
        # Shared by all calls, so that what several passes share is one object in a replay too,
        # in the state in which the first of them found it.
        self._copies: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Return what the backbone has."""
        return getattr(self._backbone, name)

    @property
    def num_forwards(self) -> int:
        """How many passes were recorded."""
        return sum(name == "forward" for name, _, _ in self._calls)

    def new_cache(self, batch: int, max_len: int) -> Cache:
        """See `Backbone`."""
        self._size = batch, max_len
        return cast("Cache", _RecordedCache(self._backbone.new_cache(batch, max_len), self._calls))

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor,
        pattern: AttentionPattern,
        cache: Cache,
        rows: Sequence[int],
        **how: Any,
    ) -> ForwardOutput:
        """See `Backbone`."""
        given: dict[str, Any] = {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "pattern": pattern,
            "rows": list(rows),
            **how,
        }
        self._calls.append(("forward", (), deepcopy(given, self._copies)))
        assert isinstance(cache, _RecordedCache)
        return self._backbone.forward(cache=cache.cache, **given)

    def replay(self, clock: Clock, *, is_lean: bool) -> float:
        """Run the recorded passes again, and nothing else; return the seconds.

        Args:
            clock: seconds.
            is_lean: with the logits that were asked for, else with those of all tokens.
        """
        calls, cache = deepcopy(self._calls), self._backbone.new_cache(*self._size)
        started = clock()
        with torch.inference_mode():
            for name, args, how in calls:
                if name == "forward":
                    if not is_lean:
                        how["logits_at"] = None
                    self._backbone.forward(cache=cache, **how)
                else:
                    getattr(cache, name)(*args, **how)
        return clock() - started


class _RecordedCache:
    """A cache that writes down what its methods are asked for."""

    def __init__(self, cache: Cache, calls: list[_Call]) -> None:
        self.cache, self._calls = cache, calls

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.cache, name)
        if not callable(value):
            return value

        def call(*args: Any, **how: Any) -> Any:
            self._calls.append((name, args, how))
            return value(*args, **how)

        return call


def _growth(events: Iterator[StreamEvent], num_events: int) -> tuple[float, float]:
    """Return how many bytes of tensors and of Python objects each event leaves behind.

    That is the growth from the middle to the end of a run. Either is the least over a quarter of
    the run, because passes of different sizes leave plans of different sizes for a moment.
    """
    middle, end, width = num_events // 2, num_events - 1, max(num_events // 4, 1)
    if middle >= end:
        return 0.0, 0.0  # a run of two events has no second half
    found: dict[int, list[tuple[int, int]]] = {middle: [], end: []}
    num_seen = 0
    gc.collect()
    gc.freeze()  # what is there already is not counted, and not searched
    tracemalloc.start()
    try:
        for event in events:
            del event  # what a reader need not keep is not held
            num_seen += 1
            for place in found:
                if place - width < num_seen <= place:
                    gc.collect()
                    found[place].append((_tensor_bytes(), tracemalloc.get_traced_memory()[0]))
    finally:
        tracemalloc.stop()
        gc.unfreeze()
    before, after = (map(min, zip(*own, strict=True)) for own in found.values())
    tensors, objects = (b - a for a, b in zip(before, after, strict=True))
    return tensors / (end - middle), objects / (end - middle)


def _tensor_bytes() -> int:
    """Return the bytes of all tensors that Python can reach, a storage once."""
    storages = {}
    for thing in gc.get_objects():
        # A matrix in the order of the CPU library's kernels is opaque, and a weight.
        if issubclass(type(thing), Tensor) and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
