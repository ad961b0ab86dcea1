"""`Memory`: what the records say to one row, or to all: acceptance, costs, speed, what is untried.

It is folded over the history record by record and looks at nothing else.
Next: hybrid/router/hybrid.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybrid.router.acceptance import (
    CARRIED,
    COPIED,
    FRESH,
    AcceptanceModel,
    confidence_of,
    outcomes,
)
from hybrid.router.choice import Option, Prices, best_of, best_options
from hybrid.router.config import ROUTED, RouterConfig
from hybrid.router.cost import CostModel, StepShape, shape_of
from hybrid.router.monitor import RiskMonitor
from hybrid.router.profile import Profile
from hybrid.types import Mode, RowStep, StepRecord

AR = "ar"
_ARMS = (AR, FRESH, CARRIED)

_START_STEPS = 8.0  # AR steps that the speed of AR is worth as a prior
_UNUSED = 8  # steps after which an arm counts as out of use
_IN_USE = 3  # steps after which an arm that was tried counts as in use
_PATIENCE, _MOST_VAIN = 1.7, 8  # a trial in vain prolongs the time to the next by this, so often
_NO_COPIES = 0.99  # share of drafts from a pass above which copies are left out of the account
# The outlook, and what looking is worth, are renewed in the first steps, then in each fourth.
_EVERY_STEP, _REFRESH = 16, 4


class Memory:
    """State of the router, of one row (`only`) or of all rows.

    Time is counted in AR steps of the same batch, so that neither the unit of the costs nor a row
    that ends changes what was learned.

    Attributes:
        costs: corrected by the records unless frozen.
        acceptance: learned from the rows that count here.
        monitor: of the unverified tokens, None where there are none.
        last: the last step of each row.
        worth: tokens that it is worth to a row to begin a step with slots.
        values: per row, of a step that begins without slots and drafts in no pass (AR), drafts in
            one (FRESH), or only carries (CARRIED).
        trial: an arm that is to be tried now although it looks worse, or None.
    """

    def __init__(
        self,
        config: RouterConfig,
        costs: CostModel,
        counts: Mapping[str, Any] | None = None,
        profile: Profile | None = None,
        monitor: RiskMonitor | None = None,
        only: int | None = None,
        batch: int = 1,
    ) -> None:
        """Begin before the first record.

        Args:
            config: settings.
            costs: changed in place unless frozen.
            counts: of acceptance, to begin with; see `AcceptanceModel.to_dict`.
            profile: gives the thresholds.
            monitor: before the first step.
            only: index of the row that counts; None for all.
            batch: rows.
        """
        self.acceptance = (
            AcceptanceModel(config.window)
            if counts is None
            else AcceptanceModel.from_dict(counts, config.window)
        )
        self.costs, self.monitor, self.last = costs, monitor, dict[int, RowStep]()
        self._config, self._profile, self._only = config, profile, only
        self._modes = (Mode.SPECULATIVE, *config.carrying_modes)
        self._cursor, self.num_steps, self._batch = 0, 0, batch
        self._time = _START_STEPS
        self._tokens = _START_STEPS * self._promise()
        self._pass_share = 1.0  # of the drafts that need a pass, against copies
        self._elapsed, self._last_visit, self._num_vain = 0.0, 0.0, 1
        self._used = dict.fromkeys(_ARMS, 0)  # step in which each arm was last in use
        self._visiting: str | None = None
        self._num_repeats = 0
        self.worth = 0.0
        self.trial: str | None = None
        self.values: dict[str, float] = {}
        self._reuse: dict[tuple[int, int], Option] = {}
        self._insight, self._num_insights = 0.0, 0
        self._refresh()
        self._refresh()  # the worth of slots has settled a little

    def fold(self, history: Sequence[StepRecord]) -> None:
        """Take in the records that are new."""
        for record in history[self._cursor :]:
            if record.mode in ROUTED:
                self._add(record)
        self._cursor = len(history)

    def rate(self, rows: int) -> float:
        """Return the tokens per millisecond of a batch, all rows together."""
        return self._speed * rows / self.costs.ms(StepShape(rows))

    def prices(self, rows: int, drafting: int) -> Prices:
        """Return the prices of a step of `rows` rows, `drafting` of them after a draft pass."""
        return Prices(self.rate(rows), self.worth, self.costs.of(rows, drafting))

    def reuse(self, first_slot: int, num_slots: int) -> Option:
        """Return the best step of a row that begins with carried slots, its share of the batch."""
        key = first_slot, num_slots
        found = self._reuse.get(key)
        if found is None:
            odds = self.acceptance.typical(CARRIED, first_slot, num_slots)
            found = self._reuse[key] = self._best(odds, 0)
        return found

    def margin(self) -> float:
        """Tokens by which another choice must be better, one row's share."""
        return self._config.hysteresis * self._speed

    @property
    def looks(self) -> bool:
        """Whether to look at a draft before it is fed, where the device would have to wait.

        What is trusted unverified has to be looked at. For the rest it must be worth the wait, in
        tokens; the first draft is looked at.
        """
        if self.monitor is not None or not self.costs.look_ms or not self._num_insights:
            return True
        return self._insight > self._speed * self.costs.look_ms / self._ar_ms

    def is_trying(self, arm: str) -> bool:
        """Return whether the last step used an arm for the first time in a while."""
        return (
            self._visiting == arm and self._num_repeats == 0 and (self._used[arm] == self.num_steps)
        )

    @property
    def _speed(self) -> float:
        """Tokens of a row in the time of an AR step; AR itself is never out of reach."""
        return max(self._tokens / self._time, 1.0)

    @property
    def _renews(self) -> bool:
        """Whether what is not renewed in every step is renewed in this one."""
        return self.num_steps <= _EVERY_STEP or self.num_steps % _REFRESH == 0

    @property
    def _ar_ms(self) -> float:
        return self.costs.ms(StepShape(self._batch))

    def _add(self, record: StepRecord) -> None:
        rows = [row for row in record.rows if self._only in (None, row.index)]
        if not rows:
            return
        shape = shape_of(record) if self._only is None else _shape_alone(rows[0])
        self._batch = shape.rows
        ms = self.costs.ms(shape)
        if not self.costs.frozen and record.seconds > 0:
            ms = 1000 * record.seconds
            self.costs.observe(record)
        if self.costs.look_ms and self._renews:
            self._value_insight(rows, shape)
        time, keep = ms / self._ar_ms, 1 - 1 / self._config.window
        self._tokens = keep * self._tokens + sum(len(row.tokens) for row in rows) / len(rows)
        self._time = keep * self._time + time
        self._elapsed += time
        self.num_steps += 1
        for row in rows:
            if self.monitor is not None and self._profile is not None:
                self.monitor = watched(self.monitor, self._profile, row)
            self.acceptance.observe(row)
            self.last[row.index] = row
            if row.num_proposed and row.first_slot < 2:
                self._pass_share += (bool(row.first_slot) - self._pass_share) / 16
        arms, has_accepted = _arms_of(rows), any(row.num_accepted for row in rows)
        # Where slots are carried, a draft pass that is right is no news.
        is_news = has_accepted and self.num_steps - self._used[CARRIED] > _UNUSED
        self._visit(arms, has_accepted, is_news)
        if self._renews:
            self._refresh()
        # A draft pass that was tried with success is tried once more.
        is_better = self.trial == FRESH and FRESH in arms and is_news
        self.trial = FRESH if is_better else self._due()

    def _value_insight(self, rows: Sequence[RowStep], shape: StepShape) -> None:
        """Learn what it is worth to a row that its draft is looked at, from drafts of the past.

        That is the value of the step that is best then, less that of the step that usual odds
        advise, both by what became of the tokens that were judged. So certainty that says nothing
        is worth nothing. It is in the records of drafts that were not looked at, too.
        """
        # Of copies nothing is known: their column is NaN, or missing where all rows copied.
        if not any(c == c for row in rows for c in row.confidences):
            return
        odds, usual, true = [], [], []
        for row in rows:
            confidences = [confidence_of(row, i) for i in range(row.num_proposed)]
            odds.append(self.acceptance.known(row.first_slot, confidences))
            usual.append(self.acceptance.usual(row.first_slot, row.num_proposed))
            judged = outcomes(row)
            true.append([*judged, *odds[-1][len(judged) :]])
        prices = self.prices(len(rows), shape.drafting)
        values = []
        for known in (odds, usual):
            option = best_of(best_options(known, prices, self._modes))
            count = option.num_draft_tokens
            fed = [own[:count] for own in true]
            (taken,) = best_options(fed, prices, [option.mode], least=count)
            values.append(taken.value / len(rows))
        self._num_insights += 1
        weight = max(1 / self._num_insights, 1 / self._config.window)
        self._insight += weight * (values[0] - values[1] - self._insight)

    def _promise(self) -> float:
        """Return the tokens of a row in the time of an AR step, if drafts are what they seem to be.

        A speed to begin with: one that is too low takes time for cheap, and wastes it.
        """
        config, batch, best = self._config, self._batch, 1.0
        kinds = [(self.acceptance.typical(FRESH, 1, config.num_draft_tokens), batch, False)]
        if config.carrying_modes:
            odds = self.acceptance.typical(CARRIED, 2, config.group_size - 1)
            kinds.append((odds, 0, True))
        for odds, drafting, carries in kinds:
            tokens, alive = 1.0, 1.0
            for n in range(len(odds) + 1):
                groups = (n + 1 if Mode.ONE_PASS in config.modes else 1) if carries else 0
                ms = self.costs.ms(StepShape(batch, 1 + n, groups, drafting))
                best = max(best, tokens * self._ar_ms / ms)
                alive *= odds[n] if n < len(odds) else 0.0
                tokens += alive
        return best

    def _refresh(self) -> None:
        """Renew the values of the kinds of step, and with them the worth of slots."""
        config, count = self._config, self._config.num_draft_tokens
        none, *carrying = best_options([()], self._prices_of_one(0), self._modes)
        self.values = {AR: none.value}
        if carrying:
            self.values[CARRIED] = carrying[0].value
        if Mode.SPECULATIVE in config.modes:
            share = self._pass_share if self._pass_share < _NO_COPIES else 1.0
            fresh = self._best(self.acceptance.typical(FRESH, 1, count), self._batch)
            self.values[FRESH] = share * fresh.value
            if share < 1:
                copied = self._best(self.acceptance.typical(COPIED, 1, count), 0)
                self.values[FRESH] += (1 - share) * copied.value
        if carrying:
            odds = self.acceptance.typical(CARRIED, 2, config.group_size - 1)
            self.worth = max(self._best(odds, 0).value - max(self.values.values()), 0.0)
        self._reuse = {}

    def _best(self, odds: Sequence[float], drafting: int) -> Option:
        options = best_options([odds], self._prices_of_one(drafting), self._modes)
        return best_of(options)

    def _prices_of_one(self, drafting: int) -> Prices:
        """Return the prices of a step in which all rows do the same, one row's share of it."""
        rate, worth, ms = self.prices(self._batch, drafting)
        return Prices(rate / self._batch, worth, ms)

    def _visit(self, arms: set[str], has_accepted: bool, is_news: bool) -> None:
        """Keep account of which arms are in use, and of those that are tried in vain."""
        for arm in arms:
            unused = self.num_steps - self._used[arm]
            self._used[arm] = self.num_steps
            if unused > _UNUSED:
                self._visiting, self._num_repeats = arm, 0
                self._last_visit = self._elapsed
                vain = self._num_vain + (-2 if is_news else 1)
                self._num_vain = min(max(vain, 0), _MOST_VAIN)
            elif arm == self._visiting:
                self._num_repeats += 1
                if self._num_repeats >= _IN_USE and (arm == AR or has_accepted):
                    self._visiting, self._num_vain = None, 0

    def _due(self) -> str | None:
        """Return an arm that is worth a trial: the best of those that are out of use.

        A trial costs what its arm is worse by. It waits until that is a small share of the time
        since the last one, a smaller one after each trial in vain.
        """
        if self._only is not None:  # such rows draft in every step
            return None
        idle = [arm for arm in self.values if self.num_steps - self._used[arm] >= _UNUSED]
        ms, batch = self.costs.ms, self._batch
        if FRESH in self.values and ms(StepShape(batch, groups=1)) >= ms(
            StepShape(batch, 1, 0, batch)
        ):
            idle = [arm for arm in idle if arm != CARRIED]  # a group costs what it could save
        if not idle:
            return None
        arm = max(idle, key=self.values.__getitem__)
        loss = max(self.values.values()) - self.values[arm]
        if arm != CARRIED and any(row.num_slots for row in self.last.values()):
            loss += self.worth  # of slots that are not used
        loss /= self._speed  # tokens of a row -> AR steps
        if arm != AR:  # a token of the draft is fed, or nothing is learned
            loss += self.costs.ms(StepShape(self._batch, 2)) / self._ar_ms - 1
        saved = self._config.exploration * (self._elapsed - self._last_visit)
        return arm if saved >= loss * _PATIENCE**self._num_vain else None


def _shape_alone(row: RowStep) -> StepShape:
    """Return the shape of a row's step, had it been alone."""
    drafting = int(row.first_slot == 1 and row.num_proposed > 0)
    return StepShape(1, 1 + row.num_drafted, len(row.points), drafting)


def _arms_of(rows: Sequence[RowStep]) -> set[str]:
    """Return what a step used: a draft pass, carried slots, or neither."""
    arms = set()
    for row in rows:
        if row.num_proposed and row.first_slot == 1:
            arms.add(FRESH)
        if row.points or (row.num_drafted and row.first_slot > 1):
            arms.add(CARRIED)
    return arms or {AR}


def watched(monitor: RiskMonitor, profile: Profile, row: RowStep) -> RiskMonitor:
    """Return the monitor after a row's step.

    Tokens that were committed unverified are its evidence. So are verified ones that the level on
    trial would have trusted, as far as they were judged.
    """
    sure = row.num_unverified
    trial = monitor.trial
    if sure:
        monitor = monitor.observe(sure, sum(row.disagreements))
    if row.num_drafted > sure and trial is not None:
        trusted = profile.num_trusted(row.first_slot, row.confidences, trial)
        checked = outcomes(row)[sure:trusted]
        if checked:
            monitor = monitor.observe_checked(len(checked), len(checked) - sum(checked))
    return monitor
