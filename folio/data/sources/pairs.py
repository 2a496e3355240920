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
from folio.data.blocks import END, CorpusError, Document, Segments
from folio.data.corpus import Corpus
from folio.data.inputs import Inputs, find_sources
from folio.data.records import Columns
from folio.data.shards import Dataset, PromptFormat, Shard
from folio.data.tokenizer import Tokenizer

HELD_OUT = "held_out.jsonl"  # optional file of a data set: the pairs for validation with additional fields
HEADERS = [  # column names of the prompt and the completion, which may be in any order
    ("prompt", "completion"),
    ("question", "answer"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("input", "output"),
    ("source", "target"),
]
TRANSLATION = re.compile(r"(?P<source>[\w-]+): .* \| (?P<target>[\w-]+):", re.DOTALL)  # a prompt of `translation`
TLDR = "\n\nTL;DR:"  # the end of a prompt for a summary (GPT-2's paper, Radford et al. 2019, section 3.6)

Texts = tuple[str, str]  # a text and its translation or summary


def pair_segments(value: dict[str, Any]) -> Segments:
    """Return the segments of one pair, {"prompt", "completion"}. The targets are the completion and the end of text.

    Raises CorpusError.
    """
    for name in ("prompt", "completion"):
        if not isinstance(value.get(name), str):
            raise CorpusError(f'{name} is missing, or not text: write {{"prompt": "...", "completion": "..."}}')
    return [(value["prompt"], False), (value["completion"], True), (END, True)]


def chat_segments(messages: Any) -> Segments:
    """Return the segments of a chat. The targets are the assistant's messages and the end of text after each.

    The text between two answers is one segment, so that it is tokenized as in a prompt. Raises CorpusError.
    """
    chat: Segments = []
    context = ""
    for message in messages if isinstance(messages, list) else [None]:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise CorpusError('messages must be a list of {"role": "...", "content": "..."}')
        role = "system" if message["role"] == "developer" else message["role"]  # OpenAI's newer name
        context += f"{role.capitalize()}:"
        if role == "assistant":
            chat += [(context, False), (f" {message['content']}", True), (END, True)]
            context = ""
        else:
            context += f" {message['content']}\n\n"
    if not chat:
        raise CorpusError('no message has the role "assistant", so there are no targets')
    return [*chat, (context, False)] if context else chat


CHAT_TEMPLATES: dict[PromptFormat, str] = {  # Jinja templates of the same prompts, for other programs
    "chat": (
        "{% for message in messages %}"
        "{% if message.role == 'assistant' %}{{ 'Assistant: ' + message.content + eos_token }}"
        "{% elif message.role == 'developer' %}{{ 'System: ' + message.content + '\\n\\n' }}"
        "{% else %}{{ message.role | capitalize + ': ' + message.content + '\\n\\n' }}"
        "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    ),
    "pairs": (
        "{% if messages | length > 1 %}"
        "{{ raise_exception('this model was trained on single prompts, not on conversations') }}"
        "{% endif %}{{ messages[0].content }}"
    ),
}


def is_chat(record: dict[str, Any]) -> bool:
    return "messages" in record


def pair_document(record: dict[str, Any], add_space: bool = False) -> Document:
    if "messages" in record:
        return Document(chat_segments(record["messages"]), frozenset(("messages.role", "messages.content")))
    header = next((header for header in HEADERS if {*header} <= {*record}), HEADERS[0])
    pair = {"prompt": record.get(header[0]), "completion": record.get(header[1])}
    segments = pair_segments(pair)
    prompt, completion = pair.values()
    if add_space and prompt and completion and not (prompt[-1].isspace() or completion[0].isspace()):
        segments[1] = (f" {completion}", True)
    return Document(segments, frozenset(header))


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
    names = [name.strip().lower() for name in rows[0]]
    if any(set(header) <= set(names) for header in HEADERS):
        return Columns(names)
    if len(names) == 2:
        return Columns(["prompt", "completion"], has_header=False)
    raise CorpusError(
        f"it has {counted(len(names), 'column')}; use two, the prompt and the completion, or a header with the names "
        f"prompt and completion"
    )


def describe_pair(document: Segments) -> str:
    """Return the first prompt and completion of a document, for a printed line."""
    texts = {counts: "".join(text or "" for text, c in document if c == counts) for counts in (False, True)}
    shown = [json.dumps(text if len(text) <= 80 else f"{text[:77]}...", ensure_ascii=False) for text in texts.values()]
    return " -> ".join(shown)


class Pair(NamedTuple):
    """A prompt, its completion, and additional fields."""

    prompt: str
    completion: str
    fields: dict[str, Any]


def make_pair(value: dict[str, Any]) -> Pair:
    """Convert a JSON object to a pair with its other fields. The languages of a translation are also fields.

    Raises CorpusError.
    """
    (prompt, _), (completion, _), _ = pair_segments(value)
    languages = match.groupdict() if (match := TRANSLATION.fullmatch(prompt)) else {}
    return Pair(prompt, completion, {**languages, **value})


def read_pairs(path: str) -> list[Pair]:
    """Read the pairs in a file of JSON lines. Raises UserError if there are none."""
    corpus = Corpus(find_sources([path], "jsonl"), lambda record: Document(make_pair(record), frozenset()))
    if not (pairs := list(corpus.documents())):
        raise UserError(f'{path} has no pairs; write {{"prompt": "...", "completion": "..."}} on each line')
    return pairs


def validation_pairs(dataset: Dataset) -> list[Pair]:
    """Return the pairs in a data set's validation shards, with the fields in its held_out.jsonl.

    Raises UserError if the shards have no masks.
    """
    tokenizer = dataset.load_tokenizer()
    if tokenizer.eot is None and all(shard.mask is not None for shard in dataset.val):
        raise UserError(
            f"{dataset.folder} has no end-of-text token, so its pairs run into each other; prepare it again with "
            f"prepare/pairs.py, which adds one"
        )
    if tokenizer.eot is None or not all(shard.mask is not None for shard in dataset.val):
        raise UserError(
            f"{dataset.folder} has no prompts and completions; prepare them with prepare/pairs.py, or give --pairs=FILE"
        )
    values = [{"prompt": prompt, "completion": text} for prompt, text in split_pairs(dataset.val, tokenizer)]
    if not values:
        raise UserError(f"{dataset.folder} has no complete pair for validation; give --pairs=FILE")
    fields: dict[tuple[str, str], dict[str, Any]] = {}
    if (dataset.folder / HELD_OUT).exists():
        held_out = read_pairs(str(dataset.folder / HELD_OUT))
        fields = {(pair.prompt, pair.completion): pair.fields for pair in held_out}
    return [make_pair({**fields.get((value["prompt"], value["completion"]), {}), **value}) for value in values]


def split_pairs(shards: Sequence[Shard], tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """Yield the prompts and completions in shards, separated by the masks and the end-of-text tokens.

    Each answer of a chat is a separate pair. An incomplete pair at the end of the shards is skipped.
    """
    ids = np.concatenate([np.asarray(shard.ids, dtype=np.int64) for shard in shards])  # (n,); a shard may end in a pair
    counts = np.concatenate([np.asarray(shard.mask) != 0 for shard in shards])  # (n,)
    begin = 0
    for end in np.flatnonzero(counts & (ids == tokenizer.eot)):
        is_answer = counts[begin:end]
        split = begin + (int(is_answer.argmax()) if is_answer.any() else len(is_answer))
        yield tokenizer.decode(ids[begin:split]), tokenizer.decode(ids[split:end])
        begin = end + 1


def write_pairs(path: Path, pairs: Iterable[dict[str, Any]]) -> None:
    """Write pairs as JSON lines."""
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{json.dumps(pair, ensure_ascii=False)}\n" for pair in pairs)
