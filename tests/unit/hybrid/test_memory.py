"""Refusing up front what would die half-way."""

from __future__ import annotations

import pytest
import torch

from hybrid import memory
from hybrid.errors import CapacityError

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
