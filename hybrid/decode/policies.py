"""Contracts of denoising: block schedule, unmask rule, cache policy, and a preset that names them.

Every published system is three such objects (docs/papers.md); one loop runs them all. Schedules and
cache policies belong to one row and may keep state, rules have none. Where one of them must know
what another saw, one object of the row plays both parts.
Next: hybrid/decode/denoise.py, drafters/denoise/presets.py.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Protocol

from pydantic import Field

from hybrid.config import Config
from hybrid.types import Context

if TYPE_CHECKING:
    from torch import Tensor

    from hybrid.decode.canvas import Block, Canvas, Pass
    from hybrid.decode.slots import Slots
    from hybrid.params import SamplingParams
    from hybrid.protocols import Backbone


class BlockSchedule(Protocol):
    """Says where the next pass may commit, and when the answer is complete.

    Attributes:
        length: S, positions of the canvas with the prompt.
    """

    length: int

    def open(self, canvas: Canvas) -> Sequence[Block]:
        """Return the blocks that the next pass works on, ascending; none when it is complete.

        Called once before every pass. It may settle slots that no pass has to predict.
        """
        ...

    def stable_end(self, canvas: Canvas) -> int:
        """Return up to where the tokens are final: they are handed to the reader."""
        ...


class UnmaskRule(Protocol):
    """Chooses which predictions of a pass become tokens."""

    def choose(self, slots: Slots, blocks: Sequence[Block]) -> Tensor:
        """Return the indices in `slots` [m] to commit, any order.

        Args:
            slots: what the pass predicts, ascending positions.
            blocks: from the schedule.
        """
        ...


class CachePolicy(Protocol):
    """Says what the next pass is fed, what it sees and which K/V it leaves behind."""

    def plan(self, canvas: Canvas, blocks: Sequence[Block]) -> Pass:
        """Return the next pass."""
        ...


@dataclass(frozen=True, slots=True)
class Denoiser:
    """The parts that denoise one row.

    Attributes:
        schedule: where.
        rule: what.
        cache: with which keys and values.
        guidance: weight of classifier-free guidance (LLaDA's cfg_scale); a second row without the
            prompt shares each pass. 0 is none.
        raw_confidence: scores are those of the law before temperature and truncation.
        top_k: truncation where the request asks for none, for confidences of greedy rows too.
        num_guesses: the most guesses of a pass; not with guidance.
    """

    schedule: BlockSchedule
    rule: UnmaskRule
    cache: CachePolicy
    guidance: float = 0.0
    raw_confidence: bool = False
    top_k: int = 0
    num_guesses: int = 0

    @property
    def copies(self) -> int:
        """Rows of the cache that a request takes."""
        return (2 if self.guidance else 1) + self.num_guesses


# What most parameters of presets are.
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Threshold = Annotated[float, Field(ge=0, allow_inf_nan=False)]  # above 1: the best one alone


class DenoisePreset(Config):
    """A published system: parameters with its defaults, and the policies that they make.

    Attributes:
        contexts: kinds of models that it is for.
    """

    contexts: ClassVar[tuple[Context, ...]] = (Context.BIDIRECTIONAL,)

    @abstractmethod
    def start(self, backbone: Backbone, num_prompt: int, max_new_tokens: int) -> Denoiser:
        """Return the policies of a new row.

        Raises:
            ConfigError: parameters that do not fit the model or each other.
        """

    def sampling(self, params: SamplingParams) -> SamplingParams:
        """Return the request's parameters, with those that the preset sets itself."""
        own = {n: getattr(self, n, None) for n in ("temperature", "top_k", "top_p")}
        own = {name: value for name, value in own.items() if value is not None}
        changed: SamplingParams = params.replace(**own) if own else params
        return changed

    def misfit(self, backbone: Backbone) -> str | None:
        """Return why a model cannot run it, None if it can."""
        if backbone.mask_token_id is None:
            return "this model names no mask token (mask_token_id in config.json)."
        if backbone.context not in self.contexts:
            kinds = " or ".join(c.value for c in self.contexts)
            return f"got a model with {backbone.context.value} context, expected {kinds}."
        return None
