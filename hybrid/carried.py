"""Slots of the next draft that ride in a target pass, and those that are kept of them.

Next: hybrid/decode/drafting.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from hybrid.attention.pattern import AttentionPattern


@dataclass(frozen=True, slots=True)
class Carried:
    """Slots of the next draft that ride in a target pass: groups of slots, one per point.

    Their K/V lie in scratch behind those of the target's tokens, which see none of them. So their
    presence changes no logits, and nothing of them is committed.

    Attributes:
        layer: first layer that they run; the target's tokens run all.
        adapter: gated low-rank adapter for the slots alone, or None.
        taps: layers below `layer` whose outputs `inputs` reads.
        inputs: (outputs of the target's tokens at `taps` {layer: [B, T, C]}, `tensors`) -> the
            slots' hidden states [B, S, C]. It runs within the target pass, so it must not fail. It
            reads nothing else that changes, and nothing back from the device: a GPU records it, and
            replays the record for passes whose `inputs` are equal.
        tensors: what it reads beside the taps, each [B, ...].
        position_ids: [B, S].
        pattern: S slots per row; a slot's prefix counts the cached tokens and the leading tokens of
            the target's T that its group takes for accepted.
        group_size: slots per group, those that draft nothing included; S is a multiple.
        first_drafting: how many of these come first.
    """

    layer: int
    adapter: Any
    taps: tuple[int, ...]
    inputs: Callable[[Mapping[int, Tensor], Sequence[Tensor]], Tensor]
    tensors: tuple[Tensor, ...]
    position_ids: Tensor
    pattern: AttentionPattern
    group_size: int
    first_drafting: int


@dataclass(frozen=True, slots=True)
class KeptSlots:
    """Carried slots of one row that are left when its target pass is judged.

    Attributes:
        position: of the token that the first one predicts, in prompt and answer.
        first_slot: which slot of its draft that one is.
        hidden: [n, C] output of the last layer.
    """

    position: int
    first_slot: int
    hidden: Tensor

    def at(self, position: int) -> KeptSlots | None:
        """Return the slots from a position on, None when none is left."""
        passed = position - self.position
        if not 0 <= passed < len(self.hidden):
            return None
        return KeptSlots(position, self.first_slot + passed, self.hidden[passed:])
