"""What a pass of the native backbone does, whatever computes it: layer after layer, slots beside.

`Plan` is all of a pass but its tensors. `Operations` computes it: in plain PyTorch
(hybrid/models/attention.py), or on the kernels (hybrid/models/kernel_pass.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.carried import Carried
from hybrid.models.weights import Layer
from hybrid.protocols import Entry, ForwardOutput

if TYPE_CHECKING:
    from hybrid.models.transformer import NativeBackbone


class Operations:
    """What all layers of one pass share: norms, attention, MLPs.

    A layer's output is a sum of two, x and the `update` of its MLP, which the next norm adds up.
    """

    def norm(self, x: Tensor, weight: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the norm of x + update (arXiv:1910.07467), and that sum, both [N, C]."""
        raise NotImplementedError

    def attend(self, layer: Layer, index: int, qkv: Tensor) -> Tensor:
        """Rotate, write K/V to the cache, attend. qkv: [N, (H + 2G) D] -> [N, H D]."""
        raise NotImplementedError

    def mlp(self, layer: Layer, x: Tensor) -> Tensor:
        """Return what the MLP of a layer, and its experts, make of normed x [N, C]."""
        raise NotImplementedError

    def layer(
        self, layer: Layer, index: int, x: Tensor, update: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Run a layer on x + update; its output is the sum of the two that it returns."""
        h, x = self.norm(x, layer.input_norm, update)
        h, x = self.norm(x, layer.post_norm, layer.o(self.attend(layer, index, layer.qkv(h))))
        return x, self.mlp(layer, h)

    def beside(self, slots: Operations, plan: Plan, num_rows: int) -> Operations | None:
        """Return what runs the tokens of a plan and its slots in one stream, None if nothing does.

        Args:
            slots: operations of the slots.
            plan: of the pass.
            num_rows: rows of the tokens; the others are those of the slots.
        """
        return None


class Same:
    """A part of a plan that equals itself alone. It is kept, so its address is not used again."""

    __slots__ = ("part",)

    def __init__(self, part: Any) -> None:
        """Hold `part`."""
        self.part = part

    def __eq__(self, other: object) -> bool:
        """Whether it is the very same."""
        return isinstance(other, Same) and other.part is self.part

    def __hash__(self) -> int:
        """By address."""
        return id(self.part)


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """What the slots do that ride in a pass; see `Carried`.

    Attributes:
        layers: those that they run.
        first: of these the first.
        inputs: how they enter.
    """

    layers: Same
    first: int
    inputs: Callable[[Mapping[int, Tensor], Sequence[Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a pass does, but for its tensors. Passes of equal plans differ in numbers alone.

    Attributes:
        layers: those that the tokens run, an adapter's or the backbone's own.
        first: of these the first.
        taps: layers whose outputs are kept.
        num_logits: see `Backbone.forward`.
        slots: that ride along, or None.
    """

    layers: Same
    first: int
    taps: frozenset[int]
    num_logits: int | None
    slots: SlotPlan | None

    @classmethod
    def of(
        cls,
        backbone: NativeBackbone,
        taps: Sequence[int],
        num_logits: int | None,
        entry: Entry | None,
        carried: Carried | None,
    ) -> Plan:
        """Return the plan of a pass; the arguments are those of `Backbone.forward`."""
        slots, kept = None, frozenset(taps)
        if carried is not None:
            own = _layers(backbone, carried.adapter)
            slots, kept = SlotPlan(own, carried.layer, carried.inputs), kept.union(carried.taps)
        layers = _layers(backbone, None if entry is None else entry.adapter)
        return cls(layers, 0 if entry is None else entry.layer, kept, num_logits, slots)


OF_TOKENS = ("ids", "hidden")
"""Of the names of `named_tensors`, those whose tensors are [B, T, ...]."""


def named_tensors(
    input_ids: Tensor | None, logits_at: Tensor | None, entry: Entry | None, carried: Carried | None
) -> dict[str, Tensor]:
    """Return what `run_pass` reads beside weights and cache; each tensor has B rows."""
    tensors = {}
    if entry is not None:
        tensors["hidden"] = entry.hidden
    elif input_ids is not None:
        tensors["ids"] = input_ids
    if logits_at is not None:
        tensors["logits_at"] = logits_at
    for index, tensor in enumerate(() if carried is None else carried.tensors):
        tensors[f"slots.{index}"] = tensor
    return tensors


def run_pass(
    backbone: NativeBackbone,
    plan: Plan,
    tensors: Mapping[str, Tensor],
    tokens: Operations,
    slots: Operations | None,
) -> ForwardOutput:
    """Run all layers of a pass, and the head.

    Args:
        backbone: whose embedding, norm and head it uses.
        plan: what it does.
        tensors: of `named_tensors`.
        tokens: computes the tokens' layers.
        slots: computes those of the slots that ride.
    """
    given = tensors["ids"] if "ids" in tensors else tensors["hidden"]
    batch, num_tokens = given.shape[:2]
    x = given.flatten(0, 1)
    if "ids" in tensors:
        x = F.embedding(x, backbone.embedding)
    streams = _Streams(plan, tensors, tokens, slots, x)
    hidden: dict[int, Tensor] = {}
    for index in range(plan.first, backbone.num_layers):
        streams.layer(index, hidden)
        if index in plan.taps:
            hidden[index] = streams.tap().view(batch, num_tokens, -1)
    logits = None
    if plan.num_logits != 0:
        x, update = streams.of_tokens()
        chosen = _with_logits(plan, tensors, batch, num_tokens, x.device)
        h, _ = tokens.norm(x[chosen], backbone.norm, None if update is None else update[chosen])
        logits = backbone.head(h).view(batch, -1, backbone.vocab_size)
    states = None if plan.slots is None else streams.of_slots().view(batch, -1, x.shape[-1])
    return ForwardOutput(logits, hidden, states)


class _Streams:
    """The rows of a pass on their way through the layers: tokens, and the slots that ride.

    The slots join at a later layer, with layers of their own. They are a stream of their own, or
    run behind the tokens in one where the operations can read the weights of both at once.
    """

    def __init__(
        self,
        plan: Plan,
        tensors: Mapping[str, Tensor],
        tokens: Operations,
        slots: Operations | None,
        x: Tensor,
    ) -> None:
        self._plan, self._tokens, self._slots = plan, tokens, slots
        self._given = [tensor for name, tensor in tensors.items() if name.startswith("slots.")]
        self._num_rows = len(x)
        self._x = x
        self._update: Tensor | None = None
        self._slots_x: Tensor | None = None
        self._slots_update: Tensor | None = None

    def layer(self, index: int, hidden: Mapping[int, Tensor]) -> None:
        """Run a layer; `hidden` holds the taps of those below."""
        slots = self._plan.slots
        if slots is not None and index == slots.first:
            self._enter(slots.inputs(hidden, self._given).flatten(0, 1))
        layer = self._plan.layers.part[index]
        self._x, self._update = self._tokens.layer(layer, index, self._x, self._update)
        if slots is not None and self._slots is not None and self._slots_x is not None:
            # The target's tokens have written their keys, which slots see.
            layer, states = slots.layers.part[index], (self._slots_x, self._slots_update)
            self._slots_x, self._slots_update = self._slots.layer(layer, index, *states)

    def tap(self) -> Tensor:
        """Return the output of the last layer for the tokens."""
        self._x, self._update = _sum(self._x, self._update), None
        return self._x[: self._num_rows]

    def of_tokens(self) -> tuple[Tensor, Tensor | None]:
        """Return the same as the two that it is the sum of."""
        update = self._update
        return self._x[: self._num_rows], None if update is None else update[: self._num_rows]

    def of_slots(self) -> Tensor:
        """Return the output of the last layer for the slots."""
        if self._slots_x is not None:
            return _sum(self._slots_x, self._slots_update)
        return _sum(self._x, self._update)[self._num_rows :]

    def _enter(self, x: Tensor) -> None:
        """Let the slots [B S, C] begin."""
        assert self._slots is not None
        joint = self._tokens.beside(self._slots, self._plan, self._num_rows)
        if joint is None:
            self._slots_x = x
        else:
            self._tokens = joint
            self._x, self._update = torch.cat([_sum(self._x, self._update), x]), None


def _sum(x: Tensor, update: Tensor | None) -> Tensor:
    return x if update is None else x + update


def _layers(backbone: NativeBackbone, adapter: Any) -> Same:
    return Same(backbone.layers if adapter is None else adapter.layers)


def _with_logits(
    plan: Plan, tensors: Mapping[str, Tensor], batch: int, num_tokens: int, device: torch.device
) -> Tensor | slice:
    """Return which of the pass's B T tokens get logits."""
    tokens = tensors.get("logits_at")
    if tokens is None:
        if plan.num_logits is None:
            return slice(None)
        tokens = torch.arange(max(num_tokens - plan.num_logits, 0), num_tokens, device=device)
    starts = torch.arange(batch, device=device)[:, None] * num_tokens
    return (starts + tokens).flatten()
