"""In-memory data sets."""

from pathlib import Path

import numpy as np

from folio.data.shards import Dataset, Shard

VOCAB = 70_000


def dataset_of(*shards: np.ndarray, val: tuple[np.ndarray, ...] = ()) -> Dataset:
    return Dataset(Path("data"), [Shard(ids) for ids in shards], [Shard(ids) for ids in val], VOCAB, "", None)


def random_case(rng: np.random.Generator) -> tuple[list[Dataset], np.ndarray, int | None]:
    """Data sets of a few shards, a text with common spans and tokens, and the end-of-text token."""
    # ids above 255 with similar bytes, so that byte matches also occur inside tokens; one id needs uint32
    alphabet = np.array([257, 1, 256, 0x0102, 0x0201, 65535, 513, 66_000])[: rng.integers(1, 9)]
    dtype = "<u4" if alphabet.max() > 65535 else rng.choice(["<u2", "<u4"])
    eot = int(alphabet[rng.integers(len(alphabet))]) if rng.random() < 0.5 else None

    def shard() -> np.ndarray:
        return rng.choice(alphabet, size=rng.integers(1, 60)).astype(dtype)

    datasets = [dataset_of(*(shard() for _ in range(rng.integers(1, 4)))) for _ in range(rng.integers(1, 3))]
    all_ids = np.concatenate([shard.ids for dataset in datasets for shard in dataset.train]).astype(np.int64)
    parts = [rng.choice([*alphabet, 7, 69_999], size=rng.integers(1, 20)) for _ in range(2)]  # 7 and 69,999 never occur
    start = rng.integers(len(all_ids))
    quote = all_ids[start : start + rng.integers(1, 200)]  # may cross the end of a shard or of a document
    return datasets, np.concatenate([parts[0], quote, parts[1]]), eot
