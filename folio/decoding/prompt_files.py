"""Prompt files: text, MIDI, and JSON lines."""

import re
from pathlib import Path
from typing import Any

from folio import UserError
from folio.base.files import refuse_lfs_pointer
from folio.base.progress import note
from folio.base.settings import line_breaks
from folio.data.blocks import CorpusError, Document
from folio.data.corpus import Corpus
from folio.data.inputs import Source, find_sources, saved_stdin
from folio.data.sources import music
from folio.data.tokenizer import MidiTokenizer, Tokenizer


def read_prompt(setting: str, value: str, tokenizer: Tokenizer) -> str:
    """Read the prompt that a setting gives: text, the content of "FILE:path", or standard input for "-".

    A line break at the end of a file or of standard input is dropped, and a line says so: editors and `echo` add it,
    and a model that reads it begins another line. A MIDI file is converted to the tokenizer's events. setting: its
    name, for messages. Raises UserError.
    """
    if value != "-" and not value.startswith("FILE:"):
        return line_breaks(value)
    path = Path(value.removeprefix("FILE:"))
    if value != "-" and path.exists() and not path.is_file():
        raise UserError(f"{setting}={value}: {path} is not a file; name a file, or pipe the text to --{setting}=-")
    if value != "-" and path.suffix.lower() in music.SUFFIXES and path.exists():
        if not isinstance(tokenizer, MidiTokenizer):
            raise UserError(f"{setting}={value}: it is a MIDI file, but this model generates text; use a text file")
        refuse_lfs_pointer(path)
        try:
            return music.events_of_file(path, music.EventFormat.of(tokenizer))
        except music.PieceError as error:
            raise UserError(f"{setting}={value}: this MIDI file cannot be used: {error}") from None
    with saved_stdin(["-" if value == "-" else str(path)]) as (name,):
        try:
            text = Source(Path(name), "text", str(path), keep_line_ends=tokenizer.keep_line_ends).text()
        except CorpusError as error:
            raise UserError(f"{setting}: {error}") from None
    prompt = re.sub(r"(\r\n|\r|\n)\Z", "", text)
    if prompt != text:
        note(f"{setting}={value}: the line break at its end is not part of the prompt; to keep one, end it with two")
    return prompt


def read_prompt_lines(path: Path) -> list[str]:
    """Read the prompts of a file of JSON lines {"prompt": "TEXT"}, with all their line breaks. Raises UserError."""
    if str(path) == "-" or (path.exists() and not path.is_file()):
        raise UserError(f"prompts={path}: it is not a file; name a .jsonl file")
    inputs = find_sources([str(path)], "jsonl", keep_line_ends=True)  # encode_prompt converts them
    prompts = list(Corpus(inputs, parse_prompt).documents())
    if not prompts:
        raise UserError(f'prompts={path}: the file is empty; write {{"prompt": "TEXT"}} on each line')
    return prompts


def parse_prompt(line: dict[str, Any]) -> Document:
    """The prompt of one line. Raises CorpusError, to which the caller adds the line number."""
    if not isinstance(line.get("prompt"), str):
        raise CorpusError('it has no text "prompt"; write {"prompt": "TEXT"} on each line')
    return Document(line["prompt"], frozenset(("prompt",)))
