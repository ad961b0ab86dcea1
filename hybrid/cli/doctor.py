"""``hybrid doctor``: what is installed, which kernels run, where models are kept."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import textwrap
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from hybrid import __version__
from hybrid.cli.doctor_pair import check_pair
from hybrid.config import cache_dir, is_offline, state_dir

EXAMPLES = """Examples:

  hybrid doctor

  hybrid doctor --json

  hybrid doctor --target Qwen/Qwen3-8B --drafter run/dflash
"""

_PACKAGES = ("torch", "transformers", "peft", "safetensors", "triton", "rich", "prompt_toolkit")
# What /proc/cpuinfo calls the instructions that bf16 and int4 products gain from.
_CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "bf16")


def doctor(
    target: Annotated[
        str, typer.Option(help="With --drafter: the model that it drafts for.")
    ] = "default",
    drafter: Annotated[
        Path | None, typer.Option(help="Check this drafter or adapter against the target instead.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="With --drafter: file of prompts to measure on.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="With --drafter: per answer.")
    ] = 64,
    device: Annotated[
        str, typer.Option(help="With --drafter: auto, cpu, cuda or cuda:N.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the installation, or a drafter. Exit code 1 when something is wrong, else 0."""
    if drafter is not None:
        check_pair(
            target,
            drafter,
            prompts=prompts,
            max_new_tokens=max_new_tokens,
            device=device,
            as_json=as_json,
        )
    report = {
        "hybrid": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "device": _device(),
        "kernels": _kernels(),
        "folders": {
            "cache": str(cache_dir()),
            "state": str(state_dir()),
            "is_cache_writable": _is_writable(cache_dir()),
            "is_offline": is_offline(),
        },
        "models": _models(),
    }
    problems = _problems(report)
    report["problems"] = problems
    typer.echo(json.dumps(report) if as_json else _as_text(report, _width()))
    raise typer.Exit(1 if problems else 0)


def _version(package: str) -> str | None:
    if package == "torch" and (torch := _torch()) is not None:
        return str(torch.__version__)  # with the build: +cpu, +cu130
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _torch() -> Any:
    """Return torch, or None: this command must also work on a broken installation."""
    try:
        import torch
    except (ImportError, OSError):
        return None
    return torch


def _device() -> dict[str, Any]:
    torch = _torch()
    cpu: dict[str, Any] = {"cores": os.cpu_count(), "flags": _cpu_flags()}
    if torch is None:
        return cpu
    cpu |= {"threads": torch.get_num_threads(), "isa": torch.backends.cpu.get_cpu_capability()}
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"default": "cuda" if torch.cuda.is_available() else "cpu", "gpus": gpus, **cpu}


def _cpu_flags() -> list[str]:
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    present = set(info.split())
    return [flag for flag in _CPU_FLAGS if flag in present]


def _kernels() -> dict[str, Any]:
    """Return what passes on a CPU run, and what each operation of `kernels/` runs here and why.

    Empty where torch cannot be imported.
    """
    torch = _torch()
    if torch is None:
        return {}
    from hybrid.kernels.dispatch import listing

    return {
        "cpu": _cpu_kernels(torch),
        "operations": {
            name: {"implementation": implementation, "why": why}
            for name, implementation, why in listing()
        },
    }


def _cpu_kernels(torch: Any) -> dict[str, str]:
    """Return what a pass on a CPU runs, whether or not there is a GPU beside it."""
    has_int4 = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
    return {
        "attention": "torch scaled_dot_product_attention; token by token in AR and verify passes",
        "float32 products": _dense(torch.float32),
        "bfloat16 products": _dense(torch.bfloat16),
        "int4 products": "torch int4pack" if has_int4 else "not available: use --dtype bfloat16",
    }


def _dense(dtype: Any) -> str:
    import torch

    try:
        from hybrid.models.linear import ReorderedLinear
    except ImportError as error:
        return f"not available: {error}"
    is_reordered = ReorderedLinear.runs(torch.device("cpu"), dtype)
    return "oneDNN, weights reordered" if is_reordered else "torch linear"


def _triton_problem(kernels: dict[str, Any]) -> str | None:
    """Return why Triton cannot be imported although operations are to run on it."""
    operations = kernels.get("operations", {}).values()
    if all(operation["implementation"] != "triton" for operation in operations):
        return None
    try:
        import_module("triton")
    except Exception as error:  # noqa: BLE001  its libraries fail in ways of their own
        return f"triton cannot be imported: {error}. Install it again, or use --device cpu."
    return None


def _is_writable(folder: Path) -> bool:
    """Whether the folder, or the nearest parent that exists, can be written."""
    existing = next((p for p in (folder, *folder.parents) if p.exists()), folder)
    return existing.is_dir() and os.access(existing, os.W_OK)


def _models() -> dict[str, Any]:
    """Return {name: path, precisions, bytes} of the models in the cache."""
    try:
        from hybrid.models.store import installed
    except (ImportError, OSError):
        return {}
    return {
        m.name: {"path": str(m.path), "precisions": list(m.precisions), "num_bytes": m.num_bytes}
        for m in installed()
    }


def _problems(report: dict[str, Any]) -> list[str]:
    """Return what keeps this installation from generating."""
    problems = []
    if _torch() is None:
        problems.append("torch cannot be imported: install it with pip install torch.")
    if triton := _triton_problem(report["kernels"]):
        problems.append(triton)
    for name in ("transformers", "safetensors"):
        if report["packages"][name] is None:
            problems.append(f"{name} is not installed: pip install {name}.")
    folders = report["folders"]
    if not folders["is_cache_writable"] and "default" not in report["models"]:
        problems.append(f"{folders['cache']} cannot be written: set HYBRID_CACHE_DIR.")
    return problems


def _as_text(report: dict[str, Any], width: int) -> str:
    """Return the report, in lines of at most `width` where words allow it."""
    lines = [f"hybrid {report['hybrid']}, Python {report['python']}, {report['system']}"]
    kernels = report["kernels"]
    operations = {
        name: f"{operation['implementation']}: {operation['why']}"
        for name, operation in kernels.get("operations", {}).items()
    }
    sections = {
        "packages": report["packages"],
        "device": report["device"],
        "passes on a CPU": kernels.get("cpu", {}),
        "operations of kernels/ (a pass on a CPU needs none)": operations,
        "folders": report["folders"],
    }
    for title, values in sections.items():
        lines += ["", f"{title}:", *(_line(name, value, width) for name, value in values.items())]
    lines += ["", "models:"]
    for name, model in report["models"].items():
        size = f"{model['num_bytes'] / 2**20:.0f} MiB"
        shown = f"{', '.join(model['precisions'])}; {size}; {model['path']}"
        lines.append(_line(name, shown, width))
    if "default" not in report["models"]:
        lines.append(_line("default", "not fetched yet: hybrid models pull default", width))
    lines += ["", *(f"PROBLEM: {p}" for p in report["problems"] or []), ""]
    lines[-1] = "Not usable." if report["problems"] else "Ready."
    return "\n".join(lines)


def _line(name: str, value: Any, width: int) -> str:
    shown = ", ".join(value) if isinstance(value, list) else value
    shown = "-" if shown in (None, "") else str(shown)
    return textwrap.fill(
        shown,
        width,
        initial_indent=f"  {name:<18}",
        subsequent_indent=" " * 4,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _width() -> int:
    """Return the columns of the terminal; what is piped is not wrapped."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
