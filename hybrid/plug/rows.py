"""`PluggedRow`: a row that lives by the logits processors and stopping criteria of transformers.

Both are given what they are given in transformers' own loop: the tokens so far, prompt and padding
among them, and their row of the batch. Next: hybrid/decode/judging.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from hybrid.decode.stopping import StopRule
from hybrid.params import SamplingParams
from hybrid.sampling import argmax

# Rows are at different lengths, so each is asked for alone. Who is asked may want to know which row
# of the batch it serves: it gets a batch of copies, and the answer is read off that row. These do
# not want to know, and are in most calls.
_ROW_BLIND = {
    "EosTokenCriteria",
    "MaxLengthCriteria",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
}


class PluggedRow(StopRule):
    """The text of one row as tensors, its processors as transforms, its criteria as a stop rule."""

    def __init__(
        self,
        ids: Tensor,
        index: int,
        batch: int,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        params: SamplingParams,
    ) -> None:
        """Begin behind a prompt.

        Args:
            ids: [S] the row of the prompt, padding included.
            index: of the row in the batch.
            batch: rows of the call.
            processors: of the call, in their order.
            criteria: of the call.
            params: of the row; they give the limit, and say whether it is greedy.
        """
        super().__init__(params, ())
        self._ids = torch.cat([ids, ids.new_zeros(params.max_new_tokens)])
        self._length = len(ids)
        self._index, self._batch = index, batch
        self._processors, self._criteria = processors, criteria
        self._is_greedy = params.is_greedy

    def push(self, token: int) -> str | None:
        """Count a committed token and return the finish reason if the row ends with it."""
        self._ids[self._length] = token
        self._length += 1
        reason = super().push(token)
        ids = self._ids[: self._length]
        is_done = [self._answer(criterion, ids, None) for criterion in self._criteria]
        return "stop" if any(is_done) else reason

    def transform(self, logits: Tensor, drafted: Sequence[int]) -> Tensor:
        """Return the logits after every processor, float32, each behind the tokens before it.

        Behind a drafted token that is sure to be rejected nothing is processed. So a processor
        never sees a text that it ruled out, and in greedy decoding it is called once for each token
        that is committed, but for drafted ones behind the end of an answer.

        Args:
            logits: [R, V] of the target, R > len(drafted).
            drafted: tokens that may follow the row.
        """
        out = logits.to(self._ids.device, torch.float32, copy=True)
        for i in range(len(drafted) + 1):
            out[i] = self._processed(self._ids[: self._length + i], out[i])
            if i == len(drafted) or self._rules_out(out[i], drafted[i]):
                break
            self._ids[self._length + i] = drafted[i]
        return out.to(logits.device)

    def _processed(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores [V] of what follows `ids` after every processor."""
        for processor in self._processors:
            scores = self._answer(processor, ids, scores)
        return scores

    def _answer(self, asked: Any, ids: Tensor, scores: Tensor | None) -> Tensor:
        """Return what a processor or a criterion says of this row."""
        is_blind = type(asked).__name__ in _ROW_BLIND
        copies, index = (1, 0) if is_blind else (self._batch, self._index)
        answer = asked(ids.repeat(copies, 1), None if scores is None else scores.repeat(copies, 1))
        if not isinstance(answer, Tensor) or answer.ndim == 0:  # a criterion for the whole batch
            return torch.as_tensor(answer)
        return answer[index]

    def _rules_out(self, scores: Tensor, token: int) -> bool:
        if self._is_greedy:
            return int(argmax(scores)) != token
        return float(scores[token]) == -math.inf
