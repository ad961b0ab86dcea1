"""Self-diffusion: the target drafts for itself, in passes over slots behind the anchor.

A pass reads the same cache as the AR mode, and writes its K/V to scratch positions that the verify
pass overwrites. Masked slots see each other, and the pass may enter late (related:
arXiv:2507.11851, gated LoRA on mask tokens); random tokens are attended to causally, as SGLang's
UNO does. A model that was trained to fill masks beside its AR mode needs no adapter: with a block
size and a threshold this is `linear_spec_generate` of Nemotron-Labs-Diffusion.
Next: verifiers/rejection.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid.attention.pattern import bidirectional, causal, groups
from hybrid.carried import Carried, KeptSlots
from hybrid.drafters.drawing import draw_tokens, point_mass, take_numbers
from hybrid.errors import ConfigError
from hybrid.models.adapter import DiffusionAdapter, own_drafts
from hybrid.models.draft_input import MASKED, noise, reveal, reveal_sure
from hybrid.protocols import Backbone, DraftState, Entry
from hybrid.sampling import argmax, certainty
from hybrid.transfer import send, take_rows
from hybrid.types import Plan, Proposal, SequenceState, StepRecord


class SelfDiffusionDrafter:
    """Fills up to K slots behind the anchor with the backbone's own layers."""

    name = "self-diffusion"

    def __init__(
        self,
        backbone: Backbone,
        adapter: DiffusionAdapter | None = None,
        *,
        block_size: int | None = None,
        threshold: float = 0.0,
        stops_early: bool = True,
    ) -> None:
        """Keep the parts.

        Args:
            backbone: the target.
            adapter: bound to it; None where the model fills masks by itself.
            block_size: anchor and slots together; None is what the adapter or the model was
                trained for.
            threshold: passes go on until every slot has been this sure of its token, each but the
                last tells the next the tokens that were; 0 leaves their number to the adapter.
            stops_early: heed the adapter's `confidence_floor`.

        Raises:
            ConfigError: a model that does not fill masks, a block size beyond the adapter's slots,
                or a threshold for passes that are told nothing.
        """
        self._backbone = backbone
        self._adapter = adapter = own_drafts(backbone) if adapter is None else adapter
        config = adapter.config
        most = config.num_draft_tokens if block_size is None else block_size - 1
        if most > config.num_draft_tokens and config.entry_layer > 0:
            raise ConfigError(
                f"block_size: got {block_size}, expected at most {config.num_draft_tokens + 1}, "
                "which is what the adapter was trained for."
            )
        if threshold > 0 and (config.corruption != "mask" or config.sampler_size):
            raise ConfigError(
                f"threshold: got {threshold}, expected 0 for an adapter of random tokens or with a "
                "sampler head: no later pass sees what an earlier one chose."
            )
        self.taps = config.taps
        self.max_draft_tokens = most
        # Of carried slots the first falls to the target: a small block is still drafted whole.
        self.max_slots = max(most, config.num_draft_tokens)
        self.preferred_draft_tokens = most
        if block_size is None:
            self.preferred_draft_tokens = config.preferred_draft_tokens or most
        self._threshold = threshold
        # A second pass would have to be told what the first one found.
        self.can_carry = threshold == 0 and config.num_passes == 1
        # Elsewhere a row of a verify pass costs next to nothing, and looking costs a host sync.
        heeds = stops_early and backbone.device.type == "cpu"
        self._floor = config.confidence_floor if heeds else 0.0

    def draft(self, state: DraftState, plan: Plan) -> Proposal:
        """Propose K tokens per row: argmax where the row is greedy, else a draw and its law.

        The last pass fills all slots that are still masked. Those before it give argmax tokens,
        for sampled rows too: a slot's law may depend on a token that stands behind it only if that
        token was not drawn. Given the context such tokens are certain, so their law is a point. A
        sampled row takes a random number for each of its slots, drawn or not.
        """
        rows = state.rows
        count = min(plan.num_draft_tokens, self.max_draft_tokens)
        carried = [state.slots.get(row.row) for row in rows]
        fresh = [b for b, own in enumerate(carried) if own is None]
        device = self._backbone.device
        known = torch.full((len(rows), count), MASKED, device=device)
        num_passes = 0
        if fresh:
            some = state if len(fresh) == len(rows) else _only(state, fresh)
            slots, told, num_passes = self._fill(some, known[: len(fresh)])
            known = known.index_copy(0, send(fresh, device), told)
        if len(fresh) < len(rows):
            slots = _beside(slots if fresh else None, fresh, carried, known)
        limits = [count if own is None else min(count, len(own.hidden)) for own in carried]
        chosen, laws, lengths, logits = self._choose(rows, slots, known, limits)
        sure: dict[str, Any] = {}
        if state.wants_features and logits:
            sure |= certainty(torch.stack(logits, dim=1))
        return Proposal(
            chosen,
            lengths,
            laws,
            first_slot=tuple(1 if own is None else own.first_slot for own in carried),
            num_forwards=num_passes,
            num_drafting=len(fresh),
            **sure,
        )

    def carry(
        self,
        state: DraftState,
        tokens: Tensor,
        points: Sequence[Sequence[int]],
        num_slots: int,
    ) -> Carried:
        """Let the next draft ride in a target pass; see `CarryingDrafter.carry`.

        The group of point j is the draft pass that would follow if the target accepted j tokens:
        its anchor is the j-th of them. Features of layers that the anchor's predecessor has not
        reached when the slots enter are zero.
        """
        config = self._adapter.config
        most = max(map(len, points))
        # A row with fewer points repeats point 0; nobody reads those groups.
        table = [[*own, *[0] * (most - len(own))] for own in points]  # [B][G]
        starts = [
            [row.cached_len + j for j in own] for row, own in zip(state.rows, table, strict=True)
        ]
        size = config.num_rows(min(num_slots, self.max_slots))
        device = self._backbone.device
        index = send(table, device)
        anchors = tokens.to(device).gather(1, index).view(-1, 1)  # [B G, 1]
        flat = [(row, n) for row, own in zip(state.rows, starts, strict=True) for n in own]
        rows = torch.cat([anchors, self._unknown(flat, size - 1)], dim=1)
        offsets = torch.arange(size, device=device)
        positions = send(starts, device)[..., None] + offsets  # [B, G, W]
        return Carried(
            layer=config.entry_layer,
            adapter=self._adapter.for_pass(size),
            taps=tuple(layer for layer in config.taps if layer < config.entry_layer),
            inputs=_CarriedInputs(self._adapter),
            tensors=(
                rows.view(len(points), most, size),
                index,
                *(state.hidden[layer] for layer in config.taps),
            ),
            position_ids=positions.flatten(1),
            pattern=groups(starts, size, is_causal=config.corruption == "uniform"),
            group_size=size,
            first_drafting=1 - config.logit_shift,
        )

    def observe(self, record: StepRecord) -> None:
        """Learn nothing: the draft depends on the model alone."""

    def reset(self) -> None:
        """Forget nothing: there is no state."""

    def _fill(self, state: DraftState, known: Tensor) -> tuple[Tensor, Tensor, int]:
        """Run draft passes. Returns the states [B, K, C], what the last was told, their number."""
        num_passes = 0
        while True:
            slots = self._slots(state, known)
            num_passes += 1
            told = self._tell(slots, known, num_passes)
            if told is known:
                return slots, known, num_passes
            known = told

    def _unknown(self, rows: Sequence[tuple[SequenceState, int]], count: int) -> Tensor:
        """Return what stands in the slots behind the anchor before anything is known, [N, count].

        Args:
            rows: N pairs of a row and the position of its anchor.
            count: slots behind the anchor.
        """
        backbone = self._backbone
        if self._adapter.config.corruption != "uniform":
            return torch.full((len(rows), count), MASKED, device=backbone.device)
        drawn = [
            noise(row.sampling.seed or 0, position, count, backbone.vocab_size)
            for row, position in rows
        ]
        return send(drawn, backbone.device).view(len(rows), count)

    def _slots(self, state: DraftState, known: Tensor) -> Tensor:
        """Run a draft pass. Returns the states after the last layer [B, K, C], a row a token.

        Args:
            state: what to draft behind.
            known: [B, K] ids of the slots, or `MASKED`.
        """
        backbone, adapter, config = self._backbone, self._adapter, self._adapter.config
        device, last = backbone.device, backbone.num_layers - 1
        width = config.num_rows(known.shape[1])
        if config.corruption == "uniform":
            known = self._unknown([(row, row.cached_len) for row in state.rows], width - 1)
        anchors = send([[row.anchor] for row in state.rows], device)
        # The anchor has no K/V yet: it stands at the first scratch position.
        starts = [row.cached_len for row in state.rows]
        positions = send(starts, device)[:, None] + torch.arange(width, device=device)
        pattern = causal if config.corruption == "uniform" else bidirectional
        inputs = adapter.draft_input(torch.cat([anchors, known], dim=1), state.hidden)
        out = backbone.forward(
            None,
            positions,
            pattern(starts, width),
            state.cache,
            [row.row for row in state.rows],
            num_logits=0,
            taps=(last,),
            entry=Entry(config.entry_layer, inputs, adapter.for_pass(width)),
        )
        return out.hidden[last][:, 1 - config.logit_shift :]

    def _tell(self, slots: Tensor, known: Tensor, num_passes: int) -> Tensor:
        """Return what the next pass is told, `known` itself where no pass follows.

        A row that needs no further pass keeps what is known, so a pass that others need gives it
        the same slots again.

        Args:
            slots: [B, K, C] of the last pass.
            known: [B, K] what it was told.
            num_passes: how many there were.
        """
        head, count = self._adapter.head, known.shape[1]
        most = min(self._adapter.config.num_passes, count)
        if self._threshold == 0 and num_passes == most:
            return known
        logits = head.logits(slots.flatten(0, 1), None).view(*known.shape, -1)
        if self._threshold == 0:
            return reveal(logits, head.vocabulary, known, count * num_passes // most)
        told = reveal_sure(logits, head.vocabulary, known, self._threshold)
        return known if torch.equal(told, known) else told  # host sync

    def _choose(
        self,
        rows: Sequence[SequenceState],
        slots: Tensor,
        known: Tensor,
        limits: Sequence[int],
    ) -> tuple[Tensor, Tensor | None, tuple[int, ...], list[Tensor]]:
        """Choose tokens left to right, because a slot may ask which were chosen before it.

        Args:
            rows: the active rows.
            slots: [B, K, C] states after the last layer.
            known: [B, K] what passes have told.
            limits: how many slots of each row there are.

        Returns:
            Tokens [B, K'], their laws [B, K', V], None where all rows are plain and greedy, how
            many of them each row proposes: its limit, or fewer where it is no longer confident, and
            the logits [B, V'] of every slot.
        """
        head, count = self._adapter.head, known.shape[1]
        device = slots.device
        before = send([row.tokens[-1:-3:-1] for row in rows], device)  # [B, 2]
        is_plain = all(r.sampling.is_greedy and not r.sampling.has_penalties for r in rows)
        # KeptSlots that ask nothing share one product, so that the head is read once.
        at_once = None
        if head.sampler is None:
            at_once = head.logits(slots.flatten(0, 1), None).view(len(rows), count, -1)
        floor = self._floor if is_plain else 0.0
        numbers = None if is_plain else take_numbers(rows, limits, device)
        lengths, odds = list(limits), [1.0] * len(rows)
        chosen: list[Tensor] = []
        scores: list[Tensor] = []
        laws: list[Tensor] = []
        for slot in range(max(limits)):
            logits = head.logits(slots[:, slot], before) if at_once is None else at_once[:, slot]
            if floor > 0:
                best = logits.float().softmax(dim=-1).amax(dim=-1).tolist()
                odds = [p * q for p, q in zip(odds, best, strict=True)]
                ends = [slot if p < floor else count for p in odds]
                lengths = [min(pair) for pair in zip(lengths, ends, strict=True)]
                if max(lengths) <= slot:
                    break
            if numbers is None:
                tokens = head.token_ids(argmax(logits))
                tokens = torch.where(known[:, slot] == MASKED, tokens, known[:, slot])
            else:
                logits = head.over_vocabulary(logits)
                drafted = torch.stack(chosen, dim=1) if chosen else known[:, :0]
                eos = self._backbone.eos_token_ids
                tokens, law = draw_tokens(logits, rows, drafted, eos, numbers[:, slot])
                if not self.can_carry:  # a pass may have told some slots their tokens
                    told = known[:, slot] != MASKED
                    tokens = torch.where(told, known[:, slot], tokens)
                    law = torch.where(told[:, None], point_mass(tokens, law), law)
                laws.append(law)
            chosen.append(tokens)
            scores.append(logits)
            before = torch.stack([tokens, before[:, 0]], dim=1)
        tokens = torch.stack(chosen, dim=1) if chosen else known[:, :0]
        return tokens, torch.stack(laws, dim=1) if laws else None, tuple(lengths), scores


def _only(state: DraftState, some: Sequence[int]) -> DraftState:
    """Return the state of some of its rows, none of which has carried slots."""
    hidden = take_rows(state.hidden, some)
    return DraftState([state.rows[b] for b in some], state.cache, hidden)


def _beside(
    filled: Tensor | None, fresh: Sequence[int], carried: Sequence[KeptSlots | None], known: Tensor
) -> Tensor:
    """Return the slots of all rows [B, K, C]: those of a pass, and those that were carried."""
    like = next(own.hidden for own in carried if own is not None)
    slots = like.new_zeros(*known.shape, like.shape[1])
    if filled is not None:
        slots.index_copy_(0, send(fresh, slots.device), filled)
    for b, own in enumerate(carried):
        if own is not None:
            count = min(len(own.hidden), known.shape[1])
            slots[b, :count] = own.hidden[:count]
    return slots


@dataclass(frozen=True, slots=True)
class _CarriedInputs:
    """How carried slots enter; equal from step to step, see `Carried.inputs`."""

    adapter: DiffusionAdapter

    def __call__(self, hidden: Mapping[int, Tensor], tensors: Sequence[Tensor]) -> Tensor:
        """Return [B, G W, C] for ids [B, G, W], points [B, G] and taps of the predecessors."""
        rows, index, *first = tensors
        before = {
            layer: _predecessors(own, hidden.get(layer), index)
            for layer, own in zip(self.adapter.config.taps, first, strict=True)
        }
        own = self.adapter.draft_input(rows.flatten(0, 1), before)
        return own.view(len(rows), -1, own.shape[-1])


def _predecessors(first: Tensor, later: Tensor | None, index: Tensor) -> Tensor:
    """Return the states of the tokens before a pass's tokens, [B G, C].

    Args:
        first: [B, C] of the token before the pass.
        later: [B, T, C] of the pass's own; None where they are not known yet: zeros.
        index: [B, G] which token of the pass is meant.
    """
    if later is None:
        return torch.where(index[..., None] == 0, first[:, None], 0.0).flatten(0, 1)
    table = torch.cat([first[:, None], later], dim=1)
    return table[torch.arange(len(first), device=index.device)[:, None], index].flatten(0, 1)
