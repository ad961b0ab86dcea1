"""`Slots`: what a pass predicts for some slots. Numbers are computed when a rule asks for them."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from hybrid.errors import ConfigError
from hybrid.params import SamplingParams
from hybrid.sampling import argmax, draw, process_logits, uniforms
from hybrid.streams import RandomStream
from hybrid.transfer import read

_SURE = 0.999  # from here on scores are computed in float64, as the references do everywhere
_LEAST = torch.finfo(torch.float32).min  # an id of probability 0 must not add 0 * -inf


class Slots:
    """Predictions for n slots.

    Attributes:
        positions: [n] in the canvas, CPU.
        masked: [n] whether each slot is still masked, CPU; None: all are.
        current: [n] tokens in the slots, CPU; None where all are masked.
    """

    def __init__(
        self,
        logits: Tensor,
        positions: Tensor,
        *,
        sampling: SamplingParams,
        stream: RandomStream,
        masked: Tensor | None = None,
        current: Tensor | None = None,
        raw_confidence: bool = False,
    ) -> None:
        """Keep the parts.

        Args:
            logits: [n, V], finite; the mask token's is the least number of their dtype.
            positions: see the attributes.
            sampling: of the row; truncation (top_k, ...) counts for the scores of a greedy row too.
            stream: the row's own.
            masked: see the attributes.
            current: see the attributes.
            raw_confidence: scores are those of the law before temperature and truncation.
        """
        self.positions, self.masked, self.current = positions, masked, current
        self._logits, self._stream, self._is_greedy = logits, stream, sampling.is_greedy
        self._law_logits, self._has_holes = logits, False
        if sampling.is_greedy and sampling.top_p == 1 and not sampling.min_p:
            if 0 < sampling.top_k < logits.shape[1]:
                # The scores of a greedy row need the best logits, not whose they are.
                self._law_logits = logits.topk(sampling.top_k).values
        else:
            if sampling.is_greedy:
                sampling = sampling.replace(temperature=1.0)
            self._law_logits, self._has_holes = process_logits(logits, sampling, (), 0), True
        self._scored_logits = logits if raw_confidence else self._law_logits

    def __len__(self) -> int:
        """Return n."""
        return len(self.positions)

    @cached_property
    def tokens(self) -> Tensor:
        """The predicted ids [n]: argmax, or a draw from the row's own stream. CPU."""
        if self._is_greedy:
            return argmax(self._logits).cpu()
        return self._draw().cpu()

    def tokens_at(self, index: Tensor) -> Tensor:
        """Return the predicted ids of some slots; of a greedy row, the others' are not computed."""
        if self._is_greedy and "tokens" not in self.__dict__:
            return argmax(self._logits[index.to(self._logits.device)]).cpu()
        return self.tokens[index]

    @cached_property
    def confidence(self) -> Tensor:
        """Probability of each predicted id [n], float64, CPU."""
        if self._is_greedy:
            chosen, at = self._best.double(), None
        else:
            at = self.tokens.to(self._probs.device)[:, None]
            chosen = self._probs.gather(-1, at)[:, 0].double()
        if len(self._sure):
            law = self._exact
            exact = law.amax(dim=-1) if at is None else law.gather(-1, at[self._sure])[:, 0]
            chosen[self._sure] = exact
        return chosen.cpu()

    @cached_property
    def entropy(self) -> Tensor:
        """Entropy of each prediction [n], nats, float64, CPU."""
        # log sum exp - sum p x, with what the probabilities already know of the first term.
        logits = self._scored_logits.float()
        if self._has_holes:
            logits = logits.clamp(min=_LEAST)
        total = logits.amax(dim=-1) - self._best.log()
        entropy = (total - torch.linalg.vecdot(self._probs, logits)).double()
        if len(self._sure):
            law = self._exact
            # d3LLM's own offset: a certain slot is below a threshold of 0.
            entropy[self._sure] = -torch.special.xlogy(law, law + 1e-12).sum(dim=-1)
        return entropy.cpu()

    @cached_property
    def margin(self) -> Tensor:
        """Probability of the best id less that of the next [n], CPU."""
        best = self._probs.topk(min(2, self._probs.shape[1]), dim=-1).values
        return (best[:, 0] - best[:, 1:].sum(dim=-1)).cpu()

    def _draw(self) -> Tensor:
        numbers = self._take_numbers(self._logits.device)
        return draw(self._law_logits, None, numbers, [False] * len(self))

    def _take_numbers(self, device: torch.device) -> Tensor:
        return uniforms([self._stream], [len(self)], len(self), device)[0]

    @cached_property
    def _probs(self) -> Tensor:
        return self._scored_logits.softmax(dim=-1, dtype=torch.float32)

    @cached_property
    def _best(self) -> Tensor:
        return self._probs.amax(dim=-1)

    @cached_property
    def _sure(self) -> Tensor:
        """Slots whose scores float32 would round together, though one is surer than the next."""
        return (self._best > _SURE).nonzero()[:, 0]

    @cached_property
    def _exact(self) -> Tensor:
        return self._scored_logits[self._sure].softmax(dim=-1, dtype=torch.float64)

    @cached_property
    def random(self) -> Tensor:
        """A number in [0, 1) per slot [n] from the row's own stream."""
        return self._take_numbers(self.positions.device)


class DeviceSlots(Slots):
    """The same where the device decides: all that rules ask for is read at once.

    Every score is float64, because to ask which slots need it would be another wait.
    """

    def tokens_at(self, index: Tensor) -> Tensor:
        """Return the predicted ids of some slots."""
        return self.tokens[index]

    @cached_property
    def tokens(self) -> Tensor:
        """See `Slots.tokens`."""
        return self._found["tokens"]

    @cached_property
    def confidence(self) -> Tensor:
        """See `Slots.confidence`."""
        return self._found["confidence"]

    @cached_property
    def entropy(self) -> Tensor:
        """See `Slots.entropy`."""
        return self._found["entropy"]

    @cached_property
    def margin(self) -> Tensor:
        """See `Slots.margin`."""
        return self._found["margin"]

    @cached_property
    def _found(self) -> dict[str, Tensor]:
        laws = self._scored_logits.softmax(dim=-1, dtype=torch.float64)
        best = laws.topk(min(2, laws.shape[1]), dim=-1).values
        if self._is_greedy:
            tokens, confidence = argmax(self._logits), best[:, 0]
        else:
            tokens = self._draw()
            confidence = laws.gather(-1, tokens.clamp(min=0)[:, None])[:, 0]
        found = read(
            {
                "tokens": tokens,
                "confidence": confidence,
                "entropy": -torch.special.xlogy(laws, laws + 1e-12).sum(dim=-1),
                "margin": best[:, 0] - best[:, 1:].sum(dim=-1),
            }
        )
        if min(found["tokens"], default=0) < 0:
            raise ConfigError(
                "Token probabilities: a slot has no law. The model's logits hold NaN or exclude "
                "every token; try dtype='float32' or check the checkpoint."
            )
        kinds = {"tokens": torch.long}
        return {n: torch.tensor(v, dtype=kinds.get(n, torch.float64)) for n, v in found.items()}
