"""Rotary position embedding (RoFormer, arXiv:2104.09864) and the context extensions in use.

Knows positions and frequencies, not q and k: the caller rotates. The operations are in the order
transformers uses, so that far positions agree to the last bit. Next: hybrid/models/transformer.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from hybrid.errors import CheckpointError
from hybrid.models.spec import RopeSpec

_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


class Rope:
    """Cosines and sines of token positions.

    Computed directly: for one token that is cheaper than looking them up, and it needs neither a
    table nor a host sync to learn how long the table must be.

    Args:
        spec: from `parse_rope`.
        head_dim: D, even.
        device: where positions live.

    Attributes:
        dim: how many dimensions of a head are rotated, the first ones; D unless `spec` says less.
    """

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device | str) -> None:
        self.spec = spec
        self.dim = int(head_dim * spec.fraction)
        self.scale = _attention_factor(spec)
        self._exponents = torch.arange(0, self.dim, 2, device=device).float() / self.dim  # [D/2]
        self._inv_freq = _inverse_frequencies(spec, self._exponents)  # [D/2]

    def __call__(
        self, position_ids: Tensor, seq_len: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [B, T, D/2] float32.

        Rotate-half convention: (x1, x2) -> (x1 * cos - x2 * sin, x2 * cos + x1 * sin).

        Args:
            position_ids: [B, T].
            seq_len: [B, T] sequence length that "dynamic" scales for; other kinds ignore it. None
                is position + 1, what AR decoding sees. A prefill gives its total length.
        """
        inv_freq = self._inv_freq
        if self.spec.kind == "dynamic":
            inv_freq = self._dynamic(position_ids + 1 if seq_len is None else seq_len)
        angles = position_ids[..., None] * inv_freq
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.scale == 1 else (cos * self.scale, sin * self.scale)

    def take(self, inv_freq: Tensor) -> None:
        """Rotate by the frequencies of a model, which may have rounded them with its weights.

        Args:
            inv_freq: [D/2] of any dtype. "dynamic" computes its own at each length.
        """
        self._inv_freq = inv_freq.float()

    def query_scale(self, position_ids: Tensor) -> Tensor | None:
        """Return the factor [B, T] float32 on rotated queries, None when it is always 1.

        Llama 4 and Ministral 3 sharpen attention step by step beyond the trained context.
        """
        beta = self.spec.params.get("llama_4_scaling_beta")
        if not beta:
            return None
        steps = torch.floor(position_ids / self.spec.params["original_max_position_embeddings"])
        return 1 + beta * torch.log(1 + steps)

    def _dynamic(self, seq_len: Tensor) -> Tensor:
        """Return [B, T, D/2]: the base grows with the length beyond the trained context (NTK).

        Powers of a whole tensor round differently from powers of one number, so each length is
        computed by itself: a token's bits do not depend on the width of its pass.
        """
        lengths = seq_len.flatten().tolist()  # host sync, for this rare kind only
        rows = {length: self._at_length(length) for length in set(lengths)}
        return torch.stack([rows[length] for length in lengths]).view(*seq_len.shape, -1)

    def _at_length(self, seq_len: int) -> Tensor:
        factor, trained = self.spec.params["factor"], self.spec.max_seq_len
        length = torch.tensor(max(seq_len, trained), device=self._exponents.device)
        dim = 2 * len(self._exponents)
        growth = factor * length / trained - (factor - 1)
        base: Tensor = self.spec.theta * growth ** (dim / (dim - 2))
        return 1.0 / base**self._exponents


def parse_rope(config: Mapping[str, Any], *, may_be_partial: bool = False) -> RopeSpec:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (transformers 4).

    Args:
        config: a checkpoint's config; `max_position_embeddings` must be present.
        may_be_partial: the family's own code honours `partial_rotary_factor`.

    Raises:
        CheckpointError: an unknown kind, a missing or invalid number, a rotation that differs from
            layer to layer, or one of part of the head in a family that has none.
    """
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, Mapping) or any(isinstance(v, Mapping) for v in given.values()):
        raise CheckpointError(
            f"rope_parameters: got {given!r}, expected one flat table for all layers."
        )
    params = {k: v for k, v in given.items() if v is not None}
    kind = params.pop("rope_type", params.pop("type", "default"))
    params.pop("type", None)
    if kind not in _REQUIRED:
        raise CheckpointError(
            f"rope_parameters: got kind {kind!r}, expected one of {', '.join(_REQUIRED)}."
        )
    partial = params.pop("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    fraction = _positive("partial_rotary_factor", partial)
    if fraction > 1 or (fraction < 1 and not may_be_partial):
        expected = "at most 1" if may_be_partial else "1"
        raise CheckpointError(f"partial_rotary_factor: got {partial!r}, expected {expected}.")
    theta = _positive("rope_theta", params.pop("rope_theta", config.get("rope_theta") or 10000.0))
    max_seq_len = config["max_position_embeddings"]
    if "original_max_position_embeddings" in _REQUIRED[kind]:
        outer = config.get("original_max_position_embeddings")
        trained = outer or params.get("original_max_position_embeddings", max_seq_len)
        params["original_max_position_embeddings"] = trained
    if kind == "yarn" and "factor" not in params and "factor" in given:
        params["factor"] = max_seq_len / params["original_max_position_embeddings"]
    for key in _REQUIRED[kind]:
        if key not in params:
            raise CheckpointError(f"rope_parameters: {kind!r} needs {key!r}, got {sorted(params)}.")
        _positive(f"rope_parameters.{key}", params[key])
    if params.get("llama_4_scaling_beta"):
        for key in ("llama_4_scaling_beta", "original_max_position_embeddings"):
            _positive(f"rope_parameters.{key}", params.get(key))
    return RopeSpec(theta, kind, params, max_seq_len, fraction)


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise CheckpointError(f"{name}: got {value!r}, expected a number above 0.")
    return float(value)


def _inverse_frequencies(spec: RopeSpec, exponents: Tensor) -> Tensor:
    frequencies = spec.theta**exponents
    if spec.kind == "yarn":
        return _yarn(spec, frequencies)
    inv_freq = 1.0 / frequencies
    if spec.kind == "linear":
        return inv_freq / spec.params["factor"]
    if spec.kind == "llama3":
        return _llama3(spec.params, inv_freq)
    return inv_freq


def _llama3(params: Mapping[str, Any], inv_freq: Tensor) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, a ramp between."""
    factor, trained = params["factor"], params["original_max_position_embeddings"]
    low, high = params["low_freq_factor"], params["high_freq_factor"]
    wavelength = 2 * math.pi / inv_freq
    smooth = (trained / wavelength - low) / (high - low)
    ramp = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = torch.where(wavelength > trained / low, inv_freq / factor, ramp)
    return torch.where(wavelength < trained / high, inv_freq, scaled)


def _yarn(spec: RopeSpec, frequencies: Tensor) -> Tensor:
    """YaRN (arXiv:2309.00071) §3.2: interpolate slow dimensions, keep fast ones, a ramp between."""
    params, half = spec.params, len(frequencies)
    trained = params["original_max_position_embeddings"]

    def dimension(num_rotations: float) -> float:
        turns = trained / (num_rotations * 2 * math.pi)
        return 2 * half * math.log(turns) / (2 * math.log(spec.theta))

    low, high = dimension(params.get("beta_fast") or 32), dimension(params.get("beta_slow") or 1)
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    index = torch.arange(half, dtype=torch.float32, device=frequencies.device)
    keep = 1 - ((index - low) / (high - low)).clamp(0, 1)
    return 1.0 / (params["factor"] * frequencies) * (1 - keep) + 1.0 / frequencies * keep


def _attention_factor(spec: RopeSpec) -> float:
    """Return what cos and sin are multiplied with (YaRN §3.4: a softmax temperature)."""
    if spec.kind != "yarn":
        return 1.0
    params = spec.params
    if "attention_factor" in params:
        return float(params["attention_factor"])

    def mscale(weight: float) -> float:
        factor = params["factor"]
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if params.get("mscale") and params.get("mscale_all_dim"):
        return mscale(params["mscale"]) / mscale(params["mscale_all_dim"])
    return mscale(1)
