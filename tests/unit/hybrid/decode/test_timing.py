"""`PassTimer`: the passes of every kind of step, on every kind of model; nothing is left."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from carrying import CarryingFake, CarryingTarget
from fakes import RandomTarget, always_right, decoder, random_adapter, random_dflash, tiny_backbone
from mixed_modes import K, make, tiny
from reads import deciding_on_device

from hybrid.decode import timing
from hybrid.decode.timing import PassTimer
from hybrid.drafters.ngram import NgramDrafter
from hybrid.drafters.self_diffusion import SelfDiffusionDrafter
from hybrid.models.hf import HFBackbone
from hybrid.models.tiny import tiny_checkpoint
from hybrid.types import Mode, Plan


class Clock:
    """Tells one more millisecond for every pass of a backbone."""

    def __init__(self, backbone, monkeypatch, ms=lambda index: 1.0):
        self.passes, self.now, self.ms = [], 0.0, ms
        self.caches = []
        forward, new_cache = backbone.forward, backbone.new_cache

        def timed(*args, **kwargs):
            self.now += self.ms(len(self.passes)) / 1000
            out = forward(*args, **kwargs)
            inputs = args[0] if args[0] is not None else kwargs["entry"].hidden
            carried = kwargs.get("carried")
            count = 0 if carried is None else carried.position_ids.shape[1]
            self.passes.append((*inputs.shape[:2], count))
            return out

        def kept(*args):
            cache = new_cache(*args)
            self.caches.append(weakref.ref(cache))
            return cache

        monkeypatch.setattr(backbone, "forward", timed, raising=False)
        monkeypatch.setattr(backbone, "new_cache", kept, raising=False)
        monkeypatch.setattr("time.perf_counter", lambda: self.now)


@pytest.fixture
def backbone():
    return tiny_backbone(seed=11)  # of these tests alone: they replace its methods


def test_a_pass_is_timed_some_times_after_one_that_warms_up(backbone, monkeypatch):
    # The prefill, a slow first pass, then 5, 3 and 4 ms, of which the median counts.
    clock = Clock(backbone, monkeypatch, [1, 90, 5, 3, 4].__getitem__)
    timer = PassTimer(backbone, NgramDrafter())
    assert timer.target_ms(2, 3) == pytest.approx(4)
    assert clock.passes == [(2, 64, 0)] + 4 * [(2, 3, 0)]


def test_what_is_timed_has_the_shape_that_is_asked_for(backbone, monkeypatch):
    clock = Clock(backbone, monkeypatch)
    drafter = SelfDiffusionDrafter(backbone, random_adapter(backbone, K))
    timer = PassTimer(backbone, drafter, num_runs=1)
    assert timer.target_ms(2, 1, 3, K + 1) == pytest.approx(1)
    assert clock.passes[-1][:2] == (2, 1)
    assert clock.passes[-1][2] == 3 * (1 + K), "the adapter has K slots behind its anchor"
    assert timer.target_ms(1, 5, 5, K) == pytest.approx(1)
    assert clock.passes[-1][:2] == (1, 5)
    assert timer.draft_ms(3, K) == pytest.approx(1)
    assert clock.passes[-1][:2] == (3, K + 1)


def test_a_look_costs_what_the_device_waits_for_it(monkeypatch):
    """Here reading takes 3 ms and a pass one; on the host it takes nothing."""
    drafter, backbone = make("late")
    clock = Clock(backbone, monkeypatch)
    timer = PassTimer(backbone, drafter)
    assert timer.look_ms(2, K) == 0
    assert not clock.passes

    def read(tensors):
        clock.now += 0.003
        assert tensors["confidence"].shape == (2, K)
        return {}

    monkeypatch.setattr(timing, "read", read)
    with deciding_on_device():
        assert timer.look_ms(2, K) == pytest.approx(3)
        assert clock.passes[-2:] == [(2, K + 1, 0)] * 2, "a draft and its target pass"
        assert PassTimer(backbone, NgramDrafter()).look_ms(2, K) == 0


def test_nothing_stays(backbone, monkeypatch):
    clock = Clock(backbone, monkeypatch)
    drafter = random_dflash(backbone)
    state = torch.random.get_rng_state()
    timer = PassTimer(backbone, drafter)
    timer.target_ms(2, 4)
    timer.draft_ms(2, 4)
    gc.collect()
    assert len(clock.caches) == 2
    assert [cache() for cache in clock.caches] == [None, None]
    assert len(drafter._memories) == 0
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["late", "combined", "sampler", "plain", "uniform", "own"])
def test_every_drafter_that_carries(kind):
    drafter, backbone = make(kind)
    timer = PassTimer(backbone, drafter, num_runs=1)
    for rows in (1, 3):
        for points in (0, 1, K + 1):
            assert timer.target_ms(rows, K + 1, points, K + 1) > 0
        assert timer.draft_ms(rows, K) > 0


def test_a_drafter_with_a_context_drafts_when_it_is_timed(backbone):
    drafter = random_dflash(backbone)
    state = PassTimer(backbone, drafter)._state(2, 8)
    assert drafter.draft(state, Plan(Mode.SPECULATIVE, 5)).num_tokens == (5, 5)


def test_models_without_carried_slots(tmp_path):
    path = tiny_checkpoint(tmp_path, "gpt2", tokenizer=False)
    targets = (HFBackbone.from_path(path, "cpu", torch.float32), RandomTarget(6))
    for target in targets:
        timer = PassTimer(target, NgramDrafter(), num_runs=1)
        assert timer.target_ms(2, 4, 2, 3) > 0, "groups of a drafter without them cost nothing"
        assert timer.draft_ms(2, 4) >= 0


def test_a_fake_target_that_carries():
    timer = PassTimer(CarryingTarget(4), CarryingFake(4, 3), num_runs=1)
    assert min(timer.target_ms(2, 3, 3, 4), timer.target_ms(1, 1)) > 0
    assert timer.draft_ms(2, 3) > 0


def test_a_context_that_is_hardly_longer_than_the_passes():
    backbone = tiny(max_position_embeddings=6)
    timer = PassTimer(backbone, SelfDiffusionDrafter(backbone, random_adapter(backbone, K)))
    assert timer.target_ms(1, K + 1, K + 1, K + 1) > 0
    assert timer.draft_ms(1, K) > 0


def test_a_drafter_that_is_shared_goes_on_as_if_nothing_had_been_timed():
    target, answer = RandomTarget(6), [1, 2, 3]
    drafter = always_right([answer], 4)
    stream = decoder(target, drafter).stream([1], max_new_tokens=12)
    first = [next(stream) for _ in range(2)]
    PassTimer(target, drafter).draft_ms(1, 4)
    rest = list(stream)
    alone = list(decoder(target, always_right([answer], 4)).stream([1], max_new_tokens=12))
    found = [event.record.rows[0].tokens for event in first + rest]
    assert found == [event.record.rows[0].tokens for event in alone]
