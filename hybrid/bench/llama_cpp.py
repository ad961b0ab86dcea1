"""`LlamaCpp`: llama.cpp in a process and an environment of its own, one request at a time.

llama-cpp-python is compiled for the machine and is no dependency of ours; whoever wants the row
names an interpreter that has it. Next: benchmarks/time_llama_cpp.py, the other end of the pipe.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybrid.bench.candidates import Answer
from hybrid.config import cache_dir
from hybrid.errors import CheckpointError, ConfigError
from hybrid.models.fetch import DEFAULT_MODEL
from hybrid.models.store import DEFAULT_NAME

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "time_llama_cpp.py"


class LlamaCpp:
    """A running llama.cpp that has loaded one GGUF file.

    Attributes:
        version: of llama-cpp-python.
    """

    engine, dtype, name = "llama.cpp", "gguf", "llama.cpp"

    def __init__(
        self,
        python: str | Path,
        gguf: Path,
        eos_token_ids: Sequence[int],
        *,
        max_seq_len: int,
        num_threads: int,
    ) -> None:
        """Start the process and wait until it has loaded the model.

        Args:
            python: an interpreter that has llama-cpp-python.
            gguf: the model.
            eos_token_ids: ids that end an answer, the decoder's own.
            max_seq_len: the longest prompt and answer together.
            num_threads: CPU threads of a pass.

        Raises:
            ConfigError: the interpreter or the script is not there, or the process ended.
        """
        if not SCRIPT.is_file():
            raise ConfigError(f"llama.cpp is compared from a source checkout only: no {SCRIPT}.")
        self._eos_token_ids = list(eos_token_ids)
        numbers = ["--threads", str(num_threads), "--n-ctx", str(max_seq_len)]
        command = [str(python), str(SCRIPT), str(gguf), *numbers]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        except OSError as error:
            raise ConfigError(f"llama.cpp: {python} cannot be run: {error}") from error
        try:
            self.version: str = self._read()["version"]
        except ConfigError:
            self.close()
            raise

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        """Return the greedy continuation.

        Raises:
            ConfigError: the process ended.
        """
        request = {
            "prompt": list(prompt),
            "max_new_tokens": max_new_tokens,
            "eos_token_ids": self._eos_token_ids,
        }
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the read below says so
        return Answer(tuple(self._read()["tokens"]))

    def close(self) -> None:
        """End the process; it ends by itself when its input does."""
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ConfigError(
                f"llama.cpp ended with exit code {self._process.wait()}; its message is above. "
                "Expected an interpreter in which `import llama_cpp` works."
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


def gguf_file(model: str) -> Path:
    """Return the GGUF that `model` was converted from.

    Raises:
        ConfigError: the model is no GGUF.
        CheckpointError: the default model's file is not in the cache any more.
    """
    path = Path(model).expanduser()
    if model == DEFAULT_NAME:
        path = cache_dir() / "downloads" / DEFAULT_MODEL.filename
        if not path.is_file():
            raise CheckpointError(
                f"llama.cpp needs {path}, which is not there. Run `hybrid models remove default`, "
                "then `hybrid models pull default`."
            )
    elif not (path.is_file() and path.suffix == ".gguf"):
        raise ConfigError(f"llama.cpp reads GGUF files, got {model}. Leave --llama-cpp out.")
    return path
