"""The nouns that travel between the parts. No behaviour, no torch import at run time.

Shape letters are those of docs/glossary.md: B batch, T tokens in this forward, S cached length,
K drafted, L layers, C hidden, V vocabulary. Next: hybrid/protocols.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from hybrid.config import checks_enabled
from hybrid.errors import ProposalError
from hybrid.params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from hybrid.streams import RandomStream


class Mode(str, Enum):
    """What one step does, from the least to the most that happens in its target pass."""

    PREFILL = "prefill"
    AR = "ar"
    """One token, nothing drafted."""
    SPECULATIVE = "speculative"
    """Two passes: a draft, and the target pass that verifies it."""
    FUSED = "fused"
    """The target pass carries the slots of the next draft, for one acceptance point."""
    ONE_PASS = "one-pass"
    """It carries slots for several acceptance points (quadratic self-speculation)."""
    DIFFUSION_ONLY = "diffusion-only"
    """The leading tokens are committed whatever the target says; it writes their K/V."""
    DIFFUSION = "diffusion"
    """A denoising pass over a canvas."""


class Context(str, Enum):
    """What a committed token sees, by the training of the model's weights."""

    CAUSAL = "causal"
    """What precedes it: its K/V never change. A model of this kind may still fill masks."""
    BLOCK_CAUSAL = "block-causal"
    """Its own block and what precedes that: K/V of finished blocks never change."""
    BIDIRECTIONAL = "bidirectional"
    """Everything, masks that follow it too: cached K/V are an approximation."""


class Source(str, Enum):
    """Where a token came from."""

    PROMPT = "prompt"
    AR = "ar"
    DRAFT_VERIFIED = "draft-verified"
    CORRECTION = "correction"
    BONUS = "bonus"
    DIFFUSION_ONLY = "diffusion-only"


class Write(str, Enum):
    """Where a pass puts its K/V: in rows that stay, in scratch, or over rows that are there."""

    COMMIT = "commit"
    SCRATCH = "scratch"
    REFRESH = "refresh"


@dataclass(slots=True)
class SequenceState:
    """One row of the batch. Only the decode loop changes it; drafters and routers read it.

    Attributes:
        row: index of the row in the cache.
        tokens: prompt and committed tokens. The last one is the anchor: it has no K/V yet.
        num_prompt_tokens: how many of `tokens` are the prompt.
        sampling: the request's parameters.
        stream: the row's own random numbers; only drawing advances it.
        finish_reason: None while running, else "stop", "length" or "cancelled".
        transform: replaces the transforms of `sampling` on the target's logits, for a caller with
            rules of its own: (logits [R, V], the tokens drafted behind `tokens`) to [R, V]. Drafts
            still follow `sampling`.
    """

    row: int
    tokens: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    stream: RandomStream
    finish_reason: str | None = None
    transform: Callable[[Tensor, Sequence[int]], Tensor] | None = None

    @property
    def anchor(self) -> int:
        """The last committed token, the first input of the verify pass."""
        return self.tokens[-1]

    @property
    def cached_len(self) -> int:
        """How many tokens have K/V in the cache (all but the anchor)."""
        return len(self.tokens) - 1

    @property
    def num_new_tokens(self) -> int:
        """How many tokens were generated."""
        return len(self.tokens) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """What the router wants drafted for one row.

    Attributes:
        mode: AR drafts nothing.
        num_draft_tokens: the most tokens to propose. A drafter is asked for the most of any row.
        may_draft: a draft pass may run.
        may_reuse: slots that the last target pass carried may be read instead.
    """

    mode: Mode
    num_draft_tokens: int = 0
    may_draft: bool = True
    may_reuse: bool = True


@dataclass(frozen=True, slots=True)
class Route:
    """What the router makes of the proposal of one row.

    Attributes:
        num_draft_tokens: how many leading tokens are fed to the target pass.
        num_unverified: how many of these are committed whatever the target says; 0 is lossless.
        points: ascending acceptance points for which the pass carries the slots of the next draft:
            point j assumes that exactly the first j tokens are accepted.
    """

    num_draft_tokens: int
    num_unverified: int = 0
    points: tuple[int, ...] = ()


CERTAINTY = ("entropy", "confidence", "margin")
"""Fields of a `Proposal` that say how sure its distributions are."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a drafter proposes.

    Attributes:
        tokens: [B, K] ids; columns at and beyond `num_tokens[b]` are padding.
        num_tokens: how many leading tokens of each row are real; a row may have 0.
        draft_probs: [B, K, V] the distribution each token was drawn from, float32; None means a
            point mass on the token, never "unknown".
        entropy: [B, K] of the draft distribution, nats; NaN where the drafter cannot say.
        confidence: [B, K] its largest probability, likewise. Both say how sure the distribution is,
            never how probable the token that was drawn: a draft that ends by them stays unbiased.
        margin: [B, K] the largest less the second largest probability, likewise.
        first_slot: which slot of its draft each row's first token is, 1 in a fresh draft, more
            where earlier slots have been passed by; 0 for tokens that come from no slot.
        parents: [K] tree parents, -1 for the anchor; None is a chain.
        num_forwards: backbone passes spent on drafting.
        num_drafting: rows that took part in these.
    """

    tokens: Tensor
    num_tokens: tuple[int, ...]
    draft_probs: Tensor | None = None
    entropy: Tensor | None = None
    confidence: Tensor | None = None
    margin: Tensor | None = None
    first_slot: tuple[int, ...] | None = None
    parents: tuple[int, ...] | None = None
    num_forwards: int = 0
    num_drafting: int = 0

    def __post_init__(self) -> None:
        """Check shapes when HYBRID_CHECKS=1."""
        if not checks_enabled():
            return
        batch, width = self.tokens.shape
        if len(self.num_tokens) != batch or not all(0 <= n <= width for n in self.num_tokens):
            raise ProposalError(
                f"num_tokens: got {self.num_tokens}, expected {batch} numbers from 0 to {width}."
            )
        for name in ("draft_probs", *CERTAINTY):
            value = getattr(self, name)
            if value is not None and tuple(value.shape[:2]) != (batch, width):
                raise ProposalError(
                    f"{name}: got shape {tuple(value.shape)}, expected it to begin with "
                    f"[{batch}, {width}]."
                )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier decided; host values, because the loop branches on them.

    Attributes:
        num_accepted: leading drafted tokens accepted per row, without the next token; 0..K.
        next_token: the target's correction (after a rejection) or bonus token per row.
    """

    num_accepted: tuple[int, ...]
    next_token: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot of a canvas while it is denoised.

    Attributes:
        position: in the text, prompt included.
        token: its id, None while it is masked.
        confidence: probability of the token when it was committed, 0 while it is masked.
    """

    position: int
    token: int | None
    confidence: float


@dataclass(frozen=True, slots=True)
class RowStep:
    """What one step did to one row.

    Attributes:
        index: position of the request in the call's list, which is also its cache row.
        tokens: committed tokens, after the stop rules.
        sources: where each came from.
        num_drafted: tokens of the proposal that were fed to the target.
        num_accepted: of those, how many were accepted, verified or not.
        drafted: the ids that were fed.
        entropies: entropy of the draft distribution per proposed token, or empty.
        logprobs: log-probability of each committed token when asked for, or empty.
        top_logprobs: per committed token {id: log-probability} of the most probable, or empty.
        slots: what is being denoised, committed or masked; empty in other modes.
        finish_reason: set when the row ended in this step.
        mode: what the step did for this row.
        num_proposed: tokens that the drafter proposed; the router may feed fewer.
        confidences: largest probability of the draft distribution per proposed token, or empty.
        margins: the largest less the second largest, likewise.
        first_slot: see `Proposal`; 0 where nothing was proposed.
        num_unverified: accepted tokens that were committed whatever the target said.
        disagreements: of each of these, the probability with which the target would have rejected
            it, given the text before it: 0 or 1 when greedy.
        points: acceptance points for which the target pass carried slots.
        num_slots: carried slots that are left for the next step.
        next_slot: which slot of its draft the first of them is.
        next_entropy: entropy of the distribution that gave the last token, nats; None where the
            router does not ask.
    """

    index: int
    tokens: tuple[int, ...]
    sources: tuple[Source, ...]
    num_drafted: int = 0
    num_accepted: int = 0
    drafted: tuple[int, ...] = ()
    entropies: tuple[float, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[Mapping[int, float], ...] = ()
    slots: tuple[Slot, ...] = ()
    finish_reason: str | None = None
    mode: Mode = Mode.AR
    num_proposed: int = 0
    confidences: tuple[float, ...] = ()
    margins: tuple[float, ...] = ()
    first_slot: int = 0
    num_unverified: int = 0
    disagreements: tuple[float, ...] = ()
    points: tuple[int, ...] = ()
    num_slots: int = 0
    next_slot: int = 0
    next_entropy: float | None = None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step of the loop did: the only thing CLI, TUI, server and metrics see.

    Attributes:
        mode: that of its rows; of several, the last in the order of `Mode`.
        rows: one entry per active row.
        num_draft_forwards: backbone passes of the draft.
        num_verify_forwards: target passes (1, also for prefill and AR).
        num_denoise_forwards: passes of a diffusion preset that fill masked slots.
        width: tokens per row in the target pass, carried slots not counted.
        forward_seconds: wall time of the target passes.
        draft_seconds: wall time of the drafter.
        seconds: wall time of the whole step.
        num_drafting: rows that took part in the passes of the draft.
        num_carried: carried slots per row in the target pass.
    """

    mode: Mode
    rows: tuple[RowStep, ...]
    num_draft_forwards: int = 0
    num_verify_forwards: int = 1
    num_denoise_forwards: int = 0
    width: int = 1
    forward_seconds: float = 0.0
    draft_seconds: float = 0.0
    seconds: float = 0.0
    num_drafting: int = 0
    num_carried: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """Numbers of one request, computed by hybrid/metrics.py alone (definitions there)."""

    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    num_forwards: int = 0
    num_prefill_forwards: int = 0
    num_draft_forwards: int = 0
    num_verify_forwards: int = 0
    num_denoise_forwards: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_unverified: int = 0
    num_unverified_disagreeing: float = 0.0
    forwards_by_mode: Mapping[str, int] = field(default_factory=dict)
    acceptance_length: float = 0.0
    acceptance_rate: float = 0.0
    tokens_per_forward: float = 0.0
    total_tokens_per_forward: float = 0.0
    acceptance_histogram: tuple[int, ...] = ()
    seconds: float = 0.0
    forward_seconds: float = 0.0
    tokens_per_second: float = 0.0
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    peak_memory_mib: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return {
            name: list(value) if isinstance(value := getattr(self, name), tuple) else value
            for name in self.__slots__
        }


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """What one request produced.

    Attributes:
        text: the decoded answer, cut before a stop string, special tokens left out.
        token_ids: generated ids, the EOS or stop id included.
        finish_reason: "stop", "length" or "cancelled".
        sources: where each token came from.
        logprobs: per token, nats, when asked for.
        top_logprobs: per token {id: log-probability}, when asked for.
        stats: the numbers.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    sources: tuple[Source, ...] = ()
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[Mapping[int, float], ...] | None = None
    stats: Stats = field(default_factory=Stats)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "sources": [s.value for s in self.sources],
            "logprobs": None if self.logprobs is None else list(self.logprobs),
            "top_logprobs": None
            if self.top_logprobs is None
            else [{str(k): v for k, v in t.items()} for t in self.top_logprobs],
            "stats": self.stats.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event of a stream.

    Attributes:
        text: the text that became final in this step; the events' texts add up to the result's.
        pieces: (text, source) pairs that join to `text`, for colouring.
        record: what the step did.
        result: the whole result, on the last event only.
    """

    text: str
    pieces: tuple[tuple[str, Source], ...]
    record: StepRecord
    result: GenerationResult | None = None
