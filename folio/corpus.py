"""Text files of any size and kind, as a stream of blocks: what one process reads, and another turns into documents.

A document is a file, a JSON line, a row, or what stands between separators. A text of its own that is larger than a
block comes in parts, cut where every tokenizer here gives the same ids as for the whole.
"""

import csv
import glob
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from folio import UserError
from folio.fetch import Url, Wheel, fetch

BLOCK_BYTES = 1 << 20  # of text in a block, about
LONGEST_WORD = 1 << 24  # bytes that are searched for a place to cut, before a cut is made anywhere
KINDS = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".csv": "csv", ".parquet": "parquet"}
PACKED = {".gz": "gzip", ".zst": "zstd"}
LARGE_DOCUMENT = 1 << 23  # bytes of a document between separators, above which it comes in parts
LONGEST_RECORD = 1 << 28  # bytes of a JSON line or a CSV row, which must be in memory as a whole
UNPACKED = 4  # times the size, as a guess, until a packed file has been read
CUT = re.compile(  # behind a character that is no white space, before one that is: there a word of every BPE here ends
    rb"(?:[!-~]|[\xc3-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]|\xe3\x80[\x81-\xbf]|\xe3[\x81-\xbf][\x80-\xbf]"
    rb"|[\xe4-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3})(?=[ \n])"
)

HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")

END = None  # stands for the end-of-text token among segments
Segments = list[tuple[str | None, bool]]  # a document in pieces that count as targets, or do not, with its ends


class CorpusError(UserError):
    """Text that cannot be read, and the way to mend it."""


def document_hash(content: bytes) -> int:
    """64 bits that follow from the document alone: its split, and whether there is another one like it."""
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


# --- blocks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Some documents, or a part of one."""

    read: int  # bytes of the files that have been read up to here
    where: str  # the file, for messages

    def place(self, number: int, byte: int | None = None) -> str:
        """Where the document with this number in the block is, or this byte of its text, for messages."""
        raise NotImplementedError

    def documents(self) -> Iterator[str | Segments]:
        raise NotImplementedError


@dataclass(frozen=True)
class Texts(Block):
    """Documents as bytes, each with its file and the byte at which it begins there."""

    content: list[tuple[bytes, str, int]]

    def documents(self) -> Iterator[str]:
        for content, where, offset in self.content:
            yield decoded(content, where, offset)

    def place(self, number: int, byte: int | None = None) -> str:
        _, where, offset = self.content[number]
        return f"{where}, from byte {offset + (byte or 0):,}"


@dataclass(frozen=True)
class Rows(Block):
    """Documents as strings: a list, or an Arrow array, in which null is an empty document."""

    content: Sequence[Any]
    first: int = 0  # the number of the first in its file

    def documents(self) -> Iterator[str]:
        try:
            texts = self.content if isinstance(self.content, list) else self.content.to_pylist()
        except UnicodeDecodeError:  # Arrow does not check what a file calls text
            contents = self.content.cast("large_binary").to_pylist()
            texts = (decoded(c or b"", f"{self.where}, row {n:,},", 0) for n, c in enumerate(contents, self.first))
        for text in texts:
            yield text or ""

    def place(self, number: int, byte: int | None = None) -> str:
        return f"{self.where}, row {self.first + number:,}{'' if byte is None else f', byte {byte:,} of its text'}"


@dataclass(frozen=True)
class JsonLines(Block):
    """Lines of JSON, each with a document that `document` takes out of it."""

    content: bytes
    line: int  # the number of the first
    document: Callable[[dict[str, Any]], str | Segments]

    def documents(self) -> Iterator[str | Segments]:
        for number, line in enumerate(self.content.split(b"\n"), start=self.line):
            if not line.strip():
                continue
            where = f"{self.where}:{number}"
            try:
                value = json.loads(line)
                if HALF_PAIR.search(line):  # JSON can hold half a surrogate pair, UTF-8 cannot; it becomes a ?
                    value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
            except UnicodeDecodeError as error:
                raise CorpusError(
                    f"{where}: this line is not UTF-8 at byte {error.start:,}; save it as UTF-8"
                ) from None
            except (ValueError, RecursionError) as error:
                raise CorpusError(f"{where}: this line is not JSON: {error}; fix it or leave it out") from None
            try:
                if not isinstance(value, dict):
                    raise CorpusError("it is no object {...}")
                yield self.document(value)
            except CorpusError as error:
                raise CorpusError(f"{where}: {error}") from None

    def place(self, number: int, byte: int | None = None) -> str:
        lines = (n for n, line in enumerate(self.content.split(b"\n"), start=self.line) if line.strip())
        line = next(itertools.islice(lines, number, None))
        return f"{self.where}:{line}{'' if byte is None else f', byte {byte:,} of its text'}"


@dataclass(frozen=True)
class Part(Block):
    """A part of one document that is larger than a block."""

    content: bytes
    offset: int
    last: bool
    hash: int  # of the whole document
    split: Literal["train", "val"] | None = None  # None: as the document's hash says

    def documents(self) -> Iterator[str]:
        yield decoded(self.content, self.where, self.offset)

    def place(self, number: int, byte: int | None = None) -> str:
        return f"{self.where}, from byte {self.offset + (byte or 0):,}"


@dataclass(frozen=True)
class Field:
    """Takes a document out of a JSON object: the text under one name."""

    name: str

    def __call__(self, value: dict[str, Any]) -> str:
        if self.name not in value:
            there = ", ".join(sorted(value)[:10])
            raise CorpusError(f"there is no field {self.name!r}, only {there or 'an empty object'}; say --field=NAME")
        if value[self.name] is None:  # an empty document, as in a column
            return ""
        if not isinstance(value[self.name], str):
            kind = type(value[self.name]).__name__
            raise CorpusError(f"the field {self.name!r} is {kind}, not text; say --field=NAME")
        return value[self.name]


def decoded(content: bytes, where: str, offset: int) -> str:
    """The text of UTF-8. Raises CorpusError with the file, the byte and the likely reason."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise CorpusError(f"{where} is not UTF-8 text at byte {at:,}: {_likely(content, error.start)}") from None


def _likely(content: bytes, at: int) -> str:
    around = content[max(0, at - 1000) : at + 1000]
    if around[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "it looks like UTF-16; save it as UTF-8"
    if b"\0" in around or sum(byte < 9 or 14 <= byte < 32 for byte in around) > len(around) / 50:
        return "it looks like a binary file; leave it out"
    return "it looks like Latin-1 or another old encoding; save it as UTF-8 (iconv -f latin1 -t utf-8)"


# --- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A file of the corpus."""

    path: Path
    kind: Literal["text", "jsonl", "csv", "parquet"]
    name: str  # as it was found, for messages

    @property
    def packing(self) -> str | None:
        return PACKED.get(self.path.suffix.lower())

    @property
    def bytes(self) -> int:
        return self.path.stat().st_size

    def read(self) -> Iterator[tuple[bytes, int]]:
        """The content, unpacked, some BLOCK_BYTES at a time, and how many bytes of the file have been read.

        Raises CorpusError for a packed file that is damaged or cut off.
        """
        try:
            file = open(self.path, "rb")  # noqa: SIM115
        except OSError as error:
            raise CorpusError(f"{self.name} cannot be read: {error.strerror}") from None
        with file:
            content: BinaryIO = file
            if self.packing:
                import pyarrow

                content = pyarrow.CompressedInputStream(file, self.packing)
            first = True
            while piece := self._piece(content):
                # the mark that some editors on Windows put before UTF-8 is no part of the text
                yield piece.removeprefix(b"\xef\xbb\xbf") if first else piece, file.tell()
                first = False

    def _piece(self, content: BinaryIO) -> bytes:
        try:
            return content.read(BLOCK_BYTES)
        except OSError as error:  # as Arrow says it
            if not self.packing:
                raise
            raise CorpusError(f"{self.name} is damaged or cut off: {error}; fetch it again") from None

    def fingerprint(self) -> list[Any]:
        """Changes when the file does."""
        stat = self.path.stat()
        return [self.name, stat.st_size, stat.st_mtime_ns]


def find_sources(inputs: Sequence[str], kind: str | None = None) -> list[Source]:
    """The files that the inputs name, each once, in the order of their names; a folder means all texts under it.

    A file is what its suffix says; others, and what is named by itself, are taken as `kind`, or else as text. Raises
    CorpusError.
    """
    sources: dict[Path, Source] = {}
    for name in inputs:
        path = Path(os.path.expanduser(name))
        if os.path.isdir(path):  # unlike Path's methods, these answer False for a name that is too long
            found = [p for p in sorted(_files_under(path)) if kind_of(p) or kind]
            if not found:
                raise CorpusError(f"{name}: in this folder are no files of text ({', '.join(KINDS)}, also .gz or .zst)")
        elif os.path.isfile(path):
            found = [path]
        elif os.path.exists(path):
            raise CorpusError(f"{name} is not a file or a folder; pipe it to standard input, and name -")
        else:
            found = [Path(p) for p in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(p)]
            if not found:
                shown = name if len(name) < 200 else f"{name[:200]}..."
                raise CorpusError(f"{shown}: there is no such file")
        for p in found:
            sources.setdefault(p.resolve(), Source(p, kind or kind_of(p) or "text", str(p)))
    return list(sources.values())


def _files_under(folder: Path) -> Iterator[Path]:
    """All files in a folder and those under it. Raises CorpusError for a folder that cannot be read."""

    def refuse(error: OSError) -> None:
        raise CorpusError(f"{error.filename} cannot be read: {error.strerror}")

    for parent, _, names in os.walk(folder, onerror=refuse):
        yield from (path for name in names if (path := Path(parent, name)).is_file())


def kind_of(path: Path) -> str | None:
    """What a file holds, by its suffix, or None."""
    suffixes = path.suffixes
    if suffixes and suffixes[-1].lower() in PACKED:
        suffixes = suffixes[:-1]
    return KINDS.get(suffixes[-1].lower()) if suffixes else None


@dataclass
class Corpus:
    """The documents of some files, in order.

    field: of JSON objects and columns; document: what takes a document out of a JSON object, in its place.
    split_on: text that divides a text file into documents. limit: documents to take at most, of .parquet files.
    """

    sources: list[Source]
    field: str = "text"
    split_on: str | None = None
    document: Callable[[dict[str, Any]], str | Segments] | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        self.bytes = sum(source.bytes for source in self.sources)
        for source in self.sources:
            if source.kind == "parquet":
                parquet_file(source, self.field)

    @property
    def is_one_text(self) -> bool:
        """Whether all of it is a single document, which is divided at its tail."""
        return len(self.sources) == 1 and self.sources[0].kind == "text" and not self.split_on

    @property
    def is_one_file(self) -> bool:
        return len(self.sources) == 1

    @cached_property
    def text_bytes(self) -> int:
        """How many bytes of text there are, unpacked: counted, or guessed for packed files."""
        return sum(
            _parquet_bytes(s, self.field) if s.kind == "parquet" else s.bytes * (UNPACKED if s.packing else 1)
            for s in self.sources
        )

    def fingerprint(self) -> dict[str, Any]:
        """Changes when the documents do."""
        sources = [source.fingerprint() for source in self.sources]
        return {"sources": sources, "field": self.field, "split_on": self.split_on, "limit": self.limit}

    def blocks(self, val_fraction: float | None = None) -> Iterator[Block]:
        """All documents. With val_fraction, a single text comes as two, of which the second is for validation."""
        if self.is_one_text:
            yield from _one_text(self.sources[0], val_fraction)
            return
        done, left = 0, self.limit
        small: list[tuple[bytes, str, int]] = []  # small texts are put together
        for source in self.sources:
            if source.kind == "text" and not self.split_on and not source.packing and source.bytes <= BLOCK_BYTES:
                small.append((b"".join(piece for piece, _ in source.read()), source.name, 0))
                done += source.bytes
                if sum(len(content) for content, *_ in small) >= BLOCK_BYTES:
                    yield Texts(done, small[0][1], small)
                    small = []
                continue
            if small:
                yield Texts(done, small[0][1], small)
                small = []
            for block in self._blocks_of(source):
                if left is not None and isinstance(block, Rows):
                    block = replace(block, content=block.content[:left])
                    left -= len(block.content)
                yield replace(block, read=done + block.read)
                if left == 0:
                    return
            done += source.bytes
        if small:
            yield Texts(done, small[0][1], small)

    def _blocks_of(self, source: Source) -> Iterator[Block]:
        if source.kind == "parquet":
            return _parquet_rows(source, self.field)
        if source.kind == "csv":
            return _csv_rows(source, self.field)
        if source.kind == "jsonl":
            return _json_lines(source, self.document or Field(self.field))
        if self.split_on:
            return _divided(source, self.split_on.encode())
        digest = blake2b(digest_size=8)
        for piece, _ in source.read():
            digest.update(piece)
        return _parts(source, source.read(), int.from_bytes(digest.digest(), "little"))


# --- files to blocks --------------------------------------------------------------------------------------------------


def _one_text(source: Source, val_fraction: float | None) -> Iterator[Part]:
    """One text in parts; with val_fraction, as two: that much of its characters, at the end, is for validation."""
    if val_fraction is None:
        yield from _parts(source, source.read())
        return
    characters = sum(len(_characters(piece)) for piece, _ in source.read())
    cut = int(characters * (1 - val_fraction))
    pieces = source.read()
    rest: list[tuple[bytes, int]] = []

    def before() -> Iterator[tuple[bytes, int]]:
        left = cut
        for piece, read in pieces:
            begins = _characters(piece)
            if len(begins) > left:
                at = int(begins[left])
                rest.append((piece[at:], read))
                yield piece[:at], read
                return
            left -= len(begins)
            yield piece, read

    offset = 0
    for part in _parts(source, before(), split="train"):
        offset += len(part.content)
        yield part

    def after() -> Iterator[tuple[bytes, int]]:
        yield from rest
        yield from pieces

    yield from _parts(source, after(), split="val", offset=offset)


def _characters(content: bytes) -> np.ndarray:
    """Where in these bytes of UTF-8 characters begin."""
    return np.flatnonzero((np.frombuffer(content, dtype=np.uint8) & 0xC0) != 0x80)


def _parts(
    source: Source, pieces: Iterable[tuple[bytes, int]], hash: int = 0, split: Any = None, offset: int = 0
) -> Iterator[Part]:
    """One document out of pieces, divided where it may be cut; at least one part."""
    held, read = b"", 0
    for piece, read in pieces:
        searched = len(held)
        held += piece
        if cut := place_to_cut(held, searched):
            yield Part(read, source.name, held[:cut], offset, False, hash, split)
            held, offset = held[cut:], offset + cut
    yield Part(read, source.name, held, offset, True, hash, split)


def place_to_cut(content: bytes, searched: int = 0) -> int:
    """A place as far back as possible at which a text can be cut without a change of its ids, or 0 if there is none.

    There a BPE with GPT-2's rule for words ends one. Above LONGEST_WORD it is the last character's begin, at any rate.
    searched: how many of the first bytes are known to have no such place.
    """
    for tail in (1 << 10, 1 << 16, len(content)):
        begin = max(0, len(content) - tail, searched - 4)  # a character of four bytes may end a word only now
        cut = 0
        for match in CUT.finditer(content, begin):
            cut = match.end()
        if cut:
            return cut
    if len(content) < LONGEST_WORD:
        return 0
    cut = len(content) - 1
    while cut > len(content) - 4 and 0x80 <= content[cut] < 0xC0:
        cut -= 1
    return cut


def _divided(source: Source, separator: bytes) -> Iterator[Texts | Part]:
    """Documents between separators, from left to right; one of more than LARGE_DOCUMENT in parts.

    The hash of such a document has to be known before its first part: a second reader of the file goes ahead for it.
    """
    stretches = _between(source.read(), separator)
    hashes = enumerate(_hashes(_between(source.read(), separator)))
    found: list[tuple[bytes, str, int]] = []
    held: list[bytes] = []
    number = offset = size = 0  # of the document that `held` begins
    for content, ends, read in stretches:
        held.append(content)
        size += len(content)
        if ends:
            found.append((b"".join(held), source.name, offset))
        elif found:
            yield Texts(read, source.name, found)
            found = []
        if size > LARGE_DOCUMENT and not ends:
            pieces = itertools.chain([(b"".join(held), read)], _until_end(stretches))
            digest = next(digest for n, digest in hashes if n == number)
            size = 0
            for part in _parts(source, pieces, digest, offset=offset):
                size += len(part.content)
                yield part
            ends = True
        if ends:
            held, number, offset, size = [], number + 1, offset + size + len(separator), 0
    if size:
        yield Texts(source.bytes, source.name, [(b"".join(held), source.name, offset)])


Stretch = tuple[bytes, bool, int]  # of a document: its bytes, whether a separator follows, bytes of the file read


def _between(pieces: Iterable[tuple[bytes, int]], separator: bytes) -> Iterator[Stretch]:
    """What is between separators. After each piece comes what is known of the document that has not ended in it."""
    held, read = b"", 0
    for piece, read in pieces:
        *whole, held = (held + piece).split(separator)
        for content in whole:
            yield content, True, read
        known = max(0, len(held) - len(separator) + 1)  # what comes after this may be the begin of a separator
        yield held[:known], False, read
        held = held[known:]
    yield held, False, read


def _until_end(stretches: Iterator[Stretch]) -> Iterator[tuple[bytes, int]]:
    """The rest of a document."""
    for content, ends, read in stretches:
        yield content, read
        if ends:
            return


def _hashes(stretches: Iterator[Stretch]) -> Iterator[int]:
    """The document_hash of each document."""
    digest = blake2b(digest_size=8)
    for content, ends, _ in stretches:
        digest.update(content)
        if ends:
            yield int.from_bytes(digest.digest(), "little")
            digest = blake2b(digest_size=8)
    yield int.from_bytes(digest.digest(), "little")


def _json_lines(source: Source, document: Callable[[dict[str, Any]], str | Segments]) -> Iterator[JsonLines]:
    held, size, line = [], 0, 1
    for piece, read in source.read():
        whole, newline, rest = piece.rpartition(b"\n")
        if newline:
            content = b"".join([*held, whole])
            yield JsonLines(read, source.name, content, line, document)
            line += content.count(b"\n") + 1
            held, size = [], 0
        held.append(rest)
        size += len(rest)
        if size > LONGEST_RECORD:
            raise _too_long(f"{source.name}:{line}: this line")
    content = b"".join(held)
    if content.strip():
        yield JsonLines(source.bytes, source.name, content, line, document)


def _too_long(record: str) -> CorpusError:
    return CorpusError(f"{record} has more than {LONGEST_RECORD:,} bytes; save a text of this size as a .txt file")


def _csv_rows(source: Source, field: str) -> Iterator[Rows]:
    csv.field_size_limit(2**31 - 1)  # Python's own limit is 128 KB per field
    read = size_of_row = 0

    def lines() -> Iterator[str]:
        nonlocal read, size_of_row
        held, number = bytearray(), 1
        for piece, position in source.read():
            read = position
            ends = held[-1:] in (b"\r", b"\n") or b"\n" in piece or b"\r" in piece
            held += piece
            if ends:
                *whole, rest = bytes(held).splitlines(keepends=True)
                for line in whole:
                    size_of_row += len(line)
                    yield decoded(line, f"{source.name}, line {number},", 0)
                    number += 1
                held = bytearray(rest)
            if size_of_row + len(held) > LONGEST_RECORD:
                raise _too_long(f"{source.name}, line {number}: this row (is a quote missing?)")
        yield decoded(bytes(held), f"{source.name}, line {number},", 0)

    found, size, first = [], 0, 0
    reader = csv.DictReader(lines(), strict=True)
    try:
        if field not in (columns := reader.fieldnames or [field]):
            raise CorpusError(
                f"{source.name}: there is no column {field!r}, only {', '.join(columns)}; say --field=NAME"
            )
        for row in reader:
            size_of_row = 0
            if row[field] is None:
                raise CorpusError(f"{source.name}:{reader.line_num}: this row ends before the column {field!r}")
            found.append(row[field])
            size += len(row[field])
            if size >= BLOCK_BYTES:
                yield Rows(read, source.name, found, first)
                first += len(found)
                found, size = [], 0
    except csv.Error as error:
        raise CorpusError(f"{source.name}:{reader.line_num}: this is not CSV: {error}") from None
    if found:
        yield Rows(read, source.name, found, first)


def parquet_file(source: Source, field: str) -> Any:
    """The opened file. Raises CorpusError where it is not parquet, or has no such column of text."""
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(source.path, buffer_size=BLOCK_BYTES)  # without it, whole columns are read ahead
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise CorpusError(f"{source.name} is not a parquet file, or damaged: {error}") from None
    schema = file.schema_arrow
    if schema.names.count(field) > 1:
        raise CorpusError(f"{source.name}: several columns have the name {field!r}; rename the others")
    if field not in schema.names:
        raise CorpusError(
            f"{source.name}: there is no column {field!r}, only {', '.join(schema.names)}; say --field=NAME"
        )
    kind = schema.field(field).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise CorpusError(f"{source.name}: the column {field!r} is {kind}, not text; say --field=NAME")
    return file


def parquet_sources(files: Iterable[Path], field: str, limit: int | None = None) -> tuple[list[Source], int]:
    """As many of the files, in order, as hold `limit` documents, and how many documents will be taken from them."""
    sources, rows = [], 0
    for path in files:
        sources.append(Source(path, "parquet", str(path)))
        rows += parquet_file(sources[-1], field).metadata.num_rows
        if limit is not None and rows >= limit:
            return sources, limit
    return sources, rows


def _parquet_bytes(source: Source, field: str) -> int:
    """Bytes of text in the file, as its footer has them."""
    metadata = parquet_file(source, field).metadata
    column = [metadata.schema.column(c).path for c in range(metadata.num_columns)].index(field)
    groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
    return sum(group.column(column).total_uncompressed_size for group in groups)


def _parquet_rows(source: Source, field: str) -> Iterator[Rows]:
    import pyarrow

    file = parquet_file(source, field)
    rows = file.metadata.num_rows
    size = _parquet_bytes(source, field)
    done = 0
    batches = file.iter_batches(max(1, min(1 << 14, rows * BLOCK_BYTES // max(1, size))), columns=[field])
    try:
        for batch in batches:
            done += batch.num_rows
            yield Rows(source.bytes * done // rows, source.name, batch.column(0), done - batch.num_rows)
    except (pyarrow.ArrowException, OSError) as error:
        raise CorpusError(f"{source.name} is damaged after row {done:,}: {error}; fetch it again") from None


# --- a text to begin with ---------------------------------------------------------------------------------------------


def tiny_shakespeare() -> Path:
    """Tiny Shakespeare (1,115,394 bytes, Karpathy 2015), fetched once. Raises UserError without it."""
    parts = tuple(f"sonnet/examples/data/ts.{part}.txt" for part in ("train", "valid", "test"))
    sources = [
        Url("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"),
        Wheel("dm-sonnet==1.36", "afe292a5f2eaed5c3e2be4b30f2a14b67425422457b9a51579d616af6f075dac", parts),
    ]
    return fetch("Tiny Shakespeare", "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed", sources)
