"""The wheel holds every module and every data file, and works where nothing else of ours is."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path

import pytest
from repository import FOLDERS, ROOT, Installed, clean_env

# Distributions of the extras: a module may need one of them, and nothing else may be missing.
OPTIONAL = ["accelerate", "fastapi", "lm_eval", "matplotlib", "uvicorn"]
IMPORT_ALL = """
import importlib, json, sys
modules, optional = json.load(sys.stdin)
for name in modules:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in optional:
            raise
import hybrid
print(hybrid.__file__)
"""


def _source_files(pattern: str) -> dict[str, Path]:
    """Return {path in the wheel: file} of the four folders."""
    return {
        "/".join((*name.split("."), path.relative_to(ROOT / folder).as_posix())): path
        for folder, name in FOLDERS.items()
        for path in (ROOT / folder).rglob(pattern)
    }


def _modules() -> list[str]:
    names = (path.removesuffix(".py").replace("/", ".") for path in _source_files("*.py"))
    return sorted({n.removesuffix(".__init__") for n in names if not n.endswith("__main__")})


def test_every_module_and_nothing_else_is_in_the_wheel(installed: Installed) -> None:
    names = set(zipfile.ZipFile(installed.wheel).namelist())
    assert {n for n in names if n.endswith(".py")} == set(_source_files("*.py"))
    tops = {n.partition("/")[0] for n in names}
    assert len(tops) == 2, tops
    assert "hybrid" in tops


def test_data_files_are_in_the_wheel(installed: Installed) -> None:
    names = set(zipfile.ZipFile(installed.wheel).namelist())
    data = {"hybrid/py.typed"}
    data |= {n for n in _source_files("*.*") if n.startswith("hybrid/adapters/")}
    data |= _source_files("*.yaml").keys() | _source_files("*.jsonl").keys()
    assert data <= names
    assert any(n.endswith("dist-info/licenses/LICENSE") for n in names)


def test_every_module_imports_from_the_wheel(installed: Installed, tmp_path: Path) -> None:
    done = subprocess.run(
        [installed.python, "-c", IMPORT_ALL],
        input=json.dumps([_modules(), OPTIONAL]),
        cwd=tmp_path,
        env=clean_env(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert Path(done.stdout.strip()).is_relative_to(installed.venv)


@pytest.mark.parametrize("as_module", [False, True], ids=["hybrid", "python-m-hybrid"])
def test_the_command_answers_in_an_empty_folder(
    installed: Installed, tmp_path: Path, as_module: bool
) -> None:
    command = [installed.python, "-m", "hybrid"] if as_module else [installed.bin / "hybrid"]
    done = subprocess.run(
        [*command, "--help"], cwd=tmp_path, env=clean_env(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for name in ("generate", "chat", "bench", "doctor", "list"):
        assert name in done.stdout
