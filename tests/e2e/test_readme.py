"""What the README and docs/ show is run, block by block, in the order of the page.

```python blocks share one namespace per page; of ```console and ```bash blocks, the lines that
begin with ``$ hybrid`` are run (a line ending in a backslash goes on). A block whose info string
holds ``notest`` is only shown.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pages import read_blocks, read_commands, run_command, run_python
from repository import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def run_page(path: Path, folder: Path) -> int:
    """Run a page's blocks with `folder` as the place of commands; return how many things ran."""
    count, namespace = 0, {"__name__": "__page__"}
    for block in read_blocks(path.read_text(encoding="utf-8")):
        if block.language == "python":
            run_python(block, path, namespace)
            count += 1
            continue
        for command in read_commands(block.code):
            run_command(command, folder, f"{path.name}:{block.line}")
            count += 1
    return count


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
    monkeypatch.setitem(run_page.__globals__, "run_command", lambda *args: ran.append(args[0]))
    assert run_page(_sample(tmp_path, 21), tmp_path) == 3
    assert len(ran) == 1


def test_a_failing_block_fails_on_the_pages_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(run_page.__globals__, "run_command", lambda *args: None)
    with pytest.raises(AssertionError) as caught:
        run_page(_sample(tmp_path, 22), tmp_path)
    assert caught.traceback[-1].lineno + 1 == 20


def test_a_failing_command_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="page.md:7"):
        run_command(f'"{sys.executable}" -c "raise SystemExit(3)"', tmp_path, "page.md:7")
    run_command(f'"{sys.executable}" -c pass', tmp_path, "page.md:7")
