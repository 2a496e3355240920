"""Blocks of a corpus: their documents and tokens."""

import json

import numpy as np
import pytest

from folio import UserError
from folio.data import tokenizer
from folio.data.blocks import END, Document, RecordBlock, document_hash, encode
from folio.data.builder import split_by_number
from folio.data.prepare import prepare
from tests.support.prepared import SMALL_BLOCKS, config, corpus_of, read_back
from tests.support.tiny_tokenizers import bpe


@pytest.mark.parametrize("form", ["text", "jsonl", "split_on"])
def test_too_much_white_space_is_reported_with_its_byte_in_the_file(form, tmp_path, monkeypatch):
    """A million white-space characters caused a traceback from tiktoken."""
    monkeypatch.setattr(tokenizer, "LONG_SPACES", 10)
    monkeypatch.setattr(tokenizer, "MAX_SPACES", 30)
    monkeypatch.setattr(tokenizer, "gpt2_tokenizer", bpe)
    before, spaces = "größer " * 400 + "é", "\t" * 31
    path = tmp_path / ("x.jsonl" if form == "jsonl" else "x.txt")
    if form == "jsonl":
        path.write_text(json.dumps({"text": "a"}) + "\n\n" + json.dumps({"text": before + spaces + "b"}))
        place = rf"x\.jsonl:3, byte {len(before.encode()):,} of its text"
    else:
        path.write_text((before + spaces + "b") if form == "text" else f"a--b--{before}{spaces}b")
        place = rf"x\.txt:1, byte {len(before.encode()) + 6 * (form == 'split_on'):,} of the line"
    settings = dict(limits=SMALL_BLOCKS, split_on="--" if form == "split_on" else None)
    text = corpus_of(path, **settings)
    for workers in (0, 1):
        with pytest.raises(UserError, match=rf"^\S*{place}: more than 30 white-space .* char or byte$"):
            prepare(config(tmp_path, tokenizer="gpt2", val_fraction=0.5, num_workers=workers), text, "a")
    path.write_text(path.read_text().replace(spaces, spaces[1:]).replace(r"\t" * 31, r"\t" * 30))
    text = corpus_of(path, **settings)
    prepare(config(tmp_path, tokenizer="gpt2", val_fraction=0.5), text, "a")


@pytest.mark.parametrize("kind", ["char", "byte", "gpt2", "bpe"])
def test_a_lone_surrogate_in_json_becomes_a_question_mark(kind, tmp_path, monkeypatch):
    """json.loads returns a string that UTF-8 cannot encode, so writing the tokenizer failed."""
    monkeypatch.setattr(tokenizer, "gpt2_tokenizer", bpe)
    (tmp_path / "x.jsonl").write_text('{"text": "a \\ud83d b \\ud83d\\ude00 c"}\n' * 2 + '{"text": "more"}\n' * 2)
    lines = corpus_of(tmp_path / "x.jsonl", split_rule=split_by_number(np.array([1])))
    folder = prepare(config(tmp_path, tokenizer=kind, vocab_size=258), lines, "a")
    assert read_back(folder, "val") == ["a ? b 😀 c"]


def test_the_tokens_of_a_block_are_the_tokens_of_its_segments():
    """Expected values by hand, with bytes as ids: questions are masked, and an empty document has no tokens."""
    lines = [b'{"q": "1?", "a": "\xc3\xa4"}', b'{"q": "", "a": ""}', b'{"q": "", "a": "b"}']
    block = RecordBlock(0, "x.jsonl", lines, [7, 9, 10], ":", pair)
    encoded = encode(block, tokenizer.ByteTokenizer(), 256, masked=True)
    assert encoded.ids.tolist() == [*b"1?", *"ä".encode(), 256, *b"b", 256]
    assert encoded.mask.tolist() == [0, 0, 1, 1, 2, 1, 2]
    assert encoded.lengths.tolist() == [5, 0, 2] and encoded.sizes.tolist() == [4, 0, 1]
    assert encoded.characters.tolist() == [3, 0, 1]
    assert encoded.hashes.tolist() == [document_hash(part) for part in ("1?ä\0\1\1".encode(), b"\0\1\1", b"b\0\1\1")]
    assert [block.location(number) for number in range(3)] == ["x.jsonl:7", "x.jsonl:9", "x.jsonl:10"]


def pair(value: dict[str, str]) -> Document:
    return Document([(value["q"], False), (value["a"], True), (END, True)], frozenset("qa"))
