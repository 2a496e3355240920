"""Small data sets prepared by folio.data.prepare, and their content."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from folio.base.files import read_json, sha256, write_json
from folio.data import tokenizer
from folio.data.blocks import Field
from folio.data.builder import DatasetBuilder
from folio.data.corpus import Corpus
from folio.data.inputs import DEFAULT_LIMITS, SizeLimits, find_sources
from folio.data.prepare import PrepareConfig, prepare
from folio.data.shards import open_dataset
from folio.data.sources.pairs import split_pairs, write_pairs
from prepare import pairs as pairs_script
from prepare.pairs import PairsConfig

SMALL_BLOCKS = SizeLimits(block=1000)


def corpus_of(
    *paths: Path,
    format: str | None = None,
    limits: SizeLimits = DEFAULT_LIMITS,
    keep_line_ends: bool = False,
    field: str = "text",
    **settings,
) -> Corpus:
    """The documents in these files."""
    inputs = find_sources([str(path) for path in paths], format, keep_line_ends=keep_line_ends, limits=limits)
    return Corpus(inputs, **{"make": Field(field), **settings})


def config(tmp_path: Path, **settings) -> PrepareConfig:
    return PrepareConfig(**{"data_dir": str(tmp_path / "data"), "tokenizer": "byte", "val_fraction": 0.1, **settings})


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.bin"))}


def ids_of(folder: Path, split: str) -> np.ndarray:
    return np.concatenate([shard.ids for shard in getattr(open_dataset(folder), split)])


def edit_split(folder: Path, split: str, **arrays: np.ndarray) -> None:
    """Replace the `ids` or the `mask` of a split of one shard, and their checksum."""
    meta = read_json(folder / "meta.json")
    (entry,) = meta["splits"][split]
    for name, array in arrays.items():
        file, checksum = ("", "sha256") if name == "ids" else ("_mask", "mask_sha256")
        array.tofile(folder / f"{split}{file}.bin")
        entry[checksum] = sha256(folder / f"{split}{file}.bin")
    write_json(folder / "meta.json", meta)


def read_back(folder: Path, split: str) -> list[str]:
    """The documents of a split."""
    tokenizer = open_dataset(folder).load_tokenizer()
    ids = ids_of(folder, split)
    ends = np.flatnonzero(ids == tokenizer.eot)
    assert ends[-1] == len(ids) - 1
    return [tokenizer.decode(part[part != tokenizer.eot]) for part in np.split(ids, ends[:-1] + 1)]


def read_all(folder: Path) -> list[str]:
    """The documents of both splits, sorted."""
    return sorted(read_back(folder, "train") + read_back(folder, "val"))


def read_report(folder: Path) -> dict[str, Any]:
    return read_json(folder / "report.json")


def read_pairs(folder: Path) -> list[tuple[str, str]]:
    """The prompts and completions of both splits, sorted. The tokens are bytes."""
    data = open_dataset(folder)
    train, val = (list(split_pairs(shards, tokenizer.ByteTokenizer())) for shards in (data.train, data.val))
    assert train and val
    return sorted(train + val)


def prepare_pairs(path: Path, pairs: list[dict[str, Any]] | None = None, **settings) -> Path:
    """Run prepare/pairs.py on a file in tmp_path, with bytes as tokens. pairs: what to write into the file first.

    Returns the folder of the data set, in tmp_path / "data".
    """
    if pairs is not None:
        write_pairs(path, pairs)
    cfg = PairsConfig(inputs=(str(path),), **{"tokenizer": "byte", "data_dir": str(path.parent / "data"), **settings})
    pairs_script.main(cfg)
    return Path(cfg.data_dir) / (cfg.name or path.name.partition(".")[0])


def assert_same_data_set(folder: Path, expected: Path) -> None:
    """Assert that two folders have the same files, with bitwise identical shards and reports."""
    assert content(folder) == content(expected)
    assert (folder / "report.json").read_bytes() == (expected / "report.json").read_bytes()
    assert {path.name for path in folder.iterdir()} == {path.name for path in expected.iterdir()}


def write_documents(folder: Path, texts: list[str], limits: SizeLimits = SMALL_BLOCKS) -> Corpus:
    """A corpus with one file per text."""
    folder.mkdir(parents=True)
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_bytes(text.encode())
    return corpus_of(folder, limits=limits)


def small_tokenizer(tmp_path: Path, characters: str, eot: bool = True) -> str:
    """A file with a character tokenizer."""
    write_json(tmp_path / "tokenizer.json", tokenizer.CharTokenizer.of(characters, eot).to_json())
    return str(tmp_path / "tokenizer.json")


@contextmanager
def interrupted_after(blocks: int, monkeypatch) -> Iterator[None]:
    """Interrupt preparation in the block after this number of blocks of text."""
    add = DatasetBuilder.add

    def interrupted(builder, block, encoded):
        add(builder, block, encoded)
        if builder.progress.blocks == blocks:
            raise KeyboardInterrupt

    with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
        patches.setattr(DatasetBuilder, "add", interrupted)
        yield


def interrupt(lines, tmp_path, monkeypatch, **settings) -> None:
    """Prepare the data set "a", interrupted after eight blocks, when some shards are full."""
    with interrupted_after(8, monkeypatch):
        prepare(config(tmp_path, **{"shard_tokens": 700, **settings}), lines, "a")
