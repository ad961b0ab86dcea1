"""Philox4x32-10 in plain PyTorch; 32-bit words live in int64."""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD, _HALF = 0xFFFFFFFF, 0xFFFF
_NUM_ROUNDS = 10


def philox_reference(seeds: Tensor, offsets: Tensor, count: int) -> Tensor:
    """Return uniform numbers; see `philox`."""
    at = offsets[:, None] + torch.arange(count, device=offsets.device)
    key = seeds[:, None].expand_as(at)
    zero = torch.zeros_like(at)
    words = philox_words(
        (at & _WORD, (at >> 32) & _WORD, zero, zero), (key & _WORD, (key >> 32) & _WORD)
    )
    return ((words[0] >> 5) * 2**26 + (words[1] >> 6)).double() * 2.0**-53


def philox_words(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the four words of the block cipher.

    Args:
        counter: four int64 tensors of 32-bit words.
        key: two of them.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def _multiply(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and the low word of the product, without leaving int64."""
    low, high = (factor & _HALF) * word, (factor >> 16) * word
    middle = high + (low >> 16)
    return middle >> 16, ((middle & _HALF) << 16) | (low & _HALF)
