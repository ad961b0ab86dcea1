"""`Strategy`: a way to decode by name, with its parameters. `hybrid list presets` lists them.

Two kinds: drafts that the target verifies (their output is that of AR decoding), and systems that
denoise (drafters/denoise/presets.py). A model that decodes by its own code has settings of its own.
Next: hybrid/assembly.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from hybrid import registry
from hybrid.config import Config
from hybrid.decode.policies import DenoisePreset
from hybrid.errors import ConfigError, did_you_mean
from hybrid.params import SamplingParams
from hybrid.protocols import Backbone
from hybrid.router.profile import Profile
from hybrid.types import Mode

# Fields of `SamplingParams` that mean something for tokens from left to right alone, and those that
# change the distribution of a token.
LEFT_TO_RIGHT = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_new_tokens",
    "logprobs",
)
OF_A_LAW = ("temperature", "top_k", "top_p", "min_p")
VERIFIED = ("ar", "speculative", "hybrid", "ngram", "dflash")


class VerifiedPreset(Config):
    """Decoding whose tokens the target has the last word on.

    Attributes:
        drafter: name of what proposes; None is the decoder's own.
        needs: name of the drafter that the decoder must have been given.
    """

    drafter: ClassVar[str | None] = None
    needs: ClassVar[str | None] = None

    @property
    def num_draft_tokens(self) -> int | None:
        """K that is asked for; None leaves it to the drafter."""
        size: int | None = getattr(self, "block_size", None)
        return None if size is None else size - 1


class Ar(VerifiedPreset):
    """One token per forward: the baseline."""

    drafter: ClassVar[str | None] = "none"


class Speculative(VerifiedPreset):
    """Diffusion drafts, the same weights verify; output as ar.

    Attributes:
        block_size: anchor and drafted tokens together, 1 drafts none; None is the drafter's own
            choice.
        threshold: draft passes go on until every slot has been this sure of its token; 0 is one
            pass. For models that fill masks by themselves.
        mode: "two-pass" drafts, then verifies. "fused" lets the verify pass carry the next draft,
            assuming that everything is accepted; "one-pass" for every acceptance point (TiDAR,
            arXiv:2511.08923; quadratic self-speculation). For drafters whose slots can ride.
    """

    block_size: Annotated[int, Field(ge=1)] | None = None
    threshold: Annotated[float, Field(ge=0)] = 0.0
    mode: Literal["two-pass", "fused", "one-pass"] = "two-pass"


class Ngram(VerifiedPreset):
    """Copies from the text so far, then verifies; output as ar."""

    drafter: ClassVar[str | None] = "ngram"


class Hybrid(VerifiedPreset):
    """Chooses mode, length and trust step by step, by what they cost here; as ar at risk 0.

    Attributes:
        risk: share of unverified tokens that AR would not have chosen; 0 verifies every token.
        profile: from `hybrid calibrate`, a file or a `Profile`; None is the adapter's own. Needed
            where `risk` is above 0.
        cost: "measured" milliseconds, or "forwards": every pass costs 1, as on a device that a
            single row leaves idle. The second needs no clock and repeats exactly. None is what the
            profile was calibrated with, and "measured" at risk 0.
        block_size: anchor and drafted tokens together; None is the drafter's own choice.
        modes: what a step may be, None is everything; AR always may.
        is_monitored: go back to stricter thresholds, and to verifying, where more disagrees than
            `risk` allows. Only a calibration does without.
    """

    risk: Annotated[float, Field(ge=0, lt=1)] = 0.0
    profile: Path | Profile | None = None
    cost: Literal["measured", "forwards"] | None = None
    block_size: Annotated[int, Field(ge=2)] | None = None
    modes: tuple[Mode, ...] | None = None
    is_monitored: bool = True

    @field_validator("modes", mode="before")
    @classmethod
    def _spelled(cls, modes: Any) -> Any:
        """Let `modes=ar,fused` of a command line be a list."""
        return modes.split(",") if isinstance(modes, str) else modes


class DFlash(VerifiedPreset):
    """A block-diffusion drafter over the target's features drafts (arXiv:2602.06036); output as ar.

    Attributes:
        block_size: anchor and drafted tokens together; None is that of the drafter's checkpoint.
    """

    needs: ClassVar[str | None] = "dflash"
    block_size: Annotated[int, Field(ge=1)] | None = None


@dataclass(frozen=True, slots=True)
class Strategy:
    """A preset and the name it goes by.

    Attributes:
        name: as in `hybrid list presets`.
        settings: its validated parameters.
    """

    name: str
    settings: Config

    @classmethod
    def preset(cls, name: str, /, **parameters: Any) -> Strategy:
        """Return the preset `name` with some parameters changed from their published defaults.

        Raises:
            ConfigError: no such preset or parameter, or a value outside its range.
        """
        known = registry.names("preset")
        if not isinstance(name, str) or name not in known:
            raise ConfigError(f"strategy: got {name!r}.{did_you_mean(str(name), known)}")
        make = registry.load("preset", name)
        try:
            return cls(name, make(**parameters))
        except ConfigError as error:
            raise ConfigError(f"strategy {name!r}: {error}") from None


def resolve(strategy: str | Strategy | None, backbone: Backbone, *, unverified: bool) -> Strategy:
    """Return what a request asks for, if the model can do it.

    Args:
        strategy: a name, a `Strategy`, or None for what the weights are meant for.
        backbone: the model.
        unverified: let a model verify that was never trained to.

    Raises:
        ConfigError: unknown, or not for this model; the message lists what is.
    """
    if strategy is None:
        strategy = backbone.default_strategy
    if isinstance(strategy, str):
        strategy = Strategy.preset(strategy)
    elif not isinstance(strategy, Strategy):
        raise ConfigError(
            f"strategy: got {type(strategy).__name__}, expected a name or Strategy.preset(...)."
        )
    if not isinstance(strategy.settings, Config):
        raise ConfigError(
            f"strategy {strategy.name!r}: got {type(strategy.settings).__name__} for its settings, "
            "expected what Strategy.preset(...) makes."
        )
    problem = misfit(strategy.settings, backbone, unverified=unverified)
    if problem:
        others = ", ".join(fitting(backbone))
        hint = f"For this model: {others}." if others else "No preset runs this model."
        raise ConfigError(f"strategy {strategy.name!r}: {problem} {hint}")
    return strategy


def with_risk(strategy: str | Strategy | None, risk: float | None) -> str | Strategy | None:
    """Return the strategy with another `risk`; strategy "hybrid" where only a risk is given.

    Raises:
        ConfigError: a strategy that knows no risk, or a value outside its range.
    """
    if risk is None:
        return strategy
    if strategy is None or strategy == "hybrid":
        return Strategy.preset("hybrid", risk=risk)
    if isinstance(strategy, Strategy) and isinstance(strategy.settings, Hybrid):
        return Strategy(strategy.name, strategy.settings.replace(risk=risk))
    name = strategy.name if isinstance(strategy, Strategy) else strategy
    raise ConfigError(f"risk: got {risk} for strategy {name!r}, expected 'hybrid'. Leave one out.")


def fitting(backbone: Backbone) -> tuple[str, ...]:
    """Return the names of the presets that a model can run."""
    found = []
    for name in registry.names("preset"):
        with suppress(ConfigError):  # somebody's preset that cannot be loaded spoils no other
            if not misfit(registry.load("preset", name)(), backbone):
                found.append(name)
    return tuple(found)


def misfit(settings: Config, backbone: Backbone, *, unverified: bool = False) -> str | None:
    """Return why a model cannot run a preset, None if it can."""
    is_own = not isinstance(settings, (VerifiedPreset, DenoisePreset))
    if hasattr(backbone, "canvases"):
        return None if is_own else "this model decodes by its own code."
    if is_own:
        return "these are the settings of a model that decodes by its own code."
    if isinstance(settings, DenoisePreset):
        return settings.misfit(backbone)
    if backbone.can_verify:
        return None
    context = backbone.context.value
    if context == "bidirectional":
        return (
            "this model was trained with bidirectional attention. A causal pass of it says "
            "nothing, so it can neither decode token by token nor verify a draft."
        )
    if unverified:
        return None
    return (
        f"this model has {context} attention and no autoregressive objective, so what its causal "
        "pass accepts is not what it would write. allow_unverified=True runs it all the same."
    )


def refuse(params: SamplingParams, name: str, fields: Sequence[str], why: str) -> None:
    """Refuse parameters that a strategy does not heed.

    Raises:
        ConfigError: one of `fields` differs from its default.
    """
    default = SamplingParams()
    given = [field for field in fields if getattr(params, field) != getattr(default, field)]
    if given:
        raise ConfigError(
            f"strategy {name!r}: got {', '.join(given)}, expected the default ({why}). Leave out "
            f"{'it' if len(given) == 1 else 'them'}."
        )
