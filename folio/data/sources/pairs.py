"""Prompts with completions, and chats: conversion to documents, and reading from files and shards."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from folio import UserError
from folio.base.number_format import counted
from folio.base.progress import note
from folio.data.blocks import END, PATH, CorpusError, Document, Segments
from folio.data.corpus import Corpus
from folio.data.inputs import RECORD_SUFFIXES, TEXT_FORMATS, Format, Inputs, find_sources
from folio.data.records import Columns
from folio.data.shards import LAST_TARGET, Dataset, Shard
from folio.data.sources.pair_records import (
    CHATS,
    COMPLETIONS,
    PROMPTS,
    find_pair,
    is_chat,
    known_fields,
    pair_document,
    pair_segments,
)
from folio.data.tokenizer import EOT_TEXT, Tokenizer

HELD_OUT = "held_out.jsonl"  # optional file of a data set: the pairs for validation with additional fields
PAIR_FORMATS = "JSON (.jsonl, .json), tables (.tsv, .csv), or .parquet, also as .gz, .zst or .xz"
TRANSLATION = re.compile(r"(?P<source>[\w-]+): .* \| (?P<target>[\w-]+):", re.DOTALL)  # a prompt of `translation`
ATTRIBUTION = re.compile(r"CC[- ]BY|attribution|tatoeba", re.IGNORECASE)  # in the files of manythings.org for Anki
TLDR = "\n\nTL;DR:"  # the end of a prompt for a summary (GPT-2's paper, Radford et al. 2019, section 3.6)

Texts = tuple[str, str]  # a text and its translation or summary


def translation(text: str, translated: str, source: str, target: str) -> dict[str, str]:
    """Return a text and its translation as a prompt and its completion."""
    return {"prompt": f"{source}: {text} | {target}:", "completion": f" {translated}"}


def summary(document: str, summarized: str) -> dict[str, str]:
    """Return a document and its summary as a prompt and its completion."""
    return {"prompt": f"{document}{TLDR}", "completion": f" {summarized}"}


def strip_tldr(prompt: str) -> str:
    """Return the document in a prompt of `summary`, or any other prompt unchanged."""
    return prompt.removesuffix(TLDR)


# --- files of pairs ---------------------------------------------------------------------------------------------------


def find_pair_files(names: Sequence[str], format: Format | None, keep_line_ends: bool) -> Inputs:
    """Find files of records, as find_sources does. Raises UserError for other text."""
    inputs = find_sources(names, format, RECORD_SUFFIXES, keep_line_ends=keep_line_ends, tables=True)
    if others := [source.name for source in inputs.sources if source.format in TEXT_FORMATS]:
        raise UserError(f"{others[0]} is text without records; use {PAIR_FORMATS}; for a table: --format=csv")
    return inputs


def pair_corpus(inputs: Inputs) -> Corpus:
    """Return the pairs and chats in files of records, as documents with masks. Raises CorpusError."""
    corpus = Corpus(inputs, pair_document, partial(pair_document, add_space=True), name_pair_columns, masked=True)
    chats = Corpus(inputs, lambda record: Document(is_chat(record), frozenset()), name_columns=name_pair_columns)
    corpus.prompt_format = "chat" if any(chats.documents()) else "pairs"
    return corpus


def name_pair_columns(rows: list[list[str]]) -> Columns:
    """Name the columns of a table by its first rows: a header, or without one, prompt and completion.

    Raises CorpusError.
    """
    names = rows[0]
    if find_pair(tuple(names)) or any(name in CHATS for name in known_fields(tuple(names))):
        return Columns(names)
    if any(name in (*PROMPTS, *COMPLETIONS) for name in known_fields(tuple(names))):
        raise CorpusError(half_known(names, "prompt and completion"))
    if columns := columns_without_header(rows, ("prompt", "completion")):
        return columns
    raise CorpusError(
        f"it has {counted(len(names), 'column')}; use two, the prompt and the completion, or a header with the names "
        f"prompt and completion"
    )


def columns_without_header(rows: list[list[str]], names: Texts) -> Columns | None:
    """Name the columns of a table without a header by its first rows, or return None.

    It has two texts; or three columns, as in manythings.org's files for Anki, where the last is the attribution; or
    four, as in the sentence pairs of Tatoeba, where the first and the third are numbers. names: of the texts.
    """
    width = len(rows[0])
    if width == 2:
        return Columns([*names], has_header=False)
    if width == 3 and all(ATTRIBUTION.search(row[-1]) for row in rows):
        return Columns([*names, "attribution"], has_header=False)
    if width == 4 and all(cell.strip().isdigit() for row in rows for cell in row[::2]):
        return Columns(["id", names[0], "translation id", names[1]], has_header=False)
    return None


def half_known(row: list[str], names: str) -> str:
    """A message about a first row that may be a header or not."""
    return f"its first row, {', '.join(row)}, may be a header or a pair; begin with a header of the names {names}"


def describe_pair(document: Segments) -> str:
    """Return the prompt and the first answer of a document, for a printed line."""
    texts = next(split_answers(document), ("", ""))
    shown = [json.dumps(text if len(text) <= 80 else f"{text[:77]}...", ensure_ascii=False) for text in texts]
    return " -> ".join(shown)


class Pair(NamedTuple):
    """A prompt, its completion, and additional fields."""

    prompt: str
    completion: str
    fields: dict[str, Any]


def make_pair(value: dict[str, Any]) -> Pair:
    """Convert {"prompt", "completion"} to a pair with its other fields. The languages of a translation are also fields.

    Raises CorpusError.
    """
    pair_segments(value)
    languages = match.groupdict() if (match := TRANSLATION.fullmatch(value["prompt"])) else {}
    return Pair(value["prompt"], value["completion"], {**languages, **value})


def record_pairs(record: dict[str, Any], add_space: bool = False) -> Document:
    """Return a list of the pairs of a record, one per answer of a chat, with the fields that are not used.

    The prompt of an answer is all text before it. The content is None if the completion is empty. add_space: as in
    pair_document. Raises CorpusError.
    """
    document = pair_document(record, add_space)
    if document.content is None:
        return document
    used = {path.partition(PATH)[0] for path in document.used}
    fields = {name: value for name, value in record.items() if name not in used}
    answers = split_answers(document.content)
    pairs = [make_pair({**fields, "prompt": prompt, "completion": completion}) for prompt, completion in answers]
    return document._replace(content=pairs)


def split_answers(document: Segments) -> Iterator[tuple[str, str]]:
    """Yield each answer of a pair or a chat with all text before it, where the special token is <|endoftext|>."""
    prompt = answer = ""
    for text, is_target in document:
        if not is_target:
            prompt += EOT_TEXT if text is END else text
        elif text is END:
            yield prompt, answer
            prompt, answer = f"{prompt}{answer}{EOT_TEXT}", ""
        else:
            answer += text


def read_pairs(path: str, format: Format | None = None) -> list[Pair]:
    """Read the pairs in a file in any of the formats of prepare/pairs.py. Raises UserError if there are none."""
    inputs = find_pair_files([path], format, keep_line_ends=True)  # evaluate_pairs converts them
    corpus = Corpus(inputs, record_pairs, partial(record_pairs, add_space=True), name_pair_columns)
    contents = list(corpus.documents())
    pairs = [pair for content in contents if content is not None for pair in content]
    if left_out := contents.count(None):
        note(f"{path}: left out {counted(left_out, 'pair')} with an empty completion")
    if not pairs:
        raise UserError(f'{path} has no pairs; write {{"prompt": "...", "completion": "..."}} on each line')
    return pairs


def validation_pairs(dataset: Dataset) -> list[Pair]:
    """Return the pairs in a data set's validation shards, with the fields in its held_out.jsonl.

    Raises UserError if the shards have no masks.
    """
    tokenizer = dataset.load_tokenizer()
    if tokenizer.eot is None or not all(shard.mask is not None for shard in dataset.val):
        raise UserError(
            f"{dataset.folder} has no prompts and completions; prepare them with prepare/pairs.py, or give --pairs=FILE"
        )
    values = [{"prompt": prompt, "completion": text} for prompt, text in split_pairs(dataset.val, tokenizer)]
    if not values:
        raise UserError(f"{dataset.folder} has no complete pair for validation; give --pairs=FILE")
    fields: dict[tuple[str, str], dict[str, Any]] = {}
    if (dataset.folder / HELD_OUT).exists():
        inputs = find_sources([str(dataset.folder / HELD_OUT)], "jsonl", keep_line_ends=True)
        held_out = Corpus(inputs, lambda record: Document(make_pair(record), frozenset())).documents()
        fields = {(pair.prompt, pair.completion.removesuffix(EOT_TEXT)): pair.fields for pair in held_out}
    return [make_pair({**fields.get((value["prompt"], value["completion"]), {}), **value}) for value in values]


def split_pairs(shards: Sequence[Shard], tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """Yield the prompts and completions in shards, separated by the masks and the end-of-text tokens.

    Each answer of a chat is a separate pair, whose prompt is all text before it. The special token in a prompt is
    <|endoftext|>. An incomplete pair at the end of the shards is skipped.
    """
    ids = np.concatenate([np.asarray(shard.ids, dtype=np.int64) for shard in shards])  # (n,); a shard may end in a pair
    mask = np.concatenate([np.asarray(shard.mask) for shard in shards])  # (n,)
    has_ends = (mask == LAST_TARGET).any()
    document = begin = 0  # the first token of the document, and of the text after the previous answer
    for end in np.flatnonzero((mask != 0) & (ids == tokenizer.eot)):
        is_answer = mask[begin:end] != 0
        split = begin + (int(is_answer.argmax()) if is_answer.any() else len(is_answer))
        yield tokenizer.decode_prompt(ids[document:split]), tokenizer.decode(ids[split:end])
        begin = end + 1
        if not has_ends or mask[end] == LAST_TARGET:
            document = begin


def write_pairs(path: Path, pairs: Iterable[dict[str, Any]]) -> None:
    """Write pairs as JSON lines."""
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{json.dumps(pair, ensure_ascii=False)}\n" for pair in pairs)
