"""Evaluate trained models, with confidence intervals.

    python tools/evaluate.py out-shakespeare-char
    python tools/evaluate.py gpt2 gpt2-medium --text=novel.txt --stride=512
    python tools/evaluate.py out-learned out-rotary --context=512               by position, also beyond block_size
    python tools/evaluate.py gpt2 --tasks=lambada,hellaswag --limit=1000
    python tools/evaluate.py out-translate --tasks=pairs                        answers to held-out prompts
    python tools/evaluate.py out-summarize --tasks=pairs --baseline=first_sentence
    python tools/evaluate.py out-chorales --tasks=music                         generated and held-out pieces
    python tools/evaluate.py memorized out-shakespeare-char                     verbatim training data
    python tools/evaluate.py compare out-a out-b                                two checkpoints
    python tools/evaluate.py compare out-a1,out-a2,out-a3 out-b1,out-b2,out-b3  two settings, with three seeds each

On text (the validation set of the run's data, or --text): loss, perplexity and bits per byte; or, with --context=N, the
loss by the number of tokens before the predicted one, in windows of N + 1 consecutive tokens. On LAMBADA: how often
greedy decoding gives the last word of a passage, and the perplexity of that word. On HellaSwag: how often the correct
one of four endings is the likeliest, by its total log-likelihood (acc) and by that per byte (acc_norm). On pairs of
prompts and completions (those for validation in the run's data set, or --pairs): how often greedy decoding gives the
completion, and chrF, BLEU, and ROUGE. On music: how many of 200 generated pieces parse, how well they keep meter and
key, how far their intervals and durations are from those of held-out pieces, and how much they copy.

`memorized` looks for training data in text that the model generates, and counts how many passages of the training data
it completes exactly from their first 50 tokens.

The 95 % intervals use Student's t over documents, or over blocks of a text that has too few documents, or over the
windows of --context. They say how far the value of a checkpoint would move on other text of the same kind, and nothing
about other training seeds. `compare` takes the difference of two checkpoints document by document. With several runs
per side (separated by commas, or a quoted pattern: "out-a*"), it compares the settings: a t-test over runs that were
trained with different seeds.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import folio.machine.openmp  # noqa: E402, F401  # isort: skip  (before torch)
from folio import UserError  # noqa: E402
from folio.base.files import write_json  # noqa: E402
from folio.base.progress import note  # noqa: E402
from folio.base.settings import (  # noqa: E402
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Settings,
    comma_separated,
    line_breaks,
    run_script,
)
from folio.checkpoints import foreign  # noqa: E402
from folio.checkpoints.checkpoint import Checkpoint  # noqa: E402
from folio.checkpoints.find_runs import find_runs  # noqa: E402
from folio.data.blocks import texts_of  # noqa: E402
from folio.data.corpus import Corpus, find_sources  # noqa: E402
from folio.data.find_data import find_datasets  # noqa: E402
from folio.data.shards import Dataset  # noqa: E402
from folio.data.sources.music import EventFormat  # noqa: E402
from folio.data.sources.pairs import Pair, read_pairs, validation_pairs, write_pairs  # noqa: E402
from folio.data.tokenizer import MidiTokenizer  # noqa: E402
from folio.decoding.language_model import QUANTIZED, GenerationConfig, LanguageModel  # noqa: E402
from folio.decoding.quantize import quantized  # noqa: E402
from folio.evaluation.answers import BASELINES, answer_pairs, group_rows, measure_answers  # noqa: E402
from folio.evaluation.benchmarks import TASKS, score_endings  # noqa: E402
from folio.evaluation.comparison import choose_design, compare  # noqa: E402
from folio.evaluation.extraction import describe_reproduction, measure_reproduction  # noqa: E402
from folio.evaluation.memorization import TrainingIndex  # noqa: E402
from folio.evaluation.music_measures import (  # noqa: E402
    distance_rows,
    generate_pieces,
    longest_copied,
    longest_row,
    measure_copied,
    measure_pieces,
    piece_of_events,
    piece_of_tune,
    pieces_of,
)
from folio.evaluation.overlap import PROBE_TOKENS, SEARCHED_BYTES, choose_probes, count_matches, open_training_data  # noqa: E402
from folio.evaluation.scores import Evaluation, PositionLoss, Reading, read_characters  # noqa: E402
from folio.evaluation.text_loss import (  # noqa: E402
    Stream,
    corpus_stream,
    measure_positions,
    measure_text,
    shard_streams,
    token_sizes,
)
from folio.machine.kernels import adapt  # noqa: E402
from folio.machine.runtime import resolve_runtime  # noqa: E402

PIECES = 200  # of music to generate, and at most to compare them with


@dataclass(frozen=True)
class EvaluateConfig(Settings):
    # --- models ---
    runs: tuple[str, ...] = ()  # runs ("out-*", latest), or what --init_from takes; after memorized or compare, if any
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
    # --- generated text ---
    temperature: NonNegativeFloat | None = None  # None: 1 for pieces of music, and that of sample.py for memorized
    samples: PositiveInt = 1000  # texts for memorized
    max_new_tokens: PositiveInt = 200  # per sample, at most
    span: PositiveInt | None = None  # also count tokens in spans of training data of at least this length
    seed: NonNegativeInt = 1337  # of the samples
    # --- machine and output ---
    device: str = "auto"  # "cpu", "cuda", "cuda:1", "mps"; auto: the first available of cuda, mps, cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"] = "auto"  # of matmuls, or of weights
    json: str | None = None  # also write the results to this file

    def problems(self) -> list[tuple[str, str]]:
        problems = []
        if not self.runs:
            problems.append(("runs", "name a run, or: compare RUN RUN"))
        known, tasks = (*TASKS, *GENERATING), split_list(self.tasks or "")
        if named := [run for run in self.runs if run in known]:
            problems.append(("runs", f"{named[0]} is a task; separate tasks by commas: --tasks={','.join(TASKS)}"))
        if unknown := [task for task in tasks if task not in known]:
            problems.append(("tasks", f"{unknown[0]} is not a task; the tasks are {', '.join(known)}"))
        of_pairs = [name for name in ("pairs", "stop", "baseline") if getattr(self, name)]
        problems += [(name, "it needs --tasks=pairs") for name in of_pairs if "pairs" not in tasks]
        if self.answers and not GENERATING.keys() & set(tasks):
            problems.append(("answers", "it needs --tasks=pairs or --tasks=music"))
        if self.is_set("temperature") and "music" not in tasks and not self.memorized:
            problems.append(("temperature", "it needs --tasks=music, or: memorized RUN"))
        problems += self.problems_of_memorized()
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

    def problems_of_memorized(self) -> list[tuple[str, str]]:
        if not self.memorized:
            names = ("samples", "max_new_tokens", "span", "seed")
            return [(name, "it needs: memorized RUN") for name in names if self.is_set(name)]
        others = ("dataset", "text", "split_on", "block_size", "stride", "context", "tasks")
        problems = [(name, "it cannot be combined with memorized") for name in others if self.is_set(name)]
        if len(self.runs) == 1:
            problems.append(("runs", "name the run, as in: memorized RUN"))
        if self.span and self.span > self.max_new_tokens:
            rule = f"a sample has only {self.max_new_tokens} tokens; set a smaller --span or a larger --max_new_tokens"
            problems.append(("span", rule))
        return problems

    @property
    def compares(self) -> bool:
        return self.runs[:1] == ("compare",)

    @property
    def memorized(self) -> bool:
        return self.runs[:1] == ("memorized",)


def split_list(value: str) -> list[str]:
    """The parts of a list that is separated by commas. The name of an existing file or folder is one part."""
    return [value] if os.path.exists(value) else comma_separated(value)


def expand(runs: str) -> list[str]:
    """The runs that are separated by commas or match a pattern. Raises UserError."""
    return [run for name in split_list(runs) for run in find_runs(name)]


def main(cfg: EvaluateConfig) -> None:
    if cfg.memorized:
        measure_memorized(cfg)
        return
    design = choose_design(choose_sides(cfg), cfg.checkpoint) if cfg.compares else None
    sides = design.sides if design else [[run] for name in cfg.runs for run in expand(name)]
    evaluations = [[evaluate(run, cfg) for run in side] for side in sides]
    models = [model for side in evaluations for model in side]
    if cfg.baseline:
        models.append(evaluate_baseline(models, cfg))
    results: dict[str, Any] = {"results": [row for model in models for row in model.rows()]}
    if cfg.context:
        results["curves"] = [curve for model in models for curve in model.curves()]
    if signatures := {name: text for model in models for name, text in model.signatures.items()}:
        results |= {"signatures": signatures, "groups": [row for model in models for row in model.groups]}
    table = format_positions(models) if cfg.context else format_table(results["results"])
    print("\n".join([table, *(line for model in models for line in left_out_lines(model))]))
    for name, signature in signatures.items():
        print(f"{name}: sacrebleu {signature}")
    for grouped in format_groups(results.get("groups", [])):
        print(f"\n{grouped}")
    if design:
        results |= {"sides": sides, "comparisons": compare(evaluations, design)}
        print("\n".join(["", *design.lines, *(comparison["sentence"] for comparison in results["comparisons"])]))
    if cfg.answers:
        write_pairs(Path(cfg.answers), (row for model in models for row in model.answers))
    if cfg.json:
        write_json(Path(cfg.json), results)


def choose_sides(cfg: EvaluateConfig) -> list[list[str]]:
    """The runs of both sides of a comparison. Raises UserError if they cannot be compared."""
    if len(cfg.runs) != 3:
        raise UserError(
            f"compare takes two sides, and {len(cfg.runs) - 1} were given: separate the runs of one side by commas, or "
            f'name them by a quoted pattern, as in compare "out-a*" "out-b*"'
        )
    sides = [expand(side) for side in cfg.runs[1:]]
    other_side = [os.path.realpath(run) for run in sides[1]]
    if common := [run for run in sides[0] if os.path.realpath(run) in other_side]:
        raise UserError(
            f"compare {cfg.runs[1]} {cfg.runs[2]}: {common[0]} is on both sides; give each side runs of its own"
        )
    sizes = [len(side) for side in sides]
    if 1 in sizes and sizes != [1, 1]:
        raise UserError(
            f"compare {cfg.runs[1]} {cfg.runs[2]}: the sides have {sizes[0]} and {sizes[1]} runs; give one run per "
            f"side to compare two checkpoints, or several runs per side, separated by commas, to compare settings"
        )
    return sides


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
    for name in split_list(cfg.tasks or ""):
        if name in GENERATING:
            GENERATING[name](evaluation, LanguageModel(as_saved, tokenizer, cfg.device, cfg.dtype), saved, cfg)
            continue
        questions = TASKS[name].questions()[: cfg.limit]
        texts = (text for question in questions for text in (question.context, *question.endings))
        evaluation.readings[name] = read_characters(texts, tokenizer)
        scores = score_endings(model, tokenizer, runtime, name, questions)
        evaluation.measures += TASKS[name].measures(questions, scores)
    for text in [] if cfg.tasks else open_texts(saved, cfg):
        evaluation.readings[text.name] = search_training_data(text, run, saved, cfg)
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


def evaluate_pairs(evaluation: Evaluation, model: LanguageModel, saved: Checkpoint, cfg: EvaluateConfig) -> None:
    """Add what is measured of the model's answers to prompts. Raises UserError if there are no pairs."""
    for name, pairs in open_pairs(saved, cfg).items():
        pairs = pairs[: cfg.limit]
        texts = [text for pair in pairs for text in pair[:2]]
        size = sum(len(text.encode("utf-8", "replace")) for text in texts)
        evaluation.readings[name] = replace(read_characters(texts, model.tokenizer), bytes=size)
        answers = answer_pairs(model, name, pairs, cfg.stop and line_breaks(cfg.stop))
        add_answers(evaluation, name, pairs, answers, cfg)


def evaluate_baseline(models: Sequence[Evaluation], cfg: EvaluateConfig) -> Evaluation:
    """What is measured of answers that need no model, to the pairs that the models answered."""
    evaluation = Evaluation(cfg.baseline)
    for name, pairs in {name: pairs for model in models for name, pairs in model.pairs.items()}.items():
        evaluation.readings[name] = Reading()
        add_answers(evaluation, name, pairs, [BASELINES[cfg.baseline](pair.prompt) for pair in pairs], cfg)
    return evaluation


def add_answers(
    evaluation: Evaluation, name: str, pairs: list[Pair], answers: Sequence[str], cfg: EvaluateConfig
) -> None:
    """Add what is measured of answers to the pairs of one source."""
    measures, evaluation.signatures = measure_answers(name, pairs, answers)
    evaluation.measures += measures
    evaluation.pairs[name] = pairs
    about = {"run": evaluation.run, "of": name}
    evaluation.groups += [about | row for row in group_rows(name, pairs, answers, comma_separated(cfg.by))]
    evaluation.answers += [about | pair.fields | {"answer": text} for pair, text in zip(pairs, answers, strict=True)]


def evaluate_music(evaluation: Evaluation, model: LanguageModel, saved: Checkpoint, cfg: EvaluateConfig) -> None:
    """Add what is measured of pieces that the model generates and, as the scale, of held-out pieces.

    Raises UserError if the model was not trained on music.
    """
    tokenizer, limit = model.tokenizer, cfg.limit or PIECES
    read, meter = piece_of_tune, "bars as long as the meter"
    if isinstance(tokenizer, MidiTokenizer):
        read, meter = partial(piece_of_events, format=EventFormat.of(tokenizer)), "notes on a beat"
    if tokenizer.eot is None:
        raise UserError(f"{saved.path} does not generate pieces of music: its tokenizer has no end-of-text token")
    training = open_training_data(saved, cfg.data_dir)
    held_out = [tokenizer.decode(ids) for of in training for ids in pieces_of(of.val, tokenizer.eot, limit)]
    trained_on = [tokenizer.decode(ids) for of in training for ids in pieces_of(of.train, tokenizer.eot, limit)]
    real = [read(text) for text in held_out]
    if not any(piece.parses for piece in real):
        raise UserError(f"{saved.path} does not generate music: no held-out document parses as ABC notation")
    most = 2 * max(len(tokenizer.encode(text)) for text in held_out)
    texts = generate_pieces(model, limit, most, 1.0 if cfg.temperature is None else cfg.temperature)
    pieces, index = [read(text) for text in texts], TrainingIndex(training, tokenizer.eot)
    for name, written, measured in (("generated", texts, pieces), ("held out", held_out, real)):
        evaluation.readings[name] = Reading()
        copied = [longest_copied(index, tokenizer.encode(text)) for text in written]
        evaluation.measures += [*measure_pieces(name, measured, meter), *measure_copied(name, copied)]
        evaluation.more_rows.append(longest_row(name, copied))
    names = [measure.name for measure in evaluation.measures]
    evaluation.measures.sort(key=lambda measure: names.index(measure.name))  # generated and held out side by side
    evaluation.readings["training"] = Reading()
    sets = {"generated": pieces, "training": [read(text) for text in trained_on]}
    evaluation.more_rows += distance_rows(sets, real)
    evaluation.answers += [{"run": evaluation.run, "of": "generated", "piece": text} for text in texts]


def measure_memorized(cfg: EvaluateConfig) -> None:
    """Print what each run reproduces of its training data."""
    facts = []
    for run in [run for name in cfg.runs[1:] for run in expand(name)]:
        saved = foreign.load(run, cfg.checkpoint)
        if cfg.dtype in QUANTIZED:  # whose decoder has no weights for the passages, which are read without decoding
            model = LanguageModel(quantized(saved.build(), cfg.dtype), saved.tokenizer, cfg.device, "float32")
        else:
            model = LanguageModel(saved.build(), saved.tokenizer, cfg.device, cfg.dtype)
        note(f"{saved.path}: {model.runtime.description}")
        config = GenerationConfig(max_new_tokens=cfg.max_new_tokens, seed=cfg.seed)
        if cfg.temperature is not None:
            config = replace(config, temperature=cfg.temperature)
        try:
            datasets = open_training_data(saved, cfg.data_dir)
            facts.append({"run": run, **measure_reproduction(model, datasets, cfg.samples, config, cfg.span)})
        except UserError as error:
            raise UserError(f"{saved.path}: {error}") from None
        print(describe_reproduction(facts[-1]))
        if (base := saved.state["config"]["init_from"]) not in ("scratch", "resume"):
            print(f"The training data of {base}, from which {run} started, is not known, and was not searched.")
    if cfg.json:
        write_json(Path(cfg.json), {"memorized": facts})


# tasks for which a model generates text
GENERATING = {"pairs": evaluate_pairs, "music": evaluate_music}


def open_pairs(saved: Checkpoint, cfg: EvaluateConfig) -> dict[str, list[Pair]]:
    """The pairs of --pairs, or of the validation sets, by the name of their source. Raises UserError."""
    if cfg.pairs:
        return {f"pairs of {cfg.pairs}": read_pairs(cfg.pairs)}
    return {f"pairs of {d.folder.name}, validation": validation_pairs(d) for d in open_datasets(saved, cfg, "--pairs")}


def open_datasets(saved: Checkpoint, cfg: EvaluateConfig, instead: str) -> list[Dataset]:
    """The data sets of --dataset, or those of the training run. Raises UserError.

    instead: the option that names a file, for an error.
    """
    config = saved.state.get("config", {})
    names, data_dir = cfg.dataset or config.get("dataset"), cfg.data_dir or config.get("data_dir")
    if not names:
        raise UserError(f"{saved.path} does not record what it was trained on: give a --dataset or a {instead}")
    return [dataset for dataset, _ in find_datasets(names, data_dir)]


class Text(NamedTuple):
    """A text to evaluate a model on."""

    name: str
    streams: list[Stream]
    reading: Reading
    dataset: Dataset | None = None  # whose validation set it is


def open_texts(saved: Checkpoint, cfg: EvaluateConfig) -> list[Text]:
    """The text of --text, or the validation sets. Raises UserError if their tokenizer is not the model's."""
    if cfg.text:
        files = split_list(cfg.text)
        corpus = Corpus(find_sources(files), field=cfg.field, split_on=cfg.split_on and line_breaks(cfg.split_on))
        stream = corpus_stream(corpus, saved.tokenizer)
        texts = (text for block in corpus.blocks() for text in texts_of(block))
        return [Text(", ".join(files), [stream], read_characters(texts, saved.tokenizer))]
    texts = []
    for dataset in open_datasets(saved, cfg, "--text"):
        if dataset.load_tokenizer().hash != saved.tokenizer.hash:
            raise UserError(
                f"{dataset.folder} was prepared with a different tokenizer than {saved.path}: give a --text instead"
            )
        streams = shard_streams(dataset.val, saved.tokenizer)
        reading = Reading(bytes=sum(int(token_sizes(saved.tokenizer)[stream.ids].sum()) for stream in streams))
        texts.append(Text(f"{dataset.folder.name}, validation", streams, reading, dataset))
    return texts


def search_training_data(text: Text, run: str, saved: Checkpoint, cfg: EvaluateConfig) -> Reading:
    """Look up passages of a text in the run's training data, unless it is the run's own validation set.

    Prints a line if any are found, or if the text could not be looked up.
    """
    if text.dataset and not cfg.dataset:
        return text.reading
    try:
        training = open_training_data(saved, cfg.data_dir)
        if text.dataset and text.dataset.hash in [dataset.hash for dataset in training]:
            return text.reading
        ids, document = (np.concatenate([getattr(s, name) for s in text.streams]) for name in ("ids", "document"))
        if not (probes := choose_probes(ids, document)):
            raise UserError(f"no document has more than {PROBE_TOKENS} tokens")
    except UserError as error:
        note(f"{text.name}: could not check whether {run} was trained on this text: {error}")
        return text.reading
    matches, complete = count_matches(probes, training)
    where = f"the training data of {run}"
    if not complete:
        where = f"the first {SEARCHED_BYTES // 10**6} MB of {where}, which is all that was searched"
    if matches:
        how_much = "this text" if 2 * matches > len(probes) else "parts of this text, or on the same passages elsewhere"
        line = f"{matches} of {len(probes)} probes of {PROBE_TOKENS} tokens occur in {where}: it was trained on "
        line += f"{how_much}, so its values here say little about new text"
        note(f"{text.name}: {line}")
    elif not complete:
        note(f"{text.name}: no probe of {PROBE_TOKENS} tokens occurs in {where}")
    elif (base := saved.state["config"]["init_from"]) not in ("scratch", "resume"):
        line = f"could not check whether {base} was trained on it, from which {run} started"
        note(f"{text.name}: {line}")
    return replace(text.reading, probes=len(probes), probes_matched=matches)


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| model | on | measure | value | 95 % interval | over |", "|---|---|---|---|---|---|"]
    for row in rows:
        digits = 4 if abs(row["value"]) < 100 else 1
        interval = "unknown"
        if row["low"] is not None:
            interval = f"{row['low']:,.{digits}f} to {row['high']:,.{digits}f}"
        text = row["of"]
        if row.get("probes_matched"):
            text += f" ({row['probes_matched']} of {row['probes']} probes are in its training data)"
        cells = [row["run"], text, row["measure"], f"{row['value']:,.{digits}f}", interval]
        lines.append(f"| {' | '.join(cells)} | {row['n']:,} {row['over']} |")
    return "\n".join(lines)


def format_positions(models: Sequence[Evaluation]) -> str:
    """A table for each text, with a row per range of positions and a column per model.

    Models that split a text into different tokens get tables of their own, because a loss is per token.
    """
    tables: dict[tuple[str, str], list[tuple[Evaluation, PositionLoss]]] = {}
    for model in models:
        for losses in model.positions:
            tables.setdefault((losses.source, losses.windows), []).append((model, losses))
    return "\n\n".join(format_position_table(columns) for columns in tables.values())


def format_position_table(columns: Sequence[tuple[Evaluation, PositionLoss]]) -> str:
    """The losses of some models on the same windows."""
    _, first = columns[0]
    n_windows, context = first.counted.shape
    readings = [model.readings[first.source] for model, _ in columns]
    lines = [["tokens of context", *(model.run for model, _ in columns)]]
    lines.append(["block_size in training", *(f"{losses.block_size:,}" for _, losses in columns)])
    for rows in zip(*(losses.rows() for _, losses in columns), strict=True):
        lines.append([f"{rows[0]['first']:,} to {rows[0]['last']:,}", *map(format_loss, rows)])
    if any(reading.probes_matched for reading in readings):
        probes = [f"{r.probes_matched} of {r.probes}" if r.probes else "not searched" for r in readings]
        lines.append(["probes that are in its training data", *probes])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    padded = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    title = f"{first.source}: loss in nats per token ± half the width of its 95 % interval, "
    title += f"over {n_windows:,} windows of {context + 1:,} tokens"
    return "\n".join([title, "", *(f"| {line} |" for line in padded)])


def format_loss(row: dict[str, Any]) -> str:
    """The value of a row with half the width of its interval."""
    if row["value"] is None:
        return "none"
    half_width = "unknown" if row["low"] is None else f"{(row['high'] - row['low']) / 2:.4f}"
    return f"{row['value']:.4f} ± {half_width}"


def format_groups(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A table of the exact match by the fields of the pairs, for each model and source."""
    tables: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        tables.setdefault((row["run"], row["of"]), []).append(row)
    return [format_group_table(f"{run}, {source}", of_table) for (run, source), of_table in tables.items()]


def format_group_table(title: str, rows: Sequence[dict[str, Any]]) -> str:
    """Groups by one field are rows; by two fields, the second one gives the columns."""
    fields = list(rows[0]["by"])
    first, *second = (list(dict.fromkeys(row["by"][field] for row in rows)) for field in fields)
    columns = second[0] if second else [rows[0]["measure"]]
    cells = {tuple(row["by"].values()): f"{format_loss(row)} ({row['pairs']:,})" for row in rows}
    lines = [f"{title}: exact match ± half the width of its 95 % interval (pairs)", ""]
    lines += [f"| {fields[0]} | {' | '.join(columns)} |", f"|{'---|' * (1 + len(columns))}"]
    for value in first:
        keys = [(value, column) for column in columns] if second else [(value,)]
        lines.append(f"| {value} | {' | '.join(cells.get(key, 'none') for key in keys)} |")
    return "\n".join(lines)


def left_out_lines(model: Evaluation) -> list[str]:
    """For each text that was not read completely, a line about the characters that were left out."""
    lines = []
    for name, reading in model.readings.items():
        if reading.unknown:
            shown = [repr(character) for character, _ in reading.unknown.most_common(8)]
            more = ", ..." if len(reading.unknown) > len(shown) else ""
            lines.append(
                f"{model.run} left out {reading.left_out:,} of the {reading.characters:,} characters of {name} "
                f"({reading.left_out / reading.characters:.2%}), because they are not in its vocabulary: "
                f"{' '.join(shown)}{more}"
            )
    return lines


if __name__ == "__main__":
    run_script(main, EvaluateConfig)
