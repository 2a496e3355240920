"""Files of generated text: MIDI for models of music, otherwise text, which may be a tune in ABC notation."""

from collections.abc import Iterator
from pathlib import Path

from folio import UserError
from folio.base.number_format import counted
from folio.base.packages import require
from folio.data.sources import music, tunes
from folio.data.tokenizer import MidiTokenizer, Tokenizer
from folio.decoding.language_model import GenerationConfig, LanguageModel
from folio.decoding.prompts import Prompt


def save_samples(model: LanguageModel, prompt: Prompt, config: GenerationConfig, path: Path) -> Iterator[str]:
    """Save each sample with its prompt; several as NAME-1, NAME-2, ... Yields a line about each file.

    Ctrl-C saves the text generated so far. Raises UserError.
    """
    paths = output_paths(path, config.num_samples, model.tokenizer)
    for batch in model.batches([(prompt.ids, sample) for sample in range(config.num_samples)], config):
        interrupt = None
        try:
            batch.run()
        except KeyboardInterrupt as error:
            interrupt = error
        for sample, text in zip(batch.numbers, batch.texts, strict=True):
            yield save_text(paths[sample], prompt.text + text, model.tokenizer)
        if interrupt:
            raise interrupt
    if not any(path.exists() for path in paths):
        raise UserError(f"save={path}: no piece has a note; set a larger --max_new_tokens")


def output_paths(path: Path, count: int, tokenizer: Tokenizer) -> list[Path]:
    """The files of `count` texts: path, or NAME-1, NAME-2, ... if there are several.

    Raises UserError if the suffix does not suit the tokenizer, or the files cannot be written.
    """
    is_midi_file, is_music_model = path.suffix.lower() in music.SUFFIXES, isinstance(tokenizer, MidiTokenizer)
    if is_midi_file and not is_music_model:
        raise UserError(f"save={path}: this model generates text, not MIDI files; use .txt, or .abc for tunes")
    if is_music_model and not is_midi_file:
        raise UserError(f"save={path}: this model generates music, which is saved as MIDI; use .mid")
    if is_music_model:
        require(f"save={path}", "miditok", "symusic")
    if not path.parent.is_dir():
        raise UserError(f"save={path}: the folder {path.parent} does not exist; create it, or use another one")
    paths = [path] if count == 1 else [path.with_stem(f"{path.stem}-{k}") for k in range(1, count + 1)]
    for output in paths:
        if output.exists():
            raise UserError(f"save={path}: {output} already exists; remove it, or use another name")
    return paths


def save_text(path: Path, text: str, tokenizer: Tokenizer) -> str:
    """Save one text. Returns a line about the file. Raises UserError."""
    try:
        if not isinstance(tokenizer, MidiTokenizer):
            path.write_text(text, encoding="utf-8")
            is_tune = path.suffix.lower() in tunes.SUFFIXES
            return f"{path}: {counted(len(text), 'character')}{tune_problem(text) if is_tune else ''}"
        format = music.EventFormat.of(tokenizer)
        notes = music.write_midi(path, text, format)
    except music.PieceError as error:
        return f"{path} was not written: {error}"
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    seconds = max(note.end for note in notes) * format.seconds_per_step
    return f"{path}: {counted(len(notes), 'note')}, {seconds:.1f} s"


def tune_problem(text: str) -> str:
    """The error in a tune in ABC notation; empty if there is none."""
    try:
        tunes.reduce_tune(text)
        return ""
    except tunes.TuneError as error:
        return f", which are not a tune in ABC notation: {error}"
