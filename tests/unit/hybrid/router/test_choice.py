"""The choice: against a slow twin, and against the law that sampled rows must keep."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from hybrid.router.choice import Prices, best_options, cut_in_order
from hybrid.types import Mode

MODES = (Mode.SPECULATIVE, Mode.FUSED, Mode.ONE_PASS)


def cost(width, groups):
    return 7.0 + 1.1 * width + 0.4 * groups


def slow_options(odds, prices, least, num_sure):
    """Every (mode, n), from the definitions."""
    count = max(map(len, odds))
    for mode in MODES:
        for n in range(min(least, count), count + 1):
            tokens = hits = 0.0
            for row in odds:
                fed = row[:n]
                tokens += 1 + sum(math.prod(fed[: i + 1]) for i in range(len(fed)))
                hits += math.prod(fed) if mode is Mode.FUSED else float(mode is Mode.ONE_PASS)
            points = len(range(num_sure, n + 1)) if n > num_sure else 1
            groups = {Mode.SPECULATIVE: 0, Mode.FUSED: 1, Mode.ONE_PASS: points}[mode]
            ms = prices.ms(1 + n, groups)
            yield mode, n, tokens, hits, ms, tokens + prices.worth * hits - prices.rate * ms


@pytest.mark.parametrize("seed", range(40))
def test_the_best_of_each_mode_is_that_of_the_slow_twin(seed):
    rng = random.Random(seed)
    batch = rng.randint(1, 4)
    odds = [[rng.random() for _ in range(rng.randint(0, 5))] for _ in range(batch)]
    num_sure = rng.randint(0, len(odds[0])) if batch == 1 else 0
    odds[0][:num_sure] = [1.0] * num_sure
    prices = Prices(rng.uniform(0.02, 0.3), rng.uniform(0, 2), cost)
    least = rng.randint(0, 2)
    every = list(slow_options(odds, prices, least, num_sure))
    found = best_options(odds, prices, MODES, least=least, num_sure=num_sure)
    for option, mode in zip(found, MODES, strict=True):
        best = max((own for own in every if own[0] is mode), key=lambda own: own[-1])
        assert (option.mode, option.num_draft_tokens) == best[:2]
        assert tuple(option)[2:] == pytest.approx(best[2:])


def test_a_long_draft_is_cut_where_it_pays_no_more():
    prices = Prices(0.1, 0.0, lambda width, groups: 5.0 * width)  # a token costs half a token
    (option,) = best_options([[0.9, 0.8, 0.6, 0.9]], prices, MODES[:1])
    assert option.num_draft_tokens == 2, "0.9 and 0.72 pay, 0.43 does not"


@pytest.mark.parametrize("seed", range(30))
def test_whether_a_token_is_fed_depends_on_nothing_behind_it(seed):
    rng = random.Random(seed)
    typical = [rng.random() for _ in range(5)]
    odds = [rng.random() for _ in range(5)]
    prices = Prices(rng.uniform(0.05, 0.3), rng.uniform(0, 1), cost)
    fed = cut_in_order(odds, typical, prices, MODES)[0].num_draft_tokens
    seen = set()
    for known in range(6):
        changed = [*odds[:known], *(rng.random() for _ in range(5 - known))]
        now = cut_in_order(changed, typical, prices, MODES)[0].num_draft_tokens
        seen.add(now)
        # The odds of token n + 1 decide that it is not fed; those behind it decide nothing.
        assert min(now, known) == min(fed, known)
    options = cut_in_order(odds, typical, prices, MODES)
    assert {option.num_draft_tokens for option in options} == {fed}


def test_trusted_tokens_are_fed_and_need_no_groups_before_them():
    prices = Prices(0.05, 1.0, cost)
    options = cut_in_order([1.0, 1.0, 0.01], [0.5] * 3, prices, MODES, num_sure=2)
    assert {option.num_draft_tokens for option in options} == {2}
    none, fused, one_pass = options
    assert none.tokens == 3
    assert fused.hits == one_pass.hits == 1
    assert fused.ms == one_pass.ms == cost(3, 1)


TARGET = (0.6, 0.4)
DRAFT = (0.3, 0.7)
SECOND = {0: 0.95, 1: 0.05}
"""Odds of the second token: they depend on which first token was drawn."""


def first_token(cut):
    """Exact law of the first committed token, if `cut` decides how many tokens are fed."""
    law = [0.0, 0.0]
    for drawn in (0, 1):
        fed = cut([0.2, SECOND[drawn]])
        if fed == 0:
            for token in (0, 1):
                law[token] += DRAFT[drawn] * TARGET[token]
            continue
        accepted = min(1.0, TARGET[drawn] / DRAFT[drawn])
        law[drawn] += DRAFT[drawn] * accepted
        rest = [max(t - d, 0.0) for t, d in zip(TARGET, DRAFT, strict=True)]
        for token in (0, 1):
            law[token] += DRAFT[drawn] * (1 - accepted) * rest[token] / sum(rest)
    return law


def test_what_a_sampled_row_commits_follows_the_target():
    def of(rate, worth):
        return Prices(rate, worth, lambda width, groups: 3.0 + 4.0 * (width > 1))

    for rate, worth in itertools.product((0.01, 0.05, 0.075, 0.09, 0.3), (0.0, 0.5)):
        prices = of(rate, worth)
        law = first_token(
            lambda odds, prices=prices: (
                cut_in_order(odds, [0.5, 0.5], prices, MODES)[0].num_draft_tokens
            )
        )
        assert law == pytest.approx(TARGET)
    # The choice of greedy rows looks ahead, and would not: that is why there are two.
    greedy = of(0.075, 0.0)
    biased = first_token(lambda odds: best_options([odds], greedy, MODES[:1])[0].num_draft_tokens)
    assert biased != pytest.approx(TARGET)
