"""Which implementation runs, how it is started, and where outputs come from."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from repository import ROOT

from hybrid.errors import ConfigError, KernelUnavailableError
from hybrid.kernels import dispatch
from hybrid.kernels.alloc import empty
from hybrid.kernels.launch import launch

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of compute capability 9.0, as far as dispatch can see."""
    dispatch.why_not_triton.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    yield monkeypatch
    dispatch.why_not_triton.cache_clear()


def test_a_cpu_runs_the_reference():
    assert dispatch.choose("verify", CPU) == "reference"
    assert dispatch.last("verify") == "reference"
    assert dispatch.last("an operation that never ran") is None


def test_a_gpu_runs_triton(gpu):
    assert dispatch.choose("verify", GPU) == "triton"
    assert dispatch.last("verify") == "triton"
    assert dispatch.listing()[0][1:] == ("triton", "compiled for this GPU")


@pytest.mark.parametrize(
    ("what", "answer", "why"),
    [
        ("torch.cuda.get_device_capability", lambda device: (7, 5), "capability 7.5, .* need 8.0"),
        ("torch.version.hip", "6.4", "NVIDIA only"),
        ("hybrid.kernels.dispatch.find_spec", lambda name: None, "not installed"),
    ],
)
def test_a_gpu_that_cannot(gpu, what, answer, why):
    gpu.setattr(what, answer)
    gpu.delenv("TRITON_INTERPRET", raising=False)
    assert dispatch.choose("verify", GPU) == "reference"
    with pytest.raises(KernelUnavailableError, match=why), dispatch.force(None, "triton"):
        pass


def test_forcing_one_operation_or_all(device):
    """What is said of one operation goes before what is said of all, on a CPU and on a GPU."""

    def both():
        return [dispatch.choose(op, device) for op in ("verify", "sample")]

    unforced = both()
    with dispatch.force(None, "reference"):
        assert both() == ["reference", "reference"]
        with dispatch.force("verify", "triton"):
            assert both() == ["triton", "reference"]
            with dispatch.force(None, "triton"):
                assert both() == ["triton", "triton"]
                with dispatch.force("sample", "reference"):
                    assert both() == ["triton", "reference"]
            assert both() == ["triton", "reference"]
        assert both() == ["reference", "reference"]
    assert both() == unforced


def test_what_is_forced_is_forced_in_this_thread_alone():
    seen = []
    with dispatch.force(None, "triton"):
        thread = threading.Thread(target=lambda: seen.append(dispatch.choose("verify", CPU)))
        thread.start()
        thread.join()
    assert seen == ["reference"]


def test_forcing_what_cannot_run_raises(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = "verify: cannot run on cpu: no GPU.*TRITON_INTERPRET=1"
    with pytest.raises(KernelUnavailableError, match=message), dispatch.force("verify", "triton"):
        pass
    message = "got 'cuda', expected 'triton' or 'reference'"
    with pytest.raises(ConfigError, match=message), dispatch.force("verify", "cuda"):
        pass
    assert dispatch.choose("verify", CPU) == "reference"


def test_forced_on_a_gpu_but_called_with_a_tensor_of_the_cpu(gpu):
    gpu.delenv("TRITON_INTERPRET", raising=False)
    with dispatch.force("verify", "triton"), pytest.raises(KernelUnavailableError, match="cpu"):
        dispatch.choose("verify", CPU)


def test_listing_names_every_operation():
    operations = [op for op, _, _ in dispatch.listing()]
    assert operations == sorted(operations)
    assert {"hybrid_attention", "logits_stats", "verify", "sample", "rms_norm"} <= set(operations)
    assert "block_attention" not in operations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool], ids=str)
def test_outputs_are_poisoned_in_tests(dtype, monkeypatch):
    out = empty((2, 3), dtype=dtype, device=CPU)
    assert out.shape == (2, 3)
    assert out.dtype == dtype
    poison = {torch.int32: 2**31 - 1, torch.bool: True}.get(dtype)
    assert (out.isnan() if poison is None else out == poison).all()
    monkeypatch.delenv("HYBRID_POISON")
    out.zero_()
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: out)
    assert (empty((2, 3), dtype=dtype, device=CPU) == 0).all()


class Kernel:
    """Stands in for a kernel: remembers how it was started."""

    def __getitem__(self, grid):
        self.grid = grid
        return lambda *args, **kwargs: setattr(self, "given", (args, kwargs))


def test_without_a_driver_the_first_configuration_is_used(monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    configs = [triton.Config({"BLOCK": n}, num_warps=n) for n in (2, 4)]
    kernel = Kernel()
    launch(kernel, (3,), 7, configs=configs, key=("n",), n=5)
    args, kwargs = kernel.given
    assert kernel.grid == (3,)
    assert args == (7,)
    assert (kwargs["BLOCK"], kwargs["num_warps"], kwargs["n"]) == (2, 2, 5)


def test_a_kernel_starts_on_the_gpu_of_its_tensors(monkeypatch):
    """Triton takes the current one, which need not be theirs."""
    triton = pytest.importorskip("triton")
    entered = []

    class Elsewhere(torch.Tensor):
        is_cuda, device = True, torch.device("cuda", 1)

    @contextmanager
    def current(device):
        entered.append(device)
        yield
        entered.append("left")

    monkeypatch.setattr(torch.cuda, "device", current)
    kernel, configs = Kernel(), [triton.Config({})]
    launch(kernel, (1,), 7, torch.zeros(1).as_subclass(Elsewhere), configs=configs, key=())
    assert entered == [torch.device("cuda", 1), "left"]
    launch(kernel, (1,), 7, torch.zeros(1), configs=configs, key=())
    assert len(entered) == 2, "there is nothing to choose on a CPU"


def test_every_kernel_is_started_so():
    """Brackets behind a kernel would start it on the current GPU."""
    for op in dispatch.operations():
        text = (ROOT / "kernels" / op / "triton.py").read_text(encoding="utf-8")
        assert "launch(" in text, op
        assert "_kernel[" not in text, op


def test_with_a_driver_the_fastest_is(monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    made = []

    def autotune(configs, key, restore_value):
        made.append((configs, key, restore_value))
        return lambda kernel: kernel

    monkeypatch.setattr(triton, "autotune", autotune)
    configs = [triton.Config({"BLOCK": n}, num_warps=n) for n in (2, 4)]
    kernel = Kernel()
    for number in (7, 8):
        launch(kernel, (3,), number, configs=configs, key=("n",), restore=("p_x",), n=5)
    assert made == [(configs, ["n"], ["p_x"])], "tuned once, not at every launch"
    assert kernel.given == ((8,), {"n": 5})
    launch(kernel, (3,), 9, configs=configs[:1], key=("n",))
    assert len(made) == 1, "nothing to choose from"
