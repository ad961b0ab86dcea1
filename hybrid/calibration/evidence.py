"""What decoding a prompt shows: how much was committed unverified, and how right drafts are.

Evidence is kept in a file as it comes in, a prompt a line, so an interrupted calibration goes on
where it stopped. Next: hybrid/calibration/calibrate.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from hybrid.decoder import HybridDecoder
from hybrid.errors import CheckpointError, ConfigError
from hybrid.files import replacing
from hybrid.params import SamplingParams
from hybrid.router.acceptance import confidence_of, outcomes, slot_of
from hybrid.strategy import Strategy
from hybrid.types import RowStep


@dataclass(frozen=True, slots=True)
class Judged:
    """A drafted token and what the target said of it.

    Attributes:
        first_slot: which slot its draft began with; 0 for a copied one.
        index: of the token in the draft.
        confidence: the largest probability of the slot; NaN for a copied token.
        disagreement: probability with which the target rejects the token, 0 or 1 when greedy.
    """

    first_slot: int
    index: int
    confidence: float
    disagreement: float

    @property
    def slot(self) -> int:
        """Which slot the token came from, 1 for the first; 0 for none that says how sure it is."""
        return slot_of(self.first_slot, self.index) if self.confidence == self.confidence else 0


@dataclass(frozen=True, slots=True)
class PromptEvidence:
    """What decoding one prompt showed.

    Attributes:
        num_tokens: committed by decode steps.
        num_forwards: passes of these.
        num_unverified: tokens that were committed whatever the target said.
        disagreement: how many of these it would have rejected; a sum of probabilities.
        judged: drafted tokens up to the first rejection of each step.
    """

    num_tokens: int
    num_forwards: int
    num_unverified: int
    disagreement: float
    judged: tuple[Judged, ...]


def watch(
    decoder: HybridDecoder, prompt: Any, params: SamplingParams, strategy: Strategy
) -> PromptEvidence:
    """Decode a prompt and return what it showed."""
    judged: list[Judged] = []
    stats = None
    for event in decoder.stream(prompt, params, strategy=strategy):
        for row in event.record.rows:
            judged.extend(_judged(row))
        if event.result is not None:
            stats = event.result.stats
    assert stats is not None
    return PromptEvidence(
        num_tokens=stats.num_new_tokens - 1,
        num_forwards=stats.num_forwards - stats.num_prefill_forwards,
        num_unverified=stats.num_unverified,
        disagreement=stats.num_unverified_disagreeing,
        judged=tuple(judged),
    )


def _judged(row: RowStep) -> Iterator[Judged]:
    for i, agreement in enumerate(outcomes(row)):
        yield Judged(row.first_slot, i, confidence_of(row, i), 1 - agreement)


class EvidenceFile:
    """Evidence of earlier calls under the same conditions, and of this one as it comes in."""

    def __init__(self, path: Path, conditions: Mapping[str, Any]) -> None:
        """Open the file; what it holds under other conditions is refused.

        Args:
            path: JSON lines; it may not exist yet.
            conditions: everything that the evidence depends on.

        Raises:
            ConfigError: it was made under other conditions, or is no evidence.
            CheckpointError: it cannot be read or written.
        """
        self._path, self._known = path, dict[tuple[str, int], PromptEvidence]()
        self._costs: Any = None
        head = json.dumps(dict(conditions), sort_keys=True)
        try:
            text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read: {error}. Give another --output."
            ) from error
        # What an interruption cut short ends in no newline. It is not continued, but begun anew.
        *lines, torn = text.split("\n")
        if lines[:1] != [head] and (lines or not head.startswith(torn)):
            raise ConfigError(
                f"{path} holds evidence of another calibration (other prompts, model or settings). "
                "Delete it, or give another --output."
            )
        for number, line in enumerate(lines[1:], start=2):
            self._read(line, number)
        if torn or not lines:
            with replacing(path) as part:
                part.write_text("\n".join(lines or [head]) + "\n", encoding="utf-8")

    def keep_costs(self, costs: Any) -> Any:
        """Return the costs of the first call; those that are given if this is the first."""
        if self._costs is None:
            self._costs = costs
            self._append({"costs": costs})
        return self._costs

    def find(self, run: str, index: int) -> PromptEvidence | None:
        """Return what is known of a prompt in a run."""
        return self._known.get((run, index))

    def add(self, run: str, index: int, evidence: PromptEvidence) -> None:
        """Keep what a prompt has shown."""
        self._known[run, index] = evidence
        row = {"run": run, "index": index, **asdict(evidence)}
        row["judged"] = [list(astuple(token)) for token in evidence.judged]
        self._append(row)

    def _append(self, row: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _read(self, line: str, number: int) -> None:
        try:
            row = json.loads(line)
            if "costs" in row:
                self._costs = row["costs"]
                return
            key = str(row.pop("run")), int(row.pop("index"))
            row["judged"] = tuple(Judged(*judged) for judged in row["judged"])
            self._known[key] = PromptEvidence(**row)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{self._path} line {number}: not evidence: {error}.") from error


def collect(
    decoder: HybridDecoder,
    prompts: Sequence[tuple[int, Any]],
    params: SamplingParams,
    strategy: Strategy,
    run: str,
    file: EvidenceFile,
) -> Iterator[PromptEvidence]:
    """Return the evidence of each prompt, from the file where it has been seen.

    Args:
        decoder: the model.
        prompts: (index, prompt).
        params: sampling and length.
        strategy: how to decode.
        run: name of the strategy in the file.
        file: keeps it.
    """
    for index, prompt in prompts:
        evidence = file.find(run, index)
        if evidence is None:
            evidence = watch(decoder, prompt, params, strategy)
            file.add(run, index, evidence)
        yield evidence
