"""Files that appear whole or not at all, and locks that keep a second writer out."""

from __future__ import annotations

import json
import os
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
