"""Report how much of its training data a model reproduces.

    python tools/memorized.py out-shakespeare-char
    python tools/memorized.py out-a out-b --samples=200 --temperature=1 --json=memorized.json
    python tools/memorized.py out-finetuned --span=50 --data_dir=/mnt/data

It searches for spans of the training data in samples and, for comparison, in held-out text, and counts the passages of
the training data that the model completes exactly from their first 50 tokens. docs/use/evaluation.md explains the
tables.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import folio.machine.openmp  # noqa: E402, F401  # isort: skip  (before torch)
from folio import UserError  # noqa: E402
from folio.base.files import write_json  # noqa: E402
from folio.base.progress import note  # noqa: E402
from folio.base.settings import NonNegativeFloat, NonNegativeInt, PositiveInt, Settings, run_script  # noqa: E402
from folio.base.terminal import say  # noqa: E402
from folio.checkpoints import foreign  # noqa: E402
from folio.checkpoints.checkpoint import Checkpoint  # noqa: E402
from folio.checkpoints.find_runs import expand_runs  # noqa: E402
from folio.checkpoints.training_data import open_training_data  # noqa: E402
from folio.decoding.language_model import QUANTIZED, GenerationConfig, LanguageModel  # noqa: E402
from folio.decoding.quantize import quantized  # noqa: E402
from folio.evaluation.extraction import describe_reproduction, measure_reproduction  # noqa: E402


@dataclass(frozen=True)
class MemorizedConfig(Settings):
    # --- models ---
    runs: tuple[str, ...] = ()  # runs ("out-*", latest) whose training data is available
    checkpoint: Literal["best", "last"] = "best"  # which checkpoint of a run
    data_dir: str | None = None  # folder of the data sets, used if the training data has moved
    # --- samples ---
    samples: PositiveInt = 1000  # number of samples to generate
    max_new_tokens: PositiveInt = 200  # maximum tokens per sample
    span: PositiveInt | None = None  # also count tokens in spans of training data of at least this length
    temperature: NonNegativeFloat = GenerationConfig.temperature  # of the samples, as in sample.py; 0: greedy decoding
    seed: NonNegativeInt = GenerationConfig.seed  # random seed of the samples, as in sample.py
    # --- machine and output ---
    device: str = "auto"  # "cpu", "cuda", "cuda:1", "mps"; auto: the first available of cuda, mps, cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"] = "auto"  # dtype of the weights
    json: str | None = None  # also write the results to this file

    def problems(self) -> list[tuple[str, str]]:
        problems = []
        if not self.runs:
            problems.append(("runs", "name a run, as in: python tools/memorized.py out-shakespeare-char"))
        if self.span and self.span > self.max_new_tokens:
            rule = f"a sample has only {self.max_new_tokens} tokens; set a smaller --span or a larger --max_new_tokens"
            problems.append(("span", rule))
        return problems


def main(cfg: MemorizedConfig) -> None:
    reports = []
    for run in expand_runs(cfg.runs):
        saved = foreign.load(run, cfg.checkpoint)
        model = make_model(saved, cfg)
        note(f"{saved.path}: {model.runtime.description}")
        reports.append({"run": run, **search_samples(model, saved, cfg)})
        say(describe_reproduction(reports[-1]))
        if (base := saved.state["config"]["init_from"]) not in ("scratch", "resume"):
            say(f"The training data of {base}, from which {run} started, is unknown and was not searched.")
    if cfg.json:
        write_json(Path(cfg.json), {"memorized": reports})


def make_model(saved: Checkpoint, cfg: MemorizedConfig) -> LanguageModel:
    """Build the model in the dtype. Quantized weights become float32, because passages are scored without decoding."""
    if cfg.dtype in QUANTIZED:
        return LanguageModel(quantized(saved.build(), cfg.dtype), saved.tokenizer, cfg.device, "float32")
    return LanguageModel(saved.build(), saved.tokenizer, cfg.device, cfg.dtype)


def search_samples(model: LanguageModel, saved: Checkpoint, cfg: MemorizedConfig) -> dict[str, Any]:
    """Call measure_reproduction with the checkpoint's training data. Raises UserError with the checkpoint's path."""
    config = GenerationConfig(max_new_tokens=cfg.max_new_tokens, temperature=cfg.temperature, seed=cfg.seed)
    try:
        datasets = open_training_data(saved, cfg.data_dir)
        return measure_reproduction(model, datasets, cfg.samples, config, cfg.span)
    except UserError as error:
        raise UserError(f"{saved.path}: {error}") from None


if __name__ == "__main__":
    run_script(main, MemorizedConfig)
