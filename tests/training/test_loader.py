from pathlib import Path

import numpy as np
import pytest
import torch

from folio.data.shards import Dataset, Shard, open_dataset
from folio.data.tokenizer import ByteTokenizer
from folio.data.windows import Mixture
from folio.machine.distributed import Group
from folio.machine.runtime import Runtime, resolve_runtime
from folio.training.loader import BatchLoader, BatchShape


def test_batches_gathered_on_the_device_equal_copied_ones(tmp_path, seed):
    """For one data set and for mixtures, with several shards each, across epochs. The shares are equal too.

    Ids from 2^15 on are negative as int16. Batches are contiguous: strides of T + 1 were compiled as variables.
    """
    rng = np.random.default_rng(seed)
    runtime = resolve_runtime("cpu", "float32", False)

    def dataset(name: str, *sizes: int, vocab_size: int = 50_000, dtype: str = "<u2") -> Dataset:
        shards = [Shard(rng.integers(vocab_size, size=n).astype(dtype)) for n in sizes]
        return Dataset(tmp_path / name, shards, shards[:1], vocab_size, name, ByteTokenizer())

    a, b = dataset("a", 90, 5, 41), dataset("b", 33, 70, dtype="<u4")
    large = dataset("large", 60, 31, vocab_size=100_000, dtype="<u4")
    for weighted_datasets in ([(a, 1.0)], [(a, 0.7), (b, 0.3)], [(large, 1.0)]):
        for sampling in ("epoch", "random"):
            data = Mixture(weighted_datasets, 8, seed, sampling)
            shapes = [BatchShape.of(3, 2, runtime.group, is_resident) for is_resident in (False, True)]
            copying, gathering = (BatchLoader(data, runtime, shape) for shape in shapes)
            for first in (0, 6, 1000):
                micro_batches = zip(copying.micro_batches(first), gathering.micro_batches(first), strict=True)
                for (x, y, share), (gathered_x, gathered_y, gathered_share) in micro_batches:
                    assert torch.equal(x, gathered_x) and torch.equal(y, gathered_y) and share == gathered_share
                    assert gathered_x.is_contiguous() and gathered_y.is_contiguous()
                    assert x.shape == (3, 8) and share == 0.5


def loader_of(rank: int, size: int, data: Mixture, batch_size: int, accumulation: int, resident: bool) -> BatchLoader:
    """The loader of one of several processes."""
    runtime = Runtime(torch.device("cpu"), torch.float32, False, "", Group(rank, size))
    return BatchLoader(data, runtime, BatchShape.of(batch_size, accumulation, runtime.group, resident))


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_several_processes_together_read_each_sequence_once(data_dir: Path, size, resident):
    """An epoch in steps of 12 sequences: the ranks together read each one once, in order, and the shares sum to 1."""
    data = Mixture([(open_dataset(data_dir / "verse"), 1.0)], 32, 1337, "epoch")
    loaders = [loader_of(rank, size, data, 4, 3, resident) for rank in range(size)]
    assert len({loader.shape[3:] for loader in loaders}) == 1 and loaders[0].shape.rows <= 4
    sequences = [loader.shape.local_sequences for loader in loaders]
    assert sum(sequences) == 12 and max(sequences) - min(sequences) <= 1
    per_epoch = data.training[0].per_epoch // 12 * 12
    for first in range(0, per_epoch, 12):
        expected_x, expected_y = data.batch(first, 12)
        batches, rows, total_share = [], 0, 0.0
        for loader in loaders:
            for x, y, share in loader.micro_batches(first):
                assert x.shape == y.shape == (loader.shape.rows, 32)
                is_read = (y != -1).all(dim=1)  # the other rows are padding
                assert ((y != -1).any(dim=1) == is_read).all() and share == pytest.approx(is_read.sum().item() / 12)
                batches.append(torch.stack([x[is_read], y[is_read]]))
                rows, total_share = rows + int(is_read.sum()), total_share + share
        assert rows == 12 and total_share == pytest.approx(1)
        assert torch.equal(torch.cat(batches, dim=1), torch.from_numpy(np.stack([expected_x, expected_y])))
