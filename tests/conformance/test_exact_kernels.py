"""Exact verification on the kernels: in Triton's interpreter, or compiled where there is a GPU."""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from fakes import random_adapter, random_prompts
from kernel_passes import ADAPTERS, DEVICE, recording

from hybrid.attention.pattern import causal
from hybrid.drafters.self_diffusion import SelfDiffusionDrafter
from hybrid.kernels import dispatch
from hybrid.models.checkpoint import open_checkpoint
from hybrid.models.families import spec_from_config
from hybrid.models.tiny import tiny_checkpoint
from hybrid.models.transformer import NativeBackbone
from hybrid.params import SamplingParams
from hybrid.protocols import DraftState
from hybrid.streams import RandomStream
from hybrid.types import SequenceState, Write

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

# Triton's interpreter computes wrongly in bfloat16.
DTYPES = [torch.float32, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
TINY = {"hidden_size": 48, "num_heads": 2, "num_kv_heads": 1, "num_layers": 1, "vocab_size": 33}
FIRST, LAST, NUM_SLOTS = 35, 38, 2  # cached tokens, all tokens, slots of a group


@cache
def tiny(dtype: torch.dtype, exact: bool) -> NativeBackbone:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(tiny_checkpoint(folder, "llama", tokenizer=False, **TINY))
        spec, weights = spec_from_config(checkpoint.config), checkpoint.tensors
        made = NativeBackbone(spec, weights, device=DEVICE, dtype=dtype, exact=exact)
        made.graphs = None
        return made


def slots(drafter: SelfDiffusionDrafter, rows: list[int], start: int, ids: torch.Tensor) -> Any:
    """Return two groups of slots for each row: behind its first token and behind its last."""
    params = SamplingParams()
    states = [SequenceState(row, [1] * (start + 1), 1, params, RandomStream(0)) for row in rows]
    points = [(0, ids.shape[1] - 1)] * len(rows)
    return drafter.carry(DraftState(states, None, {}), ids, points, NUM_SLOTS)  # type: ignore[arg-type]


def decoded(
    backbone: NativeBackbone, rows: list[int], width: int, drafter: SelfDiffusionDrafter | None
) -> torch.Tensor:
    """Return the logits of the tokens behind the first, in passes of so many, [B, n, V].

    Each pass runs twice: from the second time on it is recorded, where the backbone records.
    """
    texts = torch.tensor(random_prompts(*[LAST] * 3, vocab_size=33, seed=1)).to(DEVICE)
    cache, outs = backbone.new_cache(3, LAST + 16), []
    for row in rows:
        prompt, positions = texts[row : row + 1, :FIRST], torch.arange(FIRST, device=DEVICE)[None]
        pattern = causal([0], FIRST)
        backbone.forward(prompt, positions, pattern, cache, [row], write=Write.COMMIT)
    for start in range(FIRST, LAST, width):
        ids = texts[rows, start : start + width]
        positions = torch.arange(start, start + width, device=DEVICE).expand(len(rows), -1)
        pattern = causal([start] * len(rows), width)
        carried = None if drafter is None else slots(drafter, rows, start, ids)
        for _ in range(2):
            out = backbone.forward(ids, positions, pattern, cache, rows, carried=carried)
        outs.append(out.logits)
        for row in rows:
            cache.commit(row, width)
    return torch.cat(outs, dim=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("shares", ["rows", "slots"])
def test_a_verify_pass_has_the_bits_of_ar(
    shares: str, exact: bool, dtype: torch.dtype, monkeypatch: Any
) -> None:
    """Three rows of 3 tokens against each token alone.

    With slots that ride, and as a record for four rows of 4 tokens. Keys are divided every 32
    positions, and 3 tokens are a wide pass, where that has to be asked for. A tensor core computes
    a row by itself; the interpreter's matrix product, a CPU library's, need not. So there it is
    done row by row.
    """
    if DEVICE.type == "cpu":
        monkeypatch.setattr("numpy.matmul", lambda a, b, dtype: np.stack([row @ b for row in a]))
    elif not exact:
        pytest.skip("the vendor's library may give the same bits for a model as small as this")
    for name, value in (("SPLIT_KEYS", 32), ("NARROW", 2)):
        monkeypatch.setattr(f"hybrid.kernels.hybrid_attention.triton.{name}", value)
    backbone, rows = tiny(dtype, exact), [0, 1, 2]
    model, drafter = backbone, None
    if shares == "slots":
        model = recording(backbone)
        adapter = random_adapter(model, NUM_SLOTS + 1, **ADAPTERS["uniform"])
        drafter = SelfDiffusionDrafter(model, adapter)
    with dispatch.force(None, "triton"):
        together = decoded(model, rows, LAST - FIRST, drafter)
        alone = torch.cat([decoded(backbone, [row], 1, None) for row in rows])
        assert dispatch.last("hybrid_attention") == "triton"
    assert shares == "rows" or len(model.graphs) == 1
    assert torch.equal(together, alone) == exact
