"""The DFlash drafter in the engine: it has seen the tokens in the target's cache, no others."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import (
    RandomTarget,
    decoder,
    make_engine,
    random_dflash,
    random_prompts,
    sometimes_wrong,
    tiny_backbone,
    with_eos,
)
from torch import Tensor

from hybrid import HybridDecoder
from hybrid.decode.fallback import DrafterWarning
from hybrid.decode.loop import prefill, run
from hybrid.decode.reference import reference_greedy
from hybrid.drafters.dflash import DFlashDrafter
from hybrid.errors import ConfigError
from hybrid.models.dflash_files import save_dflash
from hybrid.models.hf import HFBackbone
from hybrid.models.tiny import tiny_checkpoint
from hybrid.params import SamplingParams
from hybrid.protocols import ContextDrafter, DraftState
from hybrid.router.fixed import FixedRouter
from hybrid.sampling import process_logits
from hybrid.types import Mode, Plan

NEW = 14
PROMPTS = random_prompts(9, 3, 1)
LONG = SamplingParams(max_new_tokens=NEW)


def propose_after(drafter: DFlashDrafter, tokens: Sequence[int], count: int) -> list[int]:
    """Return the draft behind a text, the last token of which is the anchor, from nothing."""
    backbone: Any = drafter._backbone
    engine, (row,) = make_engine(backbone, drafter, [tokens[:-1]], LONG, num_draft_tokens=count)
    prefill(engine, row)
    row.tokens[-1] = tokens[-1]
    proposal = drafter.draft(DraftState([row], engine.cache, {}), Plan(Mode.SPECULATIVE, count))
    assert proposal.num_tokens == (count,)
    return proposal.tokens[0].tolist()


@pytest.mark.parametrize("windows", [(None, None), (4, None)], ids=["full", "sliding"])
def test_each_draft_is_that_of_a_fresh_start(windows: tuple[int | None, ...]) -> None:
    """Prompts in chunks, a ragged batch, drafts partly accepted, rows that end: nothing is lost."""
    backbone = with_eos(tiny_backbone("qwen3"))
    answers = [reference_greedy(backbone, p, NEW) for p in PROMPTS]
    backbone.eos_token_ids = (answers[1][4],)
    backbone.prefill_chunk = 4
    drafter = random_dflash(backbone, windows=windows)
    # Of its own drafts the target accepts next to nothing; with these it goes on unevenly.
    oracle = sometimes_wrong([p + a for p, a in zip(PROMPTS, answers, strict=True)], 4)
    drafts = []

    class Mixed(DFlashDrafter):
        def draft(self, state: DraftState, plan: Plan) -> Any:
            proposal = super().draft(state, plan)
            rows = zip(state.rows, proposal.tokens.tolist(), strict=True)
            drafts.extend((list(row.tokens), tokens) for row, tokens in rows)
            return oracle.draft(state, plan)

    engine, rows = make_engine(backbone, Mixed(backbone, drafter._model), PROMPTS, LONG)
    records = list(run(engine, rows))
    assert {s.num_accepted for r in records[len(rows) :] for s in r.rows} >= {0, 1, 2}
    assert len({s.num_new_tokens for s in rows}) > 1, "no row ended before the others"
    assert len({tuple(tokens) for _, tokens in drafts}) > 5
    for text, tokens in drafts:
        assert propose_after(drafter, text, 4) == tokens


class Recorder:
    """Knows the positions of the tokens that it was handed, by cache row."""

    name, taps = "recorder", (0,)

    def __init__(self, inner: Any) -> None:
        self.inner, self.max_draft_tokens = inner, inner.max_draft_tokens
        self.seen: dict[int, list[int]] = {}

    def absorb(
        self, cache: Any, rows: Sequence[int], hidden: dict[int, Tensor], num_tokens: Sequence[int]
    ) -> None:
        for b, (row, count) in enumerate(zip(rows, num_tokens, strict=True)):
            self.seen.setdefault(row, []).extend(hidden[0][b, :count, 0].int().tolist())
            assert cache.lengths[row] == len(self.seen[row])

    def draft(self, state: DraftState, plan: Plan) -> Any:
        for row in state.rows:
            assert self.seen[row.row] == list(range(row.cached_len))
        return self.inner.draft(state, plan)

    def observe(self, record: Any) -> None: ...
    def reset(self) -> None: ...


def test_the_engine_hands_over_every_cached_token_once() -> None:
    target = RandomTarget(64, seed=3)
    target.prefill_chunk = 4
    answers = decoder(target).generate(PROMPTS, strategy="ar", max_new_tokens=NEW)
    sequences = [p + list(a.token_ids) for p, a in zip(PROMPTS, answers, strict=True)]
    drafter = Recorder(sometimes_wrong(sequences, 4))
    assert isinstance(drafter, ContextDrafter)
    assert not isinstance(drafter.inner, ContextDrafter)
    engine, rows = make_engine(target, drafter, PROMPTS, LONG)
    assert len(list(run(engine, rows))) > len(rows) + 2
    assert [r.tokens for r in rows] == sequences


def test_steps_without_a_draft_are_absorbed_too() -> None:
    backbone = tiny_backbone()
    drafter = random_dflash(backbone)
    counts = itertools.cycle([0, 0, 3])
    engine, rows = make_engine(backbone, drafter, PROMPTS[:1], LONG)

    class Now(FixedRouter):
        def plan(self, rows: Any, history: Any) -> tuple[Plan, ...]:
            return (Plan(Mode.SPECULATIVE, next(counts)),) * len(rows)

    engine.router = Now(3)
    text = list(PROMPTS[0])
    for record in run(engine, rows):
        (step,) = record.rows
        if step.drafted:
            assert list(step.drafted) == propose_after(drafter, text, 3)[: len(step.drafted)]
        text += step.tokens
    assert sum(r.rows[0].num_drafted > 0 for r in engine.history) > 2


def test_a_row_that_was_freed_begins_anew() -> None:
    backbone = tiny_backbone()
    drafter = random_dflash(backbone)
    engine, (row,) = make_engine(backbone, drafter, PROMPTS[:1], LONG)
    prefill(engine, row)
    engine.cache.free(0)
    row.tokens, row.num_prompt_tokens = list(PROMPTS[1]), len(PROMPTS[1])
    prefill(engine, row)
    proposal = drafter.draft(DraftState([row], engine.cache, {}), Plan(Mode.SPECULATIVE, 3))
    assert proposal.tokens[0].tolist() == propose_after(drafter, row.tokens, 3)


def test_the_mask_is_never_drafted() -> None:
    backbone = tiny_backbone()
    free = propose_after(random_dflash(backbone), PROMPTS[0], 5)
    for token in set(free):
        barred = random_dflash(backbone, mask_token_id=token)
        assert token not in propose_after(barred, PROMPTS[0], 5)


def test_a_sampled_draft_follows_the_rows_own_law() -> None:
    backbone = tiny_backbone()
    drafter = random_dflash(backbone)
    params = SamplingParams(
        temperature=0.7, top_k=20, repetition_penalty=1.2, seed=5, max_new_tokens=NEW
    )
    engine, (row,) = make_engine(backbone, drafter, PROMPTS[:1], params)
    prefill(engine, row)
    state, plan = DraftState([row], engine.cache, {}), Plan(Mode.SPECULATIVE, 4)
    with torch.inference_mode():
        logits = drafter._logits([row], drafter._memory(engine.cache), 4)[0]
    proposal = drafter.draft(state, plan)
    tokens = proposal.tokens[0].tolist()
    assert proposal.draft_probs is not None
    for slot in range(4):
        history = row.tokens + tokens[:slot]
        wanted = process_logits(logits[slot : slot + 1], params, history, row.num_prompt_tokens)
        law = torch.softmax(wanted[0], dim=-1)
        torch.testing.assert_close(proposal.draft_probs[0, slot], law, rtol=0, atol=1e-6)
        assert law[tokens[slot]] > 0
    assert proposal.num_forwards == 0, "its passes are not the backbone's"


def test_calls_do_not_share_what_they_saw() -> None:
    backbone = tiny_backbone()
    model = decoder(backbone, random_dflash(backbone))
    drafter: Any = model._parts.drafter()
    alone = [model.generate(p, max_new_tokens=NEW) for p in PROMPTS[:2]]
    streams = [model.stream(p, max_new_tokens=NEW) for p in PROMPTS[:2]]
    together = [list(event) for event in itertools.zip_longest(*streams)]
    for index, result in enumerate(alone):
        events = [pair[index] for pair in together if pair[index] is not None]
        assert events[-1].result.token_ids == result.token_ids
        drafted = [e.record.rows[0].num_accepted for e in events]
        assert sum(drafted) == result.stats.num_accepted
    del streams, together, events
    gc.collect()
    assert not list(drafter._memories), "keys and values outlive their call"


def test_a_failure_costs_drafts_and_nothing_else() -> None:
    backbone = tiny_backbone()
    drafter, calls = random_dflash(backbone), itertools.count()
    absorb = drafter.absorb

    def fails_once(*args: Any) -> None:
        if next(calls) == 3:
            raise RuntimeError("out of luck")
        absorb(*args)

    drafter.absorb = fails_once  # type: ignore[method-assign]
    model = decoder(backbone, drafter)
    with pytest.warns(DrafterWarning, match="out of luck"):
        results = model.generate(PROMPTS[:2], max_new_tokens=NEW)
    for prompt, result in zip(PROMPTS, results, strict=False):
        assert list(result.token_ids) == reference_greedy(backbone, prompt, NEW)
    lone = decoder(backbone, random_dflash(backbone)).generate(PROMPTS[0], max_new_tokens=NEW)
    assert results[0].stats.num_drafted < lone.stats.num_drafted


def test_a_target_on_transformers_own_classes(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "gpt2", tokenizer=False, n_embd=64, n_head=4, n_layer=3)
    backbone = HFBackbone.from_path(path, "cpu", torch.float32)
    like = tiny_backbone()  # for the shape of the draft network only
    drafter = DFlashDrafter(backbone, random_dflash(like)._model)
    model = decoder(backbone, drafter, num_draft_tokens=3)
    results = model.generate(PROMPTS, max_new_tokens=NEW)
    plain = model.generate(PROMPTS, max_new_tokens=NEW, strategy="ar")
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    assert results[0].stats.num_drafted > 0


def test_the_facade_takes_a_folder(tmp_path: Path) -> None:
    target = tiny_checkpoint(tmp_path / "target", tokenizer=False)
    own = random_dflash(tiny_backbone())
    folder = tmp_path / "drafter"
    save_dflash(folder, own._model, torch.float32)
    plain = HybridDecoder.from_pretrained(target).generate(PROMPTS, max_new_tokens=NEW)
    for given in (folder, f"dflash:{folder}"):
        model = HybridDecoder.from_pretrained(target, drafter=given)
        assert model.drafter_name == "dflash"
        results = model.generate(PROMPTS, max_new_tokens=NEW)
        assert [r.token_ids for r in results] == [r.token_ids for r in plain]
        assert results[0].stats.num_drafted > 0
    with pytest.raises(ConfigError, match="dflash:FOLDER"):
        HybridDecoder.from_pretrained(target, drafter="dflash")
    with pytest.raises(ConfigError, match="at most 7"):
        HybridDecoder.from_pretrained(target, drafter=folder, num_draft_tokens=8)
