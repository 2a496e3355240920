"""Reads the records of JSON lines, JSON arrays, tables, and parquet files as blocks."""

import codecs
import csv
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from folio.base.files import refuse_lfs_pointer
from folio.base.number_format import counted
from folio.data.account import IN, UNUSED_FIELDS, Account
from folio.data.blocks import CorpusError, Field, MakeDocument, RecordBlock
from folio.data.inputs import Chunk, Inputs, Position, Source, decode_utf8, read_lines

FIRST_ROWS = 10  # of a table, by which a caller recognizes its columns


class Columns(NamedTuple):
    """The names of a table's columns, and whether they are its first row."""

    names: list[str]
    has_header: bool = True


NameColumns = Callable[[list[list[str]]], Columns]  # from the first rows of a table


def header(rows: list[list[str]]) -> Columns:
    """Use the first row as the names of the columns."""
    return Columns(rows[0])


def lower_header(rows: list[list[str]]) -> Columns:
    """Use the first row in lower case as the names of the columns."""
    return Columns([name.strip().lower() for name in rows[0]])


def record_blocks(source: Source, make: MakeDocument, name_columns: NameColumns) -> Iterator[RecordBlock]:
    """Yield the records of a file as blocks. Raises CorpusError."""
    if source.format == "parquet":
        return _parquet_rows(source, make)
    if source.format == "csv":
        return _table_rows(source, make, name_columns)
    if source.format == "json":
        return _json_array(source, make)
    return _json_lines(source, make)


class _Records:
    """Collects the records of a file until they fill a block."""

    def __init__(self, source: Source, make: MakeDocument, place: str):
        self.source, self.make, self.place = source, make, place
        self.account = Account()  # of what was read since the last block
        self.content: list[Any] = []
        self.numbers: list[int] = []
        self.size = 0

    def add(self, record: Any, number: int, size: int) -> bool:
        """Add a record of about `size` bytes. Returns whether the block is full."""
        self.content.append(record)
        self.numbers.append(number)
        self.size += size
        return self.size >= self.source.limits.block

    def block(self, bytes_read: int) -> RecordBlock:
        """Return the collected records, possibly none, and what was read for them."""
        content, numbers = self.content, self.numbers
        self.content, self.numbers, self.size = [], [], 0
        return self.block_of(content, numbers, bytes_read)

    def block_of(self, content: Sequence[Any], numbers: Sequence[int], bytes_read: int) -> RecordBlock:
        """Return a block of these records."""
        self.account["records"][IN] += len(content)
        keep, account = self.source.keep_line_ends, self.account.take()
        return RecordBlock(bytes_read, self.source.name, content, numbers, self.place, self.make, keep, account=account)


# --- JSON -------------------------------------------------------------------------------------------------------------


def _json_lines(source: Source, make: MakeDocument) -> Iterator[RecordBlock]:
    records = _Records(source, make, ":")
    for number, (line, bytes_read) in enumerate(read_lines(source, records.account), 1):
        counts, content = records.account["bytes"], line.rstrip(b"\r\n")
        counts["line ends of records"] += len(line) - len(content)
        counts["records" if (is_record := not content.isspace() and content) else "blank lines"] += len(content)
        if is_record and records.add(content, number, len(content)):
            yield records.block(bytes_read)
    yield records.block(source.bytes)


JSON_SPACE = " \t\r\n"
ARRAY_START = re.compile(rf"[{JSON_SPACE}]*\[[{JSON_SPACE}]*(?:(?P<end>\])|(?=[^{JSON_SPACE}]))")
NEXT_ELEMENT = re.compile(rf"[{JSON_SPACE}]*(?:,[{JSON_SPACE}]*(?=[^{JSON_SPACE}])|(?P<end>\]))")


def _json_array(source: Source, make: MakeDocument) -> Iterator[RecordBlock]:
    """Yield the objects of an array, of which only a part is in memory."""
    records = _Records(source, make, ", record ")
    for number, (text, bytes_read) in enumerate(_array_elements(source, records.account)):
        if records.add(text, number, len(text)):
            yield records.block(bytes_read)
    yield records.block(source.bytes)


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


FIRST_LINES = re.compile(  # of Excel's and of Anki's files
    r"(?i:sep)=[^\"]?|#(?:separator|html|columns|tags|notetype|deck|guid)(?: column(?=:\d))?:.+", re.DOTALL
)
ANKI_COLUMN = re.compile(r"#(\w+) column:(\d+)")  # a column that is not text


class _TableLines:
    """The decoded lines of a table."""

    def __init__(self, source: Source, account: Account):
        self.source, self.account = source, account
        self.bytes_read = 0
        self.special: dict[int, str] = {}  # index and name of Anki's columns that are not text
        self.row_bytes = 0  # size of the current row, which may have several lines; the caller resets it after each row

    def __iter__(self) -> Iterator[str]:
        for number, (line, bytes_read) in enumerate(read_lines(self.source, self.account), 1):
            self.bytes_read = bytes_read
            self.row_bytes += len(line)
            if self.row_bytes > self.source.limits.row:
                row = f"{self.source.name}, line {number}: this row (is a quote missing?)"
                raise CorpusError(
                    f"{row} has more than {self.source.limits.row:,} bytes; save such a text as a .txt file"
                )
            yield decode_utf8(line, self.source.name, Position(number))

    def end_row(self, category: str) -> int:
        """Count the bytes of the row that was read, and return them."""
        size, self.row_bytes = self.row_bytes, 0
        self.account["bytes"][category] += size
        return size


def _table_rows(source: Source, make: MakeDocument, name_columns: NameColumns) -> Iterator[RecordBlock]:
    records = _Records(source, make, ":")
    lines = _TableLines(source, records.account)
    table = _numbered_rows(source, lines)
    first = list(itertools.islice(table, FIRST_ROWS))
    try:
        texts = [[cell for index, cell in enumerate(row) if index not in lines.special] for _, row, _ in first]
        names, has_header = name_columns(texts) if first else Columns([])
        for index, name in sorted(lines.special.items()):
            names.insert(index, name)
    except CorpusError as error:
        raise CorpusError(f"{source.name}: {error}") from None
    if names.count("") > 1:  # delimiters at the ends of lines, as spreadsheets write
        names = [name or f"column {number}" for number, name in enumerate(names, 1)]
    for name in names:
        if names.count(name) > 1:
            raise CorpusError(f"{source.name}: several columns have the name {name!r}; rename the others")
    for index, (number, row, size) in enumerate(itertools.chain(first, table)):
        if has_header and index == 0:
            records.account["bytes"]["headers"] += size
            continue
        records.account["bytes"]["records"] += size
        if len(row) != len(names):
            cells = counted(len(row), "cell")
            advice = "quote a cell that contains a delimiter, a line end, or a quote"
            raise CorpusError(f"{source.name}:{number}: this row has {cells}, but {len(names)} are expected; {advice}")
        if records.add(dict(zip(names, row, strict=True)), number, size):
            yield records.block(lines.bytes_read)
    if isinstance(make, Field) and names and make.name not in names:
        raise CorpusError(f"{source.name}: there is no column {make.name!r}, only {', '.join(names)}; set --field=NAME")
    yield records.block(source.bytes)


def _numbered_rows(source: Source, lines: _TableLines) -> Iterator[tuple[int, list[str], int]]:
    """Yield the line number, the cells, and the bytes of each row that is not blank."""
    csv.field_size_limit(2**31 - 1)  # Python's default limit is 128 KB per field
    quoting = csv.QUOTE_MINIMAL if source.quoted else csv.QUOTE_NONE
    reader, is_start = csv.reader(lines, delimiter=source.delimiter, quoting=quoting, strict=True), True
    width = 0  # cells of the first row
    try:
        for row in reader:
            if is_start and FIRST_LINES.fullmatch(line := source.delimiter.join(row)):
                lines.end_row("headers")
                if special := ANKI_COLUMN.fullmatch(line):
                    lines.special[int(special[2]) - 1] = special[1]
            elif not row or (len(row) == 1 != width and not row[0].strip()):
                lines.end_row("blank lines")
            else:
                is_start, width = False, width or len(row)
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
        counts, rows = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)], file.metadata.num_rows
        if sum(counts) != rows or min(counts, default=0) < 0:
            raise pyarrow.ArrowInvalid(f"its row groups have {sum(counts):,} rows, and the file has {rows:,}")
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


def parquet_sources(files: Iterable[Path], field: str | None = None, limit: int | None = None) -> tuple[Inputs, int]:
    """Return the first files that contain `limit` rows in total, and the number of rows to read.

    field: the text column that they must have. Raises CorpusError.
    """
    sources, rows = [], 0
    for path in files:
        source = Source(path, "parquet", str(path))
        count = open_parquet(source, field).metadata.num_rows
        if limit is not None and rows + count >= limit:
            return Inputs([*sources, replace(source, limit=limit - rows)]), limit
        sources.append(source)
        rows += count
    return Inputs(sources), rows


def _text_chunks(source: Source, file: Any, field: str | None) -> list[Any]:
    """Return the metadata of the column, or of all columns, in each row group. Raises CorpusError if it is damaged.

    pyarrow 26 ends the process if the metadata of a column are damaged, except while it reads the column. So this first
    reads a row of each row group.
    """
    import pyarrow

    metadata, done = file.metadata, 0
    columns = [c for c in range(metadata.num_columns) if field in (None, metadata.schema.column(c).path)]
    chunks = []
    for group in range(metadata.num_row_groups):
        try:
            next(file.iter_batches(1, row_groups=[group], columns=[field] if field else None), None)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise _damaged(source, done, error) from None
        row_group = metadata.row_group(group)
        chunks += [row_group.column(c) for c in columns]
        done += row_group.num_rows
    return chunks


def _damaged(source: Source, rows: int, error: Exception) -> CorpusError:
    return CorpusError(f"{source.name} is damaged after row {rows:,}: {str(error).strip()}; download it again")


def parquet_text_bytes(source: Source, field: str | None) -> int:
    """Return the uncompressed size of the column, or of all columns, according to the file's footer."""
    chunks = _text_chunks(source, open_parquet(source, field), field)
    return sum(chunk.total_uncompressed_size for chunk in chunks)


def _has_dictionary_only(chunk: Any) -> bool:
    """Whether each row is an index into a dictionary, so that the footer does not give the size of the decoded text.

    When its dictionary becomes too large, a writer continues with plain texts, which take more bytes per row.
    """
    if not chunk.has_dictionary_page:
        return False
    dictionary_bytes = chunk.data_page_offset - chunk.dictionary_page_offset
    return chunk.total_compressed_size - dictionary_bytes <= 8 * chunk.num_values + 1024


def _parquet_rows(source: Source, make: MakeDocument) -> Iterator[RecordBlock]:
    """Yield one column, or all columns, of the rows."""
    import pyarrow

    field = make.name if isinstance(make, Field) else None
    file, done = open_parquet(source, field), 0
    total, names, columns = file.metadata.num_rows, file.schema_arrow.names, [field] if field else None
    rows = total if source.limit is None else min(total, source.limit)
    chunks = _text_chunks(source, file, field)
    if any(map(_has_dictionary_only, chunks)):
        file = open_parquet(source, field, read_dictionary=columns)
    records = _Records(source, make, ", row ")
    records.account[UNUSED_FIELDS].update({name: rows for name in names if field not in (None, name)})
    row_bytes = sum(chunk.total_uncompressed_size for chunk in chunks) // max(1, rows)
    try:
        for batch in file.iter_batches(max(1, min(1 << 14, source.limits.block // max(1, row_bytes))), columns=columns):
            for part in _divide(batch[: rows - done], source.limits.block):
                numbers, done = range(done, done + len(part)), done + len(part)
                yield records.block_of(part, numbers, source.bytes * done // max(done, rows))
            if done == rows:
                break
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _damaged(source, done, error) from None
    if done != rows:
        raise CorpusError(f"{source.name} is damaged: it has {done:,} rows, not {rows:,}; download it again")
    records.account["records"].update({IN: total - rows, "record after --limit": total - rows})
    yield records.block(source.bytes)


def _divide(batch: Any, block_bytes: int) -> Iterator[Any]:
    """Decode the dictionary-encoded columns of a batch, in parts in which their texts take about block_bytes."""
    from pyarrow import RecordBatch, compute, types

    encoded = [types.is_dictionary(column.type) for column in batch.columns]
    sizes = np.zeros(len(batch), np.int64)
    for column in itertools.compress(batch.columns, encoded):
        if _is_text(column.type.value_type):
            sizes += compute.binary_length(column.dictionary).take(column.indices).fill_null(0).to_numpy()
    cuts = np.flatnonzero(np.diff(np.cumsum(sizes) // block_bytes)) + 1
    for begin, end in itertools.pairwise([0, *cuts.tolist(), len(batch)]):
        columns = [
            column.dictionary_decode() if is_encoded else column
            for column, is_encoded in zip(batch.slice(begin, end - begin).columns, encoded, strict=True)
        ]
        yield RecordBatch.from_arrays(columns, names=batch.schema.names)
