"""The decoding loop of masked-diffusion models, against a naive one; its file on disk."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybrid.errors import CheckpointError
from hybrid.models.tiny import tiny_checkpoint
from hybrid.training.masked_diffusion import block_causal, full_attention
from hybrid.training.trainable import Trainable, load_trainable
from hybrid.training.trajectory import (
    Canvas,
    Denoiser,
    Trajectory,
    confidence_above,
    decode,
    decoding_metrics,
    entropy_at_most,
    even_quotas,
    extract,
    most_confident,
)

VOCAB, MASK = 24, 23
PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("diffusion")
    return tiny_checkpoint(
        path, "qwen3", vocab_size=VOCAB, hidden_size=32, num_layers=2, tokenizer=False, scale=1.0
    )


@pytest.fixture(scope="module")
def trainable(folder: Path) -> Trainable:
    return load_trainable(folder)


def naive(
    folder: Path, prompt: list[int], canvas: Canvas, num_per_step: int, blocks: bool
) -> Trajectory:
    """One row, lists and loops, `num_per_step` tokens per forward."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    ids = prompt + [MASK] * canvas.response_length
    start, steps, step = len(prompt), [0] * canvas.response_length, 0

    def block_of(index: int) -> int:
        return -1 if index < start else (index - start) // canvas.block_size

    mask = [
        [not blocks or block_of(q) >= block_of(k) for k in range(len(ids))] for q in range(len(ids))
    ]
    while 0 in steps:
        step += 1
        with torch.no_grad():
            out = model(input_ids=torch.tensor([ids]), attention_mask=torch.tensor([[mask]]))
        rows = out.logits[0].double().tolist()
        first = steps.index(0) // canvas.block_size * canvas.block_size
        candidates = []
        for index in range(first, first + canvas.block_size):
            row = rows[start + index - canvas.logit_shift]
            row = [v for token, v in enumerate(row) if token != MASK]  # MASK is the last id
            if steps[index] == 0:
                best = max(range(len(row)), key=lambda t: row[t])
                total = sum(math.exp(v - row[best]) for v in row)
                candidates.append((-1 / total, index, best))
        for _, index, best in sorted(candidates)[:num_per_step]:
            ids[start + index], steps[index] = best, step
    return Trajectory(tuple(ids[start:]), tuple(steps))


@pytest.mark.parametrize("logit_shift", [0, 1])
@pytest.mark.parametrize("num_per_step", [1, 2])
def test_a_batch_is_decoded_as_a_naive_loop_decodes_each_row(
    folder: Path, trainable: Trainable, logit_shift: int, num_per_step: int
) -> None:
    canvas = Canvas(8, 4, MASK, logit_shift)
    rule = most_confident(even_quotas(4, 4 // num_per_step))
    found = decode(full_attention(trainable, canvas), PROMPTS, canvas, rule)
    assert found == [naive(folder, p, canvas, num_per_step, blocks=False) for p in PROMPTS]
    assert found[0].num_forwards == 8 // num_per_step
    assert any(list(t.steps) != sorted(t.steps) for t in found)  # not simply left to right


def test_block_causal_decoding_equals_the_naive_loop(folder: Path, trainable: Trainable) -> None:
    canvas = Canvas(8, 4, MASK, 0)
    rule = most_confident(even_quotas(4, 4))
    for prompt in PROMPTS:
        found = decode(block_causal(trainable, canvas), [prompt], canvas, rule)
        assert found == [naive(folder, prompt, canvas, 1, blocks=True)]


def scripted(logits: Tensor, prompt_length: int) -> Denoiser:
    """A model whose logits [R, V] for the response never change."""

    def denoise(ids: Tensor, prompt_lens: Tensor) -> Tensor:
        before = torch.zeros(prompt_length, logits.shape[1])
        return torch.cat([before, logits])[None].expand(len(ids), -1, -1)

    return denoise


def test_the_mask_token_is_never_committed() -> None:
    logits = torch.zeros(3, 4)
    logits[:, 3], logits[:, 1] = 9.0, 1.0  # 3 is the mask token
    canvas = Canvas(3, 3, mask_token_id=3, logit_shift=0)
    (found,) = decode(scripted(logits, 1), [[0]], canvas, most_confident([1, 1, 1]))
    assert found == Trajectory((1, 1, 1), (1, 2, 3))  # and ties go to the lower index


@pytest.mark.parametrize(
    ("threshold", "steps"),
    [(0.0, (3, 1, 2, 1)), (math.log(2) + 1e-9, (2, 1, 1, 1)), (math.log(2) - 1e-9, (3, 1, 2, 1))],
)
def test_the_entropy_threshold_accepts_what_is_at_it_and_always_the_lowest(
    threshold: float, steps: tuple[int, ...]
) -> None:
    # Entropies over the three tokens that are not the mask: log 3, 0, log 2, 0.
    low = -torch.inf
    rows = [[0, 0, 0, 0], [0, low, low, 0], [0, 0, low, 0], [low, 0, low, 0]]
    canvas = Canvas(4, 4, mask_token_id=3, logit_shift=0)
    rule = entropy_at_most(threshold)
    (found,) = decode(scripted(torch.tensor(rows), 2), [[0, 0]], canvas, rule)
    assert found.steps == steps


def test_the_confidence_threshold_is_strict() -> None:
    probs = torch.tensor([[[0.5, 0.5], [0.9, 0.1], [0.7, 0.3]]]).double()
    every = torch.ones(1, 3, dtype=torch.bool)
    assert confidence_above(0.7)(probs, every, 0).tolist() == [[False, True, False]]
    assert confidence_above(0.5)(probs, every, 0).tolist() == [[False, True, True]]
    some = torch.tensor([[True, False, False]])
    assert confidence_above(0.8)(probs, some, 0)[0, 0]  # the best of what is left


def test_rows_that_finish_early_count_their_own_forwards_only() -> None:
    sure, unsure = torch.tensor([9.0, 0.0, 0.0]), torch.zeros(3)

    def denoise(ids: Tensor, prompt_lens: Tensor) -> Tensor:
        rows = [sure if ids[row, 0] else unsure for row in range(len(ids))]
        return torch.stack(rows)[:, None].expand(-1, ids.shape[1], -1)

    canvas = Canvas(4, 2, mask_token_id=2, logit_shift=0)
    found = decode(denoise, [[0], [1]], canvas, entropy_at_most(0.1))
    assert [t.num_forwards for t in found] == [4, 2]
    assert [t.steps for t in found] == [(1, 2, 3, 4), (1, 1, 2, 2)]


def test_quotas_give_the_remainder_to_the_first_passes() -> None:
    assert even_quotas(8, 3) == [3, 3, 2]
    assert even_quotas(4, 4) == [1, 1, 1, 1]
    assert even_quotas(2, 3) == [1, 1, 0]


class Teacher:
    """Counts what it decodes, and can be killed."""

    def __init__(self, dies_at: int = 99) -> None:
        self.calls: list[list[int]] = []
        self.dies_at = dies_at

    def __call__(self, prompts: Sequence[Sequence[int]]) -> list[Trajectory]:
        if len(self.calls) == self.dies_at:
            raise KeyboardInterrupt
        self.calls.append([p[0] for p in prompts])
        return [Trajectory((p[0], p[0] + 1), (2, 1)) for p in prompts]


def test_extraction_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    prompts = [[i] for i in range(7)]
    whole = extract(tmp_path / "whole.jsonl", prompts, 2, Teacher())
    path = tmp_path / "some" / "cut.jsonl"
    with pytest.raises(KeyboardInterrupt):
        extract(path, prompts, 2, Teacher(dies_at=2))
    with path.open("a") as file:
        file.write('{"tokens": [4, 5], "ste')  # killed while it wrote
    again = Teacher()
    assert extract(path, prompts, 2, again) == whole
    assert again.calls == [[4, 5], [6]]
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    third = Teacher()
    assert extract(path, prompts, 2, third) == whole
    assert third.calls == []


def test_half_a_batch_is_decoded_again_so_that_batches_are_always_the_same(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    prompts = [[i] for i in range(4)]
    whole = extract(path, prompts, 2, Teacher())
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]))
    again = Teacher()
    assert extract(path, prompts, 2, again) == whole
    assert again.calls == [[2, 3]]


def test_what_follows_a_damaged_line_is_decoded_again(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    prompts = [[i] for i in range(3)]
    whole = extract(path, prompts, 1, Teacher())
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + "{}\n" + lines[2])
    assert extract(path, prompts, 1, Teacher()) == whole


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="Remove it"):
        extract(path, [[1]], 1, Teacher())


def test_a_line_holds_one_number_per_token(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    extract(path, [[3]], 1, Teacher())
    assert json.loads(path.read_text()) == {"tokens": [3, 4], "steps": [2, 1]}


def test_metrics_count_up_to_the_first_eos() -> None:
    decoded = [Trajectory((1, 2, 9, 9), (1, 2, 2, 2)), Trajectory((5, 6, 7, 8), (1, 1, 1, 2))]
    expected = [(1, 3, 9, 9), (5, 6, 0, 0)]
    # 3 tokens up to EOS and 4, over 2 + 2 forwards; agreeing are 2 of 3 and 2 of 4.
    assert decoding_metrics(decoded, expected, eos_token_ids=(9,)) == {
        "tokens_per_forward": 1.75,
        "agreement": round(4 / 7, 4),
    }
