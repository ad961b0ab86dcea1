"""Attention of new tokens over a dense cached prefix and a masked local part."""

from hybrid.kernels.block_attention.reference import (
    KEY_TILE,
    ROW_TILE,
    block_attention,
    dense_mask_attention,
    token_attention,
)

__all__ = ["KEY_TILE", "ROW_TILE", "block_attention", "dense_mask_attention", "token_attention"]
