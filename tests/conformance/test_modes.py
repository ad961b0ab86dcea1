"""Modes of a step, mixed at random: the output is the target's, whatever rides in its passes."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import pytest
import torch
from carrying import RandomRouter, carrying_engine, decode, ordinary_slots
from fakes import decoder, random_prompts, with_eos
from mixed_modes import (
    KINDS,
    LONG,
    MASK,
    NEW,
    PROMPTS,
    VOCAB,
    K,
    check_cache,
    greedy,
    make,
    tiny,
)

from hybrid import HybridDecoder, Strategy
from hybrid.decode.loop import run
from hybrid.decode.reference import reference_greedy
from hybrid.params import SamplingParams
from hybrid.types import Mode


def watch(engine, drafter):
    """Check every draft against draft passes from scratch; counts what it was drafted from."""
    inner = getattr(drafter, "_diffusion", drafter)
    draft, plan, anchors = inner.draft, engine.router.plan, defaultdict(set)
    size, num_reused = min(engine.router.num_slots, inner.max_slots), Counter()

    def planned(rows, history):
        for row in rows:
            anchors[row.row].add(row.cached_len)
        return plan(rows, history)

    def checked(state, asked):
        slots = {}
        for row in state.rows:
            own = state.slots.get(row.row)
            if own is None:
                continue
            last = next(s for s in engine.history[-1].rows if s.index == row.row)
            assert (len(own.hidden), own.first_slot) == (last.num_slots, last.next_slot)
            assert own.position == len(row.tokens)
            anchor = own.position - own.first_slot
            assert own.first_slot - 1 + len(own.hidden) == size, "slots got lost"
            # A group behind a step's own anchor was given all features, another only the early.
            text, zero = row.tokens[: anchor + 1], anchor not in anchors[row.row]
            expected = ordinary_slots(inner, text, row.sampling, size, zero=zero)
            torch.testing.assert_close(
                own.hidden, expected[own.first_slot - 1 :], rtol=0, atol=1e-3
            )
            num_reused[zero] += 1
            slots[row.row] = expected[own.first_slot - 1 :]
        proposal = draft(state, asked)
        for b, row in enumerate(state.rows):
            if row.row in slots and inner._adapter.head.sampler is None:
                count = proposal.num_tokens[b]
                logits = inner._adapter.head.logits(slots[row.row], None)[:count]
                law = logits.double().softmax(-1)
                assert proposal.tokens[b, :count].tolist() == logits.argmax(-1).tolist()
                best = law.topk(2).values
                expected = (best[:, 0], best[:, 0] - best[:, 1], torch.special.entr(law).sum(-1))
                found = (proposal.confidence, proposal.margin, proposal.entropy)
                for ours, theirs in zip(found, expected, strict=True):
                    torch.testing.assert_close(ours[b, :count].double(), theirs, rtol=0, atol=5e-3)
        return proposal

    inner.draft, engine.router.plan = checked, planned
    return num_reused


CASES = [
    *[(family, kind) for family in ("llama", "mistral-window") for kind in KINDS],
    *[(family, kind) for family in ("qwen2", "qwen3") for kind in ("late", "combined")],
    ("nemotron", "own"),
]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_greedy_equals_the_reference_however_steps_are_mixed(family, kind):
    _, backbone = make(kind, family)
    barred = (MASK,) if kind == "own" else ()
    expected = [greedy(backbone, tuple(p), NEW, barred) for p in PROMPTS]
    assert max(len(set(answer)) for answer in expected) > 2, "a constant answer proves little"
    steps, reused = [], Counter()
    for seed in range(5):
        drafter, _ = make(kind, family)
        engine, rows = carrying_engine(backbone, drafter, PROMPTS, LONG, RandomRouter(K, seed))
        engine.barred, watched = barred, watch(engine, drafter)
        for record in run(engine, list(rows)):
            check_cache(engine, rows, backbone)
            steps += record.rows if record.mode != Mode.PREFILL else ()
        assert [row.tokens[row.num_prompt_tokens :] for row in rows] == expected
        assert engine.slots == {}
        reused += watched
    assert {step.mode for step in steps} >= {Mode.AR, Mode.FUSED, Mode.ONE_PASS}
    assert min(reused[False], reused[True]) > 2, "a kind of group was hardly used"
    assert sum(step.num_accepted for step in steps) > 9


@pytest.mark.parametrize("kind", ["late", "combined", "uniform"])
def test_eos_and_limits_may_be_crossed_anywhere(kind):
    drafter, backbone = make(kind, vocab_size=12)
    prompts = random_prompts(9, 4, vocab_size=12, seed=5)
    answers = [reference_greedy(backbone, p, NEW) for p in prompts]
    ended = Counter()
    for at in range(NEW):
        for target, limit in ((with_eos(backbone, answers[0][at]), NEW), (backbone, at + 1)):
            params = SamplingParams(max_new_tokens=limit)
            engine, rows = carrying_engine(target, drafter, prompts, params, RandomRouter(K, at))
            expected = [reference_greedy(target, p, limit, target.eos_token_ids) for p in prompts]
            assert decode(engine, rows) == expected
            ended.update(row.finish_reason for row in rows)
    assert ended["stop"] >= NEW
    assert ended["length"] >= 2 * NEW


PENALTIES = [
    SamplingParams(repetition_penalty=1.3, max_new_tokens=NEW),
    SamplingParams(presence_penalty=0.5, frequency_penalty=0.3, max_new_tokens=NEW),
    SamplingParams(min_new_tokens=9, max_new_tokens=NEW),
]


@pytest.mark.parametrize("params", PENALTIES, ids=["repetition", "counts", "min-new"])
@pytest.mark.parametrize("kind", ["late", "combined", "uniform"])
def test_greedy_with_transforms_equals_ar(kind, params):
    drafter, backbone = make(kind)
    backbone = with_eos(backbone, *([3] if params.min_new_tokens else []))
    plain = HybridDecoder(backbone).generate(PROMPTS, params, strategy="ar")
    free = HybridDecoder(backbone).generate(PROMPTS, strategy="ar", max_new_tokens=NEW)
    assert [r.token_ids for r in plain] != [r.token_ids for r in free], "nothing is transformed"
    for seed in range(3):
        engine, rows = carrying_engine(backbone, drafter, PROMPTS, params, RandomRouter(K, seed))
        assert decode(engine, rows) == [list(r.token_ids) for r in plain]


# Through the facade


@pytest.mark.parametrize("mode", ["fused", "one-pass"])
@pytest.mark.parametrize("drafter", ["self-diffusion", "combined"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral-window"])
def test_the_strategies_modes_equal_the_reference(family, drafter, mode):
    backbone = tiny(family, max_position_embeddings=17 + NEW)
    expected = [greedy(backbone, tuple(p), NEW) for p in PROMPTS]
    model = decoder(backbone, drafter)
    for size in (1, 2, 4, 8):
        strategy = Strategy.preset("speculative", mode=mode, block_size=size)
        # The longest prompt and its answer fill the context to its last position.
        results = model.generate(PROMPTS, strategy=strategy, max_new_tokens=NEW)
        assert [list(r.token_ids) for r in results] == expected
        for result in results:
            stats = result.stats
            decoded = stats.num_draft_forwards + stats.num_verify_forwards
            assert sum(stats.forwards_by_mode.values()) == decoded
            if size == 1:
                assert stats.forwards_by_mode == {"ar": NEW - 1}
            else:
                assert stats.forwards_by_mode[mode] > 0
                assert stats.num_drafted > 0
                assert mode == "fused" or stats.num_draft_forwards == 0
        assert size == 1 or sum(r.stats.num_accepted for r in results) > 0
        for limit in (1, 2, 3, 4):
            short = model.generate(PROMPTS, strategy=strategy, max_new_tokens=limit)
            assert [list(r.token_ids) for r in short] == [e[:limit] for e in expected]


@pytest.mark.parametrize("mode", ["fused", "one-pass"])
def test_there_is_room_for_the_longest_row_beside_rows_that_carry_more(mode):
    """Its last pass is as wide as theirs; with these prompts two positions are left."""
    backbone = tiny(max_position_embeddings=17 + NEW)
    prompts = random_prompts(17, 9, 1, 9, 5, vocab_size=VOCAB, seed=9)
    strategy = Strategy.preset("speculative", mode=mode, block_size=4)
    results = decoder(backbone, "self-diffusion").generate(
        prompts, strategy=strategy, max_new_tokens=NEW
    )
    expected = [greedy(backbone, tuple(p), NEW) for p in prompts]
    assert [list(r.token_ids) for r in results] == expected


@pytest.mark.parametrize("mode", ["fused", "one-pass"])
def test_a_closed_stream_leaves_the_decoder_usable(mode):
    backbone = tiny()
    model, strategy = decoder(backbone, "self-diffusion"), Strategy.preset("speculative", mode=mode)
    for num_events in (1, 2, 4):
        stream = model.stream(PROMPTS[0], strategy=strategy, max_new_tokens=NEW)
        kept = list(itertools.islice(stream, num_events))
        assert len(kept) == num_events
        stream.close()
    streams = [model.stream(p, strategy=strategy, max_new_tokens=NEW) for p in PROMPTS]
    last = {}
    for events in itertools.zip_longest(*streams):  # three calls at once
        last.update({i: event for i, event in enumerate(events) if event is not None})
    for index, prompt in enumerate(PROMPTS):
        assert list(last[index].result.token_ids) == greedy(backbone, tuple(prompt), NEW)
