import numpy as np
import torch

from folio.loader import BatchLoader
from folio.runtime import resolve_runtime
from folio.shards import Dataset, Shard
from folio.tokenizer import ByteTokenizer
from folio.windows import Mixture


def test_gathered_on_the_device_it_is_the_same_text(tmp_path, seed):
    """Of one data set and of a mixture, of several shards each, across epochs; the weights too."""
    rng = np.random.default_rng(seed)
    runtime = resolve_runtime("cpu", "float32", False)

    def dataset(name: str, *sizes: int) -> Dataset:
        shards = [Shard(rng.integers(257, size=n).astype("<u2")) for n in sizes]
        return Dataset(tmp_path / name, shards, shards[:1], 257, name, ByteTokenizer())

    a, b = dataset("a", 90, 5, 41), dataset("b", 33, 70)
    for sets in ([(a, 1.0)], [(a, 0.7), (b, 0.3)]):
        for sampling in ("epoch", "random"):
            data = Mixture(sets, 8, seed, sampling)
            copied, gathered = BatchLoader(data, runtime, 3, 2, resident=False), BatchLoader(data, runtime, 3, 2)
            assert gathered.tokens is None  # a CPU gains nothing by it
            gathered = BatchLoader(data, runtime, 3, 2, resident=True)
            for first in (0, 6, 1000):
                two = [loader.micro_batches(first) for loader in (copied, gathered)]
                for ours, theirs in zip(*two, strict=True):
                    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1]) and ours[2] == theirs[2]
                    assert ours[0].shape == (3, 8) and ours[2] == 0.5
