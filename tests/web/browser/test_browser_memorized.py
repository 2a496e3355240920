"""The browser's search of the training data compared with folio/evaluation/memorization.py."""

from dataclasses import replace

import numpy as np
import pytest

from folio import UserError
from folio.data.shards import Shard
from folio.data.tokenizer import EOT_TEXT
from folio.evaluation.memorization import TrainingSearch, covering_lengths, find_overlap
from folio.web import html_file
from tests.support.datasets import dataset_of, random_case
from tests.support.engine import engine_in
from tests.support.viewers import in_browser

CASES = 50
TOKENIZER = """({kind, eot, decode: ids => ids.map(id => `<${id}>`).join(""),
  tokenBytes: id => id === eot ? new Uint8Array() : new TextEncoder().encode("é".repeat(id % 20))})"""  # the same as:


class Tokenizer:
    def __init__(self, eot: int | None, kind: str):
        self.eot, self.kind = eot, kind

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == self.eot else ("é" * (token % 20)).encode()

    def decode_prompt(self, ids: np.ndarray) -> str:
        return "".join(EOT_TEXT if token == self.eot else f"<{token}>" for token in ids)


@in_browser
def test_spans_equal_python(browser, seed):
    rng, quoted = np.random.default_rng(seed), 0
    with engine_in(browser, "tokenizers.js", "memorized.js") as engine:
        for _ in range(CASES):
            datasets, text, eot = random_case(rng)
            held_out = Shard(rng.choice(text, size=30).astype("<u4"))
            datasets = [replace(dataset, val=[held_out]) for dataset in datasets]
            tokenizer = Tokenizer(eot, rng.choice(["bpe", "midi"]))
            search = TrainingSearch(datasets, tokenizer)
            facts, longest = search.search(text)
            index, content = html_file.pack_index(search, offset := int(rng.integers(3)) * 4)
            script = f"""(search => [finish(search.search(text)), finish(search.overlap(text))])(
              TrainingSearch.read(index, bytes, {TOKENIZER}))"""
            values = dict(index=index, bytes=bytes(offset) + content, text=text.tolist(), eot=eot, kind=tokenizer.kind)
            answer, overlap = engine(script, **values)
            assert overlap == find_overlap(search.index, tokenizer, text)._asdict()
            quoted += overlap["in_training"]
            assert answer["facts"] == facts
            assert answer["longest"].tolist() == longest.tolist()
            covering = engine("coveringLengths(longest)", longest=longest.astype(np.int32))
            assert covering.tolist() == covering_lengths(longest).tolist()
    assert quoted


def test_too_much_training_data_is_an_error():
    with pytest.raises(UserError, match=r"6 tokens.*at most 5"):
        html_file.index_training_data([dataset_of(np.arange(2), np.arange(4))], Tokenizer(None, "bpe"), max_tokens=5)
