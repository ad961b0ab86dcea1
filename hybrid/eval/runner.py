"""Measure cells: every question of a task through `HybridDecoder.generate`, one after the other.

Next: hybrid/eval/report.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from hybrid.bench.candidates import SEED
from hybrid.decoder import HybridDecoder
from hybrid.errors import ConfigError, HybridError
from hybrid.eval.cells import Cell, Cells, files_stamp
from hybrid.eval.grid import given, label_of
from hybrid.eval.scorers import score
from hybrid.eval.task import Item, Task
from hybrid.metrics import pooled, total_tokens_per_forward
from hybrid.params import SamplingParams
from hybrid.prompt_files import naming, prompt_ids
from hybrid.strategy import Strategy
from hybrid.types import GenerationResult, Stats

_WARM_UP_STEPS = 4

Progress = Callable[[Mapping[str, Any], int, int], None]


class _Answer(NamedTuple):
    item: Item
    result: GenerationResult
    value: float
    reason: str | None


class Evaluation:
    """A decoder, and the cells that it has finished."""

    def __init__(
        self, decoder: HybridDecoder, cells: Cells, *, allow_unverified: bool = False
    ) -> None:
        """Measure `decoder`; what `cells` has is not measured again."""
        self._decoder, self._cells = decoder, cells
        self._how: dict[str, Any] = {"allow_unverified": allow_unverified}

    def check(self, strategies: Sequence[Strategy], tasks: Sequence[Task]) -> None:
        """Refuse what cannot run, all of it at once, before anything does.

        Raises:
            ConfigError: strategies that the model refuses, or questions that do not fit it.
        """
        longest = [
            max(task.items, key=lambda item: len(self._ids(item)) + item.max_new_tokens)
            for task in tasks
        ]
        problems: dict[str, None] = {}
        for strategy in strategies:
            for item in longest:
                try:
                    # Everything is checked when a stream is made, and nothing has run then.
                    params = _params(item.max_new_tokens)
                    ids = self._ids(item)
                    self._decoder.stream(ids, params, strategy=strategy, **self._how).close()
                except HybridError as error:
                    problems.setdefault(f"{label_of(strategy)}: {error}")
        if problems:
            raise ConfigError("Nothing was run. " + " ".join(problems))

    def cells(
        self,
        strategies: Sequence[Strategy],
        tasks: Sequence[Task],
        progress: Progress | None = None,
    ) -> list[Cell]:
        """Return every strategy on every task.

        Args:
            strategies: each a preset with its parameters.
            tasks: what is asked.
            progress: called with (a finished cell's row, cells done, cells).
        """
        found = []
        for strategy in strategies:
            for task in tasks:
                found.append(self.cell(strategy, task))
                if progress is not None:
                    progress(found[-1].row, len(found), len(strategies) * len(tasks))
        return found

    def cell(self, strategy: Strategy, task: Task) -> Cell:
        """Return one strategy on one task, measured unless it was before."""
        settings = strategy.settings.model_dump(mode="json")
        key = self._cells.key(
            strategy=strategy.name,
            settings=settings,
            files=files_stamp(*_paths(settings)),  # a profile or a second model that is replaced
            task=task.name,
            digest=task.digest,
        )
        known = self._cells.get(key)
        if known is not None:
            return known
        self._warm_up(strategy, task.items[0])
        answers = []
        for item in task.items:
            result = self._generate(strategy, item)
            answers.append(_Answer(item, result, *score(task.kind, item.expected, result)))
        cell = Cell(_row(strategy, task, answers), [_line(answer) for answer in answers])
        self._cells.add(key, cell)
        return cell

    def _generate(self, strategy: Strategy, item: Item) -> GenerationResult:
        with naming(item.where):
            params = _params(item.max_new_tokens)
            result: GenerationResult = self._decoder.generate(
                self._ids(item), params, strategy=strategy, **self._how
            )
        return result

    def _warm_up(self, strategy: Strategy, item: Item) -> None:
        params = _params(item.max_new_tokens)
        events = self._decoder.stream(self._ids(item), params, strategy=strategy, **self._how)
        with closing(events):
            for _ in islice(events, _WARM_UP_STEPS):
                pass

    def _ids(self, item: Item) -> list[int]:
        decoder = self._decoder
        return prompt_ids(item.prompt, decoder.tokenizer, decoder.backbone.vocab_size, item.where)


def _paths(settings: Mapping[str, Any]) -> list[Path]:
    named = [Path(value) for value in settings.values() if isinstance(value, str) and value]
    return [path for path in named if path.exists()]


def _params(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, seed=SEED)


def _row(strategy: Strategy, task: Task, answers: Sequence[_Answer]) -> dict[str, Any]:
    stats = [answer.result.stats for answer in answers]
    numbers = pooled(stats)
    counts = [name for name in Stats.__slots__ if name.startswith("num_")]
    return {
        "strategy": strategy.name,
        "parameters": given(strategy),
        "task": task.name,
        "kind": task.kind,
        "digest": task.digest,
        "num_items": len(answers),
        "accuracy": sum(answer.value for answer in answers) / len(answers),
        "num_right": sum(answer.value == 1 for answer in answers),
        "tokens_per_forward": numbers["tokens_per_forward"],
        "total_tokens_per_forward": total_tokens_per_forward(stats),
        "acceptance_length": numbers["acceptance_length"],
        "tokens_per_second": numbers["tokens_per_second"],
        "latency_ms": 1000 * median(s.seconds for s in stats),
        "ttft_ms": median(s.ttft_ms for s in stats),
        "seconds": sum(s.seconds for s in stats),
        "counts": {name: sum(getattr(s, name) for s in stats) for name in counts},
    }


def _line(answer: _Answer) -> dict[str, Any]:
    return {
        "question": answer.item.where,
        "score": answer.value,
        "reason": answer.reason,
        "text": answer.result.text,
        "tokens": list(answer.result.token_ids),
        "finish_reason": answer.result.finish_reason,
        "seconds": round(answer.result.stats.seconds, 6),
    }
