"""One safetensors file, memory-mapped: a tensor is read when it is taken, and forgotten afterwards.

The mapped pages of tensors that were copied on are of no more use, yet they would count as memory
until the whole file is closed: a load would peak at twice the model. So they are handed back to the
page cache as the reading goes on. Next: hybrid/models/checkpoint.py.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybrid.errors import CheckpointError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_KEPT_NBYTES = 8 * 2**20  # mapped pages are handed back when so much has been taken


class TensorFile:
    """The tensors of a safetensors file. They may be read, not written."""

    def __init__(self, path: Path) -> None:
        """Check the file and map it.

        Raises:
            CheckpointError: it is missing, truncated or damaged.
        """
        self._path, self._taken_nbytes = path, 0
        try:
            with safe_open(path, framework="pt"):  # the library's own checks of the header
                pass
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                self._header = json.loads(file.read(size))
                self._start = 8 + size
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise CheckpointError(
                f"Checkpoint {path.parent} lacks {path.name}, which its index names. "
                "Fetch it again."
            ) from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is truncated or damaged ({error}). Delete it and fetch it again."
            ) from error
        self._header.pop("__metadata__", None)

    def names(self) -> Iterable[str]:
        """Return the names of the tensors, in their order in the header."""
        return self._header.keys()

    def take(self, name: str) -> Tensor:
        """Return a tensor that lies in the file.

        Raises:
            CheckpointError: its dtype is not one that is computed with here.
        """
        entry = self._header[name]
        if entry["dtype"] not in _DTYPES:
            raise CheckpointError(
                f"{self._path}: {name} has dtype {entry['dtype']}, expected one of "
                f"{', '.join(_DTYPES)}. Use the unquantised model or a GGUF file."
            )
        dtype, (start, end) = _DTYPES[entry["dtype"]], entry["data_offsets"]
        if start == end:
            return torch.empty(entry["shape"], dtype=dtype)
        self._forget(end - start)
        flat = torch.frombuffer(
            self._map,
            dtype=dtype,
            count=(end - start) // dtype.itemsize,
            offset=self._start + start,
        )
        return flat.view(entry["shape"])

    def _forget(self, num_bytes: int) -> None:
        """Hand back the pages of what was taken so far; a tensor in use reads them again."""
        self._taken_nbytes += num_bytes
        if self._taken_nbytes > _KEPT_NBYTES and hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)
            self._taken_nbytes = num_bytes
