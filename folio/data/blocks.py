"""Blocks of documents: raw text on its way to the processes that tokenize it, and token ids on the way back.

Dimensions: D documents of a block, N tokens of all of them.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import numpy as np

from folio import UserError
from folio.data.leakage import signatures_of
from folio.data.shards import token_dtype
from folio.data.tokenizer import TextError, Tokenizer

SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")

END = None  # a segment that stands for the end-of-text token
RawDocument = tuple[bytes, str, int]  # its content, its file, and where its first byte is in the file
Segments = list[tuple[str | None, bool]]  # a document as segments, including END, and whether each counts as a target


class CorpusError(UserError):
    """Text that cannot be read. The message says how to fix it."""


def document_hash(content: bytes) -> int:
    """A 64-bit hash of a document, which decides its split and identifies duplicates."""
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


@dataclass(frozen=True)
class CorpusBlock:
    """Some documents, or a part of one."""

    bytes_read: int  # bytes of the files that have been read up to the end of this block
    file: str  # for messages

    def documents(self) -> Iterator[str | Segments]:
        """The documents, decoded. Raises CorpusError."""
        raise NotImplementedError

    def location(self, number: int, byte: int | None = None) -> str:
        """For messages: where the document with this number in the block is, or this byte of its text."""
        raise NotImplementedError


@dataclass(frozen=True)
class TextBlock(CorpusBlock):
    """Documents from text files."""

    content: list[RawDocument]

    def documents(self) -> Iterator[str]:
        for content, file, offset in self.content:
            yield decode_utf8(content, file, offset)

    def location(self, number: int, byte: int | None = None) -> str:
        _, file, offset = self.content[number]
        return f"{file}, from byte {offset + (byte or 0):,}"


@dataclass(frozen=True)
class DocumentPart(CorpusBlock):
    """A part of one document that is larger than a block."""

    content: bytes
    offset: int  # of the first byte in the file
    last: bool
    hash: int  # of the whole document
    split: Literal["train", "val"] | None = None  # None: as the hash says

    def documents(self) -> Iterator[str]:
        yield decode_utf8(self.content, self.file, self.offset)

    def location(self, number: int, byte: int | None = None) -> str:
        return f"{self.file}, from byte {self.offset + (byte or 0):,}"


@dataclass(frozen=True)
class RowBlock(CorpusBlock):
    """Documents as strings: a list, or an Arrow array, in which null is an empty document. Or objects, each of which
    `document` turns into a document.
    """

    content: Sequence[Any]
    first: int = 0  # the row number of the first document in the file
    document: Callable[[dict[str, Any]], str | Segments] | None = None

    def documents(self) -> Iterator[str | Segments]:
        if self.document:
            yield from map(self.document, self.content)
            return
        try:
            texts = self.content if isinstance(self.content, list) else self.content.to_pylist()
        except UnicodeDecodeError:  # Arrow does not check that strings in a file are UTF-8
            contents = self.content.cast("large_binary").to_pylist()
            texts = (decode_utf8(c or b"", f"{self.file}, row {n:,},", 0) for n, c in enumerate(contents, self.first))
        for text in texts:
            yield text or ""

    def location(self, number: int, byte: int | None = None) -> str:
        return f"{self.file}, row {self.first + number:,}{_byte_of_text(byte)}"


@dataclass(frozen=True)
class JsonLinesBlock(CorpusBlock):
    """Lines of JSON. `document` turns the object on each line into a document."""

    content: bytes
    line: int  # the number of the first line
    document: Callable[[dict[str, Any]], str | Segments]

    def documents(self) -> Iterator[str | Segments]:
        for number, line in self._lines():
            try:
                yield self.document(_parse_json_object(line))
            except CorpusError as error:
                raise CorpusError(f"{self.file}:{number}: {error}") from None

    def location(self, number: int, byte: int | None = None) -> str:
        line, _ = next(itertools.islice(self._lines(), number, None))
        return f"{self.file}:{line}{_byte_of_text(byte)}"

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """The lines that are not blank, with their numbers in the file."""
        for number, line in enumerate(self.content.split(b"\n"), start=self.line):
            if line.strip():
                yield number, line


def _byte_of_text(byte: int | None) -> str:
    return "" if byte is None else f", byte {byte:,} of its text"


def _parse_json_object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
        if SURROGATE_ESCAPE.search(line):  # UTF-8 cannot contain a lone surrogate, as JSON can; it becomes a ?
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except UnicodeDecodeError as error:
        raise CorpusError(f"this line is not UTF-8 at byte {error.start:,}; save it as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"this line is not JSON: {error}; fix it or remove it") from None
    if not isinstance(value, dict):
        raise CorpusError("it is not an object {...}")
    return value


@dataclass(frozen=True)
class Field:
    """Takes the text in one field of a JSON object as the document."""

    name: str

    def __call__(self, value: dict[str, Any]) -> str:
        if self.name not in value:
            names = ", ".join(sorted(value)[:10])
            raise CorpusError(f"there is no field {self.name!r}, only {names or 'an empty object'}; set --field=NAME")
        if value[self.name] is None:  # an empty document, as in a column
            return ""
        if not isinstance(value[self.name], str):
            kind = type(value[self.name]).__name__
            raise CorpusError(f"the field {self.name!r} is {kind}, not text; set --field=NAME")
        return value[self.name]


def decode_utf8(content: bytes, file: str, offset: int) -> str:
    """Decode UTF-8. Raises CorpusError with the file, the byte (offset: of the first one) and the likely reason."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise CorpusError(f"{file} is not UTF-8 text at byte {at:,}: {_guess_encoding(content, error.start)}") from None


def _guess_encoding(content: bytes, at: int) -> str:
    nearby = content[max(0, at - 1000) : at + 1000]
    if nearby[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "it looks like UTF-16; save it as UTF-8"
    control_characters = sum(byte < 9 or 14 <= byte < 32 for byte in nearby)
    if b"\0" in nearby or control_characters > len(nearby) / 50:
        return "it looks like a binary file; leave it out"
    return "it looks like Latin-1 or another old encoding; save it as UTF-8 (iconv -f latin1 -t utf-8)"


# --- token ids --------------------------------------------------------------------------------------------------------


class EncodedBlock(NamedTuple):
    """The tokens of a block."""

    ids: np.ndarray  # (N,), in the data type of the shards; each document ends with its end-of-text id
    mask: np.ndarray | None  # (N,) uint8, which tokens count as targets
    lengths: np.ndarray  # (D,) tokens per document
    sizes: np.ndarray  # (D,) bytes of UTF-8 per document
    characters: np.ndarray  # (D,) characters per document
    unknown: np.ndarray  # (D,) how many of them are not in the vocabulary, and were left out or replaced
    hashes: np.ndarray  # (D,) uint64, the document_hash of each
    signatures: np.ndarray | None  # (D, P) uint32, for near duplicates


def encode(
    block: CorpusBlock, tokenizer: Tokenizer, eot: int | None, masked: bool, signed: bool = False
) -> EncodedBlock:
    """Tokenize the documents of a block. An empty document has no tokens, not even an end-of-text token.

    eot: the end-of-text id, if documents end with one. masked: also return a mask. signed: also return signatures.
    Raises UserError with the location of text that the tokenizer cannot encode.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    is_part = isinstance(block, DocumentPart)
    ends_here = not is_part or block.last
    end = np.array([eot] if eot is not None and ends_here else [], dtype=dtype)
    documents = list(block.documents())
    wholes = [text if isinstance(text, str) else "".join(part or "" for part, _ in text) for text in documents]
    contents = [whole.encode("utf-8", "replace") for whole in wholes]
    ids, mask, lengths = [end[:0]], [np.array([], dtype=np.uint8)], []
    encoded_texts = iter(_encode_texts(documents, tokenizer, block))
    for document, content in zip(documents, contents, strict=True):
        segments = [(document, True), (END, True)] if isinstance(document, str) else document
        tokens = [end if text is END else next(encoded_texts) for text, _ in segments]
        if not content and not is_part:  # the last part of a document may be empty, and still ends it
            tokens = []
        ids += tokens
        if masked:
            mask += [np.full(len(t), counts, dtype=np.uint8) for t, (_, counts) in zip(tokens, segments, strict=False)]
        lengths.append(sum(map(len, tokens)))
    has_unknown = tokenizer.on_unknown != "error"
    return EncodedBlock(
        np.concatenate(ids, dtype=dtype, casting="unsafe"),
        np.concatenate(mask) if masked else None,
        np.array(lengths, dtype=np.int64),
        np.array([len(content) for content in contents], dtype=np.int64),
        np.array([len(whole) for whole in wholes], dtype=np.int64),
        np.array([tokenizer.count_unknown(whole) if has_unknown else 0 for whole in wholes], dtype=np.int64),
        np.array([block.hash if is_part else document_hash(content) for content in contents], dtype=np.uint64),
        signatures_of(contents) if signed else None,
    )


def _encode_texts(documents: Sequence[str | Segments], tokenizer: Tokenizer, block: CorpusBlock) -> list[np.ndarray]:
    """The tokens of each document or segment that is text."""
    texts = []
    for number, document in enumerate(documents):
        if isinstance(document, str):
            texts.append((number, document))
        else:
            texts += [(number, text) for text, _ in document if text is not END]
    try:
        return tokenizer.encode_all([text for _, text in texts])
    except UserError:  # one by one, to know where the problem is
        return [_encode_text(text, tokenizer, block, number) for number, text in texts]


def _encode_text(text: str, tokenizer: Tokenizer, block: CorpusBlock, number: int) -> np.ndarray:
    try:
        return tokenizer.encode(text)
    except TextError as error:
        raise UserError(f"{block.location(number, error.at)}: {error.what}") from None
    except UserError as error:
        raise UserError(f"{block.location(number)}: {error}") from None


def characters_of(block: CorpusBlock) -> str:
    """The different characters in a block."""
    return "".join(set().union(*texts_of(block)))


def texts_of(block: CorpusBlock) -> Iterator[str]:
    """The text of each document or segment, without the end-of-text tokens."""
    for document in block.documents():
        if isinstance(document, list):
            yield from (text or "" for text, _ in document)
        else:
            yield document
