"""xz on validation sets, against calls of lzma."""

import hashlib
import lzma
import math
import random
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from folio.base.download import cache_folder
from folio.base.files import read_json, write_json
from folio.data.shards import Dataset, Shard
from folio.data.tokenizer import ByteTokenizer, CharTokenizer, MidiTokenizer, Tokenizer
from folio.evaluation import compression
from folio.evaluation.compression import format_xz, xz_rows
from folio.evaluation.scores import Evaluation


def dataset_of(train: list[str], val: str, tokenizer: Tokenizer | None = None) -> Dataset:
    """A data set in memory, with one training shard per text."""
    tokenizer = tokenizer or ByteTokenizer()
    digest = hashlib.sha256(repr((train, val)).encode()).hexdigest()
    shards = [Shard(tokenizer.encode(text)) for text in (*train, val)]
    return Dataset(Path("own"), shards[:-1], shards[-1:], tokenizer.vocab_size, digest, tokenizer)


def rows_of(dataset: Dataset, **settings) -> list[dict]:
    """The rows of two models that were measured on the same validation set."""
    models = [Evaluation(run, datasets={"own, validation": dataset}) for run in "ab"]
    return list(xz_rows(models, **settings))


def xz_size(text: str) -> int:
    """The size of the text in an .xz file."""
    return len(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def random_text(n: int) -> str:
    """Random letters of 4 bits each."""
    return "".join(random.Random(n).choices("abcdefghijklmnop", k=n))


@pytest.mark.parametrize("kind", ["byte", "char"])
def test_the_size_of_the_validation_set_is_that_of_xz(kind, text, monkeypatch):
    monkeypatch.setattr(compression, "BLOCK", 1000)
    text = text.replace("king", "kïng")  # a character of 2 bytes
    first, second, val = text[:7000], text[7000:9000], text[9000:12000]
    tokenizer = ByteTokenizer() if kind == "byte" else CharTokenizer.of(text)
    (row,) = rows_of(dataset_of([first, second], val, tokenizer))
    train_bytes, val_bytes = len((first + second).encode()), len(val.encode())
    assert (row["of"], row["train_bytes"], row["val_bytes"]) == ("own, validation", train_bytes, val_bytes)
    expected = xz_size(first + second + val) - xz_size(first + second)
    assert row["bits_per_byte"] * val_bytes / 8 == pytest.approx(expected, abs=8)  # .xz files are padded
    assert format_xz(row).startswith(f"xz reaches {row['bits_per_byte']:.4f} bits per byte on own, validation")


def test_a_validation_set_that_is_in_the_training_set_needs_almost_nothing(monkeypatch):
    """The window is the whole text, so that xz also uses text that is far back."""
    text, other = random_text(20_000), random_text(30_000)
    (unseen,) = rows_of(dataset_of([other], text))
    expected = xz_size(other + text) - xz_size(other)
    assert unseen["bits_per_byte"] == pytest.approx(8 * expected / 20_000, abs=8 * 8 / 20_000)  # see above
    assert unseen["bits_per_byte"] > 4  # a shorter code for one in 2**k texts saves k bits
    (seen,) = rows_of(dataset_of([text, other], text))
    assert seen["bits_per_byte"] < 8 * 8 * math.ceil(20_000 / 273) / 20_000  # 8 bytes for each match of 273
    preset = compression.compressed_size
    monkeypatch.setattr(compression, "compressed_size", lambda text, _, progress: preset(text, 10_000, progress))
    dataset = replace(dataset_of([text, other], text), hash="not in the cache")
    assert rows_of(dataset)[0]["bits_per_byte"] > 4


def test_ends_of_documents_are_compressed_but_have_no_bytes():
    tokenizer, words = ByteTokenizer(), random_text(900)
    dataset = dataset_of(["abc"], words)
    with_ends = np.insert(tokenizer.encode(words), range(0, 900, 9), tokenizer.eot)
    rows = [*rows_of(dataset), *rows_of(replace(dataset, val=[Shard(with_ends)], hash="with ends"))]
    assert [row["val_bytes"] for row in rows] == [900, 900]
    assert rows[1]["bits_per_byte"] > rows[0]["bits_per_byte"]


def test_large_masked_and_music_data_sets_are_left_out():
    dataset = dataset_of(["é" * 400], "é" * 100, CharTokenizer("é"))
    assert rows_of(dataset, max_bytes=999) == [] and len(rows_of(dataset, max_bytes=1000)) == 1
    masked = Shard(dataset.val[0].ids, np.ones(100, np.uint8))
    assert rows_of(replace(dataset, val=[masked])) == []
    assert rows_of(replace(dataset, tokenizer=MidiTokenizer(["Note_1"], {}))) == []


def test_results_are_cached(monkeypatch):
    dataset = dataset_of(["the king"], "the crown")
    rows = rows_of(dataset)
    (cached,) = cache_folder().glob("xz-*.json")
    write_json(cached, {**read_json(cached), "bits_per_byte": 5.0})
    assert rows_of(dataset) == [{**rows[0], "bits_per_byte": 5.0}]
    assert rows_of(replace(dataset, hash="prepared again")) == rows
    for damaged in ("damaged", "[]", "{}", '{"bits_per_byte": "x", "train_bytes": 1, "val_bytes": 1}'):
        cached.write_text(damaged, encoding="utf-8")  # JSON of another form was a traceback
        assert rows_of(dataset) == rows
    with monkeypatch.context() as patch:
        patch.setattr(compression, "cache_folder", lambda: cached / "below a file")  # which cannot be written
        assert rows_of(dataset) == rows
    monkeypatch.delenv("FOLIO_CACHE")
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError))  # no cache
    assert rows_of(dataset) == rows
