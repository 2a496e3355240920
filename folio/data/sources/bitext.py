"""Parallel texts in two languages, from tables, line-aligned files, JSON, or parquet files."""

import difflib
from collections.abc import Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from folio import UserError
from folio.base.number_format import counted
from folio.data.blocks import CorpusError
from folio.data.corpus import COMPRESSIONS, Source, read_lines
from folio.data.sources.pairs import Texts, translation
from folio.data.sources.prepare_pairs import Column, read_pair

TATOEBA_COLUMNS = ("english", "non_english")


def language_problem(code: str) -> str | None:
    """Return an error message with a suggestion if CLDR does not have this language code, or else None."""
    from babel import Locale

    names = Locale("en").languages  # "de" -> "German"
    if code.replace("-", "_").split("_")[0] in names:
        return None
    codes = {name.lower(): known for known, name in names.items()}
    close = difflib.get_close_matches(code.lower(), codes, n=1, cutoff=0.8)
    suggestions = [code.lower()] if code.lower() in names else [codes[name] for name in close]
    advice = f"did you mean {suggestions[0]}?" if suggestions else "use a code such as en or de"
    return f"{code!r} is not a language code; {advice}"


def detect_language(path: Path) -> str | None:
    """Return the language code at the end of a file's name, as in corpus.en or corpus.de.gz, or None."""
    suffixes = [suffix for suffix in path.suffixes if suffix.lower() not in COMPRESSIONS]
    code = suffixes[-1][1:] if suffixes else ""
    return code if code and language_problem(code) is None else None


def translation_pair(languages: Texts | None, value: dict[str, Any]) -> dict[str, Any] | None:
    """Return a pair from a JSON object {"prompt", "completion"} or {"en": ..., "de": ...}. None if a text is empty.

    The texts by language may be in a field "translation", as in the data sets of OPUS. languages: source and target.
    Raises CorpusError.
    """
    if isinstance(value.get("translation"), dict):
        value = {name: field for name, field in value.items() if name != "translation"} | value["translation"]
    if languages is None and "prompt" not in value and "completion" not in value:
        raise CorpusError("it has no prompt and completion; for texts by language, set --languages, such as en,de")
    source, target = languages or ("", "")
    make = partial(translation, source=source, target=target)
    return read_pair(value, (source, target), make, "set --languages to two of its fields, which must be text")


# --- files ------------------------------------------------------------------------------------------------------------


def read_table(source: Source) -> Iterator[Texts]:
    """Yield the first two columns of a tab-separated table, without blank lines. Raises CorpusError."""
    for number, line in enumerate(read_lines(source), start=1):
        if not line.strip():
            continue
        first, *rest = line.split("\t")
        if not rest:
            raise CorpusError(
                f"{source.name}:{number}: this line has one column; write the two texts with a tab between them"
            )
        yield first, rest[0]


def read_aligned(first: Source, second: Source) -> Iterator[Texts]:
    """Yield pairs of lines from two line-aligned files. Raises CorpusError if the numbers of lines differ."""
    counts = [0, 0]
    for texts in zip_longest(read_lines(first), read_lines(second)):
        counts = [count + (text is not None) for count, text in zip(counts, texts, strict=True)]
        if counts[0] == counts[1]:
            yield texts
    if counts[0] != counts[1]:
        raise CorpusError(
            f"{first.name} has {counted(counts[0], 'line')} and {second.name} {counts[1]:,}, so they are not aligned; "
            f"line N of both files must be translations of each other"
        )


def language_columns(languages: Texts, path: Path, schema: Any) -> list[Column]:
    """Return the column of each language in a parquet file, with the field if the column is a struct.

    The texts are in a column "translation", by language, or in "english" and "non_english". Raises CorpusError.
    """
    if "translation" in schema.names and (kind := schema.field("translation").type).num_fields:
        available = [kind.field(i).name for i in range(kind.num_fields)]
        columns: list[Column] = [("translation", name) for name in languages]
    elif set(TATOEBA_COLUMNS) <= set(schema.names) and "en" in languages:
        available = list(languages)
        columns = [(TATOEBA_COLUMNS[name != "en"], None) for name in languages]
    else:
        raise CorpusError(
            f'{path} has the columns {", ".join(schema.names)}; texts must be in "translation", by language, or in '
            f'"english" and "non_english" with en in --languages'
        )
    if missing := [name for name in languages if name not in available]:
        raise CorpusError(f"{path} has no texts in {missing[0]!r}, only in {', '.join(available)}; set --languages")
    return columns


# --- the hub ----------------------------------------------------------------------------------------------------------


def hub_subset(source: str, languages: tuple[str, str]) -> tuple[str, str]:
    """Return the hub repository and the subset of "opus-100" or "tatoeba" with these languages. Raises UserError."""
    if "en" not in languages:
        raise UserError(f"languages={','.join(languages)}: one language of {source} is always English; include en")
    if source == "opus-100":  # Zhang et al. 2020
        return "Helsinki-NLP/opus-100", "-".join(sorted(languages))
    (other,) = (language for language in languages if language != "en")
    return "sentence-transformers/parallel-sentences-tatoeba", f"en-{other}"
