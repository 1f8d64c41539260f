"""Compute random numbers and permutations as pure functions of integers, by hashing.

The sample order and augmentation can compute any random number without computing earlier ones. This
module implements its own hash, because libraries do not guarantee stable random streams.
`tests/data/golden_order.json` and `tests/data/augment/golden_draws.json` contain expected results.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

U64 = np.uint64
CHUNK_NUMBERS = 1 << 16
"""The number of integers that are hashed at a time, so few that they fit into a core's cache."""


def hash64(values: ArrayLike) -> NDArray[np.uint64]:
    """Hash 64-bit integers of any shape like SplitMix64's output function (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        x = np.asarray(values, dtype=U64) + U64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> U64(30))) * U64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> U64(27))) * U64(0x94D049BB133111EB)
        return x ^ (x >> U64(31))


def fold(*parts: ArrayLike) -> NDArray[np.uint64]:
    """Combine integers or arrays, broadcast together, into hash keys that depend on their order."""
    key: NDArray[np.uint64] = np.zeros((), dtype=U64)
    for part in parts:
        key = hash64(key ^ hash64(np.asarray(part).astype(U64)))
    return key


def fold_numbers(
    key_of: Callable[[NDArray[np.integer]], NDArray[np.uint64]], numbers: NDArray[np.integer]
) -> NDArray[np.uint64]:
    """Return `key_of(numbers)`, computed in chunks, because `fold` needs five times as much memory
    as its result."""
    keys = np.empty(len(numbers), U64)
    for start in range(0, len(numbers), CHUNK_NUMBERS):
        chunk = slice(start, start + CHUNK_NUMBERS)
        keys[chunk] = key_of(numbers[chunk])
    return keys


def are_ranked(keys: NDArray[np.uint64], first: int, end: int) -> NDArray[np.bool_]:
    """Return a mask of the distinct `keys` whose ranks in ascending order are in [first, end)."""
    lowest, highest = np.partition(keys, [first, end - 1])[[first, end - 1]]
    return (keys >= lowest) & (keys <= highest)


def uniform(key: ArrayLike, *index: ArrayLike) -> NDArray[np.float64]:
    """Return a uniform number in [0, 1) with 53 random bits for each (key, *index). Arguments are
    broadcast."""
    return (fold(key, *index) >> U64(11)).astype(np.float64) * 2.0**-53


class Permutation:
    """A keyed permutation of range(n) in O(1) memory: a six-round Feistel network.

    The network permutes range(m), where m is a power of four and at least n. Values of n and above
    are permuted again ("cycle walking").
    """

    def __init__(self, n: int, key: ArrayLike, rounds: int = 6):
        bits = max(2, (n - 1).bit_length())
        self.n = n
        self.half = U64((bits + 1) // 2)
        self.mask = U64((1 << ((bits + 1) // 2)) - 1)
        self.keys = fold(key, np.arange(rounds))

    def __call__(self, positions: ArrayLike) -> NDArray[np.int64]:
        """Map positions in [0, n), of any shape, to distinct values in [0, n)."""
        out = np.array(positions, dtype=U64)
        todo = np.ones(out.shape, dtype=bool)
        # The range has at most 4 n values, so each value is expected to need at most four passes.
        while todo.any():
            left, right = out[todo] >> self.half, out[todo] & self.mask
            for key in self.keys:
                left, right = right, left ^ (hash64(right ^ key) & self.mask)
            out[todo] = (left << self.half) | right
            todo[todo] = out[todo] >= U64(self.n)
        return out.astype(np.int64)
