"""A step waits for a GPU once; tests/conformance/test_device_decisions.py counts it without one."""

from __future__ import annotations

import warnings

import pytest
import torch
from carrying import carrying_engine
from mixed_modes import PROMPTS, K, make

from hybrid.decode.loop import run
from hybrid.params import SamplingParams
from hybrid.router.fixed import FixedRouter
from hybrid.types import Mode

NEW = 80  # more than the steps can commit
MANY = {
    "greedy": [SamplingParams(max_new_tokens=NEW)] * 3,
    "sampled": [SamplingParams(temperature=t, seed=1, max_new_tokens=NEW) for t in (1.0, 0.8, 1.3)],
    "mixed": [
        SamplingParams(max_new_tokens=NEW, repetition_penalty=1.3, min_new_tokens=NEW),
        SamplingParams(temperature=0.9, top_k=4, frequency_penalty=0.4, max_new_tokens=NEW),
        SamplingParams(temperature=1.1, top_p=0.8, min_p=0.05, max_new_tokens=NEW),
    ],
}
ROUTERS = {
    "ar": FixedRouter(0),
    "two-pass": FixedRouter(K),
    "fused": FixedRouter(3, Mode.FUSED),
    "one-pass": FixedRouter(3, Mode.ONE_PASS),
}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["late", "combined"])
@pytest.mark.parametrize("params", MANY)
@pytest.mark.parametrize("mode", ROUTERS)
def test_a_step_waits_once(mode: str, params: str, kind: str) -> None:
    """PyTorch itself warns of every wait. The first steps compile kernels, others record passes."""
    drafter, backbone = make(kind, device="cuda")
    assert backbone.device.type == "cuda"
    engine, rows = carrying_engine(backbone, drafter, PROMPTS, MANY[params], ROUTERS[mode])
    steps = run(engine, rows)
    for _ in rows:
        next(steps)
    for _ in range(3):
        next(steps)
    waits = []
    for _ in range(4):
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                next(steps)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchroniz" in str(warning.message) for warning in seen))
    assert waits == [1] * 4
    assert len(backbone.graphs) > 0
