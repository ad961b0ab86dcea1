"""`KernelPass`: the operations of a pass on the kernels. It reads tensors alone.

`prepare` turns what Python knows of a pass into one list of numbers and a `Launch`, which says how
kernels are started. From there on a pass is a function of tensors, so a GPU may record it.
Next: hybrid/models/graphs.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.attention.pattern import AttentionPattern, causal
from hybrid.cache.kv_cache import KVCache
from hybrid.carried import Carried
from hybrid.kernels.hybrid_attention import Layout, hybrid_attention, lay_out
from hybrid.kernels.qkv_rope_append import qkv_rope_append
from hybrid.kernels.rms_norm import rms_norm
from hybrid.kernels.swiglu import swiglu
from hybrid.models.graphs import CARRIED, bucket, reach_bucket
from hybrid.models.joint_pass import JointPass, can_join
from hybrid.models.passes import OF_TOKENS, Operations, Plan, run_pass
from hybrid.models.weights import Layer
from hybrid.protocols import ForwardOutput
from hybrid.types import Write

if TYPE_CHECKING:
    from hybrid.models.transformer import NativeBackbone

MAX_HEAD_DIM, MAX_WIDTH = 256, 16384  # of hybrid_attention and rms_norm
NUMBERS, POSITIONS, SLOT_POSITIONS = "numbers", "positions", "slot_positions"


class KernelPass(Operations):
    """What all layers of one pass share, as tensors."""

    def __init__(
        self,
        backbone: NativeBackbone,
        data: Tensor,
        layout: Layout,
        write: Write,
        numbers: Tensor,
        position_ids: Tensor,
    ) -> None:
        """Begin a pass.

        Args:
            backbone: whose layers it runs.
            data: of the cache, [L, 2, rows, G, S, D].
            layout: who sees whom; a row that is there to fill up the batch has cache row -1.
            write: where keys go.
            numbers: of the layout.
            position_ids: [B, T].
        """
        self._spec, self._data = backbone.spec, data
        visible = layout.place(numbers)
        # A row without a cache row writes nothing. What it reads is nobody's output.
        self._visible = replace(visible, table=visible.table.clamp(min=0))
        self._rows = visible.table.expand(-1, layout.num_tokens).flatten()
        self._has_window = write != Write.REFRESH
        # A prefill is the same pass in every strategy; verification is as wide as the draft.
        self._by_position = backbone.exact and write == Write.SCRATCH
        places = position_ids
        if write != Write.REFRESH:
            offsets = torch.arange(layout.num_tokens, device=data.device, dtype=torch.int32)
            places = visible.start[:, None] + offsets
        self._places = places.flatten()
        cos, sin = backbone.rotation(position_ids, write)
        self._cos, self._sin = cos.flatten(0, 1), sin.flatten(0, 1)
        scale = backbone.rope.query_scale(position_ids)
        self._query_scale = None if scale is None else scale.flatten()

    def norm(self, x: Tensor, weight: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the norm of x + update, and the sum, in one pass over both."""
        return rms_norm(x, weight, self._spec.norm_eps, update)

    def attend(self, layer: Layer, index: int, qkv: Tensor) -> Tensor:
        """Rotate, write K/V to the cache, attend. qkv: [B*T, (H + 2G) D] -> [B*T, H D]."""
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = layer.q_norm, layer.k_norm
        query = qkv_rope_append(
            qkv,
            self._cos,
            self._sin,
            self._data[index],
            self._rows,
            self._places,
            norms=norms,
            eps=self._spec.norm_eps,
            query_scale=self._query_scale,
        )
        out = hybrid_attention(
            query.view(self._visible.batch, -1, *query.shape[1:]),
            self._data[index, 0],
            self._data[index, 1],
            self._visible,
            # Of refreshed tokens it is said how far they see, and nothing else.
            window=layer.window if self._has_window else None,
            by_position=self._by_position,
        )
        return out.flatten(0, 1).flatten(1)

    def beside(self, slots: Operations, plan: Plan, num_rows: int) -> Operations | None:
        """Return what reads the weights of both once, where their layers share them."""
        assert plan.slots is not None
        base, own, first = plan.layers.part, plan.slots.layers.part, plan.slots.first
        return (
            JointPass(self, slots, own, num_rows) if can_join(base[first:], own[first:]) else None
        )

    def mlp(self, layer: Layer, x: Tensor) -> Tensor:
        """Return what the MLP of a layer, and its experts, make of normed x [N, C]."""
        update = layer.down(swiglu(layer.gate_up(x)))
        return update if layer.experts is None else update + layer.experts(x)


@dataclass(frozen=True, slots=True)
class Launch:
    """How the kernels of a pass are started, whatever its numbers are.

    Attributes:
        write: where keys go.
        tokens: who sees whom.
        slots: likewise of those that ride along, or None.
    """

    write: Write
    tokens: Layout
    slots: Layout | None

    def reaching(self, room: int) -> Launch:
        """Return a launch for rows of other lengths, too, in a cache of `room` positions."""
        tokens, slots = (
            None if own is None else replace(own, max_end=reach_bucket(own.max_end, room))
            for own in (self.tokens, self.slots)
        )
        assert tokens is not None
        return Launch(self.write, tokens, slots)


def prepare(
    pattern: AttentionPattern,
    cache: KVCache,
    rows: Sequence[int],
    write: Write,
    carried: Carried | None,
    batch: int,
    width: int,
) -> tuple[Launch, list[int]]:
    """Describe a pass: how kernels are started, and the numbers that they read.

    Args:
        pattern: who sees whom.
        cache: of all rows.
        rows: cache row of each batch row.
        write: where keys go.
        carried: what rides along.
        batch: B, or more: rows that write nothing and see nothing fill it up.
        width: T, or more in a causal pass: nobody sees the tokens that fill it up, and slots write
            their keys over those of them.
    """
    wide = pattern
    if width > pattern.num_tokens:
        wide = causal([pattern.row_prefix(b) for b in range(len(rows))], width)
    tokens, numbers = _lay_out(wide, cache, rows, write, 0, batch)
    slots = None
    if carried is not None:
        before = pattern.num_tokens
        slots, more = _lay_out(carried.pattern, cache, rows, Write.SCRATCH, before, batch)
        numbers += more
    return Launch(write, tokens, slots), numbers


def _lay_out(
    pattern: AttentionPattern,
    cache: KVCache,
    rows: Sequence[int],
    write: Write,
    num_before: int,
    batch: int,
) -> tuple[Layout, list[int]]:
    """Describe tokens whose keys follow `num_before` others of the same pass."""
    num_tokens, num_missing = pattern.num_tokens, batch - len(rows)
    prefixes = [[p] * num_tokens if isinstance(p, int) else p for p in pattern.prefix_len]
    local: Tensor | None = pattern.local
    start = [cache.lengths[row] + num_before for row in rows]
    if write == Write.REFRESH:  # their keys are among those that they see
        local, start = None, [max(own) for own in prefixes]
    elif pattern.local.ndim == 3 and num_missing:
        hidden = pattern.local.new_zeros(num_missing, num_tokens, num_tokens)
        local = torch.cat([pattern.local, hidden])
    nothing = [[0] * num_tokens] * num_missing
    positions = None if pattern.positions is None else [*pattern.positions, *nothing]
    return lay_out(
        [*prefixes, *nothing],
        local,
        start=[*start, *[0] * num_missing],
        rows=[*rows, *[-1] * num_missing],
        is_causal=pattern.is_causal,
        is_full=pattern.is_full,
        positions=positions,
        num_tokens=num_tokens,
    )


def run_on_kernels(
    backbone: NativeBackbone,
    plan: Plan,
    tensors: Mapping[str, Tensor],
    pattern: AttentionPattern,
    cache: KVCache,
    rows: Sequence[int],
    position_ids: Tensor,
    write: Write,
    carried: Carried | None,
) -> ForwardOutput:
    """Run a pass, recorded where the backbone records; the arguments are those of `forward`.

    Args:
        backbone: whose layers it runs.
        plan: what it does.
        tensors: of `named_tensors`.
        pattern: who sees whom.
        cache: of all rows.
        rows: cache row of each batch row.
        position_ids: [B, T].
        write: where keys go.
        carried: what rides along.
    """
    batch, graphs = len(rows), backbone.graphs
    if write == Write.COMMIT or not backbone.reads_nothing_back:
        graphs = None
    num_rows, num_tokens = batch, pattern.num_tokens
    width = num_tokens
    if graphs is not None:
        num_rows = bucket(batch)
        # Logits may be counted from the last token, and an adapter's gate counts tokens.
        if not plan.num_logits and plan.layers.part is backbone.layers:
            width = _width(pattern, cache, rows, write)
    launch, numbers = prepare(pattern, cache, rows, write, carried, num_rows, width)
    given = {**tensors, POSITIONS: position_ids}
    if width > num_tokens:
        for name in given.keys() & {*OF_TOKENS, POSITIONS}:
            given[name] = _filled_up(given[name], width, 1)
    if carried is not None:
        given[SLOT_POSITIONS] = carried.position_ids
    if num_rows > batch:
        given = {name: _filled_up(tensor, num_rows, 0) for name, tensor in given.items()}
    # Waits for nothing, and is safe: what is not pinned the driver copies before it returns.
    on_host = torch.tensor(numbers, dtype=torch.int32)
    given[NUMBERS] = on_host.to(backbone.device, non_blocking=True)
    if graphs is None:
        return _run(backbone, cache.data, plan, launch, given)
    launch = launch.reaching(cache.data.shape[4])
    function = partial(_run, backbone, cache.data, plan, launch)

    def crop(name: str, tensor: Tensor) -> Tensor:
        tensor = tensor[:batch]
        return tensor if name == CARRIED else tensor[:, :num_tokens]

    return graphs.run(cache.data, (plan, launch), function, given, crop)


def _run(
    backbone: NativeBackbone,
    data: Tensor,
    plan: Plan,
    launch: Launch,
    tensors: Mapping[str, Tensor],
) -> ForwardOutput:
    """Run a pass. It reads its tensors, weights and `data`, and nothing back from the device."""
    layouts = [layout for layout in (launch.tokens, launch.slots) if layout is not None]
    numbers = torch.split(tensors[NUMBERS], [layout.size for layout in layouts])
    tokens = KernelPass(backbone, data, launch.tokens, launch.write, numbers[0], tensors[POSITIONS])
    slots = None
    if launch.slots is not None:
        places = tensors[SLOT_POSITIONS]
        slots = KernelPass(backbone, data, launch.slots, Write.SCRATCH, numbers[1], places)
    return run_pass(backbone, plan, tensors, tokens, slots)


def _width(pattern: AttentionPattern, cache: KVCache, rows: Sequence[int], write: Write) -> int:
    """Return the tokens of a row that a record has for a pass, T where none may be added.

    Behind a causal pass there may be more, as far as the cache has places for their keys.
    """
    is_ordinary = pattern.positions is None and all(isinstance(p, int) for p in pattern.prefix_len)
    if not (pattern.is_causal and is_ordinary) or write == Write.REFRESH:
        return pattern.num_tokens
    width = bucket(pattern.num_tokens)
    fits = max(cache.lengths[row] for row in rows) + width <= cache.data.shape[4]
    return width if fits else pattern.num_tokens


def _filled_up(tensor: Tensor, count: int, dim: int) -> Tensor:
    """Return a tensor [B, T, ...] with zeros behind it, so that dimension 0 or 1 has `count`."""
    missing = [0, 0] * (tensor.ndim - dim - 1) + [0, count - tensor.shape[dim]]
    return F.pad(tensor, missing)
