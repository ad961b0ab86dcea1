"""What is in a file of training data, before hours are spent on it."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybrid.errors import ConfigError
from hybrid.models.tokenizer import Tokenizer
from hybrid.prompt_files import numbered_lines, parse, read_bytes
from hybrid.training.data import Example, check, to_example

PERCENTILES = (0, 10, 50, 90, 99, 100)
COVERAGES = (0.99, 0.998, 0.999)


@dataclass(frozen=True, slots=True)
class Description:
    """Numbers of a data file.

    Attributes:
        num_examples: usable lines.
        num_bad: lines that training refuses.
        first_bad: why, of the first one.
        num_duplicates: examples whose prompt stands in an earlier line.
        num_prompt_tokens: of all examples.
        num_response_tokens: of all examples.
        prompt_lengths: {percentile: tokens}, nearest rank.
        response_lengths: {percentile: tokens}, nearest rank.
        share_ended: of the responses, how many end with an EOS id; None when nothing tells.
        num_distinct: different tokens in the responses.
        coverage: {share of all response tokens: how many of the most frequent tokens cover it}.
            It tells which size a reduced draft vocabulary may have.
        categories: {category: examples}, most frequent first; lines without one are left out.
        samples: prompts and responses, decoded where there is a tokenizer, spread over the file.
    """

    num_examples: int
    num_bad: int
    first_bad: str | None
    num_duplicates: int
    num_prompt_tokens: int
    num_response_tokens: int
    prompt_lengths: dict[int, int]
    response_lengths: dict[int, int]
    share_ended: float | None
    num_distinct: int
    coverage: dict[float, int]
    categories: dict[str, int]
    samples: list[dict[str, str]]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return asdict(self)


def describe(
    path: Path,
    *,
    tokenizer: Tokenizer | None = None,
    vocab_size: int = sys.maxsize,
    max_length: int = sys.maxsize,
    num_samples: int = 0,
) -> Description:
    """Read a file of training data and count.

    Args:
        path: JSONL as `read_examples` takes it.
        tokenizer: of the target; needed for texts and to know its EOS ids.
        vocab_size: larger ids are bad.
        max_length: longer examples are bad.
        num_samples: examples to show.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, or holds no lines.
    """
    rows: list[dict[str, Any]] = []
    examples: list[Example] = []
    errors: list[str] = []
    for where, line in numbered_lines(read_bytes(path), path.name):
        try:
            row = parse(line, where)
            example = to_example(row, where, tokenizer, vocab_size)
            check(example, where, vocab_size, max_length)
        except ConfigError as error:
            errors.append(str(error))
        else:
            rows.append(row)
            examples.append(example)
    if not examples and not errors:
        raise ConfigError(f"data: {path} holds no examples, expected one JSON object per line.")
    frequency = Counter(token for example in examples for token in example.response)
    categories = Counter(str(row["category"]) for row in rows if row.get("category") is not None)
    return Description(
        num_examples=len(examples),
        num_bad=len(errors),
        first_bad=errors[0] if errors else None,
        num_duplicates=len(examples) - len({example.prompt for example in examples}),
        num_prompt_tokens=sum(len(example.prompt) for example in examples),
        num_response_tokens=frequency.total(),
        prompt_lengths=_percentiles([len(example.prompt) for example in examples]),
        response_lengths=_percentiles([len(example.response) for example in examples]),
        share_ended=_share_ended(rows, examples, tokenizer),
        num_distinct=len(frequency),
        coverage={share: _num_covering(frequency, share) for share in COVERAGES},
        categories=dict(categories.most_common()),
        samples=[_sample(example, tokenizer) for example in _spread(examples, num_samples)],
    )


def _percentiles(values: Sequence[int]) -> dict[int, int]:
    ranked = sorted(values)
    ranks = {p: max(math.ceil(p * len(ranked) / 100) - 1, 0) for p in PERCENTILES}
    return {p: ranked[rank] for p, rank in ranks.items()} if ranked else {}


def _num_covering(frequency: Counter[int], share: float) -> int:
    """Return how many of the most frequent tokens make up at least `share` of all."""
    # Rounded first: in floating point, 0.998 of 500 tokens is a little more than 499.
    wanted, covered = math.ceil(round(share * frequency.total(), 6)), 0
    for size, (_, count) in enumerate(frequency.most_common(), start=1):
        covered += count
        if covered >= wanted:
            return size
    return 0


def _share_ended(
    rows: Sequence[dict[str, Any]], examples: Sequence[Example], tokenizer: Tokenizer | None
) -> float | None:
    if tokenizer is not None and tokenizer.eos_token_ids:
        ended = [example.response[-1] in tokenizer.eos_token_ids for example in examples]
    else:
        ended = [row["finish_reason"] == "stop" for row in rows if "finish_reason" in row]
    return sum(ended) / len(ended) if ended else None


def _spread(examples: Sequence[Example], count: int) -> list[Example]:
    count = min(count, len(examples))
    return [examples[i * len(examples) // count] for i in range(count)]


def _sample(example: Example, tokenizer: Tokenizer | None) -> dict[str, str]:
    """Return the texts, special tokens included: whether they are right is what one looks for."""

    def text(ids: Sequence[int]) -> str:
        if tokenizer is None:
            return " ".join(map(str, ids))
        return tokenizer.decode(ids, skip_special_tokens=False)

    return {"prompt": text(example.prompt), "response": text(example.response)}
