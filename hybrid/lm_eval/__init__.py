"""lm-evaluation-harness with this engine: `--model hybrid`, and small tasks that need no network.

Importing this registers the model where lm-eval is installed. Next: hybrid/lm_eval/model.py.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hybrid.errors import ConfigError

TASKS = Path(__file__).parent / "tasks"
"""Folder of the tasks that ship, for lm-eval's `include_path`."""

if find_spec("lm_eval") is not None:
    from hybrid.lm_eval.model import HybridLM as HybridLM
else:

    def __getattr__(name: str) -> Any:
        """Say what is missing where the model is asked for.

        Raises:
            ConfigError: lm-eval is not installed.
        """
        if name != "HybridLM":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        raise ConfigError(
            "lm-eval is not installed: pip install 'hybrid-decoder[eval]' (about 700 MB)."
        )
