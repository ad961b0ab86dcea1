"""How far a kernel may be from the truth: as far as PyTorch twice over, and a floor.

The rule: max|kernel - ref64| <= 2 max|torch in the same dtype - ref64| + floor, where ref64 is the
reference on the same inputs in float64. Twice: both round, not always the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor

# What may be lost where torch happens to lose nothing, for results of size 1.
FLOORS = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,  # 8 ulp: exp2 of a scaled difference, and another order of summing
    torch.float16: 1e-3,  # 1 ulp: weights are rounded to float16 before the second product
    torch.bfloat16: 8e-3,  # 1 ulp, likewise
}


def assert_as_close_as_torch(kernel: Tensor, torch_same: Tensor, ref64: Tensor) -> None:
    """Apply the rule; every element of `kernel` must be finite where `ref64` is.

    Args:
        kernel: what the kernel wrote.
        torch_same: the same by PyTorch in the kernel's dtype.
        ref64: the same in float64.
    """
    assert kernel.shape == ref64.shape
    assert ref64.dtype == torch.float64
    finite = ref64.isfinite()
    got, same, want = (t.double()[finite] for t in (kernel, torch_same, ref64))
    assert torch.equal(kernel.double()[~finite].nan_to_num(), ref64[~finite].nan_to_num())
    assert got.isfinite().all(), "the kernel left elements unwritten, or overflowed"
    scale = max(1.0, want.abs().max().item()) if want.numel() else 1.0
    limit = 2 * (same - want).abs().max() + FLOORS[kernel.dtype] * scale if want.numel() else 0.0
    worst = (got - want).abs().max() if want.numel() else 0.0
    assert worst <= limit, f"off by {float(worst):.3g}, allowed {float(limit):.3g}"
