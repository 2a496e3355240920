"""Blocks of documents, which are sent to worker processes as raw text and returned as token ids.

Dimensions: D documents of a block, N tokens of the block.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from folio import UserError
from folio.data.account import IN, UNUSED_FIELDS, Account
from folio.data.inputs import CorpusError, Position, decode_utf8, unify_record
from folio.data.shards import LAST_TARGET, token_dtype
from folio.data.tokenizer import EOT_TEXT, EncodingError, OnUnknown, Tokenizer

SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")

PATH = "\0"  # between the names of nested fields, which may contain dots
CHANGED_CELLS = r"\r in fields"  # category of line ends
END = None  # the segment of an end-of-text token
RawDocument = tuple[bytes, str, Position]  # content, file name, and the position of its first byte in the file
Segments = list[tuple[str | None, bool]]  # texts or END, each with a flag: whether its tokens count as targets
Content = str | Segments | None  # of a document; None: the record has no text


class Document(NamedTuple):
    """A document, and the fields of the record that it was made of.

    used: paths of fields, names joined by PATH, such as "prompt" (lists add nothing to a path). left_out: what of them
    is not in the document, by a singular noun phrase such as "character of white space at the ends of texts".
    cut: the number of characters of this.
    """

    content: Any  # Content, or what else a caller makes of records; None: the record has no document
    used: frozenset[str]
    left_out: Mapping[str, int] = MappingProxyType({})
    cut: int = 0


MakeDocument = Callable[[dict[str, Any]], Document]


def document_hash(content: bytes) -> int:
    """Return a 64-bit hash of a document, which determines its split and identifies duplicates."""
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


@dataclass(frozen=True)
class CorpusBlock:
    """Documents, possibly none, or a part of a document.

    account: what was read of the files for this block, as far as the reader has counted it.
    """

    bytes_read: int  # total bytes of the files up to the end of this block
    file: str  # for messages
    account: Account = field(default_factory=Account, kw_only=True, compare=False)

    def documents(self, account: Account) -> Iterator[Content]:
        """Yield the decoded documents. account: receives what they were made of. Raises CorpusError."""
        raise NotImplementedError

    def location(self, number: int, byte: int | None = None) -> str:
        """Return the location of a document of the block, or of a byte in its text, for messages."""
        raise NotImplementedError


@dataclass(frozen=True)
class TextBlock(CorpusBlock):
    """Documents from text files."""

    content: list[RawDocument]

    def documents(self, account: Account) -> Iterator[str]:
        for content, file, position in self.content:
            account["bytes"]["text"] += len(content)
            yield decode_utf8(content, file, position)

    def location(self, number: int, byte: int | None = None) -> str:
        content, file, position = self.content[number]
        return f"{file}:{position.after(content[: byte or 0])}"


@dataclass(frozen=True)
class DocumentPart(CorpusBlock):
    """A part of a document larger than a block."""

    content: bytes
    position: Position  # of the first byte in the file
    last: bool
    hash: int  # document_hash of the complete document
    split: Literal["train", "val"] | None = None  # None: determined by the hash

    def documents(self, account: Account) -> Iterator[str]:
        account["bytes"]["text"] += len(self.content)
        yield decode_utf8(self.content, self.file, self.position)

    def location(self, number: int, byte: int | None = None) -> str:
        return f"{self.file}:{self.position.after(self.content[: byte or 0])}"


@dataclass(frozen=True)
class RecordBlock(CorpusBlock):
    """Records of a file: texts of JSON objects, rows of a table as dictionaries, or rows of parquet as a RecordBatch.

    numbers: of the records, in the file. place: what is numbered, ":" for lines. make: converts a record to a document.
    """

    content: Sequence[Any]
    numbers: Sequence[int]
    place: str
    make: MakeDocument
    keep_line_ends: bool = False

    def documents(self, account: Account) -> Iterator[Content]:
        account["records"]["documents"] += len(self.content)
        for number, record in zip(self.numbers, self._records(), strict=True):
            try:
                record = parse_object(record, account) if isinstance(record, bytes) else record
                yield read_record(record, self.make, self.keep_line_ends, account)
            except CorpusError as error:
                raise CorpusError(f"{self.file}{self.place}{number}: {error}") from None

    def _records(self) -> Sequence[Any]:
        """The records as objects of Python. Raises CorpusError if a text of parquet is not UTF-8."""
        if isinstance(self.content, list):
            return self.content
        number = 0
        try:
            try:
                return _decoded(self.content.to_pylist())
            except UnicodeDecodeError:  # find the row
                for number in range(len(self.content)):
                    _decoded(self.content.slice(number, 1).to_pylist())
                raise
        except UnicodeDecodeError as error:
            place = f"{self.file}{self.place}{self.numbers[number]}"
            raise CorpusError(f"{place}: it is not UTF-8 text at byte {error.start:,}; save it as UTF-8") from None

    def location(self, number: int, byte: int | None = None) -> str:
        return f"{self.file}{self.place}{self.numbers[number]}{_byte_of_text(byte)}"


def _decoded(value: Any) -> Any:
    """Return a value of Arrow in which binary text is decoded. Raises UnicodeDecodeError."""
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, dict):
        return {name: _decoded(item) for name, item in value.items()}
    return [_decoded(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class MemoryBlock(CorpusBlock):
    """Finished documents. first: the number of the first one."""

    content: Sequence[Content]
    first: int

    def documents(self, account: Account) -> Iterator[Content]:
        yield from self.content

    def location(self, number: int, byte: int | None = None) -> str:
        return f"{self.file}, document {self.first + number:,}{_byte_of_text(byte)}"


def _byte_of_text(byte: int | None) -> str:
    return "" if byte is None else f", byte {byte:,} of its text"


# --- records ----------------------------------------------------------------------------------------------------------


def parse_object(line: bytes, account: Account) -> dict[str, Any]:
    """Parse a JSON object. Raises CorpusError without the location."""
    try:
        value = JSON.decode(line.decode("utf-8-sig"))  # json.loads accepts lone surrogates in bytes
    except UnicodeDecodeError as error:
        raise CorpusError(f"this line is not UTF-8 at byte {error.start:,}; save it as UTF-8") from None
    except CorpusError:
        raise
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"this line is not JSON: {error}; fix it or remove it") from None
    if not isinstance(value, dict):
        raise CorpusError("this line is not an object {...}")
    if SURROGATE_ESCAPE.search(line):  # JSON may contain lone surrogates, which UTF-8 cannot encode; they become ?
        return replace_surrogates(value, account)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, whose names must differ: json.loads would drop the first of two values."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise CorpusError(f"the name {repeated!r} occurs twice in one object; remove one")
    return value


JSON = json.JSONDecoder(object_pairs_hook=_object)


def replace_surrogates(value: dict[str, Any], account: Account) -> dict[str, Any]:
    """Replace lone surrogates by question marks, and count them. Raises CorpusError if two names become the same."""
    text = json.dumps(value, ensure_ascii=False)
    account["changed"]["lone surrogate (now ?)"] += sum("\ud800" <= c <= "\udfff" for c in text)
    return JSON.decode(text.encode("utf-8", "replace").decode())


def read_record(record: dict[str, Any], make: MakeDocument, keep_line_ends: bool, account: Account) -> Any:
    """Return the content of a record's document, and count the characters of each field. Raises CorpusError."""
    values = _values_of(record)
    texts = [value for _, value in values if isinstance(value, str)]
    characters, unused = account["characters"], account[UNUSED_FIELDS]
    characters[IN] += sum([len(text) for text in texts])
    if not keep_line_ends and (changed := sum([text.count("\r") for text in texts])):
        account["line ends"][CHANGED_CELLS] += changed
        characters["line ends"] += sum([text.count("\r\n") for text in texts])
        record = unify_record(record)
        values = _values_of(record)
    content, used, left_out, cut = make(record)
    if left_out:
        account["left out of records"].update(left_out)
    category = "used" if content is not None else "records without a document"
    tops = {path.partition(PATH)[0] for path in used}
    others: set[str] = set()  # paths of unused values in fields of which others are used
    for path, value in values:
        is_used = path in used
        if isinstance(value, str):
            characters[category if is_used else "unused"] += len(value)
        if not is_used and path.partition(PATH)[0] in tops:
            others.add(path)
    if cut and content is not None:
        characters["left out of used fields"] += cut
        characters["used"] -= cut
    unused.update(path.replace(PATH, ".") for path in others)
    unused.update(record.keys() - tops)
    return content


def _values_of(record: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the path and the value of each leaf of a record that is not null."""
    values: list[tuple[str, Any]] = []
    _collect_values(record, "", values)
    return values


def _collect_values(value: Any, path: str, values: list[tuple[str, Any]]) -> None:
    """Append the path and the value of each leaf of a JSON value that is not null."""
    if isinstance(value, str):
        values.append((path, value))
    elif isinstance(value, dict):
        for name, item in value.items():
            _collect_values(item, f"{path}{PATH}{name}" if path else name, values)
    elif isinstance(value, list):
        for item in value:
            _collect_values(item, path, values)
    elif value is not None:
        values.append((path, value))


@dataclass(frozen=True)
class Field:
    """Returns the text in one field of a record."""

    name: str

    def __call__(self, record: dict[str, Any]) -> Document:
        if self.name not in record:
            names = ", ".join(sorted(record)[:10])
            raise CorpusError(f"there is no field {self.name!r}, only {names or 'an empty object'}; set --field=NAME")
        text = record[self.name]
        if text is not None and not isinstance(text, str):  # null is an empty document, as in a column
            raise CorpusError(f"the field {self.name!r} is {type(text).__name__}, not text; set --field=NAME")
        return Document(text or "", frozenset((self.name,)))


# --- token ids --------------------------------------------------------------------------------------------------------


class EncodedBlock(NamedTuple):
    """The tokens of a block."""

    ids: np.ndarray  # (N,), in the data type of the shards; each document ends with its end-of-text id
    mask: np.ndarray | None  # (N,) uint8: 1 for tokens that count as targets, LAST_TARGET at the end of a document
    lengths: np.ndarray  # (D,) tokens per document
    sizes: np.ndarray  # (D,) bytes of UTF-8 per document
    characters: np.ndarray  # (D,) characters per document
    unknown: np.ndarray  # (D,) characters outside the vocabulary, which were removed or replaced
    hashes: np.ndarray  # (D,) uint64, document_hash
    groups: np.ndarray  # (D,) uint64, which decide the split: document_hash of the first prompts, else the hashes
    account: Account  # what the documents were made of


def encode(
    block: CorpusBlock, tokenizer: Tokenizer, eot: int | None, masked: bool, on_unknown: OnUnknown = "error"
) -> EncodedBlock:
    """Tokenize the documents of a block. An empty document has no tokens, not even an end-of-text token.

    eot: the end-of-text id; None: documents end without one. masked: return a mask. Raises UserError with the location
    of text that the tokenizer cannot encode.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    is_part = isinstance(block, DocumentPart)
    ends_here = not is_part or block.last
    end = np.array([eot] if eot is not None and ends_here else [], dtype=dtype)
    account = Account()
    documents = [document or "" for document in block.documents(account)]
    texts = [plain_text(document) for document in documents]
    contents = [text.encode("utf-8", "replace") for text in texts]
    ids, mask, lengths = [end[:0]], [np.array([], dtype=np.uint8)], []
    encoded_texts = iter(_encode_texts(documents, tokenizer, block, on_unknown))
    for document, content in zip(documents, contents, strict=True):
        segments = [(document, True), (END, True)] if isinstance(document, str) else document
        tokens = [end if text is END else next(encoded_texts) for text, _ in segments]
        if not content and not is_part:  # the last part of a document may be empty, and still has an end-of-text token
            tokens = []
        ids += tokens
        if masked:
            mask += [np.full(len(t), counts, dtype=np.uint8) for t, (_, counts) in zip(tokens, segments, strict=False)]
            if len(mask[-1]) and mask[-1][-1]:
                mask[-1][-1] = LAST_TARGET
        lengths.append(sum(map(len, tokens)))
    place = "in text" if isinstance(block, TextBlock | DocumentPart) else "in records"
    account["special text"][place] += sum(text.count(EOT_TEXT) for text in texts)
    if not is_part:
        account["documents"][IN] += len(texts)
    account["document bytes"][IN] += sum(map(len, contents))
    hashes = [block.hash if is_part else document_hash(content) for content in contents]
    groups = [_group(document, hash) for document, hash in zip(documents, hashes, strict=True)]
    if masked:
        hashes = hash_with_targets(documents, contents)
    return EncodedBlock(
        np.concatenate(ids, dtype=dtype, casting="unsafe"),
        np.concatenate(mask) if masked else None,
        np.array(lengths, dtype=np.int64),
        np.array([len(content) for content in contents], dtype=np.int64),
        np.array([len(text) for text in texts], dtype=np.int64),
        np.array([0 if on_unknown == "error" else tokenizer.count_unknown(text) for text in texts], dtype=np.int64),
        np.array(hashes, dtype=np.uint64),
        np.array(groups, dtype=np.uint64),
        account,
    )


def plain_text(document: Content) -> str:
    """Return the text of a document without its end-of-text tokens."""
    return "".join(text or "" for text, _ in document) if isinstance(document, list) else document or ""


def hash_with_targets(documents: Sequence[str | Segments], contents: Sequence[bytes]) -> list[int]:
    """Return the hashes of masked documents, which are not the same if their targets differ."""
    flags = [bytes(counts for _, counts in document) for document in documents]
    return [document_hash(content + flag) for content, flag in zip(contents, flags, strict=True)]


def _group(document: str | Segments, hash: int) -> int:
    """Return the hash of the prompt of a pair, or of the first one of a chat, or else the hash of the document.

    So a chat and its beginning, which is a chat, too, are in the same split.
    """
    if isinstance(document, str):
        return hash
    segments = itertools.takewhile(lambda segment: not segment[1], document)
    prompt = "".join(text or "" for text, _ in segments)
    return document_hash(prompt.encode("utf-8", "replace")) if prompt else hash


def _encode_texts(
    documents: Sequence[str | Segments], tokenizer: Tokenizer, block: CorpusBlock, on_unknown: OnUnknown
) -> list[np.ndarray]:
    """Return the token ids of each document or text segment."""
    texts = []
    for number, document in enumerate(documents):
        if isinstance(document, str):
            texts.append((number, document))
        else:
            texts += [(number, text) for text, _ in document if text is not END]
    try:
        return tokenizer.encode_all([text for _, text in texts], on_unknown)
    except UserError:  # encode one by one to locate the error
        return [_encode_text(text, tokenizer, block, number, on_unknown) for number, text in texts]


def _encode_text(text: str, tokenizer: Tokenizer, block: CorpusBlock, number: int, on_unknown: OnUnknown) -> np.ndarray:
    try:
        return tokenizer.encode(text, on_unknown)
    except EncodingError as error:
        raise UserError(f"{block.location(number, error.byte)}: {error.problem}") from None
    except UserError as error:
        raise UserError(f"{block.location(number)}: {error}") from None


def unique_characters(block: CorpusBlock) -> str:
    """Return the distinct characters in a block."""
    return "".join(set().union(*iterate_texts(block)))


def iterate_texts(block: CorpusBlock) -> Iterator[str]:
    """Yield the text of each document or segment, without end-of-text tokens."""
    for document in block.documents(Account()):
        if isinstance(document, list):
            yield from (text or "" for text, _ in document)
        else:
            yield document or ""
