"""Habits that no linter knows: sizes, words, and what lives where."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from repository import FOLDERS, ROOT

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60  # the docstring not counted
MAX_BYTES = 2 * 2**20
MAX_ADAPTER_BYTES = 12_000_000
# Longer where the code reads better so: a Triton kernel.
LONGER = re.compile(r"kernels/\w+/triton\.py")

# The words are written with a class in them so that this file does not contain them.
BANNED = {
    "path of a machine": r"[/](home|work|mnt|root)/\w",
    "host of a package registry": r"(?i)(pypi|pythonhosted|anaconda)[.]org|download[.]pytorch",
    "path that breaks two imports": r"sys[.]path[.](insert|append)|make_block[_]ptr",
}


def _files() -> list[Path]:
    """Return the files that git has or would take."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return sorted(p for name in done.stdout.split("\0") if name and (p := ROOT / name).is_file())


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _sources(*folders: str) -> list[Path]:
    """Return the Python files of `folders`, of the four source folders without any."""
    wanted = folders or tuple(FOLDERS)
    return [p for p in _files() if p.suffix == ".py" and _name(p).partition("/")[0] in wanted]


def _code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = function.body[0]
    doc = first if ast.get_docstring(function, clean=False) is not None else None
    length = function.end_lineno - function.lineno + 1
    return length - (doc.end_lineno - doc.lineno + 1 if doc else 0)


WRITTEN_BY_A_MODEL = "benchmarks/prompts-train.jsonl"


def _offences(files: list[Path], pattern: str) -> list[str]:
    found = []
    for path in files:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        hits = (i for i, line in enumerate(lines, 1) if re.search(pattern, line))
        found += [f"{_name(path)}:{i}" for i in hits]
    return found


def test_no_python_file_is_too_long() -> None:
    files = [p for p in _files() if p.suffix == ".py" and not LONGER.match(_name(p))]
    lengths = {_name(p): len(p.read_text().splitlines()) for p in files}
    assert {n: k for n, k in lengths.items() if k > MAX_FILE_LINES} == {}


def test_no_function_is_too_long() -> None:
    found = {}
    for path in _sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                limit = 2 * MAX_FUNCTION_LINES if LONGER.match(_name(path)) else MAX_FUNCTION_LINES
                if (length := _code_lines(node)) > limit:
                    found[f"{_name(path)}:{node.lineno} {node.name}"] = length
    assert found == {}


@pytest.mark.parametrize("what", BANNED)
def test_banned_words(what: str) -> None:
    ours = [path for path in _files() if _name(path) != WRITTEN_BY_A_MODEL]
    assert _offences(ours, BANNED[what]) == []


def test_only_config_reads_the_environment() -> None:
    files = [p for p in _sources() if _name(p) != "hybrid/config.py"]
    assert _offences(files, r"os\.(environ|getenv|putenv)|from os import .*environ") == []


def test_only_the_terminal_prints() -> None:
    files = [p for p in _sources() if not _name(p).startswith(("hybrid/cli/", "hybrid/tui/"))]
    assert _offences(files, r"^\s*print\(") == []


def test_test_files_have_names_of_their_own() -> None:
    names = Counter(p.name for p in _sources("tests") if p.name != "conftest.py")
    assert [n for n, k in names.items() if k > 1] == []
    assert "__init__.py" not in names


def test_no_large_files() -> None:
    for path in _files():
        is_adapter = _name(path).startswith("hybrid/adapters/") and path.suffix == ".safetensors"
        limit = MAX_ADAPTER_BYTES if is_adapter else MAX_BYTES
        assert path.stat().st_size <= limit, _name(path)


def test_environment_page_lists_the_variables() -> None:
    pattern = r"\bHYBRID_[A-Z_]+\b"
    read = set(re.findall(pattern, (ROOT / "hybrid/config.py").read_text()))
    listed = set(re.findall(pattern, (ROOT / "docs/environment.md").read_text()))
    assert listed == read
