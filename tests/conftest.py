"""Checks on, nothing from the network, one thread."""

from __future__ import annotations

import os

os.environ.setdefault("HYBRID_CHECKS", "1")
