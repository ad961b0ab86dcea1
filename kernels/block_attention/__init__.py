"""Attention of new tokens over a dense cached prefix and a masked local part."""

from hybrid.kernels.block_attention.reference import block_attention, dense_mask_attention

__all__ = ["block_attention", "dense_mask_attention"]
