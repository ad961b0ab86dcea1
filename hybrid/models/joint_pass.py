"""`JointPass`: the tokens of a pass and the slots that ride in it, as one stream of rows.

So a GPU reads each base weight once for both. What an adapter changes for the slots is a low-rank
update of their rows (kernels/gated_lora). A CPU runs two streams: there the tokens keep the bits
that they have without slots.
Next: hybrid/models/kernel_pass.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid.kernels.swiglu import swiglu
from hybrid.models.passes import Operations
from hybrid.models.weights import Layer


class JointPass(Operations):
    """Runs the tokens' layers on the first rows and the slots' on the others."""

    def __init__(
        self, tokens: Operations, slots: Operations, layers: Sequence[Layer], num_rows: int
    ) -> None:
        """Keep the parts.

        Args:
            tokens: norms, and the attention of the tokens.
            slots: the attention of the slots.
            layers: of the slots, by index; those in use share the weights of the tokens'.
            num_rows: how many rows are tokens.
        """
        self._tokens, self._slots = tokens, slots
        self._layers, self._num_rows = layers, num_rows

    def layer(
        self, layer: Layer, index: int, x: Tensor, update: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Run a layer of the tokens, and the slots' of the same index."""
        own, n = self._layers[index], self._num_rows
        h, x = self._norm(x, update, layer.input_norm, own.input_norm)
        qkv = own.qkv.behind(n, h)
        # In this order: slots see the keys of the tokens.
        of_tokens = self._tokens.attend(layer, index, qkv[:n])
        out = torch.cat([of_tokens, self._slots.attend(own, index, qkv[n:])])
        h, x = self._norm(x, own.o.behind(n, out), layer.post_norm, own.post_norm)
        update = own.down.behind(n, swiglu(own.gate_up.behind(n, h)))
        return x, update if layer.experts is None else update + layer.experts(h)

    def _norm(
        self, x: Tensor, update: Tensor | None, base: Tensor, own: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return norm and sum of all rows; an adapter may have weights of its own."""
        if own is base:
            return self._tokens.norm(x, base, update)
        parts = (slice(self._num_rows), base), (slice(self._num_rows, None), own)
        pairs = [
            self._tokens.norm(x[rows], weight, None if update is None else update[rows])
            for rows, weight in parts
        ]
        h, total = (torch.cat(both) for both in zip(*pairs, strict=True))
        return h, total


def can_join(base: Sequence[Layer], own: Sequence[Layer]) -> bool:
    """Return whether slots may run behind the tokens: their layers differ by updates at most."""
    return all(_shares(*pair) for pair in zip(base, own, strict=True))


def _shares(base: Layer, own: Layer) -> bool:
    names = ("qkv", "o", "gate_up", "down")
    shares = (getattr(own, name).shares(getattr(base, name)) for name in names)
    return own.experts is base.experts and all(shares)
