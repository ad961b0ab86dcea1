"""The statistics behind `risk`: p-values and upper bounds for a share of disagreeing tokens.

Nothing is assumed about the model, the drafter or how tokens depend on each other, only that the
prompts are independent draws from one population: a *prompt* is one observation, its tokens are
not. A threshold is accepted when "its risk is `risk` or more" is rejected:

| function | observes per prompt | use |
|---|---|---|
| `betting_p_value` | tokens and how many disagree | the default: adapts to a small variance |
| `hoeffding_bentkus_p_value` | a loss in [0, 1] | to compare with; assumes the worst variance |
| `clopper_pearson_upper` | yes or no | exact for counts |

Next: hybrid/router/monitor.py, which guards the same promise at run time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from hybrid.errors import ConfigError

# Stakes of the bettors, as shares of the largest stake that cannot go bankrupt, and the capital
# that each begins with. A disagreement far below `risk` is best bet against with everything, one
# that is just below it with little; halving both covers all cases at the price of a factor two
# for the first, four for the second and so on.
_STAKES = tuple(2.0**-k for k in range(8))
_CAPITAL = (*(s / 2 for s in _STAKES[:-1]), _STAKES[-1])

_STEPS = 50  # bisections of [0, 1]; a few more, and a float would round to 0 or 1


def betting_p_value(
    disagreements: Sequence[float], counts: Sequence[float], risk: float, *, most: float = 1
) -> float:
    """Return the p-value of "the share of disagreeing tokens is `risk` or more".

    A prompt with n unverified tokens, d of which disagree, counts as w = min(n, most) tokens with
    the same share d / n. The share of the population is the ratio of means
    E[w d / n] / E[w]: of all tokens, if no prompt can have more than `most`; the mean of the
    prompts' own shares, if `most` is 1. Prompts without unverified tokens have no say.
    `most` must be chosen before the disagreements are seen.

    Betting (Waudby-Smith and Ramdas, arXiv:2010.09686, section 4): the gain
    x = w (risk - d / n) / most lies in [risk - 1, risk], and its mean is 0 or less under the
    hypothesis. A bettor who begins with 1 and stakes s in [0, 1] multiplies the capital by
    1 + s x / (1 - risk) per prompt. That is never negative and does not grow on average, whatever
    the law of x: the capital is a supermartingale, and so is that of several bettors together.
    By Ville's inequality it ever reaches 1 / p with probability p at most, so that p = 1 /
    (largest capital on the way) is a p-value. The stakes are fixed, so the order of the prompts
    matters only to where the maximum lies; it must not depend on the disagreements.

    Each factor grows with `risk`, so the p-value falls, and `upper_bound` may invert it. About
    log(2 / delta) / risk clean prompts are needed, 178 for 0.02 and 0.05, and most / w times as
    many where w is smaller than `most`: a large `most` is expensive for strict thresholds.

    Args:
        disagreements: d of each prompt, in [0, n]; a fraction if sampled tokens disagree with
            their rejection probability.
        counts: n of each prompt, its unverified tokens.
        risk: in (0, 1).
        most: tokens that a prompt counts as at most.

    Raises:
        ConfigError: different lengths, d outside [0, n], or `risk` or `most` out of range.
    """
    _check_share(risk, "risk")
    if not most > 0:
        raise ConfigError(f"most: got {most}, expected a positive number of tokens.")
    if len(disagreements) != len(counts):
        raise ConfigError(
            f"got {len(disagreements)} disagreements for {len(counts)} prompts, expected as many."
        )
    capital, largest = list(_CAPITAL), 1.0
    for disagreement, count in zip(disagreements, counts, strict=True):
        if not 0 <= disagreement <= count:
            raise ConfigError(
                f"got {disagreement} disagreeing of {count} tokens, expected 0 up to {count}."
            )
        if count:
            gain = min(count, most) / most * (risk - disagreement / count) / (1 - risk)
            capital = [c * (1 + stake * gain) for c, stake in zip(capital, _STAKES, strict=True)]
            largest = max(largest, sum(capital))
    return 1 / largest


def hoeffding_bentkus_p_value(mean: float, num_losses: int, risk: float) -> float:
    """Return the p-value of "losses in [0, 1] have a mean of `risk` or more".

    The smaller of Hoeffding's and Bentkus' tails (Bates et al., arXiv:2101.02703, section 3.1;
    Angelopoulos et al., arXiv:2110.01052, proposition 7).

    Args:
        mean: of the independent losses that were observed.
        num_losses: how many they are.
        risk: in (0, 1).

    Raises:
        ConfigError: `mean` or `risk` outside [0, 1], or no loss.
    """
    _check_share(risk, "risk")
    if not 0 <= mean <= 1 or num_losses < 1:
        raise ConfigError(
            f"got a mean of {mean} over {num_losses} losses, expected one in [0, 1] of at least 1."
        )
    low = min(mean, risk)
    divergence = _term(low, risk) + _term(1 - low, 1 - risk)
    bentkus = math.e * binomial_cdf(math.ceil(num_losses * mean), num_losses, risk)
    return min(math.exp(-num_losses * divergence), bentkus, 1.0)


def clopper_pearson_upper(num_failures: int, num_trials: int, delta: float) -> float:
    """Return the exact upper bound of a probability: it is lower with probability 1 - delta.

    The largest u for which as few failures as were observed have probability `delta`.

    Args:
        num_failures: of independent trials of the same probability.
        num_trials: how many they are; 0 tells nothing, the bound is 1.
        delta: in (0, 1).

    Raises:
        ConfigError: more failures than trials, or `delta` out of range.
    """
    if not 0 <= num_failures <= num_trials:
        raise ConfigError(
            f"got {num_failures} failures of {num_trials} trials, expected 0 up to {num_trials}."
        )
    return upper_bound(lambda share: binomial_cdf(num_failures, num_trials, share), delta)


def upper_bound(p_value: Callable[[float], float], delta: float) -> float:
    """Return the least share whose hypothesis "this much or more" is rejected, 1 if none is.

    By bisection, rounded upwards. The true share is below with probability 1 - delta.

    Args:
        p_value: of the hypothesis about a share in (0, 1); it must fall as the share grows.
        delta: in (0, 1).

    Raises:
        ConfigError: `delta` out of range.
    """
    _check_share(delta, "delta")
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if p_value(middle) <= delta else (middle, high)
    return high


def fixed_sequence(p_values: Iterable[float], delta: float) -> int:
    """Return how many leading hypotheses are rejected: the thresholds that keep the promise.

    Learn then test by fixed-sequence testing (Angelopoulos et al., arXiv:2110.01052, section 3):
    each is tested at the whole `delta`, the first that is not rejected ends it. With probability
    1 - delta none of the rejected is true, however the p-values depend on each other: a mistake
    needs a p-value of `delta` or less at the *first* true hypothesis of the order.

    Args:
        p_values: strict to lax thresholds, an order that was fixed before the data were seen; none
            is asked for behind the first that is not rejected.
        delta: in (0, 1).

    Raises:
        ConfigError: `delta` out of range.
    """
    _check_share(delta, "delta")
    return sum(1 for _ in takewhile(lambda p: p <= delta, p_values))


def binomial_cdf(num_failures: int, num_trials: int, share: float) -> float:
    """Return the probability of at most `num_failures` in `num_trials` trials, share in (0, 1).

    Terms are summed from their logarithms, so that none under- or overflows.
    """
    whole = math.lgamma(num_trials + 1)
    terms = (
        math.exp(
            whole
            - math.lgamma(k + 1)
            - math.lgamma(num_trials - k + 1)
            + k * math.log(share)
            + (num_trials - k) * math.log1p(-share)
        )
        for k in range(min(num_failures, num_trials) + 1)
    )
    return min(math.fsum(terms), 1.0)


def _term(a: float, b: float) -> float:
    return a * math.log(a / b) if a else 0.0


def _check_share(value: float, name: str) -> None:
    if not 0 < value < 1:
        raise ConfigError(f"{name}: got {value}, expected a number between 0 and 1.")
