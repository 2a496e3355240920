"""Write text with a trained model, onto the terminal as it comes.

python sample.py --out_dir=out-shakespeare-char
python sample.py --out_dir=out-shakespeare-char --start="ROMEO:" --num_samples=3 --temperature=0.7
python sample.py --out_dir=out-shakespeare-char --start=FILE:prompt.txt --temperature=0
python sample.py --out_dir=out-shakespeare-char --interactive=True
python sample.py --out_dir=out-shakespeare-char --prompts=prompts.jsonl --num_samples=4 > texts.jsonl
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

from folio import UserError, configurator, convert
from folio.checkpoint import Checkpoint
from folio.configurator import Settings, line_breaks
from folio.corpus import Corpus, CorpusError, find_sources
from folio.generate import Sampling, Step, Text, default_prompt, generate, pack
from folio.runtime import Runtime, resolve_runtime
from folio.tokenizer import EOT_TEXT
from model import GPT, GPTConfig

SMALL = 4_000_000  # parameters below which "auto" is float32: so little memory is read that only the calls count


@dataclass(frozen=True)
class SampleConfig(Settings):
    # --- model ---
    out_dir: str = "out"  # folder of the run
    init_from: str = "resume"  # "resume": the run in out_dir; or a checkpoint, "gpt2", a Hugging Face folder, ckpt.pt
    checkpoint: Literal["best", "last"] = "best"  # which of the run's
    # --- text ---
    start: str = ""  # what the text begins with, \n is a line break; "FILE:path" reads a file, "-" standard input
    prompts: str | None = None  # a .jsonl file of {"prompt": "..."}; the texts come out as JSON lines, too
    interactive: bool = False  # True: ask for one beginning after another; Ctrl-C ends a text, Ctrl-D the program
    num_samples: int = 1  # texts to write, of each beginning
    max_new_tokens: int | None = 500  # tokens per text at most, after its start; None: until its context is full
    stop: str | None = None  # text at which a sample ends, not printed; \n is a line break
    stream: bool = True  # print as it comes; False: each text when it is done
    logprobs: int | None = None  # also this many runners-up: prints each token with its log-probability; None: off
    on_unknown: Literal["error", "skip", "replace"] = "error"  # characters of the start that the tokenizer lacks
    # --- sampling ---
    temperature: float = 0.8  # below 1 bolder about the likely, above 1 wilder; 0: always the likeliest
    top_k: int | None = 200  # draw from the k likeliest tokens; None: off
    top_p: float | None = None  # draw from the likeliest that together have this probability; None: off
    min_p: float | None = None  # draw from those at least so many times as probable as the likeliest; None: off
    repetition_penalty: float = 1.0  # above 1, what has occurred becomes less likely; 1: off
    seed: int = 1337  # of the draws; sample k is the same however many are asked for
    # --- machine ---
    context_stride: int | None = None  # tokens that go when the context is full; 1: one at a time; None: half of it
    batch_size: int = 32  # texts that are generated at a time; fewer where memory holds fewer
    device: str = "auto"  # "cpu", "cuda", "cuda:1", "mps"; auto: the first of cuda, mps, cpu that is here
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"  # of the weights; auto: what is fast here
    compile: bool = False  # decoding is not compiled, so this is all it can be

    def problems(self) -> list[tuple[str, str]]:
        """(setting, what is wrong with it and how to mend it) for all that cannot work."""
        found = [(name, "it must be at least 1") for name in ("num_samples", "batch_size") if getattr(self, name) < 1]
        for name in ("max_new_tokens", "context_stride"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                found.append((name, "it must be at least 1, or None"))
        if self.temperature and not 1e-6 <= self.temperature <= 1e6:  # beyond, float32 overflows
            found.append(("temperature", "it must be from 1e-6 to 1e6, or 0, which takes the likeliest token"))
        if self.top_k is not None and self.top_k < 1:
            found.append(("top_k", "it must be at least 1; None turns it off"))
        for name in ("top_p", "min_p"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) <= 1:
                found.append((name, "it must be above 0 and at most 1; None turns it off"))
        if not 1e-6 <= self.repetition_penalty <= 1e6:
            found.append(("repetition_penalty", "it must be from 1e-6 to 1e6; 1 turns it off"))
        if self.logprobs is not None and self.logprobs < 0:
            found.append(("logprobs", "it must not be negative; None turns it off"))
        if not 0 <= self.seed < 2**63:
            found.append(("seed", "it must be from 0 to 2**63 - 1"))
        if self.compile:
            found.append(("compile", "decoding is not compiled; leave it out"))
        if self.prompts and (self.interactive or self.start):
            found.append(("prompts", "it takes the place of start and of interactive; give only one of them"))
        if self.stop == "":
            found.append(("stop", "it must not be empty; None turns it off"))
        return found

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.repetition_penalty, self.temperature, self.top_k, self.top_p, self.min_p)


class Sampler:
    """A loaded model and the settings, ready to go on from any beginning."""

    def __init__(self, cfg: SampleConfig, loaded: Checkpoint, runtime: Runtime):
        self.cfg, self.runtime, self.tokenizer = cfg, runtime, loaded.tokenizer
        self.tokenizer.on_unknown = cfg.on_unknown
        self.model = loaded.build(GPT, GPTConfig).to(runtime.device, runtime.dtype)  # cast once, not at each step
        if runtime.device.type == "cpu":
            torch.set_float32_matmul_precision("highest")  # the other modes are slow on a single row
            pack(self.model, int8=cfg.dtype == "int8")
        self.small, self.threads = self.model.num_params()["total"] < SMALL, torch.get_num_threads()
        self.tokens, self.seconds, self.first = 0, 0.0, 0.0  # written so far, in all; until the latest text's first

    def prompt(self, start: str) -> list[int]:
        """The ids to begin with, <|endoftext|> as its one id; of a text that is too long the model sees the end."""
        eot = self.tokenizer.eot
        ids = []
        for part, text in enumerate([start] if eot is None else start.split(EOT_TEXT)):
            ids += [eot] * (part > 0) + self.tokenizer.encode(text).tolist()
        if len(ids) > self.model.config.block_size:
            seen = self.model.config.block_size
            print(f"the start has {len(ids):,} tokens, of which the model sees the last {seen:,}", file=sys.stderr)
        return ids or default_prompt(self.tokenizer)

    def rows(self, asked: int) -> int:
        """How many of the texts that are asked for are generated at a time: batch_size, or fewer where memory ends.

        It counts two caches, as full contexts are read again into one of their own, a block's activations, and logits.
        """
        from folio.memory import HEADROOM, free, in_words  # with psutil, which nothing else here needs

        config, wanted = self.model.config, min(self.cfg.batch_size, asked)
        size = 4 if self.runtime.device.type == "cpu" else self.runtime.dtype.itemsize
        context = size * config.block_size * config.n_embd  # bytes of one activation of a whole context
        of_row = HEADROOM * ((2 * 2 * config.n_layer + 16) * context + 32 * config.vocab_size)
        available = free(self.runtime.device) or free(torch.device("cpu"))  # Apple's GPUs use the CPU's
        fit = max(1, int(available / of_row))
        if fit < wanted:
            shown = f"batch_size={self.cfg.batch_size:,}: {in_words(available)} of memory are free"
            print(f"{shown}, so {fit:,} texts are generated at a time", file=sys.stderr)
        return min(fit, wanted)

    def steps(self, prompts: list[list[int]], samples: list[int], ended: list[bool]) -> Iterator[Step]:
        """What follows each prompt; row b is sample samples[b]. Also keeps the time."""
        # A small model's single row is as fast on one thread, which waits for no core that another process uses.
        torch.set_num_threads(1 if self.small and len(prompts) == 1 else self.threads)
        began = time.perf_counter()
        self.first = 0.0
        drawn = generate(
            self.model,
            prompts,
            self.runtime,
            max_new_tokens=self.cfg.max_new_tokens,
            sampling=self.cfg.sampling,
            vocab_size=self.tokenizer.vocab_size,
            eot=self.tokenizer.eot,
            seed=self.cfg.seed,
            samples=samples,
            stride=self.cfg.context_stride,
            ended=ended,
        )
        try:
            for step in drawn:
                self.first = self.first or time.perf_counter() - began
                self.tokens += sum(token is not None for token in step.tokens)
                yield step
        finally:  # also when Ctrl-C ends the text
            self.seconds += time.perf_counter() - began

    def texts(self, prompts: list[list[int]], samples: list[int]) -> Iterator[list[str]]:
        """The text that follows each prompt, a piece of each row at a time."""
        stop = self.cfg.stop and line_breaks(self.cfg.stop)
        texts, ended = [Text(self.tokenizer, stop) for _ in prompts], [False] * len(prompts)
        for step in self.steps(prompts, samples, ended):
            yield [text.push(token) for text, token in zip(texts, step.tokens, strict=True)]
            ended[:] = [text.ended for text in texts]
        yield [text.push(None) for text in texts]

    def speed(self) -> str:
        rate = self.tokens / self.seconds if self.seconds else 0
        kind = "int8" if self.cfg.dtype == "int8" else str(self.runtime.dtype).removeprefix("torch.")
        after = f"the first after {1000 * self.first:.0f} ms"
        return f"{self.tokens:,} tokens, {rate:,.0f} tokens/s, {after}, in {kind} on {self.runtime.device}"


def main(cfg: SampleConfig) -> None:
    configurator.check(cfg)
    source = cfg.out_dir if cfg.init_from == "resume" else cfg.init_from
    loaded = convert.load(source, cfg.checkpoint)
    dtype = "bfloat16" if cfg.dtype == "int8" else cfg.dtype
    if dtype == "auto" and sum(t.numel() for t in loaded.model.values()) < SMALL:
        dtype = "float32"
    runtime = resolve_runtime(cfg.device, dtype, False)
    if cfg.dtype == "int8" and runtime.device.type != "cpu":
        raise UserError(f"dtype=int8: it is for a CPU, and this is {runtime.device}; use --dtype=auto or --device=cpu")
    sampler = Sampler(cfg, loaded, runtime)
    try:
        if cfg.prompts:
            answer_file(sampler, Path(cfg.prompts))
        elif cfg.interactive:
            converse(sampler)
        elif cfg.logprobs is not None:
            show_logprobs(sampler, read_start(cfg.start), cfg.logprobs)
        else:
            write(sampler, read_start(cfg.start))
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "can't allocate memory" not in str(error):
            raise
        raise UserError(f"batch_size={cfg.batch_size}: memory ran out; use a smaller --batch_size") from None
    print(sampler.speed(), file=sys.stderr)


def write(sampler: Sampler, start: str) -> None:
    """Print the samples: the first as it comes; those that grow beside it when it is done. Ctrl-C ends the text."""
    cfg, prompt = sampler.cfg, sampler.prompt(start)
    rows = sampler.rows(cfg.num_samples)
    for first in range(0, cfg.num_samples, rows):
        samples = list(range(first, min(first + rows, cfg.num_samples)))
        written = [""] * len(samples)
        print("\n---------------\n" * bool(first) + start, end="", flush=True)
        try:
            for pieces in sampler.texts([prompt] * len(samples), samples):
                written = [text + piece for text, piece in zip(written, pieces, strict=True)]
                if cfg.stream:
                    print(pieces[0], end="", flush=True)
        except KeyboardInterrupt:
            print()
            return
        others = [f"\n---------------\n{start}{text}" for text in written[1:]]
        print("".join([written[0] if not cfg.stream else "", *others]), end="")
    print()


def converse(sampler: Sampler) -> None:
    """Ask for one beginning after another, with the arrow keys' history, until Ctrl-D."""
    with suppress(ImportError):
        import readline  # noqa: F401  input() then knows the arrow keys; Windows' consoles do by themselves

    while True:
        try:
            start = line_breaks(input("> "))
        except (EOFError, KeyboardInterrupt):
            print()
            return
        except UnicodeDecodeError:
            print("error: that line is not UTF-8", file=sys.stderr)
            continue
        try:
            write(sampler, start)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)


def answer_file(sampler: Sampler, path: Path) -> None:
    """Write a JSON line for each sample of each prompt in a file of JSON lines, as many as fit in a batch at a time."""
    samples = sampler.cfg.num_samples
    prompts = read_prompts(sampler, path)
    asked = ((start, ids, sample) for start, ids in prompts for sample in range(samples))
    rows = sampler.rows(len(prompts) * samples)
    while batch := list(islice(asked, rows)):
        written = [""] * len(batch)
        for pieces in sampler.texts([ids for _, ids, _ in batch], [sample for *_, sample in batch]):
            written = [text + piece for text, piece in zip(written, pieces, strict=True)]
        for (start, _, sample), text in zip(batch, written, strict=True):
            print(json.dumps({"prompt": start, "sample": sample, "text": text}, ensure_ascii=False), flush=True)


def read_prompts(sampler: Sampler, path: Path) -> list[tuple[str, list[int]]]:
    """Each prompt of the file with its ids. Raises UserError before anything is generated."""
    if str(path) == "-" or (path.exists() and not path.is_file()):
        raise UserError(f"prompts={path}: it is not a file; name a .jsonl file")
    corpus = Corpus(find_sources([str(path)], "jsonl"), document=prompt_of)
    prompts = []
    for start in (prompt for block in corpus.blocks() for prompt in block.documents()):
        try:
            prompts.append((start, sampler.prompt(start)))
        except UserError as error:
            raise UserError(f"prompts={path}: in prompt {len(prompts) + 1}, {error}") from None
    if not prompts:
        raise UserError(f'prompts={path}: the file is empty; write {{"prompt": "TEXT"}} on each line')
    return prompts


def prompt_of(line: dict[str, Any]) -> str:
    """The prompt of one line. Raises CorpusError, to which the caller adds the line's number."""
    if not isinstance(line.get("prompt"), str):
        raise CorpusError('it has no "prompt" that is text; write {"prompt": "TEXT"} on each line')
    return line["prompt"]


def show_logprobs(sampler: Sampler, start: str, runners_up: int) -> None:
    """Print each token of the first sample with its log-probability, in nats, before any filter; and the likeliest."""
    for step in sampler.steps([sampler.prompt(start)], [0], [False]):
        logprobs = step.logits[0].log_softmax(dim=-1)
        likeliest = logprobs.topk(min(runners_up, sampler.tokenizer.vocab_size)).indices.tolist()
        shown = [
            f"{sampler.tokenizer.token_bytes(token).decode('utf-8', 'backslashreplace')!r} {logprobs[token]:.3f}"
            for token in (step.tokens[0], *likeliest)
        ]
        print(f"{shown[0]:24} {'  '.join(shown[1:])}".rstrip(), flush=True)


def read_start(start: str) -> str:
    """The prompt itself, or what the file of "FILE:path", or standard input for "-", holds. Raises UserError."""
    if start != "-" and not start.startswith("FILE:"):
        return line_breaks(start)
    path = Path(start.removeprefix("FILE:"))
    if start != "-" and path.exists() and not path.is_file():
        raise UserError(f"start={start}: {path} is not a file; name one, or pipe the text to --start=-")
    try:
        content = sys.stdin.buffer.read() if start == "-" else path.read_bytes()
        return content.decode("utf-8-sig").replace("\r\n", "\n")  # as Windows' editors save text
    except FileNotFoundError:
        raise UserError(f"start={start}: there is no file {path}") from None
    except OSError as error:
        raise UserError(f"start={start}: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"start={start}: it is not UTF-8 at byte {error.start:,}; save it as UTF-8") from None


if __name__ == "__main__":
    configurator.run_script(main, SampleConfig)
