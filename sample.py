"""Generate text with a trained model and stream it to the terminal.

python sample.py --out_dir=out-shakespeare-char
python sample.py --out_dir=out-shakespeare-char --start="ROMEO:" --num_samples=3 --temperature=0.7
python sample.py --out_dir=out-shakespeare-char --start=FILE:prompt.txt --temperature=0
python sample.py --out_dir=out-shakespeare-char --interactive=True
python sample.py --out_dir=out-shakespeare-char --prompts=prompts.jsonl --num_samples=4 > texts.jsonl
python sample.py --out_dir=out-chorales --start=FILE:piece.mid --start_tokens=100 --save=new.mid
"""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge

from folio import UserError
from folio.base import settings
from folio.base.number_format import counted
from folio.base.progress import note
from folio.base.settings import line_breaks
from folio.checkpoints.run_folder import NoCheckpointError
from folio.data.blocks import CorpusError
from folio.data.corpus import Corpus, find_sources
from folio.data.sources import music, tunes
from folio.data.tokenizer import MidiTokenizer
from folio.decoding.language_model import Count, GenerationConfig, LanguageModel, Prompt, read_prompt
from folio.decoding.scheduler import Step


@dataclass(frozen=True)
class SampleConfig(GenerationConfig):
    # --- model ---
    out_dir: str = "out"  # folder of the run; latest: the one that was written to last
    init_from: str = "resume"  # "resume": the run in out_dir; or a checkpoint, "gpt2", a Hugging Face folder, ckpt.pt
    checkpoint: Literal["best", "last"] = "best"  # which of the run's
    # --- text ---
    start: str = ""  # the prompt; \n is a line break; "FILE:path" reads a file, also .mid; "-" standard input
    start_tokens: Count | None = None  # use only so many tokens of the prompt, from its beginning; None: all
    save: str | None = None  # file for the text instead of the terminal: .mid for music, or .abc, .txt; must not exist
    prompts: str | None = None  # a .jsonl file of {"prompt": "..."}; prints JSON lines, too
    interactive: bool = False  # True: ask for prompts; Ctrl-C ends a text, Ctrl-D the program
    stream: bool = True  # print tokens as they are generated; False: each text when it is complete
    logprobs: Annotated[int, Ge(0)] | None = None  # print each token with its log-probability and so many alternatives
    # --- machine ---
    device: str = "auto"  # "cpu", "cuda", "cuda:1", "mps"; auto: the first available of cuda, mps, cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"] = "auto"  # of the weights
    compile: bool = False  # nanoGPT's setting; decoding is not compiled

    def problems(self) -> list[tuple[str, str]]:
        """Rules across settings: (setting, what is wrong with it and how to fix it)."""
        problems = super().problems()
        if self.compile:
            problems.append(("compile", "decoding is not compiled; leave it out"))
        if self.prompts and (self.interactive or self.start):
            problems.append(("prompts", "it replaces start and interactive; give only one of them"))
        if self.save and (self.prompts or self.interactive or self.logprobs is not None):
            problems.append(("save", "it does not go with prompts, interactive, or logprobs; leave them out"))
        return problems


class Sampler(LanguageModel):
    """A model that measures how fast it generates."""

    tokens, seconds, first = 0, 0.0, 0.0  # in all texts so far; until the first token of the latest text

    def steps(self, *args: Any, **kwargs: Any) -> Iterator[Step]:
        began, before = time.perf_counter(), self.seconds
        self.first = 0.0
        for step in super().steps(*args, **kwargs):
            elapsed = time.perf_counter() - began
            self.first = self.first or elapsed
            self.seconds = before + elapsed  # at each step, because Ctrl-C may end the text
            self.tokens += sum(token is not None for token in step.tokens)
            yield step

    def speed(self) -> str:
        rate = self.tokens / self.seconds if self.seconds else 0
        after = f"the first after {1000 * self.first:.0f} ms"
        speed = (
            f"{counted(self.tokens, 'token')}, {rate:,.0f} tokens/s, {after}, in {self.dtype} on {self.runtime.device}"
        )
        return f"{speed}, by {self.path}" if self.path else speed


def main(cfg: SampleConfig) -> None:
    settings.check(cfg)
    cfg = cfg.replace(stop=cfg.stop and line_breaks(cfg.stop))
    sampler = load_sampler(cfg)
    try:
        if cfg.prompts:
            answer_file(sampler, cfg, Path(cfg.prompts))
        elif cfg.interactive:
            converse(sampler, cfg)
        elif cfg.logprobs is not None:
            show_logprobs(sampler, cfg, read_prompt("start", cfg.start, sampler.tokenizer), cfg.logprobs)
        elif cfg.save:
            save(sampler, cfg, read_prompt("start", cfg.start, sampler.tokenizer), Path(cfg.save))
        else:
            write(sampler, cfg, read_prompt("start", cfg.start, sampler.tokenizer))
            if isinstance(sampler.tokenizer, MidiTokenizer):
                note("to save a MIDI file instead: --save=piece.mid")
    except KeyboardInterrupt:
        note(sampler.speed())
        raise
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "can't allocate memory" not in str(error):
            raise
        raise UserError(f"batch_size={cfg.batch_size}: memory ran out; use a smaller --batch_size") from None
    note(sampler.speed())


def load_sampler(cfg: SampleConfig) -> Sampler:
    """What out_dir or init_from names. Raises UserError."""
    setting = "out_dir" if cfg.init_from == "resume" else "init_from"
    try:
        return Sampler.load(getattr(cfg, setting), cfg.checkpoint, cfg.device, cfg.dtype)
    except NoCheckpointError as error:
        raise NoCheckpointError(error.path, f"--{setting}=") from None


def encode_prompt(sampler: Sampler, cfg: SampleConfig, start: str, name: str = "the prompt") -> Prompt:
    """The prompt as the model sees it. A line on standard error says what the model does not see."""
    prompt = sampler.encode_prompt(start, cfg.on_unknown)
    if cfg.start_tokens and len(prompt.ids) > cfg.start_tokens:
        ids = prompt.ids[: cfg.start_tokens]
        prompt = prompt._replace(ids=ids, text=sampler.tokenizer.decode(ids))
    if prompt.unknown:
        done = "left out" if cfg.on_unknown == "skip" else "replaced"
        count = f"{prompt.unknown:,} of {len(start):,} characters"
        characters = " ".join(dict.fromkeys(repr(c) for c in start if sampler.tokenizer.count_unknown(c)))
        note(f"{done} {count} of {name}, not in the vocabulary: {characters}")
    if len(prompt.ids) > sampler.model.config.block_size:
        seen = sampler.model.config.block_size
        note(f"{name} has {len(prompt.ids):,} tokens, of which the model sees the last {seen:,}")
    return prompt


SEPARATOR = "\n---------------\n"  # nanoGPT's


def write(sampler: Sampler, cfg: SampleConfig, start: str) -> None:
    """Print the samples. The first of each batch is streamed, the others follow. Ctrl-C ends the text."""
    prompt = encode_prompt(sampler, cfg, start)
    rows = sampler.rows(cfg.num_samples, cfg.batch_size)
    for first in range(0, cfg.num_samples, rows):
        samples = list(range(first, min(first + rows, cfg.num_samples)))
        texts = [""] * len(samples)
        print(SEPARATOR if first else "", prompt.text, sep="", end="", flush=True)
        try:
            for pieces in sampler.texts([prompt.ids] * len(samples), samples, cfg):
                texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
                if cfg.stream:
                    print(pieces[0], end="", flush=True)
        except KeyboardInterrupt:
            print()
            raise
        others = [f"{SEPARATOR}{prompt.text}{text}" for text in texts[1:]]
        print("" if cfg.stream else texts[0], *others, sep="", end="")
    print()


def save(sampler: Sampler, cfg: SampleConfig, start: str, path: Path) -> None:
    """Save each sample, prompt included, as a file: several as NAME-1, NAME-2, ... Ctrl-C saves what there is."""
    paths = [path]
    if cfg.num_samples > 1:
        paths = [path.with_stem(f"{path.stem}-{k}") for k in range(1, cfg.num_samples + 1)]
    check_files(sampler, paths)
    prompt = encode_prompt(sampler, cfg, start)
    rows = sampler.rows(cfg.num_samples, cfg.batch_size)
    for first in range(0, cfg.num_samples, rows):
        samples = list(range(first, min(first + rows, cfg.num_samples)))
        texts = [prompt.text] * len(samples)
        stopped = None
        try:
            for pieces in sampler.texts([prompt.ids] * len(samples), samples, cfg):
                texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
        except KeyboardInterrupt as interrupt:
            stopped = interrupt
        for sample, text in zip(samples, texts, strict=True):
            print(save_text(sampler, paths[sample], text))
        if stopped:
            raise stopped
    if not any(saved.exists() for saved in paths):
        raise UserError(f"save={path}: no piece has a note; set a larger --max_new_tokens")


def check_files(sampler: Sampler, paths: list[Path]) -> None:
    """Raise UserError if the model writes nothing for such files, or they cannot be written."""
    name = f"save={paths[0]}"
    is_midi_file, writes_music = paths[0].suffix.lower() in music.SUFFIXES, isinstance(sampler.tokenizer, MidiTokenizer)
    if is_midi_file and not writes_music:
        raise UserError(f"{name}: this model writes text, not MIDI files; use .txt, or .abc for tunes")
    if writes_music and not is_midi_file:
        raise UserError(f"{name}: this model writes music, which is saved as MIDI; use .mid")
    if not paths[0].parent.is_dir():
        raise UserError(f"{name}: the folder {paths[0].parent} does not exist; make it, or use another")
    for path in paths:
        if path.exists():
            raise UserError(f"{name}: {path} exists already; remove it, or use another name")


def save_text(sampler: Sampler, path: Path, text: str) -> str:
    """Save one text, as MIDI if the model writes music. Returns a line that says what is in the file."""
    try:
        if not isinstance(sampler.tokenizer, MidiTokenizer):
            path.write_text(text, encoding="utf-8")
            is_tune = path.suffix.lower() in tunes.SUFFIXES
            return f"{path}: {len(text):,} characters{describe_tune(text) if is_tune else ''}"
        format = music.EventFormat.of(sampler.tokenizer)
        notes = music.write_midi(path, text, format)
    except music.PieceError as error:
        return f"{path} was not written: {error}"
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    seconds = max(note.end for note in notes) * format.seconds_per_step
    return f"{path}: {len(notes):,} notes, {seconds:.1f} s"


def describe_tune(text: str) -> str:
    """What is wrong with a tune in ABC notation, if anything is."""
    try:
        tunes.reduce_tune(text)
        return ""
    except tunes.TuneError as error:
        return f", which are not a tune in ABC notation: {error}"


def converse(sampler: Sampler, cfg: SampleConfig) -> None:
    """Ask for prompts until Ctrl-D, with a history on the arrow keys. Ctrl-C ends only the text."""
    with suppress(ImportError):
        import readline  # noqa: F401  input() then supports the arrow keys; Windows' consoles always do

    while True:
        try:
            start = line_breaks(input("> "))
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            raise
        except UnicodeDecodeError:
            note("error: that line is not UTF-8")
            continue
        try:
            with suppress(KeyboardInterrupt):
                write(sampler, cfg, start)
        except UserError as error:
            note(f"error: {error}")


def answer_file(sampler: Sampler, cfg: SampleConfig, path: Path) -> None:
    """Print a JSON line for each sample of each prompt in a file of JSON lines, batch by batch."""
    prompts, samples = read_prompts(sampler, cfg, path), cfg.num_samples
    keys = ((start, sample) for start, _ in prompts for sample in range(samples))
    requests = ((ids, sample) for _, ids in prompts for sample in range(samples))
    for (start, sample), text in zip(keys, sampler.complete(requests, len(prompts) * samples, cfg), strict=True):
        print(json.dumps({"prompt": start, "sample": sample, "text": text}, ensure_ascii=False), flush=True)


def read_prompts(sampler: Sampler, cfg: SampleConfig, path: Path) -> list[tuple[str, list[int]]]:
    """Each prompt of the file with its ids. Raises UserError before anything is generated."""
    if str(path) == "-" or (path.exists() and not path.is_file()):
        raise UserError(f"prompts={path}: it is not a file; name a .jsonl file")
    corpus = Corpus(find_sources([str(path)], "jsonl"), document=prompt_of)
    prompts = []
    for start in (prompt for block in corpus.blocks() for prompt in block.documents()):
        name = f"prompt {len(prompts) + 1:,}"
        try:
            prompts.append((start, encode_prompt(sampler, cfg, start, name).ids))
        except UserError as error:
            raise UserError(f"prompts={path}: in {name}, {error}") from None
    if not prompts:
        raise UserError(f'prompts={path}: the file is empty; write {{"prompt": "TEXT"}} on each line')
    return prompts


def prompt_of(line: dict[str, Any]) -> str:
    """The prompt of one line. Raises CorpusError, to which the caller adds the line number."""
    if not isinstance(line.get("prompt"), str):
        raise CorpusError('it has no text "prompt"; write {"prompt": "TEXT"} on each line')
    return line["prompt"]


def show_logprobs(sampler: Sampler, cfg: SampleConfig, start: str, alternatives: int) -> None:
    """Print each token of the first sample with its log-probability in nats before any filter, and the most likely."""
    for step in sampler.steps([encode_prompt(sampler, cfg, start).ids], [0], cfg):
        logprobs = step.logits[0].log_softmax(dim=-1)[: sampler.tokenizer.vocab_size]
        most_likely = logprobs.topk(min(alternatives, len(logprobs))).indices.tolist()
        shown = [
            f"{sampler.tokenizer.token_bytes(token).decode('utf-8', 'backslashreplace')!r} {logprobs[token]:.3f}"
            for token in (step.tokens[0], *most_likely)
        ]
        print(f"{shown[0]:24} {'  '.join(shown[1:])}".rstrip(), flush=True)


if __name__ == "__main__":
    settings.run_script(main, SampleConfig)
