"""Policies against bare forwards: the replay is the run, the clock's numbers, what is kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hybrid import HybridDecoder, Strategy
from hybrid.bench import policies
from hybrid.bench.policies import Recording, denoising, measure_policies, random_llada
from hybrid.bench.tables import remarks_of, tables_of
from hybrid.errors import ConfigError

TINY = {
    "vocab_size": 40, "embedding_size": 40, "d_model": 16, "mlp_hidden_size": 24, "n_heads": 2,
    "n_kv_heads": 2, "n_layers": 2, "mask_token_id": 39, "max_sequence_length": 128,
}  # fmt: skip
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def decoder() -> HybridDecoder:
    return HybridDecoder(random_llada(**TINY))


def test_the_usual_model_has_lladas_proportions() -> None:
    backbone = random_llada(vocab_size=40, embedding_size=40, mask_token_id=39)
    spec = backbone.spec
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.head_dim) == (4, 512, 4, 128)
    assert (spec.intermediate_size, backbone.dtype) == (1536, torch.float32)
    assert (backbone.default_strategy, backbone.logit_shift) == ("llada", 0)
    again = random_llada(vocab_size=40, embedding_size=40, mask_token_id=39)
    assert torch.equal(backbone.embedding, again.embedding)


def test_every_preset_that_needs_nothing_more_is_measured(decoder) -> None:
    names = denoising(decoder)
    assert {"llada", "fast-dllm", "d3llm", "dllm-cache"} <= set(names)
    assert not set(names) & {"ar", "speculative", "sdar", "guided"}


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy.preset("llada", block_size=4, cfg_scale=1.0),
        Strategy.preset("fast-dllm", block_size=4, cache="prefix"),
        Strategy.preset("fast-dllm", block_size=4, cache="dual"),
        Strategy.preset("d3llm", block_size=4, cache="delayed"),
        Strategy.preset("d2f", block_size=4),
        Strategy.preset("dllm-cache", block_size=4, gen_interval_steps=3),
    ],
    ids=str,
)
def test_a_replay_computes_what_the_run_computed(decoder, monkeypatch, strategy) -> None:
    """Every pass, its logits bit by bit: so the cache between the passes was the same too."""
    logits: list[torch.Tensor] = []
    forward = decoder.backbone.forward

    def spy(*args, **how):
        out = forward(*args, **how)
        logits.append(out.logits.clone())
        return out

    recording = Recording(decoder.backbone)
    monkeypatch.setattr(decoder.backbone, "forward", spy)
    recorded = HybridDecoder(recording)
    result = recorded.generate(PROMPT, strategy=strategy, max_new_tokens=10, ignore_eos=True)
    first, count = list(logits), len(logits)
    assert recording.num_forwards == count == result.stats.num_forwards
    for _ in range(2):  # a replay leaves the recording as it was
        logits.clear()
        recording.replay(clock=lambda: 0.0, is_lean=True)
        assert len(logits) == count
        assert all(torch.equal(a, b) for a, b in zip(first, logits, strict=True))
    logits.clear()
    recording.replay(clock=lambda: 0.0, is_lean=False)
    assert all(a.shape[1] < b.shape[1] for a, b in zip(first, logits, strict=True))


def test_the_ratio_is_of_time_per_forward(decoder, monkeypatch) -> None:
    """A clock that ticks as it is told: 3 s for the preset, then 2, 2, 4 for the bare passes."""
    bare = iter([9.0, 2.0, 2.0, 4.0])
    monkeypatch.setattr(
        Recording, "replay", lambda self, clock, *, is_lean: 1.5 if is_lean else next(bare)
    )
    clock = itertools.count(0.0, 3.0)
    (row,) = measure_policies(
        decoder, ["llada"], max_new_tokens=8, num_runs=3, clock=lambda: next(clock)
    )
    assert row["num_forwards"] == 8
    assert row["ratios"] == [1.5, 1.5, 0.75]  # the first turn warmed up
    assert row["ratio"] == 1.5
    assert row["lean_ratio"] == 2.0
    assert row["ms_per_forward"] == 3000 / 8
    assert row["bare_ms_per_forward"] == 2000 / 8


def test_presets_keep_no_tensors(decoder) -> None:
    seen = []
    rows = measure_policies(
        decoder,
        ["d3llm", Strategy.preset("fast-dllm", block_size=8)],
        max_new_tokens=32,
        num_runs=1,
        progress=lambda *at: seen.append(at),
    )
    assert seen == [(1, 2), (2, 2)]
    for row in rows:
        # Less than nothing: the plan of a pass names the slots that are masked, fewer each time.
        assert -32 <= row["tensor_bytes_per_forward"] <= 0, row
        assert row["python_bytes_per_forward"] < 1000, row


def test_what_is_kept_is_found() -> None:
    """Per event: 1,000 float32 in a tensor, seen through a view too, and a string of 10,000."""
    kept = []

    def events(count: int) -> Iterator[Any]:
        for index in range(count):
            tensor = torch.zeros(1000)
            kept.append((tensor, tensor[:10], chr(200 + index) * 10_000))
            del tensor
            torch.zeros(10_000 if index % 3 else 0)  # comes and goes
            yield "event"

    tensors, objects = policies._growth(events(41), 41)
    assert tensors == 4000
    assert 10_000 < objects < 15_000
    kept.clear()


def test_the_shortest_answer_is_measured_too(decoder) -> None:
    (row,) = measure_policies(decoder, ["llada"], max_new_tokens=1, num_runs=1)
    assert (row["num_forwards"], row["tensor_bytes_per_forward"]) == (1, 0)


def test_a_preset_for_other_models_is_refused(decoder) -> None:
    with pytest.raises(ConfigError, match="sdar"):
        measure_policies(decoder, ["sdar"], max_new_tokens=4, num_runs=1)


def test_the_table_says_whether_the_bar_is_met() -> None:
    row = {
        "strategy": "d3llm", "parameters": {"cache": "delayed"}, "num_forwards": 7,
        "ms_per_forward": 10.5, "bare_ms_per_forward": 10.0, "ratio": 1.05, "lean_ratio": 1.2,
        "tensor_bytes_per_forward": 0.0, "python_bytes_per_forward": 99.6,
    }  # fmt: skip
    rows = [row, {**row, "strategy": "llada", "parameters": {}, "ratio": 1.0501}]
    document = {"kind": "policies", "rows": rows, "settings": {"bar": 1.05}}
    (table,) = tables_of(document)
    assert table.rows == (
        ("d3llm cache=delayed", "7", "10.50", "10.00", "1.050", "yes", "1.200", "0", "100"),
        ("llada", "7", "10.50", "10.00", "1.050", "no", "1.200", "0", "100"),
    )
    assert remarks_of(document) == []
