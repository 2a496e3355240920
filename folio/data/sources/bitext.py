"""Parallel texts in two languages, from tables, line-aligned files, JSON, or parquet files."""

import difflib
import re
from collections.abc import Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from folio import UserError
from folio.base.number_format import counted
from folio.data.account import Account
from folio.data.blocks import PATH, CorpusError, Document
from folio.data.inputs import COMPRESSIONS, TEXT_SUFFIXES, Source, read_text_lines
from folio.data.records import Columns
from folio.data.sources.pairs import Texts, columns_without_header, half_known, translation
from folio.data.sources.prepare_pairs import read_pair


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
    """Return the language code at the end of a file's name, as in corpus.en, corpus.de.gz, or de.txt, or None."""
    parts = [part for part in path.name.split(".") if f".{part.lower()}" not in (*COMPRESSIONS, *TEXT_SUFFIXES)]
    return parts[-1] if parts and parts[-1] and language_problem(parts[-1]) is None else None


def translation_pair(languages: Texts | None, record: dict[str, Any]) -> Document:
    """Return a pair from a record {"prompt", "completion"} or {"en": ..., "de": ...}. None if a text is empty.

    The texts by language may be in a field "translation", as in the data sets of OPUS, or in "english" and
    "non_english", as in Tatoeba's on the hub. languages: source and target. Raises CorpusError.
    """
    if languages is None and "prompt" not in record and "completion" not in record:
        raise CorpusError("it has no prompt and completion; for texts by language, set --languages, such as en,de")
    source, target = languages or ("", "")
    make = partial(translation, source=source, target=target)
    names, texts = (source, target), record
    if isinstance(record.get("translation"), dict):
        texts = {name: field for name, field in record.items() if name != "translation"} | record["translation"]
    elif {*HUB_COLUMNS} <= record.keys():
        if "en" not in names:
            raise CorpusError("its columns are english and non_english; use it with en in --languages")
        names = tuple(HUB_COLUMNS[name != "en"] for name in names)
        make = partial(translation, source=source, target=target)
    document = read_pair(texts, names, make, "set --languages to two of its fields, which must be text")
    if texts is not record and record.get("translation"):
        used = (f"translation{PATH}{name}" if name in record["translation"] else name for name in document.used)
        document = document._replace(used=frozenset(used))
    return document


# --- tables -----------------------------------------------------------------------------------------------------------

HUB_COLUMNS = ("english", "non_english")
HEADERS = ({"source", "src"}, {"target", "tgt", "trg"})  # other names of the two columns


def translation_columns(languages: Texts | None, rows: list[list[str]]) -> Columns:
    """Name the columns of a table by its first rows. Raises CorpusError.

    The table has a header with the two languages (codes or English names), or "prompt" and "completion"; or two
    texts, as in `columns_without_header`.
    """
    names = [cell.strip().lower() for cell in rows[0]]
    if {"prompt", "completion"} <= {*names}:
        return Columns(names)
    if languages is None:
        raise CorpusError("set the languages of its columns, as in --languages=en,de")
    known = [_language_of(name, languages) or name for name in names]
    if all(known.count(code) == 1 for code in languages):
        return Columns(known)
    if any(code in known for code in languages):
        raise CorpusError(half_known(rows[0], " and ".join(languages)))
    if columns := columns_without_header(rows, languages):
        return columns
    raise CorpusError(
        f"it has {counted(len(names), 'column')}: {', '.join(rows[0])}; write two columns, or a header with the names "
        f"{' and '.join(languages)}"
    )


def _language_of(name: str, languages: Texts) -> str | None:
    """Return the one of two languages that a column's name means, or None.

    The name is a code (de, deu, de-DE), the language's English or own name, or ends with a code (text_de).
    """
    from babel import Locale
    from babel.core import get_global

    parts = re.split(r"[-_. ]", name)
    for code, others in zip(languages, HEADERS, strict=True):
        language = code.replace("-", "_").split("_")[0].lower()
        locale = Locale(language)
        if name in {code.lower(), locale.english_name.lower(), locale.display_name.lower(), *others}:
            return code
        if language in (get_global("language_aliases").get(name), parts[0], parts[-1]):
            return code
    return None


def read_aligned(first: Source, second: Source, account: Account) -> Iterator[Texts]:
    """Yield pairs of lines from two line-aligned files. Raises CorpusError if the numbers of lines differ."""
    counts = [0, 0]
    for texts in zip_longest(read_text_lines(first, account), read_text_lines(second, account)):
        counts = [count + (text is not None) for count, text in zip(counts, texts, strict=True)]
        if counts[0] == counts[1]:
            yield texts
    if counts[0] != counts[1]:
        raise CorpusError(
            f"{first.name} has {counted(counts[0], 'line')} and {second.name} {counts[1]:,}, so they are not aligned; "
            f"line N of both files must be translations of each other"
        )


# --- the hub ----------------------------------------------------------------------------------------------------------


def hub_subset(source: str, languages: tuple[str, str]) -> tuple[str, str]:
    """Return the hub repository and the subset of "opus-100" or "tatoeba" with these languages. Raises UserError."""
    if "en" not in languages:
        raise UserError(f"languages={','.join(languages)}: one language of {source} is always English; include en")
    if source == "opus-100":  # Zhang et al. 2020
        return "Helsinki-NLP/opus-100", "-".join(sorted(languages))
    (other,) = (language for language in languages if language != "en")
    return "sentence-transformers/parallel-sentences-tatoeba", f"en-{other}"
