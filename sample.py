"""Generate text with a trained model and stream it to the terminal.

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
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le

from folio import UserError, configurator, convert
from folio.blocks import CorpusError
from folio.checkpoint import Checkpoint
from folio.configurator import NonNegativeFloat, NonNegativeInt, Settings, line_breaks
from folio.corpus import Corpus, find_sources
from folio.generate import Sampling, Step, TextStream, default_prompt, generate
from folio.kernels import pack
from folio.runtime import Runtime, resolve_runtime
from folio.tokenizer import EOT_TEXT

SMALL = 4_000_000  # parameters; below, decoding is limited by calls rather than memory, and "auto" is float32

Count = Annotated[int, Ge(1)]  # however large
Share = Annotated[float, Gt(0), Le(1)]


@dataclass(frozen=True)
class SampleConfig(Settings):
    # --- model ---
    out_dir: str = "out"  # folder of the run
    init_from: str = "resume"  # "resume": the run in out_dir; or a checkpoint, "gpt2", a Hugging Face folder, ckpt.pt
    checkpoint: Literal["best", "last"] = "best"  # which of the run's
    # --- text ---
    start: str = ""  # the prompt; \n is a line break; "FILE:path" reads a file, "-" standard input
    prompts: str | None = None  # a .jsonl file of {"prompt": "..."}; prints JSON lines, too
    interactive: bool = False  # True: ask for prompts; Ctrl-C ends a text, Ctrl-D the program
    num_samples: Count = 1  # texts to generate for each prompt
    max_new_tokens: Count | None = 500  # maximum per text, after its prompt; None: until its context is full
    stop: str | None = None  # text at which a sample ends, not printed; \n is a line break
    stream: bool = True  # print tokens as they are generated; False: each text when it is complete
    logprobs: Annotated[int, Ge(0)] | None = None  # print each token with its log-probability and so many alternatives
    on_unknown: Literal["error", "skip", "replace"] = "error"  # characters of a prompt that the tokenizer lacks
    # --- sampling ---
    temperature: NonNegativeFloat = 0.8  # below 1: more deterministic, above 1: more random; 0: the most likely token
    top_k: Count | None = 200  # sample from the k most likely tokens; None: off
    top_p: Share | None = None  # sample from the most likely tokens that together have this probability; None: off
    min_p: Share | None = None  # sample from tokens at least this probable relative to the most likely one; None: off
    repetition_penalty: Annotated[float, Ge(1e-6), Le(1e6)] = 1.0  # above 1: tokens that occurred are less likely
    seed: NonNegativeInt = 1337  # of the random numbers; sample k is the same however many are generated
    # --- machine ---
    context_stride: Count | None = None  # tokens to drop when the context is full; 1: one by one; None: half
    batch_size: Count = 32  # texts generated at a time; fewer if memory holds fewer
    device: str = "auto"  # "cpu", "cuda", "cuda:1", "mps"; auto: the first available of cuda, mps, cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"  # of the weights; auto: what is fast here
    compile: bool = False  # nanoGPT's setting; decoding is not compiled

    def problems(self) -> list[tuple[str, str]]:
        """Rules across settings: (setting, what is wrong with it and how to fix it)."""
        problems = []
        if self.temperature and not 1e-6 <= self.temperature <= 1e6:  # beyond, float32 overflows
            problems.append(("temperature", "it must be from 1e-6 to 1e6, or 0 for the most likely token"))
        if self.compile:
            problems.append(("compile", "decoding is not compiled; leave it out"))
        if self.prompts and (self.interactive or self.start):
            problems.append(("prompts", "it replaces start and interactive; give only one of them"))
        if self.stop == "":
            problems.append(("stop", "it must not be empty; None turns it off"))
        return problems

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.repetition_penalty, self.temperature, self.top_k, self.top_p, self.min_p)


class Sampler:
    """A loaded model with the settings, ready to continue any prompt."""

    def __init__(self, cfg: SampleConfig, loaded: Checkpoint, runtime: Runtime):
        self.cfg, self.runtime, self.tokenizer = cfg, runtime, loaded.tokenizer
        self.tokenizer.on_unknown = cfg.on_unknown
        self.model = loaded.build().to(runtime.device, runtime.dtype)  # cast once instead of at each step
        if runtime.device.type == "cpu":
            torch.set_float32_matmul_precision("highest")  # the other modes are slow on a single row
            pack(self.model, int8=cfg.dtype == "int8")
        self.small, self.threads = self.model.num_params()["total"] < SMALL, torch.get_num_threads()
        self.tokens, self.seconds, self.first = 0, 0.0, 0.0  # in all so far; until the first token of the latest text

    def prompt(self, start: str) -> list[int]:
        """The ids of a prompt, with <|endoftext|> as its special id. The model sees the end of one that is too long."""
        eot = self.tokenizer.eot
        ids = []
        for part, text in enumerate([start] if eot is None else start.split(EOT_TEXT)):
            ids += [eot] * (part > 0) + self.tokenizer.encode(text).tolist()
        if len(ids) > self.model.config.block_size:
            seen = self.model.config.block_size
            print(f"the prompt has {len(ids):,} tokens, of which the model sees the last {seen:,}", file=sys.stderr)
        return ids or default_prompt(self.tokenizer)

    def rows(self, texts: int) -> int:
        """How many of so many texts to generate at a time: batch_size, or fewer if memory holds fewer.

        It counts two caches (full contexts are prefilled into a second one), a block's activations, and logits.
        """
        from folio.memory import HEADROOM, format_bytes, free  # imports psutil, which nothing else here needs

        config, wanted = self.model.config, min(self.cfg.batch_size, texts)
        size = 4 if self.runtime.device.type == "cpu" else self.runtime.dtype.itemsize
        context = size * config.block_size * config.n_embd  # bytes of one activation of a whole context
        of_row = HEADROOM * ((2 * 2 * config.n_layer + 16) * context + 32 * config.vocab_size)
        available = free(self.runtime.device) or free(torch.device("cpu"))  # Apple's GPUs use the CPU's
        fit = max(1, int(available / of_row))
        if fit < wanted:
            shown = f"batch_size={self.cfg.batch_size:,}: {format_bytes(available)} of memory are free"
            print(f"{shown}, so {fit:,} texts are generated at a time", file=sys.stderr)
        return min(fit, wanted)

    def steps(self, prompts: list[list[int]], samples: list[int], ended: list[bool]) -> Iterator[Step]:
        """Generate from each prompt, and measure the time; row b is sample samples[b]."""
        # A small model's single row is as fast on one thread, which never waits for a core that is busy.
        torch.set_num_threads(1 if self.small and len(prompts) == 1 else self.threads)
        began = time.perf_counter()
        self.first = 0.0
        generated = generate(
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
            for step in generated:
                self.first = self.first or time.perf_counter() - began
                self.tokens += sum(token is not None for token in step.tokens)
                yield step
        finally:  # also when Ctrl-C ends the text
            self.seconds += time.perf_counter() - began

    def texts(self, prompts: list[list[int]], samples: list[int]) -> Iterator[list[str]]:
        """The text that follows each prompt: for each step, a piece for each row."""
        stop = self.cfg.stop and line_breaks(self.cfg.stop)
        texts, ended = [TextStream(self.tokenizer, stop) for _ in prompts], [False] * len(prompts)
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
        raise UserError(f"dtype=int8: it requires a CPU, not {runtime.device}; use --dtype=auto or --device=cpu")
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


SEPARATOR = "\n---------------\n"  # nanoGPT's


def write(sampler: Sampler, start: str) -> None:
    """Print the samples. The first of each batch is streamed, the others follow. Ctrl-C ends the text."""
    cfg, prompt = sampler.cfg, sampler.prompt(start)
    rows = sampler.rows(cfg.num_samples)
    for first in range(0, cfg.num_samples, rows):
        samples = list(range(first, min(first + rows, cfg.num_samples)))
        texts = [""] * len(samples)
        print(SEPARATOR if first else "", start, sep="", end="", flush=True)
        try:
            for pieces in sampler.texts([prompt] * len(samples), samples):
                texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
                if cfg.stream:
                    print(pieces[0], end="", flush=True)
        except KeyboardInterrupt:
            print()
            return
        others = [f"{SEPARATOR}{start}{text}" for text in texts[1:]]
        print("" if cfg.stream else texts[0], *others, sep="", end="")
    print()


def converse(sampler: Sampler) -> None:
    """Ask for prompts until Ctrl-D, with a history on the arrow keys."""
    with suppress(ImportError):
        import readline  # noqa: F401  input() then supports the arrow keys; Windows' consoles always do

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
    """Print a JSON line for each sample of each prompt in a file of JSON lines, batch by batch."""
    samples = sampler.cfg.num_samples
    prompts = read_prompts(sampler, path)
    requests = ((start, ids, sample) for start, ids in prompts for sample in range(samples))
    rows = sampler.rows(len(prompts) * samples)
    while batch := list(islice(requests, rows)):
        texts = [""] * len(batch)
        for pieces in sampler.texts([ids for _, ids, _ in batch], [sample for *_, sample in batch]):
            texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
        for (start, _, sample), text in zip(batch, texts, strict=True):
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
    """The prompt of one line. Raises CorpusError, to which the caller adds the line number."""
    if not isinstance(line.get("prompt"), str):
        raise CorpusError('it has no text "prompt"; write {"prompt": "TEXT"} on each line')
    return line["prompt"]


def show_logprobs(sampler: Sampler, start: str, alternatives: int) -> None:
    """Print each token of the first sample with its log-probability in nats before any filter, and the most likely."""
    for step in sampler.steps([sampler.prompt(start)], [0], [False]):
        logprobs = step.logits[0].log_softmax(dim=-1)
        most_likely = logprobs.topk(min(alternatives, sampler.tokenizer.vocab_size)).indices.tolist()
        shown = [
            f"{sampler.tokenizer.token_bytes(token).decode('utf-8', 'backslashreplace')!r} {logprobs[token]:.3f}"
            for token in (step.tokens[0], *most_likely)
        ]
        print(f"{shown[0]:24} {'  '.join(shown[1:])}".rstrip(), flush=True)


def read_start(start: str) -> str:
    """The prompt: the text itself, the file of "FILE:path", or standard input for "-". Raises UserError."""
    if start != "-" and not start.startswith("FILE:"):
        return line_breaks(start)
    path = Path(start.removeprefix("FILE:"))
    if start != "-" and path.exists() and not path.is_file():
        raise UserError(f"start={start}: {path} is not a file; give a file, or pipe the text to --start=-")
    try:
        content = sys.stdin.buffer.read() if start == "-" else path.read_bytes()
        return content.decode("utf-8-sig").replace("\r\n", "\n")  # as Windows' editors save text
    except FileNotFoundError:
        raise UserError(f"start={start}: the file {path} does not exist") from None
    except OSError as error:
        raise UserError(f"start={start}: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"start={start}: it is not UTF-8 at byte {error.start:,}; save it as UTF-8") from None


if __name__ == "__main__":
    configurator.run_script(main, SampleConfig)
