"""Generate text with a trained model and stream it to the terminal.

python sample.py --out_dir=out-shakespeare-char
python sample.py --out_dir=out-shakespeare-char --start="ROMEO:" --num_samples=3 --temperature=0.7
python sample.py --out_dir=out-shakespeare-char --start=FILE:prompt.txt --temperature=0
python sample.py --out_dir=out-shakespeare-char --interactive=True
python sample.py --out_dir=out-shakespeare-char --prompts=prompts.jsonl --num_samples=4 > texts.jsonl
python sample.py --out_dir=out-chorales --start=FILE:piece.mid --start_tokens=100 --save=new.mid
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge

from folio import UserError
from folio.base import settings
from folio.base.progress import note
from folio.base.settings import line_breaks
from folio.base.stop_signals import StopSignal
from folio.checkpoints.identify import NoCheckpointError
from folio.decoding.language_model import Count, GenerationConfig, MeasuredModel
from folio.decoding.output_files import save_samples
from folio.decoding.prompt_files import read_prompt, read_prompt_lines
from folio.decoding.prompts import Prompt, prompt_warnings
from folio.machine import memory


@dataclass(frozen=True)
class SampleConfig(GenerationConfig):
    # --- model ---
    out_dir: str = "out"  # folder of the run; latest: the newest run
    init_from: str = "resume"  # "resume": the run in out_dir; or a checkpoint, "gpt2", a Hugging Face folder, ckpt.pt
    checkpoint: Literal["best", "last"] = "best"  # the checkpoint of the run: best or last
    # --- text ---
    start: str = ""  # the prompt; \n is a line break; "FILE:path" reads a file, also .mid; "-" reads standard input
    start_tokens: Count | None = None  # keep only the first tokens of the prompt; None: all
    save: str | None = None  # save the text to a new file instead of printing it: .mid for music, or .abc, .txt
    prompts: str | None = None  # a .jsonl file of {"prompt": "..."}; the output is JSON lines, too
    interactive: bool = False  # True: ask for prompts; Ctrl-C stops the current text, Ctrl-D quits
    stream: bool = True  # print tokens as they are generated; False: print complete texts
    logprobs: Annotated[int, Ge(0)] | None = None  # print log-probabilities of each token and of the N most likely ones
    # --- machine ---
    device: str = "auto"  # "cpu", "cuda", "cuda:1", "mps"; auto: the first available of cuda, mps, cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"] = "auto"  # int8 and int4 are CPU-only
    compile: bool = False  # a setting of nanoGPT; must be False

    def problems(self) -> list[tuple[str, str]]:
        """Violations of rules that involve several settings, as (setting, problem and remedy)."""
        problems = super().problems()
        if self.compile:
            problems.append(("compile", "torch.compile is not used for sampling; leave it out"))
        if self.prompts and (self.interactive or self.start):
            problems.append(("prompts", "it replaces start and interactive; set only one of them"))
        if self.save and (self.prompts or self.interactive or self.logprobs is not None):
            problems.append(("save", "it cannot be combined with prompts, interactive, or logprobs; leave them out"))
        return problems


class Sampler(MeasuredModel):
    """A language model that prints warnings about prompts."""

    def encode_start(self, start: str, cfg: SampleConfig, name: str = "the prompt") -> Prompt:
        """Encode the first start_tokens tokens of a prompt. Prints warnings to standard error."""
        prompt = self.encode_prompt(start, cfg.on_unknown).truncate(cfg.start_tokens, self.tokenizer)
        for line in prompt_warnings(prompt, start, name, self.tokenizer, self.model.config, cfg.on_unknown):
            note(line)
        return prompt


def main(cfg: SampleConfig) -> None:
    settings.check(cfg)
    cfg = cfg.replace(stop=cfg.stop and line_breaks(cfg.stop))
    sampler = load_sampler(cfg)
    try:
        if cfg.prompts:
            print_json_lines(sampler, cfg, Path(cfg.prompts))
        elif cfg.interactive:
            run_interactive(sampler, cfg)
        else:
            start = read_prompt("start", cfg.start, sampler.tokenizer)
            if cfg.logprobs is not None:
                print_logprobs(sampler, cfg, start, cfg.logprobs)
            elif cfg.save:
                for line in save_samples(sampler, sampler.encode_start(start, cfg), cfg, Path(cfg.save)):
                    print(line)
            else:
                print_samples(sampler, cfg, start)
                if sampler.tokenizer.kind == "midi":
                    note("to save a MIDI file instead: --save=piece.mid")
    except KeyboardInterrupt:
        note(sampler.speed())
        raise
    except (MemoryError, RuntimeError) as error:
        if memory.ran_out(error):
            raise UserError(f"batch_size={cfg.batch_size}: memory ran out; use a smaller --batch_size") from None
        raise
    note(sampler.speed())


def load_sampler(cfg: SampleConfig) -> Sampler:
    """Load the model given by out_dir or init_from. Raises UserError."""
    setting = "out_dir" if cfg.init_from == "resume" else "init_from"
    try:
        return Sampler.load(getattr(cfg, setting), cfg.checkpoint, cfg.device, cfg.dtype)
    except NoCheckpointError as error:
        raise NoCheckpointError(error.path, f"--{setting}=") from None


SEPARATOR = "\n---------------\n"  # nanoGPT's


def print_samples(sampler: Sampler, cfg: SampleConfig, start: str) -> None:
    """Print the samples. The first sample of each batch is streamed. Ctrl-C ends the text."""
    prompt = sampler.encode_start(start, cfg)
    # A step reads all weights once, for one text or for a batch of them.
    for batch in sampler.batches(((prompt.ids, sample) for sample in range(cfg.num_samples)), cfg):
        print(SEPARATOR if batch.numbers[0] else "", prompt.text, sep="", end="", flush=True)
        try:
            for pieces in batch:  # a piece is empty while a character is incomplete: a token can end inside of one
                if cfg.stream:
                    print(pieces[0], end="", flush=True)
        except KeyboardInterrupt:
            print()
            raise
        others = [f"{SEPARATOR}{prompt.text}{text}" for text in batch.texts[1:]]
        print("" if cfg.stream else batch.texts[0], *others, sep="", end="")
    print()


def run_interactive(sampler: Sampler, cfg: SampleConfig) -> None:
    """Ask for prompts until Ctrl-D, with a history on the arrow keys. Ctrl-C ends only the text."""
    with suppress(ImportError):
        import readline  # noqa: F401  gives input() a history; Windows' consoles have one

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
            print_samples(sampler, cfg, start)
        except StopSignal:
            raise
        except KeyboardInterrupt:
            continue
        except UserError as error:
            note(f"error: {error}")


def print_json_lines(sampler: Sampler, cfg: SampleConfig, path: Path) -> None:
    """Print a JSON line for each sample of each prompt in a file of JSON lines, batch by batch."""
    prompts, samples = [], cfg.num_samples
    for number, start in enumerate(read_prompt_lines(path), 1):
        try:
            prompts.append((start, sampler.encode_start(start, cfg, f"prompt {number:,}").ids))
        except UserError as error:
            raise UserError(f"prompts={path}: in prompt {number:,}, {error}") from None
    requests = ((ids, sample) for _, ids in prompts for sample in range(samples))
    for batch in sampler.batches(requests, cfg):
        for number, text in zip(batch.numbers, batch.run(), strict=True):
            line = {"prompt": prompts[number // samples][0], "sample": number % samples, "text": text}
            print(json.dumps(line, ensure_ascii=False), flush=True)


def print_logprobs(sampler: Sampler, cfg: SampleConfig, start: str, alternatives: int) -> None:
    """Print each token of the first sample and the most likely alternatives with their log-probabilities.

    These are in nats, before any filter: what the model predicts, not what temperature and top_k make of it.
    """
    (batch,) = sampler.batches([(sampler.encode_start(start, cfg).ids, 0)], cfg)
    for step in batch.steps:
        logprobs = step.logits[0].log_softmax(dim=-1)[: sampler.tokenizer.vocab_size]
        most_likely = logprobs.topk(min(alternatives, len(logprobs))).indices.tolist()
        entries = [
            f"{sampler.tokenizer.token_bytes(token).decode('utf-8', 'backslashreplace')!r} {logprobs[token]:.3f}"
            for token in (step.tokens[0], *most_likely)
        ]
        print(f"{entries[0]:24} {'  '.join(entries[1:])}".rstrip(), flush=True)


if __name__ == "__main__":
    settings.run_script(main, SampleConfig)
