"""The native backbone on the kernels computes what it computes in plain PyTorch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from carrying import RandomRouter, carrying_engine, decode
from fakes import random_adapter, random_prompts
from kernel_passes import DEVICE, MODELS, PASSES, filled_cache, model, recording, run
from tolerances import assert_as_close_as_torch

from hybrid import HybridDecoder, Strategy
from hybrid.attention.pattern import bidirectional, causal
from hybrid.drafters.self_diffusion import SelfDiffusionDrafter
from hybrid.kernels import dispatch
from hybrid.models.feature_cache import FeatureCache
from hybrid.models.linear import DenseLinear
from hybrid.params import SamplingParams
from hybrid.types import Mode, Write

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

PROMPTS = random_prompts(5, 2, vocab_size=6)
OPERATIONS = ("rms_norm", "qkv_rope_append", "hybrid_attention", "swiglu")


def results(backbone, implementation, kind):
    made = filled_cache(backbone)
    with dispatch.force(None, implementation):
        found = run(backbone, made, kind, (1, 0))
    return found, {op: dispatch.last(op) for op in OPERATIONS}


def check(name, kind):
    found, ran = results(model(name), "triton", kind)
    assert ran == dict.fromkeys(OPERATIONS, "triton")
    plain, _ = results(model(name), "reference", kind)
    exact, _ = results(model(name, torch.float64), "reference", kind)
    assert found.keys() == plain.keys()
    for what, ours in found.items():
        assert_as_close_as_torch(ours, plain[what], exact[what])


@pytest.mark.parametrize("kind", PASSES)
def test_every_kind_of_pass(kind):
    check("mistral-window", kind)


@pytest.mark.parametrize("kind", [kind for kind in PASSES if kind.startswith("carrying")])
def test_slots_and_tokens_read_the_base_weights_once(kind, monkeypatch):
    """Each layer that both run is one product; in plain PyTorch it is more."""
    backbone, calls, compute = model("llama"), Counter(), DenseLinear.__call__

    def counted(linear, x):
        calls[id(linear)] += 1
        return compute(linear, x)

    monkeypatch.setattr(DenseLinear, "__call__", counted)
    last, found = backbone.layers[-1], {}
    for implementation in ("triton", "reference"):
        calls.clear()
        results(backbone, implementation, kind)
        found[implementation] = {calls[id(x)] for x in (last.qkv, last.o, last.gate_up, last.down)}
    assert found["triton"] == {1}
    assert min(found["reference"]) > 1


@pytest.mark.parametrize("name", MODELS)
def test_every_family(name):
    check(name, "verify")


def test_half_precision():
    found, _ = results(model("llama", torch.float16), "triton", "verify")
    plain, _ = results(model("llama", torch.float16), "reference", "verify")
    exact, _ = results(model("llama"), "reference", "verify")
    for what, ours in found.items():
        # The weights are rounded as well, which the twin in float64 of the others has no part in.
        off = (plain[what] - exact[what]).abs().max()
        assert (ours - exact[what]).abs().max() <= 2 * off, what


def test_a_prompt_in_wide_passes():
    """Wider than what is divided by position, in two passes, each committed."""
    backbone = model("mistral-window")
    ids = torch.randint(0, 31, (1, 40), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    caches = []
    for implementation in ("triton", "reference"):
        made = backbone.new_cache(1, 40)
        with dispatch.force(None, implementation):
            for start, end in ((0, 35), (35, 40)):
                positions = torch.arange(start, end, device=DEVICE)[None]
                pattern = causal([start], end - start)
                given = ids[:, start:end], positions, pattern, made, [0]
                out = backbone.forward(*given, write=Write.COMMIT, num_logits=1)
        assert made.lengths == [40]
        caches.append((out.logits, made.data[..., :40, :]))
    for ours, plain in zip(*caches, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=2e-5)


def test_features_are_reused_in_plain_pytorch():
    """Which tokens are computed is chosen row by row: those passes have no kernels."""
    backbone, found = model("llama"), []
    ids, positions = torch.zeros(1, 6, dtype=torch.long, device=DEVICE), torch.arange(6)[None]
    for implementation in ("triton", "reference"):
        made = backbone.new_cache(1, 6)
        features = FeatureCache(2, 2, 2, 0.5)
        with dispatch.force(None, implementation):
            given = ids, positions.to(DEVICE), bidirectional([0], 6), made, [0]
            backbone.forward(*given, write=Write.COMMIT)
            pattern = bidirectional([6], 6)
            given = ids, positions.to(DEVICE), pattern, made, [0]
            out = backbone.forward(*given, write=Write.REFRESH, features=[features])
        found.append(out.logits)
    torch.testing.assert_close(*found, rtol=0, atol=2e-5)


# Whole answers


def answers(backbone, implementation, strategy, **arguments):
    decoder = HybridDecoder(backbone, **arguments)
    with dispatch.force(None, implementation):
        found = decoder.generate(PROMPTS, strategy=strategy, max_new_tokens=5)
    return [list(result.token_ids) for result in found], found


def self_diffusion(backbone):
    adapter = random_adapter(backbone, 3, feature_layers=(0, 1))
    return {"drafter": "self-diffusion", "adapter": adapter}


@pytest.mark.parametrize("mode", ["two-pass", "fused", "one-pass"])
def test_speculative_answers(mode):
    """Recorded: the first pass of a kind runs as it is, the second is recorded, others replayed."""
    backbone = model("llama", vocab_size=6)
    strategy = Strategy.preset("speculative", mode=mode, block_size=3)
    expected, _ = answers(backbone, "reference", strategy, **self_diffusion(backbone))
    twin = recording(backbone)
    tokens, found = answers(twin, "triton", strategy, **self_diffusion(twin))
    assert tokens == expected
    assert {op: dispatch.last(op) for op in OPERATIONS} == dict.fromkeys(OPERATIONS, "triton")
    assert sum(result.stats.num_drafted for result in found) > 0
    # So short an answer has hardly two passes of slots for as many points.
    assert len(twin.graphs) > 0 or mode == "one-pass"


@pytest.mark.slow
def test_mixed_modes():
    """Every row drafts, carries and reuses slots at random, so that batches are ragged."""
    backbone, params = model("llama", vocab_size=6), SamplingParams(max_new_tokens=5)
    found = []
    for implementation in ("reference", "triton"):
        drafter = SelfDiffusionDrafter(backbone, self_diffusion(backbone)["adapter"])
        given = backbone, drafter, PROMPTS, params, RandomRouter(2, 1)
        with dispatch.force(None, implementation):
            engine, rows = carrying_engine(*given)
            found.append(decode(engine, rows))
        modes = {step.mode for record in engine.history[2:] for step in record.rows}
        assert modes & {Mode.FUSED, Mode.ONE_PASS}
    assert found[0] == found[1]


def test_denoised_answers():
    backbone = model("nemotron-query-scale")
    strategy = Strategy.preset("nemotron", block_size=4)
    expected, _ = answers(backbone, "reference", strategy)
    tokens, _ = answers(recording(backbone), "triton", strategy)
    assert tokens == expected
