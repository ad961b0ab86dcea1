"""The memory-mapped reader gives what the safetensors library gives, and forgets it in time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid.errors import CheckpointError
from hybrid.models import tensor_files
from hybrid.models.tensor_files import TensorFile

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """One tensor per dtype; their sizes are odd, so that later ones lie at odd places."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{dtype}": torch.randint(0, 2, (3, n + 1), generator=generator).to(dtype)
        for n, dtype in enumerate(DTYPES)
    }
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "a.b": torch.randn(7)}
    save_file(tensors, str(tmp_path / "x.safetensors"), {"format": "pt"})
    return tmp_path / "x.safetensors"


def test_tensors_are_those_of_the_library(path: Path) -> None:
    expected, file = load_file(path), TensorFile(path)
    assert sorted(file.names()) == sorted(expected)
    for name, value in expected.items():
        taken = file.take(name)
        assert taken.dtype == value.dtype
        assert torch.equal(taken, value)


def test_a_tensor_outlives_the_file_object(path: Path) -> None:
    taken = TensorFile(path).take("a.b")
    assert torch.equal(taken, load_file(path)["a.b"])


def test_what_was_forgotten_is_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "_KEPT_NBYTES", 1)
    file = TensorFile(path)
    taken = {name: file.take(name) for name in file.names()}
    for name, value in load_file(path).items():
        assert torch.equal(taken[name], value)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_are_handed_back(tmp_path: Path) -> None:
    def mapped_kib() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssFile"))

    names = [f"t{n}" for n in range(16)]
    save_file({n: torch.ones(2**20) for n in names}, str(tmp_path / "x.safetensors"))  # 64 MiB
    file, before = TensorFile(tmp_path / "x.safetensors"), mapped_kib()
    for name in names:
        assert file.take(name).sum() == 2**20  # touches every page
    assert mapped_kib() - before < 24 * 2**10


def test_a_dtype_that_is_not_computed_with_is_named(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4).to(torch.float8_e4m3fn)}, str(tmp_path / "x.safetensors"))
    with pytest.raises(CheckpointError, match="w has dtype F8_E4M3, expected one of F64, F32"):
        TensorFile(tmp_path / "x.safetensors").take("w")


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64])
def test_a_damaged_file_is_an_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.safetensors is truncated or damaged"):
        TensorFile(tmp_path / "x.safetensors")


def test_a_truncated_file_is_an_error(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        TensorFile(path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lacks x\.safetensors, which its index names"):
        TensorFile(tmp_path / "x.safetensors")
