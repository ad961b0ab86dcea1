"""Mixture of experts: a router sends each token to a few MLPs out of many.

In plain PyTorch, expert by expert, each on the tokens that chose it: it reads the choice back from
the device once per layer. Next: hybrid/models/transformer.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid.models.elementwise import gate, gate_in_parts
from hybrid.models.linear import Linear
from hybrid.models.spec import MoeSpec


class Experts:
    """The routed experts of one layer; those that every token visits are the layer's own MLP.

    Attributes:
        experts: gate and up, and down, of each.
    """

    def __init__(
        self,
        spec: MoeSpec,
        router: Linear,
        bias: Tensor | None,
        experts: Sequence[tuple[Linear, Linear]],
        *,
        exact: bool = False,
    ) -> None:
        """Hold the weights.

        Args:
            spec: how experts are chosen.
            router: [C] -> [E] in float32, for a rounding there may change the choice.
            bias: [E] float32 or None.
            experts: E pairs. Steady layers: how many tokens an expert gets depends on what else is
                in the pass, a token's bits must not.
            exact: see `Elementwise`.
        """
        self.spec, self.experts, self._router, self._bias = spec, experts, router, bias
        self._gate = gate_in_parts if exact else gate

    def __call__(self, x: Tensor) -> Tensor:
        """Return [N, C] for x [N, C]."""
        chosen, weights = self.route(x)
        out = x.new_zeros(x.shape, dtype=torch.float32)
        # In order of the experts, so that a token's sum has one order whatever the pass.
        for index in sorted({*chosen.flatten().tolist()}):
            tokens, slots = (chosen == index).nonzero(as_tuple=True)
            gate_up, down = self.experts[index]
            update = down(self._gate(gate_up(x[tokens]))).float()
            out.index_add_(0, tokens, update * weights[tokens, slots, None])
        return out.to(x.dtype)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return for each of N tokens the chosen experts [N, k] and their float32 weights [N, k].

        The bias takes part in the choice only. A group of experts is judged by the sum of its two
        best, as in DeepSeek-V3 (arXiv:2412.19437 §2.1.2).
        """
        # In float64, because a vector unit may round the last few numbers of a tensor otherwise.
        spec, logits = self.spec, self._router(x.float()).double()
        scores = logits.sigmoid() if spec.scoring == "sigmoid" else logits.softmax(dim=-1)
        scores = scores.float()
        ranking = scores if self._bias is None else scores + self._bias
        if spec.num_groups > 1:
            grouped = ranking.view(len(x), spec.num_groups, -1)  # [N, groups, E / groups]
            value = grouped.topk(2).values.sum(dim=-1)
            kept = value.topk(spec.num_chosen_groups).indices
            dropped = torch.ones_like(value, dtype=torch.bool).scatter_(1, kept, False)
            ranking = grouped.masked_fill(dropped[..., None], float("-inf")).flatten(1)
        chosen = ranking.topk(spec.num_chosen).indices
        weights = scores.gather(1, chosen)
        if spec.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return chosen, weights * spec.scale

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self._router.nbytes + sum(x.nbytes for pair in self.experts for x in pair)
