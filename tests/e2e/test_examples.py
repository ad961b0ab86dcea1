"""Every example runs on a tiny model, is short, and does what it says."""

from __future__ import annotations

import re
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_pairs import DRAFTER, TARGET
from fakes import decoder, random_prompts, tiny_backbone
from repository import ROOT

from hybrid import HybridDecoder
from hybrid.decode.reference import reference_greedy
from hybrid.models.tiny import tiny_checkpoint
from hybrid.params import SamplingParams
from hybrid.protocols import Drafter, DraftState, Verifier
from hybrid.streams import RandomStream
from hybrid.types import Mode, Plan, Proposal, SequenceState
from hybrid.verifiers.greedy import GreedyVerifier

FOLDER = ROOT / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
MAX_LINES = 40

Run = Callable[..., str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model whose answers nobody has drafted for."""
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture
def run(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run an example as a script on the tiny model; return its stdout."""

    def call(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, "--model", model, *arguments])
        runpy.run_path(str(FOLDER / name), run_name="__main__")
        return capsys.readouterr().out

    return call


def _part(name: str, attribute: str) -> Any:
    return runpy.run_path(str(FOLDER / name))[attribute]


def test_they_are_numbered() -> None:
    numbers = [f"{number:02}_" for number in range(1, len(EXAMPLES) + 1)]
    assert [path.name[:3] for path in EXAMPLES] == numbers


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_it_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_generate(run: Run) -> None:
    out = run("01_generate.py")
    assert "acceptance length" in out
    assert "tokens per forward" in out


def test_stream_steps_prints_the_step_as_it_happened(run: Run, model: str) -> None:
    blocks = run("02_stream_steps.py").strip().split("\n\n")
    prefill, steps = blocks[0], blocks[1:]
    assert prefill.startswith("prefill ")
    assert len(steps) > 1
    committed = 1  # by the prefill
    for step in steps:
        lines = [line for line in step.splitlines() if re.match(r"\d [a-z]+ ", line)]
        assert [line.split()[:2] for line in lines] == [
            [str(i), word]
            for i, word in enumerate(
                ("plan", "draft", "inputs", "forward", "verify", "commit", "cache", "record"), 1
            )
        ]
        committed += int(lines[6].split()[2])
    assert steps[-1].endswith(("length", "stop"))
    expected = HybridDecoder.from_pretrained(model).generate("A B C A B C A B", max_new_tokens=24)
    assert committed == len(expected.token_ids)


def test_the_drafter_gives_the_tokens_of_ar(run: Run) -> None:
    assert "same tokens as AR: True" in run("03_write_a_drafter.py")


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 8])
def test_the_drafter_is_a_drafter(num_draft_tokens: int) -> None:
    backbone, drafter = tiny_backbone(), _part("03_write_a_drafter.py", "BigramDrafter")()
    assert isinstance(drafter, Drafter)
    prompts = random_prompts(9, 1, 30)
    results = decoder(backbone, drafter, num_draft_tokens=num_draft_tokens).generate(
        prompts, max_new_tokens=20
    )
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.token_ids) == reference_greedy(backbone, prompt, 20)
    assert sum(result.stats.num_drafted for result in results) > 0


def test_the_drafter_follows_the_last_occurrence() -> None:
    drafter = _part("03_write_a_drafter.py", "BigramDrafter")()
    texts = [[3, 7, 9, 3, 8, 9, 11, 3], [1, 2], [4, 4]]
    rows = [
        SequenceState(i, tokens, 1, SamplingParams(), RandomStream(0))
        for i, tokens in enumerate(texts)
    ]
    state = DraftState(rows, tiny_backbone().new_cache(3, 1), {})
    proposal = drafter.draft(state, Plan(Mode.SPECULATIVE, 4))
    assert proposal.num_tokens == (4, 0, 4)
    assert proposal.tokens[0].tolist() == [8, 9, 11, 3]
    assert proposal.tokens[2].tolist() == [4, 4, 4, 4]


def test_the_verifier_runs(run: Run) -> None:
    out = run("04_write_a_verifier.py")
    assert [line.split(":")[0] for line in out.splitlines()] == ["width 1", "width 4"]


def test_the_narrowest_lenient_verifier_is_greedy() -> None:
    lenient = _part("04_write_a_verifier.py", "LenientVerifier")
    assert isinstance(lenient(1), Verifier)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 4, 6, generator=generator)
    # Half of the drafted tokens are the argmax.
    drafted = torch.randint(6, (5, 3), generator=generator)
    agree = torch.rand(5, 3, generator=generator) < 0.5
    tokens = torch.where(agree, logits[:, :3].argmax(-1), drafted)
    proposal = Proposal(tokens, (3, 0, 2, 3, 1))
    rows = [SamplingParams()] * 5, [RandomStream(0)] * 5
    greedy = GreedyVerifier().verify(logits, proposal, *rows)
    assert lenient(1).verify(logits, proposal, *rows) == greedy
    assert any(greedy.num_accepted)
    assert lenient(6).verify(logits, proposal, *rows).num_accepted == proposal.num_tokens


def test_generate_of_transformers_says_the_same(run: Run) -> None:
    out = run("07_transformers_generate.py")
    assert "same tokens: True" in out
    assert "drafted tokens accepted" in out
    assert "1 2 3 1 2 3 1 2" in out


def test_a_drafter_for_vllm_is_sound(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYBRID_VLLM_PYTHON", raising=False)
    pair = ("--model", str(TARGET), "--drafter", str(DRAFTER))
    out = run("08_serve_in_vllm.py", *pair, "--max-new-tokens", "16")
    assert out.startswith("vllm serve ")
    assert "problem" not in out
    assert "transformers 5" in out


def test_training_writes_an_adapter_that_drafts(
    run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    out = run("05_train_tiny.py", "--steps", "3")
    assert [line.split(":")[0] for line in out.splitlines()[:3]] == ["1", "2", "3"]
    adapter = Path(out.strip().rsplit(" ", 1)[1])
    assert adapter.is_relative_to(tmp_path)
    trained = HybridDecoder.from_pretrained(model, dtype="float32", adapter=adapter)
    result = trained.generate("2 and 3", max_new_tokens=16)
    assert result.stats.num_draft_forwards > 0
    expected = trained.generate("2 and 3", strategy="ar", max_new_tokens=16)
    assert result.token_ids == expected.token_ids


def test_lm_eval_scores_strategies_alike(run: Run) -> None:
    lines = run("06_lm_eval.py", "--limit", "2").splitlines()
    first, second = lines.index("strategy ar"), lines.index("strategy speculative")
    assert lines[first + 1 : first + 3] == lines[second + 1 : second + 3]
    assert lines[first + 3] == "tokens per forward 1.00"
