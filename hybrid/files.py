"""Files that appear whole or not at all, and locks that keep a second writer out."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from hybrid.errors import CheckpointError, ConfigError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to; it takes the place of `path` if the block ends without an error.

    Raises:
        CheckpointError: the disk is full or the folder is not writable; `path` is as it was.
    """
    part = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save has RuntimeErrors
        with suppress(OSError):
            part.unlink()
        raise CheckpointError(
            f"{path} cannot be written: {error}. What was there before is intact: free some space "
            "or mend the folder, and run the same command again."
        ) from error


@contextmanager
def replacing_folder(path: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield an empty folder; it becomes `path` if the block ends without an error.

    Args:
        path: what is written.
        force: replace a folder that is there and not empty.

    Raises:
        ConfigError: `path` is there and not to be replaced.
        CheckpointError: the disk is full or the place is not writable; `path` is as it was.
    """
    if not force and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(
            f"{path} is there already. Give another folder, or --force to replace it."
        )
    part: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        yield part
        part.chmod(0o755)  # mkdtemp makes it private
        if path.is_dir():
            shutil.rmtree(path)
        part.rename(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be written: {error}. Free some space or give another folder."
        ) from error
    finally:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)


@contextmanager
def locked(lock: Path, output: Path, busy: str) -> Iterator[None]:
    """Hold a lock file until the block ends; its folder is created.

    Args:
        lock: the file.
        output: what it guards, for the errors.
        busy: what to say when somebody else holds it.

    Raises:
        ConfigError: somebody else holds it.
        CheckpointError: the folder cannot be written.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        held = FileLock(lock, timeout=0).acquire()
    except Timeout as error:
        raise ConfigError(f"output: {busy}") from error
    except OSError as error:
        raise CheckpointError(f"{output} cannot be written: {error}. Give another one.") from error
    with held:
        yield


def write_json(path: Path, value: object) -> None:
    """Write indented JSON.

    Raises:
        CheckpointError: as `replacing`.
    """
    with replacing(path) as part:
        part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
