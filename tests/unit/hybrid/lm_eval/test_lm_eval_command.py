"""`python -m hybrid.lm_eval`, in a process of its own: the real command line, no network."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

from hybrid.models.tiny import tiny_checkpoint

COMMAND = """
import runpy, socket, sys
def refuse(*_, **__): raise OSError("no network in this test")
socket.getaddrinfo = socket.socket.connect = refuse
sys.argv[:2] = ["lm-eval"]
"""
RUN = 'runpy.run_module("hybrid.lm_eval", run_name="__main__", alter_sys=True)'


def _run(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", COMMAND + before + RUN, "-", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)


@pytest.mark.slow  # lm-eval reads the YAML files of fifteen thousand tasks
def test_our_tasks_run_without_flags_for_them_and_without_network(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model")
    done = _run(
        *("run", "--tasks", "hybrid_arithmetic,hybrid_sentences", "--limit", "2"),
        *("--model_args", f"pretrained={model},strategy=hybrid,risk=0,cost=forwards"),
        *("--gen_kwargs", "max_gen_toks=4", "--output_path", str(tmp_path / "out")),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "hybrid_sentences" in done.stdout
    assert "tokens_per_forward" in done.stderr
    (file,) = (tmp_path / "out").rglob("results_*.json")
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["config"]["model"] == "hybrid"
    assert report["config"]["hybrid_strategy"] == "hybrid"
    assert report["config"]["hybrid_settings"]["cost"] == "forwards"
    assert report["config"]["hybrid_tokens_per_forward"] == 1
    assert set(report["results"]) == {"hybrid_arithmetic", "hybrid_sentences"}


def test_without_lm_eval_the_command_says_what_to_install() -> None:
    done = _run("run", "--tasks", "x", before='sys.modules["lm_eval"] = None\n')
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "Error: lm-eval is not installed: pip install 'hybrid-decoder[eval]' (about 700 MB)."
    )
