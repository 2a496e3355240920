"""Evaluate trained models, with confidence intervals.

    python tools/evaluate.py out-shakespeare-char
    python tools/evaluate.py gpt2 gpt2-medium --text=novel.txt --stride=512
    python tools/evaluate.py out-learned out-rotary --context=512               by position, also beyond block_size
    python tools/evaluate.py gpt2 --tasks=lambada,hellaswag --limit=1000
    python tools/evaluate.py out-translate --tasks=pairs                        answers to held-out prompts
    python tools/evaluate.py out-summarize --tasks=pairs --baseline=first_sentence
    python tools/evaluate.py out-chorales --tasks=music                         generated and held-out pieces
    python tools/evaluate.py compare out-a out-b                                two checkpoints
    python tools/evaluate.py compare out-a1,out-a2,out-a3 out-b1,out-b2,out-b3  two settings, with three seeds each

On text (the validation set of the run's data, or --text): loss, perplexity and bits per byte; or, with --context=N, the
loss by the number of tokens before the predicted one, in windows of N + 1 consecutive tokens. On LAMBADA: how often
greedy decoding gives the last word of a passage, and the perplexity of that word. On HellaSwag: how often the correct
one of four endings is the likeliest, by its total log-likelihood (acc) and by that per byte (acc_norm). On pairs of
prompts and completions (those for validation in the run's data set, or --pairs): how often greedy decoding gives the
completion, and chrF, BLEU, and ROUGE. On music: how many of 200 generated pieces parse, how well they keep meter and
key, how far their intervals and durations are from those of held-out pieces, and how much they copy.

The 95 % intervals use Student's t over documents, or over blocks of a text that has too few documents, or over the
windows of --context. They say how far the value of a checkpoint would move on other text of the same kind, and nothing
about other training seeds. `compare` takes the difference of two checkpoints document by document. With several runs
per side (separated by commas, or a quoted pattern: "out-a*"), it compares the settings: a t-test over runs that were
trained with different seeds.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import folio.machine.openmp  # noqa: E402, F401  # isort: skip  (before torch)
from folio import UserError  # noqa: E402
from folio.base.commands import command  # noqa: E402
from folio.base.files import write_json  # noqa: E402
from folio.base.progress import note  # noqa: E402
from folio.base.settings import (  # noqa: E402
    ConfigError,
    NonEmptyStr,
    NonNegativeFloat,
    PositiveInt,
    Settings,
    comma_separated,
    line_breaks,
    load,
    run_script,
    split_paths,
)
from folio.checkpoints import foreign  # noqa: E402
from folio.checkpoints.checkpoint import Checkpoint  # noqa: E402
from folio.checkpoints.find_runs import expand_runs  # noqa: E402
from folio.data.sources.pairs import read_pairs, write_pairs  # noqa: E402
from folio.decoding.language_model import QUANTIZED, LanguageModel  # noqa: E402
from folio.decoding.quantize import quantized  # noqa: E402
from folio.evaluation.answers import evaluate_baseline, evaluate_pairs  # noqa: E402
from folio.evaluation.benchmarks import TASKS, score_endings  # noqa: E402
from folio.evaluation.comparison import choose_design, choose_sides, compare  # noqa: E402
from folio.evaluation.music_measures import PIECES, evaluate_music  # noqa: E402
from folio.evaluation.overlap import search_training_data  # noqa: E402
from folio.evaluation.scores import Evaluation, collect_results, read_characters  # noqa: E402
from folio.evaluation.tables import format_results  # noqa: E402
from folio.evaluation.text_loss import measure_positions, measure_text  # noqa: E402
from folio.evaluation.texts import (  # noqa: E402
    EvaluatedText,
    open_datasets,
    open_files,
    open_pairs,
    open_validation_set,
)
from folio.machine.kernels import adapt  # noqa: E402
from folio.machine.runtime import resolve_runtime  # noqa: E402

GENERATING = ("pairs", "music")  # tasks for which a model generates text


@dataclass(frozen=True)
class EvaluateConfig(Settings):
    # --- models ---
    runs: tuple[str, ...] = ()  # runs ("out-*", latest), or what --init_from takes; after compare, if any
    checkpoint: Literal["best", "last"] = "best"  # of a run
    # --- text ---
    dataset: NonEmptyStr | None = None  # evaluate on its validation set; None: the data set of the training run
    data_dir: str | None = None  # folder of the data sets; None: as in training
    text: NonEmptyStr | None = None  # text files or folders, separated by commas, instead of a validation set
    split_on: str | None = None  # separator of the documents in --text; \n is a line break; None: one per file
    field: str = "text"  # the field of JSON lines, or the column of rows, that contains the document
    on_unknown: Literal["error", "skip"] = "error"  # skip: leave out characters that are not in the vocabulary
    block_size: PositiveInt | None = None  # tokens of context; None: as in training; learned positions have no more
    stride: PositiveInt | None = None  # tokens from one context to the next; None: the whole context
    context: PositiveInt | None = None  # measure the loss by position, up to this many tokens of context
    # --- tasks ---
    tasks: NonEmptyStr | None = None  # lambada, hellaswag, pairs, music, separated by commas; instead of a text
    limit: PositiveInt | None = None  # questions or pairs per task, or pieces of music; None: all, or 200 pieces
    pairs: NonEmptyStr | None = None  # a .jsonl file of prompts and completions; None: those of the validation set
    stop: NonEmptyStr | None = None  # text at which an answer to a prompt also ends; \n is a line break
    baseline: Literal["first_sentence"] | None = None  # also score the first sentence as the summary
    by: str = "target,kind"  # at most two fields of the pairs to group exact match by; fields they lack are ignored
    answers: NonEmptyStr | None = None  # also write the pairs with the answers, or the pieces, to this .jsonl file
    temperature: NonNegativeFloat = 1.0  # of generated pieces of music
    # --- machine and output ---
    device: str = "auto"  # "cpu", "cuda", "cuda:1", "mps"; auto: the first available of cuda, mps, cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"] = "auto"  # of matmuls, or of weights
    json: str | None = None  # also write the results to this file

    def problems(self) -> list[tuple[str, str]]:
        problems = []
        if not self.runs:
            problems.append(("runs", "name a run, or: compare RUN RUN"))
        known, tasks = (*TASKS, *GENERATING), comma_separated(self.tasks or "")
        if named := [run for run in self.runs if run in known]:
            problems.append(("runs", f"{named[0]} is a task; separate tasks by commas: --tasks={','.join(TASKS)}"))
        if unknown := [task for task in tasks if task not in known]:
            problems.append(("tasks", f"{unknown[0]} is not a task; the tasks are {', '.join(known)}"))
        of_pairs = [name for name in ("pairs", "stop", "baseline") if getattr(self, name)]
        problems += [(name, "it needs --tasks=pairs") for name in of_pairs if "pairs" not in tasks]
        if self.answers and not {*GENERATING} & {*tasks}:
            problems.append(("answers", "it needs --tasks=pairs or --tasks=music"))
        if self.is_set("temperature") and "music" not in tasks:
            problems.append(("temperature", "it needs --tasks=music"))
        if self.compares and "music" in tasks:
            problems.append(("tasks", "music is not compared: evaluate each run, and compare it with held-out pieces"))
        if self.pairs and self.dataset:
            problems.append(("pairs", "it cannot be combined with --dataset; give only one of them"))
        if len(comma_separated(self.by)) > 2:
            problems.append(("by", "give at most two fields, separated by a comma"))
        if self.split_on == "":
            problems.append(("split_on", "it must not be empty; None takes each file as one document"))
        if self.tasks and (self.text or (self.dataset and "pairs" not in tasks)):
            problems.append(("tasks", "it cannot be combined with --text or --dataset; give only one of them"))
        if self.limit and not self.tasks:
            problems.append(("limit", "it is the number of questions per task, and no --tasks are given"))
        if self.context and (self.tasks or self.stride or self.block_size or self.compares):
            problems.append(("context", "it cannot be combined with --tasks, --stride, --block_size, or compare"))
        return problems

    @property
    def compares(self) -> bool:
        return self.runs[:1] == ("compare",)


def main(cfg: EvaluateConfig) -> None:
    design = choose_design(choose_sides(cfg.runs[1:]), cfg.checkpoint) if cfg.compares else None
    sides = design.sides if design else [[run] for run in expand_runs(cfg.runs)]
    evaluations = [[evaluate(run, cfg) for run in side] for side in sides]
    models = [model for side in evaluations for model in side]
    if cfg.baseline:
        models.append(evaluate_baseline(cfg.baseline, models, comma_separated(cfg.by)))
    results = collect_results(models)
    print(format_results(models, results))
    if design:
        results |= {"sides": sides, "comparisons": compare(evaluations, design)}
        print("\n".join(["", *design.lines, *(comparison["sentence"] for comparison in results["comparisons"])]))
    if cfg.answers:
        write_pairs(Path(cfg.answers), (row for model in models for row in model.answers))
    if cfg.json:
        write_json(Path(cfg.json), results)


def evaluate(run: str, cfg: EvaluateConfig) -> Evaluation:
    """Measure one model on all texts or tasks that the settings ask for."""
    saved = foreign.load(run, cfg.checkpoint)
    tokenizer = saved.tokenizer
    tokenizer.on_unknown = "skip" if cfg.tasks else cfg.on_unknown
    is_quantized = cfg.dtype in QUANTIZED
    runtime = resolve_runtime(cfg.device, "float32" if is_quantized else cfg.dtype, False)
    note(f"{saved.path}: {runtime.description}")
    model = saved.build().eval().to(runtime.device)
    adapt(model, runtime)
    if cfg.block_size:
        try:
            model.crop_block_size(cfg.block_size)
        except ValueError as error:
            raise UserError(f"{run}: --{error}; use --block_size={model.config.block_size} or less") from None
    stride = cfg.stride or model.config.block_size
    if stride > model.config.block_size:
        raise UserError(f"--stride={stride}: it must not exceed the context of {model.config.block_size} tokens")
    as_saved = model
    if is_quantized:
        model = quantized(model, cfg.dtype)
    evaluation = Evaluation(run)
    for name in comma_separated(cfg.tasks or ""):
        if name in GENERATING:
            generating = LanguageModel(as_saved, tokenizer, cfg.device, cfg.dtype)
            evaluate_task(name, evaluation, generating, saved, cfg)
            continue
        questions = TASKS[name].questions()[: cfg.limit]
        texts = (text for question in questions for text in (question.context, *question.endings))
        evaluation.readings[name] = read_characters(texts, tokenizer)
        scores = score_endings(model, tokenizer, runtime, name, questions)
        evaluation.measures += TASKS[name].measures(questions, scores)
    for text in [] if cfg.tasks else open_texts(saved, cfg):
        evaluation.readings[text.name] = text.reading
        if not text.dataset or cfg.dataset:  # not the run's own validation set
            evaluation.readings[text.name] = search_training_data(text, run, saved, cfg.data_dir)
        if cfg.context:
            positions = measure_positions(model, runtime, text.name, text.streams, cfg.context)
            evaluation.positions.append(positions)
        else:
            measures = measure_text(model, tokenizer, runtime, text.name, text.streams, stride)
            if is_quantized:
                before = measure_text(as_saved, tokenizer, runtime, text.name, text.streams, stride)[0].ratio
                shift = f"{measures[0].ratio - before:+.4f} nats from {before:.4f}"
                note(f"{text.name}: weights in {cfg.dtype} change the loss by {shift}")
            evaluation.measures += measures
    return evaluation


def evaluate_task(
    name: str, evaluation: Evaluation, model: LanguageModel, saved: Checkpoint, cfg: EvaluateConfig
) -> None:
    """Add what is measured of text that the model generates for a task. Raises UserError."""
    if name == "music":
        evaluate_music(evaluation, model, saved, cfg.data_dir, cfg.limit or PIECES, cfg.temperature)
        return
    if cfg.pairs:
        sources = {f"pairs of {cfg.pairs}": read_pairs(cfg.pairs)}
    else:
        sources = open_pairs(open_datasets(saved, cfg.dataset, cfg.data_dir, "--pairs"))
    for source, pairs in sources.items():
        stop = cfg.stop and line_breaks(cfg.stop)
        evaluate_pairs(evaluation, model, source, pairs[: cfg.limit], stop, comma_separated(cfg.by))


def open_texts(saved: Checkpoint, cfg: EvaluateConfig) -> list[EvaluatedText]:
    """The text of --text, or the validation sets. Raises UserError if their tokenizer is not the model's."""
    if cfg.text:
        return [open_files(split_paths(cfg.text), cfg.field, cfg.split_on, saved.tokenizer)]
    datasets = open_datasets(saved, cfg.dataset, cfg.data_dir, "--text")
    return [open_validation_set(dataset, saved) for dataset in datasets]


def run(argv: list[str]) -> None:
    """Call main with the settings in `argv`. Raises ConfigError for what is another script now."""
    if argv[:1] == ["memorized"]:
        raise ConfigError(f"{argv[0]} is a script of its own; use {command(f'tools/{argv[0]}.py', *argv[1:])}")
    main(load(EvaluateConfig, argv))


if __name__ == "__main__":
    run_script(run)
