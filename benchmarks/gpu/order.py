"""A plugin of pytest, in each of its processes: what only a GPU can tell comes first.

Next: benchmarks/gpu/kernel_tests.py.
"""

from __future__ import annotations

from typing import Any

import pytest

FIRST = ("test_hybrid_attention", "test_exact_linear", "test_logits_stats", "test_verify")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop what has neither to do with a kernel nor is marked for a GPU, and order the rest."""
    wanted = [item for item in items if item.path.parent.name == "kernels" or _is_marked(item)]
    config.hook.pytest_deselected(items=list(set(items) - set(wanted)))
    items[:] = sorted(wanted, key=_place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Say how many there are; a lone process does."""
    node.config.get_terminal_writer().line(f"collected {len(ids)} items")


def _place(item: pytest.Item) -> tuple[bool, int]:
    name = item.path.stem
    is_elsewhere = not (_is_marked(item) or "bfloat16" in item.name)  # tested without a GPU too
    return is_elsewhere, FIRST.index(name) if name in FIRST else len(FIRST)


def _is_marked(item: pytest.Item) -> bool:
    return item.get_closest_marker("gpu") is not None
