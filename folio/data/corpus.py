"""A corpus: the documents of files of any size and format, or in memory, as a stream of blocks.

A document is a file, a record, or the text between two separators. A block contains several documents. A document
larger than a block is split into parts where no tokenizer has a token across the boundary, so that the ids of the parts
are those of the whole text.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from folio.data.account import Account
from folio.data.blocks import (
    Content,
    CorpusBlock,
    CorpusError,
    DocumentPart,
    Field,
    MakeDocument,
    MemoryBlock,
    RawDocument,
    TextBlock,
)
from folio.data.builder import SplitRule, split_by_number
from folio.data.inputs import DEFAULT_LIMITS, TEXT_FORMATS, TIMES, Chunk, Inputs, Position, Source, read_lines
from folio.data.records import NameColumns, header, open_parquet, parquet_text_bytes, record_blocks
from folio.data.shards import PromptFormat
from folio.data.tokenizer import EOT_TEXT

# Matches a character that is not white space, followed by a space or a line feed. Every BPE of Folio ends a word there.
SAFE_CUT = re.compile(
    rb"(?:[!-~]|[\xc3-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]|\xe3\x80[\x81-\xbf]|\xe3[\x81-\xbf][\x80-\xbf]"
    rb"|[\xe4-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3})(?=[ \n])"
)


TEXT = Field("text")  # the usual field, as in the data sets of the Hugging Face hub


@dataclass
class Corpus:
    """The documents of files, in order.

    make: converts a record to a document. make_row: the same for a row of a .csv or .tsv file; None: make.
    name_columns: names the columns of such a table by its first rows. split_on: the separator of documents in text
    files. masked: documents are Segments, some of which do not count as targets. prompt_format: the format of the
    prompts in the documents; None: no prompts. split_rule: selects the documents for validation; None: determined by
    the settings of `prepare`.
    """

    inputs: Inputs
    make: MakeDocument = TEXT
    make_row: MakeDocument | None = None
    name_columns: NameColumns = header
    split_on: str | None = None
    masked: bool = False
    prompt_format: PromptFormat | None = None
    split_rule: SplitRule | None = None
    report_entries: ClassVar[dict[str, Any]] = {}  # additional entries of report.json

    def __post_init__(self) -> None:
        self.bytes = self.inputs.bytes
        for source in self.sources:
            if source.format == "parquet":
                open_parquet(source, self._field)  # report errors before any other work

    @property
    def sources(self) -> list[Source]:
        return self.inputs.sources

    @property
    def notes(self) -> list[str]:
        """How files are read if that does not follow from their names."""
        return self.inputs.notes

    @property
    def _field(self) -> str | None:
        return self.make.name if isinstance(self.make, Field) else None

    @property
    def is_one_text(self) -> bool:
        """Whether the corpus is a single document, whose tail is for validation."""
        return len(self.sources) == 1 and self.sources[0].format in TEXT_FORMATS and not self.split_on

    @cached_property
    def text_bytes(self) -> int:
        """The decompressed size of all text, which is an estimate for compressed files."""
        return sum(
            parquet_text_bytes(source, self._field) if source.format == "parquet" else source.text_bytes
            for source in self.sources
        )

    def fingerprint(self) -> dict[str, Any]:
        """A value that changes if the documents change."""
        is_text = {source.format in TEXT_FORMATS for source in self.sources}
        field, split_on = (self._field if False in is_text else None), (self.split_on if True in is_text else None)
        return {"sources": [source.fingerprint() for source in self.sources], "field": field, "split_on": split_on}

    def account(self) -> Account:
        """The files and folders of the inputs. The blocks have the accounts of what is in the files."""
        return self.inputs.account()

    def documents(self, account: Account | None = None) -> Iterator[Any]:
        """Yield all documents, where a large text is in parts. Raises CorpusError. account: receives what was read."""
        account = Account() if account is None else account
        for block in self.blocks():
            account.add(block.account)
            yield from block.documents(account)

    def blocks(self, val_fraction: float | None = None) -> Iterator[CorpusBlock]:
        """Yield all documents. val_fraction: split a single text into two documents, the second for validation.

        Raises CorpusError, also if the separator never occurs.
        """
        if self.is_one_text:
            source = self.sources[0]
            yield from _parts(source) if val_fraction is None else _split_text(source, val_fraction)
            return
        bytes_done = 0
        small = _SmallFiles()
        separators: Counter[bool] = Counter()  # number of text files with and without a separator
        for source in self.sources:
            if self._is_small_text(source):
                small.add(source, bytes_done + source.bytes)
                bytes_done += source.bytes
                if small.size >= source.limits.block:
                    yield small.block()
                continue
            if small.documents:
                yield small.block()
            for block in self._source_blocks(source, separators):
                yield replace(block, bytes_read=bytes_done + block.bytes_read)
            bytes_done += source.bytes
        if small.documents:
            yield small.block()
        if self.split_on and separators[False] and not separators[True]:
            raise _missing_separator(self.split_on, next(s for s in self.sources if s.format in TEXT_FORMATS))

    def _is_small_text(self, source: Source) -> bool:
        """Whether the file is one document that shares a block with other files."""
        is_one_document = source.format in TEXT_FORMATS and not self.split_on
        return is_one_document and not source.compression and source.bytes <= source.limits.block

    def _source_blocks(self, source: Source, separators: Counter[bool]) -> Iterator[CorpusBlock]:
        if source.format not in TEXT_FORMATS:
            make = self.make_row or self.make if source.format == "csv" else self.make
            yield from record_blocks(source, make, self.name_columns)
        elif self.split_on:
            occurs = False
            for block in _separated(source, self.split_on.encode()):
                occurs = occurs or block.account["bytes"]["separators"] > 0
                yield block
            separators[occurs] += 1
        else:
            digest = blake2b(digest_size=8)
            for chunk in read_text(source, Account()):
                digest.update(chunk.content)
            yield from _parts(source, int.from_bytes(digest.digest(), "little"))


class _SmallFiles:
    """Collects files, each of which is one document, for a block."""

    def __init__(self) -> None:
        self.documents: list[RawDocument] = []
        self.size = self.bytes_read = 0
        self.account = Account()

    def add(self, source: Source, bytes_read: int) -> None:
        content = b"".join(chunk.content for chunk in read_text(source, self.account))
        self.documents.append((content, source.name, Position()))
        self.size += len(content)
        self.bytes_read = bytes_read

    def block(self) -> TextBlock:
        """Return the collected files, and start again."""
        documents, self.documents, self.size = self.documents, [], 0
        return TextBlock(self.bytes_read, documents[0][1], documents, account=self.account.take())


def _missing_separator(separator: str, source: Source) -> CorpusError:
    """An error that shows what may separate the documents instead."""
    head = b"".join(chunk.content for chunk in itertools.islice(read_text(source, Account()), 1)).decode(
        "utf-8", "replace"
    )
    lines = Counter(line for line in head.split("\n") if 0 < len(line) <= 40)
    candidates = {text: head.count(text) for text in ("\n\n", "\r\n\r\n", "\n", "\r\n", EOT_TEXT)}
    candidates |= {f"\n{line}\n": count for line, count in lines.most_common(1) if count > 2}
    found = [f"{json.dumps(text, ensure_ascii=False)} {n:,} times" for text, n in candidates.items() if n]
    instead = f"; {source.name} begins with text in which there is {', '.join(found)}" if found else ""
    return CorpusError(f"split_on={json.dumps(separator, ensure_ascii=False)} does not occur in the text{instead}")


class Documents:
    """Documents in memory, with the interface of Corpus.

    inputs: the files that contain them, for messages and meta.json. make: converts each item to a document. val: the
    indices of the documents for validation; None: determined by the settings of `prepare`. report_entries: additional
    entries of report.json. augment: returns the variants of a training document, including the document (data
    augmentation); it needs the documents for validation to come first. recipe: other inputs of the documents, for the
    fingerprint. account: what was read to make them.
    """

    is_one_text = False
    split_on = None

    def __init__(
        self,
        inputs: Inputs,
        documents: Sequence[Any],
        val: Sequence[int] | np.ndarray | None = None,
        report_entries: dict[str, Any] | None = None,
        augment: Callable[[str], list[str]] | None = None,
        recipe: dict[str, Any] | None = None,
        make: Callable[[Any], Content] = lambda document: document,
        masked: bool = False,
        prompt_format: PromptFormat | None = None,
        account: Account | None = None,
    ):
        self.sources, self.bytes, self.notes = inputs.sources, inputs.bytes, inputs.notes
        self.items, self.augment, self.recipe, self.make = documents, augment, recipe, make
        self.masked, self.prompt_format = masked, prompt_format
        self.split_rule = None if val is None else split_by_number(val)
        self.report_entries = report_entries or {}
        self.n_val = None if val is None else len(val)
        self.file = self.sources[0].name if len(self.sources) == 1 else "the input"  # for messages
        self._account = account or inputs.account()

    @cached_property
    def text_bytes(self) -> int:
        n_variants = len(self.augment(self.items[self.n_val])) if self.augment else 1
        n_val = self.n_val or 0
        return sum(map(_text_size, self.items[:n_val])) + n_variants * sum(map(_text_size, self.items[n_val:]))

    def fingerprint(self) -> dict[str, Any]:
        """A value that changes if the documents change."""
        digest = blake2b(digest_size=16)
        for item in self.items:
            text = item if isinstance(item, str) else json.dumps(item)
            digest.update(b"%d " % len(text) + text.encode("utf-8", "replace"))
        n_train = len(self.items) - (self.n_val or 0)
        return {"val": self.n_val, "train": n_train, "blake2b": digest.hexdigest(), "recipe": self.recipe}

    def account(self) -> Account:
        """What was read to make the documents."""
        return self._account

    def blocks(self, val_fraction: float | None = None) -> Iterator[CorpusBlock]:
        """Yield all documents."""
        done, first, documents, size = 0, 0, [], 0
        for item in self._augmented():
            documents.append(self.make(item))
            size += _text_size(item)
            if size >= DEFAULT_LIMITS.block:
                done += size
                yield self._block(documents, first, done)
                first, documents, size = first + len(documents), [], 0
        if documents:
            yield self._block(documents, first, self.text_bytes)

    def _augmented(self) -> Iterator[Any]:
        for number, item in enumerate(self.items):
            if self.augment and number >= self.n_val:
                yield from self.augment(item)
            else:
                yield item

    def _block(self, documents: list[Content], first: int, done: int) -> MemoryBlock:
        bytes_read = min(self.bytes, self.bytes * done // max(1, self.text_bytes))
        return MemoryBlock(bytes_read, self.file, documents, first)


def _text_size(item: str | dict[str, Any]) -> int:
    """Return the number of bytes of a text, or of the texts in an object."""
    if isinstance(item, dict):
        return sum(_text_size(text) for text in item.values() if isinstance(text, str))
    return len(item.encode("utf-8", "replace"))


# --- texts ------------------------------------------------------------------------------------------------------------


def read_text(source: Source, account: Account) -> Iterator[Chunk]:
    """Yield the text of a file in chunks. Subtitles lose their numbers and times. Raises CorpusError."""
    if source.format == "text":
        yield from source.read(account)
        return
    lines = read_lines(replace(source, format="text"), account)
    text, size, bytes_read = [], 0, 0
    has_notes: bool | None = None  # only WebVTT has notes
    is_start, is_note = True, False  # whether the previous line is blank, and whether this block is a note
    for (line, bytes_read), (following, _) in itertools.pairwise(itertools.chain(lines, [Chunk(b"", 0)])):
        has_notes = line.startswith(b"WEBVTT") if has_notes is None else has_notes
        is_note = has_notes and (NOTES.match(line) is not None if is_start else is_note and bool(line.strip()))
        if TIMES.fullmatch(line):
            is_note = False
            account["bytes"]["times"] += len(line)
        elif TIMES.fullmatch(following) and (is_start or line.strip().isdigit()):
            account["bytes"]["numbers of subtitles"] += len(line)
        elif is_note:
            account["bytes"]["notes in subtitles"] += len(line)
        elif not line.strip():
            account["bytes"]["blank lines"] += len(line)
        else:
            text.append(line)
            size += len(line)
            if size >= source.limits.block:
                yield Chunk(b"".join(text), bytes_read)
                text, size = [], 0
        is_start = not line.strip()
    yield Chunk(b"".join(text), bytes_read)


NOTES = re.compile(rb"(?:WEBVTT|NOTE|STYLE|REGION)\b")


class _PartCutter:
    """Splits one document into parts as its chunks are read. account: what was read since the last part."""

    def __init__(
        self,
        source: Source,
        account: Account,
        hash: int = 0,
        split: Literal["train", "val"] | None = None,
        position: Position = Position(),  # noqa: B008 (it is immutable)
    ):
        self.source, self.account, self.hash, self.split = source, account, hash, split
        self.position = position  # in the file, of the first byte of `pending`
        self.pending = b""
        self.bytes_read = 0

    def add(self, chunk: bytes, bytes_read: int) -> Iterator[DocumentPart]:
        """Append a chunk, and yield the text before the last safe cut if there is one."""
        searched = len(self.pending)
        self.pending += chunk
        self.bytes_read = bytes_read
        if cut := find_cut(self.pending, searched, self.source.limits.word):
            yield self._part(self.pending[:cut], last=False)
            self.pending = self.pending[cut:]

    def finish(self) -> DocumentPart:
        """Return the last part, which may be empty."""
        return self._part(self.pending, last=True)

    def _part(self, content: bytes, last: bool) -> DocumentPart:
        position, self.position = self.position, self.position.after(content)
        name, account = self.source.name, self.account.take()
        return DocumentPart(self.bytes_read, name, content, position, last, self.hash, self.split, account=account)


def _parts(source: Source, hash: int = 0) -> Iterator[DocumentPart]:
    """Yield the parts of a file that is one document, at least one."""
    account = Account()
    cutter = _PartCutter(source, account, hash)
    for chunk in read_text(source, account):
        yield from cutter.add(*chunk)
    yield cutter.finish()


def _split_text(source: Source, val_fraction: float) -> Iterator[DocumentPart]:
    """Yield the parts of one text as two documents. The last val_fraction of its characters is for validation."""
    characters = sum(int(_starts_character(chunk.content).sum()) for chunk in read_text(source, Account()))
    remaining = int(characters * (1 - val_fraction))  # characters for training that have not been read
    account = Account()
    chunks = read_text(source, account)
    train = _PartCutter(source, account, split="train")
    first_val_chunk: list[Chunk] = []
    for chunk, bytes_read in chunks:
        starts = _starts_character(chunk)
        count = int(starts.sum())
        if count > remaining:
            boundary = int(np.flatnonzero(starts)[remaining])
            yield from train.add(chunk[:boundary], bytes_read)
            first_val_chunk.append(Chunk(chunk[boundary:], bytes_read))
            break
        remaining -= count
        yield from train.add(chunk, bytes_read)
    yield train.finish()
    val = _PartCutter(source, account, split="val", position=train.position)
    for chunk in itertools.chain(first_val_chunk, chunks):
        yield from val.add(*chunk)
    yield val.finish()


def _starts_character(content: bytes) -> np.ndarray:
    """Return whether each byte of UTF-8 text is the first one of a character, (N,) bool."""
    return (np.frombuffer(content, dtype=np.uint8) & 0xC0) != 0x80


def find_cut(content: bytes, searched: int = 0, max_word: int = DEFAULT_LIMITS.word) -> int:
    """Return the last index where a text can be cut without changing its ids, or 0 if there is none.

    GPT-2's pre-tokenizer ends a word there. If a text of max_word or more bytes has no such index, the result is the
    start of its last character. searched: the number of leading bytes that are known to have no such index.
    """
    for tail in (1 << 10, 1 << 16, len(content)):
        begin = max(0, len(content) - tail, searched - 4)  # the last character searched may have been incomplete
        cut = 0
        for match in SAFE_CUT.finditer(content, begin):
            cut = match.end()
        if cut:
            return cut
    if len(content) < max_word:
        return 0
    cut = len(content) - 1
    while cut > len(content) - 4 and 0x80 <= content[cut] < 0xC0:
        cut -= 1
    return cut


# --- texts between separators -----------------------------------------------------------------------------------------


class Span(NamedTuple):
    """Consecutive bytes of a document, whether a separator follows, and the bytes of the file read so far."""

    content: bytes
    ends: bool
    bytes_read: int


def _separated(source: Source, separator: bytes) -> Iterator[TextBlock | DocumentPart]:
    """Yield the documents between separators. Documents of more than limits.document bytes are split into parts.

    The hash of a large document must be known before its first part. A second reader of the file computes it ahead.
    """
    account = Account()
    spans = _spans(read_text(source, account), separator, account)
    hashes = enumerate(_hashes(_spans(read_text(source, Account()), separator, Account())))
    finished: list[RawDocument] = []  # for the next block
    pending: list[bytes] = []  # the beginning of an incomplete document
    number = size = 0  # of the incomplete document
    position = Position()  # of its first byte

    def block(bytes_read: int, documents: list[RawDocument]) -> TextBlock:
        return TextBlock(bytes_read, source.name, documents, account=account.take())

    for content, ends, bytes_read in spans:
        pending.append(content)
        size += len(content)
        if ends:
            document = b"".join(pending)
            finished.append((document, source.name, position))
            position = position.after(document + separator)
        elif finished:
            yield block(bytes_read, finished)
            finished = []
        if size > source.limits.document and not ends:
            hash = next(hash for n, hash in hashes if n == number)
            cutter = _PartCutter(source, account, hash, position=position)
            for part in itertools.chain([Span(b"".join(pending), False, bytes_read)], _rest_of_document(spans)):
                yield from cutter.add(part.content, part.bytes_read)
            yield cutter.finish()
            position, ends = cutter.position.after(separator), True
        if ends:
            pending, number, size = [], number + 1, 0
    yield block(source.bytes, [(b"".join(pending), source.name, position)] if size else [])


def _spans(chunks: Iterable[Chunk], separator: bytes, account: Account) -> Iterator[Span]:
    """Yield the text between separators, and after each chunk the available text of the incomplete document."""
    buffer, bytes_read = b"", 0
    for chunk, bytes_read in chunks:
        *complete, buffer = (buffer + chunk).split(separator)
        account["bytes"]["separators"] += len(complete) * len(separator)
        for content in complete:
            yield Span(content, True, bytes_read)
        end = max(0, len(buffer) - len(separator) + 1)  # later bytes may be the beginning of a separator
        yield Span(buffer[:end], False, bytes_read)
        buffer = buffer[end:]
    yield Span(buffer, False, bytes_read)


def _rest_of_document(spans: Iterator[Span]) -> Iterator[Span]:
    """Yield the spans up to the end of the document."""
    for span in spans:
        yield span
        if span.ends:
            return


def _hashes(spans: Iterator[Span]) -> Iterator[int]:
    """Yield the document_hash of each document."""
    digest = blake2b(digest_size=8)
    for content, ends, _ in spans:
        digest.update(content)
        if ends:
            yield int.from_bytes(digest.digest(), "little")
            digest = blake2b(digest_size=8)
    yield int.from_bytes(digest.digest(), "little")
