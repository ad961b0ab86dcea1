"""`combined`: which source a row takes, what it learns, and that no row or clock shifts another."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from fakes import decoder, make_engine, random_adapter, random_prompts, tiny_backbone

from hybrid import HybridDecoder
from hybrid.carried import KeptSlots
from hybrid.decode.loop import run
from hybrid.drafters.combined import COPY_PRIORS, DIFFUSION_PRIOR, Belief, CombinedDrafter
from hybrid.errors import ConfigError
from hybrid.params import SamplingParams
from hybrid.protocols import DraftState
from hybrid.streams import RandomStream
from hybrid.types import Mode, Plan, Proposal, RowStep, SequenceState, Source, StepRecord

VOCAB, WIDTH = 64, 3
SLOT = 60  # what the scripted self-diffusion drafts
REPEATS = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 7]  # a match of six behind it
ONE = [1, 2, 3, 9, 1]  # a match of one
FRESH = [1, 2, 3]  # nothing repeats


class ScriptedDiffusion:
    """Drafts `SLOT` for each row it is asked for; a sampled row draws once per slot."""

    def __init__(self):
        self.calls = []

    def draft(self, state, plan):
        self.calls.append(([row.row for row in state.rows], state.hidden))
        rows, count = state.rows, plan.num_draft_tokens
        laws = None
        if not all(row.sampling.is_greedy for row in rows):
            laws = torch.zeros(len(rows), count, VOCAB)
            laws[:, :, SLOT] = 1 / 3
            laws[:, :, SLOT + 1] = 2 / 3
            for row in rows:
                torch.tensor([row.stream.uniform() for _ in range(count)])
        tokens = torch.full((len(rows), count), SLOT)
        return Proposal(tokens, (count,) * len(rows), laws, num_forwards=1, num_drafting=len(rows))


def make(device="cpu", entry_layer=20, num_passes=1):
    """A drafter of a model with 30 layers, and its scripted self-diffusion."""
    config = SimpleNamespace(
        taps=(3,), num_draft_tokens=7, preferred_draft_tokens=WIDTH, entry_layer=entry_layer
    )
    config.num_passes, config.confidence_floor = num_passes, 0.0
    backbone = SimpleNamespace(num_layers=30, device=torch.device(device))
    drafter = CombinedDrafter(backbone, SimpleNamespace(config=config))
    drafter._diffusion = ScriptedDiffusion()
    return drafter


def rows_of(*texts, temperature=0.0, first=0):
    params = SamplingParams(temperature=temperature)
    return [
        SequenceState(first + i, list(text), len(text), params, RandomStream(i))
        for i, text in enumerate(texts)
    ]


def propose(drafter, rows, width=WIDTH):
    hidden = {3: torch.tensor([[float(row.row)] for row in rows])}
    return drafter.draft(DraftState(rows, None, hidden), Plan(Mode.SPECULATIVE, width))


def record_of(proposal, rows, committed, accepted, draft=0.2, forward=1.0):
    """The record of a step that committed `committed[b]` and accepted `accepted[b]` tokens."""
    steps = tuple(
        RowStep(row.row, tuple(tokens), (Source.AR,) * len(tokens), num_drafted=n, num_accepted=a)
        for row, tokens, n, a in zip(rows, committed, proposal.num_tokens, accepted, strict=True)
    )
    return StepRecord(
        Mode.SPECULATIVE,
        steps,
        num_draft_forwards=proposal.num_forwards,
        num_drafting=proposal.num_drafting,
        draft_seconds=draft,
        forward_seconds=forward,
    )


def step(drafter, rows, committed, accepted, **seconds):
    """One whole step, without changing the rows."""
    proposal = propose(drafter, rows)
    drafter.observe(record_of(proposal, rows, committed, accepted, **seconds))
    return proposal


def copies(drafter, rows):
    """Per row, whether it takes its copy now."""
    proposal = propose(drafter, rows)
    return [proposal.tokens[b, 0].item() != SLOT for b in range(len(rows))]


def test_a_long_match_is_copied_and_the_pass_is_skipped():
    drafter = make()
    proposal = propose(drafter, rows_of(REPEATS))
    assert proposal.tokens.tolist() == [[1, 2, 3]]
    assert (proposal.num_tokens, proposal.num_forwards) == ((3,), 0)
    assert drafter._diffusion.calls == []


def test_without_a_match_the_slots_are_drafted():
    drafter = make()
    proposal = propose(drafter, rows_of(FRESH), width=5)
    assert proposal.tokens.tolist() == [[SLOT] * 5]
    assert (proposal.num_tokens, proposal.num_forwards) == ((5,), 1)


def test_one_pass_serves_the_rows_that_want_it_alone():
    drafter = make()
    proposal = propose(drafter, rows_of(REPEATS, FRESH, [5, 6, 5], FRESH))
    (asked, hidden), *rest = drafter._diffusion.calls
    assert rest == []
    assert asked == [1, 3] or asked == [1, 2, 3]
    assert hidden[3].flatten().tolist() == asked
    assert proposal.tokens[0].tolist() == [1, 2, 3]
    assert all(proposal.tokens[row].tolist() == [SLOT] * 3 for row in (1, 3))


def test_a_short_copy_is_padded_and_counted():
    drafter = make()
    text = [4, 1, 2, 3, 8, 1, 2, 3, 8]  # the copy runs into the end of the text after four
    proposal = propose(drafter, rows_of([1, 2, 3, 1, 2], FRESH), width=5)
    assert proposal.num_tokens == (3, 5)
    assert proposal.tokens[0].tolist() == [3, 1, 2, 0, 0]
    assert propose(drafter, rows_of(text), width=7).tokens.tolist() == [[1, 2, 3, 8]]


@pytest.mark.parametrize("count", [1, 3, 7])
def test_the_choice_is_the_larger_expectation(count):
    """By hand: a draft of n commits 1 + p + ... + p**n tokens, in 1 or 1 + cost verify passes."""
    for text, match in ((REPEATS, 6), (ONE, 1), ([4, 5, 6, 9, 4, 5], 2)):
        for entry_layer in (0, 20, 29):
            drafter = make(entry_layer=entry_layer)
            proposal = propose(drafter, rows_of(text), count)
            length = min(count, len(text) - text.index(text[-1]) - 1)
            p, q, cost = COPY_PRIORS[match - 1], DIFFUSION_PRIOR, (30 - entry_layer) / 30
            copied = sum(p**i for i in range(length + 1))
            drafted = sum(q**i for i in range(count + 1)) / (1 + cost)
            assert (proposal.num_forwards == 0) == (copied >= drafted), (match, entry_layer)


def test_more_passes_cost_more():
    rows = rows_of(ONE, temperature=1.0)
    assert not copies(make(entry_layer=25), rows)[0]
    assert copies(make(entry_layer=25, num_passes=4), rows)[0]


def test_copies_that_fail_are_given_up_and_taken_again():
    drafter, rows = make(), rows_of(REPEATS)
    taken = []
    for _ in range(60):
        taken += copies(drafter, rows)
        tokens = (50,) if taken[-1] else (SLOT, SLOT, SLOT, 50)
        step(drafter, rows, [tokens], [len(tokens) - 1])
    assert taken == sorted(taken, reverse=True), "what has failed comes back"
    assert 2 < sum(taken) < 60
    # Nothing is copied now; the committed tokens show that a copy would have been right.
    for _ in range(10):
        step(drafter, rows, [(1, 2, 3, 4)], [0])
    assert copies(drafter, rows) == [True]


def test_slots_that_fail_lose_against_a_weak_copy():
    drafter, rows = make(entry_layer=25), rows_of(ONE)
    assert copies(drafter, rows) == [False]
    for _ in range(12):
        step(drafter, rows_of(FRESH), [(50,)], [0], draft=1 / 6)
    assert copies(drafter, rows) == [True]


def test_what_a_step_teaches():
    """Copies are judged up to the first difference or the last committed token, slots likewise."""
    drafter, rows = make(), rows_of(REPEATS)

    def odds(total, count, prior):
        return pytest.approx((total + 8 * prior) / (count + 8))

    step(drafter, rows, [(1, 2, 50)], [2])
    assert drafter._odds(0).copies[5].mean == odds(2, 3, 0.9)
    step(drafter, rows, [(1, 2)], [1])  # ended early: nothing was rejected
    assert drafter._odds(0).copies[5].mean == odds(0.95 * 2 + 2, 0.95 * 3 + 2, 0.9)
    assert drafter._odds(0).diffusion.mean == DIFFUSION_PRIOR
    fresh = rows_of(FRESH)
    step(drafter, fresh, [(SLOT, SLOT, 50)], [2])
    assert drafter._odds(0).diffusion.mean == odds(2, 3, DIFFUSION_PRIOR)
    step(drafter, fresh, [(SLOT, SLOT, SLOT, 50)], [3])
    assert drafter._odds(0).diffusion.mean == odds(0.95 * 2 + 3, 0.95 * 3 + 3, DIFFUSION_PRIOR)
    drafter.reset()
    assert drafter._odds(0).copies[5].mean == 0.9
    step(drafter, fresh, [(50,)], [0])  # the slots after a rejection were not judged
    assert drafter._odds(0).diffusion.mean == odds(0, 1, DIFFUSION_PRIOR)


def test_a_step_without_a_draft_teaches_nothing():
    drafter, rows = make(), rows_of(REPEATS)
    propose(drafter, rows)
    seen = record_of(Proposal(torch.empty(1, 0), (0,)), rows, [(50,)], [0])
    drafter.observe(seen)
    mean = drafter._odds(0).copies[5].mean
    drafter.observe(seen)  # no draft came before this one
    assert drafter._odds(0).copies[5].mean == mean


def test_measured_cost_moves_greedy_rows_only():
    for temperature, expected in ((0.0, True), (1.0, False)):
        drafter = make(entry_layer=25)
        rows = rows_of(ONE, temperature=temperature)
        assert copies(drafter, rows) == [False]
        for _ in range(10):  # here a pass takes nine times as long as its layers say
            step(drafter, rows_of(FRESH, temperature=temperature, first=5), [(50,)], [0], draft=1.5)
        assert copies(drafter, rows) == [expected]
    drafter.reset()
    assert copies(drafter, rows_of(ONE)) == [False]


def test_the_cost_is_measured_where_times_are_those_of_passes():
    for device, is_known in (("cpu", True), ("meta", False)):
        drafter = make(device)
        drafter._diffusion.draft = lambda state, plan: Proposal(
            torch.full((len(state.rows), 3), SLOT),
            (3,) * len(state.rows),
            num_forwards=1,
            num_drafting=len(state.rows),
        )
        before = drafter._pass_cost.mean
        step(drafter, rows_of(FRESH, REPEATS), [(50,), (50,)], [0, 0], draft=5.0)
        assert drafter._pass_cost.mean == before, "the pass was not for all rows"
        step(drafter, rows_of(FRESH), [(50,)], [0], draft=5.0)
        assert (drafter._pass_cost.mean > before) == is_known
        step(drafter, rows_of(FRESH), [(50,)], [0], forward=0.0)  # a clock that stood still


def test_sampled_rows_carry_the_law_of_their_tokens():
    proposal = propose(make(), rows_of(REPEATS, FRESH, temperature=1.0))
    laws = proposal.draft_probs
    assert laws.shape == (2, 3, VOCAB)
    assert laws.dtype == torch.float32
    assert torch.equal(laws[0], torch.nn.functional.one_hot(torch.tensor([1, 2, 3]), VOCAB).float())
    torch.testing.assert_close(laws[1, :, SLOT], torch.full((3,), 1 / 3))
    assert propose(make(), rows_of(REPEATS, temperature=1.0)).draft_probs is None


def test_what_is_known_of_slots_lies_in_their_rows():
    """Nobody knows how sure a copy is, and it comes from no slot."""
    drafter, columns = make(), torch.tensor([[0.5, 0.25, 0.75], [1.0, 2.0, 3.0]])
    drafter._diffusion.draft = lambda state, plan: Proposal(
        torch.full((2, 3), SLOT),
        (2, 3),
        entropy=columns,
        confidence=columns + 1,
        margin=columns + 2,
        first_slot=(2, 1),
        num_drafting=1,
    )
    proposal = propose(drafter, rows_of(FRESH, REPEATS, FRESH))
    assert proposal.num_tokens == (2, 3, 3)
    assert proposal.first_slot == (2, 0, 1)
    assert (proposal.num_forwards, proposal.num_drafting) == (0, 1)
    for more, found in enumerate((proposal.entropy, proposal.confidence, proposal.margin)):
        assert torch.equal(found[[0, 2]], columns + more)
        assert found[1].isnan().all()


def test_carried_slots_cost_nothing_more():
    """Against the same weak copy: fresh slots of a dear pass lose, carried ones win."""
    rows = rows_of([1, 2, 3, 9, 2, 1, 9, 2], temperature=1.0)
    slots = {0: KeptSlots(8, 2, torch.zeros(WIDTH, 1))}
    hidden = {3: torch.zeros(1, 1)}
    plan = Plan(Mode.FUSED, WIDTH)
    drafter = make(entry_layer=0)
    assert drafter.draft(DraftState(rows, None, hidden), plan).tokens[0, 0] != SLOT
    assert drafter.draft(DraftState(rows, None, hidden, slots), plan).tokens[0, 0] == SLOT
    few = {0: KeptSlots(8, 2, torch.zeros(1, 1))}  # 1.55 tokens, less than the copy's 1.9
    assert drafter.draft(DraftState(rows, None, hidden, few), plan).tokens[0, 0] != SLOT


def history(drafter, rows, seed, draft_seconds=0.2):
    """Twelve steps of made-up luck per row; returns what was proposed, row by row."""
    seen = {row.row: [] for row in rows}
    for turn in range(12):
        proposal = propose(drafter, rows)
        committed, accepted = [], []
        for b, row in enumerate(rows):
            draft = proposal.tokens[b, : proposal.num_tokens[b]].tolist()
            seen[row.row].append(draft)
            luck = random.Random(f"{seed} {row.row} {turn}").randrange(4)
            accepted.append(min(luck, len(draft)))
            committed.append((*draft[:luck], 50 + turn % 3))
        record = record_of(proposal, rows, committed, accepted, draft=draft_seconds)
        drafter.observe(record)
        for row, tokens in zip(rows, committed, strict=True):
            row.tokens.extend(tokens)
    return seen


@pytest.mark.parametrize("seed", range(4))
def test_a_sampled_row_proposes_the_same_whatever_else_runs_and_however_long_it_takes(seed):
    texts = [REPEATS, FRESH, ONE, random_prompts(12, vocab_size=4, seed=seed)[0]]
    together = history(make(), rows_of(*texts, temperature=1.0), seed)
    assert len({tuple(map(tuple, drafts)) for drafts in together.values()}) > 1
    for index, text in enumerate(texts):
        alone = rows_of(text, temperature=1.0, first=index)
        for row in alone:
            row.stream = RandomStream(index)
        assert history(make(), alone, seed, draft_seconds=9.0)[index] == together[index]


def test_a_recorded_history_replays():
    """Same texts, same records, seconds included: the same proposals."""
    backbone = tiny_backbone("llama")
    adapter = random_adapter(backbone)
    prompts = [[5, 6, 7, 5, 6, 7, 5], *random_prompts(6, vocab_size=5, seed=2)]
    params = SamplingParams(max_new_tokens=24)
    engine, rows = make_engine(backbone, CombinedDrafter(backbone, adapter), prompts, params)
    recorded = list(run(engine, rows))
    again = CombinedDrafter(backbone, adapter)
    proposals = []
    true = again.draft

    def draft(state, plan):
        proposals.append(true(state, plan))
        return proposals[-1]

    steps = iter([r for r in recorded if r.mode != Mode.PREFILL])
    observe = again.observe
    again.draft, again.observe = draft, lambda record: observe(next(steps))
    engine, rows = make_engine(backbone, again, prompts, params)
    replayed = list(run(engine, rows))
    drafts = [[[s.drafted for s in r.rows] for r in records] for records in (recorded, replayed)]
    assert drafts[0] == drafts[1]
    assert len({p.num_forwards for p in proposals}) == 2, "one source alone proves little"


def test_greedy_answers_use_both_sources_and_equal_ar():
    backbone = tiny_backbone("qwen2")
    prompts = [[5, 6, 7, 5, 6, 7, 5], *random_prompts(6, 9, vocab_size=5, seed=2)]
    model = decoder(backbone, "combined", num_draft_tokens=4)
    results = model.generate(prompts, max_new_tokens=40)
    plain = decoder(backbone).generate(prompts, max_new_tokens=40, strategy="ar")
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    alone = [model.generate(prompt, max_new_tokens=40).stats for prompt in prompts]
    assert any(0 < s.num_draft_forwards < s.num_verify_forwards for s in alone)


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_a_seed_means_the_same_alone_and_in_a_batch(verifier):
    backbone = tiny_backbone("llama")
    prompts = [[5, 6, 7, 5, 6, 7, 5], *random_prompts(5, 1, 11, vocab_size=6, seed=4)]
    params = SamplingParams(temperature=0.7, top_k=3, seed=7, max_new_tokens=24)
    model = decoder(backbone, "combined", num_draft_tokens=3, verifier=verifier)
    together = model.generate(prompts, params)
    for prompt, batched in zip(prompts, together, strict=True):
        alone = model.generate(prompt, params)
        assert alone.token_ids == batched.token_ids
        assert alone.sources == batched.sources
        assert alone.stats.acceptance_histogram == batched.stats.acceptance_histogram


def test_it_needs_an_adapter():
    with pytest.raises(ConfigError, match="'combined'.*has no diffusion adapter"):
        HybridDecoder(tiny_backbone("llama"), drafter="combined")


def test_belief_starts_at_the_prior_and_forgets():
    belief = Belief(0.25)
    assert belief.mean == 0.25
    belief.add(0, 0)
    assert belief.mean == 0.25
    for _ in range(500):
        belief.add(1.0)
    assert belief.mean == pytest.approx((20 + 8 * 0.25) / 28)
    for _ in range(500):
        belief.add(0.0)
    assert belief.mean == pytest.approx(8 * 0.25 / 28)
