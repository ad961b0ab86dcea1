"""What `hybrid bench` compares: strategies of a decoder, transformers, llama.cpp, behind one face.

Next: hybrid/bench/runner.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from importlib import metadata
from typing import Protocol

import torch
from torch import Tensor

from hybrid import __version__
from hybrid.attention.pattern import causal
from hybrid.decoder import HybridDecoder
from hybrid.models.linear import PackedLinear
from hybrid.models.reference import TransformersReference
from hybrid.params import SamplingParams
from hybrid.protocols import Backbone
from hybrid.strategy import Strategy, VerifiedPreset
from hybrid.types import Stats, StepRecord, Write

SEED = 0  # Greedy decoding draws nothing; the report names it all the same.


@dataclass(frozen=True, slots=True)
class Answer:
    """What a candidate generated; records and stats only from our own engine."""

    tokens: tuple[int, ...]
    records: tuple[StepRecord, ...] = ()
    stats: Stats | None = None


class Candidate(Protocol):
    """One row of the benchmark: it continues token ids greedily.

    Attributes:
        name: unique, for people.
        engine: "hybrid", "transformers" or "llama.cpp".
        version: of the engine.
        dtype: precision of the weights.
    """

    name: str
    engine: str
    version: str
    dtype: str

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        """Return the greedy continuation."""
        ...


class Reference(Candidate, Protocol):
    """A candidate that others' tokens can be compared with."""

    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """Return the logits [V] of the token after `ids`."""
        ...


class DecoderCandidate:
    """One strategy of a decoder.

    Attributes:
        strategy: its name.
        parameters: those of its parameters that were given.
        drafter: what proposes under this strategy; None for one that denoises.
        verifier: what accepts; likewise.
    """

    engine, version = "hybrid", __version__

    def __init__(self, decoder: HybridDecoder, strategy: str | Strategy | None = None) -> None:
        """Wrap a decoder; it may be shared.

        Args:
            decoder: the model and its parts.
            strategy: what is measured, see `HybridDecoder.generate`.

        Raises:
            ConfigError: the decoder has no such strategy.
        """
        self.decoder = copy(decoder)
        # Without a tokenizer a stream makes no text, so reading its records costs no time.
        self.decoder.tokenizer = None
        self._chosen = decoder.resolve_strategy(strategy)
        self.strategy, settings = self._chosen.name, self._chosen.settings
        self.parameters = settings.model_dump(mode="json", exclude_unset=True)
        self.dtype = precision(decoder.backbone)
        self.name = f"{self.dtype} {self.strategy}"
        self.drafter: str | None = None
        self.verifier: str | None = None
        if isinstance(settings, VerifiedPreset):
            self.drafter = settings.drafter or decoder.drafter_name
            self.verifier = "greedy" if decoder.verifier_name == "auto" else decoder.verifier_name

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        """Return the greedy continuation and what each step did."""
        params = SamplingParams(max_new_tokens=max_new_tokens, seed=SEED)
        events = list(self.decoder.stream(list(prompt), params, strategy=self._chosen))
        result = events[-1].result
        assert result is not None
        records = tuple(event.record for event in events)
        return Answer(result.token_ids, records, result.stats)

    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """Return the logits [V] of the token after `ids`, from one causal pass."""
        backbone, count = self.decoder.backbone, len(ids)
        out = backbone.forward(
            torch.tensor([list(ids)], device=backbone.device),
            torch.arange(count, device=backbone.device)[None],
            causal([0], count),
            backbone.new_cache(1, count),
            [0],
            write=Write.COMMIT,
            num_logits=1,
        )
        assert out.logits is not None
        return out.logits[0, -1]


class TransformersCandidate:
    """transformers' `generate` in float32."""

    engine, version = "transformers", metadata.version("transformers")
    dtype, name = "float32", "transformers float32"

    def __init__(self, reference: TransformersReference) -> None:
        """Wrap a loaded model."""
        self._reference = reference

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        """Return the greedy continuation."""
        return Answer(self._reference.generate(prompt, max_new_tokens))

    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """Return the logits [V] of the token after `ids`."""
        return self._reference.next_logits(ids)


def precision(backbone: Backbone) -> str:
    """Return "int4" where any layer holds packed blocks, else the dtype; "exact" where bits are."""
    linears = [
        linear
        for layer in getattr(backbone, "layers", ())
        for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)
    ]
    name = str(backbone.dtype).removeprefix("torch.")
    if any(isinstance(linear, PackedLinear) for linear in linears):
        name = "int4"
    return f"{name} exact" if getattr(backbone, "exact", False) else name
