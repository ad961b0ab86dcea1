"""Which commit runs: told in a checkout, not beside one."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hybrid import revision
from hybrid.revision import Revision, git_revision


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    if shutil.which("git") is None:
        pytest.skip("no git")
    (tmp_path / "code.py").write_text("a = 1\n")
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "cpu.jsonl").write_text("{}\n")
    who = ["-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)
    return tmp_path


def test_a_commit_and_whether_the_code_differs(checkout: Path) -> None:
    clean = git_revision(checkout)
    assert re.fullmatch("[0-9a-f]{40}", clean.sha or "")
    assert clean.is_dirty is False
    (checkout / "benchmarks" / "results" / "cpu.jsonl").write_text("{}\n{}\n")
    (checkout / "notes.txt").touch()
    assert git_revision(checkout) == clean, "results and files that git does not know"
    (checkout / "code.py").write_text("a = 2\n")
    assert git_revision(checkout) == Revision(clean.sha, True)


def test_no_checkout_and_no_git(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_revision(checkout / "benchmarks") == Revision(), "installed in one"

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(revision.subprocess, "run", missing)
    assert git_revision(checkout) == Revision(None, None)
