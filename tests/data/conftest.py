"""Fixtures of the tests of preparing: documents, as JSON lines and as files."""

import json
import random
from pathlib import Path

import pytest

from folio.data import corpus
from folio.data.corpus import Corpus, find_sources


@pytest.fixture
def texts(tmp_path: Path, seed: int) -> list[str]:
    """Some documents: an empty one, a repeated one, and a repeated one that is larger than a block."""
    rng = random.Random(seed)
    words = ["alpha", "beta", "γάμμα", "日本", "🎉", "the", "of", "\n", "it's"]
    texts = [" ".join(rng.choices(words, k=rng.randrange(1, 60))) for _ in range(120)]
    texts[7], texts[50], texts[90] = "", texts[20], " ".join(rng.choices(words, k=900))
    texts[110] = texts[90]
    return texts


@pytest.fixture
def lines(texts: list[str], tmp_path: Path) -> Corpus:
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return Corpus(find_sources([str(tmp_path / "texts.jsonl")]))


@pytest.fixture
def folder_of_texts(texts: list[str], tmp_path: Path) -> Corpus:
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "texts" / f"{number:03d}.txt").write_bytes(text.encode())
    return Corpus(find_sources([str(tmp_path / "texts")]))


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 1000)
