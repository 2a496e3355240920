import numpy as np

from folio.base.randomness import derive_seed, permute
from tests.support.tolerances import chi_square_limit


def test_permute_is_a_permutation_for_every_key(seed):
    rng = np.random.default_rng(seed)
    for n in (1, 2, 3, 4, 5, 16, 17, 1000, 1025, *rng.integers(1, 5000, 10).tolist()):
        key = rng.integers(2**63, dtype=np.uint64)
        permuted = permute(np.arange(n, dtype=np.uint64), n, np.array([key]))
        assert sorted(permuted.tolist()) == list(range(n))


def test_permutations_are_uniform(seed):
    """Over many keys, each element is at each position about equally often, and each pair at the first two."""
    n, keys = 7, np.random.default_rng(seed).integers(2**63, size=1400, dtype=np.uint64)
    orders = np.array([permute(np.arange(n, dtype=np.uint64), n, keys[[k]]) for k in range(len(keys))]).astype(int)
    for i in range(n):
        counts = np.bincount(orders[:, i], minlength=n)
        chi_square = ((counts - 200) ** 2 / 200).sum()
        assert chi_square < chi_square_limit(n - 1, comparisons=n + 1)
    pairs = np.bincount(n * orders[:, 0] + orders[:, 1], minlength=n * n)
    expected = 1400 / (n * (n - 1))
    chi_square = sum((pairs[n * i + j] - expected) ** 2 / expected for i in range(n) for j in range(n) if i != j)
    assert chi_square < chi_square_limit(n * (n - 1) - 1, comparisons=n + 1)


def test_derived_seeds_are_distinct():
    seeds = {derive_seed("dropout", seed, step, micro) for seed in range(3) for step in range(3) for micro in range(3)}
    assert len(seeds) == 27 and all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed("dropout", 1, 23) != derive_seed("dropout", 12, 3)
