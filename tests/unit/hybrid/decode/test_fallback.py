"""A drafter that raises or proposes nonsense: one warning, and the answer as if without it."""

from __future__ import annotations

import warnings

import pytest
import torch
from fakes import (
    EOS,
    GarbageDrafter,
    Oracle,
    RaisingDrafter,
    RandomTarget,
    ScriptedTarget,
    SkewedDrafter,
    always_right,
    always_wrong,
    decoder,
    text_decoder,
)

from hybrid.decode.fallback import DrafterWarning
from hybrid.streams import RandomStream
from hybrid.types import Proposal

VOCAB = 16
PROMPTS = [[1, 2], [3]]


def table(batch, width, fill=1, dtype=torch.long):
    return torch.full((batch, width), fill, dtype=dtype)


def bare(**fields):
    """A Proposal that was never checked."""
    proposal = object.__new__(Proposal)
    for name in Proposal.__slots__:
        object.__setattr__(proposal, name, fields.get(name))
    return proposal


def laws(batch, width, fill=1 / VOCAB):
    return torch.full((batch, width, VOCAB), fill)


def nan_at(batch, width):
    probs = laws(batch, width)
    probs[0, 0, 7] = torch.nan
    return probs


GARBAGE = {
    "none": lambda b, k: None,
    "a tensor": lambda b, k: table(b, k),
    "no tensor": lambda b, k: bare(tokens=[[1]], num_tokens=(1,)),
    "one dimension": lambda b, k: bare(tokens=table(b, k)[0], num_tokens=(k,) * b),
    "wrong batch": lambda b, k: Proposal(table(b + 1, k), (k,) * (b + 1)),
    "fewer counts": lambda b, k: bare(tokens=table(b, k), num_tokens=(k,) * (b - 1)),
    "counts beyond the table": lambda b, k: bare(tokens=table(b, k - 1), num_tokens=(k,) * b),
    "negative count": lambda b, k: bare(tokens=table(b, k), num_tokens=(-1,) * b),
    "no counts": lambda b, k: bare(tokens=table(b, k), num_tokens=None),
    "more than asked for": lambda b, k: Proposal(table(b, k + 1), (k + 1,) * b),
    "far more than asked for": lambda b, k: Proposal(table(b, 5000), (5000,) * b),
    "id too large": lambda b, k: Proposal(table(b, k, VOCAB), (k,) * b),
    "negative id": lambda b, k: Proposal(table(b, k, -1), (k,) * b),
    "fractions": lambda b, k: Proposal(table(b, k, dtype=torch.float32), (k,) * b),
    "booleans": lambda b, k: Proposal(table(b, k, dtype=torch.bool), (k,) * b),
    "law of another vocabulary": lambda b, k: Proposal(
        table(b, k), (k,) * b, draft_probs=torch.ones(b, k, VOCAB - 1)
    ),
    "law without the token": lambda b, k: Proposal(
        table(b, k, 3), (k,) * b, draft_probs=laws(b, k) * (torch.arange(VOCAB) != 3)
    ),
    "law of zeros": lambda b, k: Proposal(table(b, k), (k,) * b, draft_probs=laws(b, k, 0.0)),
    "law with NaN": lambda b, k: Proposal(table(b, k), (k,) * b, draft_probs=nan_at(b, k)),
    "infinite law": lambda b, k: Proposal(table(b, k), (k,) * b, draft_probs=laws(b, k, torch.inf)),
    "negative law": lambda b, k: Proposal(
        table(b, k), (k,) * b, draft_probs=laws(b, k) - 2 * (torch.arange(VOCAB) == 5)
    ),
    "entropy of another shape": lambda b, k: bare(
        tokens=table(b, k), num_tokens=(k,) * b, entropy=torch.zeros(b), num_forwards=0
    ),
}


def run_it(drafter, verifier="auto", **fields):
    model = decoder(RandomTarget(VOCAB), drafter, verifier=verifier)
    return [r.token_ids for r in model.generate(PROMPTS, max_new_tokens=9, **fields)]


@pytest.mark.parametrize("make", GARBAGE.values(), ids=GARBAGE)
def test_garbage_changes_nothing(make):
    with pytest.warns(DrafterWarning, match="Drafter 'garbage' raised .*output is not affected"):
        got = run_it(GarbageDrafter(make))
    assert got == run_it("none")


@pytest.mark.parametrize("verifier", ["rejection", "block"])
@pytest.mark.parametrize("make", GARBAGE.values(), ids=GARBAGE)
def test_garbage_changes_nothing_sampled(make, verifier):
    fields = {"temperature": 1.0, "seed": 3}
    with pytest.warns(DrafterWarning):
        got = run_it(GarbageDrafter(make), verifier, **fields)
    assert got == run_it("none", verifier, **fields)


@pytest.mark.parametrize(
    "fields", [{}, {"repetition_penalty": 1.2}, {"temperature": 1.0, "seed": 1}]
)
@pytest.mark.parametrize("fill", [-1, 10**9])
def test_padding_may_hold_anything(fill, fields):
    def make(batch, width):
        tokens = table(batch, width, fill)
        tokens[0, 0] = 1
        return Proposal(tokens, (1, *[0] * (batch - 1)), draft_probs=None)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = run_it(GarbageDrafter(make), "rejection", **fields)
    if not fields.get("temperature"):
        assert got == run_it("none", "rejection", **fields)


def test_short_integers_are_ids_too():
    drafter = GarbageDrafter(lambda b, k: Proposal(table(b, k, 1, torch.int32), (k,) * b))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_it(drafter) == run_it("none")


def test_a_raising_drafter_warns_once_and_changes_nothing():
    drafter = RaisingDrafter(ValueError("broken on purpose"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = run_it(drafter)
    assert drafter.num_drafts > 5
    assert [w.category for w in caught] == [DrafterWarning]
    message = str(caught[0].message)
    assert "'raising'" in message
    assert "ValueError: broken on purpose" in message
    assert got == run_it("none")


def test_each_call_warns_again():
    model = text_decoder("abc", RaisingDrafter(ValueError()))
    for _ in range(2):
        with pytest.warns(DrafterWarning):
            model.generate("?")


def test_only_the_failing_steps_are_without_a_draft():
    answer = list(range(3, 15))
    target = ScriptedTarget([*answer, EOS], 1)
    sequence = [9, *answer, EOS]
    inner = always_right([sequence], 3)
    inner.vocab_size = target.vocab_size
    with pytest.warns(DrafterWarning):
        result = decoder(target, RaisingDrafter(RuntimeError(), inner, every=2)).generate([9])
    assert result.token_ids == (*answer, EOS)
    # Steps of 1 + 3, 1, 1 + 3, 1, ... tokens after the first one.
    assert result.stats.acceptance_histogram[3] >= 2
    assert result.stats.acceptance_length > 1.5


def test_a_sampled_answer_survives_a_raising_drafter():
    drafter = RaisingDrafter(RuntimeError(), SkewedDrafter(VOCAB), every=2)
    with pytest.warns(DrafterWarning):
        first = run_it(drafter, temperature=1.0, seed=5)
    assert all(len(tokens) == 9 for tokens in first)


def test_observe_may_raise_too():
    drafter = always_right([], 3)
    drafter.observe = lambda record: 1 / 0
    with pytest.warns(DrafterWarning, match="ZeroDivisionError"):
        got = run_it(drafter)
    assert got == run_it("none")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit()])
def test_an_interrupt_is_not_a_failure_of_the_drafter(error):
    model = text_decoder("abc", RaisingDrafter(error))
    with pytest.raises(type(error)):
        model.generate("?")
    assert model.generate("?", strategy="ar").text == "abc"


def test_a_sound_proposal_passes_unchanged_but_for_its_padding():
    from hybrid.decode.fallback import _check, _fit
    from hybrid.params import SamplingParams
    from hybrid.types import SequenceState

    rows = [
        SequenceState(b, [1], 1, SamplingParams(max_new_tokens=n), RandomStream(0))
        for b, n in enumerate((9, 2))
    ]
    given = Proposal(
        torch.tensor([[3, 4, -9], [5, 6, 7]]),
        (2, 3),
        draft_probs=laws(2, 3),
        entropy=torch.ones(2, 3),
        num_forwards=1,
    )
    _check(given, 2, 3, VOCAB)
    fitted = _fit(given, rows, VOCAB)
    assert fitted.num_tokens == (2, 1)  # row 1 has room for one and the bonus
    assert fitted.tokens.tolist() == [[3, 4], [5, 6]]
    assert fitted.draft_probs.shape == (2, 2, VOCAB)
    assert fitted.entropy.shape == (2, 2)
    assert fitted.num_forwards == 1


def test_a_drafter_whose_reset_raises_costs_a_warning():
    class Stubborn(Oracle):
        def reset(self):
            raise RuntimeError("never")

    expected = decoder(RandomTarget(VOCAB)).generate([1], strategy="ar", max_new_tokens=6)
    model = decoder(RandomTarget(VOCAB), Stubborn([], 3))
    with pytest.warns(DrafterWarning, match="never"):
        result = model.generate([1], max_new_tokens=6)
    assert result.token_ids == expected.token_ids


def test_nothing_is_drafted_behind_the_last_token():
    """Such a draft could commit nothing: a greedy request saves the pass."""
    target = decoder(RandomTarget(VOCAB)).generate([1], strategy="ar", max_new_tokens=3)
    drafter = always_wrong([[1, *target.token_ids]], 2)
    result = decoder(RandomTarget(VOCAB), drafter).generate([1], max_new_tokens=3)
    assert result.token_ids == target.token_ids
    assert result.stats.num_verify_forwards == 2
    assert drafter.num_drafts == 1
