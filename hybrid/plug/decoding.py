"""One call of `generate` in our loop: the rows, their tokens to the streamer, and the output.

Transformers has prepared everything: it calls `decode` in the place of its own sampling loop.
Next: hybrid/decode/loop.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode

from hybrid.assembly import Parts
from hybrid.metrics import RowMeter
from hybrid.models.compat import CACHE_NAMES
from hybrid.params import SamplingParams
from hybrid.plug.rows import PluggedRow
from hybrid.strategy import Strategy
from hybrid.streams import RandomStream
from hybrid.types import SequenceState, Stats

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_KNOWN = {"attention_mask", "position_ids", "logits_to_keep", "use_cache", *CACHE_NAMES}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
# These keep a state of their own, which would follow rejected tokens too.
_STATEFUL = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
}


def why_stock(
    batch: int,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    arguments: dict[str, Any],
    max_seq_len: int,
) -> str | None:
    """Return what a call asks for that our loop does not do, None if it does everything.

    Args:
        batch: rows of the call.
        processors: as prepared, as is all that follows.
        criteria: of the whole call.
        config: of the call.
        arguments: for the model's forward.
        max_seq_len: of the backbone.
    """
    mode, mask = config.get_generation_mode(None), arguments.get("attention_mask")
    if mode not in _MODES:
        return f"generation mode {mode.value!r}"
    if not config.use_cache:
        return "use_cache=False"
    if config.cache_implementation is not None:
        return f"cache_implementation={config.cache_implementation!r}"
    if config.return_dict_in_generate:
        outputs = [name for name in _OUTPUTS if getattr(config, name)]
        if outputs:
            return f"{outputs[0]}=True"
    stateful = [type(p).__name__ for p in processors if type(p).__name__ in _STATEFUL]
    if stateful:
        return stateful[0]
    unknown = [
        name for name, value in arguments.items() if value is not None and name not in _KNOWN
    ]
    if unknown:
        return f"the argument {unknown[0]}"
    if mask is not None and not bool(mask[:, -1].all()):
        return "padding on the right"
    if not _positions_follow(mask, arguments.get("position_ids")):
        return "position_ids that do not count the tokens"
    knows_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    if batch > 1 and len(criteria) > 1 and not knows_eos:  # rows would go on past their end
        return "stopping criteria without an end-of-sequence id"
    if config.max_length > max_seq_len:
        return f"max_length {config.max_length} beyond the model's context of {max_seq_len}"
    return None


def decode(
    parts: Parts,
    chosen: Strategy,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    mask: Tensor | None,
    streamer: Any,
) -> tuple[Tensor | GenerateDecoderOnlyOutput, tuple[Stats, ...]]:
    """Decode a batch.

    Args:
        parts: what drafts and verifies.
        chosen: the strategy.
        input_ids: [B, S] the prompts, padded on the left.
        processors: of the call.
        criteria: of the call.
        config: of the call.
        mask: [B, S], 0 for padding; None without any.
        streamer: or None; it gets the prompt, then one token of each row at a time.

    Returns:
        What transformers' own loop returns, and the numbers of each row.

    Raises:
        ConfigError: the strategy cannot do what is asked for.
        CapacityError: the cache does not fit the memory.
    """
    batch = input_ids.shape[0]
    params = _params(config, config.max_length - input_ids.shape[1])
    rules = [
        PluggedRow(ids, index, batch, processors, criteria, params)
        for index, ids in enumerate(input_ids)
    ]
    rows = [_row(index, input_ids[index], mask, params) for index in range(batch)]
    for row, rule in zip(rows, rules, strict=True):
        # A sampled row without a processor is sampled from the logits as they are.
        row.transform = rule.transform if processors or config.do_sample else None
    engine = parts.engine(chosen, params, rows, rules)
    engine.barred = ()  # transformers bars what a processor bars
    columns = _Columns(streamer, rows, _padding(config))
    meters = [RowMeter(row.row, row.num_prompt_tokens) for row in rows]
    if streamer is not None:
        streamer.put(input_ids.cpu())
    with closing(parts.routing.run(engine, rows, chosen.name, None)) as steps:
        for record in steps:
            for meter in meters:
                meter.add(record)
            columns.put()
    sequences = torch.cat([input_ids, columns.table().to(input_ids)], dim=1)
    stats = tuple(meter.stats() for meter in meters)
    if config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences), stats
    return sequences, stats


class _Columns:
    """The new tokens one column after the other, as transformers' own loop hands them out.

    A row that has ended gives padding; a column waits until every other row has got so far.
    """

    def __init__(self, streamer: Any, rows: Sequence[SequenceState], padding: int) -> None:
        self._streamer, self._rows, self._padding = streamer, rows, padding
        self._num_put = 0

    def put(self) -> None:
        """Give the streamer the columns that are complete."""
        running = [row.num_new_tokens for row in self._rows if row.finish_reason is None]
        complete = min(running) if running else max(row.num_new_tokens for row in self._rows)
        while self._streamer is not None and self._num_put < complete:
            self._streamer.put(torch.tensor(self._column(self._num_put)))
            self._num_put += 1

    def table(self) -> Tensor:
        """Return [B, N] the new tokens of all rows."""
        longest = max(row.num_new_tokens for row in self._rows)
        return torch.tensor([self._column(i) for i in range(longest)]).T

    def _column(self, index: int) -> list[int]:
        return [
            row.tokens[row.num_prompt_tokens + index]
            if index < row.num_new_tokens
            else self._padding
            for row in self._rows
        ]


def _row(index: int, ids: Tensor, mask: Tensor | None, params: SamplingParams) -> SequenceState:
    """Return a row without its padding; torch's global generator chooses its random stream."""
    tokens = (ids if mask is None else ids[mask[index].bool()]).tolist()
    seed = int(torch.randint(2**63 - 1, ()))
    return SequenceState(index, tokens, len(tokens), params, RandomStream(seed))


def _params(config: GenerationConfig, max_new_tokens: int) -> SamplingParams:
    """Return what drafts are drawn by, and the limit; the target goes by the processors alone."""
    penalty = config.repetition_penalty or 1.0
    if not config.do_sample:
        return SamplingParams(
            max_new_tokens=max_new_tokens, ignore_eos=True, repetition_penalty=penalty
        )
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        ignore_eos=True,
        repetition_penalty=penalty,
        temperature=config.temperature or 1.0,
        top_k=config.top_k or 0,
        top_p=config.top_p or 1.0,
        min_p=config.min_p or 0.0,
    )


def _padding(config: GenerationConfig) -> int:
    """Return what follows the end of a row; nothing does where no end-of-sequence id is known."""
    ids = config.pad_token_id, config.eos_token_id
    first = next((i for i in ids if i is not None), 0)
    return int(torch.as_tensor(first).flatten()[0])


def _positions_follow(mask: Tensor | None, positions: Tensor | None) -> bool:
    """Whether positions count the tokens that the mask shows, from 0 on."""
    if positions is None:
        return True
    real = torch.ones_like(positions) if mask is None else mask.to(positions)
    return positions.shape == real.shape and torch.equal(
        positions * real, (real.cumsum(dim=1) - 1) * real
    )
