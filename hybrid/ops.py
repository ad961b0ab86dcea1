"""The public kernel operations, re-exported."""

from hybrid.kernels.block_attention import block_attention

__all__ = ["block_attention"]
