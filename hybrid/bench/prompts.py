"""The prompts of `hybrid bench`: twenty chat questions of many kinds, or a file of one's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.errors import ConfigError
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
        content: text, chat messages or token ids.
        category: what kind of request it is; None when nobody says.
    """

    content: Any
    category: str | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts of a JSON-lines file: token ids from `p`, else text from `prompt`.

    Raises:
        ConfigError: the file cannot be read, is empty, or a line has neither field.
    """
    prompts = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"prompts: {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            content, category = item["p"] if "p" in item else item["prompt"], item.get("category")
            if not isinstance(category, str | None):
                raise TypeError(f"category: got {category!r}")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"prompts: {path}, line {number} is not usable ({error!r}). Expected a JSON object "
                'with "prompt" (text or chat messages) or "p" (token ids), and perhaps "category".'
            ) from error
        prompts.append(Prompt(content, category))
    if not prompts:
        raise ConfigError(f"prompts: {path} is empty, expected one JSON object per line.")
    return prompts


def encode_prompts(prompts: Sequence[Any], decoder: Any) -> list[list[int]]:
    """Return the token ids of each prompt; text becomes a chat message where the model chats.

    Raises:
        ConfigError: a malformed prompt.
    """
    tokenizer, encoded = decoder.tokenizer, []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str) and tokenizer is not None and tokenizer.has_chat_template:
            prompt = [{"role": "user", "content": prompt}]
        where = f"prompt {index}"
        encoded.append(to_token_ids(prompt, tokenizer, decoder.backbone.vocab_size, where))
    return encoded
