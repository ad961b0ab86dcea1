"""Which step is worth most: expected tokens, less what its time could have bought elsewhere.

A step that commits E tokens on average in t milliseconds is worth E - rate t, where `rate` is the
speed of decoding, in tokens per millisecond: the optimum of a renewal reward process takes the step
with the largest such value, and no ratio of a single step does (a slow step may pay later). What
pays later is that the next step begins with slots; their `worth` is added where they fit.
Next: hybrid/router/memory.py, where the two numbers come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hybrid.types import Mode, Route

Odds = Sequence[float]
"""Probability that each token of a row's draft is accepted, if those before it are."""


class Prices(NamedTuple):
    """What tokens are weighed against.

    Attributes:
        rate: tokens per millisecond.
        worth: tokens that it is worth to a row to begin the next step with slots.
        ms: (width, groups) -> milliseconds of the step.
    """

    rate: float
    worth: float
    ms: Callable[[int, int], float]


class Option(NamedTuple):
    """A step that could be taken.

    Attributes:
        mode: SPECULATIVE carries nothing, FUSED one group, ONE_PASS one for every point.
        num_draft_tokens: fed to the target, of rows that have as many.
        tokens: expected to be committed, all rows together.
        hits: rows expected to begin the next step with slots.
        ms: expected time.
        value: tokens, and worth of the slots, less rate times ms.
    """

    mode: Mode
    num_draft_tokens: int
    tokens: float
    hits: float
    ms: float
    value: float

    def route(self, count: int, sure: int = 0) -> Route:
        """Return this for a row that has `count` tokens, `sure` of them committed anyway."""
        num_fed = min(self.num_draft_tokens, count)
        sure = min(sure, num_fed)
        points: tuple[int, ...] = ()
        if self.mode == Mode.FUSED:
            points = (num_fed,)
        elif self.mode == Mode.ONE_PASS:
            points = tuple(range(sure, num_fed + 1))
        return Route(num_fed, sure, points)


@dataclass(slots=True)
class Explanation:
    """What decided the last step of some rows. Numbers are those of the decision, not stored prose.

    Attributes:
        rows: cache rows that were decided together.
        plans: value of drafting in a pass or not, before the draft was known.
        options: best of each mode, when it was known.
        chosen: one of them.
        rate: tokens per millisecond that time is weighed with.
        worth: tokens that slots are worth to a row's next step.
        trial: the arm that was tried although it looked worse.
        level: of the threshold in force; None verifies everything.
        threshold: its value.
        num_trusted: leading tokens that reached it.
        has_looked: whether the draft's certainty counted, or usual odds of such drafts.
    """

    rows: tuple[int, ...]
    plans: dict[str, float]
    options: Sequence[Option] = ()
    chosen: Option | None = None
    rate: float = 0.0
    worth: float = 0.0
    trial: str | None = None
    level: int | None = None
    threshold: float | None = None
    num_trusted: int = 0
    has_looked: bool = True

    @property
    def runner_up(self) -> Option | None:
        """The best option that was not taken."""
        others = [option for option in self.options if option is not self.chosen]
        return max(others, key=lambda option: option.value, default=None)


def best_options(
    odds: Sequence[Odds],
    prices: Prices,
    modes: Sequence[Mode],
    *,
    least: int = 0,
    num_sure: int = 0,
) -> list[Option]:
    """Return the best option of each mode.

    A step is as wide for all rows as for the one with most tokens. So one number is chosen for all,
    and rows with fewer tokens feed what they have.

    Args:
        odds: of each row.
        prices: what tokens are weighed against.
        modes: as in `Option`.
        least: tokens that must be fed, if there are as many.
        num_sure: leading tokens of the one row that are committed whatever the target says.
    """
    batch, count = len(odds), max(map(len, odds))
    alive, total = [1.0] * batch, float(batch)
    tokens, hits = [total], [total]
    for n in range(count):
        for b, row in enumerate(odds):
            if n < len(row):
                alive[b] *= row[n]
                total += alive[b]
        tokens.append(total)
        hits.append(sum(alive))
    rate, worth, ms_of = prices
    found = []
    for mode in modes:
        best = least = min(least, count)
        most = -math.inf
        for n in range(least, count + 1):
            groups, hit = _carried(mode, n, hits[n], batch, num_sure)
            value = tokens[n] + worth * hit - rate * ms_of(1 + n, groups)
            if value > most:
                best, most = n, value
        groups, hit = _carried(mode, best, hits[best], batch, num_sure)
        found.append(Option(mode, best, tokens[best], hit, ms_of(1 + best, groups), most))
    return found


def _carried(mode: Mode, n: int, whole: float, batch: int, num_sure: int) -> tuple[int, float]:
    """Return the groups that a mode carries with n tokens, and the rows that will find slots."""
    if mode is Mode.SPECULATIVE:
        return 0, 0.0
    if mode is Mode.FUSED:
        return 1, whole
    return max(n - num_sure, 0) + 1, batch


def cut_in_order(
    odds: Odds, typical: Odds, prices: Prices, modes: Sequence[Mode], num_sure: int = 0
) -> list[Option]:
    """Return the options for a sampled row: whether token i is fed must not depend on that token.

    The distribution of slot i + 1 may depend on the token that was drawn in slot i. If it decided
    whether token i is fed, tokens with a promising continuation would be verified more often than
    others, and what is committed would no longer follow the target. So tokens are taken one after
    the other, each by the odds up to its own and `typical` ones behind it.

    Args:
        odds: of the row.
        typical: what is usual for such a draft.
        prices: what tokens are weighed against.
        modes: as in `Option`.
        num_sure: leading tokens that are committed whatever the target says.

    Returns:
        The best option of each mode for the tokens that are fed, all of the same number.
    """
    mode = best_of(best_options([typical], prices, modes)).mode
    num_fed = 0
    while num_fed < len(odds):
        known = num_fed + 1
        mixed = [*odds[:known], *typical[known:]]
        (best,) = best_options([mixed], prices, [mode], num_sure=min(num_sure, known))
        if best.num_draft_tokens < known:
            break
        num_fed = known
    fed = odds[:num_fed]
    return best_options([fed], prices, modes, least=num_fed, num_sure=min(num_sure, num_fed))


def best_of(options: Sequence[Option], bonus: Callable[[Option], float] | None = None) -> Option:
    """Return the option of the largest value; of equal ones that which leaves most rows with slots.

    Args:
        options: at least one.
        bonus: added to the value of each.
    """
    add = bonus or (lambda _: 0.0)
    return max(options, key=lambda option: (option.value + add(option), option.hits))
