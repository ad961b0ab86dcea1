"""The public kernel operations, re-exported."""

from hybrid.kernels.block_attention import block_attention
from hybrid.kernels.linear import linear

__all__ = ["block_attention", "linear"]
