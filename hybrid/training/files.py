"""Files that appear whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from hybrid.errors import CheckpointError


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


def write_json(path: Path, value: object) -> None:
    """Write indented JSON.

    Raises:
        CheckpointError: as `replacing`.
    """
    with replacing(path) as part:
        part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
