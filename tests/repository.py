"""Where the sources lie, and the venv that the wheel is tested in."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {  # folder at the top of the repository: the name it is imported by
    "hybrid": "hybrid",
    "drafters": "hybrid.drafters",
    "verifiers": "hybrid.verifiers",
    "kernels": "hybrid.kernels",
}


def clean_env(**changes: str) -> dict[str, str]:
    """Return an environment without this process's import path."""
    env = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "PYTHONHOME"}}
    return {**env, **changes}


@dataclass(frozen=True)
class Installed:
    """A venv that holds our wheel and borrows every dependency from the running interpreter."""

    wheel: Path
    venv: Path

    @property
    def bin(self) -> Path:
        """Folder of the interpreter and the console scripts."""
        return self.venv / ("Scripts" if os.name == "nt" else "bin")

    @property
    def python(self) -> Path:
        """The venv's interpreter."""
        return self.bin / Path(sys.executable).name
