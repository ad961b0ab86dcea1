"""`HybridDecoder`: the facade. It resolves names, checks the request and runs the loop.

Next: hybrid/decode/loop.py.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, cast

from hybrid.assembly import Parts, new_cache
from hybrid.decode.canvases import CanvasModel, decode_canvases
from hybrid.decode.denoise import DenoiseRow, denoise
from hybrid.decode.policies import DenoisePreset
from hybrid.errors import ConfigError
from hybrid.memory import planned_bytes
from hybrid.models.adapter import DiffusionAdapter
from hybrid.models.fetch import Progress
from hybrid.models.loading import DeviceMap, load_model
from hybrid.models.tokenizer import Tokenizer
from hybrid.params import SamplingParams
from hybrid.prompts import is_batch
from hybrid.protocols import Backbone, Drafter, Verifier
from hybrid.request import Request, start_request
from hybrid.router.config import RouterConfig
from hybrid.router.cost import CostModel
from hybrid.strategy import (
    LEFT_TO_RIGHT,
    OF_A_LAW,
    Hybrid,
    Strategy,
    VerifiedPreset,
    fitting,
    refuse,
    resolve,
    with_risk,
)
from hybrid.types import StepRecord, StreamEvent

Steps = Generator[StepRecord, None, None]


class HybridDecoder:
    """A model that can decode token by token, or draft by diffusion and verify what it drafted.

    Each call has its own cache and random streams: calls do not influence each other, and several
    streams may be open at once (in one thread at a time).

    Attributes:
        backbone: the model.
        tokenizer: None when the checkpoint has none; prompts are then token ids.
        model_name: what it was loaded from.
    """

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
        self._parts = Parts(backbone, adapter, drafter, verifier, num_draft_tokens, model_name)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = "default",
        *,
        device: str = "auto",
        device_map: DeviceMap | None = None,
        dtype: str = "auto",
        adapter: str | Path | None = None,
        drafter: str | Path | Drafter | None = None,
        verifier: str | Verifier = "auto",
        num_draft_tokens: int | None = None,
        exact: bool = False,
        compile: bool = False,
        progress: Progress | None = None,
    ) -> HybridDecoder:
        """Load a model, fetching and converting it on first use.

        Args:
            model: "default" (SmolLM2-135M-Instruct), a Hugging Face folder, a GGUF file, a hub id.
            device: "auto", "cpu", "cuda", "cuda:N".
            device_map: the same in transformers' words: "auto", or one device for the whole model.
            dtype: "auto", "float32", "bfloat16", "int4" (a GGUF's own 4 bits, CPU).
            adapter: folder of a diffusion adapter; None takes the shipped one if there is any. For
                LLaDA and Dream it is a D2F adapter in PEFT's format.
            drafter: see the constructor.
            verifier: see the constructor.
            num_draft_tokens: see the constructor.
            exact: make a token's logits bit-identical whatever shares the pass, so that speculative
                decoding writes what "ar" writes at temperature 0, at a cost (docs/exact.md). On a
                CPU 4-bit ones are so anyway.
            compile: on a CPU, compile norms, rotations and gates with torch.compile, which needs a
                C++ compiler. Slower on the CPUs that were measured (docs/log.md): try it on yours.
            progress: called with (what, done, total) while fetching and converting.

        Raises:
            CheckpointError: the model or adapter cannot be fetched, read or matched.
            ConfigError: an unknown name or value.
        """
        loaded = load_model(
            model,
            device=device,
            device_map=device_map,
            dtype=dtype,
            adapter=adapter,
            exact=exact,
            compile=compile,
            progress=progress,
        )
        return cls(
            cast(Backbone, loaded.backbone),  # DiffusionGemma is none, and is not asked for passes
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
        return self._parts.drafter_name

    @property
    def verifier_name(self) -> str:
        """Verifier, or "auto"."""
        return self._parts.verifier_name

    @property
    def strategies(self) -> tuple[str, ...]:
        """Names of the presets that this model can run."""
        return fitting(self.backbone)

    def identity(self) -> tuple[str, str | None]:
        """Return what profiles call the model and its adapter."""
        return self._parts.routing.identity

    def routed(self, strategy: Strategy) -> tuple[RouterConfig, CostModel]:
        """Return what a strategy "hybrid" becomes here: its settings, and costs measured now.

        Raises:
            ConfigError: another strategy, or one that this decoder cannot run.
        """
        return self._parts.routed(strategy.settings)

    def resolve_strategy(
        self, strategy: str | Strategy | None = None, *, allow_unverified: bool = False
    ) -> Strategy:
        """Return what a request with these arguments decodes with; see `generate`.

        Raises:
            ConfigError: unknown, or not for this model; the message lists what is.
        """
        return resolve(strategy, self.backbone, unverified=allow_unverified)

    def generate(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        strategy: str | Strategy | None = None,
        risk: float | None = None,
        record: Path | None = None,
        allow_unverified: bool = False,
        **fields: Any,
    ) -> Any:
        """Generate for one prompt or a list of prompts.

        Args:
            prompt: a string (raw), a list of chat messages, a list of token ids, or a list of
                these (decoded as one batch).
            params: sampling and stopping; the default is greedy, 256 tokens.
            strategy: a name or `Strategy.preset(...)` (`hybrid list presets`); None is what the
                weights are meant for: "speculative", which is lossless, for AR models.
            risk: of strategy "hybrid": share of tokens that may be committed although AR decoding
                would have chosen others.
            record: of strategy "hybrid": file for the run, which `hybrid explain` reads.
            allow_unverified: let a block-causal model verify, which was never trained to.
            **fields: single fields of `SamplingParams`, on top of `params`.

        Returns:
            A `GenerationResult`, or a list of them for a list of prompts.

        Raises:
            ConfigError: a bad prompt, parameter or strategy.
            CapacityError: prompt and answer do not fit the context or the memory.
        """
        several = is_batch(prompt)
        requests, events = self._start(
            list(prompt) if several else [prompt],
            params,
            with_risk(strategy, risk),
            fields,
            record,
            text=False,
            allow_unverified=allow_unverified,
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
        strategy: str | Strategy | None = None,
        risk: float | None = None,
        record: Path | None = None,
        allow_unverified: bool = False,
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
        _, events = self._start(
            [prompt],
            params,
            with_risk(strategy, risk),
            fields,
            record,
            text=True,
            allow_unverified=allow_unverified,
        )
        return events

    def plan_memory(self, max_seq_len: int | None = None, batch: int = 1) -> dict[str, int]:
        """Return the bytes that decoding will hold, by part and in total.

        Args:
            max_seq_len: prompt and answer together; None is the whole context.
            batch: rows.

        Raises:
            ConfigError: numbers below 1, or a model that decodes by its own code.
        """
        if not hasattr(self.backbone, "new_cache"):
            raise ConfigError(f"plan_memory: {self.model_name} allocates as transformers does.")
        max_seq_len = self.backbone.max_seq_len if max_seq_len is None else max_seq_len
        if max_seq_len < 1 or batch < 1:
            raise ConfigError(
                f"plan_memory: got max_seq_len {max_seq_len} and batch {batch}, "
                "expected at least 1."
            )
        default = self.resolve_strategy()
        width = 1 + self._parts.drafter().max_draft_tokens
        if isinstance(default.settings, DenoisePreset):
            width = max_seq_len  # every slot may be masked, and have a row of logits
        return planned_bytes(self.backbone, self.adapter, batch, max_seq_len, width)

    def _start(
        self,
        prompts: Sequence[Any],
        params: SamplingParams | None,
        strategy: str | Strategy | None,
        fields: dict[str, Any],
        record: Path | None,
        *,
        text: bool,
        allow_unverified: bool,
    ) -> tuple[list[Request], Generator[StreamEvent, None, None]]:
        """Check everything, allocate everything, and return an iterator that has not begun."""
        if params is not None and not isinstance(params, SamplingParams):
            raise ConfigError(f"params: got {type(params).__name__}, expected SamplingParams.")
        params = SamplingParams(**fields) if params is None else params.replace(**fields)
        chosen = self.resolve_strategy(strategy, allow_unverified=allow_unverified)
        if record is not None and not isinstance(chosen.settings, Hybrid):
            raise ConfigError(f"record: got strategy {chosen.name!r}, expected 'hybrid'.")
        requests = [
            start_request(
                self.backbone,
                self.tokenizer,
                prompt,
                params,
                index=index if len(prompts) > 1 else None,
                wants_text=text,
            )
            for index, prompt in enumerate(prompts)
        ]
        if not isinstance(chosen.settings, (VerifiedPreset, DenoisePreset)):
            refuse(params, chosen.name, LEFT_TO_RIGHT + OF_A_LAW, "the preset has its own")
            rows = [(request.state, request.rule) for request in requests]
            steps = decode_canvases(cast(CanvasModel, self.backbone), rows, chosen.settings)
        elif isinstance(chosen.settings, DenoisePreset):
            steps = self._denoise(requests, chosen, params, view=text)
        else:
            steps = self._verify(requests, chosen, params, record)
        return requests, _events(steps, requests)

    def _verify(
        self,
        requests: Sequence[Request],
        chosen: Strategy,
        params: SamplingParams,
        record: Path | None,
    ) -> Steps:
        """Return the steps of drafts that the target verifies."""
        rows = [request.state for request in requests]
        rules = [request.rule for request in requests]
        engine = self._parts.engine(chosen, params, rows, rules)
        return self._parts.routing.run(engine, rows, chosen.name, record)

    def _denoise(
        self,
        requests: Sequence[Request],
        chosen: Strategy,
        params: SamplingParams,
        *,
        view: bool,
    ) -> Steps:
        """Return the steps of a denoising preset."""
        assert isinstance(chosen.settings, DenoisePreset)
        refuse(params, chosen.name, LEFT_TO_RIGHT, "defined for tokens from left to right")
        try:
            rows = [
                DenoiseRow.start(self.backbone, chosen.settings, request.state, request.rule)
                for request in requests
            ]
        except ConfigError as error:
            raise ConfigError(f"strategy {chosen.name!r}: {error}") from error
        batch = rows[0].denoiser.copies * len(rows)
        cache = new_cache(self.backbone, batch, max(len(row.canvas) for row in rows))
        return denoise(self.backbone, cache, rows, view=view)


def _events(steps: Steps, requests: Sequence[Request]) -> Generator[StreamEvent, None, None]:
    for request in requests:
        request.meter.restart()  # the reader may have waited before it asked for the first event
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
