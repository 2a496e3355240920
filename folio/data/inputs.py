"""The inputs of a data set: files, folders, and patterns are listed, their formats are recognized, and they are read.

A file is recognized by its content first, and by its name second. An explicit format is always used.
"""

import csv
import glob
import itertools
import json
import lzma
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np

from folio import UserError
from folio.base.files import LFS_ADVICE, LFS_POINTER, refuse_lfs_pointer
from folio.data.account import IN, Account
from folio.data.tokenizer import unify_line_ends

Format = Literal["text", "subtitles", "jsonl", "json", "csv", "parquet"]
Kind = Format | Literal["abc", "midi", "wheel"]  # the last ones are read by the scripts for music
TEXT_FORMATS: tuple[Format, ...] = ("text", "subtitles")  # the other formats have records
SUFFIXES: dict[str, Format] = {
    ".txt": "text",
    ".md": "text",
    ".srt": "subtitles",
    ".vtt": "subtitles",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",  # JSON lines or one array, as the content says
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
TEXT_SUFFIXES = [suffix for suffix, format in SUFFIXES.items() if format in TEXT_FORMATS]
RECORD_SUFFIXES = [suffix for suffix, format in SUFFIXES.items() if format not in TEXT_FORMATS]
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".xz": "xz"}
COMPRESSION_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ\0": "xz"}
ZSTD_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")  # a frame of metadata before the text
COMPRESSION_RATIO = 4  # estimate for compressed files that have not been read
STDIN, STDIN_NAME = "-", ".standard-input-"  # the name of the input, and the beginning of its copy's name
BOM = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")  # the former also begins UTF-32
HEAD_BYTES = 1 << 16  # of the beginning of a file, by which its format is recognized
HEAD_ROWS = 20  # of a table, by which the delimiter is recognized
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
ANKI_SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|", "colon": ":", "space": " "}
UNUSED_FOLDERS = ("__MACOSX", "node_modules")  # and those whose name begins with a dot

KINDS_OF_FILES = {  # the beginning of files that are not text, what they are, and what to do
    b"%PDF-": "a PDF file; extract its text, for example with pdftotext",
    b"{\\rtf": "an RTF document; save it as text",
    b"PK\x03\x04": "a zip archive, or a document such as .docx or .epub; unpack it, or save it as text",
    b"7z\xbc\xaf": "a 7z archive; unpack it",
    b"Rar!\x1a\x07": "a RAR archive; unpack it",
    b"BZh91AY&SY": "compressed with bzip2; unpack it",
    b"ARROW1": "an Arrow file; save it as parquet",
    b"\xd0\xcf\x11\xe0": "an old Office document, such as .doc or .xls; save it as text or CSV",
    b"SQLite format 3": "a SQLite database; export a table as CSV",
    b"\x89PNG": "an image; leave it out",
    b"\xff\xd8\xff": "an image; leave it out",
}


class CorpusError(UserError):
    """Text that cannot be read. The message says how to fix it.

    It is one line, although names in a file, and messages of other libraries, may contain line ends.
    """

    def __init__(self, message: str):
        super().__init__(re.sub(r"\s*[\0-\x1f\x7f\x85\u2028\u2029]+\s*", " ", message))


class Position(NamedTuple):
    """A place in a file, which counts lines from 1 and bytes of the line from 0."""

    line: int = 1
    byte: int = 0

    def after(self, content: bytes) -> "Position":
        """The place after this content."""
        if len(content) < 1 << 13:
            lines = content.count(b"\n")
        else:  # NumPy is 7 times as fast for 1 MB
            lines = int(np.count_nonzero(np.frombuffer(content, np.uint8) == ord("\n")))
        return Position(self.line + lines, len(content) - content.rfind(b"\n") - 1 + (0 if lines else self.byte))

    def __str__(self) -> str:
        return f"{self.line}, byte {self.byte:,} of the line" if self.byte else str(self.line)


@dataclass(frozen=True)
class SizeLimits:
    """Sizes in bytes that decide how a file is divided into blocks."""

    block: int = 1 << 20  # approximate size of a block
    document: int = 1 << 23  # a larger document between separators is split into parts
    word: int = 1 << 24  # a longer text without a safe cut is cut between any two characters
    record: int = 1 << 28  # maximum size of a line of JSON or of text, which must fit in memory
    row: int = 1 << 26  # maximum size of a CSV row; Python's csv module takes up to 8 times as much memory


DEFAULT_LIMITS = SizeLimits()


# --- a file -----------------------------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """Consecutive bytes of a text, and the number of bytes of the file read so far, for progress bars."""

    content: bytes
    bytes_read: int


@dataclass(frozen=True)
class Source:
    """A file of the corpus.

    name: the path as the user gave it, for messages. compression: gzip, zstd, xz, or None, for estimates. delimiter:
    separates the cells of a table. quoted: whether quotes enclose cells of a table, or are text. keep_line_ends: do not
    convert \\r\\n and \\r to \\n. limit: the maximum number of rows of a parquet file.
    """

    path: Path
    format: Kind
    name: str
    limits: SizeLimits = DEFAULT_LIMITS
    compression: str | None = None
    delimiter: str = ","
    quoted: bool = True
    keep_line_ends: bool = False
    limit: int | None = None

    @property
    def bytes(self) -> int:
        return self.path.stat().st_size

    @property
    def text_bytes(self) -> int:
        """The decompressed size, which is an estimate for a compressed file."""
        return self.bytes * (COMPRESSION_RATIO if self.compression else 1)

    @property
    def suffix(self) -> str:
        """The suffix of the name without .gz, .zst, or .xz, in lower case."""
        suffixes = [suffix for suffix in self.path.suffixes[-2:] if suffix.lower() not in COMPRESSIONS]
        return suffixes[-1].lower() if suffixes else ""

    def fingerprint(self) -> list[Any]:
        """A value that changes if the documents change, but not with the working directory."""
        stat = self.path.stat()
        version = [self.path.name, stat.st_size, stat.st_mtime_ns]
        limit = [] if self.limit is None else [self.limit]
        return [*version, self.format, self.delimiter, self.quoted, self.keep_line_ends, *limit]

    def open(self) -> BinaryIO:
        """Open the file. Raises CorpusError."""
        try:
            return open(self.path, "rb")
        except OSError as error:
            raise CorpusError(f"{self.name} cannot be read: {error.strerror}") from None

    def read(self, account: Account) -> Iterator[Chunk]:
        """Yield the decompressed content in chunks of about limits.block bytes, without a byte-order mark.

        In texts, \\r\\n and \\r become \\n. account: receives what was read. Raises CorpusError if the file cannot be
        read, is not text, or is compressed and damaged.
        """
        converts = self.format == "text" and not self.keep_line_ends
        carriage_return, is_first = b"", True
        for content, bytes_read in self._read_raw(max(len(BOM), self.limits.block)):
            account["bytes"][IN] += len(content)
            if is_first and content.startswith(BOM):  # some editors on Windows write it before UTF-8
                account["bytes"]["byte-order marks"] += len(BOM)
                content = content.removeprefix(BOM)
            if is_first and content.startswith(UTF16_MARKS):
                encoding = "UTF-32" if content[2:4] == b"\0\0" else "UTF-16"
                raise CorpusError(f"{self.name} is {encoding} text; save it as UTF-8 (iconv -f {encoding} -t utf-8)")
            if b"\0" in content:
                raise CorpusError(f"{self.name}:{self._position_of_zero()}: {describe_zeros(self.head()[0], content)}")
            if converts:
                content = carriage_return + content
                carriage_return = content[-1:] if content.endswith(b"\r") else b""  # \n may follow
                content = _unify(content.removesuffix(carriage_return), account)
            yield Chunk(content, bytes_read)
            is_first = False
        if carriage_return:
            yield Chunk(_unify(carriage_return, account), self.bytes)

    def _position_of_zero(self) -> Position:
        """The position of the first zero byte in the content."""
        position = Position()
        for content, _ in self._read_raw(self.limits.block):
            before, zero, _ = content.partition(b"\0")
            position = position.after(before)
            if zero:
                break
        return position

    def _read_raw(self, size: int) -> Iterator[Chunk]:
        """Yield the decompressed content."""
        with self._content() as (content, file, _):
            while chunk := content.read(size):
                yield Chunk(chunk, file.tell())

    @contextmanager
    def _content(self) -> Iterator[tuple["BinaryIO | _XzReader", BinaryIO, str | None]]:
        """The decompressed content, the file, and the compression. Raises UserError if the name says otherwise."""
        with self.open() as file:
            head = file.read(6)
            file.seek(0)
            compression = next((name for magic, name in COMPRESSION_MAGIC.items() if head.startswith(magic)), None)
            if ZSTD_SKIPPABLE.match(head):
                compression = "zstd"
            expected = COMPRESSIONS.get(self.path.suffix.lower())
            content: BinaryIO | _XzReader = file
            if compression == "xz":
                content = _XzReader(file)
            elif compression:
                import pyarrow

                content = pyarrow.CompressedInputStream(file, compression)
            elif expected:
                refuse_lfs_pointer(self.path)
                raise CorpusError(f"{self.name} is damaged, or not compressed with {expected}; download it again")
            try:
                yield content, file, compression
            except (OSError, EOFError, lzma.LZMAError) as error:  # Arrow raises OSError for damaged content
                if not compression:
                    raise
                raise CorpusError(f"{self.name} is damaged or truncated: {error}; download it again") from None

    def text(self) -> str:
        """The decoded content of a small text file. Raises UserError."""
        refuse_lfs_pointer(self.path)
        return decode_utf8(b"".join(chunk.content for chunk in self.read(Account())), self.name)

    def head(self) -> tuple[bytes, str | None]:
        """The beginning of the decompressed content, at least HEAD_BYTES if it is larger, and the compression.

        Raises UserError.
        """
        head, size = b"", HEAD_BYTES + len(BOM)
        with self._content() as (content, _, compression):
            while len(head) < size and (chunk := content.read(size)):
                head += chunk
        return head.removeprefix(BOM), compression


class _XzReader:
    """The decompressed content of a .xz file. Unlike lzma.open, it does not ignore what follows a stream, except zeros.

    It raises EOFError and lzma.LZMAError.
    """

    def __init__(self, file: BinaryIO):
        self.file, self.decompressor = file, lzma.LZMADecompressor()

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, or fewer at the end."""
        content, compressed = b"", b""
        while len(content) < size:
            if self.decompressor.eof:
                compressed = self.decompressor.unused_data.lstrip(b"\0")  # streams may be padded
                while not compressed:
                    if not (padding := self.file.read(size)):
                        return content
                    compressed = padding.lstrip(b"\0")
                self.decompressor = lzma.LZMADecompressor()
            elif self.decompressor.needs_input and not (compressed := self.file.read(size)):
                raise EOFError("it ends within a stream")
            content += self.decompressor.decompress(compressed, max_length=size - len(content))
            compressed = b""
        return content


def _unify(content: bytes, account: Account) -> bytes:
    """Convert \\r\\n and \\r to \\n, and count the bytes that this removes and the line ends that it changes."""
    if b"\r" not in content:
        return content
    unified = content.replace(b"\r\n", b"\n")
    account["bytes"]["line ends"] += len(content) - len(unified)
    account["line ends"][r"\r\n"] += len(content) - len(unified)
    account["line ends"][r"\r"] += unified.count(b"\r")
    return unified.replace(b"\r", b"\n")


def decode_utf8(content: bytes, file: str, position: Position = Position()) -> str:  # noqa: B008 (it is immutable)
    """Decode UTF-8. Raises CorpusError with the file, the line, and the likely encoding. position: of the content."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        place, reason = position.after(content[: error.start]), _guess_encoding(content, error.start)
        if error.reason == "unexpected end of data":
            reason = "it ends within a character, so it may be truncated, or in an old encoding; save it as UTF-8"
        raise CorpusError(f"{file}:{place} is not UTF-8 text: {reason}") from None


def _guess_encoding(content: bytes, position: int) -> str:
    nearby = content[max(0, position - 1000) : position + 1000]
    if nearby[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "it looks like UTF-16; save it as UTF-8"
    if sum(byte < 9 or 14 <= byte < 32 for byte in nearby) > len(nearby) / 50:
        return "it looks like a binary file; leave it out"
    kind, name = ("CP1252", "cp1252") if any(0x80 <= byte < 0xA0 for byte in nearby) else ("Latin-1", "latin1")
    return f"it is in an old encoding, perhaps {kind}; save it as UTF-8 (iconv -f {name} -t utf-8)"


def describe_zeros(head: bytes, content: bytes) -> str:
    """Describe content with zero bytes (U+0000), which is not UTF-8 text, and what to do. head: of the file."""
    if b"ustar" in (head[257:262], content[257:262]):
        return "it is a tar archive; unpack it, and name its files"
    head = head[: len(head) // 4 * 4]
    zeros = [head[k::2].count(b"\0") for k in range(2)]  # at even and odd positions
    # In UTF-16, the zeros are the high bytes of spaces and of other ASCII characters.
    is_utf16 = {
        "LE": zeros[1] > max(4 * zeros[0], len(head) / 100),
        "BE": zeros[0] > max(4 * zeros[1], len(head) / 100),
    }
    for encoding in ("UTF-32LE", "UTF-32BE", "UTF-16LE", "UTF-16BE"):
        text = head.decode(encoding, "replace")
        printable = sum((c.isprintable() or c.isspace()) and c != "\ufffd" for c in text)
        if printable > 0.98 * len(text) and ("32" in encoding or is_utf16[encoding[-2:]]):
            return f"it looks like {encoding}; save it as UTF-8 (iconv -f {encoding} -t utf-8)"
    return "it contains a zero byte (U+0000), as binary files do; leave the file out, or remove the zeros (tr -d '\\0')"


# --- the files of the inputs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """The files that are read, in order, and what was not: files and folders by the reason.

    notes: how files are read if that does not follow from their names.
    """

    sources: list[Source]
    left_out: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(source.bytes for source in self.sources)

    def account(self, used: Mapping[str, int] | None = None) -> Account:
        """The files and folders that the inputs contain. used: the files by what became of them; None: all are read."""
        used = used or Counter(f"read as {source.format}" for source in self.sources)
        return Account({"files": {IN: len(self.sources) + self.left_out.total(), **used, **self.left_out}})


def find_sources(
    inputs: Sequence[str],
    format: Format | None = None,
    suffixes: Collection[str] = tuple(SUFFIXES),
    *,
    keep_line_ends: bool = False,
    kind: Kind | None = None,
    tables: bool = False,
    limits: SizeLimits = DEFAULT_LIMITS,
) -> Inputs:
    """Return the files that `inputs` names: files, patterns, or folders with their subfolders, without repetitions.

    The files are in the order of the inputs, and those of one folder or pattern are sorted by name. Hidden files,
    linked folders, and files with other suffixes in folders are left out and counted.

    format: the format of all files; None: recognized. suffixes: of the files to use in folders, also compressed; all
    files are used if `format` is given. kind: of the files, if they are of one that the caller reads. tables: a
    .txt file is a table if all lines have tabs, as in exports of Anki. Raises CorpusError.
    """
    left_out: Counter[str] = Counter()
    paths: dict[Path, tuple[Path, bool]] = {}  # resolved path -> the path, and whether a folder contains it
    for name in inputs:
        is_folder = os.path.isdir(os.path.expanduser(name))
        for path in _find_files(name, suffixes, all_files=format is not None, left_out=left_out):
            key = path.resolve()
            left_out["repeated file"] += key in paths
            paths.setdefault(key, (path, is_folder))
    sources, notes = [], []
    for path, is_in_folder in paths.values():
        shown = "standard input" if path.name.startswith(STDIN_NAME) else str(path)
        source = Source(path, kind or format or "text", shown, limits, keep_line_ends=keep_line_ends)
        if kind:
            refuse_lfs_pointer(path)
        recognized = source if kind else _recognized(source, format, notes, tables)
        if recognized:
            sources.append(recognized)
        elif is_in_folder:
            left_out[".json file without records"] += 1
        else:
            raise CorpusError(f"{path}: this JSON is not a list of objects; write one object per line, or an array")
    return Inputs(sources, +left_out, notes)


@contextmanager
def saved_stdin(inputs: Sequence[str]) -> Iterator[list[str]]:
    """Replace - in the inputs by a temporary file with standard input, because a corpus is read several times.

    The name of the file is the hash of its content, so that the same content is the same data set. Raises UserError if
    the disk is full.
    """
    if STDIN not in inputs:
        yield list(inputs)
        return
    with tempfile.TemporaryDirectory() as folder:
        copy, digest = Path(folder, "copy"), blake2b(digest_size=16)
        try:
            with open(copy, "wb") as file:
                while chunk := sys.stdin.buffer.read(1 << 20):
                    digest.update(chunk)
                    file.write(chunk)
        except OSError as error:
            problem = f"standard input could not be saved in {folder} ({error.strerror})"
            raise UserError(f"{problem}; set TMPDIR to a folder with more space") from None
        saved = copy.rename(Path(folder, f"{STDIN_NAME}{digest.hexdigest()}"))
        os.utime(saved, (0, 0))  # the fingerprint contains the time
        yield [str(saved) if name == STDIN else name for name in inputs]


def _find_files(name: str, suffixes: Collection[str], all_files: bool, left_out: Counter[str]) -> list[Path]:
    """Return the files that one input names, and count others. Raises CorpusError if there are none."""
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):  # for a name that is too long, os.path.isdir returns False, and Path.is_dir raises OSError
        files = sorted(_files_under(path, left_out))
        usable = [file for file in files if all_files or _suffix(file) in suffixes]
        if not usable:
            kind = "files" if all_files else f"{', '.join(suffixes)} (also .gz, .zst or .xz)"
            raise CorpusError(f"{name}: this folder has no {kind}{_suggest_pattern(path, files)}")
        used = {*usable}
        left_out.update(f"{_suffix(file) or 'other'} file" for file in files if file not in used)
        return usable
    if os.path.isfile(path):
        return [path]
    if os.path.exists(path):
        raise CorpusError(f"{name} is not a file or a folder; pipe it to standard input, and name -")
    matches = sorted(_matches(path))
    files = [match for match in matches if match.is_file()]
    if not files:
        shown = name if len(name) < 200 else f"{name[:200]}..."
        raise CorpusError(f"{shown}: no such file")
    for match in matches:
        if match.is_dir():
            left_out["folder that matches a pattern"] += "**" not in name
        elif not match.is_file():
            left_out[_special(match)] += 1
    return files


def _matches(pattern: Path) -> Iterator[Path]:
    """Yield what matches a pattern. ** matches folders that are not hidden, linked, or unused."""
    first = next((k for k, part in enumerate(pattern.parts) if "**" in part), None)
    if first is None:
        yield from map(Path, glob.glob(str(pattern)))
        return
    for folder in map(Path, glob.glob(str(Path(*pattern.parts[:first])))):
        for match in folder.glob(str(Path(*pattern.parts[first:]))):  # unlike the module glob, it does not follow links
            parts = match.relative_to(folder).parts
            if not any(part.startswith(".") or part in UNUSED_FOLDERS for part in parts):
                yield match


def _files_under(folder: Path, left_out: Counter[str]) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders. Raises CorpusError if a folder cannot be read."""

    def refuse(error: OSError) -> None:
        raise CorpusError(f"{error.filename} cannot be read: {error.strerror}")

    for parent, folders, names in os.walk(folder, onerror=refuse):
        for subfolder in list(folders):
            if reason := _unused_folder(Path(parent, subfolder)):
                left_out[reason] += 1
                folders.remove(subfolder)
        for name in names:
            path = Path(parent, name)
            if name.startswith("."):  # also Apple's ._ files
                left_out["hidden file"] += 1
            elif path.is_file():
                yield path
            else:
                left_out[_special(path)] += 1


def _special(path: Path) -> str:
    return "broken link" if path.is_symlink() else "special file"


def _unused_folder(folder: Path) -> str | None:
    """The reason not to read a subfolder, or None."""
    if folder.name.startswith("."):
        return "hidden folder"
    if folder.name in UNUSED_FOLDERS:
        return f"{folder.name} folder"
    return "linked folder" if folder.is_symlink() else None


def _suffix(path: Path) -> str:
    return Source(path, "text", "").suffix


def _suggest_pattern(folder: Path, files: list[Path]) -> str:
    """Return advice for an error: the pattern that matches the text files with the most common suffix in a folder."""
    for suffix, count in Counter(path.suffix for path in files if path.suffix).most_common():
        paths = [path for path in files if path.suffix == suffix]
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
            head = file.read(4096)
    except OSError:
        return False
    return bool(head) and b"\0" not in head and bool(head.decode("utf-8", "ignore"))


# --- recognizing a format ---------------------------------------------------------------------------------------------

TIME = rb"[ \t]*(?:\d+:)?\d+:\d\d(?:[,.:]\d+)?"
TIMES = re.compile(TIME + rb"[ \t]*-->.*\s*")
CUE = re.compile(rb"\s*(?:\d+[ \t]*\r?\n)?" + TIME + rb"[ \t]*-->")  # the first lines of a .srt file
JSON_ARRAY = re.compile(rb"\s*\[\s*(?:\{\s*[\"}]|\]\s*$)")
JSON_OBJECT = re.compile(rb"\s*\{\s*[\"}]")


def _recognized(source: Source, format: Format | None, notes: list[str], tables: bool) -> Source | None:
    """Return the source with its format and delimiter. None: a JSON file that is not a list of objects.

    Adds a line to `notes` if they do not follow from the name. Raises CorpusError if the file is not text.
    """
    head, compression = source.head()
    if head.startswith(LFS_POINTER):
        raise CorpusError(f"{source.name} {LFS_ADVICE}")
    if format is None:
        by_name = SUFFIXES.get(source.suffix, "text")
        format = _format_of(head, source)
        if format is None:
            return None
        if tables and format == "text" and (_has_tabs(head) or head.startswith(b"#separator:")):
            format = by_name = "csv"
        if format != by_name and {format, by_name} != {"json", "jsonl"}:
            names = {"jsonl": "JSON lines", "json": "a JSON array", "text": "text"}
            content = names.get(format, format)
            notes.append(f"{source.name} is read as {content}, because of its content; if not: --format={by_name}")
    source = replace(source, format=format, compression=compression)
    if format == "csv":
        return _recognized_table(source, head, notes)
    return source


def _format_of(head: bytes, source: Source) -> Format | None:
    """Return the format of a file by its first bytes, or else by its name."""
    if head.startswith(b"PAR1"):
        return "parquet"
    for magic, kind in KINDS_OF_FILES.items():
        if head.startswith(magic):
            raise CorpusError(f"{source.name} is not text, but {kind}")
    by_name = SUFFIXES.get(source.suffix, "text")
    if CUE.match(head) or (re.match(rb"WEBVTT\s", head) and b"-->" in head):
        return "subtitles"
    if JSON_ARRAY.match(head):
        return "json"
    if JSON_OBJECT.match(head):
        first, line_end, _ = head.lstrip().partition(b"\n")
        if line_end or len(head) < HEAD_BYTES:
            if _is_json_object(first):
                following = next(filter(bytes.strip, head.lstrip().split(b"\n")[1:]), b"")
                is_prose = by_name == "text" and following and not JSON_OBJECT.match(following)
                return "text" if is_prose else "jsonl"
            if by_name != "json":
                return by_name
            if len(head) >= HEAD_BYTES or _is_json_object(head):  # one object on several lines
                return None
            raise CorpusError(f"{source.name} has neither an object per line nor an array; use jq -c . to write lines")
        return "jsonl" if by_name in ("json", "jsonl") else by_name  # a line longer than the head
    if by_name == "json":
        return None if head.lstrip().startswith(b"[") else "jsonl"
    return by_name


def _has_tabs(head: bytes) -> bool:
    """Whether each line of the first bytes of a file has a tab, except for the last one, which may not be complete."""
    lines = [line for line in head.splitlines()[: -1 if len(head) >= HEAD_BYTES else None] if line.strip()]
    return bool(lines) and all(b"\t" in line for line in lines if not line.startswith(b"#"))


def _is_json_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _recognized_table(source: Source, head: bytes, notes: list[str]) -> Source:
    """Return the source of a table with its delimiter, and whether its cells are quoted."""
    expected = {".csv": ",", ".tsv": "\t"}.get(source.suffix)
    usual = expected or ("\t" if _has_tabs(head) else ",")
    first = head.decode("utf-8", "replace").partition("\n")[0].rstrip("\r")
    if named := re.fullmatch(r'"?(?i:sep)=([^"])"?|#separator:(\w+|[^"])', first):  # the first line of Excel or Anki
        delimiter = named[1] or ANKI_SEPARATORS.get(named[2].lower(), named[2])
    else:
        delimiter = _find_delimiter(head, usual)
    source = replace(source, delimiter=delimiter)
    if delimiter == "\t" and not _has_quoted_cells(source):
        source = replace(source, quoted=False)
    if delimiter != (expected or delimiter):
        cells = DELIMITERS.get(delimiter, repr(delimiter))
        notes.append(f"{source.name}: its cells are separated by {cells}")
    return source


def _find_delimiter(head: bytes, usual: str) -> str:
    """Return the delimiter that divides each of the first rows into the same number of cells, at least two."""
    lines = [line.decode("utf-8", "replace") for line in head.splitlines(keepends=True)]  # str has other line ends, too
    # Commas may fit by accident in a table with semicolons, such as 1,5 for one and a half.
    first = [";"] if usual == "," and lines and ";" in lines[0] else []
    for delimiter in dict.fromkeys((*first, usual, *DELIMITERS)):
        try:
            rows = list(itertools.islice(filter(None, csv.reader(lines, delimiter=delimiter)), HEAD_ROWS))
        except csv.Error:
            continue
        if len(head) >= HEAD_BYTES and len(rows) > 1:
            rows.pop()  # it may be incomplete
        if len({len(row) for row in rows}) == 1 and len(rows[0]) > 1:
            return delimiter
    return usual


QUOTED_CELL = re.compile(r'"(?:[^"]|"")*"')


def _has_quoted_cells(source: Source) -> bool:
    """Whether quotes at the beginning of cells enclose them, as pandas and Excel write, or are part of the text.

    Writers quote a cell if it contains a tab, a line end, a quote, or (Excel) a comma, or they quote all cells.
    """
    quoted = quoted_commas = cells_with_commas = unquoted = 0
    for number, line in enumerate(read_text_lines(source, Account())):
        for cell in line.split("\t"):
            if cell.startswith('"'):
                if not QUOTED_CELL.fullmatch(cell):  # a tab or a line end is inside, or the quote is text
                    return _is_csv(source)
                if '""' in cell[1:-1]:
                    return True
                quoted += 1
                quoted_commas += "," in cell
            elif '"' in cell:  # writers of quotes would have quoted it
                return False
            elif cell not in ("", "sep=") and not cell.replace(".", "").replace("-", "").isdigit():
                unquoted += number > 0  # some writers quote all texts except for the header
            cells_with_commas += "," in cell
    return bool(quoted) and (not unquoted or quoted == quoted_commas == cells_with_commas)


def _is_csv(source: Source) -> bool:
    """Whether the rows have the same number of cells if cells are quoted, and would not if quotes are text."""
    quoted, unquoted = ({len(row) for row in rows if row} for rows in map(partial(_rows, source), (True, False)))
    return len(quoted) == 1 and (quoted != unquoted or quoted == {1})


def _rows(source: Source, quoted: bool) -> Iterator[list[str]]:
    """Yield the rows of a table with tabs, or rows without and with cells if it cannot be read."""
    lines = (f"{line}\n" for line in read_text_lines(source, Account()))
    quoting = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    try:
        yield from csv.reader(lines, delimiter="\t", strict=True, quoting=quoting)
    except csv.Error:
        yield from ([""], ["", ""])


def read_lines(source: Source, account: Account) -> Iterator[Chunk]:
    """Yield each line with its line end: \\n, \\r\\n, or \\r. Raises CorpusError. account: receives what was read."""
    pending, bytes_read, number = bytearray(), 0, 1  # the beginning of a line, which may be complete
    for content, bytes_read in source.read(account):
        is_complete = pending.endswith((b"\r", b"\n")) or b"\n" in content or b"\r" in content
        pending += content
        if is_complete:
            *complete, rest = bytes(pending).splitlines(keepends=True)
            for line in complete:
                yield Chunk(line, bytes_read)
            pending, number = bytearray(rest), number + len(complete)
        if len(pending) > source.limits.record:
            limit = f"{source.limits.record:,} bytes; save such a text as a .txt file"
            raise CorpusError(f"{source.name}:{number}: this line has more than {limit}")
    if pending:
        yield Chunk(bytes(pending), bytes_read)


def read_text_lines(source: Source, account: Account) -> Iterator[str]:
    """Yield the decoded lines of a text file without line ends, and count them. Raises CorpusError."""
    for number, (line, _) in enumerate(read_lines(source, account), 1):
        content = line.rstrip(b"\r\n")
        account["bytes"]["text"] += len(content)
        account["bytes"]["line ends of records"] += len(line) - len(content)
        yield decode_utf8(content, source.name, Position(number))


def unify_record(value: Any) -> Any:
    """Return a JSON value in whose texts \\r\\n and \\r are \\n."""
    if isinstance(value, str):
        return unify_line_ends(value)
    if isinstance(value, dict):
        return {name: unify_record(item) for name, item in value.items()}
    return [unify_record(item) for item in value] if isinstance(value, list) else value
