"""Attention masks of training passes, as pure functions of indices.

Every mask is boolean, [T, T] or [B, T, T], True where the query (second to last axis) sees the key.
No row is empty: a token sees at least itself. Training passes run without a cache, so these are
whole masks; the patterns of decoding, over a cached prefix, are in hybrid/attention/pattern.py.
Next: hybrid/training/trainable.py.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hybrid.errors import ConfigError


def block_ids(length: int, block_size: int, prompt_length: int | None = None) -> Tensor:
    """Return the block of each position, [T], never falling.

    Args:
        length: T.
        block_size: positions per block.
        prompt_length: the prompt is block 0, whatever its length, and blocks are counted from its
            end (LLaDA, Dream, D2F, Nemotron); None counts from position 0 and lets prompt and
            response share a block (SDAR, LLaDA2).
    """
    if block_size < 1:
        raise ConfigError(f"block_size: got {block_size}, expected at least 1.")
    index = torch.arange(length)
    if prompt_length is None:
        return index // block_size
    return torch.where(index < prompt_length, 0, (index - prompt_length) // block_size + 1)


def full(length: int) -> Tensor:
    """Everything sees everything: the bidirectional teacher."""
    return torch.ones(length, length, dtype=torch.bool)


def causal(length: int) -> Tensor:
    """Each token sees itself and what is before it: the autoregressive model."""
    return full(length).tril_()


def block_causal(blocks: Tensor) -> Tensor:
    """A token sees its own block and the blocks before it.

    Args:
        blocks: [T], see `block_ids`.
    """
    return blocks[:, None] >= blocks[None, :]


def noisy_clean(blocks: Tensor, clean: Literal["causal", "block-causal"] = "causal") -> Tensor:
    """Return the mask of one pass over `[noisy | clean]`, [2T, 2T].

    A noisy token sees the noisy tokens of its own block and the clean tokens of the blocks before
    it. A clean token sees clean tokens only. Block diffusion, arXiv:2503.09573.

    Args:
        blocks: [T], see `block_ids`; both halves have the same.
        clean: "causal" makes the clean half autoregressive (Nemotron, TiDAR): its logits are those
            of a plain causal pass, so the model can verify its own drafts. "block-causal" is SDAR.
    """
    before = blocks[:, None] > blocks[None, :]
    same = blocks[:, None] == blocks[None, :]
    history = causal(len(blocks)).to(blocks.device) if clean == "causal" else before | same
    noisy_rows = torch.cat([same, before], dim=1)
    clean_rows = torch.cat([torch.zeros_like(same), history], dim=1)
    return torch.cat([noisy_rows, clean_rows])


def anchored_drafts(length: int, anchors: Tensor, width: int, *, bidirectional: bool) -> Tensor:
    """Return the mask of one pass over a clean sequence and draft blocks behind some of its tokens.

    The pass is `[clean | block of anchor 0 | block of anchor 1 | ...]`; a block begins with a copy
    of its anchor. It sees the clean tokens before the anchor and itself.

    Args:
        length: T clean tokens, causal among themselves.
        anchors: [A] positions in the clean sequence.
        width: positions per block, the anchor's copy included.
        bidirectional: inside a block everything sees everything (draft), else it is causal
            (verify).

    Returns:
        [T + A width, T + A width].
    """
    index = torch.arange(length, device=anchors.device)
    owner = torch.arange(len(anchors), device=anchors.device).repeat_interleave(width)
    offset = torch.arange(width, device=anchors.device).repeat(len(anchors))
    own = owner[:, None] == owner[None, :]
    if not bidirectional:
        own &= offset[:, None] >= offset[None, :]
    prefix = index[None, :] < anchors[owner][:, None]
    clean = index[:, None] >= index[None, :]
    clean_rows = torch.cat([clean, clean.new_zeros(length, len(owner))], dim=1)
    return torch.cat([clean_rows, torch.cat([prefix, own], dim=1)])


def hide_padding(mask: Tensor, real: Tensor) -> Tensor:
    """Return `mask` with the padding of each row hidden from its real tokens.

    A padding token sees itself alone, so that its softmax is defined; nobody reads its output.

    Args:
        mask: [T, T] or [B, T, T].
        real: [B, T], True for tokens that are not padding. For `noisy_clean` it is the same twice:
            `torch.cat([real, real], dim=1)`.

    Returns:
        [B, T, T].
    """
    visible = mask & real[:, None, :] & real[:, :, None]
    return visible | torch.diag_embed(~real)
