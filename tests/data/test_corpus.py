import gzip
import random

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from folio.data import corpus
from folio.data.account import Account
from folio.data.blocks import CorpusError, DocumentPart, TextBlock, document_hash
from folio.data.corpus import Corpus, find_cut
from folio.data.inputs import DEFAULT_LIMITS, Position, SizeLimits
from tests.support.prepared import corpus_of
from tests.support.tiny_tokenizers import bpe, trained


def documents_of(corpus: Corpus) -> list[str]:
    return [document for block in corpus.blocks() for document in block.documents(Account())]


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gz"])
@pytest.mark.parametrize("block_bytes", [1, 5, 64])
@pytest.mark.parametrize("separator", ["\n", "\n--\n", "aa"])
def test_large_documents_between_separators_are_split_into_parts(separator, block_bytes, compress, tmp_path, seed):
    """The complete document was in memory, and each block read caused another search for a separator."""
    rng = random.Random(seed)
    documents = ["".join(rng.choices("a é\n-日x", k=rng.choice([0, 1, 9, 40, 300]))) for _ in range(40)]
    documents[7] = documents[30] = "é b日" * 200
    text = separator.join(documents) + separator * rng.randrange(2)
    expected = [document.encode() for document in text.split(separator)]
    expected = expected if expected[-1] else expected[:-1]
    path = tmp_path / ("x.txt" if compress is bytes else "x.txt.gz")
    path.write_bytes(compress(text.encode()))
    limits = SizeLimits(block=block_bytes, document=100, word=200)
    contents, pending, position = [], b"", Position()
    for block in corpus_of(path, limits=limits, split_on=separator).blocks():
        if isinstance(block, TextBlock):
            assert not pending
            for content, _, start in block.content:
                assert start == position
                contents.append(content)
                position = position.after(content + separator.encode())
            continue
        assert len(block.content) <= 200 + 2 * block_bytes and block.position == position
        pending, position = pending + block.content, position.after(block.content)
        if block.last:
            assert len(pending) > 100 and block.hash == document_hash(pending)
            contents.append(pending)
            pending, position = b"", position.after(separator.encode())
    # after a text that ends with a part of the separator, the large document begins with the other part
    assert contents == expected and any(content.endswith(documents[7].encode()) for content in contents)


@pytest.mark.parametrize("text", [b"word " * 10_000, b"a" * 50_000, b"\n" * 50_000], ids=["words", "letters", "breaks"])
def test_a_separator_that_does_not_occur_costs_linear_time(text, tmp_path):
    """The time grew with the square of the file's size, and the memory with its size."""
    (tmp_path / "x.txt").write_bytes(text)
    limits = SizeLimits(block=1000, document=3000, word=5000)
    blocks = corpus_of(tmp_path / "x.txt", limits=limits, split_on="XYZ").blocks()
    parts = [next(blocks)]
    with pytest.raises(CorpusError, match='split_on="XYZ" does not occur'):
        parts.extend(blocks)
    parts = [part for part in parts if isinstance(part, DocumentPart)]
    assert b"".join(part.content for part in parts) == text and max(len(part.content) for part in parts) <= 6000
    assert {part.hash for part in parts} == {document_hash(text)} and [part.last for part in parts].count(True) == 1


def test_a_file_is_searched_once_for_places_to_cut(tmp_path, monkeypatch):
    """Each block read caused another search of the text before it."""

    class CountingPattern:
        def finditer(self, content, begin):
            nonlocal searched
            searched += len(content) - begin
            return iter(())

    searched = 0
    monkeypatch.setattr(corpus, "SAFE_CUT", CountingPattern())
    (tmp_path / "x.txt").write_bytes(b"a" * 200_000)
    list(corpus_of(tmp_path / "x.txt", limits=SizeLimits(block=1000)).blocks())
    assert searched < 4 * 200_000  # three times: once for each length of the tail


@settings(max_examples=300)
@given(st.text(alphabet=st.sampled_from("ab1' ,.!\n\r\t\xa0\u3000\u2003\x1f\x85éж日。ा🎉<|>s"), max_size=60))
def test_a_text_cut_in_two_has_the_same_ids(text):
    """For GPT-2's BPE and for a trained one, with any white space and letters around the cut."""
    content = text.encode()
    cut = find_cut(content)
    if cut:
        for tokenizer in (bpe(), trained()):
            parts = [tokenizer.encode(part.decode()) for part in (content[:cut], content[cut:])]
            assert np.concatenate(parts).tolist() == tokenizer.encode(text).tolist()


def test_a_text_without_white_space_is_cut_between_characters():
    content = ("日本" * 10).encode()
    assert find_cut(content) == 0
    for missing in range(3):
        cut = find_cut(content[: len(content) - missing], max_word=20)
        assert cut > 20
        assert content[:cut].decode()


@pytest.mark.parametrize("block_bytes", [3, 5, 64, 1 << 20])
def test_one_text_is_split_between_two_characters(block_bytes, tmp_path, seed):
    rng = random.Random(seed)
    text = "".join(rng.choice("ab日🎉é \n") for _ in range(333))
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())  # with a byte-order mark
    for fraction in (0.1, 0.5, 0.999):
        blocks = list(corpus_of(tmp_path / "x.txt", limits=SizeLimits(block=block_bytes)).blocks(fraction))
        cut = int(333 * (1 - fraction))
        for split, expected in (("train", text[:cut]), ("val", text[cut:])):
            parts = [block for block in blocks if block.split == split]
            assert b"".join(part.content for part in parts).decode() == expected
            assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]


def test_parquet_with_a_dictionary_is_read_in_blocks_of_decoded_text(tmp_path):
    """A file of 0.4 MB with 800 MB of text was one block, because its footer counts each distinct text once. Its
    tokenization took 13 GB.
    """
    long = [character * 100_000 for character in "abc"]
    texts = [long[k % 3] for k in range(400)] + [None] + [f"{k}" * 50 for k in range(20_000)]
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=401)
    blocks = list(corpus_of(path).blocks())
    assert [text for block in blocks for text in block.documents(Account())] == [text or "" for text in texts]
    assert max(block.content.nbytes for block in blocks[:-1]) < DEFAULT_LIMITS.block + 500_000
    assert [number for block in blocks for number in block.numbers] == [*range(len(texts))]
    large_strings = pyarrow.table({"text": pyarrow.array(texts, pyarrow.large_string())})
    parquet.write_table(large_strings, path)
    assert documents_of(corpus_of(path)) == [text or "" for text in texts]
