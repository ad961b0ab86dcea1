"""`HybridRouter`: the mode and the number of tokens that promise most, step by step.

Next: hybrid/router/choice.py, the choice; hybrid/router/memory.py, what it is made from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hybrid.errors import ConfigError
from hybrid.router.acceptance import CARRIED, FRESH
from hybrid.router.choice import Explanation, best_of, best_options, cut_in_order
from hybrid.router.config import ROUTED, RouterConfig
from hybrid.router.cost import CostModel, StepShape
from hybrid.router.memory import AR, Memory, watched
from hybrid.router.monitor import RiskMonitor
from hybrid.router.profile import Profile
from hybrid.transfer import read
from hybrid.types import Mode, Plan, Proposal, Route, SequenceState, StepRecord

NO_PASS, DRAFT, DRAFT_AFRESH = "no draft pass", "draft pass", "draft pass for all"


class Draft(NamedTuple):
    """What the router sees of a row's proposal.

    Attributes:
        num_tokens: that were proposed.
        first_slot: see `Proposal`.
        confidences: of the tokens, or empty.
    """

    num_tokens: int
    first_slot: int = 0
    confidences: tuple[float, ...] = ()


class HybridRouter:
    """Takes the step with the largest expected tokens for its time, from costs and acceptance.

    A greedy row whose tokens are all verified says the same whatever is done, so such rows follow
    the clock, and are decided together: a step is as wide for all rows as for one. A sampled row,
    and every row if `risk` > 0, must say the same whatever shares its batch and however fast the
    machine is. Such a row is decided by itself, by costs that are fixed beforehand and by its own
    records, and is drafted with the same number of tokens in every step.

    The choice is a function of the settings, what the constructor was given, and the history.

    Attributes:
        explanations: why the last step is what it is, one for all rows that were decided together.
    """

    wants_features = True

    def __init__(
        self,
        config: RouterConfig,
        costs: CostModel | None = None,
        profile: Profile | None = None,
        monitor: RiskMonitor | None = None,
        acceptance: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep the parts; none of them is changed.

        Args:
            config: settings.
            costs: measured at warm-up; None is a guess, which the first steps correct. "forwards"
                has its own.
            profile: of this model; needed for `risk` > 0. Its costs decide for the rows that must
                not follow the clock.
            monitor: of unverified tokens, one for each row; None begins at the laxest level.
            acceptance: see `AcceptanceModel.to_dict`; what greedy rows that are verified begin
                with, from calls before. None, and for all other rows, it is the profile's.

        Raises:
            ConfigError: `risk` > 0 without a profile.
        """
        if config.risk > 0 and profile is None:
            raise ConfigError(
                f"risk: got {config.risk} without a profile, expected one that says which tokens "
                "can be trusted. Make one with `hybrid calibrate`, or use risk=0."
            )
        self.config, self.profile, self.num_slots = config, profile, config.group_size
        most = config.num_draft_tokens + 1 if Mode.ONE_PASS in config.modes else 1
        self.max_points = most if config.carrying_modes else 0
        if config.risk > 0 and profile is not None and monitor is None:
            levels = len(profile.thresholds)
            monitor = RiskMonitor.start(config.risk, levels, delta=profile.delta)
        self.monitor = monitor if config.risk > 0 else None
        if config.cost == "forwards":
            first = nominal = CostModel.forwards()
        else:
            stored = None if profile is None else profile.costs
            nominal = (
                CostModel.guess(frozen=True)
                if stored is None
                else CostModel.from_dict(stored, frozen=True)
            )
            first = costs or CostModel.guess()
        self._nominal, self.first_costs = nominal, first.to_dict()
        self._own_counts = None if profile is None else profile.acceptance
        self._shared_counts = self._own_counts if acceptance is None else acceptance
        self._modes = (Mode.SPECULATIVE, *config.carrying_modes)
        self.explanations: tuple[Explanation, ...] = ()
        self._num_seen = 0
        self._forget()

    @property
    def costs(self) -> CostModel | None:
        """The costs as the clock has corrected them; None before the first greedy step."""
        return None if self._shared is None else self._shared.costs

    @property
    def acceptance(self) -> dict[str, Any] | None:
        """What greedy rows that are verified taught of acceptance; None before the first step."""
        return None if self._shared is None else self._shared.acceptance.to_dict()

    def plan(
        self, rows: Sequence[SequenceState], history: Sequence[StepRecord]
    ) -> tuple[Plan, ...]:
        """Return what is to be drafted for each row."""
        if len(history) < self._num_seen:
            self._forget()  # another call
        self._num_seen = len(history)
        plans: dict[int, Plan] = {}
        explanations = []
        for group in self._groups(rows):
            memory = self._memory(group, len(rows), history)
            found, values = self._plan_group(memory, group)
            plans |= zip((row.row for row in group), found, strict=True)
            explanations.append(Explanation(tuple(row.row for row in group), values))
        self.explanations = tuple(explanations)
        return tuple(plans[row.row] for row in rows)

    def judge(
        self,
        rows: Sequence[SequenceState],
        proposal: Proposal,
        history: Sequence[StepRecord],
    ) -> tuple[Route, ...]:
        """Return what each row makes of its proposal."""
        firsts = proposal.first_slot or (0,) * len(rows)
        sure, known = None, proposal.confidence
        if known is not None and self._looks(rows, proposal.num_tokens, history):
            sure = read({"confidence": known})["confidence"]
        drafts = [
            Draft(n, first if n else 0, () if sure is None else tuple(sure[b][:n]))
            for b, (n, first) in enumerate(zip(proposal.num_tokens, firsts, strict=True))
        ]
        drafting = proposal.num_drafting if proposal.num_forwards else 0
        return self.route(rows, drafts, drafting, history)

    def route(
        self,
        rows: Sequence[SequenceState],
        drafts: Sequence[Draft],
        num_drafting: int,
        history: Sequence[StepRecord],
    ) -> tuple[Route, ...]:
        """Return what `judge` does, from plain numbers.

        Args:
            rows: the active rows.
            drafts: of each.
            num_drafting: rows for which a draft pass ran.
            history: records so far.
        """
        own = dict(zip((row.row for row in rows), drafts, strict=True))
        routes: dict[int, Route] = {}
        by_rows = {explanation.rows: explanation for explanation in self.explanations}
        for group in self._groups(rows):
            memory = self._memory(group, len(rows), history)
            key = tuple(row.row for row in group)
            explanation = by_rows.setdefault(key, Explanation(key, {}))
            explanation.worth = memory.worth
            explanation.has_looked = memory.looks or not any(own[row].num_tokens for row in key)
            if self._is_own(group[0]):
                found = [self._route_own(memory, group[0], own[key[0]], explanation)]
            else:
                some = [own[row] for row in key]
                found = self._route_group(
                    memory, group, some, StepShape(len(rows), drafting=num_drafting), explanation
                )
            routes |= zip(key, found, strict=True)
        self.explanations = tuple(by_rows.values())
        return tuple(routes[row.row] for row in rows)

    def _forget(self) -> None:
        self._shared: Memory | None = None
        self._memories: dict[int, Memory] = {}
        self._num_seen = 0

    def _is_own(self, row: SequenceState) -> bool:
        return self.config.risk > 0 or not row.sampling.is_greedy

    def _looks(
        self, rows: Sequence[SequenceState], counts: Sequence[int], history: Sequence[StepRecord]
    ) -> bool:
        """Whether rows that have so many tokens want to know how sure these are."""
        drafted = {row.row for row, count in zip(rows, counts, strict=True) if count}
        return any(
            self._memory(group, len(rows), history).looks
            for group in self._groups(rows)
            if drafted.intersection(row.row for row in group)
        )

    def _groups(self, rows: Sequence[SequenceState]) -> list[list[SequenceState]]:
        """Return the rows that are decided together."""
        groups = [[row] for row in rows if self._is_own(row)]
        shared = [row for row in rows if not self._is_own(row)]
        return [*groups, shared] if shared else groups

    def _memory(
        self, group: Sequence[SequenceState], batch: int, history: Sequence[StepRecord]
    ) -> Memory:
        if self._is_own(group[0]):
            index = group[0].row
            memory = self._memories.get(index)
            if memory is None:
                memory = self._memories[index] = Memory(
                    self.config,
                    self._nominal,
                    self._own_counts,
                    self.profile,
                    self.monitor,
                    only=index,
                )
        else:
            if self._shared is None:
                decoded = (len(r.rows) for r in history if r.mode in ROUTED)
                costs = CostModel.from_dict(self.first_costs)
                self._shared = Memory(
                    self.config, costs, self._shared_counts, batch=next(decoded, batch)
                )
            memory = self._shared
        memory.fold(history)
        return memory

    def _plan_group(
        self, memory: Memory, rows: Sequence[SequenceState]
    ) -> tuple[list[Plan], dict[str, float]]:
        values, count = memory.values, self.config.num_draft_tokens
        none = Plan(Mode.AR, 0, may_draft=False, may_reuse=False)
        is_own = self._is_own(rows[0])
        if not is_own and (memory.trial == AR or all(_num_left(row) <= 1 for row in rows)):
            return [none] * len(rows), {}
        reuse = {}  # rows that have slots -> the step that these promise
        for row in rows:
            last = memory.last.get(row.row)
            if last is not None and last.num_slots:
                slots = min(last.num_slots, count)
                reuse[row.row] = memory.reuse(last.next_slot, slots)
        num_bare = len(rows) - len(reuse)
        without = max(values[AR], values.get(CARRIED, values[AR]))
        held = sum(option.value for option in reuse.values())
        choices = {NO_PASS: held + num_bare * without}
        if is_own and num_bare and FRESH in values and without <= values[AR]:
            choices = {}  # nothing is ever tried for such a row, so it drafts or carries
        if FRESH in values:
            # A pass for some rows costs less than the share that the others would have borne.
            fresh, ms, batch = values[FRESH], memory.costs.ms, len(rows)
            if num_bare:
                share = ms(StepShape(batch, drafting=batch)) - ms(StepShape(batch))
                some = ms(StepShape(batch, drafting=num_bare)) - ms(StepShape(batch))
                spared = memory.rate(batch) * (share * num_bare / batch - some)
                choices[DRAFT] = held + num_bare * fresh + (spared if reuse else 0.0)
            if reuse:
                choices[DRAFT_AFRESH] = len(rows) * fresh
        chosen = self._stay(memory, rows, choices) if choices else DRAFT
        if memory.trial == FRESH:
            chosen = DRAFT if num_bare else DRAFT_AFRESH
        draft = Plan(Mode.SPECULATIVE, count)
        if chosen == DRAFT:
            return [draft] * len(rows), choices
        if chosen == DRAFT_AFRESH:
            return [Plan(Mode.SPECULATIVE, count, may_reuse=False)] * len(rows), choices
        from_slots = draft if is_own else Plan(Mode.SPECULATIVE, count, may_draft=False)
        is_trying = is_own or memory.is_trying(CARRIED)
        plans = [
            from_slots
            if row.row in reuse and (is_trying or reuse[row.row].num_draft_tokens)
            else none
            for row in rows
        ]
        return plans, choices

    def _stay(
        self, memory: Memory, rows: Sequence[SequenceState], choices: dict[str, float]
    ) -> str:
        """Return the best choice; what the last step did is kept if it is nearly as good."""
        steps = [memory.last[row.row] for row in rows if row.row in memory.last]
        has_drafted = any(step.first_slot == 1 and step.num_proposed for step in steps)
        bonus = memory.margin() * len(rows)

        def value(name: str) -> float:
            return choices[name] + bonus * (has_drafted == (name != NO_PASS))

        return max(choices, key=value)

    def _route_group(
        self,
        memory: Memory,
        rows: Sequence[SequenceState],
        drafts: Sequence[Draft],
        shape: StepShape,
        explanation: Explanation,
    ) -> list[Route]:
        odds = [self._odds(memory, row, draft) for row, draft in zip(rows, drafts, strict=True)]
        modes = self._modes if max(map(_num_left, rows)) > 2 else self._modes[:1]
        explanation.trial = trial = memory.trial
        is_carried = any(draft.first_slot > 1 for draft in drafts)
        is_trial = trial == FRESH or (is_carried and memory.is_trying(CARRIED))
        prices = memory.prices(shape.rows, shape.drafting)
        explanation.rate = prices.rate
        options = best_options(odds, prices, modes, least=int(is_trial))
        chosen = best_of(options)
        if trial == AR:
            chosen = options[0]
        elif trial == CARRIED and len(modes) > 1:
            chosen = options[-1]
        explanation.options, explanation.chosen = options, chosen
        return [chosen.route(len(own)) for own in odds]

    def _route_own(
        self, memory: Memory, row: SequenceState, draft: Draft, explanation: Explanation
    ) -> Route:
        odds = self._odds(memory, row, draft)
        typical = memory.acceptance.usual(draft.first_slot, len(odds))
        sure, monitor, profile = 0, memory.monitor, self.profile
        if monitor is not None and profile is not None and Mode.DIFFUSION_ONLY in self.config.modes:
            trusted = profile.num_trusted(draft.first_slot, draft.confidences, monitor.level)
            sure = min(trusted, monitor.num_allowed, len(odds))
            explanation.level, explanation.num_trusted = monitor.level, trusted
            if monitor.level is not None:
                explanation.threshold = profile.thresholds[monitor.level].threshold
        odds[:sure] = [1.0] * sure
        prices = memory.prices(1, int(draft.first_slot == 1))
        explanation.rate = prices.rate
        modes = self._modes if _num_left(row) > 2 else self._modes[:1]
        options = cut_in_order(odds, typical, prices, modes, sure)
        chosen = best_of(options)
        explanation.options, explanation.chosen = options, chosen
        return chosen.route(len(odds), sure)

    def _odds(self, memory: Memory, row: SequenceState, draft: Draft) -> list[float]:
        """Return the odds of the tokens that the row could still commit before its last one."""
        count = min(draft.num_tokens, _num_left(row) - 1)
        if not memory.looks:
            return memory.acceptance.usual(draft.first_slot, count)
        sure = draft.confidences or (math.nan,) * count
        return memory.acceptance.known(draft.first_slot, sure[:count])

    def monitor_after(self, monitor: RiskMonitor, history: Sequence[StepRecord]) -> RiskMonitor:
        """Return a monitor once it has seen all rows of a call, one step after the other."""
        assert self.profile is not None
        for record in history:
            for row in record.rows:
                monitor = watched(monitor, self.profile, row)
        return monitor

    def header(self) -> dict[str, Any]:
        """Return what the constructor was given, as JSON types."""
        return {
            "config": self.config.model_dump(mode="json"),
            "costs": self.first_costs,
            "profile": None if self.profile is None else self.profile.model_dump(mode="json"),
            "monitor": None if self.monitor is None else self.monitor.model_dump(mode="json"),
            "acceptance": self._shared_counts,
        }

    @classmethod
    def from_header(cls, data: Mapping[str, Any]) -> HybridRouter:
        """Return the router that `header` describes, before the first step.

        Raises:
            ConfigError: it describes none.
        """
        try:
            profile, monitor = data["profile"], data["monitor"]
            return cls(
                RouterConfig(**data["config"]),
                CostModel.from_dict(data["costs"]),
                None if profile is None else Profile(**profile),
                None if monitor is None else RiskMonitor(**monitor),
                data["acceptance"],
            )
        except (KeyError, TypeError) as error:
            raise ConfigError(f"router: got no description of a router ({error!r}).") from error


def _num_left(row: SequenceState) -> int:
    """Return how many tokens the row may still generate."""
    return row.sampling.max_new_tokens - row.num_new_tokens
