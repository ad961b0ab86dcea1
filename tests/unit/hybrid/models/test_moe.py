"""Routing equals two plain loops, and a token's bits are its own."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid.models.elementwise import gate
from hybrid.models.linear import DenseLinear
from hybrid.models.moe import Experts
from hybrid.models.spec import MoeSpec

WIDTH, SIZE = 64, 64


def build(spec: MoeSpec, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Experts, Tensor]:
    """Return experts with random weights, and 9 tokens."""
    generator = torch.Generator().manual_seed(seed)

    def linear(rows: int, width: int) -> DenseLinear:
        weight = torch.randn(rows, width, generator=generator) / width**0.5
        return DenseLinear(weight.to(dtype), steady=True)

    router = linear(spec.num_experts, WIDTH)
    router = DenseLinear(router.dense().float(), steady=True)
    bias = torch.randn(spec.num_experts, generator=generator) if spec.has_bias else None
    pairs = [(linear(2 * SIZE, WIDTH), linear(WIDTH, SIZE)) for _ in range(spec.num_experts)]
    return Experts(spec, router, bias, pairs), torch.randn(9, WIDTH, generator=generator).to(dtype)


def route_by_hand(spec: MoeSpec, experts: Experts, token: Tensor) -> dict[int, float]:
    """Return {expert: weight} for one token [C]."""
    logits = (experts._router.dense().double() @ token.double()).tolist()
    if spec.scoring == "sigmoid":
        scores = [1 / (1 + math.exp(-z)) for z in logits]
    else:
        scores = [math.exp(z) / sum(math.exp(other) for other in logits) for z in logits]
    bias = [0.0] * spec.num_experts if experts._bias is None else experts._bias.tolist()
    ranking = [score + b for score, b in zip(scores, bias, strict=True)]
    size = spec.num_experts // spec.num_groups
    allowed = set(range(spec.num_experts))
    if spec.num_groups > 1:
        groups = [range(g * size, (g + 1) * size) for g in range(spec.num_groups)]
        groups.sort(key=lambda group: -sum(sorted(ranking[e] for e in group)[-2:]))
        allowed = {e for group in groups[: spec.num_chosen_groups] for e in group}
    chosen = sorted(allowed, key=lambda e: -ranking[e])[: spec.num_chosen]
    total = sum(scores[e] for e in chosen) if spec.normalize else 1.0
    return {e: spec.scale * scores[e] / total for e in chosen}


@st.composite
def specs(draw: st.DrawFn) -> MoeSpec:
    num_groups, per_group = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    num_chosen_groups = draw(st.integers(1, num_groups))
    return MoeSpec(
        layers=(True,),
        num_experts=num_groups * per_group,
        num_chosen=draw(st.integers(1, num_chosen_groups * per_group)),
        intermediate_size=SIZE,
        scoring=draw(st.sampled_from(["softmax", "sigmoid"])),
        has_bias=draw(st.booleans()),
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        normalize=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
    )


@settings(deadline=None, max_examples=60)
@given(specs(), st.integers(0, 2**20))
def test_routing_equals_plain_loops(spec: MoeSpec, seed: int) -> None:
    experts, x = build(spec, seed)
    chosen, weights = experts.route(x)
    assert weights.dtype == torch.float32
    for token, ids, values in zip(x, chosen.tolist(), weights.tolist(), strict=True):
        want = route_by_hand(spec, experts, token)
        assert dict(zip(ids, values, strict=True)) == pytest.approx(want, rel=1e-4)


SPECS = {
    "sigmoid": MoeSpec((True,), 8, 3, SIZE, 0, "sigmoid", True, 4, 2, True, 2.5),
    "softmax": MoeSpec((True,), 5, 2, SIZE, normalize=False),
}


@pytest.mark.parametrize("name", SPECS)
def test_output_is_the_weighted_sum_of_the_chosen(name: str) -> None:
    experts, x = build(SPECS[name], seed=1)
    out = experts(x)
    for token, row in zip(x, out, strict=True):
        want = torch.zeros(WIDTH, dtype=torch.float64)
        for e, weight in route_by_hand(SPECS[name], experts, token).items():
            gate_up, down = (linear.dense().double() for linear in experts.experts[e])
            gate, up = (gate_up @ token.double()).chunk(2)
            want += weight * (down @ (gate / (1 + (-gate).exp()) * up))
        torch.testing.assert_close(row.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_a_tokens_bits_do_not_depend_on_the_others(name: str, dtype: torch.dtype) -> None:
    experts, x = build(SPECS[name], seed=2, dtype=dtype)
    whole = experts(x)
    assert whole.dtype == dtype
    for n in range(len(x)):
        assert torch.equal(experts(x[n : n + 1])[0], whole[n])
    assert torch.equal(experts(x.flip(0)).flip(0), whole)


def test_an_mlp_without_width_adds_nothing() -> None:
    """The shared experts of a layer that has none."""
    x, nothing = torch.randn(3, WIDTH), torch.empty(0, WIDTH)
    hidden = gate(DenseLinear(nothing)(x))
    assert torch.equal(DenseLinear(nothing.T)(hidden), torch.zeros(3, WIDTH))


def test_nbytes_counts_router_and_experts() -> None:
    experts, _ = build(SPECS["sigmoid"], seed=3)
    assert experts.nbytes == 4 * (8 * WIDTH + 8 * 3 * SIZE * WIDTH)
