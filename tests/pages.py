"""The blocks of a documentation page that can be run, and how they are run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
COMMAND_SECONDS = 100


@dataclass(frozen=True)
class Block:
    """One fenced block; `line` is that of its first line of code."""

    language: str
    code: str
    line: int


def read_blocks(text: str) -> list[Block]:
    """Return the blocks that can be run."""
    blocks = []
    for match in FENCE.finditer(text):
        language, info, code = match.groups()
        if language in {"python", "console", "bash"} and "notest" not in info.split():
            blocks.append(Block(language, code, text.count("\n", 0, match.start(3)) + 1))
    return blocks


def read_commands(code: str) -> list[str]:
    """Return the ``hybrid`` commands of a console block."""
    joined = code.replace("\\\n", " ")
    return [s[2:] for s in joined.splitlines() if s.startswith("$ hybrid ")]


def run_python(block: Block, path: Path, namespace: dict[str, Any]) -> None:
    """Run a block of `path` in the current folder."""
    # Blank lines before the code make a traceback name the page's own line.
    code = compile("\n" * (block.line - 1) + block.code, str(path), "exec", dont_inherit=True)
    exec(code, namespace)


def run_command(command: str, folder: Path, where: str) -> str:
    """Run a command of a page, which must succeed; return its stdout."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
    )
    assert done.returncode == 0, f"{where}: {command}\n{done.stdout}\n{done.stderr}"
    return done.stdout
