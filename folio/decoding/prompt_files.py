"""Prompts from files: text, MIDI, and JSON lines."""

import sys
from pathlib import Path
from typing import Any

from folio import UserError
from folio.base.settings import line_breaks
from folio.data.blocks import CorpusError
from folio.data.corpus import Corpus, find_sources
from folio.data.sources import music
from folio.data.tokenizer import MidiTokenizer, Tokenizer


def read_prompt(setting: str, value: str, tokenizer: Tokenizer) -> str:
    """What a setting names: the text itself, the file of "FILE:path", or standard input for "-". Raises UserError.

    A MIDI file becomes the events of the tokenizer. setting: its name, for messages.
    """
    if value != "-" and not value.startswith("FILE:"):
        return line_breaks(value)
    path = Path(value.removeprefix("FILE:"))
    if value != "-" and path.exists() and not path.is_file():
        raise UserError(f"{setting}={value}: {path} is not a file; give a file, or pipe the text to --{setting}=-")
    if value != "-" and path.suffix.lower() in music.SUFFIXES and path.exists():
        if not isinstance(tokenizer, MidiTokenizer):
            raise UserError(f"{setting}={value}: it is a MIDI file, and this model writes text; give it text")
        try:
            return music.events_of_file(path, music.EventFormat.of(tokenizer))
        except music.PieceError as error:
            raise UserError(f"{setting}={value}: this MIDI file cannot be used: {error}") from None
    try:
        content = sys.stdin.buffer.read() if value == "-" else path.read_bytes()
        return content.decode("utf-8-sig").replace("\r\n", "\n")  # as Windows' editors save text
    except FileNotFoundError:
        raise UserError(f"{setting}={value}: the file {path} does not exist") from None
    except OSError as error:
        raise UserError(f"{setting}={value}: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{setting}={value}: it is not UTF-8 at byte {error.start:,}; save it as UTF-8") from None


def read_prompt_lines(path: Path) -> list[str]:
    """The prompts of a file of JSON lines, {"prompt": "TEXT"} each. Raises UserError."""
    if str(path) == "-" or (path.exists() and not path.is_file()):
        raise UserError(f"prompts={path}: it is not a file; name a .jsonl file")
    corpus = Corpus(find_sources([str(path)], "jsonl"), document=prompt_of)
    prompts = [prompt for block in corpus.blocks() for prompt in block.documents()]
    if not prompts:
        raise UserError(f'prompts={path}: the file is empty; write {{"prompt": "TEXT"}} on each line')
    return prompts


def prompt_of(line: dict[str, Any]) -> str:
    """The prompt of one line. Raises CorpusError, to which the caller adds the line number."""
    if not isinstance(line.get("prompt"), str):
        raise CorpusError('it has no text "prompt"; write {"prompt": "TEXT"} on each line')
    return line["prompt"]
