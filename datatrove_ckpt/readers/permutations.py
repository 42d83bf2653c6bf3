"""Shuffled orders that depend on a seed only, not on the version of Python, numpy or xxhash.

Numbers are sorted by their XXH3 hash. Single hashes of millions of numbers take seconds, so all are computed at once,
by the formula of XXH3 for 4 to 8 bytes with a seed (doc/xxhash_spec.md of xxHash).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

_MASK = 2**64 - 1
_SECRET = 0x1CAD21F72C81017C ^ 0xDB979083E96DD4DE  # bytes 8 to 16 and 16 to 24 of the default secret
_PRIME = np.uint64(0x9FB21C651E98DF25)
_LENGTH = np.uint64(8)
_AT_ONCE = 2**20
"""Numbers that are hashed together: what is needed beside the result stays below 40 MB."""


def permutation(count: int, seed: int, *key: object) -> npt.NDArray[np.int64]:
    """The numbers below ``count`` in an order that depends on the arguments only."""
    salt = int(xxh3_64_intdigest("/".join(map(str, (seed, *key))).encode()))
    hashes = np.empty(count, dtype=np.uint64)
    for start in range(0, count, _AT_ONCE):
        numbers = np.arange(start, min(start + _AT_ONCE, count), dtype=np.uint64)
        hashes[start : start + len(numbers)] = hash_numbers(numbers, salt)
    # This hash of 8 bytes is a bijection, so no two are equal, and any way of sorting gives the same order.
    return np.argsort(hashes)


def hash_numbers(numbers: npt.NDArray[np.uint64], salt: int) -> npt.NDArray[np.uint64]:
    """XXH3 (64 bits) of each number as 8 little-endian bytes, with ``salt`` as the seed."""
    low_bytes = int.from_bytes((salt & 0xFFFFFFFF).to_bytes(4, "little"), "big")
    flip = (_SECRET - (salt ^ (low_bytes << 32))) & _MASK
    halves_swapped = (numbers >> np.uint64(32)) | (numbers << np.uint64(32))
    mixed = halves_swapped ^ np.uint64(flip)
    mixed ^= _rotated(mixed, 49) ^ _rotated(mixed, 24)
    mixed *= _PRIME
    mixed ^= (mixed >> np.uint64(35)) + _LENGTH
    mixed *= _PRIME
    return mixed ^ (mixed >> np.uint64(28))


def _rotated(numbers: npt.NDArray[np.uint64], bits: int) -> npt.NDArray[np.uint64]:
    return (numbers << np.uint64(bits)) | (numbers >> np.uint64(64 - bits))
