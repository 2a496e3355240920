"""Blocks of documents, which are sent to worker processes as raw text and returned as token ids.

Dimensions: D documents of a block, N tokens of the block, P permutations of a signature.
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
from folio.data.leakage import compute_signatures
from folio.data.shards import token_dtype
from folio.data.tokenizer import EncodingError, Tokenizer

SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")

END = None  # the segment of an end-of-text token
RawDocument = tuple[bytes, str, int]  # content, file name, and offset of the first byte in the file
Segments = list[tuple[str | None, bool]]  # texts or END, each with a flag: whether its tokens count as targets


class CorpusError(UserError):
    """Text that cannot be read. The message says how to fix it."""


def document_hash(content: bytes) -> int:
    """Return a 64-bit hash of a document, which determines its split and identifies duplicates."""
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


@dataclass(frozen=True)
class CorpusBlock:
    """One or more documents, or a part of a document."""

    bytes_read: int  # total bytes of the files up to the end of this block
    file: str  # for messages

    def documents(self) -> Iterator[str | Segments]:
        """Yield the decoded documents. Raises CorpusError."""
        raise NotImplementedError

    def location(self, number: int, byte: int | None = None) -> str:
        """Return the location of a document of the block, or of a byte in its text, for messages."""
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
    """A part of a document larger than a block."""

    content: bytes
    offset: int  # position of the first byte in the file
    last: bool
    hash: int  # document_hash of the complete document
    split: Literal["train", "val"] | None = None  # None: determined by the hash

    def documents(self) -> Iterator[str]:
        yield decode_utf8(self.content, self.file, self.offset)

    def location(self, number: int, byte: int | None = None) -> str:
        return f"{self.file}, from byte {self.offset + (byte or 0):,}"


@dataclass(frozen=True)
class RowBlock(CorpusBlock):
    """Documents as a list or an Arrow array of strings, where null is an empty document, or as a list of objects.

    document: converts an object to a document.
    """

    content: Sequence[Any]
    first: int = 0  # index of the first row in the file
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
    """Lines of JSON objects."""

    content: bytes
    line: int  # number of the first line
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
        """Yield the number and the content of each line that is not blank."""
        for number, line in enumerate(self.content.split(b"\n"), start=self.line):
            if line.strip():
                yield number, line


def _byte_of_text(byte: int | None) -> str:
    return "" if byte is None else f", byte {byte:,} of its text"


def _parse_json_object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
        if SURROGATE_ESCAPE.search(line):  # JSON may contain lone surrogates, which UTF-8 cannot encode; they become ?
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except UnicodeDecodeError as error:
        raise CorpusError(f"this line is not UTF-8 at byte {error.start:,}; save it as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"this line is not JSON: {error}; fix it or remove it") from None
    if not isinstance(value, dict):
        raise CorpusError("this line is not an object {...}")
    return value


@dataclass(frozen=True)
class Field:
    """Returns the text in one field of a JSON object."""

    name: str

    def __call__(self, value: dict[str, Any]) -> str:
        if self.name not in value:
            names = ", ".join(sorted(value)[:10])
            raise CorpusError(f"there is no field {self.name!r}, only {names or 'an empty object'}; set --field=NAME")
        if value[self.name] is None:  # an empty document, as for null in a column
            return ""
        if not isinstance(value[self.name], str):
            kind = type(value[self.name]).__name__
            raise CorpusError(f"the field {self.name!r} is {kind}, not text; set --field=NAME")
        return value[self.name]


def decode_utf8(content: bytes, file: str, offset: int) -> str:
    """Decode UTF-8. Raises CorpusError with the file, the byte, and the likely encoding.

    offset: position of the first byte in the file.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        byte, reason = offset + error.start, _guess_encoding(content, error.start)
        raise CorpusError(f"{file} is not UTF-8 text at byte {byte:,}: {reason}") from None


def _guess_encoding(content: bytes, position: int) -> str:
    nearby = content[max(0, position - 1000) : position + 1000]
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
    mask: np.ndarray | None  # (N,) uint8, 1 for tokens that count as targets
    lengths: np.ndarray  # (D,) tokens per document
    sizes: np.ndarray  # (D,) bytes of UTF-8 per document
    characters: np.ndarray  # (D,) characters per document
    unknown: np.ndarray  # (D,) characters outside the vocabulary, which were removed or replaced
    hashes: np.ndarray  # (D,) uint64, document_hash
    signatures: np.ndarray | None  # (D, P) uint32, for near duplicates


def encode(
    block: CorpusBlock, tokenizer: Tokenizer, eot: int | None, masked: bool, signed: bool = False
) -> EncodedBlock:
    """Tokenize the documents of a block. An empty document has no tokens, not even an end-of-text token.

    eot: the end-of-text id; None: documents end without one. masked: return a mask. signed: return signatures.
    Raises UserError with the location of text that the tokenizer cannot encode.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    is_part = isinstance(block, DocumentPart)
    ends_here = not is_part or block.last
    end = np.array([eot] if eot is not None and ends_here else [], dtype=dtype)
    documents = list(block.documents())
    texts = [doc if isinstance(doc, str) else "".join(text or "" for text, _ in doc) for doc in documents]
    contents = [text.encode("utf-8", "replace") for text in texts]
    ids, mask, lengths = [end[:0]], [np.array([], dtype=np.uint8)], []
    encoded_texts = iter(_encode_texts(documents, tokenizer, block))
    for document, content in zip(documents, contents, strict=True):
        segments = [(document, True), (END, True)] if isinstance(document, str) else document
        tokens = [end if text is END else next(encoded_texts) for text, _ in segments]
        if not content and not is_part:  # the last part of a document may be empty, and still has an end-of-text token
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
        np.array([len(text) for text in texts], dtype=np.int64),
        np.array([tokenizer.count_unknown(text) if has_unknown else 0 for text in texts], dtype=np.int64),
        np.array([block.hash if is_part else document_hash(content) for content in contents], dtype=np.uint64),
        compute_signatures(contents) if signed else None,
    )


def _encode_texts(documents: Sequence[str | Segments], tokenizer: Tokenizer, block: CorpusBlock) -> list[np.ndarray]:
    """Return the token ids of each document or text segment."""
    texts = []
    for number, document in enumerate(documents):
        if isinstance(document, str):
            texts.append((number, document))
        else:
            texts += [(number, text) for text, _ in document if text is not END]
    try:
        return tokenizer.encode_all([text for _, text in texts])
    except UserError:  # encode one by one to locate the error
        return [_encode_text(text, tokenizer, block, number) for number, text in texts]


def _encode_text(text: str, tokenizer: Tokenizer, block: CorpusBlock, number: int) -> np.ndarray:
    try:
        return tokenizer.encode(text)
    except EncodingError as error:
        raise UserError(f"{block.location(number, error.byte)}: {error.problem}") from None
    except UserError as error:
        raise UserError(f"{block.location(number)}: {error}") from None


def unique_characters(block: CorpusBlock) -> str:
    """Return the distinct characters in a block."""
    return "".join(set().union(*iterate_texts(block)))


def iterate_texts(block: CorpusBlock) -> Iterator[str]:
    """Yield the text of each document or segment, without end-of-text tokens."""
    for document in block.documents():
        if isinstance(document, list):
            yield from (text or "" for text, _ in document)
        else:
            yield document
