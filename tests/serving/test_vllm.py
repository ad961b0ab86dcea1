"""A drafter that we train is served by vLLM: the same tokens, the same acceptance, pass by pass.

Run by `make test-vllm`, in an environment that has vLLM; the fixture's drafter was trained by
`hybrid train dflash`.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest
from dflash_pairs import DRAFTER, LIMIT, TARGET, copied, prompts, top
from repository import ROOT
from safetensors.torch import load_file, save_file

from hybrid import HybridDecoder
from hybrid.export.export import export
from hybrid.models.dflash_files import load_dflash
from hybrid.pair import engines
from hybrid.pair.trace import Trace, first_difference

K = 7
PYTHON = os.environ.get("HYBRID_VLLM_PYTHON") or str(ROOT / ".venv-vllm" / "bin" / "python")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),  # it loads for a minute
    pytest.mark.skipif(
        os.environ.get("HYBRID_TEST_VLLM") != "1", reason="vLLM's own environment: make test-vllm"
    ),
]


@cache
def ours() -> Trace:
    decoder = HybridDecoder.from_pretrained(TARGET, dtype="float32", drafter=DRAFTER)
    return engines.in_ours(decoder, prompts(), LIMIT, K)


def served(drafter: Path) -> Trace:
    return engines.in_vllm(PYTHON, TARGET, drafter, prompts(), LIMIT, K)


def test_three_engines_accept_the_same(tmp_path: Path) -> None:
    done = export("vllm", DRAFTER, tmp_path / "out")
    vllm = served(done.folder)
    transformers = engines.in_transformers(TARGET, load_dflash(DRAFTER), prompts(), LIMIT)
    assert ours().acceptance_length > 4, "a drafter that nobody accepts would prove nothing"
    for other in (vllm, transformers):
        assert ours().same_tokens(other)
        assert first_difference(ours(), other) is None
        assert other.histogram == ours().histogram
        assert other.by_position == ours().by_position


def test_its_tokens_are_those_without_a_draft() -> None:
    plain = engines.run_vllm(PYTHON, {"model": str(TARGET)}, prompts(), LIMIT, K)
    assert {len(tokens) for answer in plain.steps for tokens in answer} == {1}
    assert plain.same_tokens(ours())


def test_transformers_layout_is_served_too(tmp_path: Path) -> None:
    vllm = served(export("hf", DRAFTER, tmp_path / "out").folder)
    assert vllm.by_position == ours().by_position


def test_a_speculator_is_served_by_its_folder_alone(tmp_path: Path) -> None:
    done = export("speculators", DRAFTER, tmp_path / "out", target=str(TARGET))
    vllm = engines.run_vllm(PYTHON, {"model": str(done.folder)}, prompts(), LIMIT, K)
    assert vllm.same_tokens(ours())
    assert vllm.by_position == ours().by_position


def test_why_an_export_says_that_blocks_are_not_causal(tmp_path: Path) -> None:
    """The default of speculators: vLLM then hides later slots in full layers too, silently."""
    done = export("speculators", DRAFTER, tmp_path / "out", target=str(TARGET))
    causal = copied(done.folder, tmp_path / "causal", top(sliding_window_non_causal=False))
    vllm = served(causal)
    assert vllm.same_tokens(ours()), "lossless all the same"
    assert vllm.acceptance_length < 0.9 * ours().acceptance_length


def test_on_a_cpu_every_layer_has_the_key_norm_of_the_first(tmp_path: Path) -> None:
    """A fault of vLLM 0.32, for keys of the context; that is why the fixture's layers share one."""
    broken = copied(DRAFTER, tmp_path / "other")
    tensors = load_file(broken / "model.safetensors")
    tensors["layers.1.self_attn.k_norm.weight"] *= 3
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    decoder = HybridDecoder.from_pretrained(TARGET, dtype="float32", drafter=broken)
    right = engines.in_ours(decoder, prompts(), LIMIT, K)
    asked = (TARGET, load_dflash(broken), prompts(), LIMIT)
    assert first_difference(right, engines.in_transformers(*asked)) is None
    assert first_difference(right, served(broken)) is not None
