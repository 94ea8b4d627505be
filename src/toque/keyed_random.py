"""Keyed random numbers and permutations: data order and seeds without stored state.

The data order is independent of the number of ranks and workers. Looking up a position takes the
same time anywhere in the order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

GOLDEN = 0x9E3779B97F4A7C15
"""SplitMix64's increment: 2^64 divided by the golden ratio."""
_ROUNDS = 6
"""Number of rounds of the Feistel network."""
_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """Apply SplitMix64's output function to a 64-bit number (Steele et al. 2014).

    >>> mix(0) != mix(1)
    True
    """
    z = (value + GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def key_of(*parts: int) -> int:
    """Combine several integers into a 64-bit key. The order of the parts matters.

    >>> key_of(17, 0) != key_of(0, 17)
    True
    """
    key = 0
    for part in parts:
        key = mix(key ^ mix(part & _MASK))
    return key


def keys_of(key: int, *parts: NDArray[np.integer] | int) -> U64:
    """Extend a key of `key_of` by further parts, which may be arrays.

    >>> keys_of(key_of(17), np.array([0, 1]), 5).tolist() == [key_of(17, 0, 5), key_of(17, 1, 5)]
    True
    """
    keys = np.array([key], np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            keys = _mix_array(keys ^ _mix_array(np.atleast_1d(part).astype(np.uint64)))
    return keys


def mixed(values: U64) -> U64:
    """Apply SplitMix64's finaliser: every output bit depends on every input bit."""
    shifted = values >> np.uint64(30)
    values = values ^ shifted
    values *= np.uint64(0xBF58476D1CE4E5B9)
    np.right_shift(values, np.uint64(27), out=shifted)
    values ^= shifted
    values *= np.uint64(0x94D049BB133111EB)
    np.right_shift(values, np.uint64(31), out=shifted)
    values ^= shifted
    return values


def _mix_array(values: U64) -> U64:
    return mixed(values + np.uint64(GOLDEN))


def shuffle(n: int, *, key: int) -> NDArray[np.int64]:
    """Return 0..n-1 in a pseudo-random order: sorted by a hash of (key, number).

    Use it for sets that are small enough to sort. `permute` computes single positions.
    """
    (order,) = shuffles(np.array([n]), np.array([key], np.uint64))
    return np.asarray(order)


def shuffles(sizes: NDArray[np.int64], keys: U64) -> NDArray[np.int64]:
    """Shuffle several sets, each like `shuffle`. Shape [sets, max(sizes)].

    The row of a smaller set ends with the remaining numbers, from the set's size upwards.
    """
    numbers = np.arange(int(sizes.max(initial=0)), dtype=np.uint64)
    with np.errstate(over="ignore"):
        hashes = _mix_array(numbers ^ keys[:, None])
    # The largest value sorts the numbers outside a set to the end.
    hashes[numbers >= sizes[:, None].astype(np.uint64)] = _MASK
    return np.argsort(hashes, axis=1, kind="stable")


def permute(positions: NDArray[np.int64], *, n: int, key: int) -> NDArray[np.int64]:
    """Map `positions` by a pseudo-random permutation of 0..n-1 that depends on the key.

    The permutation is a balanced Feistel network over the smallest even number of bits that can
    represent n. It is repeated until the image is below n (cycle walking: Black & Rogaway 2002).

    >>> sorted(permute(np.arange(5), n=5, key=1).tolist())
    [0, 1, 2, 3, 4]
    """
    half_bits = max(1, ((max(n, 2) - 1).bit_length() + 1) // 2)
    half, low = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    keys = [np.uint64(key_of(key, r)) for r in range(_ROUNDS)]

    def permute_once(values: U64) -> U64:
        """Permute the numbers of 2 * half_bits bits."""
        left, right = values >> half, values & low
        for round_key in keys:
            mix = _mix_array(right ^ round_key)
            mix &= low
            mix ^= left
            left, right = right, mix
        return (left << half) | right

    with np.errstate(over="ignore"):
        image = permute_once(positions.astype(np.uint64))
        outside = image >= n
        while outside.any():
            image[outside] = permute_once(image[outside])
            outside = image >= n
    return image.astype(np.int64)
