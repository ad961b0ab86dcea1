"""What is timed of each kernel: shapes, bytes and operations by its README, and what to compare.

Attention has a file of its own, benchmarks/gpu/attention_cases.py. An operation without cases here
is reported as such. Next: benchmarks/gpu/kernel_times.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.kernels import dispatch
from hybrid.kernels.cache_gather import cache_gather
from hybrid.kernels.gated_lora import gated_lora
from hybrid.kernels.linear import linear
from hybrid.kernels.logits_stats import logits_stats
from hybrid.kernels.philox import philox
from hybrid.kernels.qkv_rope_append import qkv_rope_append
from hybrid.kernels.rms_norm import rms_norm
from hybrid.kernels.sample import sample
from hybrid.kernels.swiglu import swiglu
from hybrid.kernels.verify import verify

Call = Callable[[], Any]


class Maker:
    """Makes random tensors on the device, the same each time."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        """Take where, what, and from which seed."""
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return normal numbers."""
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return out.normal_(generator=self.generator)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Return integers below `high`, int64."""
        return torch.randint(high, shape, device=self.device, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        """Return float64 numbers in [0, 1)."""
        return torch.rand(shape, dtype=torch.float64, device=self.device, generator=self.generator)


@dataclass(frozen=True)
class Candidates:
    """The kernel's call and what it is compared with.

    Attributes:
        kernel: the operation, as the engine calls it.
        others: {name: the same by PyTorch}.
        reads_back: names of those that read from the device, and cannot be captured.
    """

    kernel: Call
    others: dict[str, Call]
    reads_back: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """One operation at one shape.

    Attributes:
        op: its folder in `kernels/`.
        name: of the shape, unique within the operation.
        num_bytes: that have to be moved, each input read once, each output written once.
        num_flops: operations; 0 where bytes alone count.
        make: allocates the inputs.
        bar: share of the measured copy bandwidth that it should reach, None without one.
    """

    op: str
    name: str
    num_bytes: int
    num_flops: int
    make: Callable[[Maker], Candidates]
    bar: float | None = None

    def __str__(self) -> str:
        return f"{self.op} {self.name}"


def by_reference(op: str, call: Call) -> Call:
    """Return `call` with the plain PyTorch implementation of `op`."""

    def run() -> Any:
        with dispatch.force(op, "reference"):
            return call()

    return run


def rms_norm_case(num_tokens: int, width: int, itemsize: int) -> Case:
    """A norm with its residual sum."""

    def make(maker: Maker) -> Candidates:
        x, residual = maker.normal(num_tokens, width), maker.normal(num_tokens, width)
        weight = maker.normal(width)
        return Candidates(
            lambda: rms_norm(x, weight, 1e-5, residual),
            {"torch": lambda: F.rms_norm(x + residual, (width,), weight, 1e-5)},
        )

    num_bytes = (4 * num_tokens + 1) * width * itemsize
    return Case("rms_norm", f"N{num_tokens}-C{width}", num_bytes, 5 * num_tokens * width, make)


def swiglu_case(num_tokens: int, width: int, itemsize: int) -> Case:
    """The gate of an MLP of `width`."""

    def make(maker: Maker) -> Candidates:
        both = maker.normal(num_tokens, 2 * width)
        return Candidates(
            lambda: swiglu(both),
            {"torch": lambda: F.silu(both[:, :width]) * both[:, width:]},
        )

    num_bytes = 3 * num_tokens * width * itemsize
    return Case("swiglu", f"N{num_tokens}-I{width}", num_bytes, 5 * num_tokens * width, make)


def qkv_case(num_tokens: int, heads: int, groups: int, dim: int, itemsize: int) -> Case:
    """Norms, rotation and the write into the cache of one row."""
    width = (heads + 2 * groups) * dim

    def make(maker: Maker) -> Candidates:
        qkv, norms = maker.normal(num_tokens, width), (maker.normal(dim), maker.normal(dim))
        angles = maker.normal(num_tokens, dim // 2, dtype=torch.float32)
        cos, sin = angles.cos(), angles.sin()
        cache = maker.normal(2, 1, groups, num_tokens + 16, dim)
        slots = torch.arange(num_tokens, device=maker.device)
        rows = torch.zeros_like(slots)
        wide = [torch.cat([t, t], dim=-1).to(maker.dtype)[:, None] for t in (cos, sin)]

        def turned(x: Tensor, weight: Tensor) -> Tensor:
            x = F.rms_norm(x, (dim,), weight, 1e-6)
            return x * wide[0] + torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1) * wide[1]

        def eager() -> Tensor:
            query, key, value = qkv.view(num_tokens, -1, dim).split([heads, groups, groups], dim=1)
            cache[0, 0, :, :num_tokens] = turned(key, norms[1]).transpose(0, 1)
            cache[1, 0, :, :num_tokens] = value.transpose(0, 1)
            return turned(query, norms[0])

        return Candidates(
            lambda: qkv_rope_append(qkv, cos, sin, cache, rows, slots, norms=norms),
            {"torch": eager},
        )

    num_bytes = 2 * num_tokens * width * itemsize + num_tokens * (4 * dim + 16)
    num_flops = 7 * num_tokens * (heads + groups) * dim
    return Case("qkv_rope_append", f"N{num_tokens}-H{heads}-G{groups}-D{dim}", num_bytes,
                num_flops, make)  # fmt: skip


def gated_lora_case(num_tokens: int, width: int, out: int, rank: int, itemsize: int) -> Case:
    """One adapter on all tokens but the first."""

    def make(maker: Maker) -> Candidates:
        base, x = maker.normal(num_tokens, out), maker.normal(num_tokens, width)
        a, b = maker.normal(1, rank, width), maker.normal(1, out, rank)
        ids = torch.zeros(num_tokens, dtype=torch.int32, device=maker.device)
        ids[0] = -1
        down, up = a[0].T.contiguous(), b[0].T.contiguous()
        return Candidates(
            lambda: gated_lora(base, x, a, b, ids),
            {"torch, all tokens": lambda: base + x @ down @ up},
        )

    num_bytes = (num_tokens * (2 * out + width) + rank * (width + out)) * itemsize
    num_flops = 2 * num_tokens * rank * (width + out)
    name = f"N{num_tokens}-I{width}-O{out}-R{rank}"
    return Case("gated_lora", name, num_bytes, num_flops, make)


def linear_case(num_tokens: int, width: int, out: int, itemsize: int) -> Case:
    """A product whose rows do not depend on their number, against the vendor's."""

    def make(maker: Maker) -> Candidates:
        x, weight = maker.normal(num_tokens, width), maker.normal(out, width)
        return Candidates(lambda: linear(x, weight, None), {"torch": lambda: F.linear(x, weight)})

    num_bytes = (out * width + num_tokens * (width + out)) * itemsize
    name = f"N{num_tokens}-I{width}-O{out}"
    return Case("linear", name, num_bytes, 2 * num_tokens * width * out, make)


def logits_stats_case(num_rows: int, vocab: int, itemsize: int, bar: float | None = None) -> Case:
    """All statistics of some rows of logits."""

    def make(maker: Maker) -> Candidates:
        logits = maker.normal(num_rows, vocab)

        def call() -> Any:
            return logits_stats(logits)

        others = {"torch": by_reference("logits_stats", call), "argmax": lambda: logits.argmax(-1)}
        return Candidates(call, others)

    name = f"N{num_rows}-V{vocab}"
    num_bytes, num_flops = num_rows * vocab * itemsize, 11 * num_rows * vocab
    return Case("logits_stats", name, num_bytes, num_flops, make, bar)


def verify_case(batch: int, drafted: int, vocab: int, rule: str, itemsize: int) -> Case:
    """Drafts drawn from laws of their own."""

    def make(maker: Maker) -> Candidates:
        target = maker.normal(batch, drafted + 1, vocab)
        draft = target[:, :drafted] + maker.normal(batch, drafted, vocab) / 4
        tokens = draft.argmax(-1)
        counts = torch.full((batch,), drafted, device=maker.device)
        uniforms = maker.uniform(batch, drafted + 1)

        def call() -> Any:
            return verify(target, tokens, counts, uniforms, draft_logits=draft, rule=rule)  # type: ignore[arg-type]

        return Candidates(call, {"torch": by_reference("verify", call)}, ("torch",))

    again = 2 if rule == "rejection" else 2 * drafted
    num_bytes = batch * vocab * itemsize * (2 * drafted + 1 + again)
    name = f"B{batch}-K{drafted}-V{vocab}-{rule}"
    return Case("verify", name, num_bytes, num_bytes // itemsize * 5, make)


def sample_case(num_rows: int, vocab: int, truncated: bool, itemsize: int) -> Case:
    """One token per row; against softmax and a race of exponentials, or a sort."""

    def make(maker: Maker) -> Candidates:
        logits, uniforms = maker.normal(num_rows, vocab), maker.uniform(num_rows)
        options: dict[str, Any] = {"top_k": 50, "top_p": 0.9} if truncated else {}

        def call() -> Any:
            return sample(logits, uniforms, temperature=0.8, **options)

        def race() -> Tensor:
            law = (logits.float() / 0.8).softmax(-1)
            return (law / torch.empty_like(law).exponential_(1)).argmax(-1)

        others = {"torch, a sort": by_reference("sample", call)} if truncated else {"torch": race}
        return Candidates(call, others)

    name = f"N{num_rows}-V{vocab}" + ("-k50-p0.9" if truncated else "")
    num_bytes = num_rows * vocab * itemsize
    return Case("sample", name, num_bytes, 0, make)


def philox_case(num_rows: int, count: int) -> Case:
    """Uniform numbers of a step."""

    def make(maker: Maker) -> Candidates:
        seeds, offsets = maker.integers(2**40, num_rows), maker.integers(2**20, num_rows)
        return Candidates(
            lambda: philox(seeds, offsets, count),
            {
                "torch": lambda: torch.rand(
                    num_rows, count, dtype=torch.float64, device=maker.device
                )
            },
        )

    return Case("philox", f"B{num_rows}-n{count}", num_rows * (16 + 8 * count), 0, make)


def cache_gather_case(layers: int, groups: int, dim: int, moved: int, itemsize: int) -> Case:
    """An accepted path of every second token of a tree."""

    def make(maker: Maker) -> Candidates:
        data = maker.normal(layers, 2, 1, groups, 64 + 2 * moved, dim)
        rows, starts = (torch.full((1,), n, device=maker.device) for n in (0, 32))
        keep = torch.arange(1, 2 * moved, 2, device=maker.device)[None]

        def call() -> Any:
            cache_gather(data, rows, starts, keep)

        return Candidates(call, {"torch": by_reference("cache_gather", call)}, ("torch",))

    num_bytes = 4 * moved * layers * groups * dim * itemsize
    return Case("cache_gather", f"L{layers}-G{groups}-D{dim}-M{moved}", num_bytes, 0, make)


def small_cases(is_dry: bool, itemsize: int) -> Iterable[Case]:
    """Return the cases of everything but attention."""
    if is_dry:
        yield rms_norm_case(2, 64, itemsize)
        yield swiglu_case(2, 64, itemsize)
        yield qkv_case(2, 4, 2, 16, itemsize)
        yield gated_lora_case(2, 32, 32, 4, itemsize)
        yield linear_case(2, 32, 48, itemsize)
        yield logits_stats_case(2, 300, itemsize, bar=0.85)
        yield verify_case(1, 2, 100, "rejection", itemsize)
        yield verify_case(1, 2, 100, "block", itemsize)
        yield sample_case(1, 100, truncated=True, itemsize=itemsize)
        yield philox_case(2, 4)
        yield cache_gather_case(1, 1, 16, 3, itemsize)
        return
    for num_tokens in (1, 8, 32, 1024):
        yield rms_norm_case(num_tokens, 4096, itemsize)
        yield swiglu_case(num_tokens, 14_336, itemsize)
        yield qkv_case(num_tokens, 32, 8, 128, itemsize)
    for num_tokens in (9, 64):
        yield gated_lora_case(num_tokens, 4096, 6144, 32, itemsize)
        yield gated_lora_case(num_tokens, 14_336, 4096, 32, itemsize)
    for num_tokens in (1, 8, 32, 512):
        yield linear_case(num_tokens, 4096, 28_672, itemsize)
        yield linear_case(num_tokens, 576, 49_152, itemsize)
    for vocab in (49_152, 151_936):
        for num_rows in (1, 8, 64):
            yield logits_stats_case(num_rows, vocab, itemsize)
        # Large enough for bandwidth to be all that counts: two launches take about 5 us.
        yield logits_stats_case(1024, vocab, itemsize, bar=0.85)
        for rule in ("rejection", "block"):
            yield verify_case(8, 7, vocab, rule, itemsize)
        for num_rows in (1, 8, 64):
            yield sample_case(num_rows, vocab, truncated=False, itemsize=itemsize)
        yield sample_case(8, vocab, truncated=True, itemsize=itemsize)
    yield philox_case(8, 16)
    yield cache_gather_case(32, 8, 128, 8, itemsize)
