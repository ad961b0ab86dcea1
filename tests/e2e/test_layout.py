"""Four folders at the top, one import package, and peace with the distribution `kernels`.

transformers imports a package named `kernels` when it finds one in the version range it likes, so
a folder of that name on `sys.path` must never be taken for it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from repository import FOLDERS, ROOT, Installed, clean_env

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FAKE = """
    class _Anything:  # stands in for every class and decorator that transformers imports
        def __init__(self, *args, **kwargs): pass
        def __call__(self, *args, **kwargs):
            return args[0] if len(args) == 1 and isinstance(args[0], type) else self
        def __getattr__(self, name): return _Anything()
    def __getattr__(name): return _Anything
    def use_kernel_forward_from_hub(name): return lambda cls: cls
    def use_kernelized_func(*functions): return lambda cls: cls
"""
PROBE = """
    import importlib.util, sys
    home, others = sys.argv[1:]
    spec = importlib.util.find_spec("kernels")
    if others:
        assert spec.origin.startswith(others), spec
    else:
        assert spec is None or spec.origin is None, spec

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import is_kernels_available
    assert is_kernels_available() is bool(others), "the other package is not the one in use"
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2, pad_token_id=0)
    tokens = LlamaForCausalLM(config).generate(
        torch.tensor([[3, 4]]), max_new_tokens=2, do_sample=False, eos_token_id=None)
    assert tokens.shape == (1, 4)

    import hybrid, hybrid.drafters, hybrid.kernels, hybrid.verifiers
    from hybrid.registry import DRAFTERS, VERIFIERS, load
    for kind, table in ("drafter", DRAFTERS), ("verifier", VERIFIERS):
        for name in table:
            load(kind, name)
    for module in hybrid, hybrid.drafters, hybrid.kernels, hybrid.verifiers:
        assert any(path.startswith(home) for path in module.__path__), (module, home)
    print("ok")
"""


def _probe(python: str | Path, cwd: Path, home: Path, others: Path | None) -> None:
    env = clean_env(PYTHONPATH=str(others or ""), OMP_NUM_THREADS="1")
    command = [str(python), "-c", textwrap.dedent(PROBE), str(home), str(others or "")]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "ok", done.stderr[-2000:]


def _version_in_range() -> str:
    from transformers.utils.import_utils import KERNELS_MIN_VERSION

    return KERNELS_MIN_VERSION


def _declare(folder: Path, version: str) -> None:
    """Make `folder` say that it holds the distribution `kernels` of this version."""
    info = folder / f"kernels-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")


@pytest.fixture(scope="module")
def fake_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in for the other package, in the version range that transformers asks for."""
    folder = tmp_path_factory.mktemp("fake")
    (folder / "kernels").mkdir()
    body = f"__version__ = {_version_in_range()!r}\n" + textwrap.dedent(FAKE)
    (folder / "kernels" / "__init__.py").write_text(body)
    _declare(folder, _version_in_range())
    return folder


@pytest.fixture(scope="module")
def real_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The other package itself; its metadata names a version that transformers accepts."""
    folder = tmp_path_factory.mktemp("real")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", folder, "kernels"]
    done = subprocess.run(command, env=clean_env(), capture_output=True, text=True, timeout=100)
    if done.returncode:
        pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")
    (info,) = folder.glob("kernels-*.dist-info")
    shutil.rmtree(info)
    _declare(folder, _version_in_range())
    return folder


@pytest.fixture(params=["no-kernels", "fake-kernels", "real-kernels"])
def others(request: pytest.FixtureRequest) -> Path | None:
    """Folder that holds the other package, or None."""
    name = request.param.replace("-", "_")
    if name != "no_kernels":
        return request.getfixturevalue(name)
    import importlib.metadata

    try:
        importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return None
    return pytest.skip("the other package is installed here")


def test_models_generate_in_the_repository(others: Path | None) -> None:
    _probe(sys.executable, ROOT, ROOT, others)


def test_models_generate_beside_the_wheel(
    others: Path | None, installed: Installed, tmp_path: Path
) -> None:
    _probe(installed.python, tmp_path, installed.venv, others)


def test_kernels_is_never_a_package_and_its_siblings_are() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (ROOT / "drafters" / "__init__.py").is_file()
    assert (ROOT / "verifiers" / "__init__.py").is_file()


def test_listed_packages_are_the_folders() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = set()
    for folder, name in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).parent.parts
            found.add(".".join((name, *parts)))
    assert set(listed) == found | {"hybrid.kernels"}
    assert len(listed) == len(set(listed))
