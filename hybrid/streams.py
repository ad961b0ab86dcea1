"""`RandomStream`: the random numbers of one request, the same on every device.

Philox4x32-10 (Salmon et al. 2011, doi:10.1145/2063384.2063405): number i is a function of (seed, i)
alone. So the host draws single numbers here, kernels/philox many of them on the device, and both
get the same ones. Next: hybrid/sampling.py.
"""

from __future__ import annotations

from hybrid.errors import ConfigError

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WORD = 0xFFFFFFFF
_NUM_ROUNDS = 10
# The keys of the rounds: the seed's two words, plus these.
_WEYL = tuple(((i * 0x9E3779B9) & _WORD, (i * 0xBB67AE85) & _WORD) for i in range(_NUM_ROUNDS))


class RandomStream:
    """Numbers of a seed, one after the other; a row's own, so that no other row can change them.

    Attributes:
        seed: below 2**63; another seed is another stream.
        offset: index of the number that comes next.
    """

    __slots__ = ("offset", "seed")

    def __init__(self, seed: int, offset: int = 0) -> None:
        """Begin at a number of a stream.

        Raises:
            ConfigError: a seed or an offset that int64 cannot hold.
        """
        for name, value in (("seed", seed), ("offset", offset)):
            if not 0 <= value < 2**63:
                raise ConfigError(f"{name}: got {value}, expected 0 to 2**63 - 1.")
        self.seed, self.offset = seed, offset

    def take(self, count: int) -> int:
        """Reserve the next `count` numbers for the caller; return the offset of the first."""
        first = self.offset
        self.offset += count
        return first

    def uniform(self) -> float:
        """Draw the next number in [0, 1), a multiple of 2**-53."""
        return uniform_at(self.seed, self.take(1))


def uniform_at(seed: int, index: int) -> float:
    """Return number `index` of a seed's stream, the bits of `hybrid.kernels.philox`."""
    first, second = _MULTIPLIERS
    key0, key1 = seed & _WORD, seed >> 32
    c0, c1, c2, c3 = index & _WORD, index >> 32, 0, 0
    for step0, step1 in _WEYL:
        low, high = first * c0, second * c2
        c0, c1 = (high >> 32) ^ c1 ^ ((key0 + step0) & _WORD), high & _WORD
        c2, c3 = (low >> 32) ^ c3 ^ ((key1 + step1) & _WORD), low & _WORD
    return ((c0 >> 5) * 2**26 + (c1 >> 6)) * 2.0**-53
