"""Random numbers as pure functions of their arguments, so that resuming a run needs no saved generator state."""

import hashlib
import math

import numpy as np


def derive_seed(*parts: str | int) -> int:
    """A seed for torch that depends only on `parts`."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def hash64(*parts: np.ndarray | int) -> np.ndarray:
    """An elementwise uint64 hash of `parts`: splitmix64's finalizer (Steele et al. 2014), applied to each in turn."""
    with np.errstate(over="ignore"):
        h = np.zeros(1, dtype=np.uint64)
        for part in parts:
            h = (h ^ np.asarray(part, dtype=np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
            h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            h = h ^ (h >> np.uint64(31))
        return h


def permute(i: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """The position of each i in a shuffled range(n). Every key gives a permutation, in constant memory and time.

    A generalized Feistel network on numbers with two digits of bases a and b, where a * b >= n. A result outside
    range(n) goes through the network again until it is inside ("cycle walking"; Black & Rogaway 2002, "Ciphers with
    arbitrary finite domains"). i: uint64 (B,), key: uint64 (1,). Returns uint64 (B,).
    """
    a = np.uint64(math.isqrt(n - 1) + 1)
    b = np.uint64(-(-n // int(a)))

    def network(x: np.ndarray) -> np.ndarray:
        left, right = np.divmod(x, b)
        for r in range(0, 6, 2):
            left = (left + (hash64(key, r, right) >> np.uint64(32))) % a
            right = (right + (hash64(key, r + 1, left) >> np.uint64(32))) % b
        return left * b + right

    x = network(i)
    while (outside := x >= n).any():
        x[outside] = network(x[outside])
    return x
