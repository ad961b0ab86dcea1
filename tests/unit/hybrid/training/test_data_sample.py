"""`sample_prompts`: what is kept of the turns that the target writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes import BYTE_VOCAB, BYTES, EOS, FakeTarget

from hybrid import HybridDecoder
from hybrid.errors import CapacityError, ConfigError
from hybrid.training.generate import only_run_to
from hybrid.training.sample import SampleConfig, Sampled, sample_prompts
from hybrid.training.turns import user_turn

HEAD = len(user_turn(BYTES).start)
LETTERS = BYTES.encode("abc ")
(HALF,) = BYTES.encode("é")[:1]  # half a character


def writer(tokens: list[int]) -> list[float]:
    """Letters, in one of ten an end; now and then half a character or a special token."""
    logits = [-99.0] * BYTE_VOCAB
    for token in LETTERS:
        logits[token] = 1.0
    logits[EOS] = 0.2
    logits[HALF] = logits[0] = -2.0
    return logits


def sample(path: Path, law: Any = writer, tokenizer: Any = BYTES, **fields: Any) -> Sampled:
    target = FakeTarget(law, BYTE_VOCAB, eos_token_ids=(EOS,), max_seq_len=200)
    config = SampleConfig(**{"output": path, "num_prompts": 30, "temperature": 1, **fields})
    return sample_prompts(config, lambda: HybridDecoder(target, tokenizer))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_keeps_different_turns_that_ended(tmp_path: Path) -> None:
    done = sample(tmp_path / "p")
    texts = [row["prompt"] for row in lines(tmp_path / "p")]
    assert len(texts) == len(set(texts)) == done.num_prompts == 30
    assert done.num_tried > 30
    assert all(8 <= len(text) <= 96 and text == text.strip() for text in texts)
    assert set("".join(texts)) == set("abc ")
    assert {row["category"] for row in lines(tmp_path / "p")} == {"open"}


def test_starts_take_turns(tmp_path: Path) -> None:
    sample(tmp_path / "p", starts=("Write code", "", "bcc"))
    found = lines(tmp_path / "p")
    assert {row["category"] for row in found} == {"Write code", "open", "bcc"}
    assert all(r["prompt"].startswith(r["category"]) for r in found if r["category"] != "open")


def test_same_seed_same_prompts_whatever_the_batch(tmp_path: Path) -> None:
    files = []
    for name, fields in {"a": {"batch": 1}, "b": {"batch": 9}, "c": {"seed": 1}}.items():
        sample(tmp_path / name, **fields)
        files.append((tmp_path / name).read_bytes())
    assert files[0] == files[1] != files[2]


def test_what_repeats_is_written_once_and_tried_no_longer_than_it_pays(tmp_path: Path) -> None:
    said = [*BYTES.encode("what now?"), EOS]

    def law(tokens: list[int]) -> list[float]:
        return [9e9 * (t == said[max(len(tokens) - HEAD, 0)]) for t in range(BYTE_VOCAB)]

    done = sample(tmp_path / "p", law, num_prompts=3)
    assert lines(tmp_path / "p") == [{"prompt": "what now?", "category": "open"}]
    assert (done.num_prompts, done.num_tried) == (1, 60)


def test_a_model_that_never_ends_its_turn(tmp_path: Path) -> None:
    def law(tokens: list[int]) -> list[float]:
        return [9e9 * (t == LETTERS[0]) for t in range(BYTE_VOCAB)]

    with pytest.raises(ConfigError, match="ended none of 20 user turns within 20 tokens"):
        sample(tmp_path / "p", law, num_prompts=1, max_new_tokens=20)
    assert not (tmp_path / "p").exists()


def test_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer"):
        sample(tmp_path / "p", tokenizer=None)
    with pytest.raises(ConfigError, match="turns of 206 tokens, expected at most 200"):
        sample(tmp_path / "p", max_new_tokens=200)
    assert not (tmp_path / "p").exists()
    (tmp_path / "p").write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        sample(tmp_path / "p")
    assert (tmp_path / "p").read_text() == "mine"
    with only_run_to(tmp_path / "q"), pytest.raises(ConfigError, match="another run writes .*q"):
        sample(tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_an_empty_file_of_a_run_that_failed_is_no_obstacle(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hybrid.memory.available_bytes", lambda device: 10)
        with pytest.raises(CapacityError, match="The KV cache for"):
            sample(tmp_path / "p")
    assert sample(tmp_path / "p").num_prompts == 30
