"""Prepares a data set of prompts and completions. A file in its folder contains the pairs for validation."""

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from folio import UserError
from folio.base.files import atomic_write
from folio.base.number_format import counted
from folio.base.progress import progress_bar
from folio.base.settings import NonEmptyStr, NonNegativeInt, PositiveInt
from folio.data.blocks import CorpusError, document_hash
from folio.data.corpus import Corpus, CsvLines, Documents, Source, read_lines
from folio.data.prepare import PrepareConfig, VocabSize, prepare, refuse_inputs_inside
from folio.data.shards import data_root
from folio.data.sources.pairs import HELD_OUT, Texts, pair_segments, strip_tldr, write_pairs

Column = tuple[str, str | None]  # name of a parquet column, and the field if the column is a struct


@dataclass(frozen=True)
class TextPairsConfig(PrepareConfig):
    """Settings of all scripts for pairs."""

    # --- the texts ---
    inputs: tuple[str, ...] = ()
    source: NonEmptyStr | None = None
    limit: PositiveInt | None = None  # use only the first N pairs of --source; None: all
    seed: NonNegativeInt = 1337  # selects the pairs for validation
    # --- the tokenizer ---
    tokenizer: str = "bpe"  # char, byte, gpt2, bpe (trained on these texts), or the folder of a data set or a run
    vocab_size: VocabSize | None = None

    def problems(self) -> list[tuple[str, str]]:
        problems = super().problems()
        if self.inputs and self.source:
            problems.append(("source", "it replaces the input files; use only one of them"))
        if self.limit and not self.source:
            problems.append(("limit", "it is only for --source"))
        return problems

    @property
    def is_embedded(self) -> bool:
        """Whether the script generates the texts."""
        return not self.inputs and not self.source


# --- from objects and rows to pairs -----------------------------------------------------------------------------------


def read_pair(
    value: dict[str, Any], names: Texts, make: Callable[[str, str], dict[str, str]], advice: str
) -> dict[str, Any] | None:
    """Return a prompt and its completion from a JSON object, with its other fields. None if a text is empty.

    The object has the fields prompt and completion, or the two fields `names`, from which `make` creates them.
    advice: the format of the object, for messages. Raises CorpusError.
    """
    if "prompt" in value or "completion" in value:
        pair_segments(value)
        return value if value["prompt"].strip() and value["completion"].strip() else None
    if missing := [name for name in names if name not in value]:
        raise CorpusError(f"it has no {missing[0]}: {advice}")
    texts = ["" if value[name] is None else value[name] for name in names]
    if not all(isinstance(text, str) for text in texts):
        raise CorpusError(f"{' and '.join(names)} must be strings: {advice}")
    first, second = (text.strip() for text in texts)
    others = {name: field for name, field in value.items() if name not in names}
    return others | make(first, second) if first and second else None


def read_json_lines(
    sources: list[Source], make: Callable[[dict[str, Any]], dict[str, Any] | None]
) -> Iterator[dict[str, Any] | None]:
    """Apply `make` to each object in files of JSON lines. Raises CorpusError with the file and the line."""
    corpus = Corpus([replace(source, format="jsonl") for source in sources], document=make)
    return (pair for block in corpus.blocks() for pair in block.documents())


def read_parquet(files: Iterable[Path], choose_columns: Callable[[Path, Any], Sequence[Column]]) -> Iterator[Texts]:
    """Yield two texts per row of parquet files. A missing text is empty.

    choose_columns: returns the two columns for the path and the Arrow schema of a file. Raises CorpusError.
    """
    import pyarrow
    from pyarrow import parquet

    for path in files:
        try:
            with parquet.ParquetFile(pyarrow.OSFile(os.fsencode(path))) as file:  # a path must be UTF-8
                columns = choose_columns(path, file.schema_arrow)
                for batch in file.iter_batches(columns=list(dict.fromkeys(column for column, _ in columns))):
                    for row in batch.to_pylist():
                        yield _row_texts(path, row, columns)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())  # Arrow's messages may have several lines
            raise CorpusError(f"{path} is not a parquet file, or damaged: {reason}") from None


def _row_texts(path: Path, row: dict[str, Any], columns: Sequence[Column]) -> Texts:
    values = [row[column] and row[column].get(field) if field else row[column] for column, field in columns]
    first, second = ("" if value is None else value for value in values)
    if not isinstance(first, str) or not isinstance(second, str):
        raise CorpusError(f"{path}: the columns {' and '.join(field or name for name, field in columns)} must be text")
    return first, second


HEADERS = [  # column names of the prompt and the completion, which may be in any order
    ("prompt", "completion"),
    ("question", "answer"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("input", "output"),
    ("source", "target"),
]


def read_pair_tables(sources: Iterable[Source]) -> Iterator[dict[str, Any]]:
    """Yield the pairs in .tsv and .csv files with two columns or one of HEADERS. Raises CorpusError.

    A space is added before a completion unless white space is present.
    """
    for source in sources:
        columns = None
        for number, row in _table_rows(source):
            if columns is None:
                names = [name.strip().lower() for name in row]
                header = next((header for header in HEADERS if all(names.count(name) == 1 for name in header)), None)
                columns = [names.index(name) for name in header] if header else [0, 1]
                if header:
                    continue
                if len(row) != 2:
                    raise CorpusError(
                        f"{source.name}: it has {counted(len(row), 'column')}; use two columns, the prompt and the "
                        f"completion, or a header with the names prompt and completion"
                    )
            if len(row) <= max(columns):
                raise CorpusError(
                    f"{source.name}:{number}: this row has {counted(len(row), 'column')}, but needs {max(columns) + 1}"
                )
            prompt, completion = (row[column] for column in columns)
            has_space = not prompt or not completion or prompt[-1].isspace() or completion[0].isspace()
            yield {"prompt": prompt, "completion": completion if has_space else f" {completion}"}


def _table_rows(source: Source) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the values of each row of a .tsv or .csv file that is not blank. Raises CorpusError."""
    if source.suffix == ".tsv":
        yield from ((n, line.split("\t")) for n, line in enumerate(read_lines(source), start=1) if line.strip())
        return
    csv.field_size_limit(2**31 - 1)  # Python's default limit is 128 KB per field
    lines = CsvLines(source)
    reader = csv.reader(lines, strict=True)
    try:
        for row in reader:
            lines.row_bytes = 0
            if any(row):
                yield reader.line_num, row
    except csv.Error as error:
        raise CorpusError(f"{source.name}:{reader.line_num}: this is not CSV: {error}") from None


# --- the data set -----------------------------------------------------------------------------------------------------


def prepare_pairs(
    cfg: TextPairsConfig,
    pairs: Iterable[dict[str, Any] | None],
    name: str,
    sources: list[Source],
    validation: int | None = None,
    documents_only: bool = False,
    unused: str = "with an empty text",
) -> None:
    """Prepare the data set `name` from pairs, which must fit in memory. A pair of None is counted, but not used.

    sources: the files of the pairs. validation: the number of leading pairs for validation; None: about
    cfg.val_fraction of all, where pairs with the same field "item", or else the same prompt, are in the same split.
    documents_only: prepare only the documents of summaries, without masks, as NAME-documents. unused: what pairs of
    None are, for the message. Raises UserError.
    """
    folder_name = f"{name}-documents" if documents_only else name
    inputs = [*(source.path for source in sources), *([Path(cfg.source)] if cfg.source else [])]
    refuse_inputs_inside(data_root(cfg.data_dir) / folder_name, inputs)
    print(f"making the pairs of {name}", flush=True)
    results = list(progress_bar(iterable=pairs, unit=" pairs", leave=False))
    usable = [pair for pair in results if pair is not None]
    if left_out := len(results) - len(usable):
        print(f"left out: {counted(left_out, 'pair')} {unused}")
    if validation is None:
        groups = [f"{cfg.seed} {pair.get('item', pair['prompt'])}".encode("utf-8", "replace") for pair in usable]
        val = select_validation([document_hash(group) for group in groups], cfg.val_fraction)
    else:
        val = np.arange(validation)
    corpus = Documents(
        sources,
        usable,
        val,
        recipe={"seed": cfg.seed, "documents_only": documents_only},
        document=_document if documents_only else pair_segments,
        masked=not documents_only,
        prompt_format=None if documents_only else "pairs",
    )
    folder = prepare(cfg, corpus, folder_name)
    if not documents_only and not (folder / HELD_OUT).exists():
        try:
            with atomic_write(folder / HELD_OUT) as temporary:
                write_pairs(temporary, (usable[number] for number in val))
        except OSError as error:
            raise UserError(
                f"{folder / HELD_OUT} could not be written ({error.strerror}); free some space, and repeat the command"
            ) from None


def _document(value: dict[str, Any]) -> str:
    return strip_tldr(value["prompt"])


def select_validation(groups: list[int], fraction: float) -> np.ndarray:
    """Return the indices of about this fraction of the pairs, in the groups with the smallest hashes.

    groups: the hash of each pair's group. All pairs of a group are in one split. Raises UserError if there is only one
    group.
    """
    hashes = np.array(groups, dtype=np.uint64)
    unique, counts = np.unique(hashes, return_counts=True)
    if not len(unique):
        raise UserError("the input has no pair of texts; use files that contain pairs")
    if len(unique) == 1:
        problem = "there is only one pair" if len(hashes) == 1 else "all pairs have the same prompt, or are of one item"
        raise UserError(f"{problem}, and it cannot be in both splits; add another")
    shares = np.cumsum(counts)[:-1] / len(hashes)
    return np.flatnonzero(hashes <= unique[np.abs(shares - fraction).argmin()])
