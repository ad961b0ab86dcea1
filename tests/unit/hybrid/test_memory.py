"""What a request will hold, and refusing up front what would die half-way."""

from __future__ import annotations

import pytest
import torch
from kernel_passes import model, recording

from hybrid import HybridDecoder, memory
from hybrid.errors import CapacityError
from hybrid.kernels import dispatch

CPU = torch.device("cpu")


def test_too_much_is_refused_and_says_what_to_do(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 3 * 2**20)
    memory.require_memory(3 * 2**20, CPU, "It")
    with pytest.raises(
        CapacityError, match=r"It needs 4 MiB, cpu has 3 MiB free. Use fewer prompts"
    ):
        memory.require_memory(4 * 2**20, CPU, "It")


def test_a_system_that_does_not_tell_refuses_nothing(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: None)
    memory.require_memory(2**60, CPU, "It")


@pytest.mark.parametrize("text", [None, "MemTotal: 5 kB\n"])
def test_other_systems(monkeypatch, tmp_path, text):
    file = tmp_path / "meminfo"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(memory, "Path", lambda name: file)
    assert memory.available_bytes(CPU) is None


def test_linux_tells_in_kib(monkeypatch, tmp_path):
    file = tmp_path / "meminfo"
    file.write_text("MemTotal: 9 kB\nMemAvailable:    1234 kB\n")
    monkeypatch.setattr(memory, "Path", lambda name: file)
    assert memory.available_bytes(CPU) == 1234 * 1024


def test_the_plan_knows_the_kernels_and_their_records():
    """Kernels need no mask; logits of recorded passes are there three times."""
    backbone = recording(model("llama"))
    decoder = HybridDecoder(backbone)
    rows, length, width, vocab = 100, 8, 8, backbone.vocab_size
    recorded = decoder.plan_memory(length, batch=rows)["workspace"]
    backbone.graphs = None
    plain = decoder.plan_memory(length, batch=rows)["workspace"]
    assert recorded - plain == 2 * 128 * width * vocab * 4
    long = decoder.plan_memory(2000)["workspace"]
    with dispatch.force("hybrid_attention", "triton"):
        on_kernels = decoder.plan_memory(2000)["workspace"]
    heads = backbone.spec.num_heads
    assert long - on_kernels == 512 * heads * 2000 * 4
