"""`AcceptanceModel`: how probably a drafted token is accepted, given that those before it are.

Learned while decoding, from judged tokens alone: a token behind the first rejection says nothing.
Next: hybrid/router/choice.py.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from hybrid.errors import ConfigError
from hybrid.types import RowStep

COPIED, FRESH, CARRIED = "copied", "fresh", "carried"

_EDGES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.97, 0.99)  # of the bins of the confidence
_UNKNOWN = -1  # the bin of tokens that have none
_CELL_WEIGHT = 4.0  # judged tokens that the confidence itself is worth in its cell
# A drafter that nobody has seen is good or useless, seldom in between: a prior worth half a token
# is overruled by the first one that is judged, and recovers with the next that is accepted.
_START, _START_WEIGHT = 0.65, 0.5
_COPY_START = 0.5
_CARRIED_LOSS = 0.9  # of what a fresh slot is accepted with, where no carried one was judged
_GUESS_WEIGHT = 0.5  # judged tokens that one left out is worth
_MOST_START = 32.0  # judged tokens that a count of a profile is worth, so that it can be unlearned


class AcceptanceModel:
    """Beta counts by slot and confidence, and by slot and kind of draft.

    `probability` is for a draft at hand: the counts of its slot and confidence, with the confidence
    itself as a prior, times the ratio of accepted tokens to the confidence in them so far.
    `typical` is for a draft that is only planned: the counts of its kind and slot.
    """

    def __init__(self, window: int = 64) -> None:
        """Begin without counts.

        Args:
            window: judged tokens over which a count is forgotten.
        """
        self._keep = 1 - 1 / window
        self._cells: dict[tuple[int, int], tuple[float, float]] = {}
        self._kinds: dict[tuple[str, int], tuple[float, float]] = {}
        self._trust = (_START * _START_WEIGHT, _START_WEIGHT)  # accepted, confidence

    def probability(self, slot: int, confidence: float) -> float:
        """Return the probability that a token is accepted if those before it are.

        Args:
            slot: of its draft, 0 for a token that comes from none.
            confidence: largest probability of the distribution it was drawn from, or NaN.
        """
        prior = self._prior(confidence)
        accepted, judged = self._cells.get((_bucket(slot), _bin(confidence)), (0.0, 0.0))
        return (_CELL_WEIGHT * prior + accepted) / (_CELL_WEIGHT + judged)

    def typical(self, kind: str, first_slot: int, count: int) -> list[float]:
        """Return the same for the first `count` tokens of a draft whose confidences are not known.

        Args:
            kind: FRESH, CARRIED or COPIED.
            first_slot: which slot the first token is; for copied tokens 1.
            count: how many.
        """
        return [self._typical(_place(kind, first_slot + i, i)) for i in range(count)]

    def usual(self, first_slot: int, count: int) -> list[float]:
        """Return the odds of a draft that nobody has looked at: `typical` ones of its kind."""
        return self.typical(_kind(first_slot), first_slot or 1, count)

    def known(self, first_slot: int, confidences: Sequence[float]) -> list[float]:
        """Return the odds of a draft by the confidence in each of its tokens."""
        return [self.probability(slot_of(first_slot, i), c) for i, c in enumerate(confidences)]

    def observe(self, step: RowStep) -> None:
        """Learn from what a step did to a row."""
        judged = outcomes(step)
        for i, success in enumerate(judged):
            self.learn(step.first_slot, i, confidence_of(step, i), success)
        if len(judged) == step.num_drafted < step.num_proposed:
            # Nobody judged the first token that was left out; what was thought of it counts a bit,
            # or drafts that are never worth feeding would look as good as ever.
            i = step.num_drafted
            slot = slot_of(step.first_slot, i)
            place = _place(_kind(step.first_slot), slot, i)
            chance = _GUESS_WEIGHT * self.probability(slot, confidence_of(step, i))
            self._kinds[place] = self._add(self._kinds.get(place), chance, _GUESS_WEIGHT)

    def learn(self, first_slot: int, index: int, confidence: float, success: float) -> None:
        """Learn from a token that was judged.

        Args:
            first_slot: which slot the draft began with, 0 for a copied one.
            index: of the token in the draft.
            confidence: in it, or NaN.
            success: how far the target agreed, 0 to 1.
        """
        slot = slot_of(first_slot, index)
        cell = (_bucket(slot), _bin(confidence))
        self._cells[cell] = self._add(self._cells.get(cell), success, 1.0)
        place = _place(_kind(first_slot), slot, index)
        self._kinds[place] = self._add(self._kinds.get(place), success, 1.0)
        if confidence == confidence:
            self._trust = self._add(self._trust, success, confidence)

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as JSON types."""
        return {
            "cells": [[*cell, *counts] for cell, counts in sorted(self._cells.items())],
            "kinds": [[*place, *counts] for place, counts in sorted(self._kinds.items())],
            "trust": list(self._trust),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], window: int = 64) -> AcceptanceModel:
        """Return a model that begins with counts, none of them worth more than a few dozen tokens.

        Raises:
            ConfigError: it is no acceptance model.
        """
        model = cls(window)
        try:
            for slot, bin_, *counts in data["cells"]:
                model._cells[int(slot), int(bin_)] = _capped(counts)
            for kind, slot, *counts in data["kinds"]:
                model._kinds[str(kind), int(slot)] = _capped(counts)
            model._trust = _capped(data["trust"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"acceptance: got no counts ({error!r}); calibrate the profile again."
            ) from error
        return model

    def _prior(self, confidence: float) -> float:
        if confidence != confidence:
            return _COPY_START
        accepted, predicted = self._trust
        return min(max(confidence * accepted / predicted, 0.01), 0.99)

    def _typical(self, place: tuple[str, int]) -> float:
        kind, slot = place
        if kind == CARRIED:
            # Its first token follows the target's own, as that of a fresh draft does.
            start = _CARRIED_LOSS * self._typical((FRESH, slot or 1))
        else:
            start = _START if kind == FRESH else _COPY_START
        accepted, judged = self._kinds.get(place, (0.0, 0.0))
        return (_START_WEIGHT * start + accepted) / (_START_WEIGHT + judged)

    def _add(
        self, counts: tuple[float, float] | None, success: float, trial: float
    ) -> tuple[float, float]:
        old, total = counts or (0.0, 0.0)
        return self._keep * old + success, self._keep * total + trial


def outcomes(step: RowStep) -> list[float]:
    """Return for each judged token of a row's draft how far the target agreed, 0 to 1.

    Tokens that were committed unverified are all judged, by the target's rejection probability;
    behind them come those that were accepted, and the one that was rejected.
    """
    agreed = [1 - d for d in step.disagreements]
    agreed += [1.0] * (step.num_accepted - len(agreed))
    return agreed + [0.0] * (step.num_accepted < step.num_drafted)


def _kind(first_slot: int) -> str:
    return COPIED if first_slot == 0 else FRESH if first_slot == 1 else CARRIED


def slot_of(first_slot: int, index: int) -> int:
    """Return the slot of a proposed token; 0, as for its draft, where it comes from none."""
    return first_slot + index if first_slot else 0


def confidence_of(step: RowStep, index: int) -> float:
    """Return the confidence in a proposed token, NaN where the drafter did not say."""
    return step.confidences[index] if index < len(step.confidences) else math.nan


def _place(kind: str, slot: int, i: int) -> tuple[str, int]:
    """Return where the i-th token of a draft is counted: the first carried one by itself, as 0."""
    if kind == CARRIED and i == 0:
        return kind, 0
    return kind, 1 + i if kind == COPIED else slot


def _bucket(slot: int) -> int:
    """Return 0 for no slot, 1, 2, then 3 for 3 and 4, 4 for 5 to 8, and so on."""
    return (slot - 1).bit_length() + 1 if slot else 0


def _bin(confidence: float) -> int:
    return bisect_right(_EDGES, confidence) if confidence == confidence else _UNKNOWN


def _capped(counts: Sequence[float]) -> tuple[float, float]:
    accepted, judged = map(float, counts)
    if not (math.isfinite(judged) and judged > 0 and accepted >= 0):
        raise ValueError(f"counts {accepted} of {judged}")
    share = min(1.0, _MOST_START / judged)
    return accepted * share, judged * share
