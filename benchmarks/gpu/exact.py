"""What `exact` costs, and whether it holds: bits of AR logits beside those of a verify pass.

Next: benchmarks/gpu/report.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.end_to_end import prefilled, random_ids, release, verify_pass
from benchmarks.gpu.random_models import backbone_of, shapes
from benchmarks.gpu.session import Session
from benchmarks.gpu.timing import quantiles, wall_ms
from hybrid.models.transformer import NativeBackbone

WIDTHS = (1, 4, 9, 17, 32)
CONTEXT = 700  # more than a range of keys of the attention kernel


def run(session: Session) -> None:
    """Measure every model with `exact` off and on."""
    runs = [(name, exact) for name in shapes(session.is_dry) for exact in (False, True)]
    for name, exact in session.in_time(runs, lambda run: f"{run[0]}, exact {run[1]}"):
        spec = shapes(session.is_dry)[name]
        backbone = backbone_of(spec, session.generator(), session.dtype, exact=exact)
        for record in measure(backbone, session.is_dry):
            session.add(kind="exact", model=name, exact=exact, speed_only=True, **record)
        del backbone
        release(session.device)


def measure(backbone: NativeBackbone, is_dry: bool) -> Iterator[dict[str, Any]]:
    """Time passes by their tokens, and compare bits."""
    context, widths = (20, (1, 3)) if is_dry else (CONTEXT, WIDTHS)
    cache = prefilled(backbone, context, 2 * max(widths))
    for width in widths:
        call = verify_pass(backbone, cache, random_ids(backbone, width))
        times = quantiles(wall_ms(call, backbone.device))
        yield {"width": width, "ms": times, **bits(backbone, cache, width)}
        cache.truncate(0, context)


def bits(backbone: NativeBackbone, cache: Any, width: int) -> dict[str, int]:
    """Count logits of a verify pass that differ in some bit from those of AR decoding.

    Also the tokens at which the greedy choice differs. The cache keeps the tokens.
    """
    ids = random_ids(backbone, width)
    together = verify_pass(backbone, cache, ids)().logits[0].clone()
    alone = []
    for token in ids:
        alone.append(verify_pass(backbone, cache, [token])().logits[0, 0].clone())
        cache.commit(0, 1)
    ar = torch.stack(alone)
    return {
        "logits": ar.numel(),
        "differing_logits": int((ar != together).sum()),
        "differing_choices": int((ar.argmax(-1) != together.argmax(-1)).sum()),
    }
