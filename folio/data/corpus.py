"""Reads text files of any size and format as a stream of blocks.

A document is a file, a JSON line, a row, or the text between two separators. A block contains several documents. A
document larger than a block is split into parts where no tokenizer has a token across the boundary, so that the ids of
the parts are those of the whole text.
"""

import codecs
import csv
import glob
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from folio.base.download import Url, Wheel, fetch
from folio.data.blocks import (
    CorpusBlock,
    CorpusError,
    DocumentPart,
    Field,
    JsonLinesBlock,
    RawDocument,
    RowBlock,
    Segments,
    TextBlock,
    decode_utf8,
)
from folio.data.builder import SplitRule, split_by_number
from folio.data.shards import PromptFormat

Format = Literal["text", "jsonl", "csv", "parquet"]
FORMATS: dict[str, Format] = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".csv": "csv", ".parquet": "parquet"}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
JSON_LINES = (".jsonl", *COMPRESSIONS)  # suffixes of the JSON-lines files in a folder
COMPRESSION_RATIO = 4  # estimate for compressed files that have not been read

# Matches a character that is not white space, followed by a space or a line feed. Every BPE of Folio ends a word there.
SAFE_CUT = re.compile(
    rb"(?:[!-~]|[\xc3-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]|\xe3\x80[\x81-\xbf]|\xe3[\x81-\xbf][\x80-\xbf]"
    rb"|[\xe4-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3})(?=[ \n])"
)

Chunk = tuple[bytes, int]  # consecutive bytes of a text, and the number of bytes of the file read so far


@dataclass(frozen=True)
class SizeLimits:
    """Sizes in bytes that decide how a file is divided into blocks."""

    block: int = 1 << 20  # approximate size of a block
    document: int = 1 << 23  # a larger document between separators is split into parts
    word: int = 1 << 24  # a longer text without a safe cut is cut between any two characters
    record: int = 1 << 28  # maximum size of a line of JSON or of text, which must fit in memory
    row: int = 1 << 26  # maximum size of a CSV row; Python's csv module takes up to 8 times as much memory


DEFAULT_LIMITS = SizeLimits()


# --- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A file of the corpus."""

    path: Path
    format: Format
    name: str  # the path as the user gave it, for messages
    limits: SizeLimits = DEFAULT_LIMITS

    @property
    def compression(self) -> str | None:
        return COMPRESSIONS.get(self.path.suffix.lower())

    @property
    def bytes(self) -> int:
        return self.path.stat().st_size

    def read(self) -> Iterator[Chunk]:
        """Yield the decompressed content in chunks of limits.block bytes, without a byte-order mark.

        Raises CorpusError if the file cannot be read, or is compressed and damaged.
        """
        try:
            file = open(self.path, "rb")  # noqa: SIM115
        except OSError as error:
            raise CorpusError(f"{self.name} cannot be read: {error.strerror}") from None
        with file:
            content: BinaryIO = file
            if self.compression:
                import pyarrow

                content = pyarrow.CompressedInputStream(file, self.compression)
            is_first = True
            while chunk := self._read_chunk(content):
                # some editors on Windows write a byte-order mark before UTF-8
                yield chunk.removeprefix(b"\xef\xbb\xbf") if is_first else chunk, file.tell()
                is_first = False

    def _read_chunk(self, content: BinaryIO) -> bytes:
        try:
            return content.read(self.limits.block)
        except OSError as error:  # Arrow's error for damaged content
            if not self.compression:
                raise
            raise CorpusError(f"{self.name} is damaged or truncated: {error}; download it again") from None

    @property
    def suffix(self) -> str:
        """The suffix of the name without .gz or .zst."""
        path = self.path.with_suffix("") if self.compression else self.path
        return path.suffix.lower()

    def fingerprint(self) -> list[Any]:
        """A value that changes if the file changes, but not with the working directory."""
        stat = self.path.stat()
        return [self.path.name, stat.st_size, stat.st_mtime_ns]


def find_sources(
    inputs: Sequence[str],
    format: Format | None = None,
    suffixes: Sequence[str] | None = None,
    limits: SizeLimits = DEFAULT_LIMITS,
) -> list[Source]:
    """Return the files that `inputs` names: files, patterns, or folders with text files, without repetitions.

    The files are in the order of the inputs, and those of one folder or pattern are sorted by name.

    format: the format of all files; None: by the suffix, where a file with another suffix is text if it is named
    directly, and ignored in a folder. suffixes: the files to use in folders; None: text files, or all files if `format`
    is given. Raises CorpusError.
    """
    sources: dict[Path, Source] = {}
    for name in inputs:
        for path in _find_files(name, format, suffixes):
            sources.setdefault(path.resolve(), Source(path, format or detect_format(path) or "text", str(path), limits))
    return list(sources.values())


def _find_files(name: str, format: Format | None, suffixes: Sequence[str] | None) -> list[Path]:
    """Return the files that one input names. Raises CorpusError if there are none."""
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):  # for a name that is too long, os.path.isdir returns False, and Path.is_dir raises OSError
        files = others = sorted(_files_under(path))
        if suffixes:
            files = [p for p in files if p.suffix.lower() in suffixes]
        elif not format:
            files = [p for p in files if detect_format(p)]
        if not files:
            if suffixes:
                raise CorpusError(f"{name}: this folder has no {', '.join(suffixes)}")
            kind = f"text files ({', '.join(FORMATS)}, also .gz or .zst)"
            raise CorpusError(f"{name}: this folder has no {kind}{_suggest_pattern(path, others)}")
        return files
    if os.path.isfile(path):
        return [path]
    if os.path.exists(path):
        raise CorpusError(f"{name} is not a file or a folder; pipe it to standard input, and name -")
    files = [Path(p) for p in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(p)]
    if not files:
        shown = name if len(name) < 200 else f"{name[:200]}..."
        raise CorpusError(f"{shown}: no such file")
    return files


def _suggest_pattern(folder: Path, files: list[Path]) -> str:
    """Return advice for an error: the pattern that matches the text files with the most common suffix in a folder."""
    visible = [path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    for suffix, count in Counter(path.suffix for path in visible if path.suffix).most_common():
        paths = [path for path in visible if path.suffix == suffix]
        if _is_text(paths[0]):
            is_nested = any(path.parent != folder for path in paths)
            pattern = os.path.join(glob.escape(str(folder)), "**" if is_nested else "", f"*{glob.escape(suffix)}")
            files_of_kind = f"{count:,} {suffix} files" if count > 1 else f"{suffix} file"
            return f'; for its {files_of_kind}, use the pattern "{pattern}"'
    return ""


def _is_text(path: Path) -> bool:
    """Whether a file can be read and begins with UTF-8 text."""
    try:
        with open(path, "rb") as file:
            text = codecs.getincrementaldecoder("utf-8")().decode(file.read(4096))  # accepts a partial last character
    except (OSError, UnicodeDecodeError):
        return False
    return bool(text) and "\0" not in text


def _files_under(folder: Path) -> Iterator[Path]:
    """Yield all files in a folder and its subfolders. Raises CorpusError if a folder cannot be read."""

    def refuse(error: OSError) -> None:
        raise CorpusError(f"{error.filename} cannot be read: {error.strerror}")

    for parent, _, names in os.walk(folder, onerror=refuse):
        for name in names:
            path = Path(parent, name)
            if path.is_file():
                yield path


def detect_format(path: Path) -> Format | None:
    """Return the format of a file by its suffix, or None."""
    suffixes = path.suffixes
    if suffixes and suffixes[-1].lower() in COMPRESSIONS:
        suffixes = suffixes[:-1]
    return FORMATS.get(suffixes[-1].lower()) if suffixes else None


# --- the corpus -------------------------------------------------------------------------------------------------------


@dataclass
class Corpus:
    """The documents in a list of files, in order.

    field: the field of JSON objects, or the column, that contains the document. document: a function from a JSON object
    to a document, instead of `field`. split_on: the separator of documents in text files. limit: the maximum number of
    documents from .parquet files. masked: documents are Segments, some of which do not count as targets.
    prompt_format: the format of the prompts in the documents; None: no prompts. split_rule: selects the documents for
    validation; None: determined by the settings of `prepare`.
    """

    sources: list[Source]
    field: str = "text"
    split_on: str | None = None
    document: Callable[[dict[str, Any]], str | Segments] | None = None
    limit: int | None = None
    masked: bool = False
    prompt_format: PromptFormat | None = None
    split_rule: SplitRule | None = None

    def __post_init__(self) -> None:
        self.bytes = sum(source.bytes for source in self.sources)
        for source in self.sources:
            if source.format == "parquet":
                open_parquet(source, self.field)  # report errors before any other work

    @property
    def is_one_text(self) -> bool:
        """Whether the corpus is a single document, whose tail is for validation."""
        return self.is_one_file and self.sources[0].format == "text" and not self.split_on

    @property
    def is_one_file(self) -> bool:
        return len(self.sources) == 1

    @cached_property
    def text_bytes(self) -> int:
        """The decompressed size of all text, which is an estimate for compressed files."""
        return sum(self._source_text_bytes(source) for source in self.sources)

    def _source_text_bytes(self, source: Source) -> int:
        if source.format == "parquet":
            return _parquet_text_bytes(source, self.field)
        return source.bytes * (COMPRESSION_RATIO if source.compression else 1)

    def fingerprint(self) -> dict[str, Any]:
        """A value that changes if the documents change."""
        sources = [source.fingerprint() for source in self.sources]
        return {"sources": sources, "field": self.field, "split_on": self.split_on, "limit": self.limit}

    def report(self) -> dict[str, Any]:
        """Additional entries of report.json."""
        return {}

    def blocks(self, val_fraction: float | None = None) -> Iterator[CorpusBlock]:
        """Yield all documents. val_fraction: split a single text into two documents, the second for validation."""
        if self.is_one_text:
            source = self.sources[0]
            yield from _parts(source, source.read()) if val_fraction is None else _split_text(source, val_fraction)
            return
        bytes_done, remaining = 0, self.limit
        small_files: list[RawDocument] = []  # for the next block
        for source in self.sources:
            if self._is_small_text(source):
                small_files.append((b"".join(chunk for chunk, _ in source.read()), source.name, 0))
                bytes_done += source.bytes
                if sum(len(content) for content, *_ in small_files) >= source.limits.block:
                    yield TextBlock(bytes_done, small_files[0][1], small_files)
                    small_files = []
                continue
            if small_files:
                yield TextBlock(bytes_done, small_files[0][1], small_files)
                small_files = []
            for block in self._source_blocks(source):
                if remaining is not None and isinstance(block, RowBlock):
                    block = replace(block, content=block.content[:remaining])
                    remaining -= len(block.content)
                yield replace(block, bytes_read=bytes_done + block.bytes_read)
                if remaining == 0:
                    return
            bytes_done += source.bytes
        if small_files:
            yield TextBlock(bytes_done, small_files[0][1], small_files)

    def _is_small_text(self, source: Source) -> bool:
        """Whether the file is one document that shares a block with other files."""
        is_one_document = source.format == "text" and not self.split_on
        return is_one_document and not source.compression and source.bytes <= source.limits.block

    def _source_blocks(self, source: Source) -> Iterator[CorpusBlock]:
        if source.format == "parquet":
            return _parquet_rows(source, self.field)
        if source.format == "csv":
            return _csv_rows(source, self.field)
        if source.format == "jsonl":
            return _json_lines(source, self.document or Field(self.field))
        if self.split_on:
            return _separated(source, self.split_on.encode())
        digest = blake2b(digest_size=8)
        for chunk, _ in source.read():
            digest.update(chunk)
        return _parts(source, source.read(), int.from_bytes(digest.digest(), "little"))


class Documents(Corpus):
    """Documents in memory: texts, or JSON objects that Corpus.document converts to documents.

    sources: the files that contain them, for messages and meta.json. val: the indices of the documents for validation;
    None: determined by the settings of `prepare`. report_entries: additional entries of report.json. augment: returns
    the variants of a training document, including the document (data augmentation); it needs the documents for
    validation to come first. recipe: other inputs of the documents, for the fingerprint. settings: arguments of Corpus.
    """

    is_one_text = False

    def __init__(
        self,
        sources: list[Source],
        documents: Sequence[str | dict[str, Any]],
        val: Sequence[int] | np.ndarray | None = None,
        report_entries: dict[str, Any] | None = None,
        augment: Callable[[str], list[str]] | None = None,
        recipe: dict[str, Any] | None = None,
        **settings: Any,
    ):
        super().__init__(sources, split_rule=None if val is None else split_by_number(val), **settings)
        self.documents, self.augment, self.recipe = documents, augment, recipe
        self.report_entries = report_entries or {}
        self.n_val = None if val is None else len(val)
        self.file = sources[0].name if len(sources) == 1 else "the input"  # for messages

    @cached_property
    def text_bytes(self) -> int:
        n_variants = len(self.augment(self.documents[self.n_val])) if self.augment else 1
        n_val = self.n_val or 0
        return sum(map(_text_size, self.documents[:n_val])) + n_variants * sum(map(_text_size, self.documents[n_val:]))

    def fingerprint(self) -> dict[str, Any]:
        digest = blake2b(digest_size=16)
        for document in self.documents:
            text = document if isinstance(document, str) else json.dumps(document)
            digest.update(b"%d " % len(text) + text.encode("utf-8", "replace"))
        n_train = len(self.documents) - (self.n_val or 0)
        return {"val": self.n_val, "train": n_train, "blake2b": digest.hexdigest(), "recipe": self.recipe}

    def report(self) -> dict[str, Any]:
        return self.report_entries

    def blocks(self, val_fraction: float | None = None) -> Iterator[CorpusBlock]:
        done, first, documents, size = 0, 0, [], 0
        for document in self._augmented():
            documents.append(document)
            size += _text_size(document)
            if size >= DEFAULT_LIMITS.block:
                done += size
                yield self._block(documents, first, done)
                first, documents, size = first + len(documents), [], 0
        if documents:
            yield self._block(documents, first, self.text_bytes)

    def _augmented(self) -> Iterator[str | dict[str, Any]]:
        for number, document in enumerate(self.documents):
            if self.augment and number >= self.n_val:
                yield from self.augment(document)
            else:
                yield document

    def _block(self, documents: list[str | dict[str, Any]], first: int, done: int) -> RowBlock:
        bytes_read = min(self.bytes, self.bytes * done // max(1, self.text_bytes))
        return RowBlock(bytes_read, self.file, documents, first, self.document)


def _text_size(document: str | dict[str, Any]) -> int:
    """Return the number of bytes of a text, or of the texts in an object."""
    if isinstance(document, dict):
        return sum(_text_size(text) for text in document.values() if isinstance(text, str))
    return len(document.encode("utf-8", "replace"))


# --- one text ---------------------------------------------------------------------------------------------------------


class _PartCutter:
    """Splits one document into parts as its chunks are read."""

    def __init__(self, source: Source, hash: int = 0, split: Literal["train", "val"] | None = None, offset: int = 0):
        self.source, self.hash, self.split = source, hash, split
        self.offset = offset  # position in the file of the first byte of `pending`
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
            self.offset += cut

    def finish(self) -> DocumentPart:
        """Return the last part, which may be empty."""
        part = self._part(self.pending, last=True)
        self.offset += len(self.pending)
        return part

    def _part(self, content: bytes, last: bool) -> DocumentPart:
        return DocumentPart(self.bytes_read, self.source.name, content, self.offset, last, self.hash, self.split)


def _parts(source: Source, chunks: Iterable[Chunk], hash: int = 0, offset: int = 0) -> Iterator[DocumentPart]:
    """Yield the parts of one document, at least one."""
    cutter = _PartCutter(source, hash, offset=offset)
    for chunk, bytes_read in chunks:
        yield from cutter.add(chunk, bytes_read)
    yield cutter.finish()


def _split_text(source: Source, val_fraction: float) -> Iterator[DocumentPart]:
    """Yield the parts of one text as two documents. The last val_fraction of its characters is for validation."""
    characters = sum(len(_character_starts(chunk)) for chunk, _ in source.read())
    remaining = int(characters * (1 - val_fraction))  # characters for training that have not been read
    chunks = source.read()
    train = _PartCutter(source, split="train")
    first_val_chunk: list[Chunk] = []
    for chunk, bytes_read in chunks:
        starts = _character_starts(chunk)
        if len(starts) > remaining:
            boundary = int(starts[remaining])
            yield from train.add(chunk[:boundary], bytes_read)
            first_val_chunk.append((chunk[boundary:], bytes_read))
            break
        remaining -= len(starts)
        yield from train.add(chunk, bytes_read)
    yield train.finish()
    val = _PartCutter(source, split="val", offset=train.offset)
    for chunk, bytes_read in itertools.chain(first_val_chunk, chunks):
        yield from val.add(chunk, bytes_read)
    yield val.finish()


def _character_starts(content: bytes) -> np.ndarray:
    """Return the index of the first byte of each character of UTF-8 text."""
    return np.flatnonzero((np.frombuffer(content, dtype=np.uint8) & 0xC0) != 0x80)


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


# Consecutive bytes of a document, whether a separator follows, and the number of bytes of the file read so far.
Span = tuple[bytes, bool, int]


def _separated(source: Source, separator: bytes) -> Iterator[TextBlock | DocumentPart]:
    """Yield the documents between separators. Documents of more than limits.document bytes are split into parts.

    The hash of a large document must be known before its first part. A second reader of the file computes it ahead.
    """
    spans = _spans(source.read(), separator)
    hashes = enumerate(_hashes(_spans(source.read(), separator)))
    finished: list[RawDocument] = []  # for the next block
    pending: list[bytes] = []  # the beginning of an incomplete document
    number = offset = size = 0  # of the incomplete document
    for content, ends, bytes_read in spans:
        pending.append(content)
        size += len(content)
        if ends:
            finished.append((b"".join(pending), source.name, offset))
        elif finished:
            yield TextBlock(bytes_read, source.name, finished)
            finished = []
        if size > source.limits.document and not ends:
            chunks = itertools.chain([(b"".join(pending), bytes_read)], _rest_of_document(spans))
            hash = next(hash for n, hash in hashes if n == number)
            size = 0
            for part in _parts(source, chunks, hash, offset):
                size += len(part.content)
                yield part
            ends = True
        if ends:
            pending, number, offset, size = [], number + 1, offset + size + len(separator), 0
    if size:
        yield TextBlock(source.bytes, source.name, [(b"".join(pending), source.name, offset)])


def _spans(chunks: Iterable[Chunk], separator: bytes) -> Iterator[Span]:
    """Yield the text between separators, and after each chunk the available text of the incomplete document."""
    buffer, bytes_read = b"", 0
    for chunk, bytes_read in chunks:
        *complete, buffer = (buffer + chunk).split(separator)
        for content in complete:
            yield content, True, bytes_read
        end = max(0, len(buffer) - len(separator) + 1)  # later bytes may be the beginning of a separator
        yield buffer[:end], False, bytes_read
        buffer = buffer[end:]
    yield buffer, False, bytes_read


def _rest_of_document(spans: Iterator[Span]) -> Iterator[Chunk]:
    """Yield the spans up to the end of the document, as chunks."""
    for content, ends, bytes_read in spans:
        yield content, bytes_read
        if ends:
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


# --- records ----------------------------------------------------------------------------------------------------------


def _json_lines(source: Source, document: Callable[[dict[str, Any]], str | Segments]) -> Iterator[JsonLinesBlock]:
    pending, size, line = [], 0, 1  # the beginning of an incomplete line, its size and its number
    for chunk, bytes_read in source.read():
        complete, newline, rest = chunk.rpartition(b"\n")
        if newline:
            content = b"".join([*pending, complete])
            yield JsonLinesBlock(bytes_read, source.name, content, line, document)
            line += content.count(b"\n") + 1
            pending, size = [], 0
        pending.append(rest)
        size += len(rest)
        if size > source.limits.record:
            raise _record_too_long(f"{source.name}:{line}: this line", source.limits.record)
    content = b"".join(pending)
    if content.strip():
        yield JsonLinesBlock(source.bytes, source.name, content, line, document)


def _record_too_long(record: str, limit: int) -> CorpusError:
    return CorpusError(f"{record} has more than {limit:,} bytes; save such a text as a .txt file")


def read_lines(source: Source) -> Iterator[str]:
    """Yield the lines of a text file, without line ends. Raises CorpusError."""
    buffer, number = b"", 1
    for chunk, _ in source.read():
        *complete, buffer = (buffer + chunk).split(b"\n")
        for line in complete:
            yield decode_utf8(line, f"{source.name}, line {number},", 0).removesuffix("\r")
            number += 1
        if len(buffer) > source.limits.record:
            raise CorpusError(f"{source.name}:{number}: this line has more than {source.limits.record:,} bytes")
    if buffer:
        yield decode_utf8(buffer, f"{source.name}, line {number},", 0).removesuffix("\r")


class CsvLines:
    """The decoded lines of a CSV file."""

    def __init__(self, source: Source):
        self.source = source
        self.bytes_read = 0
        self.row_bytes = 0  # size of the current row, which may have several lines; the caller resets it after each row

    def __iter__(self) -> Iterator[str]:
        name, buffer, number = self.source.name, bytearray(), 1
        for chunk, bytes_read in self.source.read():
            self.bytes_read = bytes_read
            has_line_end = buffer[-1:] in (b"\r", b"\n") or b"\n" in chunk or b"\r" in chunk
            buffer += chunk
            if has_line_end:
                *complete, rest = bytes(buffer).splitlines(keepends=True)
                for line in complete:
                    self.row_bytes += len(line)
                    yield decode_utf8(line, f"{name}, line {number},", 0)
                    number += 1
                buffer = bytearray(rest)
            if self.row_bytes + len(buffer) > self.source.limits.row:
                row = f"{name}, line {number}: this row (is a quote missing?)"
                raise _record_too_long(row, self.source.limits.row)
        yield decode_utf8(bytes(buffer), f"{name}, line {number},", 0)


def _csv_rows(source: Source, field: str) -> Iterator[RowBlock]:
    csv.field_size_limit(2**31 - 1)  # Python's default limit is 128 KB per field
    lines = CsvLines(source)
    reader = csv.DictReader(lines, strict=True)
    texts, size, first = [], 0, 0
    try:
        columns = reader.fieldnames or [field]
        if columns.count(field) > 1:
            raise CorpusError(f"{source.name}: several columns have the name {field!r}; rename the others")
        if field not in columns:
            raise CorpusError(
                f"{source.name}: there is no column {field!r}, only {', '.join(columns)}; set --field=NAME"
            )
        for row in reader:
            lines.row_bytes = 0
            if row[field] is None:
                raise CorpusError(f"{source.name}:{reader.line_num}: this row ends before the column {field!r}")
            texts.append(row[field])
            size += len(row[field])
            if size >= source.limits.block:
                yield RowBlock(lines.bytes_read, source.name, texts, first)
                first += len(texts)
                texts, size = [], 0
    except csv.Error as error:
        raise CorpusError(f"{source.name}:{reader.line_num}: this is not CSV: {error}") from None
    if texts:
        yield RowBlock(lines.bytes_read, source.name, texts, first)


def open_parquet(source: Source, field: str) -> Any:
    """Open a parquet file. Raises CorpusError if it is not valid, or has no text column of this name."""
    import pyarrow
    from pyarrow import parquet

    try:
        content = pyarrow.OSFile(os.fsencode(source.path))  # ParquetFile requires that a path is UTF-8
        file = parquet.ParquetFile(content, buffer_size=source.limits.block)  # default: complete columns in memory
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise CorpusError(f"{source.name} is not a parquet file, or damaged: {error}") from None
    schema = file.schema_arrow
    if schema.names.count(field) > 1:
        raise CorpusError(f"{source.name}: several columns have the name {field!r}; rename the others")
    if field not in schema.names:
        raise CorpusError(
            f"{source.name}: there is no column {field!r}, only {', '.join(schema.names)}; set --field=NAME"
        )
    kind = schema.field(field).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise CorpusError(f"{source.name}: the column {field!r} is {kind}, not text; set --field=NAME")
    return file


def parquet_sources(files: Iterable[Path], field: str, limit: int | None = None) -> tuple[list[Source], int]:
    """Return the first files that contain `limit` documents in total, and the number of documents to read."""
    sources, rows = [], 0
    for path in files:
        sources.append(Source(path, "parquet", str(path)))
        rows += open_parquet(sources[-1], field).metadata.num_rows
        if limit is not None and rows >= limit:
            return sources, limit
    return sources, rows


def _column_chunks(metadata: Any, field: str) -> list[Any]:
    """Return the metadata of the column in each row group."""
    column = [metadata.schema.column(c).path for c in range(metadata.num_columns)].index(field)
    return [metadata.row_group(i).column(column) for i in range(metadata.num_row_groups)]


def _parquet_text_bytes(source: Source, field: str) -> int:
    """Return the uncompressed size of the column, according to the file's footer."""
    return sum(chunk.total_uncompressed_size for chunk in _column_chunks(open_parquet(source, field).metadata, field))


def _has_dictionary_only(chunk: Any) -> bool:
    """Whether each row is an index into a dictionary, so that the footer does not give the size of the decoded text.

    When its dictionary becomes too large, a writer continues with plain texts, which take more bytes per row.
    """
    if not chunk.has_dictionary_page:
        return False
    dictionary_bytes = chunk.data_page_offset - chunk.dictionary_page_offset
    return chunk.total_compressed_size - dictionary_bytes <= 8 * chunk.num_values + 1024


def _parquet_rows(source: Source, field: str) -> Iterator[RowBlock]:
    import pyarrow
    from pyarrow import parquet

    chunks = _column_chunks(open_parquet(source, field).metadata, field)
    rows, done = sum(chunk.num_values for chunk in chunks), 0
    try:
        for is_encoded, numbered in itertools.groupby(enumerate(chunks), lambda item: _has_dictionary_only(item[1])):
            groups, run = zip(*numbered, strict=True)
            text_bytes = 0 if is_encoded else sum(chunk.total_uncompressed_size for chunk in run)
            batch_rows = source.limits.block * sum(chunk.num_values for chunk in run) // max(1, text_bytes)
            encoded = [field] if is_encoded else None
            content = pyarrow.OSFile(os.fsencode(source.path))
            file = parquet.ParquetFile(content, buffer_size=source.limits.block, read_dictionary=encoded)
            for batch in file.iter_batches(max(1, min(1 << 14, batch_rows)), groups, columns=[field]):
                column = batch.column(0)
                for texts in _decode_dictionary(column, source.limits.block) if is_encoded else [column]:
                    done += len(texts)
                    yield RowBlock(source.bytes * done // rows, source.name, texts, done - len(texts))
    except (pyarrow.ArrowException, OSError) as error:
        raise CorpusError(f"{source.name} is damaged after row {done:,}: {error}; download it again") from None


def _decode_dictionary(column: Any, block_bytes: int) -> Iterator[Any]:
    """Decode a dictionary-encoded Arrow array of texts, as arrays of about block_bytes each."""
    from pyarrow import compute

    sizes = compute.binary_length(column.dictionary).take(column.indices).fill_null(0)
    total = np.cumsum(sizes.to_numpy(), dtype=np.int64)
    cuts = np.flatnonzero(np.diff(total // block_bytes)) + 1
    for begin, end in itertools.pairwise([0, *cuts.tolist(), len(column)]):
        yield column.slice(begin, end - begin).dictionary_decode()


# --- an example text --------------------------------------------------------------------------------------------------


def tiny_shakespeare() -> Path:
    """Return the path of Tiny Shakespeare (1,115,394 bytes, Karpathy 2015), downloading it on first use.

    Raises UserError if the download fails.
    """
    parts = tuple(f"sonnet/examples/data/ts.{part}.txt" for part in ("train", "valid", "test"))
    sources = [
        Url("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"),
        Wheel("dm-sonnet==1.36", "afe292a5f2eaed5c3e2be4b30f2a14b67425422457b9a51579d616af6f075dac", parts),
    ]
    return fetch("Tiny Shakespeare", "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed", sources)
