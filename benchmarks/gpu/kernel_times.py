"""Every kernel's time, what it achieves of the card, and the same by PyTorch.

Next: benchmarks/gpu/end_to_end.py.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.attention_cases import attention_cases
from benchmarks.gpu.cases import Case, Maker, small_cases
from benchmarks.gpu.session import SEED, Session
from benchmarks.gpu.timing import Call, Timer
from hybrid.kernels import dispatch


def run(session: Session) -> None:
    """Time all cases; where one fails the others go on, and the part fails at the end."""
    timer = Timer(session.device)
    sizes = session.is_dry, session.dtype.itemsize
    cases = [*attention_cases(*sizes), *small_cases(*sizes)]
    for op in sorted({*dispatch.operations()} - {case.op for case in cases}):
        session.add(kind="kernel", op=op, case="none", problem="no case in benchmarks/gpu/cases.py")
    for case in session.in_time(cases):
        try:
            found = time_case(case, session, timer)
        except Exception as error:  # noqa: BLE001  whatever a kernel or its compiler raises
            found = _problem(error)
        session.add(kind="kernel", op=case.op, case=case.name, **found)
        if session.device.type == "cuda":
            torch.cuda.empty_cache()
    if broken := [r["case"] for r in session.records if "problem" in r]:
        raise SystemExit(f"{len(broken)} cases failed: {', '.join(broken)}")


def time_case(case: Case, session: Session, timer: Timer) -> dict[str, Any]:
    """Return bytes, operations, and microseconds of the kernel and of what it is compared with."""
    made = case.make(Maker(session.device, session.dtype, SEED))
    with dispatch.force(case.op, "triton"):
        microseconds = timer(made.kernel)
    assert dispatch.last(case.op) == "triton", f"{case.op} ran {dispatch.last(case.op)}"
    others = {
        name: _time_other(call, timer, captures=name not in made.reads_back)
        for name, call in made.others.items()
    }
    median = microseconds["median"]
    return {
        "bytes": case.num_bytes,
        "flops": case.num_flops,
        "microseconds": microseconds,
        "gbytes_per_s": case.num_bytes / median / 1e3,
        "tflops": case.num_flops / median / 1e6,
        "others": others,
        "bar": case.bar,
    }


def _time_other(call: Call, timer: Timer, *, captures: bool) -> dict[str, Any]:
    """Return its times; what this torch, or this card, cannot do costs its own number alone."""
    try:
        return timer(call, captures=captures)
    except Exception as error:  # noqa: BLE001  whatever PyTorch raises
        return _problem(error)


def _problem(error: Exception) -> dict[str, Any]:
    return {"problem": f"{type(error).__name__}: {error}"[:500]}
