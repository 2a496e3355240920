"""Fixtures for preparation: documents, as JSON lines and as files."""

import json
import random
from pathlib import Path

import pytest

from folio.data.corpus import Corpus
from tests.support.prepared import SMALL_BLOCKS, corpus_of, write_documents


@pytest.fixture
def texts(tmp_path: Path, seed: int) -> list[str]:
    """Documents, including an empty one, a repeated one, and a repeated one larger than a block."""
    rng = random.Random(seed)
    words = ["alpha", "beta", "γάμμα", "日本", "🎉", "the", "of", "\n", "it's"]
    texts = [" ".join(rng.choices(words, k=rng.randrange(1, 60))) for _ in range(120)]
    texts[7], texts[50], texts[90] = "", texts[20], " ".join(rng.choices(words, k=900))
    texts[110] = texts[90]
    return texts


@pytest.fixture
def lines(texts: list[str], tmp_path: Path) -> Corpus:
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return corpus_of(tmp_path / "texts.jsonl", limits=SMALL_BLOCKS)


@pytest.fixture
def folder_of_texts(texts: list[str], tmp_path: Path) -> Corpus:
    return write_documents(tmp_path / "texts", texts)
