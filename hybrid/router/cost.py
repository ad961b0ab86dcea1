"""`CostModel`: milliseconds of a step by its shape, measured at warm-up, corrected while decoding.

Next: hybrid/router/choice.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

from hybrid.errors import ConfigError
from hybrid.types import StepRecord

Knots = tuple[tuple[float, float], ...]

_DRIFT_GAIN = 1 / 8  # of the correction that all shapes share
_FACTOR_WEIGHT = 4  # steps that a shape's own correction is worth at first
_LARGEST_SURPRISE = 1.5  # a step that was interrupted is not evidence of more than this


class StepShape(NamedTuple):
    """What a step runs.

    Attributes:
        rows: of the batch.
        width: tokens per row in the target pass.
        groups: groups of carried slots per row in the target pass.
        drafting: rows for which a draft pass runs before it.
    """

    rows: int
    width: int = 1
    groups: int = 0
    drafting: int = 0


class CostModel:
    """Adds up three rising piecewise linear curves, and corrects the sum by what steps took.

    The curves are those of the target pass over its tokens (rows times width), of carried groups
    over their number (rows times groups), and of the draft pass over its rows. A draft and a group
    have a fixed number of slots.

    Only whole steps are timed: on a GPU a pass returns before it has run. The ratio of a step's
    time to its prediction moves two corrections. One is shared, so that a longer context, which
    slows all shapes down, is not taken for the fault of the mode in use; one belongs to the shape.

    Attributes:
        look_ms: what it costs to look at a draft before the pass that judges it is on its way: the
            device has nothing to do meanwhile. 0 where the host has the draft anyway.
    """

    look_ms = 0.0

    def __init__(
        self, target: Knots, groups: Knots, draft: Knots, *, frozen: bool = False, window: int = 64
    ) -> None:
        """Keep the curves.

        Args:
            target: (tokens, ms) of the target pass, ascending.
            groups: (groups, ms) that they add, ascending.
            draft: (rows, ms) of the draft pass, ascending.
            frozen: never corrected.
            window: steps over which a shape's correction is forgotten.
        """
        self._curves = (target, ((0.0, 0.0), *groups), draft)
        self.frozen, self._window = frozen, window
        self._known: dict[tuple[int, int, int, int], float] = {}
        self._drift, self._is_scaled = 1.0, True
        self._factors: dict[StepShape, tuple[float, int]] = {}

    @classmethod
    def forwards(cls) -> CostModel:
        """Return the model in which every pass costs 1 and carried slots nothing."""
        return cls(((1, 1.0),), (), ((1, 1.0),), frozen=True)

    @classmethod
    def guess(cls, *, frozen: bool = False) -> CostModel:
        """Return what is assumed where nothing was measured; the first step gives the scale.

        A draft enters late, so its pass is cheaper than the target's, and a group cheaper still.
        """
        model = cls(((1, 1.0), (9, 1.4)), ((1, 0.3),), ((1, 0.6), (9, 0.9)), frozen=frozen)
        model._is_scaled = frozen
        return model

    @classmethod
    def fit(cls, measured: Iterable[tuple[StepShape, float]]) -> CostModel:
        """Return the model of steps that were timed.

        Args:
            measured: shapes and milliseconds; several of one shape count as their median. There
                must be one that neither drafts nor carries.

        Raises:
            ConfigError: there is none, or a time is not positive.
        """
        times: dict[StepShape, list[float]] = {}
        for shape, ms in measured:
            if not ms > 0:
                raise ConfigError(f"cost: got {ms} ms for {shape}, expected a positive time.")
            times.setdefault(shape, []).append(ms)
        if not any(not shape.groups and not shape.drafting for shape in times):
            raise ConfigError(
                f"cost: got {list(times)}, expected a step that neither drafts nor carries."
            )
        kinds: tuple[list[tuple[StepShape, float]], ...] = ([], [], [])
        plain, carrying, drafting = kinds
        for shape, several in times.items():
            kind = drafting if shape.drafting else carrying if shape.groups else plain
            kind.append((shape, median(several)))
        target = _rising((shape.rows * shape.width, ms) for shape, ms in plain)
        alone = cls(target, (), ())
        groups = _rising(
            (shape.rows * shape.groups, ms - alone.ms(shape._replace(groups=0)))
            for shape, ms in carrying
        )
        undrafted = cls(target, groups, ())
        draft = _rising(
            (shape.drafting, ms - undrafted.ms(shape._replace(drafting=0)))
            for shape, ms in drafting
        )
        return cls(target, groups, draft)

    def ms(self, shape: StepShape) -> float:
        """Return the milliseconds that a step of this shape is expected to take."""
        return self.of(shape.rows, shape.drafting)(shape.width, shape.groups)

    def of(self, rows: int, drafting: int) -> Callable[[int, int], float]:
        """Return (width, groups) -> milliseconds of a step, good until the next `observe`."""
        known, drift = self._known, self._drift

        def ms(width: int, groups: int) -> float:
            shape = (rows, width, groups, drafting)
            found = known.get(shape)
            if found is None:
                found = known[shape] = self._without_drift(StepShape(*shape))
            return found * drift

        return ms

    def _without_drift(self, shape: StepShape) -> float:
        rows, width, groups, drafting = shape
        target, carried, draft = self._curves
        ms = _at(target, rows * width) + _at(carried, rows * groups)
        ms += _at(draft, drafting) if drafting else 0.0
        return ms * self._factors.get(shape, (1.0, 0))[0]

    def observe(self, record: StepRecord) -> None:
        """Learn from the time of a step."""
        if self.frozen or record.seconds <= 0:
            return
        shape = shape_of(record)
        ratio = 1000 * record.seconds / self.ms(shape)
        if not self._is_scaled:  # nothing was measured
            self._drift, self._is_scaled = ratio, True
            return
        ratio = min(max(ratio, 1 / _LARGEST_SURPRISE), _LARGEST_SURPRISE)
        factor, count = self._factors.get(shape, (1.0, 0))
        gain = max(1 / (count + _FACTOR_WEIGHT), 1 / self._window)
        self._factors[shape] = (factor * ratio**gain, count + 1)
        del self._known[shape]
        self._drift *= ratio**_DRIFT_GAIN

    def to_dict(self) -> dict[str, Any]:
        """Return the model as JSON types."""
        target, groups, draft = self._curves
        return {
            "target": [list(knot) for knot in target],
            "groups": [list(knot) for knot in groups[1:]],
            "draft": [list(knot) for knot in draft],
            "frozen": self.frozen,
            "window": self._window,
            "look_ms": self.look_ms,
            "drift": self._drift,
            "is_scaled": self._is_scaled,
            "factors": [[*shape, *factor] for shape, factor in self._factors.items()],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, frozen: bool | None = None) -> CostModel:
        """Return what `to_dict` gave.

        Args:
            data: the dictionary.
            frozen: overrules what it says.

        Raises:
            ConfigError: it is no cost model.
        """
        try:
            curves = [
                tuple((float(x), float(ms)) for x, ms in data[name])
                for name in ("target", "groups", "draft")
            ]
            is_frozen = bool(data["frozen"]) if frozen is None else frozen
            model = cls(*curves, frozen=is_frozen, window=int(data["window"]))
            model.look_ms = float(data.get("look_ms", 0.0))
            model._drift, model._is_scaled = float(data["drift"]), bool(data["is_scaled"])
            for *shape, factor, count in data["factors"]:
                model._factors[StepShape(*shape)] = (float(factor), int(count))
            model.ms(StepShape(1))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ConfigError(f"cost: got no cost model ({error!r}); measure it again.") from error
        return model


def shape_of(record: StepRecord) -> StepShape:
    """Return what a step ran."""
    groups = max((len(row.points) for row in record.rows), default=0)
    drafting = record.num_drafting if record.num_draft_forwards else 0
    return StepShape(len(record.rows), record.width, groups, drafting)


def warm_up(
    measure: Callable[[StepShape], float],
    rows: int,
    num_draft_tokens: int,
    max_points: int,
    look_ms: float = 0.0,
) -> CostModel:
    """Return the costs on this device, asking for few shapes.

    Args:
        measure: runs a step of a shape, several times if it likes, and returns its milliseconds.
        rows: of the batch.
        num_draft_tokens: K.
        max_points: the most groups that a target pass carries; 0 measures none.
        look_ms: see `CostModel`.

    Raises:
        ConfigError: a time is not positive.
    """
    widths = sorted({1, 2, 1 + num_draft_tokens // 2, 1 + num_draft_tokens})
    shapes = [StepShape(rows, width) for width in widths]
    shapes += [
        StepShape(rows, 1, groups) for groups in sorted({1, 2, max_points}) if groups <= max_points
    ]
    shapes.append(StepShape(rows, 1, 0, rows))
    costs = CostModel.fit([(shape, measure(shape)) for shape in shapes])
    costs.look_ms = look_ms
    return costs


def _rising(points: Iterable[tuple[float, float]]) -> Knots:
    """Return the points in order, each at least as high as those before it and never negative."""
    ordered = sorted(points)
    heights = accumulate((max(ms, 0.0) for _, ms in ordered), max)
    return tuple((float(x), ms) for (x, _), ms in zip(ordered, heights, strict=True))


def _at(knots: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate; beyond an end, go on with the slope there, down to half the first value."""
    if not knots:
        return 0.0
    if len(knots) == 1:
        return knots[0][1]
    last = len(knots) - 2
    index = min(max(bisect_left(knots, (x,)) - 1, 0), last)
    (x0, y0), (x1, y1) = knots[index], knots[index + 1]
    if x1 == x0:
        return max(y0, y1)
    return max(y0 + (y1 - y0) * (x - x0) / (x1 - x0), knots[0][1] / 2)
