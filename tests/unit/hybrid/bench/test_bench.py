"""`hybrid bench` without the command line: order, arithmetic, equality, and the other engines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import UniformDrafter

from hybrid import HybridDecoder
from hybrid.bench import llama_cpp as llama_cpp_module
from hybrid.bench import report
from hybrid.bench.candidates import Answer, DecoderCandidate, TransformersCandidate, precision
from hybrid.bench.environment import describe
from hybrid.bench.llama_cpp import LlamaCpp, gguf_file
from hybrid.bench.runner import Sample, measure, rotated
from hybrid.bench.widths import time_widths
from hybrid.errors import CheckpointError, ConfigError
from hybrid.metrics import acceptance_by_position
from hybrid.models.linear import PackedLinear
from hybrid.models.reference import TransformersReference
from hybrid.models.tiny import tiny_checkpoint
from hybrid.types import Mode, StepRecord

PROMPT_IDS = [[5, 9, 5, 9, 5], [7, 8, 7, 8, 7, 8]]
NEW = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def decoder(checkpoint: Path) -> HybridDecoder:
    return HybridDecoder.from_pretrained(checkpoint, dtype="float32")


@pytest.fixture(scope="module")
def transformers(checkpoint: Path) -> TransformersCandidate:
    return TransformersCandidate(TransformersReference(checkpoint))


class Scripted:
    """Takes `costs[i]` seconds of the shared clock for its i-th timed answer of `num_tokens[i]`."""

    dtype, version = "float32", "0"

    def __init__(
        self,
        name: str,
        now: list[float],
        costs: Sequence[float] = (1.0, 1.0, 1.0),
        num_tokens: Sequence[int] = (4, 4, 4),
        engine: str = "hybrid",
    ) -> None:
        self.name, self.engine, self._now = name, engine, now
        # The warm-up comes first; it costs a lot, and must not be counted.
        self._costs, self._num_tokens = [1000.0, *costs], [1, *num_tokens]
        self.calls: list[tuple[tuple[int, ...], int]] = []

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        turn = len(self.calls)
        self.calls.append((tuple(prompt), max_new_tokens))
        self._now[0] += self._costs[turn]
        return Answer(tuple(range(self._num_tokens[turn])))


class Wrong:
    """A decoder whose answer to the second prompt has another token at one place."""

    engine, version = "hybrid", "0"

    def __init__(self, candidate: DecoderCandidate, position: int) -> None:
        self._candidate, self._position = candidate, position
        self.name, self.dtype, self.strategy = "wrong", candidate.dtype, "wrong"

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        tokens = list(self._candidate.generate(prompt, max_new_tokens).tokens)
        if list(prompt) == PROMPT_IDS[1]:
            tokens[self._position] = (tokens[self._position] + 1) % 64
        return Answer(tuple(tokens))


def test_every_prompt_visits_all_in_an_order_that_turns() -> None:
    now = [0.0]
    order: list[str] = []

    class Spy(Scripted):
        def generate(self, prompt: Sequence[int], max_new_tokens: int) -> Answer:
            order.append(f"{self.name}{prompt[0]}")
            return super().generate(prompt, max_new_tokens)

    seen: list[tuple[int, int]] = []
    candidates = [Spy(name, now) for name in "abc"]
    measure(
        candidates,
        [[1], [2], [3]],
        40,
        progress=lambda done, total: seen.append((done, total)),
        clock=lambda: now[0],
    )
    assert order == ["a1", "b1", "c1", "a1", "b1", "c1", "b2", "c2", "a2", "c3", "a3", "b3"]
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert [limit for _, limit in candidates[0].calls] == [16, 40, 40, 40]
    assert rotated([1, 2, 3], 4) == [2, 3, 1]


def test_ratio_is_the_median_of_time_per_token_over_prompts() -> None:
    now = [0.0]
    slow = Scripted("slow", now, costs=(8, 8, 30), num_tokens=(4, 4, 3), engine="llama.cpp")
    fast = Scripted("fast", now, costs=(1, 4, 1), num_tokens=(2, 4, 5))
    samples = measure([slow, fast], [[1], [2], [3]], 8, clock=lambda: now[0])
    assert [s.seconds for s in samples["fast"]] == [1, 4, 1]
    rows = report.report_rows([slow, fast], samples, [[1], [2], [3]], 8)
    # Per token: slow 2, 2, 10 and fast 0.5, 1, 0.2; per prompt 4, 2, 50. The ratio of the totals
    # (46/11 against 6/11) would be 7.7.
    assert rows[1]["ratios"] == {"slow": 4.0}
    assert rows[0]["ratios"] == {"slow": 1.0}
    assert rows[1]["tokens_per_second"]["p50"] == 2.0
    assert rows[1]["tokens_per_second"]["p20"] == pytest.approx(1.4)
    assert rows[1]["tokens_per_second"]["p80"] == pytest.approx(3.8)


def test_overhead_and_times_by_width_come_from_the_records() -> None:
    def record(mode: Mode, width: int, forward: float, draft: float, num_drafts: int) -> StepRecord:
        return StepRecord(
            mode,
            (),
            num_draft_forwards=num_drafts,
            width=width,
            forward_seconds=forward,
            draft_seconds=draft,
        )

    records = [
        record(Mode.PREFILL, 40, 7.0, 0.0, 0),
        record(Mode.AR, 1, 0.010, 0.5, 0),  # a lookup: no pass
        record(Mode.SPECULATIVE, 9, 0.020, 0.004, 2),
        record(Mode.SPECULATIVE, 9, 0.040, 0.008, 2),
        record(Mode.SPECULATIVE, 9, 0.024, 0.006, 2),
        record(Mode.SPECULATIVE, 10, 0.1, 0.006, 2),
    ]
    times = report.ms_per_forward(records)
    assert list(times) == ["1", "9", "10", "draft"]
    assert times == pytest.approx({"1": 10.0, "9": 24.0, "10": 100.0, "draft": 3.0})
    assert report.forward_seconds(records) == pytest.approx(7.194 + 0.024)


def test_float32_equals_transformers_and_a_wrong_decoder_does_not(decoder, transformers) -> None:
    ours = [DecoderCandidate(decoder, name) for name in ("ar", "ngram", "speculative")]
    wrong = Wrong(ours[0], position=5)
    candidates = [transformers, *ours, wrong]
    samples = measure(candidates, PROMPT_IDS, NEW)
    rows = {row["name"]: row for row in report.report_rows(candidates, samples, PROMPT_IDS, NEW)}
    for candidate in ours:
        row = rows[candidate.name]
        assert row["reference"] == "transformers float32"
        assert (row["greedy_match"], row["num_greedy_match"]) == (True, 2)
        assert row["first_divergence"] is None
    row = rows["wrong"]
    assert (row["greedy_match"], row["num_greedy_match"]) == (False, 1)
    assert sorted(row["greedy_match_by_prompt"]) == [False, True]
    assert not row["greedy_match_by_prompt"][row["first_divergence"]["prompt"]]
    expected = samples["transformers float32"][1].answer.tokens
    logits = transformers.next_logits([*PROMPT_IDS[1], *expected[:5]])
    best, second = logits.topk(2).values.tolist()
    assert row["first_divergence"] == {
        "prompt": 1,
        "position": 5,
        "expected": expected[5],
        "got": (expected[5] + 1) % 64,
        "margin": pytest.approx(best - second),
    }
    assert row["largest_margin"] == row["first_divergence"]["margin"] > 0
    assert rows["transformers float32"]["greedy_match"] is None
    json.dumps(list(rows.values()))


def test_an_answer_that_ends_early_parts_at_its_end(transformers) -> None:
    got = report.first_divergence([5], (1, 2, 3), (1, 2), transformers)
    assert got is not None
    assert (got["position"], got["expected"], got["got"]) == (2, 3, None)
    assert report.first_divergence([5], (1, 2), (1, 2), transformers) is None


def test_the_reference_is_transformers_in_float32_and_own_ar_elsewhere() -> None:
    def candidate(engine: str, dtype: str, strategy: str | None = None) -> Any:
        return SimpleNamespace(engine=engine, dtype=dtype, strategy=strategy)

    theirs, llama = candidate("transformers", "float32"), candidate("llama.cpp", "gguf")
    ar4, ngram4 = candidate("hybrid", "int4", "ar"), candidate("hybrid", "int4", "ngram")
    ar32, ngram32 = candidate("hybrid", "float32", "ar"), candidate("hybrid", "float32", "ngram")
    everyone = [theirs, llama, ar4, ngram4, ar32, ngram32]
    found = [report.reference_of(c, everyone) for c in everyone]
    assert found == [None, None, None, ar4, theirs, theirs]
    assert report.reference_of(ngram32, [ar32, ngram32]) is ar32
    assert report.reference_of(ngram32, [ngram32]) is None


def test_engine_numbers_add_up(decoder) -> None:
    candidate = DecoderCandidate(HybridDecoder(decoder.backbone, num_draft_tokens=3), "ngram")
    samples = measure([candidate], PROMPT_IDS, 24)
    row = report.report_rows([candidate], samples, PROMPT_IDS, 24)[0]
    records = [r for s in samples[candidate.name] for r in s.answer.records]
    assert row["num_draft_tokens"] == 3
    num_verify = len(records) - 2
    assert row["forwards"] == {"prefill": 2, "draft": 0, "verify": num_verify, "denoise": 0}
    assert row["acceptance_by_position"] == acceptance_by_position(row["acceptance_histogram"], 3)
    assert sum(row["acceptance_histogram"]) == sum(r.mode == Mode.SPECULATIVE for r in records)
    assert row["acceptance_length"] == pytest.approx(
        (sum(row["num_tokens"]) - 2) / row["forwards"]["verify"]
    )
    assert 0 < row["loop_overhead"] < 1
    assert set(row["ms_per_forward"]) == {
        str(r.width) for r in records[1:] if r.mode != Mode.PREFILL
    }
    assert row["planned_memory_mib"] > 0
    assert all(event.text == "" for event in candidate.decoder.stream([5], max_new_tokens=3))


def test_a_drafter_that_is_an_object_is_measured(decoder) -> None:
    drafter = UniformDrafter(decoder.backbone.vocab_size)
    model = HybridDecoder(decoder.backbone, decoder.tokenizer, drafter=drafter)
    candidate = DecoderCandidate(model, "speculative")
    assert candidate.generate(PROMPT_IDS[0], 9).stats.num_drafted > 0
    assert candidate.decoder.tokenizer is None
    assert model.tokenizer is not None


def test_next_logits_agree_with_transformers(decoder, transformers) -> None:
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    ours = DecoderCandidate(decoder, "ar").next_logits(ids)
    torch.testing.assert_close(ours, transformers.next_logits(ids), atol=1e-4, rtol=1e-4)


def test_the_reference_ignores_the_checkpoints_sampling(tmp_path) -> None:
    path = tiny_checkpoint(tmp_path)
    plain = TransformersReference(path).generate([5, 6, 7], NEW)
    settings = json.loads((path / "generation_config.json").read_text())
    settings |= {"do_sample": True, "temperature": 5.0, "repetition_penalty": 50.0}
    (path / "generation_config.json").write_text(json.dumps(settings))
    assert TransformersReference(path).generate([5, 6, 7], NEW) == plain
    with pytest.raises(CheckpointError, match="has no config.json"):
        TransformersReference(tmp_path / "nothing")


def test_precision_names_packed_layers(decoder, checkpoint) -> None:
    assert precision(decoder.backbone) == "float32"
    half = HybridDecoder.from_pretrained(checkpoint, dtype="bfloat16")
    assert precision(half.backbone) == "bfloat16"
    packed = torch.empty(0)
    layer = SimpleNamespace(
        qkv=packed, o=packed, gate_up=packed, down=PackedLinear.__new__(PackedLinear)
    )
    assert precision(SimpleNamespace(layers=[layer], dtype=torch.bfloat16)) == "int4"


def test_widths_are_timed_in_turns(decoder, checkpoint) -> None:
    half = HybridDecoder.from_pretrained(checkpoint, dtype="bfloat16")
    passes: list[tuple[str, int]] = []
    now = [0.0]

    class Timed:
        """A pass of w rows takes w seconds, the first of each run ten times that."""

        def __init__(self, name: str, backbone: Any) -> None:
            self.name, self._backbone = name, backbone

        def __getattr__(self, name: str) -> Any:
            return getattr(self._backbone, name)

        def forward(self, ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            passes.append((self.name, ids.shape[1]))
            now[0] += ids.shape[1] * (10 if len(passes) < 11 else 1)
            return self._backbone.forward(ids, *args, **kwargs)

    backbones = {"a": Timed("a", decoder.backbone), "b": Timed("b", half.backbone)}
    got = time_widths(backbones, [1, 4], context=8, repeats=3, clock=lambda: now[0])
    assert got == {"a": {"1": 1000.0, "4": 4000.0}, "b": {"1": 1000.0, "4": 4000.0}}
    assert passes[:2] == [("a", 8), ("b", 8)]
    assert passes[10:14] == [("a", 1), ("a", 4), ("b", 1), ("b", 4)]
    assert passes[14:18] == [("a", 4), ("b", 1), ("b", 4), ("a", 1)]
    with pytest.raises(ConfigError, match="expected at most 512"):
        time_widths({"a": decoder.backbone}, [1, 505], context=8)
    for bad in ([], [0], [2, 2]):
        with pytest.raises(ConfigError, match="expected distinct numbers"):
            time_widths({"a": decoder.backbone}, bad)


def test_environment_names_what_a_number_depends_on() -> None:
    found = describe(torch.device("cpu"))
    json.dumps(found)
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert found["cpu"]
    assert found["peak_memory_mib"] > 10
    if found["git_sha"] is not None:
        assert len(found["git_sha"]) == 40
        assert isinstance(found["is_dirty"], bool)


FAKE_LLAMA = '''
__version__ = "9.9"

class Llama:
    """Counts up from the prompt's last token; refuses to answer twice without a reset."""
    def __init__(self, path, *, n_ctx, n_threads, n_threads_batch, verbose):
        assert (path, n_ctx, n_threads, n_threads_batch) == ("m.gguf", 64, 3, 3), locals()
        self.fresh = False
    def reset(self):
        self.fresh = True
    def generate(self, tokens, *, temp, repeat_penalty):
        assert self.fresh and temp == 0 and repeat_penalty == 1
        self.fresh = False
        token = tokens[-1]
        while True:
            token += 1
            yield token
'''


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LlamaCpp]:
    (tmp_path / "llama_cpp.py").write_text(FAKE_LLAMA)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    engine = LlamaCpp(sys.executable, Path("m.gguf"), [105], max_seq_len=64, num_threads=3)
    yield engine
    engine.close()


def test_llama_cpp_answers_through_its_pipe(llama) -> None:
    assert llama.version == "9.9"
    assert llama.generate([1, 100], 3).tokens == (101, 102, 103)
    assert llama.generate([1, 102], 30).tokens == (103, 104, 105)  # the EOS id included
    samples = measure([llama], [[1], [2]], 4)
    assert [s.answer.tokens for s in samples["llama.cpp"]] == [(2, 3, 4, 5), (3, 4, 5, 6)]


def test_llama_cpp_that_cannot_start_says_so(tmp_path, monkeypatch) -> None:
    start = {"max_seq_len": 64, "num_threads": 1}
    (tmp_path / "llama_cpp.py").write_text("raise SystemExit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match="exit code 3"):
        LlamaCpp(sys.executable, Path("m.gguf"), [1], **start)
    with pytest.raises(ConfigError, match="cannot be run"):
        LlamaCpp(tmp_path / "no-python", Path("m.gguf"), [1], **start)
    monkeypatch.setattr(llama_cpp_module, "SCRIPT", tmp_path / "none.py")
    with pytest.raises(ConfigError, match="source checkout"):
        LlamaCpp(sys.executable, Path("m.gguf"), [1], **start)


def test_llama_cpp_reads_the_file_that_was_converted(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path))
    with pytest.raises(CheckpointError, match="models pull default"):
        gguf_file("default")
    (tmp_path / "downloads").mkdir()
    file = tmp_path / "downloads" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.touch()
    assert gguf_file("default") == gguf_file(str(file)) == file
    with pytest.raises(ConfigError, match="GGUF"):
        gguf_file(str(tmp_path))


def test_a_sample_counts_all_tokens() -> None:
    assert Sample(Answer((1, 2, 3, 4)), 2.0).seconds_per_token == 0.5
