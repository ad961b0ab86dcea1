"""Tokens that the device chooses are those that the host would, and a step waits for it once."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from block_twins import model as denoiser
from block_twins import start
from carrying import RandomRouter, carrying_engine
from fakes import SkewedDrafter, UniformDrafter, decoder, random_prompts
from mixed_modes import NEW, PROMPTS, VOCAB, K, make, tiny
from reads import OPERATIONS, counting, deciding_on_device
from router_simulation import linear

from hybrid.decode.denoise import denoise
from hybrid.decode.fallback import DrafterWarning
from hybrid.decode.loop import prefill, run
from hybrid.decode.policies import DenoisePreset
from hybrid.decode.step import decode_step
from hybrid.drafters.denoise.presets import D3LLM, Dream, EntropyBound, FastDLLM, LLaDA
from hybrid.errors import ConfigError, ProposalError
from hybrid.kernels import dispatch
from hybrid.params import SamplingParams
from hybrid.protocols import ForwardOutput
from hybrid.router.config import RouterConfig
from hybrid.router.cost import CostModel, warm_up
from hybrid.router.fixed import FixedRouter
from hybrid.router.hybrid import HybridRouter
from hybrid.router.profile import Profile
from hybrid.types import Mode, Proposal, StepRecord

MANY = {
    "greedy": [SamplingParams(max_new_tokens=NEW, seed=i) for i in range(3)],
    "sampled": [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, max_new_tokens=NEW, seed=i)
        for i, (t, k, p, m) in enumerate(((1.0, 0, 1, 0), (0.8, 4, 0.9, 0), (1.3, 0, 0.95, 0.05)))
    ],
    "mixed": [
        SamplingParams(max_new_tokens=NEW, repetition_penalty=1.3, min_new_tokens=9),
        SamplingParams(temperature=0.9, frequency_penalty=0.4, max_new_tokens=NEW, seed=5),
        SamplingParams(temperature=1.1, top_p=0.8, presence_penalty=0.5, max_new_tokens=NEW - 3),
    ],
}
ROUTERS = {
    "ar": lambda seed: FixedRouter(0),
    "two-pass": lambda seed: FixedRouter(K),
    "fused": lambda seed: FixedRouter(3, Mode.FUSED),
    "one-pass": lambda seed: FixedRouter(3, Mode.ONE_PASS),
    "random": lambda seed: RandomRouter(K, seed),
    "unverified": lambda seed: RandomRouter(K, seed, max_unverified=2),
}


def story(kind: str, router: Any, params: Any, verifier: str = "rejection") -> list[Any]:
    """Return what the records of a run say but its times and the rounding of probabilities."""
    drafter, backbone = make(kind)
    engine, rows = carrying_engine(backbone, drafter, PROMPTS, params, router, verifier=verifier)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DrafterWarning)
        records = list(run(engine, rows))
    told = [
        (s.index, s.tokens, s.sources, s.drafted, s.num_accepted, s.mode, s.points, s.num_slots)
        for record in records
        for s in record.rows
    ]
    return [told, [row.stream.offset for row in rows], _certainty(records)]


def _certainty(records: list[StepRecord]) -> list[float]:
    steps = [step for record in records for step in record.rows]
    columns = ((*s.entropies, *s.confidences, *s.margins, *s.disagreements) for s in steps)
    behind = [s.next_entropy for s in steps if s.next_entropy is not None]
    return [*itertools.chain(*columns), *behind]


def same(ours: list[Any], theirs: list[Any]) -> bool:
    return ours[:2] == theirs[:2] and ours[2] == pytest.approx(theirs[2], abs=1e-5, nan_ok=True)


@pytest.mark.parametrize("mode", ROUTERS)
@pytest.mark.parametrize("params", MANY)
@pytest.mark.parametrize("kind", ["late", "sampler", "combined"])
def test_answers_are_those_of_the_host(kind: str, params: str, mode: str) -> None:
    verifier = {"greedy": "greedy", "mixed": "block"}.get(params, "rejection")
    for seed in range(2):
        own = [p.replace(seed=10 * seed + i) for i, p in enumerate(MANY[params])]
        host = story(kind, ROUTERS[mode](seed), own, verifier)
        with deciding_on_device():
            device = story(kind, ROUTERS[mode](seed), own, verifier)
        assert same(device, host)


@pytest.mark.parametrize("drafter", ["ngram", "dflash", "uniform", "skewed"])
@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_other_drafters(drafter: str, verifier: str) -> None:
    prompts = random_prompts(9, 1, 11, vocab_size=VOCAB, seed=4)
    fakes = {"uniform": UniformDrafter, "skewed": SkewedDrafter}
    for seed in range(4):
        params = SamplingParams(temperature=0.9, seed=seed, max_new_tokens=NEW)
        answers = []
        for force in (False, True):
            made = fakes[drafter](VOCAB) if drafter in fakes else drafter
            model = decoder(tiny(), made, verifier=verifier, num_draft_tokens=3)
            if force:
                with deciding_on_device():
                    answers.append(model.generate(prompts, params, strategy="speculative"))
            else:
                answers.append(model.generate(prompts, params, strategy="speculative"))
        for device, host in zip(*answers, strict=True):
            assert device.token_ids == host.token_ids
            assert device.sources == host.sources
            assert device.stats.num_drafted == host.stats.num_drafted


@pytest.mark.parametrize("params", ["greedy", "mixed"])
def test_by_the_kernels_themselves(params: str) -> None:
    own = [p.replace(min_new_tokens=0, max_new_tokens=5) for p in MANY[params]]
    router = RandomRouter(2)  # wants to know how sure the draft is
    host = story("late", router, own)
    with deciding_on_device("triton"):
        assert same(story("late", router, own), host)
        ran = {op: dispatch.last(op) for op in OPERATIONS}
    expected = OPERATIONS if params == "mixed" else ("logits_stats",)
    assert all(ran[op] == "triton" for op in expected)


@pytest.mark.parametrize("params", MANY)
@pytest.mark.parametrize("mode", ["ar", "two-pass", "fused", "one-pass"])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("kind", ["late", "combined"])
def test_a_step_waits_once(kind: str, num_rows: int, mode: str, params: str) -> None:
    waits, strays, records = _waits(ROUTERS[mode](0), MANY[params][:num_rows], kind=kind)
    assert not strays
    assert set(waits) == {1}
    wanted = Mode.SPECULATIVE if mode == "two-pass" else Mode(mode)
    assert wanted in {record.mode for record in records}


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("params", MANY)
@pytest.mark.parametrize("kind", ["late", "combined"])
def test_the_router_waits_for_a_draft_only_where_looking_pays(
    kind: str, params: str, num_rows: int
) -> None:
    """Its certainty, before the target pass. The first draft is looked at; then it is known."""
    own = [p.replace(max_new_tokens=36) for p in MANY[params]][:num_rows]
    for look_ms in (0.0, 1e9):
        waits, strays, records = _waits(_hybrid_router(look_ms), own, kind=kind)
        assert not strays
        drafted = [any(step.confidences for step in record.rows) for record in records]
        assert sum(drafted) > 5
        if look_ms == 0:
            assert waits == [1 + own for own in drafted]
        else:
            # Each sampled row has to learn it by itself.
            assert sum(waits) <= len(waits) + num_rows
            assert set(waits[len(waits) // 2 :]) == {1}
            assert (1, True) in zip(waits, drafted, strict=True), "drafted, and waited once"


@pytest.mark.parametrize("look_ms", [0.1, 0.4, 1.5])
@pytest.mark.parametrize("temperature", [0.3, 0.7])
def test_whether_a_sampled_row_is_looked_at_does_not_depend_on_the_others(
    look_ms: float, temperature: float
) -> None:
    """Where it copies, its certainty is missing alone, and NaN beside rows that draft."""
    costs = warm_up(linear(token=1.1, draft=1.0), 1, K, 0, look_ms)
    prompts, num_copies = [[3, 1, 4] * 3, [5, 0, 2, 1, 5, 3], [2, 0, 1, 4]], Counter[bool]()
    for seed in range(0, 40, 10):
        found = []
        for count in (1, 3):
            drafter, backbone = make("combined")
            params = [
                SamplingParams(temperature=temperature, seed=seed + i, max_new_tokens=60)
                for i in range(count)
            ]
            router = _hybrid_router(look_ms, costs)
            engine, rows = carrying_engine(backbone, drafter, prompts[:count], params, router)
            steps = [s for record in run(engine, rows) for s in record.rows if s.index == 0]
            num_copies.update(bool(s.confidences) for s in steps if s.num_proposed)
            found.append([(s.tokens, s.num_proposed, s.num_drafted) for s in steps])
        assert found[0] == found[1]
    assert len(num_copies) == 2, "it copied, and drafted"


def _hybrid_router(look_ms: float, costs: CostModel | None = None) -> HybridRouter:
    """A router that knows its costs; those of the profile are for sampled rows."""
    costs = costs or CostModel.forwards()
    costs.look_ms = look_ms
    profile = Profile(model="m", domain="d", risk=0.1, thresholds=(), costs=costs.to_dict())
    return HybridRouter(RouterConfig(num_draft_tokens=K), costs, profile)


def _waits(
    router: Any, params: list[SamplingParams], *hosts: tuple[Any, str], kind: str = "late"
) -> tuple[list[int], list[str], list[StepRecord]]:
    """Return the reads of each step of a run, other looks, and the records."""
    drafter, backbone = make(kind)
    prompts = PROMPTS[: len(params)]
    engine, rows = carrying_engine(backbone, drafter, prompts, params, router)
    waits, records = [], []
    with deciding_on_device():
        taps = [prefill(engine, row)[1] for row in rows]
        engine.rows = rows
        engine.hidden = {n: torch.cat([own[n] for own in taps]) for n in drafter.taps}
        with counting((backbone, "forward"), *hosts) as reads:
            while engine.rows:
                before = reads.num_reads
                records.append(decode_step(engine))
                waits.append(reads.num_reads - before)
    return waits, reads.strays, records


def test_the_count_sees_a_look() -> None:
    with counting() as reads:
        assert torch.ones(1).item() == 1
        assert torch.equal(torch.ones(2), torch.ones(2))
        assert torch.ones(2)[torch.tensor([True, False])].shape == (1,)
        assert torch.ones(2)[[1]].shape == (1,)
        assert torch.tensor([1], device="cpu").shape == (1,)
    expected = {"item", "equal", "index", "index of a list", "tensor on a device"}
    assert expected <= set(reads.strays)


def test_a_law_that_excludes_its_token_is_an_error() -> None:
    drafter, backbone = make("late")
    params = [SamplingParams(temperature=1.0, max_new_tokens=NEW)]
    engine, rows = carrying_engine(backbone, drafter, PROMPTS[:1], params, FixedRouter(1))
    lie = Proposal(torch.tensor([[0]]), (1,), torch.eye(VOCAB)[None, 1:2])
    drafter.draft = lambda *_: lie
    with deciding_on_device(), pytest.raises(ProposalError, match="row 0 gives probability 0"):
        list(run(engine, rows))


@pytest.mark.parametrize("is_forced", [False, True], ids=["host", "device"])
def test_logits_without_a_law_are_an_error(is_forced: bool) -> None:
    drafter, backbone = make("late")
    params = [SamplingParams(temperature=1.0, max_new_tokens=NEW)]
    engine, rows = carrying_engine(backbone, drafter, PROMPTS[:1], params, FixedRouter(0))
    engine.backbone = SimpleNamespace(**vars(backbone))
    nothing = torch.full((1, 1, VOCAB), float("nan"))
    engine.backbone.forward = lambda *_, **__: ForwardOutput(nothing)
    force = deciding_on_device() if is_forced else nullcontext()
    with force, pytest.raises(ConfigError, match="NaN"):
        list(run(engine, rows))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    "preset",
    [
        LLaDA(block_size=4, remasking="random"),
        FastDLLM(block_size=6, threshold=0.3),
        D3LLM(block_size=4),
        Dream(algorithm="topk_margin"),
        EntropyBound(gamma=2.0),
    ],
    ids=lambda preset: type(preset).__name__,
)
def test_denoising_is_that_of_the_host(preset: DenoisePreset, temperature: float) -> None:
    prompts = random_prompts(9, 1, 4, vocab_size=20)
    answers = []
    for force in (nullcontext(), deciding_on_device()):
        with force:
            rows, cache = start(denoiser(), preset, prompts, 12, temperature=temperature)
            with counting() as reads:
                records = list(denoise(denoiser(), cache, rows))
            answers.append([(r.state.tokens, r.state.stream.offset) for r in rows])
    assert answers[0] == answers[1]
    assert 0 < reads.num_reads <= sum(len(record.rows) for record in records)
