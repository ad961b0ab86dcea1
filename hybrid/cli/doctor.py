"""``hybrid doctor``: what is installed, which kernels run, where models are kept."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from hybrid import __version__
from hybrid.config import cache_dir, is_offline, state_dir

EXAMPLES = """Examples:

  hybrid doctor

  hybrid doctor --json
"""

_PACKAGES = ("torch", "transformers", "peft", "safetensors", "triton", "rich", "prompt_toolkit")
# What /proc/cpuinfo calls the instructions that bf16 and int4 products gain from.
_CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "bf16")


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the installation. Exit code 0 when it can generate, 1 when it cannot."""
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
    typer.echo(json.dumps(report) if as_json else _as_text(report))
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


def _kernels() -> dict[str, str]:
    """Return {operation: what runs it here, and why}."""
    torch = _torch()
    if torch is None:
        return {}
    has_int4 = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
    has_gpu = torch.cuda.is_available()
    if _version("triton") is None:
        triton = "not available: not installed"
    else:
        triton = "available" if has_gpu else "not available: no GPU"
    return {
        "attention": "reference (torch scaled_dot_product_attention)",
        "int4 linear": "torch int4pack" if has_int4 else "not available: use --dtype bfloat16",
        "triton": triton,
    }


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
    for name in ("transformers", "safetensors"):
        if report["packages"][name] is None:
            problems.append(f"{name} is not installed: pip install {name}.")
    folders = report["folders"]
    if not folders["is_cache_writable"] and "default" not in report["models"]:
        problems.append(f"{folders['cache']} cannot be written: set HYBRID_CACHE_DIR.")
    return problems


def _as_text(report: dict[str, Any]) -> str:
    lines = [f"hybrid {report['hybrid']}, Python {report['python']}, {report['system']}"]
    for title in ("packages", "device", "kernels", "folders"):
        lines += ["", f"{title}:"]
        for name, value in report[title].items():
            shown = ", ".join(value) if isinstance(value, list) else value
            lines.append(f"  {name:<18}{'-' if shown in (None, '') else shown}")
    lines += ["", "models:"]
    for name, model in report["models"].items():
        size = f"{model['num_bytes'] / 2**20:.0f} MiB"
        lines.append(f"  {name:<18}{', '.join(model['precisions'])}; {size}; {model['path']}")
    if "default" not in report["models"]:
        lines.append("  default           not fetched yet: hybrid models pull default")
    lines += ["", *(f"PROBLEM: {p}" for p in report["problems"] or []), ""]
    lines[-1] = "Not usable." if report["problems"] else "Ready."
    return "\n".join(lines)
