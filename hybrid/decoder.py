"""`HybridDecoder`: the facade. It resolves names, checks the request and runs the loop.

Next: hybrid/decode/loop.py.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import torch

from hybrid import registry
from hybrid.decode.loop import run
from hybrid.decode.step import Engine
from hybrid.decode.stopping import StopRule
from hybrid.errors import CapacityError, ConfigError, did_you_mean
from hybrid.memory import require_memory
from hybrid.metrics import RowMeter
from hybrid.models.adapter import DiffusionAdapter
from hybrid.models.fetch import Progress
from hybrid.models.loading import load_model
from hybrid.models.tokenizer import Tokenizer
from hybrid.params import SamplingParams
from hybrid.prompts import is_batch, to_token_ids
from hybrid.protocols import Backbone, Drafter, Router, Verifier
from hybrid.request import Request
from hybrid.router.adaptive import AdaptiveRouter
from hybrid.router.fixed import FixedRouter
from hybrid.types import SequenceState, StreamEvent

STRATEGIES = ("ar", "speculative", "ngram", "auto")


class HybridDecoder:
    """A model that can decode token by token, or draft by diffusion and verify what it drafted.

    Each call has its own cache and random streams: calls do not influence each other, and several
    streams may be open at once (in one thread at a time).

    Attributes:
        backbone: the model.
        tokenizer: None when the checkpoint has none; prompts are then token ids.
        model_name: what it was loaded from.
    """

    strategies = STRATEGIES

    def __init__(
        self,
        backbone: Backbone,
        tokenizer: Tokenizer | None = None,
        *,
        adapter: DiffusionAdapter | None = None,
        drafter: str | Path | Drafter | None = None,
        verifier: str | Verifier = "auto",
        num_draft_tokens: int | None = None,
        model_name: str = "model",
    ) -> None:
        """Put the parts together; `from_pretrained` is the usual way.

        Args:
            backbone: the target.
            tokenizer: text in, text out.
            adapter: lets the backbone draft for itself.
            drafter: of strategy "speculative": a name, an object, the folder of a DFlash drafter (a
                `Path` or "dflash:FOLDER"), or None for `combined` where there is an adapter and
                n-gram lookup otherwise.
            verifier: a name or an object; "auto" is greedy for temperature 0, else rejection
                sampling. Both are lossless.
            num_draft_tokens: K; None is the drafter's own (`preferred_draft_tokens` where it has
                that, else `max_draft_tokens`).
            model_name: for reports.

        Raises:
            ConfigError: an unknown name, self-diffusion without an adapter, or K < 1.
        """
        self.backbone, self.tokenizer, self.model_name = backbone, tokenizer, model_name
        self.adapter = adapter
        if num_draft_tokens is not None and not _is_count(num_draft_tokens):
            raise ConfigError(
                f"num_draft_tokens: got {num_draft_tokens!r}, expected an integer of at least 1. "
                "To decode without a draft use strategy='ar'."
            )
        self._num_draft_tokens = num_draft_tokens
        if drafter is None:
            drafter = "combined" if adapter is not None else "ngram"
        if isinstance(drafter, str) and drafter.startswith("dflash:"):
            drafter = Path(drafter.removeprefix("dflash:"))
        if isinstance(drafter, Path):
            load = registry.load("drafter", "dflash").from_pretrained
            self._drafter: str | Drafter = load(backbone, drafter)
        else:
            self._drafter = drafter
        self._verifier = verifier
        # Fails now, not at the first request.
        most = self._make_drafter(self._drafter).max_draft_tokens
        if num_draft_tokens is not None and 0 < most < num_draft_tokens:
            raise ConfigError(
                f"num_draft_tokens: got {num_draft_tokens}, expected at most {most}, "
                f"which is what drafter {self.drafter_name!r} can propose."
            )
        if isinstance(verifier, str):
            if verifier != "auto":
                registry.load("verifier", verifier)
        elif not isinstance(verifier, Verifier):
            raise ConfigError(
                f"verifier: got {type(verifier).__name__}, expected a name or a Verifier "
                "(hybrid/protocols.py)."
            )

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = "default",
        *,
        device: str = "auto",
        dtype: str = "auto",
        adapter: str | Path | None = None,
        drafter: str | Path | Drafter | None = None,
        verifier: str | Verifier = "auto",
        num_draft_tokens: int | None = None,
        exact: bool = False,
        progress: Progress | None = None,
    ) -> HybridDecoder:
        """Load a model, fetching and converting it on first use.

        Args:
            model: "default" (SmolLM2-135M-Instruct), a Hugging Face folder, a GGUF file, a hub id.
            device: "auto", "cpu", "cuda", "cuda:N".
            dtype: "auto", "float32", "bfloat16", "int4" (a GGUF's own 4 bits, CPU).
            adapter: folder of a diffusion adapter; None takes the shipped one if there is any.
            drafter: see the constructor.
            verifier: see the constructor.
            num_draft_tokens: see the constructor.
            exact: on a CPU, make float32 logits bit-identical whatever shares the pass, as 4-bit
                and bfloat16 ones are anyway; AR decoding in float32 gets slower.
            progress: called with (what, done, total) while fetching and converting.

        Raises:
            CheckpointError: the model or adapter cannot be fetched, read or matched.
            ConfigError: an unknown name or value.
        """
        loaded = load_model(
            model, device=device, dtype=dtype, adapter=adapter, exact=exact, progress=progress
        )
        return cls(
            loaded.backbone,
            loaded.tokenizer,
            adapter=loaded.adapter,
            drafter=drafter,
            verifier=verifier,
            num_draft_tokens=num_draft_tokens,
            model_name=loaded.name,
        )

    @property
    def drafter_name(self) -> str:
        """Drafter of strategy "speculative"."""
        return self._drafter if isinstance(self._drafter, str) else self._drafter.name

    @property
    def verifier_name(self) -> str:
        """Verifier, or "auto"."""
        return self._verifier if isinstance(self._verifier, str) else self._verifier.name

    def generate(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        strategy: str = "speculative",
        **fields: Any,
    ) -> Any:
        """Generate for one prompt or a list of prompts.

        Args:
            prompt: a string (raw), a list of chat messages, a list of token ids, or a list of
                these (decoded as one batch).
            params: sampling and stopping; the default is greedy, 256 tokens.
            strategy: "speculative" (lossless default), "ar", "ngram", "auto" (lossless; drafts
                only while that is the faster way here).
            **fields: single fields of `SamplingParams`, on top of `params`.

        Returns:
            A `GenerationResult`, or a list of them for a list of prompts.

        Raises:
            ConfigError: a bad prompt, parameter or strategy.
            CapacityError: prompt and answer do not fit the context or the memory.
        """
        several = is_batch(prompt)
        requests, events = self._start(
            list(prompt) if several else [prompt], params, strategy, fields, text=False
        )
        for _ in events:
            pass
        results = [request.result() for request in requests]
        return results if several else results[0]

    def stream(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        strategy: str = "speculative",
        **fields: Any,
    ) -> Generator[StreamEvent, None, None]:
        """Generate for one prompt and hand out each step. Closing the iterator cancels.

        The events' texts add up to the result's text; the last event carries the result.

        Raises:
            ConfigError: as `generate`, at once; also for a list of prompts.
            CapacityError: as `generate`, at once.
        """
        if is_batch(prompt):
            raise ConfigError("stream: got a list of prompts, expected one. Use generate().")
        _, events = self._start([prompt], params, strategy, fields, text=True)
        return events

    def plan_memory(self, max_seq_len: int | None = None, batch: int = 1) -> dict[str, int]:
        """Return the bytes that decoding will hold, by part and in total.

        Args:
            max_seq_len: prompt and answer together; None is the whole context.
            batch: rows.

        Raises:
            ConfigError: numbers below 1.
        """
        max_seq_len = self.backbone.max_seq_len if max_seq_len is None else max_seq_len
        if max_seq_len < 1 or batch < 1:
            raise ConfigError(
                f"plan_memory: got max_seq_len {max_seq_len} and batch {batch}, "
                "expected at least 1."
            )
        width = 1 + self._make_drafter(self._drafter).max_draft_tokens
        chunk = min(self.backbone.prefill_chunk, max_seq_len)
        itemsize = self.backbone.dtype.itemsize
        heads = getattr(getattr(self.backbone, "spec", None), "num_heads", 1)
        # The largest of what a pass holds besides weights and cache: logits in float32 for the
        # transforms, or a prefill chunk's mask and activations.
        logits = batch * width * self.backbone.vocab_size * (itemsize + 4)
        prefill = chunk * (heads * max_seq_len + 8 * self.backbone.hidden_size) * itemsize
        parts = {
            "weights": self.backbone.weight_nbytes,
            "adapter": self.adapter.nbytes if self.adapter is not None else 0,
            "kv_cache": self.backbone.cache_nbytes(batch, max_seq_len + width),
            "workspace": max(logits, prefill),
        }
        return {**parts, "total": sum(parts.values())}

    def _start(
        self,
        prompts: Sequence[Any],
        params: SamplingParams | None,
        strategy: str,
        fields: dict[str, Any],
        *,
        text: bool,
    ) -> tuple[list[Request], Generator[StreamEvent, None, None]]:
        """Check everything, allocate everything, and return an iterator that has not begun."""
        if params is not None and not isinstance(params, SamplingParams):
            raise ConfigError(f"params: got {type(params).__name__}, expected SamplingParams.")
        params = SamplingParams(**fields) if params is None else params.replace(**fields)
        drafter, router = self._parts(strategy)
        requests = [
            self._request(index, prompt, params, text=text, several=len(prompts) > 1)
            for index, prompt in enumerate(prompts)
        ]
        longest = max(len(request.state.tokens) for request in requests)
        capacity = longest + params.max_new_tokens + 1 + drafter.max_draft_tokens
        require_memory(
            self.backbone.cache_nbytes(len(requests), capacity),
            self.backbone.device,
            f"The KV cache for {len(requests)} x {capacity} tokens",
        )
        engine = Engine(
            self.backbone,
            self.backbone.new_cache(len(requests), capacity),
            drafter,
            self._make_verifier(params),
            router,
            rules={request.state.row: request.rule for request in requests},
        )
        return requests, _events(engine, requests)

    def _request(
        self, index: int, prompt: Any, params: SamplingParams, *, text: bool, several: bool
    ) -> Request:
        where = f"prompt {index}" if several else "prompt"
        ids = to_token_ids(prompt, self.tokenizer, self.backbone.vocab_size, where)
        limit = self.backbone.max_seq_len
        room = limit - len(ids)
        if params.max_new_tokens > room:
            fewer = f" or set max_new_tokens to at most {room}" if room > 0 else ""
            raise CapacityError(
                f"{where}: got {len(ids)} tokens and max_new_tokens {params.max_new_tokens}, "
                f"expected at most {limit} together (the model's context). Shorten the prompt"
                f"{fewer}."
            )
        bad = next((t for t in params.stop_token_ids if t >= self.backbone.vocab_size), None)
        if bad is not None:
            raise ConfigError(
                f"stop_token_ids: got {bad}, expected ids below {self.backbone.vocab_size}."
            )
        if params.stop and self.tokenizer is None:
            raise ConfigError("stop: this model has no tokenizer; use stop_token_ids.")
        decode = self.tokenizer.decode if self.tokenizer is not None else None
        seed = secrets.randbits(63) if params.seed is None else params.seed
        generator = torch.Generator().manual_seed(seed)
        state = SequenceState(index, ids, len(ids), params, generator)
        needs_text = decode if text or params.stop else None
        rule = StopRule(params, self.backbone.eos_token_ids, needs_text)
        return Request(state, rule, RowMeter(index, len(ids)), decode)

    def _parts(self, strategy: str) -> tuple[Drafter, Router]:
        if strategy not in STRATEGIES:
            raise ConfigError(
                f"strategy: got {strategy!r}.{did_you_mean(str(strategy), STRATEGIES)}"
            )
        if strategy != "ar" and not getattr(self.backbone, "supports_rollback", True):
            warnings.warn(
                f"{self.model_name} keeps a state that cannot be rolled back: "
                f"strategy {strategy!r} decodes token by token.",
                RuntimeWarning,
                stacklevel=4,
            )
            strategy = "ar"
        if strategy == "ar":
            return self._make_drafter("none"), FixedRouter(0)
        drafter = self._make_drafter("ngram" if strategy == "ngram" else self._drafter)
        preferred: int = getattr(drafter, "preferred_draft_tokens", drafter.max_draft_tokens)
        count = self._num_draft_tokens or preferred
        return drafter, AdaptiveRouter(count) if strategy == "auto" else FixedRouter(count)

    def _make_drafter(self, drafter: str | Drafter) -> Drafter:
        if not isinstance(drafter, str):
            if not isinstance(drafter, Drafter):
                raise ConfigError(
                    f"drafter: got {type(drafter).__name__}, expected a name or a Drafter "
                    "(hybrid/protocols.py)."
                )
            return drafter
        make = registry.load("drafter", drafter)
        if drafter == "ngram" and self._num_draft_tokens is not None:
            return make(max_draft_tokens=self._num_draft_tokens)
        if drafter in {"self-diffusion", "combined"}:
            if self.adapter is None:
                raise ConfigError(
                    f"drafter {drafter!r}: {self.model_name} has no diffusion adapter. Give "
                    "adapter=FOLDER (see `hybrid train self-diffusion`) or use drafter='ngram'."
                )
            # Who asks for K tokens gets K; the adapter's own K may end earlier.
            return make(self.backbone, self.adapter, stops_early=self._num_draft_tokens is None)
        if drafter == "dflash":
            raise ConfigError(
                "drafter 'dflash': expected its folder, drafter='dflash:FOLDER' (see `hybrid train "
                "dflash`)."
            )
        return make()

    def _make_verifier(self, params: SamplingParams) -> Verifier:
        if not isinstance(self._verifier, str):
            return self._verifier
        name = self._verifier
        if name == "greedy" and not params.is_greedy:
            raise ConfigError(
                f"verifier 'greedy': got temperature {params.temperature}, expected 0. "
                "Use verifier='rejection' or 'block' to sample, or leave it at 'auto'."
            )
        if name == "auto":
            name = "greedy" if params.is_greedy else "rejection"
        return registry.load("verifier", name)()


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _events(engine: Engine, requests: Sequence[Request]) -> Generator[StreamEvent, None, None]:
    for request in requests:
        request.meter.restart()  # the reader may have waited before it asked for the first event
    steps = run(engine, [request.state for request in requests])
    try:
        for record in steps:
            # A stream has one request; a batch's events are not handed out.
            event = None
            for request in requests:
                event = request.add(record) or event
            if event is not None:
                yield event
    finally:
        steps.close()
