"""The four contracts: Backbone, Drafter, Verifier, Router, and the cache they share.

The decode loop knows these and nothing behind them. Next: hybrid/decode/step.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from hybrid.carried import Carried, KeptSlots
from hybrid.params import SamplingParams
from hybrid.streams import RandomStream
from hybrid.types import (
    Context,
    Plan,
    Proposal,
    Route,
    SequenceState,
    StepRecord,
    Verdict,
    Write,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hybrid.attention.pattern import AttentionPattern
    from hybrid.transfer import DeviceVerdict

PREFILL_CHUNK = 512


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """Result of one backbone pass.

    Attributes:
        logits: [B, n, V] of the last n tokens, in the backbone's dtype; None for n = 0.
        hidden: output of the layers asked for, {layer index: [B, T, C]}; the residual stream
            after that layer, before the final norm.
        carried: [B, S, C] output of the last layer for carried slots, None without any.
    """

    logits: Tensor | None
    hidden: dict[int, Tensor] = field(default_factory=dict)
    carried: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A pass that begins at a later layer with given hidden states (late entry).

    Attributes:
        layer: first layer to run.
        hidden: [B, T, C] input of that layer.
        adapter: gated low-rank adapter for every token of this pass, or None.
    """

    layer: int
    hidden: Tensor
    adapter: Any = None


class Cache(Protocol):
    """Keys and values of several rows; each row has its own length.

    Positions `lengths[row] ...` of a row are scratch: a pass may write them, and they become part
    of the row only by `commit`. Every method works in place.
    """

    lengths: list[int]
    capacity: int

    def commit(self, row: int, num_tokens: int) -> None:
        """Make the first `num_tokens` scratch positions part of the row."""
        ...

    def truncate(self, row: int, length: int) -> None:
        """Forget everything at and beyond `length`."""
        ...

    def gather(self, row: int, keep: Sequence[int]) -> None:
        """Commit the scratch positions `keep` (offsets from the row's length, ascending)."""
        ...

    def free(self, row: int) -> None:
        """Empty the row."""
        ...


class Backbone(Protocol):
    """A transformer that can be run with any attention pattern its weights were meant for.

    Stateless between calls: all state is in the cache. One device, one dtype. `forward` never
    changes committed K/V, and row b's output never depends on the other rows.

    Attributes:
        vocab_size: V.
        hidden_size: C.
        num_layers: L.
        max_seq_len: the context window in tokens.
        prefill_chunk: the most positions per prefill pass. A fixed size keeps a prompt's bits
            independent of other rows and bounds the memory of its attention mask.
        eos_token_ids: ids that end an answer.
        mask_token_id: the vocabulary's mask id, None when it has none.
        context: what a committed token sees; it decides whether cached K/V are exact.
        can_verify: trained with a causal AR loss on clean text, so that a causal pass says what AR
            decoding would.
        block_size: positions per diffusion block that the weights were trained for; None when
            there are no blocks, or any will do.
        logit_shift: what the row of a masked slot at position i predicts: 0 is token i (LLaDA), 1
            is token i + 1 (Dream), so slot i is read from row i - 1. Rows of an AR pass always
            predict token i + 1.
        default_strategy: name of the strategy that the weights are meant for.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_seq_len: int
    prefill_chunk: int
    eos_token_ids: tuple[int, ...]
    mask_token_id: int | None
    context: Context
    can_verify: bool
    block_size: int | None
    logit_shift: int
    default_strategy: str
    device: torch.device
    dtype: torch.dtype

    @property
    def weight_nbytes(self) -> int:
        """Bytes of the weights."""
        ...

    def cache_nbytes(self, batch: int, max_len: int) -> int:
        """Bytes that `new_cache` takes for the same arguments."""
        ...

    def new_cache(self, batch: int, max_len: int) -> Cache:
        """Allocate a cache of `batch` rows and `max_len` positions, all memory at once."""
        ...

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor,
        pattern: AttentionPattern,
        cache: Cache,
        rows: Sequence[int],
        *,
        write: Write = Write.SCRATCH,
        num_logits: int | None = None,
        logits_at: Tensor | None = None,
        taps: Sequence[int] = (),
        entry: Entry | None = None,
        features: Sequence[Any] | None = None,
        carried: Carried | None = None,
    ) -> ForwardOutput:
        """Run T new tokens of B rows.

        Args:
            input_ids: [B, T]; None when `entry` gives hidden states instead.
            position_ids: [B, T].
            pattern: which cached positions and which new tokens each new token sees.
            cache: from `new_cache`; new K/V go to the scratch positions of each row.
            rows: cache row of each batch row.
            write: COMMIT also makes the new K/V part of the rows. REFRESH overwrites the committed
                K/V at `position_ids`; each token then sees the first `prefix_len` positions of its
                row, the refreshed ones among them, and `local` says nothing.
            num_logits: how many of the last tokens get logits; None is all of them.
            logits_at: [B, n] which tokens get logits, instead of `num_logits`.
            taps: layers whose output is wanted.
            entry: begin at a later layer.
            features: of each row, what layers added to its tokens in earlier passes
                (hybrid/models/feature_cache.py); T tokens from the row's first on.
            carried: slots of the next draft that ride along.

        Raises:
            CapacityError: the new tokens do not fit the cache.
        """
        ...


@dataclass(frozen=True, slots=True)
class DraftState:
    """What a drafter may look at. Read only.

    Attributes:
        rows: the active rows.
        cache: the shared cache.
        hidden: {layer: [B, C]} taps of each row's last cached token, the anchor's predecessor.
        slots: by cache row, carried slots that predict what follows the anchor. A row that has some
            is drafted from them, without a pass.
        wants_features: entropy, confidence and margin are asked for.
    """

    rows: Sequence[SequenceState]
    cache: Cache
    hidden: dict[int, Tensor]
    slots: Mapping[int, KeptSlots] = field(default_factory=dict)
    wants_features: bool = False


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens. Never changes the state, never commits to the cache.

    It may write scratch positions of the cache: the verify pass overwrites them. It handles every
    row by itself, so that a row's proposal does not depend on the other rows.

    Attributes:
        name: registry name.
        taps: backbone layers whose output `draft` wants in `state.hidden`.
        max_draft_tokens: the most tokens it proposes in one step.
    """

    name: str
    taps: tuple[int, ...]
    max_draft_tokens: int

    def draft(self, state: DraftState, plan: Plan) -> Proposal:
        """Propose up to `plan.num_draft_tokens` tokens for each row.

        Tokens are drawn with each row's sampling transforms and stream; a row may get 0 tokens.
        """
        ...

    def observe(self, record: StepRecord) -> None:
        """Learn from the outcome of a step. May be a no-op."""
        ...

    def reset(self) -> None:
        """Forget everything about past requests."""
        ...


@runtime_checkable
class ContextDrafter(Drafter, Protocol):
    """A drafter with a context of its own: it is handed the taps of every token that is cached.

    Whatever has `absorb` is one. For the others the taps in `DraftState.hidden` are enough.
    """

    def absorb(
        self,
        cache: Cache,
        rows: Sequence[int],
        hidden: dict[int, Tensor],
        num_tokens: Sequence[int],
    ) -> None:
        """Take in the tokens that have just joined the cache: the chunks of a prompt, each step's.

        Args:
            cache: of this call, by whose identity concurrent calls are told apart; the tokens are
                the last `num_tokens[b]` of `cache.lengths[rows[b]]`.
            rows: cache row of each batch row.
            hidden: {layer: [B, T, C]} taps of the pass that wrote them.
            num_tokens: how many leading tokens of each batch row joined; the rest was rejected.
        """
        ...


@runtime_checkable
class CarryingDrafter(Drafter, Protocol):
    """A drafter whose slots can ride in a target pass.

    Attributes:
        can_carry: False where its settings forbid it: several passes per draft.
        max_slots: the most tokens that a carried group can draft.
    """

    can_carry: bool
    max_slots: int

    def carry(
        self,
        state: DraftState,
        tokens: Tensor,
        points: Sequence[Sequence[int]],
        num_slots: int,
    ) -> Carried:
        """Return the slots of the next draft, for every point of every row.

        Args:
            state: as for `draft`, before the target pass.
            tokens: [B, 1 + K] what the pass feeds: anchors and drafted tokens.
            points: of each row, see `Route`. Rows may have different numbers, some none.
            num_slots: tokens that each group drafts.
        """
        ...


def can_carry(drafter: Drafter) -> bool:
    """Return whether the drafter's slots can ride in a target pass."""
    return bool(getattr(drafter, "can_carry", False))


@runtime_checkable
class Verifier(Protocol):
    """Accepts a prefix of a proposal. Knows neither the drafter nor the model.

    Attributes:
        name: registry name.
        lossless: outputs follow the target distribution exactly (greedy: equal its argmax).
    """

    name: str
    lossless: bool

    def verify(
        self,
        target_logits: Tensor,
        proposal: Proposal,
        sampling: Sequence[SamplingParams],
        streams: Sequence[RandomStream],
    ) -> Verdict | DeviceVerdict:
        """Judge each row's proposal.

        Numbers on the host are always right. Where `hybrid.transfer.decides_on_device` a verdict
        that stays on the device saves the wait.

        Args:
            target_logits: [B, K+1, V] after the sampling transforms (a dropped token is -inf,
                temperature applied): softmax gives the distribution to preserve. Row i judges
                proposal.tokens[:, i]; row `num_tokens[b]` gives the bonus token.
            proposal: [B, K] tokens.
            sampling: per row; temperature 0 asks for the argmax.
            streams: each row's own random numbers.

        Raises:
            ProposalError: draft_probs gives 0 to a token it proposed.
        """
        ...


@runtime_checkable
class Router(Protocol):
    """Chooses what the next step does. Pure: a recorded history replays to the same choices.

    Attributes:
        num_slots: tokens that each carried group drafts; 0 where nothing is carried.
        max_points: the most acceptance points of a row that a pass carries slots for.
        wants_features: proposals and records must have entropies, confidences and margins.
    """

    num_slots: int
    max_points: int
    wants_features: bool

    def plan(
        self, rows: Sequence[SequenceState], history: Sequence[StepRecord]
    ) -> tuple[Plan, ...]:
        """Return what is to be drafted for each row."""
        ...

    def judge(
        self,
        rows: Sequence[SequenceState],
        proposal: Proposal,
        history: Sequence[StepRecord],
    ) -> tuple[Route, ...]:
        """Return what each row makes of its proposal.

        The proposal's certainty lies where it was drafted: on a device that decides, whoever looks
        at it (`hybrid.transfer.read`) waits. It is in the record of the step in any case.

        Whether token i is fed may depend on the distributions of slots up to i, not on those behind
        it, which may follow the token that was drawn, and never on that token: what is sampled
        would no longer follow the target.
        """
        ...
