"""The promise at run time: what may be committed unverified, and when to stop.

Every unverified token is checked after the fact, for the pass that writes its keys and values
also gives AR's logits. `RiskMonitor` is fed these checks and does two things. The *account* keeps
the promise on any sequence of tokens. The *alarm* notices early that the calibration does not hold
here, and makes the thresholds stricter before the account is empty.

Next: hybrid/router/bounds.py, how the thresholds were found.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field, model_validator

from hybrid.config import Config
from hybrid.errors import ConfigError


class RiskMonitor(Config):
    """Keeps the share of disagreeing tokens at `risk`, whatever the tokens are.

    Immutable: `observe` and `observe_checked` return the next monitor, so a recorded run replays.
    Plain numbers: `model_dump` and `**` take it to JSON and back.

    Let N tokens have been committed unverified, D of them disagreeing, and C tokens checked before
    they were committed. With the allowance a, A accounts opened and r the risk:

    **The account, on any sequence**: D <= r N + a A, if no more than `num_allowed` tokens are
    committed between two calls of `observe`. Proof: b = a A + r N - D is a at the beginning and
    never taken below 0, because k tokens change it by r k - d >= -(1 - r) k >= -b for
    k <= b / (1 - r); opening an account adds to it.

    **What accounts cost**: after the first, each takes 2 log(1 / delta) / r checked tokens or
    more, each adding r / 2 at most to a sum that must climb from 0 to log(1 / delta). So
    D <= r N + a + C r a / (2 log(1 / delta)), about r (N + C) + a with the default numbers.

    **The alarm, under any dependence**: let M be the sum of the tokens' probabilities to disagree,
    each given all tokens before it, and N and D their number and disagreements, all since the level
    last changed. An alarm while M <= r N has probability delta at most, over all time. Proof: for
    x in [0, 1] with mean m, E[c^x] <= 1 + (c - 1) m <= exp((c - 1) m) for any c > 0, so
    c^D exp(-(c - 1) M) is a supermartingale that begins with 1 and ever reaches 1 / delta with
    probability delta at most (Ville). With c = 2 and M <= r N it is no less than 2^D exp(-r N),
    whose logarithm is `alarm`. It climbs while more than 1.44 r disagree, and falls otherwise.

    **Trust**, of checked tokens: the same with c = 1/2 and M >= r N is no less than
    exp(r N / 2) / 2^D, whose logarithm is `trust`: of the climbs from 0, each relaxes a level
    falsely with probability delta at most. It climbs while fewer than 0.72 r disagree, and begins
    anew at 0 instead of sinking below, or else what was bad for long would never be trusted again.

    Attributes:
        risk: share of unverified tokens that may disagree.
        num_levels: number of thresholds, strict to lax, that the calibration accepted.
        level: index of the one in force; None is "verify only".
        delta: chance that an alarm, or an act of trust, is wrong.
        allowance: tokens that may disagree beyond the share; as many may be committed at once in
            the beginning. For a batch, think of `num_allowed` as one number for all of its rows.
        unverified: N.
        disagreeing: D.
        checked: C.
        accounts: A.
        alarm: evidence that more than `risk` disagrees, a logarithm.
        trust: evidence that less than `risk` disagrees at the level `trial`, a logarithm.
    """

    risk: float = Field(gt=0, lt=1)
    num_levels: int = Field(ge=0)
    level: int | None
    delta: float = Field(default=0.05, gt=0, lt=1)
    allowance: float = Field(default=6.0, ge=1)
    unverified: int = Field(default=0, ge=0)
    disagreeing: float = Field(default=0.0, ge=0)
    checked: int = Field(default=0, ge=0)
    accounts: int = Field(default=1, ge=1)
    alarm: float = 0.0
    trust: float = Field(default=0.0, ge=0)

    @classmethod
    def start(cls, risk: float, num_levels: int, **settings: Any) -> RiskMonitor:
        """Return a monitor that begins with the laxest level, "verify only" if there is none.

        Args:
            risk: as the attribute.
            num_levels: as the attribute.
            **settings: `delta` and `allowance`.

        Raises:
            ConfigError: a number out of range.
        """
        level = num_levels - 1 if num_levels else None
        return cls(risk=risk, num_levels=num_levels, level=level, **settings)

    @model_validator(mode="after")
    def _level_exists(self) -> RiskMonitor:
        if self.level is not None and not 0 <= self.level < self.num_levels:
            raise ValueError(f"level: got {self.level}, expected one of {self.num_levels} or None.")
        return self

    @property
    def num_allowed(self) -> int:
        """Tokens that may be committed unverified before the next `observe`, all rows together."""
        return 0 if self.level is None else self._num_affordable

    @property
    def trial(self) -> int | None:
        """The level that `observe_checked` is evidence about: the next laxer one, if any."""
        level = 0 if self.level is None else self.level + 1
        return level if level < self.num_levels else None

    def observe(self, unverified: int, disagreement: float) -> RiskMonitor:
        """Take in the evidence on tokens that were committed unverified.

        Args:
            unverified: how many; all that were, also those whose evidence will never come.
            disagreement: how many disagree with AR, or the sum of their rejection probabilities.
                Tokens without evidence disagree.

        Raises:
            ConfigError: `disagreement` is not in [0, unverified].
        """
        _check(unverified, disagreement)
        seen = self.replace(
            unverified=self.unverified + unverified,
            disagreeing=self.disagreeing + disagreement,
            alarm=self.alarm + disagreement * math.log(2) - self.risk * unverified,
        )
        if seen.level is None:
            return seen
        if seen._num_affordable < 1:
            return seen._move_to(None)
        if seen.alarm >= seen._threshold:
            return seen._move_to(seen.level - 1 if seen.level else None)
        return seen

    def observe_checked(self, num_tokens: int, disagreement: float) -> RiskMonitor:
        """Take in tokens of verified steps that the level `trial` would have left unverified.

        Nothing is at stake with them; they are the way back after an alarm.

        Args:
            num_tokens: how many.
            disagreement: how many of them disagree with AR, as in `observe`.

        Raises:
            ConfigError: `disagreement` is not in [0, num_tokens].
        """
        _check(num_tokens, disagreement)
        if self.trial is None:
            return self
        step = self.risk * num_tokens / 2 - disagreement * math.log(2)
        seen = self.replace(checked=self.checked + num_tokens, trust=max(0.0, self.trust + step))
        if seen.trust < seen._threshold:
            return seen
        reopened = seen.replace(accounts=seen.accounts + (seen.level is None))
        return reopened._move_to(seen.trial)

    @property
    def _num_affordable(self) -> int:
        balance = self.allowance * self.accounts + self.risk * self.unverified - self.disagreeing
        return max(0, int(balance / (1 - self.risk)))

    @property
    def _threshold(self) -> float:
        return -math.log(self.delta)

    def _move_to(self, level: int | None) -> RiskMonitor:
        return self.replace(level=level, alarm=0.0, trust=0.0)


def _check(num_tokens: int, disagreement: float) -> None:
    if not 0 <= disagreement <= num_tokens:
        raise ConfigError(
            f"got {disagreement} disagreeing of {num_tokens} tokens, expected 0 up to {num_tokens}."
        )
