"""Write text with a trained model, onto the terminal as it comes.

python sample.py --out_dir=out-shakespeare-char
python sample.py --out_dir=out-shakespeare-char --start="ROMEO:" --num_samples=3 --temperature=0.7
python sample.py --out_dir=out-shakespeare-char --start=FILE:prompt.txt --temperature=0
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from folio import UserError, checkpoint, configurator
from folio.configurator import line_breaks
from folio.generate import generate, opening, until
from folio.runtime import compiled, decide, derive_seed
from model import GPT, GPTConfig


@dataclass(frozen=True)
class SampleConfig:
    # --- model ---
    out_dir: str = "out"  # folder of the run
    init_from: str = "resume"  # "resume": the run in out_dir; or the path of a checkpoint
    checkpoint: Literal["best", "last"] = "best"  # which of the run's
    # --- text ---
    start: str = ""  # what the text begins with, \n is a line break; "FILE:path" reads it from a file; "": from nothing
    num_samples: int = 1  # texts to write
    max_new_tokens: int = 500  # tokens a text has at most, after its start
    stop: str | None = None  # text at which a sample ends, not printed; \n is a line break
    stream: bool = True  # print as it comes; False: each text when it is done
    # --- sampling ---
    temperature: float = 0.8  # below 1 bolder about the likely, above 1 wilder; 0: always the likeliest
    top_k: int | None = 200  # draw from the k likeliest tokens; None: off
    top_p: float | None = None  # draw from the likeliest that together have this probability; None: off
    seed: int = 1337  # of the draws; sample k is the same however many are asked for
    # --- machine ---
    device: str = "auto"  # "cpu", "cuda", "cuda:1", "mps"; auto: the first of cuda, mps, cpu that is here
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matmuls; auto: what this device is fast in
    compile: bool = False  # torch.compile; pays off only for long texts

    def problems(self) -> list[tuple[str, str]]:
        """(setting, what is wrong with it and how to mend it) for all that cannot work."""
        counts = ("num_samples", "max_new_tokens")
        found = [(name, "it must be at least 1") for name in counts if getattr(self, name) < 1]
        if self.temperature < 0:
            found.append(("temperature", "it must not be negative; 0 takes the likeliest token"))
        if self.top_k is not None and self.top_k < 1:
            found.append(("top_k", "it must be at least 1; None turns it off"))
        if self.top_p is not None and not 0 < self.top_p <= 1:
            found.append(("top_p", "it must be above 0 and at most 1; None turns it off"))
        return found


def main(cfg: SampleConfig) -> None:
    source = Path(cfg.out_dir if cfg.init_from == "resume" else cfg.init_from)
    loaded = checkpoint.load(source, cfg.checkpoint)
    runtime = decide(cfg.device, cfg.dtype, cfg.compile)
    model = loaded.build(GPT, GPTConfig).to(runtime.device)
    forward = compiled(model, runtime)
    start = read_start(cfg.start)
    prompt = loaded.tokenizer.encode(start).tolist() if start else opening(loaded.tokenizer)
    for k in range(cfg.num_samples):
        if k:
            print("\n---------------")
        tokens = generate(
            forward,
            prompt,
            runtime,
            max_new_tokens=cfg.max_new_tokens,
            block_size=model.config.block_size,
            temperature=cfg.temperature,
            top_k=cfg.top_k,
            top_p=cfg.top_p,
            eot=loaded.tokenizer.eot,
            seed=derive_seed("sample", cfg.seed, k),
        )
        stop = cfg.stop and line_breaks(cfg.stop)
        pieces = until(loaded.tokenizer.stream(tokens), stop)
        print(start, end="", flush=True)
        for piece in pieces if cfg.stream else ["".join(pieces)]:
            print(piece, end="", flush=True)
    print()


def read_start(start: str) -> str:
    """The prompt itself, or what the file of "FILE:path" holds. Raises UserError."""
    if not start.startswith("FILE:"):
        return line_breaks(start)
    path = Path(start.removeprefix("FILE:"))
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"start={start}: there is no file {path}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"start={start}: the file is not UTF-8 at byte {error.start:,}; save it as UTF-8") from None


if __name__ == "__main__":
    configurator.run_script(main, SampleConfig)
