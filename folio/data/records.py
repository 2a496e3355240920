"""Reads the records of JSON lines, JSON arrays, tables, and parquet files as blocks."""

import codecs
import csv
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from folio.base.files import refuse_lfs_pointer
from folio.base.number_format import counted
from folio.data.account import IN, Account
from folio.data.blocks import (
    CorpusBlock,
    CorpusError,
    Field,
    JsonLinesBlock,
    MakeDocument,
    RowBlock,
    decode_cell,
    parse_object,
)
from folio.data.inputs import Chunk, Inputs, Position, Source, decode_utf8

FIRST_ROWS = 10  # of a table, by which a caller recognizes its columns


class Columns(NamedTuple):
    """The names of a table's columns, and whether they are its first row."""

    names: list[str]
    has_header: bool = True


NameColumns = Callable[[list[list[str]]], Columns]  # from the first rows of a table


def header(rows: list[list[str]]) -> Columns:
    """Use the first row as the names of the columns."""
    return Columns(rows[0])


def record_blocks(source: Source, make: MakeDocument, name_columns: NameColumns) -> Iterator[CorpusBlock]:
    """Yield the records of a file as blocks. Raises CorpusError."""
    if source.format == "parquet":
        if isinstance(make, Field):
            return _parquet_texts(source, make.name)
        return _parquet_records(source, make)
    if source.format == "csv":
        return _csv_rows(source, make, name_columns)
    if source.format == "json":
        return _json_array(source, make)
    return _json_lines(source, make)


def _record_too_long(record: str, limit: int) -> CorpusError:
    return CorpusError(f"{record} has more than {limit:,} bytes; save such a text as a .txt file")


class _Rows:
    """Collects records until they fill a block."""

    def __init__(self, source: Source, make: MakeDocument, account: Account):
        self.source, self.make, self.account = source, make, account
        self.records: list[dict[str, Any]] = []
        self.size = self.first = 0

    def add(self, record: dict[str, Any], size: int) -> bool:
        """Add a record of about `size` bytes. Returns whether the block is full."""
        self.account["records"][IN] += 1
        self.records.append(record)
        self.size += size
        return self.size >= self.source.limits.block

    @property
    def number(self) -> int:
        """The number of the next record."""
        return self.first + len(self.records)

    def block(self, bytes_read: int) -> RowBlock:
        """Return the collected records, possibly none, and what was read for them."""
        records, first = self.records, self.first
        self.records, self.size, self.first = [], 0, first + len(records)
        return RowBlock(
            bytes_read,
            self.source.name,
            records,
            first,
            self.make,
            self.source.keep_line_ends,
            account=self.account.take(),
        )


# --- JSON -------------------------------------------------------------------------------------------------------------


def _json_lines(source: Source, make: MakeDocument) -> Iterator[JsonLinesBlock]:
    account = Account()
    pending, size, line = [], 0, 1  # the beginning of an incomplete line, its size and its number

    def block(bytes_read: int, content: bytes) -> JsonLinesBlock:
        return JsonLinesBlock(
            bytes_read, source.name, content, line, make, source.keep_line_ends, account=account.take()
        )

    for chunk, bytes_read in source.read(account):
        complete, newline, rest = chunk.rpartition(b"\n")
        if newline:
            content = b"".join([*pending, complete])
            account["bytes"]["line ends of records"] += 1
            yield block(bytes_read, content)
            line += content.count(b"\n") + 1
            pending, size = [], 0
        pending.append(rest)
        size += len(rest)
        if size > source.limits.record:
            raise _record_too_long(f"{source.name}:{line}: this line", source.limits.record)
    yield block(source.bytes, b"".join(pending))


JSON_SPACE = " \t\r\n"
ARRAY_START = re.compile(rf"[{JSON_SPACE}]*\[[{JSON_SPACE}]*(?:(?P<end>\])|(?=[^{JSON_SPACE}]))")
NEXT_ELEMENT = re.compile(rf"[{JSON_SPACE}]*(?:,[{JSON_SPACE}]*(?=[^{JSON_SPACE}])|(?P<end>\]))")


def _json_array(source: Source, make: MakeDocument) -> Iterator[RowBlock]:
    """Yield the objects of an array, of which only a part is in memory."""
    account = Account()
    rows = _Rows(source, make, account)
    for text, bytes_read in _array_elements(source, account):
        try:
            record = parse_object(text, account)
        except CorpusError as error:
            raise CorpusError(f"{source.name}, record {rows.number:,}: {error}") from None
        if rows.add(record, len(text)):
            yield rows.block(bytes_read)
    yield rows.block(source.bytes)


def _array_elements(source: Source, account: Account) -> Iterator[Chunk]:
    """Yield the text of each element of a JSON array. Raises CorpusError."""
    decoder, utf8 = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8")()
    text, number, position = "", 0, Position()  # `text` has not been parsed yet
    separator: re.Pattern[str] | None = ARRAY_START  # before the next element; None: the array has ended
    tried = 0  # length of `text` when its first element was incomplete
    for content, bytes_read in itertools.chain(source.read(account), [Chunk(b"", source.bytes)]):
        is_last = not content
        try:
            text += utf8.decode(content, final=is_last)
        except UnicodeDecodeError:
            decode_utf8(content, source.name, position)  # raises CorpusError with the line
            raise CorpusError(f"{source.name}:{position} is not UTF-8 text; save it as UTF-8") from None
        position = position.after(content)
        if len(text) < 2 * tried and not is_last:  # parsing an incomplete element again costs as much as its length
            continue
        end = tried = 0
        while separator:
            match = separator.match(text, end)
            if match is None:
                if text[end:].strip(JSON_SPACE) not in ("", "[", ","):
                    what = f"{source.name}, after record {number - 1:,}" if number else source.name
                    raise CorpusError(f"{what}: this is not a JSON array of objects; fix or remove it")
                break
            begin = stop = match.end()
            if match["end"]:
                separator = None
            elif text[begin] != "{":
                raise CorpusError(f"{source.name}, record {number:,}: this is not an object {{...}}; fix or remove it")
            else:
                try:
                    _, stop = decoder.raw_decode(text, begin)
                except (ValueError, RecursionError) as error:
                    is_partial = str(error).startswith("Unterminated") or getattr(error, "pos", 0) > len(text) - 16
                    if not is_partial or len(text) - end > source.limits.record:
                        raise CorpusError(f"{source.name}, record {number:,}: it is not JSON: {error}") from None
                    tried = len(text) - end
                    break
                element = text[begin:stop].encode()
                account["bytes"]["records"] += len(element)
                yield Chunk(element, bytes_read)
                number, separator = number + 1, NEXT_ELEMENT
            account["bytes"]["syntax"] += begin - end
            end = stop
        text = text[end:]
        if separator is None:
            if text.strip(JSON_SPACE):
                raise CorpusError(f"{source.name}: there is text after its JSON array; fix or remove it")
            account["bytes"]["syntax"] += len(text)
            text = ""
    if separator:
        place = f", after record {number - 1:,}" if number else ""
        raise CorpusError(f"{source.name} ends within its JSON array{place}; download it again")


# --- tables -----------------------------------------------------------------------------------------------------------


FIRST_LINES = re.compile(r"sep=|#(?:separator|html|tags|columns|notetype|deck|guid)\b")  # of Excel's and Anki's files


class CsvLines:
    """The decoded lines of a CSV file."""

    def __init__(self, source: Source, account: Account):
        self.source, self.account = source, account
        self.bytes_read = 0
        self.row_bytes = 0  # size of the current row, which may have several lines; the caller resets it after each row

    def __iter__(self) -> Iterator[str]:
        name, buffer, number = self.source.name, bytearray(), 1
        for chunk, bytes_read in self.source.read(self.account):
            self.bytes_read = bytes_read
            has_line_end = buffer[-1:] in (b"\r", b"\n") or b"\n" in chunk or b"\r" in chunk
            buffer += chunk
            if has_line_end:
                *complete, rest = bytes(buffer).splitlines(keepends=True)
                for line in complete:
                    self.row_bytes += len(line)
                    yield decode_utf8(line, name, Position(number))
                    number += 1
                buffer = bytearray(rest)
            if self.row_bytes + len(buffer) > self.source.limits.row:
                row = f"{name}, line {number}: this row (is a quote missing?)"
                raise _record_too_long(row, self.source.limits.row)
        self.row_bytes += len(buffer)
        yield decode_utf8(bytes(buffer), name, Position(number))

    def end_row(self, category: str) -> int:
        """Count the bytes of the row that was read, and return them."""
        size, self.row_bytes = self.row_bytes, 0
        self.account["bytes"][category] += size
        return size


def _csv_rows(source: Source, make: MakeDocument, name_columns: NameColumns) -> Iterator[RowBlock]:
    account = Account()
    lines, rows = CsvLines(source, account), _Rows(source, make, account)
    table = _numbered_rows(source, lines)
    first = list(itertools.islice(table, FIRST_ROWS))
    try:
        names, has_header = name_columns([row for _, row, _ in first]) if first else Columns([])
    except CorpusError as error:
        raise CorpusError(f"{source.name}: {error}") from None
    for name in names:
        if names.count(name) > 1:
            raise CorpusError(f"{source.name}: several columns have the name {name!r}; rename the others")
    for index, (number, row, size) in enumerate(itertools.chain(first, table)):
        if has_header and index == 0:
            account["bytes"]["headers"] += size
            continue
        account["bytes"]["records"] += size
        if len(row) != len(names):
            cells = counted(len(row), "cell")
            advice = "quote a cell that contains a delimiter, a line end, or a quote"
            raise CorpusError(f"{source.name}:{number}: this row has {cells}, but {len(names)} are expected; {advice}")
        if rows.add(dict(zip(names, row, strict=True)), size):
            yield rows.block(lines.bytes_read)
    if isinstance(make, Field) and names and make.name not in names:
        raise CorpusError(f"{source.name}: there is no column {make.name!r}, only {', '.join(names)}; set --field=NAME")
    yield rows.block(source.bytes)


def _numbered_rows(source: Source, lines: CsvLines) -> Iterator[tuple[int, list[str], int]]:
    """Yield the line number, the cells, and the bytes of each row that is not blank."""
    csv.field_size_limit(2**31 - 1)  # Python's default limit is 128 KB per field
    quoting = csv.QUOTE_MINIMAL if source.quoted else csv.QUOTE_NONE
    reader, is_start = csv.reader(lines, delimiter=source.delimiter, quoting=quoting, strict=True), True
    try:
        for row in reader:
            if is_start and row and FIRST_LINES.match(row[0]):
                lines.end_row("headers")
            elif len(row) < 2 and not "".join(row).strip():
                lines.end_row("blank lines")
            else:
                is_start = False
                size, lines.row_bytes = lines.row_bytes, 0
                yield reader.line_num, row, size
    except csv.Error as error:
        raise CorpusError(f"{source.name}:{reader.line_num}: this is not CSV: {error}") from None


# --- parquet ----------------------------------------------------------------------------------------------------------


def open_parquet(source: Source, field: str | None = None, **settings: Any) -> Any:
    """Open a parquet file. Raises CorpusError if it is not valid, or has no text column `field`."""
    import pyarrow
    from pyarrow import parquet

    try:
        content = pyarrow.OSFile(os.fsencode(source.path))  # ParquetFile requires that a path is UTF-8
        file = parquet.ParquetFile(content, buffer_size=source.limits.block, **settings)  # default: complete columns
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # names of columns may be damaged
        refuse_lfs_pointer(source.path)
        raise CorpusError(f"{source.name} is not a parquet file, or damaged: {str(error).strip()}") from None
    if field is None:
        return file
    schema, columns = file.schema_arrow, ", ".join(file.schema_arrow.names)
    if schema.names.count(field) > 1:
        raise CorpusError(f"{source.name}: several columns have the name {field!r}; rename the others")
    if field not in schema.names:
        raise CorpusError(f"{source.name}: there is no column {field!r}, only {columns}; set --field=NAME")
    kind = schema.field(field).type
    if not _is_text(kind.value_type if pyarrow.types.is_dictionary(kind) else kind):
        raise CorpusError(f"{source.name}: the column {field!r} is {kind}, not text; set --field=NAME")
    return file


def _is_text(kind: Any) -> bool:
    """Whether an Arrow type can contain text. Binary columns may contain UTF-8."""
    from pyarrow import types

    tests = ("is_string", "is_large_string", "is_string_view", "is_binary", "is_large_binary", "is_binary_view")
    return any(getattr(types, test)(kind) for test in tests)


def parquet_sources(files: Iterable[Path], field: str, limit: int | None = None) -> tuple[Inputs, int]:
    """Return the first files that contain `limit` documents in total, and the number of documents to read."""
    sources, rows = [], 0
    for path in files:
        sources.append(Source(path, "parquet", str(path)))
        rows += open_parquet(sources[-1], field).metadata.num_rows
        if limit is not None and rows >= limit:
            return Inputs(sources), limit
    return Inputs(sources), rows


def _column_chunks(metadata: Any, field: str) -> list[Any]:
    """Return the metadata of the column in each row group."""
    column = [metadata.schema.column(c).path for c in range(metadata.num_columns)].index(field)
    return [metadata.row_group(i).column(column) for i in range(metadata.num_row_groups)]


def parquet_text_bytes(source: Source, field: str | None) -> int:
    """Return the uncompressed size of the column, or of all columns, according to the file's footer."""
    metadata = open_parquet(source, field).metadata
    if field is None:
        return sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return sum(chunk.total_uncompressed_size for chunk in _column_chunks(metadata, field))


def _has_dictionary_only(chunk: Any) -> bool:
    """Whether each row is an index into a dictionary, so that the footer does not give the size of the decoded text.

    When its dictionary becomes too large, a writer continues with plain texts, which take more bytes per row.
    """
    if not chunk.has_dictionary_page:
        return False
    dictionary_bytes = chunk.data_page_offset - chunk.dictionary_page_offset
    return chunk.total_compressed_size - dictionary_bytes <= 8 * chunk.num_values + 1024


def _parquet_texts(source: Source, field: str) -> Iterator[RowBlock]:
    """Yield the texts of one column."""
    import pyarrow

    file, done, account = open_parquet(source, field), 0, Account()
    chunks = _column_chunks(file.metadata, field)
    rows = file.metadata.num_rows
    account["unused fields"].update({name: rows for name in file.schema_arrow.names if name != field})
    try:
        for is_encoded, numbered in itertools.groupby(enumerate(chunks), lambda item: _has_dictionary_only(item[1])):
            groups, run = zip(*numbered, strict=True)
            text_bytes = 0 if is_encoded else sum(chunk.total_uncompressed_size for chunk in run)
            batch_rows = source.limits.block * sum(chunk.num_values for chunk in run) // max(1, text_bytes)
            file = open_parquet(source, field, read_dictionary=[field] if is_encoded else None)
            for batch in file.iter_batches(max(1, min(1 << 14, batch_rows)), groups, columns=[field]):
                column = batch.column(0)
                is_dictionary = pyarrow.types.is_dictionary(column.type)
                for texts in _decode_dictionary(column, source.limits.block) if is_dictionary else [column]:
                    done += len(texts)
                    account["records"][IN] += len(texts)
                    read, first = source.bytes * done // max(done, rows), done - len(texts)
                    keep = source.keep_line_ends
                    yield RowBlock(read, source.name, texts, first, None, keep, account=account.take())
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).strip()
        raise CorpusError(f"{source.name} is damaged after row {done:,}: {reason}; download it again") from None
    _check_rows(source, done, rows)
    if rows == 0:
        empty = file.schema_arrow.field(field).type
        yield RowBlock(source.bytes, source.name, pyarrow.array([], empty), 0, account=account.take())


def _parquet_records(source: Source, make: MakeDocument) -> Iterator[RowBlock]:
    """Yield all columns of the rows."""
    import pyarrow

    account = Account()
    file, rows, done = open_parquet(source), _Rows(source, make, account), 0
    row_bytes = parquet_text_bytes(source, None) // max(1, file.metadata.num_rows)
    batch_rows = max(1, min(1 << 14, source.limits.block // max(1, row_bytes)))
    try:
        for batch in file.iter_batches(batch_rows):
            for record in batch.to_pylist():
                done += 1
                if rows.add(_decoded(record, f"{source.name}, row {done - 1:,}"), row_bytes):
                    yield rows.block(source.bytes * done // max(done, file.metadata.num_rows))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).strip()
        raise CorpusError(f"{source.name} is damaged after row {done:,}: {reason}; download it again") from None
    _check_rows(source, done, file.metadata.num_rows)
    yield rows.block(source.bytes)


def _check_rows(source: Source, read: int, expected: int) -> None:
    """Raise CorpusError if fewer or more rows were read than the file has according to its footer."""
    if read != expected:
        raise CorpusError(f"{source.name} is damaged: it has {read:,} rows, not {expected:,}; download it again")


def _decoded(value: Any, row: str) -> Any:
    """Return a value of Arrow in which binary text is decoded. Raises CorpusError."""
    if isinstance(value, bytes):
        return decode_cell(value, row)
    if isinstance(value, dict):
        return {name: _decoded(item, row) for name, item in value.items()}
    return [_decoded(item, row) for item in value] if isinstance(value, list) else value


def _decode_dictionary(column: Any, block_bytes: int) -> Iterator[Any]:
    """Decode a dictionary-encoded Arrow array of texts, as arrays of about block_bytes each."""
    from pyarrow import compute

    sizes = compute.binary_length(column.dictionary).take(column.indices).fill_null(0)
    total = np.cumsum(sizes.to_numpy(), dtype=np.int64)
    cuts = np.flatnonzero(np.diff(total // block_bytes)) + 1
    for begin, end in itertools.pairwise([0, *cuts.tolist(), len(column)]):
        yield column.slice(begin, end - begin).dictionary_decode()
