"""Kernels are interpreted on a CPU (tests/conftest.py asks for it) and compiled on a GPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every output starts as NaN: an element that no program writes is seen."""
    monkeypatch.setenv("HYBRID_POISON", "1")


@pytest.fixture
def device() -> torch.device:
    """Where kernels run here."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
