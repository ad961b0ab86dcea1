"""Training data: what the target itself answered, one JSON object per line.

`hybrid data generate` writes it (hybrid/training/generate.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.errors import ConfigError
from hybrid.models.tokenizer import Tokenizer
from hybrid.prompt_files import naming, numbered_lines, parse, prompt_ids, read_bytes
from hybrid.training.turns import answer_ids


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation: prompt ids and the target's response ids."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]

    @property
    def tokens(self) -> list[int]:
        """Prompt and response."""
        return [*self.prompt, *self.response]


def read_examples(
    path: Path, *, vocab_size: int, max_length: int, tokenizer: Tokenizer | None = None
) -> list[Example]:
    """Read and check every line.

    Args:
        path: JSONL with `p` and `r` ids, or texts: `prompt` (or chat `messages`) and `response`.
            A response text ends with the EOS id unless `finish_reason` is "length".
        vocab_size: ids must be below it.
        max_length: prompt and response together.
        tokenizer: needed for texts.

    Raises:
        ConfigError: no such file, no examples, or a bad line, named by its number.
    """
    examples = []
    for where, line in numbered_lines(read_bytes(path), path.name):
        example = to_example(parse(line, where), where, tokenizer, vocab_size)
        check(example, where, vocab_size, max_length)
        examples.append(example)
    if not examples:
        raise ConfigError(f"data: {path} holds no examples, expected one JSON object per line.")
    return examples


def data_sha256(path: Path) -> str:
    """Return the SHA-256 of the data file, by which a run recognises it.

    Raises:
        ConfigError: it cannot be read.
    """
    return hashlib.sha256(read_bytes(path)).hexdigest()


def to_example(
    row: dict[str, Any], where: str, tokenizer: Tokenizer | None, vocab_size: int
) -> Example:
    """Return the example of a row, see `read_examples`; its ids are not checked yet.

    Raises:
        ConfigError: fields are missing, texts are empty or malformed.
    """
    if isinstance(row.get("p"), list) and isinstance(row.get("r"), list):
        return Example(tuple(row["p"]), tuple(row["r"]))
    response = row.get("response")
    has_prompt = "prompt" in row or "messages" in row
    if tokenizer is None or not has_prompt or not isinstance(response, str):
        raise ConfigError(
            f"{where}: expected an object with ids 'p' and 'r', or, for a model with a tokenizer, "
            "texts 'prompt' and 'response'."
        )
    if not response.strip():
        raise ConfigError(f"{where}: got an empty response, expected text.")
    is_complete = row.get("finish_reason") != "length"
    with naming(where):
        answer = answer_ids(response, tokenizer, is_complete=is_complete)
    return Example(tuple(prompt_ids(row, tokenizer, vocab_size, where)), tuple(answer))


def check(example: Example, where: str, vocab_size: int, max_length: int) -> None:
    """Refuse what cannot be trained on.

    Raises:
        ConfigError: no prompt, fewer than 2 response tokens, too long, or impossible ids.
    """
    if not example.prompt or len(example.response) < 2:
        raise ConfigError(
            f"{where}: got {len(example.prompt)} prompt and {len(example.response)} response "
            "tokens, expected at least 1 and 2."
        )
    if len(example.tokens) > max_length:
        raise ConfigError(
            f"{where}: got {len(example.tokens)} tokens, expected at most {max_length} "
            "(max_length, or the model's context). Cut the response."
        )
    for token in example.tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ConfigError(
                f"{where}: got {token!r}, expected token ids from 0 to {vocab_size - 1}."
            )


def split_examples(
    examples: Sequence[Example], num_held_out: int
) -> tuple[list[Example], list[Example]]:
    """Return (what is trained on, the last `num_held_out`), which have no prompt in common.

    Data may ask the same twice. A training example whose prompt is held out is dropped, for what
    has been learned by heart measures nothing; copies on one side of the split stay.

    Args:
        examples: all of the file.
        num_held_out: at least 1.

    Raises:
        ConfigError: nothing is left to train on.
    """
    split = len(examples) - num_held_out
    if split < 1:
        raise ConfigError(
            f"data: got {len(examples)} examples, expected more than num_eval_sequences "
            f"({num_held_out})."
        )
    held_out = list(examples[split:])
    prompts = {example.prompt for example in held_out}
    train = [example for example in examples[:split] if example.prompt not in prompts]
    if not train:
        raise ConfigError(
            f"data: all {split} examples before the held-out ones have prompts of theirs, expected "
            "others. Give data with more prompts, or hold out fewer (num_eval_sequences)."
        )
    return train, held_out
