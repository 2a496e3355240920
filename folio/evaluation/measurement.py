"""Measure one model on texts or tasks, with the settings shared by tools/evaluate.py and tools/compare.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from folio import UserError
from folio.base.files import write_json
from folio.base.packages import require
from folio.base.progress import note
from folio.base.settings import (
    NonEmptyStr,
    NonNegativeInt,
    PositiveInt,
    Settings,
    comma_separated,
    line_breaks,
    split_paths,
)
from folio.checkpoints import foreign
from folio.checkpoints.build_model import crop_block_size
from folio.checkpoints.checkpoint import Checkpoint
from folio.data.inputs import Format
from folio.data.shards import Dataset
from folio.data.sources.pairs import Pair, read_pairs, validation_pairs, write_pairs
from folio.decoding.language_model import QUANTIZED, LanguageModel
from folio.decoding.quantize import quantized
from folio.evaluation.answers import evaluate_pairs
from folio.evaluation.memorization import search_training_data
from folio.evaluation.music_measures import PIECES, evaluate_music
from folio.evaluation.scores import Evaluation
from folio.evaluation.text_loss import BATCH_TOKENS, measure_positions, measure_text
from folio.evaluation.texts import EvaluatedText, open_datasets, open_files, open_pairs, open_validation_set
from folio.machine.data_parallel import with_workers
from folio.machine.kernels import adapt
from folio.machine.runtime import Runtime, resolve_runtime
from model import GPT

# Folio's own tasks, with the packages that they need. All others are lm-eval's.
PACKAGES = {"pairs": ("sacrebleu", "rouge_score"), "music": ("miditok", "symusic", "music21")}


@dataclass(frozen=True)
class MeasurementConfig(Settings):
    # --- text ---
    dataset: NonEmptyStr | None = None  # evaluate on its validation set; None: the training run's data set
    data_dir: str | None = None  # folder of the data sets; None: as in training
    text: NonEmptyStr | None = None  # comma-separated text files or folders to evaluate on instead
    split_on: str | None = None  # document separator in --text; \n is a line break; None: each file is one document
    field: str = "text"  # JSON field or table column that contains the document
    format: Format | None = None  # format of the files of --text or --pairs; None: by their content and their names
    on_unknown: Literal["error", "skip"] = "error"  # skip: leave out characters outside the vocabulary
    block_size: PositiveInt | None = None  # context in tokens; None: as in training, the maximum for learned positions
    stride: PositiveInt | None = None  # tokens from one context to the next; None: block_size, no overlap
    # --- tasks ---
    tasks: NonEmptyStr | None = None  # lm-eval's, such as hellaswag,arc_easy, or task files; pairs; music
    include_path: NonEmptyStr | None = None  # folder with more task files for lm-eval, to use by their names
    num_fewshot: NonNegativeInt | None = None  # solved examples in each prompt of lm-eval's tasks; None: the task's
    limit: PositiveInt | None = None  # examples or pairs per task, or pieces of music; None: all, or 200 pieces
    pairs: NonEmptyStr | None = None  # file of pairs, as for prepare/pairs.py; None: the validation set's
    stop: NonEmptyStr | None = None  # text before which an answer also ends; \n is a line break
    baseline: Literal["first_sentence"] | None = None  # also score a prompt's first sentence as its summary
    by: str = "target,kind"  # up to two fields of the pairs to group exact match by; missing fields are ignored
    answers: NonEmptyStr | None = None  # write (or overwrite) this .jsonl file of pairs with answers, or of pieces
    # --- models and output ---
    checkpoint: Literal["best", "last"] = "best"  # which checkpoint of a run
    device: str = "auto"  # "cpu", "cuda", "cuda:1", "mps"; auto: the first available of cuda, mps, cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"] = "auto"  # dtype of matmuls, or of weights
    json: str | None = None  # also write the results to this file

    def problems(self) -> list[tuple[str, str]]:
        problems, tasks = [], self.task_names
        if {*tasks} <= {*PACKAGES}:
            only = [name for name in ("include_path", "num_fewshot") if getattr(self, name) is not None]
            problems += [(name, "it needs a task of lm-eval, such as --tasks=hellaswag") for name in only]
        if self.include_path and not Path(self.include_path).is_dir():
            problems.append(("include_path", "it is not a folder"))
        pair_settings = [name for name in ("pairs", "stop", "baseline") if getattr(self, name)]
        problems += [(name, "it needs --tasks=pairs") for name in pair_settings if "pairs" not in tasks]
        if self.answers and not {"pairs", "music"} & {*tasks}:
            problems.append(("answers", "it needs --tasks=pairs or --tasks=music"))
        if self.pairs and self.dataset:
            problems.append(("pairs", "it cannot be combined with --dataset; give only one of them"))
        if len(self.group_fields) > 2:
            problems.append(("by", "give at most two fields, separated by a comma"))
        if self.split_on == "":
            problems.append(("split_on", "it must not be empty; None treats each file as one document"))
        if tasks and (self.text or (self.dataset and "pairs" not in tasks)):
            problems.append(("tasks", "it cannot be combined with --text or --dataset; give only one of them"))
        if self.limit and not tasks:
            problems.append(("limit", "it is the number of examples per task, so it needs --tasks"))
        return problems

    @property
    def task_names(self) -> list[str]:
        return comma_separated(self.tasks or "")

    @property
    def group_fields(self) -> list[str]:
        return comma_separated(self.by)


def name_problems(setting: str, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return a problem if a task is among the runs, as in: RUN --tasks pairs music."""
    tasks = [name for name in names if name in PACKAGES or Path(name).suffix in (".yaml", ".yml")]
    return [(setting, f"{tasks[0]} is a task; separate tasks by commas: --tasks={','.join(PACKAGES)}")] if tasks else []


class LoadedModel(NamedTuple):
    """A model to measure."""

    saved: Checkpoint
    runtime: Runtime
    unquantized: GPT
    model: GPT  # unquantized, or a copy with weights rounded to int8 or int4


def load_model(run: str, cfg: MeasurementConfig) -> LoadedModel:
    """Load the model of a run to the device. Raises UserError if block_size or stride exceeds its context."""
    saved = foreign.load(run, cfg.checkpoint)
    runtime = resolve_runtime(cfg.device, "float32" if cfg.dtype in QUANTIZED else cfg.dtype, False)
    if not cfg.tasks:  # texts are divided among workers
        T, C = saved.config().block_size, saved.config().n_embd
        runtime = with_workers(runtime, None, max(1, BATCH_TOKENS // T), T * C)
    note(f"{saved.path}: {runtime.description}")
    model = saved.build().eval().to(runtime.device)
    adapt(model, runtime)
    if cfg.block_size:
        try:
            crop_block_size(model, cfg.block_size)
        except ValueError as error:
            raise UserError(f"{run}: --{error}; use --block_size={model.config.block_size} or less") from None
    if cfg.stride and cfg.stride > model.config.block_size:
        raise UserError(f"--stride={cfg.stride}: it must not exceed the context of {model.config.block_size} tokens")
    return LoadedModel(saved, runtime, model, quantized(model, cfg.dtype) if cfg.dtype in QUANTIZED else model)


def evaluate_model(
    run: str, cfg: MeasurementConfig, context: int | None = None, temperature: float = 1.0
) -> Evaluation:
    """Measure one model on the texts or tasks of the settings. Raises UserError.

    context: measure the loss by position, up to `context` tokens. temperature: for generating pieces of music.
    """
    for task in cfg.task_names:
        require(f"--tasks={task}", *PACKAGES.get(task, ("lm_eval",)))
    benchmarks = load_benchmarks(cfg)
    loaded, evaluation = load_model(run, cfg), Evaluation(run)
    make_generator = partial(LanguageModel, loaded.unquantized, loaded.saved.tokenizer, cfg.device, cfg.dtype)
    for task in cfg.task_names:
        if task in benchmarks:
            from folio.evaluation.benchmarks import HarnessModel, evaluate_benchmark

            model = HarnessModel(loaded.model, loaded.saved.tokenizer, loaded.runtime, make_generator)
            evaluate_benchmark(evaluation, model, benchmarks[task], cfg.limit)
            continue
        generator = make_generator()
        if task == "music":
            evaluate_music(evaluation, generator, loaded.saved, cfg.data_dir, cfg.limit or PIECES, temperature)
            continue
        for source, pairs, dataset in open_pair_sources(loaded.saved, cfg):
            pairs, stop = pairs[: cfg.limit], cfg.stop and line_breaks(cfg.stop)
            evaluate_pairs(evaluation, generator, source, pairs, stop, cfg.group_fields)
            text = open_pairs(source, pairs, evaluation.coverage[source], generator.tokenizer, dataset)
            evaluation.coverage[source] = search_training_data(text, run, loaded.saved, cfg.data_dir)
    for text in [] if cfg.tasks else open_texts(loaded.saved, cfg):
        evaluation.coverage[text.name] = search_training_data(text, run, loaded.saved, cfg.data_dir)
        if context:
            losses = measure_positions(loaded.model, loaded.runtime, text.name, text.streams, context)
            evaluation.positions.append(losses)
        else:
            evaluate_text(evaluation, loaded, text, cfg)
    return evaluation


def load_benchmarks(cfg: MeasurementConfig) -> dict[str, Any]:
    """Load the tasks of lm-eval, by their names in --tasks. Raises UserError."""
    names = [name for name in cfg.task_names if name not in PACKAGES]
    if not names:
        return {}
    from folio.evaluation.benchmarks import load_benchmark

    return {name: load_benchmark(name, cfg.include_path, cfg.num_fewshot) for name in names}


def evaluate_text(evaluation: Evaluation, loaded: LoadedModel, text: EvaluatedText, cfg: MeasurementConfig) -> None:
    """Add the loss of a text. For quantized weights, print how much they change it."""
    stride = cfg.stride or loaded.model.config.block_size
    arguments = loaded.saved.tokenizer, loaded.runtime, text.name, text.streams, stride
    measures = measure_text(loaded.model, *arguments)
    evaluation.measures += measures
    if text.dataset and text.coverage.bytes:
        evaluation.datasets[text.name] = text.dataset
    if cfg.dtype in QUANTIZED:
        baseline = measure_text(loaded.unquantized, *arguments)[0].ratio
        shift = f"{measures[0].ratio - baseline:+.4f} nats from {baseline:.4f}"
        note(f"{text.name}: weights in {cfg.dtype} change the loss by {shift}")


def open_texts(saved: Checkpoint, cfg: MeasurementConfig) -> list[EvaluatedText]:
    """Open the text of --text, or the validation sets. Raises UserError if their tokenizer is not the model's."""
    if cfg.text:
        files = split_paths(cfg.text)
        return [open_files(files, cfg.field, cfg.split_on, saved.tokenizer, cfg.format, cfg.on_unknown)]
    datasets = open_datasets(saved, cfg.dataset, cfg.data_dir, "--text")
    return [open_validation_set(dataset, saved) for dataset in datasets]


def open_pair_sources(saved: Checkpoint, cfg: MeasurementConfig) -> list[tuple[str, list[Pair], Dataset | None]]:
    """Read the pairs of --pairs, or of the validation sets: name, pairs, and data set. Raises UserError without any."""
    if cfg.pairs:
        return [(f"pairs of {cfg.pairs}", read_pairs(cfg.pairs, cfg.format), None)]
    datasets = open_datasets(saved, cfg.dataset, cfg.data_dir, "--pairs")
    return [(f"pairs of {d.folder.name}, validation", validation_pairs(d), d) for d in datasets]


def write_results(cfg: MeasurementConfig, models: Sequence[Evaluation], results: dict[str, Any]) -> None:
    """Write the models' answers to --answers and the results to --json, if given."""
    if cfg.answers:
        write_pairs(Path(cfg.answers), (row for model in models for row in model.answers))
    if cfg.json:
        write_json(Path(cfg.json), results)
