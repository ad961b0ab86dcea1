"""Sampling in mixed modes: the law is the target's, and a row does not depend on its batch."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict

import pytest
from carrying import (
    CarryingFake,
    CarryingTarget,
    RandomRouter,
    RouterPerRow,
    carrying_engine,
    decode,
)
from exact_laws import chi_square, enumerated_law, exact_law
from fakes import random_adapter, random_prompts, tiny_backbone
from mixed_modes import LONG, NEW, PROMPTS, VOCAB, K, greedy, make

from hybrid.drafters.self_diffusion import SelfDiffusionDrafter
from hybrid.params import SamplingParams
from hybrid.router.fixed import FixedRouter
from hybrid.types import Mode
from hybrid.verifiers.block import accept_by_block
from hybrid.verifiers.rejection import accept_by_token

RULES = {"rejection": accept_by_token, "block": accept_by_block}


class Dishonest(RandomRouter):
    """Cuts a draft by its tokens: those that it keeps are more often 0 than the law says."""

    def judge(self, rows, proposal, history):
        routes = super().judge(rows, proposal, history)
        return tuple(
            dataclasses.replace(route, num_draft_tokens=0, points=(0,))
            if route.num_draft_tokens and proposal.tokens[b, 0]
            else route
            for b, route in enumerate(routes)
        )


ROUTERS = {
    "fused": lambda: FixedRouter(1, Mode.FUSED),
    "one-pass": lambda: FixedRouter(2, Mode.ONE_PASS),
    "random": lambda: RandomRouter(2, 5, floor=0.62),
    "random-always": lambda: RandomRouter(2, 6, floor=0.7, always_draft=True),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("router", ROUTERS)
def test_the_sampled_law_is_exactly_the_targets(router, rule, monkeypatch):
    target, drafter, prompt = CarryingTarget(2, seed=5), CarryingFake(2, 2), [1, 0, 1]
    count = 5 if router == "fused" else 4  # it reuses slots after a draft that was right
    law, seen = enumerated_law(
        target, drafter, ROUTERS[router](), RULES[rule], prompt, count, monkeypatch
    )
    expected = exact_law(target, prompt, count)
    assert sum(law.values()) == pytest.approx(1, abs=1e-6)
    assert max(abs(law[answer] - p) for answer, p in expected.items()) < 1e-6
    assert any(first_slot > 1 for _, first_slot in seen), "no carried slot was drafted from"
    modes = {mode for mode, _ in seen}
    assert len(modes & {Mode.FUSED, Mode.ONE_PASS}) >= (2 if "random" in router else 1)


def test_the_enumeration_detects_a_router_that_looks_at_the_tokens(monkeypatch):
    target, drafter, prompt = CarryingTarget(2, seed=5), CarryingFake(2, 2), [1, 0, 1]
    router = Dishonest(2, 6, always_draft=True)
    law, _ = enumerated_law(target, drafter, router, accept_by_token, prompt, 3, monkeypatch)
    assert max(abs(law[a] - p) for a, p in exact_law(target, prompt, 3).items()) > 1e-3


@pytest.mark.parametrize("verifier", RULES)
def test_a_model_that_carries_its_own_drafts_samples_from_its_law(verifier):
    """Pearson's chi-square over the 81 answers of 4 tokens, 1,500 runs of a real model.

    80 degrees of freedom at most: a right decoder exceeds 135 with odds below 1 in 10,000.
    """
    backbone = tiny_backbone(vocab_size=3)
    drafter = SelfDiffusionDrafter(backbone, random_adapter(backbone, 3, seed=1))
    prompt, batch, runs, count = [1, 2, 1], 50, 30, 4
    seen, reused = Counter(), 0
    for start in range(runs):
        params = [
            SamplingParams(temperature=2.0, seed=start * batch + i, max_new_tokens=count)
            for i in range(batch)
        ]
        router = RandomRouter(2, start, floor=0.3, always_draft=True)
        prompts = [prompt] * batch
        engine, rows = carrying_engine(
            backbone, drafter, prompts, params, router, verifier=verifier
        )
        for row in decode(engine, rows):
            seen[tuple(row)] += 1
        reused += sum(s.first_slot > 1 for r in engine.history for s in r.rows)
    assert reused > 150
    law = exact_law(backbone, prompt, count, temperature=2.0)
    statistic, num_cells = chi_square(seen, law, batch * runs)
    assert num_cells > 40
    assert statistic < 135


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["late", "combined", "uniform"])
def test_a_row_is_the_same_alone_and_beside_rows_in_other_modes(kind, temperature):
    drafter, backbone = make(kind)
    prompts = random_prompts(9, 1, 17, 4, 9, vocab_size=VOCAB, seed=2)
    params = [
        SamplingParams(temperature=temperature, top_p=0.95, seed=7 + i, max_new_tokens=NEW - i)
        for i in range(len(prompts))
    ]
    modes = [Mode.FUSED, Mode.ONE_PASS, Mode.SPECULATIVE, Mode.AR, Mode.ONE_PASS]
    routers = {i: FixedRouter(0 if m == Mode.AR else 3, m) for i, m in enumerate(modes)}

    def story(prompts, params, routers):
        engine, rows = carrying_engine(backbone, drafter, prompts, params, RouterPerRow(routers))
        answers = decode(engine, rows)
        own = defaultdict(list)
        for step in (step for record in engine.history for step in record.rows):
            own[step.index].append(
                (step.tokens, step.drafted, step.num_accepted, step.first_slot, step.num_slots)
            )
        return [(answer, own[i]) for i, answer in enumerate(answers)]

    together = story(prompts, params, routers)
    for i, prompt in enumerate(prompts):
        (alone,) = story([prompt], params[i : i + 1], {0: routers[i]})
        if kind == "combined" and not temperature:  # its drafts may follow the clock
            assert alone[0] == together[i][0]
        else:
            assert alone == together[i]


def test_greedy_and_sampled_rows_share_a_batch():
    drafter, backbone = make("late")
    params = [LONG, LONG.replace(temperature=1.0, seed=3), LONG]
    for seed in range(4):
        engine, rows = carrying_engine(backbone, drafter, PROMPTS, params, RandomRouter(K, seed))
        answers = decode(engine, rows)
        for index in (0, 2):
            assert answers[index] == greedy(backbone, tuple(PROMPTS[index]), NEW)
