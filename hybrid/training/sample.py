"""Let the target write prompts: it continues the user's turn of its own chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated

from pydantic import Field

from hybrid.config import Config
from hybrid.decoder import HybridDecoder
from hybrid.errors import CheckpointError, ConfigError
from hybrid.models.tokenizer import Tokenizer
from hybrid.params import SamplingParams
from hybrid.training.batches import decode_in_order
from hybrid.training.config import Positive
from hybrid.training.generate import Load, Report, only_run_to
from hybrid.training.recipe import stream
from hybrid.training.turns import UserTurn, user_turn
from hybrid.types import SequenceState

_MIN_CHARACTERS = 8
_TRIES_PER_PROMPT = 20


class SampleConfig(Config):
    """How prompts are sampled.

    Attributes:
        output: JSONL to write; it must not exist.
        num_prompts: how many different ones.
        starts: beginnings that take turns; "" leaves the topic to the model.
        max_new_tokens: longer turns are dropped.
        temperature: see `SamplingParams`.
        top_p: see `SamplingParams`.
        seed: same seed, same prompts.
        batch: rows decoded together.
    """

    output: Path
    num_prompts: Positive
    starts: tuple[str, ...] = ("",)
    max_new_tokens: Positive = 96
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.9
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    batch: Positive = 32


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a run did: how many prompts it kept of how many turns it tried."""

    output: Path
    num_prompts: int
    num_tried: int


def sample_prompts(config: SampleConfig, load: Load, report: Report = lambda *_: None) -> Sampled:
    """Write prompts for `hybrid data generate`, each with its start as `category`.

    A turn is kept when it ends by itself, says something, and was not said before.

    Args:
        config: how many, from what.
        load: returns the target.
        report: called with (prompts kept, prompts wanted, tokens sampled) before the first turn
            and after each.

    Raises:
        ConfigError: the output exists or another run writes it, the model has no chat template, a
            turn does not fit the context, or none was usable.
        CapacityError: the batch does not fit the memory.
        CheckpointError: the output cannot be written.
    """
    with only_run_to(config.output):
        return _sample(config, load, report)


def _sample(config: SampleConfig, load: Load, report: Report) -> Sampled:
    if config.output.exists() and config.output.stat().st_size > 0:
        raise ConfigError(f"output: {config.output} exists. Give another one, or remove it.")
    decoder = load()
    if decoder.tokenizer is None:
        raise ConfigError(f"model: {decoder.model_name} has no tokenizer, prompts are text.")
    turn = user_turn(decoder.tokenizer)
    starts = {start: _start_ids(start, turn, decoder.tokenizer) for start in config.starts}
    turns = _decode(decoder, config, starts, turn)
    kept: set[str] = set()
    num_tried = num_tokens = 0
    try:
        with config.output.open("w", encoding="utf-8") as file:
            report(0, config.num_prompts, 0)
            for start, state in zip(cycle(config.starts), turns, strict=False):
                num_tried += 1
                num_tokens += state.num_new_tokens
                text = _text(state, turn, decoder.tokenizer)
                if text is not None and text not in kept:
                    kept.add(text)
                    file.write(json.dumps({"prompt": text, "category": start or "open"}) + "\n")
                    file.flush()
                report(len(kept), config.num_prompts, num_tokens)
                if len(kept) == config.num_prompts:
                    break
    except OSError as error:
        raise CheckpointError(f"{config.output} cannot be written: {error}.") from error
    if not kept:
        config.output.unlink()
        raise ConfigError(
            f"model: {decoder.model_name} ended none of {num_tried} user turns within "
            f"{config.max_new_tokens} tokens. Give prompts of your own."
        )
    return Sampled(config.output, len(kept), num_tried)


def _start_ids(start: str, turn: UserTurn, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a user's turn that begins with `start` and has not ended."""
    if not start.strip():
        return list(turn.start)
    ids = tokenizer.chat([{"role": "user", "content": start}])
    if tuple(ids[-len(turn.end) :]) != turn.end:
        raise ConfigError(f"start: the model's chat template does not keep {start!r} as it is.")
    return ids[: -len(turn.end)]


def _decode(
    decoder: HybridDecoder, config: SampleConfig, starts: dict[str, list[int]], turn: UserTurn
) -> Iterator[SequenceState]:
    params = SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        max_new_tokens=config.max_new_tokens,
        stop_token_ids=(turn.end[0],),
    )
    longest = max(map(len, starts.values())) + config.max_new_tokens
    if longest > decoder.backbone.max_seq_len:
        raise ConfigError(
            f"max_new_tokens: got {config.max_new_tokens}, which makes turns of {longest} tokens, "
            f"expected at most {decoder.backbone.max_seq_len} (the model's context)."
        )
    most = _TRIES_PER_PROMPT * config.num_prompts
    requests = (
        SequenceState(0, list(starts[s]), len(starts[s]), params, stream(config.seed, 1, place))
        for place, s in enumerate(islice(cycle(config.starts), most))
    )
    batch = min(config.batch, most)
    return decode_in_order(decoder, requests, batch=batch, max_seq_len=longest, is_greedy=False)


def _text(state: SequenceState, turn: UserTurn, tokenizer: Tokenizer) -> str | None:
    """Return what the user says; None when it is cut, too short or holds special tokens."""
    if state.tokens[-1] != turn.end[0]:
        return None
    ids = state.tokens[:-1]
    if tokenizer.decode(ids[len(turn.start) :]) != tokenizer.decode(
        ids[len(turn.start) :], skip_special_tokens=False
    ):
        return None
    # Behind what stands before it: some tokenizers drop the space of a first token.
    text = tokenizer.decode(ids)[len(tokenizer.decode(turn.start)) :].strip()
    return text if len(text) >= _MIN_CHARACTERS and "\ufffd" not in text else None
