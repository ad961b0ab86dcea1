"""`describe`: numbers counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes import BYTES, EOS

from hybrid.errors import ConfigError
from hybrid.training.describe import Description, describe


def of(path: Path, rows: list[Any], **options: Any) -> Description:
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return describe(path, **options)


def test_counts(tmp_path: Path) -> None:
    rows = [
        {"p": [1, 2, 3], "r": [7, 7, 8], "category": "a", "finish_reason": "length"},
        {"p": [1], "r": [7, 2], "category": "b", "finish_reason": "stop"},
        {"p": [1], "r": [7, 7, 7, 2], "category": "b", "finish_reason": "stop"},
        {"p": [4, 4], "r": [9, 2]},
    ]
    found = of(tmp_path / "d", rows)
    assert (found.num_examples, found.num_bad, found.first_bad) == (4, 0, None)
    assert (found.num_prompt_tokens, found.num_response_tokens) == (7, 11)
    assert found.num_duplicates == 1
    assert found.num_distinct == 4
    assert found.categories == {"b": 2, "a": 1}
    assert found.share_ended == pytest.approx(2 / 3), "of those that say"
    # Sorted: prompts 1 1 2 3, responses 2 2 3 4. Nearest rank of p % is number ceil(4 p / 100).
    assert found.prompt_lengths == {0: 1, 10: 1, 50: 1, 90: 3, 99: 3, 100: 3}
    assert found.response_lengths == {0: 2, 10: 2, 50: 2, 90: 4, 99: 4, 100: 4}
    assert found.samples == []
    assert json.loads(json.dumps(found.to_dict()))["num_distinct"] == 4


def test_coverage(tmp_path: Path) -> None:
    # Of 1000 tokens 980 are 5, 10 are 6, 8 are 7, and two occur once.
    responses = [[5] * 980, [6] * 10, [7] * 8, [8, 9]]
    found = of(tmp_path / "d", [{"p": [1], "r": r} for r in responses])
    assert found.coverage == {0.99: 2, 0.998: 3, 0.999: 4}


def test_eos_is_that_of_the_tokenizer(tmp_path: Path) -> None:
    rows = [{"p": [1], "r": [5, EOS], "finish_reason": "length"}, {"p": [2], "r": [5, 5]}]
    assert of(tmp_path / "d", rows, tokenizer=BYTES).share_ended == 0.5
    assert of(tmp_path / "d", rows[1:]).share_ended is None


def test_bad_lines_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    good = {"p": [1], "r": [2, 3]}
    rows = [good, "nonsense", {"p": [1], "r": [2]}, {"p": [1], "r": [9, 9]}, good, [1]]
    found = of(tmp_path / "d.jsonl", rows, vocab_size=9)
    assert (found.num_examples, found.num_bad) == (2, 4)
    assert found.first_bad is not None
    assert found.first_bad.startswith("d.jsonl line 2: not JSON")
    long = of(tmp_path / "d.jsonl", [{"p": [1], "r": [2, 3, 4]}, good], max_length=3)
    assert "line 1: got 4 tokens, expected at most 3" in str(long.first_bad)


def test_nothing_but_bad_lines(tmp_path: Path) -> None:
    found = of(tmp_path / "d", ["x", "y"])
    assert (found.num_examples, found.num_bad, found.share_ended) == (0, 2, None)
    assert (found.prompt_lengths, found.coverage[0.99]) == ({}, 0)


def test_samples_are_spread_and_show_special_tokens(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "response": f"answer {n}"} for n in range(10)]
    found = of(tmp_path / "d", rows, tokenizer=BYTES, num_samples=2)
    assert [sample["response"] for sample in found.samples] == [
        "answer 0<|im_end|>",
        "answer 5<|im_end|>",
    ]
    assert found.samples[1]["prompt"] == "<|im_start|>user\n5?<|im_end|>\n<|im_start|>assistant\n"
    ids = of(tmp_path / "d", [{"p": [1], "r": [2, 3]}], num_samples=5)
    assert ids.samples == [{"prompt": "1", "response": "2 3"}]


def test_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    for content, match in ((b"\n", "holds no examples"), (b"\xff\n", "not UTF-8")):
        (tmp_path / "d").write_bytes(content)
        with pytest.raises(ConfigError, match=match):
            describe(tmp_path / "d")
    with pytest.raises(ConfigError, match="No such file"):
        describe(tmp_path / "none")
