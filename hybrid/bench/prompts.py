"""The prompts of `hybrid bench`: twenty chat questions of many kinds, or a file of one's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.prompt_files import prompt_ids, prompt_rows, read_bytes
from hybrid.prompts import to_token_ids

PROMPTS = (
    "Why is the sky blue?",
    "Write a haiku about a lighthouse in winter.",
    "Explain what a hash table is to someone who has never programmed.",
    "List the planets of the solar system in order, one per line.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train leaves at 14:20 and arrives at 17:05. How long is the journey?",
    "Translate into French: The library closes at six o'clock.",
    "Summarise in one sentence: The committee met twice, chose a chair and agreed on a budget.",
    "Give me a recipe for tomato soup with quantities.",
    "What is the difference between weather and climate?",
    "Write a polite email asking a landlord to repair a broken heater.",
    "Tell a short story about a fox who learns to read.",
    "Name three causes of the First World War.",
    "Rewrite this sentence in the passive voice: The gardener planted forty tulips.",
    'Return a JSON object with the keys "name", "age" and "city" for an invented person.',
    "What are the advantages and disadvantages of remote work?",
    "Count from one to thirty in words.",
    "How does a refrigerator keep food cold?",
    "Write an SQL query that finds the five customers with the most orders.",
    "Give five tips for learning a new language.",
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a benchmark.

    Attributes:
        content: text, chat messages or token ids, or the fields of a line, which may hold several
            of them.
        category: what kind of request it is; None when nobody says.
    """

    content: Any
    category: str | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts of a file, as `hybrid data generate` reads it; repeated ones stay.

    Raises:
        ConfigError: the file cannot be read, is empty, or has a bad line.
    """
    rows = [row for _, row in prompt_rows(read_bytes(path, "prompts"), path.name)]
    named = [row.get("category") for row in rows]
    categories = [None if category is None else str(category) for category in named]
    return [Prompt(row, category) for row, category in zip(rows, categories, strict=True)]


def encode_prompts(prompts: Sequence[Any], decoder: Any) -> list[list[int]]:
    """Return the token ids of each prompt; text becomes a chat message where the model chats.

    Raises:
        ConfigError: a malformed prompt.
    """
    tokenizer, vocab_size, encoded = decoder.tokenizer, decoder.backbone.vocab_size, []
    for index, prompt in enumerate(prompts):
        where = f"prompt {index}"
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        if isinstance(prompt, Mapping):
            encoded.append(prompt_ids(prompt, tokenizer, vocab_size, where))
        else:
            encoded.append(to_token_ids(prompt, tokenizer, vocab_size, where))
    return encoded
