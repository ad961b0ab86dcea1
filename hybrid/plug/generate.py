"""`attach`: `model.generate` of any causal model of transformers decodes with our drafters.

Transformers prepares a call as ever: inputs, config, logits processors, stopping criteria. Then,
where it would run its own loop, it runs ours (`custom_generate`). What ours does not do, beams for
one, its own does. Next: hybrid/plug/decoding.py.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedModel, StoppingCriteriaList, StopStringCriteria

from hybrid.assembly import Parts
from hybrid.drafters.dflash import DFlashDrafter
from hybrid.errors import ConfigError
from hybrid.models.adapter import load_adapter
from hybrid.models.compat import CACHE_NAMES
from hybrid.models.dflash import DFlashModel
from hybrid.models.transformer import NativeBackbone
from hybrid.params import SamplingParams
from hybrid.plug.assistant import DFlashAssistant
from hybrid.plug.decoding import decode, why_stock
from hybrid.plug.target import backbone_of, state_of
from hybrid.protocols import Drafter
from hybrid.strategy import Hybrid, Strategy, VerifiedPreset, resolve
from hybrid.types import Stats

DrafterLike = str | Path | Drafter | DFlashAssistant | DFlashModel
# With these a call is another algorithm, or has a state that is not ours.
_STOCK_ARGUMENTS = (
    "custom_generate",
    "assistant_model",
    "synced_gpus",
    "token_healing",
    *CACHE_NAMES,
)
_COPIED = {"model", "before", "_given"}  # with a model
_NOT_PASSED_ON = ("self", "kwargs", "streamer", "custom_generate")


class PlugWarning(UserWarning):
    """A call asks for what our loop does not do; transformers' own loop runs it."""


class _UnservedError(Exception):
    """A call turns out to be one for transformers' own loop."""


class Plug:
    """What `attach` puts in the place of a model's `generate`.

    Attributes:
        model: whose tensors it computes with.
        stats: the numbers of the last call that our loop ran, one entry per row.
        why_not_native: why the model's own code runs the passes; None where the native backbone
            does, over the model's tensors.
        before: the `generate` that the instance had of its own, by its name; empty without any.
    """

    before: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: DrafterLike | None,
        strategy: str | Strategy | None,
        adapter: str | Path | None,
        num_draft_tokens: int | None,
    ) -> None:
        """Check everything now, not at the first call; see `attach`."""
        is_model = isinstance(model, PreTrainedModel) and model.can_generate()
        if not is_model or model.config.is_encoder_decoder:
            raise ConfigError(
                f"attach: got {type(model).__name__}, expected a causal language model of "
                "transformers. Of a PEFT model give get_base_model()."
            )
        self.model = model
        self.stats: tuple[Stats, ...] = ()
        self._given = drafter, strategy, adapter, num_draft_tokens
        self._build()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle of the model takes along; its first call builds the rest.

        The copy has tensors of its own, and a drafter's caches know rows that only exist here.
        """
        return {name: vars(self)[name] for name in _COPIED & vars(self).keys()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what `__getstate__` gave."""
        vars(self).update(state, stats=(), why_not_native=None, _state=None)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Do what the model's own `generate` does; its arguments, its result.

        Warns:
            PlugWarning: our loop does not do this; transformers' own runs.
        """
        stock = type(self.model).generate
        bound = inspect.signature(stock).bind(self.model, *args, **kwargs).arguments
        given = {**bound, **bound.get("kwargs", {})}
        # Not by truth: a cache that is empty is false, and meant to be filled.
        unserved = [n for n in _STOCK_ARGUMENTS if given.get(n) not in (None, False)]
        try:
            if unserved:
                raise _UnservedError(f"the argument {unserved[0]}")
            return self._generate(stock, given)
        except _UnservedError as reason:
            warnings.warn(
                f"{reason}: hybrid does not decode this, transformers' own generate does. "
                "See docs/transformers.md.",
                PlugWarning,
                stacklevel=2,
            )
        return stock(self.model, *args, **kwargs)

    def _generate(self, stock: Any, given: dict[str, Any]) -> Any:
        """Run our loop, and end the streamer whatever happens.

        Raises:
            _UnservedError: it does not do this; the streamer has been given nothing.
        """
        own = {name: value for name, value in given.items() if name not in _NOT_PASSED_ON}
        streamer = given.get("streamer")
        self._take_stop_strings(own)
        try:
            # Transformers drops a streamer beside a function, so it travels with the function.
            out = stock(
                self.model, custom_generate=partial(self._decode, token_streamer=streamer), **own
            )
        except _UnservedError:
            raise
        except BaseException:
            if streamer is not None:
                streamer.end()  # somebody may be waiting for it in another thread
            raise
        if streamer is not None:
            streamer.end()
        return out

    def _decode(
        self,
        model: PreTrainedModel,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        token_streamer: Any = None,
        **arguments: Any,
    ) -> Any:
        """Be called by transformers in the place of its own loop."""
        if state_of(self.model) != self._state:
            self._build()
        reason = why_stock(
            len(input_ids),
            logits_processor,
            stopping_criteria,
            generation_config,
            arguments,
            self._backbone.max_seq_len,
        )
        if reason is not None:
            raise _UnservedError(reason)
        out, self.stats = decode(
            self._parts,
            self._strategy,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            arguments.get("attention_mask"),
            token_streamer,
        )
        return out

    def _build(self) -> None:
        """Build backbone, adapter and drafter for the tensors that the model has now."""
        drafter, strategy, folder, num_draft_tokens = self._given
        model, name = self.model, self.model.name_or_path or type(self.model).__name__
        state = state_of(model)
        self._backbone, self.why_not_native = backbone_of(model)
        adapter = None
        if folder is not None:
            if not isinstance(self._backbone, NativeBackbone):
                raise ConfigError(
                    f"adapter: self-diffusion needs the native backbone ({self.why_not_native}). "
                    "Leave the adapter out, or draft with drafter='ngram' or a DFlash drafter."
                )
            adapter = load_adapter(self._backbone, folder)
        if isinstance(drafter, DFlashAssistant):
            drafter = drafter.network
        if isinstance(drafter, DFlashModel):
            drafter = DFlashDrafter(self._backbone, drafter)
        self._strategy = resolve(strategy, self._backbone, unverified=False)
        settings = self._strategy.settings
        is_lossy = isinstance(settings, Hybrid) and settings.risk > 0
        if is_lossy or not isinstance(settings, VerifiedPreset):
            raise ConfigError(
                f"strategy {self._strategy.name!r}: expected one whose tokens are the model's own "
                "('speculative', 'ngram', 'dflash', 'ar', 'hybrid' at risk 0). Use HybridDecoder."
            )
        self._parts = Parts(self._backbone, adapter, drafter, "auto", num_draft_tokens, name)
        if not isinstance(settings, Hybrid):  # whose parts measure what passes cost
            self._parts.of_preset(self._strategy.name, settings, SamplingParams(), 1)
        self._state = state  # last: a build that fails is tried again, and fails again

    def _take_stop_strings(self, own: dict[str, Any]) -> None:
        """Turn `stop_strings` into the criterion that transformers makes of them.

        Beside a function it drops the tokenizer too, and then refuses the strings.

        Raises:
            _UnservedError: they are in a generation config, from which they cannot be taken.
        """
        tokenizer, strings = own.pop("tokenizer", None), own.get("stop_strings")
        config = own.get("generation_config")
        if any(getattr(c, "stop_strings", None) for c in (config, self.model.generation_config)):
            raise _UnservedError("stop_strings of a generation config")
        if strings is not None and tokenizer is not None:
            del own["stop_strings"]
            criteria = StopStringCriteria(tokenizer=tokenizer, stop_strings=strings)
            own["stopping_criteria"] = StoppingCriteriaList(
                [*(own.get("stopping_criteria") or ()), criteria]
            )


def attach(
    model: PreTrainedModel,
    *,
    drafter: DrafterLike | None = None,
    strategy: str | Strategy | None = None,
    adapter: str | Path | None = None,
    num_draft_tokens: int | None = None,
) -> Plug:
    """Let `model.generate` draft and verify; its tokens stay the model's own.

    The model keeps its tensors: nothing is copied. A plug that is there already is replaced.

    Args:
        model: a causal language model of transformers.
        drafter: a name ("ngram"), a DFlash drafter (a `DFlashAssistant`, a `Path`, or
            "dflash:FOLDER"), a `Drafter`; None is `combined` with an adapter, else "ngram".
        strategy: a verified preset (`hybrid list presets`); None is "speculative".
        adapter: folder of a diffusion adapter for this model, which then drafts for itself. For
            models that the native backbone runs.
        num_draft_tokens: K; None is the drafter's own.

    Returns:
        The plug; `stats` tells what the last call did.

    Raises:
        ConfigError: no such drafter or strategy, or one that this model cannot run.
        CheckpointError: an adapter or drafter that cannot be read, or is for another model.
    """
    plug = Plug(model, drafter, strategy, adapter, num_draft_tokens)
    detach(model)
    plug.before = {name: value for name, value in vars(model).items() if name == "generate"}
    model.generate = plug.generate
    return plug


def detach(model: PreTrainedModel) -> None:
    """Give the model back the `generate` that it had before `attach`; without one do nothing."""
    plug = getattr(vars(model).get("generate"), "__self__", None)
    if not isinstance(plug, Plug):
        return
    del model.generate
    vars(model).update(plug.before)
