"""Checks on, nothing from the network, one thread, Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os

os.environ.setdefault("HYBRID_CHECKS", "1")
# Two threads on two cores stall each other as soon as anything else runs.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# transformers imports Triton, and an interpreter that is asked for later lacks half the language.
# Here, then, and not in tests/kernels; nothing uses a kernel on a CPU unless it is forced.
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked for a GPU where there is none; `pytest -m gpu` runs it alone."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
