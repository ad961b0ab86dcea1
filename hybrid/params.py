"""`SamplingParams`: everything a request may ask of sampling and stopping."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator, model_validator

from hybrid.config import Config

_Finite = Field(allow_inf_nan=False)


class SamplingParams(Config):
    """How tokens are chosen and when a request ends. The default is greedy, 256 new tokens.

    Attributes:
        temperature: 0 is greedy (argmax, ties to the lowest id); otherwise logits / temperature.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set whose probability reaches top_p; 1 keeps all.
        min_p: drop tokens below min_p times the largest probability; 0 keeps all.
        repetition_penalty: divide positive and multiply negative logits of seen tokens (CTRL,
            arXiv:1909.05858), prompt included; 1 is off.
        presence_penalty: subtracted from the logit of each token already generated.
        frequency_penalty: subtracted once per occurrence among the generated tokens.
        seed: same seed and same request give the same tokens; None draws a fresh one.
        max_new_tokens: the most tokens to generate.
        min_new_tokens: EOS and stop ids are impossible before this many tokens.
        stop: the text ends before the first of these strings. The text holds no special tokens:
            give their ids in `stop_token_ids`.
        stop_token_ids: ids that end the text besides the checkpoint's EOS ids.
        ignore_eos: treat the checkpoint's EOS ids as ordinary tokens.
        logprobs: None for none; n >= 0 for the chosen token's log-probability under the unmodified
            target distribution (nats) and the n most probable alternatives.
    """

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    presence_penalty: Annotated[float, _Finite] = 0.0
    frequency_penalty: Annotated[float, _Finite] = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0, le=100)] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not s for s in value):
            raise ValueError("got an empty stop string, expected at least one character.")
        return value

    @model_validator(mode="after")
    def _limits_agree(self) -> SamplingParams:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"got min_new_tokens {self.min_new_tokens}, expected at most max_new_tokens "
                f"({self.max_new_tokens})."
            )
        return self

    @property
    def is_greedy(self) -> bool:
        """Whether the token is the argmax."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens already seen."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )
