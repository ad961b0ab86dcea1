"""Compile kernels for GPUs that are not here, and say what they would use of one.

A kernel that spills registers, asks for more shared memory than there is, or does its products
without tensor cores is found on a machine without a GPU. Needs Triton with the tools that it
brings, in a process that does not interpret kernels. benchmarks/kernels_aot.py prints the table.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from hybrid.config import cache_dir, interprets_triton
from hybrid.errors import KernelUnavailableError
from hybrid.files import write_json
from hybrid.kernels.dispatch import operations

TARGET = 90  # Hopper
KIB = 1024
# CUDA C++ programming guide, "technical specifications per compute capability": shared memory per
# block and per multiprocessor. All three have 65,536 registers and 64 warps per multiprocessor.
SHARED_PER_BLOCK = {80: 163 * KIB, 90: 227 * KIB, 100: 227 * KIB}
SHARED_PER_SM = {80: 164 * KIB, 90: 228 * KIB, 100: 228 * KIB}
REGISTERS_PER_SM, WARPS_PER_SM, BLOCKS_PER_SM = 65_536, 64, 32
SYSTEM_SHARED = KIB  # per block
TENSOR_CORE = re.compile(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma")


@dataclass(frozen=True)
class AotCase:
    """One kernel with one choice of types, shapes and options.

    Attributes:
        name: unique within the operation, such as "bf16-D128-causal".
        kernel: bare `@triton.jit` function.
        signature: {argument: "*bf16", "fp32", "i32", ..., or "constexpr"}, in order.
        constexprs: {argument: value} of the compile-time arguments.
        options: num_warps, num_stages, enable_fp_fusion.
        attrs: {(index of the argument,): [["tt.divisibility", 16]]}, as the launch finds them.
        wants_mma: it has products that tensor cores must do.
        spills_allowed: where the tile cannot be smaller, and why is said beside it.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    attrs: dict[tuple[int, ...], list[list[Any]]] = field(default_factory=dict)
    wants_mma: bool = False
    spills_allowed: int = 0

    @classmethod
    def of(
        cls,
        name: str,
        kernel: Any,
        types: Mapping[str, str],
        constexprs: Mapping[str, Any],
        config: Any,
        *,
        unaligned: Sequence[str] = (),
        **fields: Any,
    ) -> AotCase:
        """Return the case of a launch with a `triton.Config`.

        Args:
            name: of the case.
            kernel: bare `@triton.jit` function.
            types: of its arguments; "i32" for those that are not named.
            constexprs: values of its compile-time arguments, and None for pointers that are left
                out.
            config: gives warps and stages.
            unaligned: pointers and integers that are no multiple of 16, or are never looked at.
            **fields: `options` beside those of the config, `wants_mma`, `spills_allowed`.
        """
        names = kernel.arg_names
        signature = {n: "constexpr" if n in constexprs else types.get(n, "i32") for n in names}
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        options |= fields.pop("options", {})
        attrs = divisible(signature, but=unaligned)
        return cls(name, kernel, signature, dict(constexprs), options, attrs, **fields)


@dataclass(frozen=True)
class AotReport:
    """What one kernel uses.

    Attributes:
        name: operation and case.
        arch: compute capability, 90 for sm_90.
        registers: per thread.
        spills: instructions that store a register to local memory.
        stack: bytes of local memory per thread.
        shared_bytes: shared memory per block.
        has_mma: there are tensor-core instructions.
        wants_mma: there should be.
        spills_allowed: how many would be no problem.
        occupancy: resident warps over the most there can be, by registers and shared memory.
        error: the compiler's last words, when it failed.
    """

    name: str
    arch: int
    registers: int = 0
    spills: int = 0
    stack: int = 0
    shared_bytes: int = 0
    has_mma: bool = False
    wants_mma: bool = False
    spills_allowed: int = 0
    occupancy: float = 0.0
    error: str = ""


def divisible(signature: dict[str, str], but: Sequence[str] = ()) -> dict[tuple[int, ...], Any]:
    """Return the attrs of a launch whose pointers are aligned and whose integers are multiples.

    Args:
        signature: of the case.
        but: arguments that are no multiple of 16, or are never looked at.
    """
    return {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if name not in but and (kind.startswith("*") or kind in ("i32", "i64"))
    }


def check(report: AotReport) -> list[str]:
    """Return what is wrong, an empty list if nothing is.

    Spills count on `TARGET` alone: tiles are chosen for it, and other GPUs get what they can.
    """
    if report.error:
        return [f"does not compile: {report.error}"]
    problems = []
    if report.arch == TARGET and report.spills > report.spills_allowed:
        problems.append(f"{report.spills} spills of registers")
    if report.shared_bytes > (limit := SHARED_PER_BLOCK[report.arch]):
        problems.append(f"{report.shared_bytes} bytes of shared memory, the limit is {limit}")
    if report.wants_mma and not report.has_mma:
        problems.append("products without tensor cores")
    return problems


def occupancy(arch: int, num_warps: int, registers: int, shared_bytes: int) -> float:
    """Return the share of a multiprocessor's warps that can be resident, by its resources."""
    per_warp = -(-registers * 32 // 256) * 256  # handed out in units of 256
    by_registers = REGISTERS_PER_SM // max(per_warp, 1) // num_warps
    by_shared = SHARED_PER_SM[arch] // (shared_bytes + SYSTEM_SHARED)
    blocks = min(by_registers, by_shared, BLOCKS_PER_SM, WARPS_PER_SM // num_warps)
    return blocks * num_warps / WARPS_PER_SM


def compile_case(case: AotCase, arch: int, op: str = "") -> AotReport:
    """Compile one case for one architecture, in this process.

    Raises:
        KernelUnavailableError: Triton is missing, or interprets.
    """
    if interprets_triton():
        raise KernelUnavailableError(
            "Kernels cannot be compiled while Triton interprets them: unset TRITON_INTERPRET."
        )
    try:
        from triton import compile as compile_source
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
    except ImportError as error:
        raise KernelUnavailableError(
            f"Kernels cannot be compiled: {error}. Install it with pip install triton."
        ) from error
    name = f"{op} {case.name}".strip()
    source = ASTSource(case.kernel, dict(case.signature), dict(case.constexprs), dict(case.attrs))
    # The default of this option is about to change in Triton.
    options = {"enable_fp_fusion": True, **case.options}
    try:
        compiled = compile_source(source, target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:  # noqa: BLE001  the compiler raises what it likes; it is reported
        last_words = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        return AotReport(name, arch, wants_mma=case.wants_mma, error=last_words[:200])
    registers, stack, spills = _resources(compiled.asm["cubin"])
    shared, num_warps = compiled.metadata.shared, compiled.metadata.num_warps
    return AotReport(
        name,
        arch,
        registers,
        spills,
        stack,
        shared,
        has_mma=TENSOR_CORE.search(compiled.asm["ptx"]) is not None,
        wants_mma=case.wants_mma,
        spills_allowed=case.spills_allowed,
        occupancy=occupancy(arch, num_warps, registers, shared),
    )


def _resources(cubin: bytes) -> tuple[int, int, int]:
    """Return registers, bytes of stack, and spilling instructions."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def show(what: str) -> str:
            command = [str(tool), what, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        usage = dict(re.findall(r"(REG|STACK):(\d+)", show("-res-usage")))
        stack = int(usage["STACK"])
        spills = len(re.findall(r"\bSTL\b", show("-sass"))) if stack else 0
    return int(usage["REG"]), stack, spills


def compile_all(archs: Iterable[int], ops: Sequence[str] = (), workers: int = 2) -> list[AotReport]:
    """Compile every case of every operation, several at a time; results are kept on disk.

    Args:
        archs: compute capabilities.
        ops: operations; all when empty.
        workers: processes.

    Raises:
        KernelUnavailableError: Triton is missing, or interprets.
    """
    archs = list(archs)
    wanted = [(op, name, arch) for op, name in _names(ops or operations()) for arch in archs]
    reports: dict[tuple[str, str, int], AotReport] = {}
    missing = []
    for key in wanted:
        path = _kept(*key)
        if path.is_file():
            reports[key] = AotReport(**json.loads(path.read_text()))
        else:
            missing.append(key)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(_compile_by_name, *key): key for key in missing}
        for future in as_completed(running):
            reports[running[future]] = future.result()
    return [reports[key] for key in wanted]


def _names(ops: Iterable[str]) -> Iterator[tuple[str, str]]:
    for op in ops:
        for case in _cases(op):
            yield op, case


def _cases(op: str) -> dict[str, AotCase]:
    cases = import_module(f"hybrid.kernels.{op}.triton").aot_cases()
    return {case.name: case for case in cases}


def _compile_by_name(op: str, name: str, arch: int) -> AotReport:
    report = compile_case(_cases(op)[name], arch, op)
    if not report.error:
        write_json(_kept(op, name, arch), asdict(report))
    return report


def _kept(op: str, name: str, arch: int) -> Path:
    """Return the file of a report: named by everything that it depends on."""
    folder = Path(__file__).parent
    sources = [*sorted(folder.glob("*.py")), *sorted((folder / op).glob("*.py"))]
    digest = hashlib.sha256(f"{version('triton')} {op} {name} {arch}".encode())
    for path in sources:
        digest.update(path.read_bytes())
    return cache_dir() / "aot" / f"{digest.hexdigest()[:32]}.json"
