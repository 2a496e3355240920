from pathlib import Path

import numpy as np
import pytest

from folio.data.shards import Dataset, Shard
from folio.evaluation import overlap


def choose_probes(*documents: np.ndarray) -> list[np.ndarray]:
    """The probes of a text of these documents."""
    numbers = [np.full(len(document), i) for i, document in enumerate(documents)]
    return overlap.choose_probes(np.concatenate(documents), np.concatenate(numbers))


def dataset_of(*shards: np.ndarray) -> Dataset:
    return Dataset(Path("data"), [Shard(ids) for ids in shards], [], 70_000, "", None)


def test_probes_are_evenly_spaced_and_within_a_document():
    probes = choose_probes(np.arange(1000))
    assert len(probes) == 20 and all((np.diff(probe) == 1).all() and len(probe) == 32 for probe in probes)
    starts = [int(probe[0]) for probe in probes]
    assert starts[0] == 0 and starts[-1] == 1000 - 33 and {*np.diff(starts)} <= {50, 51}
    documents = [np.arange(100 * i, 100 * i + n) for i, n in enumerate((5, 40, 32, 33, 70))]
    probes = choose_probes(*documents)
    assert {probe[0] // 100 for probe in probes} <= {1, 3, 4}
    assert all(probe[0] // 100 == probe[-1] // 100 for probe in probes)
    assert len(choose_probes(np.arange(33))) == 1
    assert choose_probes(np.arange(32)) == []
    assert choose_probes(np.arange(2), np.arange(20)) == []


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_tokens_are_found_only_where_a_token_begins(dtype, seed):
    ids = np.random.default_rng(seed).integers(60_000, size=5000).astype(dtype)
    assert overlap.occurs(ids[:32], ids.tobytes()) and overlap.occurs(ids[-32:], ids.tobytes())
    shifted = np.frombuffer(b"\0" + ids.tobytes() + b"\0" * (ids.itemsize - 1), dtype)
    assert not overlap.occurs(ids[10:42], shifted.tobytes())
    both = np.concatenate([shifted, ids])  # first in the middle of a token, then where one begins
    assert overlap.occurs(ids[10:42], both.tobytes())


def test_the_search_covers_all_shards_up_to_a_limit(monkeypatch, seed):
    ids = np.random.default_rng(seed).integers(60_000, size=3000).astype("<u2")
    probes = [ids[start : start + 32].astype(np.int64) for start in (0, 1900, 2900)]
    shards = dataset_of(ids[:1000], ids[1000:2000].astype("<u4"), ids[2000:])
    assert overlap.count_matches(probes, [shards]) == (3, True)
    assert overlap.count_matches(probes, [dataset_of(ids[:50]), dataset_of(ids[2800:])]) == (2, True)
    monkeypatch.setattr(overlap, "SEARCHED_BYTES", 7000)  # 1,000 tokens of 2 bytes, 1,000 of 4, and 500 more
    assert overlap.count_matches(probes, [shards]) == (2, False)
    assert overlap.count_matches(probes, [dataset_of(ids[:50]), shards]) == (2, False)  # the limit is per data set
