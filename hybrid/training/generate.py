"""Let the target answer prompts: the data that its drafter is trained on.

Resumable: answers stand in the order of the prompts, and each depends on its prompt, the settings
and its place in the file alone, up to rounding where a row's bits depend on the rows beside it.
Next: hybrid/training/batches.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import Field

from hybrid.config import Config
from hybrid.decoder import HybridDecoder
from hybrid.errors import CapacityError, CheckpointError, ConfigError
from hybrid.files import locked, write_json
from hybrid.params import SamplingParams
from hybrid.prompt_files import numbered_lines, parse, prompt_ids, read_bytes
from hybrid.training.batches import decode_in_order
from hybrid.training.config import Positive
from hybrid.training.prompts import Prompt, Prompts, prompt_key
from hybrid.training.recipe import stream
from hybrid.types import SequenceState

Report = Callable[[int, int, int], None]
Load = Callable[[], HybridDecoder]

# A run may go on with another value of these. `limit` gives more answers. `device` and `batch` give
# the same ones in bfloat16 and int4 on a CPU; in float32 and on a GPU they round differently, so
# that a near-tie may fall the other way: another answer, and still the target's own.
_FREE = {"output", "device", "batch", "limit"}


class GenerateConfig(Config):
    """How prompts are answered.

    Attributes:
        output: JSONL to write; `settings_path` stands beside it.
        model: the target, as `HybridDecoder.from_pretrained` takes it.
        dtype: its precision. The default is what training computes the target's states in, unless
            it is told to compute in float32.
        device: where to run.
        max_new_tokens: of one answer.
        temperature: 0 is greedy, which is what a drafter for greedy decoding should learn.
        top_p: see `SamplingParams`.
        seed: of temperatures above 0.
        batch: rows decoded together.
        limit: answer the first prompts only; raise it to go on.
    """

    output: Path
    model: str = "default"
    dtype: str = "bfloat16"
    device: str = "auto"
    max_new_tokens: Positive = 192
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    batch: Positive = 32
    limit: Positive | None = None

    @property
    def sampling(self) -> SamplingParams:
        """The parameters of one answer; its random stream is set apart."""
        return SamplingParams(
            temperature=self.temperature, top_p=self.top_p, max_new_tokens=self.max_new_tokens
        )


@dataclass(frozen=True, slots=True)
class Generated:
    """What a run did.

    Attributes:
        output: the file.
        num_prompts: distinct prompts asked for.
        num_resumed: of those, how many an earlier run had dealt with.
        num_answers: lines that this run added.
        num_empty: prompts that the target answered with nothing; they have no line.
        num_tokens: response tokens that this run added.
        seconds: of this run, loading included.
    """

    output: Path
    num_prompts: int
    num_resumed: int
    num_answers: int = 0
    num_empty: int = 0
    num_tokens: int = 0
    seconds: float = 0.0


def settings_path(output: Path) -> Path:
    """Return where the settings of `output` are kept."""
    return output.with_name(output.name + ".json")


def made_by(output: Path) -> str | None:
    """Return the model whose answers `output` holds; None when this command did not write it."""
    model = (_known_settings(output) or {}).get("model")
    return model if isinstance(model, str) else None


def generate(
    prompts: Prompts, config: GenerateConfig, load: Load, report: Report = lambda *_: None
) -> Generated:
    """Answer all prompts that have no answer yet, appending to `config.output`.

    A line holds the prompt's own fields, ids `p` and `r`, and `finish_reason`. An answer that ended
    by itself ("stop") ends with the EOS id, one that was cut ("length") does not.

    Args:
        prompts: what to answer.
        config: how.
        load: returns the target; not called when nothing is left to do.
        report: called with (prompts dealt with, prompts, tokens of this run) before the first
            answer and after each.

    Raises:
        ConfigError: a bad prompt, `output` holds something else, or another run writes it.
        CapacityError: a prompt that does not fit the context, or a batch that does not fit memory.
        CheckpointError: the output cannot be written.
    """
    with only_run_to(config.output):
        return _generate(prompts, config, load, report)


def only_run_to(output: Path) -> AbstractContextManager[None]:
    """Keep other runs from writing a file until the block ends; its folder is created.

    Raises:
        ConfigError: another run writes it.
        CheckpointError: the folder cannot be written.
    """
    busy = f"another run writes {output}. Wait for it, or give another output."
    return locked(output.with_name(f".{output.name}.lock"), output, busy)


def _generate(prompts: Prompts, config: GenerateConfig, load: Load, report: Report) -> Generated:
    started = time.perf_counter()
    asked, todo = prompts.items[: config.limit], remaining(prompts, config)
    num_done = num_resumed = len(asked) - len(todo)
    num_answers = num_tokens = 0
    if todo:
        decoder = load()
        encoded = _encode(todo, decoder, config.max_new_tokens)
        states = decode_in_order(
            decoder,
            _requests(encoded, config, first=num_resumed),
            batch=min(config.batch, len(todo)),
            max_seq_len=max(map(len, encoded)) + config.max_new_tokens,
            is_greedy=config.temperature == 0,
        )
        if num_resumed == 0:
            write_json(settings_path(config.output), _settings(prompts, config))
        report(num_done, len(asked), 0)
        with _appending(config.output) as file:
            for prompt, state in zip(todo, states, strict=True):
                num_done += 1
                if state.num_new_tokens > 1:  # EOS alone is no answer
                    file.write(_line(prompt, state))
                    file.flush()
                    num_answers += 1
                    num_tokens += state.num_new_tokens
                report(num_done, len(asked), num_tokens)
    return Generated(
        output=config.output,
        num_prompts=len(asked),
        num_resumed=num_resumed,
        num_answers=num_answers,
        num_empty=len(todo) - num_answers,
        num_tokens=num_tokens,
        seconds=round(time.perf_counter() - started, 2),
    )


def remaining(prompts: Prompts, config: GenerateConfig) -> Sequence[Prompt]:
    """Return the prompts that `config.output` does not answer yet; changes nothing.

    Raises:
        ConfigError: the file was made from other prompts, with other settings, or its lines do not
            stand in the order of the prompts.
    """
    asked, output = prompts.items[: config.limit], config.output
    content = read_bytes(output) if output.exists() else b""
    if not content:
        return asked
    _require_same(_settings(prompts, config), output)
    index = {prompt.key: i for i, prompt in enumerate(prompts.items)}
    last = -1
    for where, line in numbered_lines(content[: _complete_length(content)], output.name):
        place = index.get(prompt_key(parse(line, where)))
        if place is None:
            raise ConfigError(f"{where}: answers none of the prompts. Give another output.")
        if place <= last:
            raise ConfigError(
                f"{where}: answers {prompts.items[place].where}, expected a prompt behind "
                f"{prompts.items[last].where}, which the line before it answers. What is missing "
                "cannot be told: give another output, or remove it to begin again."
            )
        last = place
    return asked[last + 1 :]


def _complete_length(content: bytes) -> int:
    """Return the length without the line that a killed run left half written."""
    return content.rfind(b"\n") + 1


def _settings(prompts: Prompts, config: GenerateConfig) -> dict[str, Any]:
    return {**config.model_dump(exclude=_FREE), "prompts_sha256": prompts.sha256}


def _known_settings(output: Path) -> dict[str, Any] | None:
    try:
        known = json.loads(settings_path(output).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return known if isinstance(known, dict) else None


def _require_same(settings: dict[str, Any], output: Path) -> None:
    known = _known_settings(output)
    if known is None:
        raise ConfigError(
            f"output: {output} holds lines, but no settings stand in {settings_path(output).name}: "
            "this command did not write them. Give another output."
        )
    different = [name for name, value in settings.items() if known.get(name) != value]
    if different:
        pairs = ", ".join(f"{n} {known.get(n)}, now {settings[n]}" for n in different)
        raise ConfigError(
            f"output: {output} was made with {pairs}. Give another output, or remove it to begin "
            "again."
        )


def _encode(todo: Sequence[Prompt], decoder: HybridDecoder, max_new_tokens: int) -> list[list[int]]:
    """Return all prompts' ids, so that a bad one is refused before hours of work."""
    limit, encoded = decoder.backbone.max_seq_len, []
    for prompt in todo:
        ids = prompt_ids(prompt.row, decoder.tokenizer, decoder.backbone.vocab_size, prompt.where)
        if len(ids) + max_new_tokens > limit:
            raise CapacityError(
                f"{prompt.where}: got {len(ids)} tokens and max_new_tokens {max_new_tokens}, "
                f"expected at most {limit} together (the model's context). Shorten the prompt or "
                "set fewer max_new_tokens."
            )
        encoded.append(ids)
    return encoded


def _requests(
    encoded: Sequence[list[int]], config: GenerateConfig, first: int
) -> Iterator[SequenceState]:
    for place, ids in enumerate(encoded, start=first):
        numbers = stream(config.seed, 0, place)
        yield SequenceState(0, list(ids), len(ids), config.sampling, numbers)


def _line(prompt: Prompt, state: SequenceState) -> bytes:
    answer = {
        "p": state.tokens[: state.num_prompt_tokens],
        "r": state.tokens[state.num_prompt_tokens :],
        "finish_reason": state.finish_reason,
    }
    return (json.dumps({**prompt.row, **answer}) + "\n").encode()


@contextmanager
def _appending(path: Path) -> Iterator[BinaryIO]:
    """Yield the file, opened behind its last complete line."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            file.seek(0)
            file.truncate(_complete_length(file.read()))
            yield file
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error}. The answers in it are kept: free some space or "
            "mend the folder, and run the same command again."
        ) from error
