"""What a step allocates it frees: by the counts of PyTorch's allocator nothing is left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from carrying import carrying_engine
from mixed_modes import PROMPTS, K, make
from torch.profiler import ProfilerActivity, profile

from hybrid.decode.loop import run
from hybrid.params import SamplingParams
from hybrid.router.fixed import FixedRouter
from hybrid.types import Mode

ROUTERS = {
    "ar": FixedRouter(0),
    "speculative": FixedRouter(K),
    "one-pass": FixedRouter(3, Mode.ONE_PASS),
}


def left_bytes(engine: Any, steps: Any, num_steps: int) -> list[int]:
    """Return what each of the next steps leaves behind, beyond what the engine holds by design.

    By design it holds the taps of each row's last token and the slots that are left; they replace
    those of the step before.
    """
    left = []
    for _ in range(num_steps + 1):
        before = held_bytes(engine)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            next(steps)
        events = seen.profiler.kineto_results.events()
        allocated = sum(e.nbytes() for e in events if e.name() == "[memory]")
        left.append(allocated - (held_bytes(engine) - before))
    return left[1:]  # the first frees what was allocated before anybody counted


def held_bytes(engine: Any) -> int:
    tensors = [*engine.hidden.values(), *(own.hidden for own in engine.slots.values())]
    memory = [tensor.untyped_storage() for tensor in tensors]
    return sum({own.data_ptr(): own.nbytes() for own in memory}.values())


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", ROUTERS)
def test_a_step_leaves_no_memory(mode: str, temperature: float) -> None:
    drafter, backbone = make("late")
    params = SamplingParams(temperature=temperature, max_new_tokens=100, ignore_eos=True)
    engine, rows = carrying_engine(backbone, drafter, PROMPTS, params, ROUTERS[mode])
    steps = run(engine, rows)
    for _ in range(len(rows) + 4):
        next(steps)
    assert left_bytes(engine, steps, 6) == [0] * 6
    if mode != "one-pass":  # which has more or fewer slots left
        held = held_bytes(engine)
        next(steps)
        assert held_bytes(engine) == held
    steps.close()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ROUTERS)
def test_a_step_asks_the_driver_for_no_memory(mode: str) -> None:
    """What it frees serves the next one; recorded passes have their memory from the start."""
    drafter, backbone = make("late", device="cuda")
    params = SamplingParams(max_new_tokens=100, ignore_eos=True)
    engine, rows = carrying_engine(backbone, drafter, PROMPTS, params, ROUTERS[mode])
    steps = run(engine, rows)
    for _ in range(len(rows) + 12):  # compiled, and recorded
        next(steps)

    def asked() -> tuple[int, int]:
        stats = torch.cuda.memory_stats(backbone.device)
        return stats["num_device_alloc"], stats["reserved_bytes.all.current"]

    before = asked()
    for _ in range(8):
        next(steps)
    assert asked() == before
    steps.close()


def test_the_count_sees_what_is_kept() -> None:
    drafter, backbone = make("late")
    engine, rows = carrying_engine(
        backbone, drafter, PROMPTS[:1], SamplingParams(max_new_tokens=40), FixedRouter(K)
    )
    held, observe = [], drafter.observe

    def hoard(record: Any) -> None:
        held.append(torch.ones(1000))
        observe(record)

    drafter.observe = hoard
    steps = run(engine, rows)
    for _ in range(4):
        next(steps)
    assert left_bytes(engine, steps, 3) == [4000] * 3
    steps.close()
