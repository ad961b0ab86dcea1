"""Which commit of this code runs: what a result and a model card name beside the version."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).resolve().parents[1]


class Revision(NamedTuple):
    """A commit, and whether files differ from it; None where git does not tell."""

    sha: str | None = None
    is_dirty: bool | None = None


def git_revision(root: Path = _ROOT) -> Revision:
    """Return the commit of the checkout in `root`; of an installed package there is none."""
    if not (root / ".git").exists():
        return Revision()
    # Results that a run appends do not change what the next one measures.
    changes = _git(
        root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results"
    )
    return Revision(_git(root, "rev-parse", "HEAD"), None if changes is None else bool(changes))


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
