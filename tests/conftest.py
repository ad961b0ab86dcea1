"""Checks on, nothing from the network, one thread."""

from __future__ import annotations

import os

os.environ.setdefault("HYBRID_CHECKS", "1")
# Two threads on two cores stall each other as soon as anything else runs.
os.environ.setdefault("OMP_NUM_THREADS", "1")
