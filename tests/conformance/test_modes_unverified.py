"""Tokens that are committed unverified: what follows them, and the evidence on them."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict

import pytest
import torch
from carrying import (
    CarryingFake,
    CarryingTarget,
    RandomRouter,
    carrying_engine,
    context_of,
    decode,
)
from exact_laws import enumerated_law, exact_law
from fakes import BYTES, EOS, with_eos
from mixed_modes import LONG, MASK, PROMPTS, K, check_cache, make

from hybrid.decode.loop import run
from hybrid.decode.reference import reference_logits
from hybrid.decode.stopping import StopRule
from hybrid.metrics import RowMeter
from hybrid.params import SamplingParams
from hybrid.router.fixed import FixedRouter
from hybrid.types import Mode, Source
from hybrid.verifiers.block import accept_by_block
from hybrid.verifiers.rejection import accept_by_token

RULES = {"rejection": accept_by_token, "block": accept_by_block}


class UnverifiedFirst(FixedRouter):
    """Commits the first tokens of its first draft unverified."""

    def __init__(self, count, num_unverified, mode):
        super().__init__(count, mode)
        self.num_unverified = num_unverified

    def judge(self, rows, proposal, history):
        routes = super().judge(rows, proposal, history)
        if any(step.num_unverified for record in history for step in record.rows):
            return routes
        return tuple(
            dataclasses.replace(r, num_unverified=min(self.num_unverified, r.num_draft_tokens))
            for r in routes
        )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", [Mode.SPECULATIVE, Mode.FUSED])
@pytest.mark.parametrize(("count", "num_unverified"), [(2, 1), (2, 2), (3, 1)])
def test_what_follows_unverified_tokens_has_exactly_the_targets_law(
    count, num_unverified, mode, rule, monkeypatch
):
    """The unverified tokens are the drafter's, all others the target's behind them."""
    target, drafter, prompt, num_new = CarryingTarget(2, seed=5), CarryingFake(2, 3), [1, 0, 1], 5
    router = UnverifiedFirst(count, num_unverified, mode)
    law, seen = enumerated_law(target, drafter, router, RULES[rule], prompt, num_new, monkeypatch)

    def drafted(answer):  # the first token comes from the prefill
        slot = len(answer)
        if not 1 <= slot <= num_unverified:
            return None
        state = [*context_of([*prompt, answer[0]]), slot]
        return drafter.logits(state).double().softmax(-1).tolist()

    expected = exact_law(target, prompt, num_new, drafted)
    assert max(abs(law[answer] - p) for answer, p in expected.items()) < 1e-6
    lossless = exact_law(target, prompt, num_new)
    assert max(abs(law[answer] - p) for answer, p in lossless.items()) > 1e-3
    assert Mode.DIFFUSION_ONLY in {mode for mode, _ in seen}


def unverified_steps(engine, rows, backbone):
    """Run to the end; yield (step, the text before it, the laws of its draft [K, V] or None)."""
    proposals, draft = [], engine.drafter.draft

    def recorded(state, plan):
        proposals.append(({row.row: b for b, row in enumerate(state.rows)}, draft(state, plan)))
        return proposals[-1][1]

    engine.drafter.draft = recorded
    texts = {row.row: list(row.tokens) for row in rows}
    for record in run(engine, list(rows)):
        check_cache(engine, rows, backbone)
        for step in record.rows:
            laws = None
            if step.num_drafted and proposals[-1][1].draft_probs is not None:
                index, proposal = proposals[-1]
                laws = proposal.draft_probs[index[step.index]]
            yield step, list(texts[step.index]), laws
            texts[step.index] += step.tokens


@pytest.mark.parametrize("kind", ["late", "uniform", "own"])
def test_greedy_unverified_tokens_are_kept_and_ar_goes_on_behind_them(kind):
    barred = (MASK,) if kind == "own" else ()
    params = SamplingParams(max_new_tokens=24, logprobs=1)
    seen = Counter()
    for seed in range(3):
        drafter, backbone = make(kind)
        router = RandomRouter(K, seed, max_unverified=3)
        engine, rows = carrying_engine(backbone, drafter, PROMPTS, params, router)
        engine.barred, expected = barred, defaultdict(Counter)
        for step, text, _ in unverified_steps(engine, rows, backbone):
            u = min(step.num_unverified, len(step.tokens))
            best, logprobs = targets_choice(backbone, text, step, barred)
            assert step.tokens[:u] == step.drafted[:u]
            assert list(step.tokens[u:]) == best[u:]
            disagreeing = tuple(float(a != b) for a, b in zip(step.tokens, best, strict=True))[:u]
            assert step.disagreements[:u] == disagreeing
            assert step.logprobs == pytest.approx(logprobs, abs=1e-4)
            assert step.sources == sources(step)[: len(step.tokens)]
            assert (step.mode == Mode.DIFFUSION_ONLY) == (step.num_unverified > 0)
            assert step.num_accepted >= step.num_unverified == len(step.disagreements)
            seen.update(disagreeing)
            seen["verified behind"] += step.num_accepted > u > 0
            expected[step.index].update(unverified=u, disagreeing=sum(disagreeing))
        for row in rows:
            stats, own = stats_of(engine, row), expected[row.row]
            assert stats.num_unverified == own["unverified"]
            assert stats.num_unverified_disagreeing == own["disagreeing"]
            assert stats.forwards_by_mode["diffusion-only"] > 0
            assert stats.num_new_tokens == 24
    assert min(seen[0.0], seen[1.0], seen["verified behind"]) > 3


def sources(step):
    if step.num_drafted == 0:
        return (Source.AR,)
    verified = step.num_accepted - step.num_unverified
    last = Source.BONUS if step.num_accepted == step.num_drafted else Source.CORRECTION
    unverified = (Source.DIFFUSION_ONLY,) * step.num_unverified
    return (*unverified, *(Source.DRAFT_VERIFIED,) * verified, last)


def targets_choice(backbone, text, step, barred):
    """Return the argmax of each position of a step, and the log-probabilities of its tokens."""
    logits = reference_logits(backbone, [*text, *step.tokens])[len(text) - 1 : -1].clone()
    logits[:, list(barred)] = float("-inf")
    logprobs = logits.log_softmax(-1)
    return logits.argmax(-1).tolist(), [float(logprobs[i, t]) for i, t in enumerate(step.tokens)]


def stats_of(engine, row):
    meter = RowMeter(row.row, row.num_prompt_tokens)
    for record in engine.history:
        meter.add(record)
    return meter.stats()


def top_p_law(logits, temperature, top_p):
    """Temperature and top-p by hand: the fewest of the most probable tokens that reach top_p."""
    law = (logits.double() / temperature).softmax(-1).tolist()
    kept, reached = {}, 0.0
    for token in sorted(range(len(law)), key=lambda t: -law[t]):
        if reached >= top_p:
            break
        kept[token], reached = law[token], reached + law[token]
    return {token: p / reached for token, p in kept.items()}


def test_sampled_disagreements_are_the_rejection_probabilities():
    drafter, backbone = make("late")
    params = [
        SamplingParams(temperature=1.3, top_p=0.8, seed=i, max_new_tokens=24) for i in range(3)
    ]
    router = RandomRouter(K, 3, max_unverified=3, always_draft=True)
    engine, rows = carrying_engine(backbone, drafter, PROMPTS, params, router)
    seen = []
    for step, text, laws in unverified_steps(engine, rows, backbone):
        logits = reference_logits(backbone, [*text, *step.tokens])[len(text) - 1 :]
        for i in range(min(step.num_unverified, len(step.tokens))):
            token = step.tokens[i]
            p = top_p_law(logits[i], 1.3, 0.8).get(token, 0.0)
            expected = 1 - min(1.0, p / float(laws[i, token]))
            assert step.disagreements[i] == pytest.approx(expected, abs=1e-4)
            seen.append(expected)
    assert len(seen) > 10
    assert 0.0 in seen
    assert any(0 < x < 1 for x in seen)
    assert any(x == 1 for x in seen), "a token that top-p forbids"


def test_an_eos_or_a_limit_among_unverified_tokens_ends_the_row():
    drafter, backbone = make("late")
    router = UnverifiedFirst(K, K, Mode.SPECULATIVE)
    engine, rows = carrying_engine(backbone, drafter, PROMPTS[:1], LONG, router)
    decode(engine, rows)
    drafted = engine.history[1].rows[0].drafted
    assert len(drafted) == K
    for at in range(K):
        if drafted[at] in drafted[:at] or drafted[at] == engine.history[0].rows[0].tokens[0]:
            continue
        target = with_eos(backbone, drafted[at])
        engine, (row,) = carrying_engine(target, drafter, PROMPTS[:1], LONG, router)
        decode(engine, [row])
        assert row.tokens[len(PROMPTS[0]) + 1 :] == list(drafted[: at + 1])
        assert row.finish_reason == "stop"
        last = engine.history[-1].rows[0]
        assert last.sources == (Source.DIFFUSION_ONLY,) * (at + 1)
        assert stats_of(engine, row).num_unverified == at + 1
    for limit in range(2, K + 2):
        params = SamplingParams(max_new_tokens=limit)
        engine, (row,) = carrying_engine(backbone, drafter, PROMPTS[:1], params, router)
        decode(engine, [row])
        step = engine.history[1].rows[0]
        assert step.drafted == drafted[: limit - 2], "the last token is the target's own"
        assert (row.num_new_tokens, row.finish_reason) == (limit, "length")


def test_a_stop_string_among_unverified_tokens_ends_the_row():
    text = "Hello, world"
    ids = BYTES.encode(text)

    class Scripted(CarryingFake):
        """Drafts the text, whatever the target says."""

        def logits(self, state):
            anchor, slot = int(state[2]), int(state[3])
            at = ids.index(anchor) if anchor in ids else 0
            return 99.0 * torch.nn.functional.one_hot(
                torch.tensor(ids[min(at + slot, len(ids) - 1)]), BYTES.vocab_size
            )

    def law(tokens):
        return [float(t == ids[0]) for t in range(BYTES.vocab_size)]  # "HHHH ..."

    target = CarryingTarget(BYTES.vocab_size, eos_token_ids=(EOS,))
    target.law = law
    params = SamplingParams(max_new_tokens=20, stop=("lo,",))
    router = UnverifiedFirst(8, 8, Mode.FUSED)
    engine, (row,) = carrying_engine(target, Scripted(BYTES.vocab_size, 8), [[7]], params, router)
    engine.rules[0] = StopRule(params, target.eos_token_ids, BYTES.decode)
    decode(engine, [row])
    assert BYTES.decode(row.tokens[1:]) == "Hello,"
    assert "".join(engine.rules[0].take_pieces()) == "Hel"
    assert row.finish_reason == "stop"
    assert engine.history[-1].rows[0].sources == (Source.DIFFUSION_ONLY,) * 5
