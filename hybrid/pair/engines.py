"""The same drafter in three engines: ours, transformers, vLLM. All decode greedily in float32.

Next: hybrid/pair/diagnosis.py.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hybrid import __version__
from hybrid.config import subprocess_environment, vllm_python
from hybrid.decoder import HybridDecoder
from hybrid.errors import CheckpointError
from hybrid.export.layouts import save_transformers
from hybrid.models.dflash import DFlashModel
from hybrid.models.reference import TransformersReference
from hybrid.pair.trace import Trace

Prompts = Sequence[Sequence[int]]
_VLLM_DRIVER = Path(__file__).with_name("vllm_driver.py")
_VLLM_SECONDS = 1800
_VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default is for a server
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


def in_ours(
    decoder: HybridDecoder, prompts: Prompts, max_new_tokens: int, num_draft_tokens: int
) -> Trace:
    """Decode with this project; `num_draft_tokens` is what the decoder's drafter proposes."""
    steps = []
    for prompt in prompts:
        events = decoder.stream(list(prompt), max_new_tokens=max_new_tokens, ignore_eos=True)
        steps.append([row.tokens for event in events for row in event.record.rows])
    return Trace(f"hybrid {__version__}", steps, num_draft_tokens)


def in_transformers(
    target: Path,
    model: DFlashModel,
    prompts: Prompts,
    max_new_tokens: int,
    device: torch.device | str = "cpu",
) -> Trace:
    """Decode with transformers' own draft network and its own loop.

    Raises:
        CheckpointError: transformers cannot load the target.
        ConfigError: its class does not compute this drafter.
    """
    with tempfile.TemporaryDirectory() as folder:
        save_transformers(Path(folder), model, torch.float32)
        reference = TransformersReference(target, device)
        steps = reference.drafted_steps(prompts, max_new_tokens, Path(folder))
    return Trace(f"transformers {version('transformers')}", steps, model.spec.block_size - 1)


def find_vllm() -> str | None:
    """Return the Python that has vLLM: `HYBRID_VLLM_PYTHON`, else this one; None without any."""
    if named := vllm_python():
        return named
    found = importlib.util.find_spec("vllm")
    # A folder of that name on the way is no package.
    return sys.executable if found is not None and found.origin else None


def in_vllm(
    python: str,
    target: Path,
    drafter: Path,
    prompts: Prompts,
    max_new_tokens: int,
    num_draft_tokens: int,
) -> Trace:
    """Decode with vLLM, the drafter's folder as it is.

    Args:
        python: an interpreter that has vLLM.
        target: folder of the target.
        drafter: folder in the public layout, transformers' or speculators'.
        prompts: token ids.
        max_new_tokens: of each answer.
        num_draft_tokens: K.

    Raises:
        CheckpointError: vLLM does not run, or not with this pair.
    """
    drafting = {
        "method": "dflash",
        "model": str(drafter.resolve()),
        "num_speculative_tokens": num_draft_tokens,
    }
    engine = {"model": str(target.resolve()), "speculative_config": drafting}
    return run_vllm(python, engine, prompts, max_new_tokens, num_draft_tokens)


def run_vllm(
    python: str,
    engine: Mapping[str, Any],
    prompts: Prompts,
    max_new_tokens: int,
    num_draft_tokens: int,
) -> Trace:
    """Run the driver in a process of its own; `engine` are arguments of `vllm.LLM`.

    Raises:
        CheckpointError: vLLM does not run, or not with these arguments.
    """
    longest = max(map(len, prompts)) + max_new_tokens + num_draft_tokens + 1
    sizes = {"dtype": "float32", "max_num_seqs": 1, "max_model_len": longest}
    request = {
        "engine": {**sizes, **engine},
        "prompts": [list(prompt) for prompt in prompts],
        "max_new_tokens": max_new_tokens,
    }
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "result.json")
        asked.write_text(json.dumps(request), encoding="utf-8")
        try:
            done = subprocess.run(
                [python, str(_VLLM_DRIVER), str(asked), str(answered)],
                cwd=folder,  # no folder of ours is importable by accident
                env=subprocess_environment(**_VLLM_ENVIRONMENT),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_VLLM_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CheckpointError(f"vLLM does not run with {python}: {error}") from error
        if done.returncode or not answered.is_file():
            raise CheckpointError(f"vLLM cannot serve this pair: {_last_error(done.stderr)}")
        result = json.loads(answered.read_text(encoding="utf-8"))
    return Trace(f"vllm {result['version']}", result["steps"], num_draft_tokens)


def _last_error(log: str) -> str:
    """Return the last line of a log that names an exception, without what stands before it."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    named = [line for line in lines if "Error: " in line or line.endswith("Error")]
    return (named or lines or ["no message"])[-1].rpartition("]: ")[2]
