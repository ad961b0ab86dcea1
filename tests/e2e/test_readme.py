"""What the README and docs/ show is run, block by block, in the order of the page.

```python blocks share one namespace per page; of ```console and ```bash blocks, the lines that
begin with ``$ hybrid`` are run (a line ending in a backslash goes on). A block whose info string
holds ``notest`` is only shown.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from repository import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
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


def run_page(path: Path, folder: Path) -> int:
    """Run a page's blocks with `folder` as the place of commands; return how many things ran."""
    count, namespace = 0, {"__name__": "__page__"}
    for block in read_blocks(path.read_text(encoding="utf-8")):
        if block.language == "python":
            # Blank lines before the code make a traceback name the page's own line.
            code = compile(
                "\n" * (block.line - 1) + block.code, str(path), "exec", dont_inherit=True
            )
            exec(code, namespace)
            count += 1
            continue
        for command in read_commands(block.code):
            _run_command(command, folder, f"{path.name}:{block.line}")
            count += 1
    return count


def _run_command(command: str, folder: Path, where: str) -> None:
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


@pytest.mark.default_model
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if p.is_file() and read_blocks(p.read_text(encoding="utf-8"))],
    ids=lambda p: p.relative_to(ROOT).as_posix(),
)
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(page, tmp_path)


SAMPLE = """
# A page
```python
x = 20
```
```console
$ hybrid --version-of-nothing \\
    --more
some output
$ ls
```
```python notest
raise SystemExit
```
```text
not code
```
```python
y = x + 1
assert y == {expected}
```
"""


def _sample(folder: Path, expected: int) -> Path:
    path = folder / "page.md"
    path.write_text(SAMPLE.format(expected=expected))
    return path


def test_blocks_and_commands_are_found(tmp_path: Path) -> None:
    blocks = read_blocks(_sample(tmp_path, 21).read_text())
    assert [b.language for b in blocks] == ["python", "console", "python"]
    assert [b.line for b in blocks] == [4, 7, 19]
    (command,) = read_commands(blocks[1].code)
    assert command.split() == ["hybrid", "--version-of-nothing", "--more"]


def test_blocks_share_a_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setitem(run_page.__globals__, "_run_command", lambda *args: ran.append(args[0]))
    assert run_page(_sample(tmp_path, 21), tmp_path) == 3
    assert len(ran) == 1


def test_a_failing_block_fails_on_the_pages_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(run_page.__globals__, "_run_command", lambda *args: None)
    with pytest.raises(AssertionError) as caught:
        run_page(_sample(tmp_path, 22), tmp_path)
    assert caught.traceback[-1].lineno + 1 == 20


def test_a_failing_command_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="page.md:7"):
        _run_command(f'"{sys.executable}" -c "raise SystemExit(3)"', tmp_path, "page.md:7")
    _run_command(f'"{sys.executable}" -c pass', tmp_path, "page.md:7")
