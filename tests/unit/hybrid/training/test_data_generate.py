"""`generate`: the target's own answers, the same file however it was made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import BYTES, EOS, FakeTarget, RandomTarget

from hybrid import HybridDecoder
from hybrid.errors import CapacityError, CheckpointError, ConfigError
from hybrid.models.tiny import tiny_checkpoint
from hybrid.training import generate as module
from hybrid.training.data import read_examples
from hybrid.training.generate import (
    GenerateConfig,
    Generated,
    generate,
    made_by,
    only_run_to,
    remaining,
    settings_path,
)
from hybrid.training.prompts import Prompts, read_prompts
from hybrid.training.recipe import generator

VOCAB, END, LIMIT = 32, 5, 12
ROWS = [{"p": [1, 2, t, (7 * t) % VOCAB], "category": "abc"[t % 3], "n": t} for t in range(24)]
EMPTY = 13  # this model answers it with EOS alone

Run = Callable[..., Generated]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> HybridDecoder:
    folder = tmp_path_factory.mktemp("ends")
    path = tiny_checkpoint(
        folder, vocab_size=VOCAB, num_layers=2, tokenizer=False, eos_token_id=END, seed=1
    )
    return HybridDecoder.from_pretrained(path, dtype="bfloat16")


def prompts_of(rows: list[dict[str, Any]]) -> Prompts:
    return read_prompts("".join(json.dumps(row) + "\n" for row in rows).encode(), "prompts.jsonl")


PROMPTS = prompts_of(ROWS)


@pytest.fixture
def run(decoder: HybridDecoder, tmp_path: Path) -> Run:
    """Answer `PROMPTS` into a file of that name."""

    def call(name: str = "data.jsonl", prompts: Prompts = PROMPTS, **fields: Any) -> Generated:
        report = fields.pop("report", lambda *_: None)
        target = fields.pop("decoder", decoder)
        config = GenerateConfig(**{"output": tmp_path / name, "max_new_tokens": LIMIT, **fields})
        return generate(prompts, config, lambda: target, report)

    return call


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# What is in the file


def test_answers_are_those_of_the_decoder_one_by_one(run: Run, decoder: HybridDecoder) -> None:
    found = lines(run(batch=5).output)
    results = [
        decoder.generate(row["p"], strategy="ar", max_new_tokens=LIMIT, temperature=0)
        for row in ROWS
    ]
    expected = [
        {**row, "r": list(result.token_ids), "finish_reason": result.finish_reason}
        for row, result in zip(ROWS, results, strict=True)
    ]
    assert expected.pop(EMPTY)["r"] == [END]
    assert found == expected


def test_eos_ends_what_ended_by_itself_and_only_that(run: Run) -> None:
    found = lines(run().output)
    ended = [row for row in found if row["finish_reason"] == "stop"]
    cut = [row for row in found if row["finish_reason"] == "length"]
    assert (len(ended), len(cut)) == (6, 17)
    assert all(row["r"][-1] == END and END not in row["r"][:-1] for row in ended)
    assert all(END not in row["r"] and len(row["r"]) == LIMIT for row in cut)


def test_counts(run: Run) -> None:
    seen: list[tuple[int, int, int]] = []
    done = run(report=lambda *numbers: seen.append(numbers))
    num_tokens = sum(len(row["r"]) for row in lines(done.output))
    assert (done.num_prompts, done.num_resumed, done.num_answers) == (24, 0, 23)
    assert (done.num_empty, done.num_tokens) == (1, num_tokens)
    assert [numbers[:2] for numbers in seen] == [(n, 24) for n in range(25)]
    assert (seen[0][2], seen[-1][2]) == (0, num_tokens)


def test_training_reads_it(run: Run) -> None:
    examples = read_examples(run().output, vocab_size=VOCAB, max_length=4 + LIMIT)
    assert len(examples) == 23
    assert examples[0].prompt == (1, 2, 0, 0)


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_batch_changes_nothing(run: Run, temperature: float) -> None:
    files = [
        run(f"{batch}.jsonl", batch=batch, temperature=temperature).output.read_bytes()
        for batch in (1, 3, 7, 100)
    ]
    assert len(set(files)) == 1


def test_each_prompt_has_random_numbers_of_its_own(run: Run, decoder: HybridDecoder) -> None:
    rows = [{"p": [1, 2], "n": 0}, {"p": [1, 3]}, {"p": [1, 4]}]
    found = lines(run(prompts=prompts_of(rows), temperature=1.5, top_p=0.9, seed=3).output)
    expected = [
        decoder.generate(
            row["p"],
            strategy="ar",
            max_new_tokens=LIMIT,
            temperature=1.5,
            top_p=0.9,
            seed=generator(3, 0, place).initial_seed(),
        )
        for place, row in enumerate(rows)
    ]
    assert [row["r"] for row in found] == [list(result.token_ids) for result in expected]
    other = lines(run("other", prompts=prompts_of(rows), temperature=1.5, seed=4).output)
    assert [row["r"] for row in other] != [row["r"] for row in found]


def test_equal_prompts_with_other_random_numbers(tmp_path: Path) -> None:
    # Each row of one batch, not only each batch: the target here does not look at the prompt.
    target = HybridDecoder(FakeTarget(lambda _: [0.0] * 64, 64))
    rows = [{"p": [n]} for n in range(6)]
    config = GenerateConfig(output=tmp_path / "d", max_new_tokens=8, temperature=1, batch=6)
    generate(prompts_of(rows), config, lambda: target)
    assert len({tuple(row["r"]) for row in lines(tmp_path / "d")}) == 6


def test_texts_and_messages_go_through_the_chat_template(tmp_path: Path) -> None:
    target = HybridDecoder(RandomTarget(BYTES.vocab_size, eos_token_ids=(EOS,)), BYTES)
    chat = [{"role": "system", "content": "x"}, {"role": "user", "content": "é"}]
    rows = [{"prompt": "é\u2028"}, {"messages": chat}, {"p": [7, 8]}]
    config = GenerateConfig(output=tmp_path / "d", max_new_tokens=4)
    generate(prompts_of(rows), config, lambda: target)
    found = lines(tmp_path / "d")
    assert found[0]["p"] == BYTES.chat([{"role": "user", "content": "é\u2028"}])
    assert found[1]["p"] == BYTES.chat(chat)
    assert found[2]["p"] == [7, 8]
    assert (found[0]["prompt"], found[1]["messages"]) == ("é\u2028", chat)
    assert all(len(row["r"]) == 4 for row in found)
    vocab = {"vocab_size": BYTES.vocab_size, "max_length": 99, "tokenizer": BYTES}
    assert len(read_examples(tmp_path / "d", **vocab)) == 3


def test_a_row_that_ends_makes_room_for_the_next(tmp_path: Path) -> None:
    def law(tokens: list[int]) -> list[float]:
        is_over = len(tokens) >= 2 + 2 * tokens[0]  # the first token of a prompt is its length
        return [9.0 if t == (END if is_over else 6) else 0.0 for t in range(VOCAB)]

    target = FakeTarget(law, VOCAB, eos_token_ids=(END,))
    lengths = [15, 1, 2, 3, 1, 4, 2, 1, 15, 1]
    rows = [{"p": [length, 20 + n]} for n, length in enumerate(lengths)]
    config = GenerateConfig(output=tmp_path / "d", max_new_tokens=40, batch=3)
    generate(prompts_of(rows), config, lambda: HybridDecoder(target))
    found = lines(tmp_path / "d")
    assert [row["p"] for row in found] == [row["p"] for row in rows], "in the order of the prompts"
    assert [len(row["r"]) for row in found] == [2 * length + 1 for length in lengths]
    (cache,) = target.caches
    assert len(cache.lengths) == 3
    # One prefill each; the decode steps are those of three rows that are always busy.
    assert target.num_forwards - len(rows) < 2 * sum(lengths) / 3 + 2 * max(lengths)


# Going on


def test_any_cut_is_mended(run: Run, tmp_path: Path) -> None:
    rows = PROMPTS.items[:5]
    few = Prompts(rows, PROMPTS.sha256)
    whole = run("whole", prompts=few, batch=2).output.read_bytes()
    run("cut", prompts=few)
    for size in range(0, len(whole) + 1, 7):
        (tmp_path / "cut").write_bytes(whole[:size])  # as kill -9 may leave it
        done = run("cut", prompts=few, batch=3)
        assert (tmp_path / "cut").read_bytes() == whole
        assert done.num_resumed == whole[:size].count(b"\n")


def test_a_sampled_run_goes_on_as_if_it_had_not_stopped(run: Run) -> None:
    whole = run("whole", temperature=1).output.read_bytes()
    for limit in (2, EMPTY + 1, 20, None):
        done = run("parts", temperature=1, limit=limit)
    assert done.output.read_bytes() == whole


def test_nothing_left_to_do_loads_nothing(run: Run, tmp_path: Path) -> None:
    run()
    config = GenerateConfig(output=tmp_path / "data.jsonl", max_new_tokens=LIMIT)
    done = generate(PROMPTS, config, lambda: pytest.fail("loaded"))
    assert (done.num_prompts, done.num_resumed, done.num_answers) == (24, 24, 0)
    assert remaining(PROMPTS, config.replace(limit=3)) == ()


def test_ctrl_c_keeps_what_was_answered(run: Run, tmp_path: Path) -> None:
    def stop(done: int, total: int, num_tokens: int) -> None:
        if done == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(report=stop)
    assert [row["n"] for row in lines(tmp_path / "data.jsonl")] == list(range(9))
    assert run().num_resumed == 9
    assert (tmp_path / "data.jsonl").read_bytes() == run("other").output.read_bytes()


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"model": "other"}, "model default, now other"),
        ({"max_new_tokens": 11}, "max_new_tokens 12, now 11"),
        ({"temperature": 0.5, "seed": 2}, "temperature 0.0, now 0.5, seed 0, now 2"),
        ({"dtype": "float32"}, "dtype bfloat16, now float32"),
        ({"top_p": 0.5}, "top_p 1.0, now 0.5"),
        ({"prompts": prompts_of(ROWS[:5])}, "prompts_sha256"),
    ],
)
def test_other_settings_are_refused(
    run: Run, tmp_path: Path, fields: dict[str, Any], match: str
) -> None:
    before = run(limit=3).output.read_bytes()
    with pytest.raises(ConfigError, match=f"was made with .*{match}"):
        run(**fields)
    assert (tmp_path / "data.jsonl").read_bytes() == before


def test_settings_that_change_no_answer_may_change(run: Run) -> None:
    run(limit=3, batch=2, device="auto")
    assert run(limit=6, batch=1, device="cpu").num_resumed == 3


def test_settings_stand_beside_the_data(run: Run) -> None:
    output = run(model="org/name", limit=2).output
    known = json.loads(settings_path(output).read_text())
    assert settings_path(output).name == "data.jsonl.json"
    assert known["prompts_sha256"] == PROMPTS.sha256
    assert (known["model"], known["max_new_tokens"], known["seed"]) == ("org/name", LIMIT, 0)
    assert made_by(output) == "org/name"
    assert made_by(output.with_name("none")) is None


@pytest.mark.parametrize("text", ['{"p": [1], "r": [2, 3]}\n', "my notes, without a line end"])
def test_a_file_of_somebody_else_is_left_alone(run: Run, tmp_path: Path, text: str) -> None:
    (tmp_path / "data.jsonl").write_text(text)
    with pytest.raises(ConfigError, match="this command did not write them"):
        run()
    assert (tmp_path / "data.jsonl").read_text() == text


def test_a_line_of_another_prompt_is_refused(run: Run, tmp_path: Path) -> None:
    output = run(limit=3).output
    output.write_text('{"p": [9], "r": [1, 2]}\n' + output.read_text())
    with pytest.raises(ConfigError, match="line 1: answers none of the prompts"):
        run()


@pytest.mark.parametrize("order", [[0, 2, 1], [0, 1, 1], [2, 0], [1, 1]])
def test_lines_in_another_order_are_refused(run: Run, tmp_path: Path, order: list[int]) -> None:
    output = run(limit=3).output
    found = output.read_text().splitlines(keepends=True)
    output.write_text("".join(found[place] for place in order))
    before, bad = output.read_bytes(), next(i for i in (1, 2) if order[i] <= order[i - 1])
    match = (
        rf"data.jsonl line {bad + 1}: answers prompts.jsonl line {order[bad] + 1}, expected a "
        rf"prompt behind prompts.jsonl line {order[bad - 1] + 1}"
    )
    with pytest.raises(ConfigError, match=match):
        run()
    assert output.read_bytes() == before


def test_only_one_run_writes_a_file(run: Run, tmp_path: Path) -> None:
    run(limit=3)
    before = (tmp_path / "data.jsonl").read_bytes()
    with only_run_to(tmp_path / "data.jsonl"):
        with pytest.raises(ConfigError, match=r"output: another run writes .*data\.jsonl"):
            run(decoder=None)
        run("other.jsonl", limit=1)
    assert (tmp_path / "data.jsonl").read_bytes() == before
    assert run().num_resumed == 3


def test_an_output_in_a_file_cannot_be_written(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file.data.jsonl cannot be written"):
        run("file/data.jsonl")


# Refusing early


@pytest.mark.parametrize(
    ("row", "error", "match"),
    [
        ({"p": [VOCAB]}, ConfigError, "line 2: got token id 32, expected ids from 0 to 31"),
        ({"p": ["x"]}, ConfigError, "line 2: .*got a list holding str"),
        ({"prompt": "x"}, ConfigError, "line 2: this model has no tokenizer"),
        ({"p": [1] * 501}, CapacityError, "line 2: got 501 tokens and max_new_tokens 12, .* 512"),
    ],
)
def test_a_bad_prompt_is_named(
    run: Run, tmp_path: Path, row: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        run(prompts=prompts_of([ROWS[0], row, ROWS[1]]))
    assert [path.name for path in tmp_path.iterdir()] == [".data.jsonl.lock"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch", 0), ("limit", 0), ("max_new_tokens", 0), ("temperature", -1), ("top_p", 0)],
)
def test_settings_out_of_range(tmp_path: Path, name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name}: got {value}"):
        GenerateConfig(output=tmp_path, **{name: value})


def test_a_batch_that_does_not_fit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid.memory.available_bytes", lambda device: 10)
    with pytest.raises(CapacityError, match=r"The KV cache for 7 x 16 tokens needs"):
        run(batch=7)


def test_a_full_disk(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module._line

    def line(prompt: Any, state: Any) -> bytes:
        if prompt.row["n"] == 4:
            raise OSError(28, "No space left on device")
        return real(prompt, state)

    monkeypatch.setattr(module, "_line", line)
    with pytest.raises(CheckpointError, match="No space left .* run the same command again"):
        run()
    monkeypatch.undo()
    assert run().num_resumed == 4
    assert (tmp_path / "data.jsonl").read_bytes() == run("other").output.read_bytes()


def test_an_output_that_is_a_folder(run: Run, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").mkdir()
    with pytest.raises(ConfigError, match="Is a directory"):
        run()
