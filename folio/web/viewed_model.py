"""A model in the viewer: weights, tokenizer, checkpoints and progress of its run, and an initial text."""

import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from folio import UserError
from folio.base.files import is_locked, step_number
from folio.checkpoints import checkpoint, foreign, run_folder
from folio.checkpoints.checkpoint import Checkpoint
from folio.checkpoints.find_runs import find_run
from folio.checkpoints.snapshots import find_snapshots, read_snapshot
from folio.checkpoints.training_data import open_training_data
from folio.data.sources.music import EventFormat
from folio.data.tokenizer import MidiTokenizer
from folio.decoding.language_model import LanguageModel
from folio.evaluation.memorization import OVERLAP_TOKENS, TrainingIndex, find_overlap
from folio.experiments.runs import planned_steps, read_samples, read_state
from folio.machine import memory
from folio.training.run_log import read_lines
from model import GPT

KNOWN_TEXT = "ROMEO:\nBut soft, what light through yonder window breaks?\nIt is the east, and Juliet is the sun."
MAX_INITIAL_TOKENS = 100  # length of a sampled initial text or an excerpt of the validation data
SEARCHED_TOKENS = 5 * MAX_INITIAL_TOKENS  # validation tokens in which a sentence is searched
MAX_EXCERPTS = 20  # of the validation data, from which the initial text is chosen
SENTENCE_END = re.compile(r"[.!?]['\")\]]*(?=\s)|[\u3002\uff01\uff1f]|\n")  # also in Chinese and Japanese
MAX_VIEWED_TOKENS = 2048  # per text, even if the context is longer
MODEL_CACHE_BYTES = 2**30  # for weights of other checkpoints
RUN_METRICS = ("loss", "val_loss", "lr", "grad_norm", "tokens_per_second")  # of metrics.jsonl
RUN_SAMPLES = 10  # newest entries of samples.jsonl

T = TypeVar("T")


class LRUCache:
    """Least-recently-used cache. The sizes of its values sum to at most `capacity`, but the last used value is kept."""

    def __init__(self, capacity: int, size: Callable[[Any], int] = lambda value: 1):
        self.capacity, self.size = capacity, size
        self.values: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, compute: Callable[[], T]) -> T:
        if key not in self.values:
            self.values[key] = compute()
        self.values.move_to_end(key)
        while len(self.values) > 1 and sum(map(self.size, self.values.values())) > self.capacity:
            self.values.popitem(last=False)
        return self.values[key]


class ViewedModel:
    """A model, its tokenizer, and the other checkpoints of its run."""

    def __init__(self, init_from: str, which: str, device: torch.device):
        """Load a run, a checkpoint, or a model of another program. Raises UserError."""
        self.name, self.device = find_run(init_from), device
        loaded = foreign.load(self.name, which)
        self.tokenizer = loaded.tokenizer
        is_music = isinstance(self.tokenizer, MidiTokenizer)
        self.music = EventFormat.of(self.tokenizer) if is_music else None
        self.model = self._build(loaded)
        self.step: int | None = loaded.state.get("step")
        self.run = loaded.path.parent if self.step is not None else None  # folder
        self.settings = loaded.settings()
        self.checkpoint = replace(loaded, model={})  # without the weights
        self.other_models = LRUCache(MODEL_CACHE_BYTES, lambda model: sum(p.nbytes for p in model.parameters()))
        self.limit = min(self.model.config.block_size, MAX_VIEWED_TOKENS)  # maximum tokens per text

    def checkpoints(self) -> dict[int, Path]:
        """Return the current checkpoints and snapshots of the run, ordered by step."""
        if self.run is None:
            return {}
        complete = {step_number(path.name): path for path in run_folder.directories(self.run)}
        return dict(sorted({**complete, **find_snapshots(self.run)}.items()))

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, including the opened one, even if it has been removed since."""
        return sorted({*self.checkpoints(), *([] if self.step is None else [self.step])})

    def version(self, step: int | None) -> tuple[Path, int] | None:
        """Return the file with a step's weights and its modification time, because a restarted run may replace it.

        Returns None for the opened checkpoint, which stays in memory. Raises UserError if the step has no checkpoint.
        """
        if step is None or step == self.step:
            return None
        self._require_folder()
        path = self.checkpoints().get(step)
        if path is None or not path.exists():
            raise UserError(f"{self.name} has no checkpoint of step {step:,}")
        file = path / "model.safetensors" if path.is_dir() else path
        try:
            return file, file.stat().st_mtime_ns
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error}") from None

    def _require_folder(self) -> None:
        """Raise UserError if the folder of the run no longer exists."""
        if self.run and not self.run.is_dir():
            memory_only = f"only step {self.step:,}, which is in memory, can be shown"
            raise UserError(f"the folder {self.run} is gone (deleted, renamed, or not mounted); {memory_only}")

    def model_at(self, step: int | None) -> GPT:
        """Return the model of a step. Raises UserError if the checkpoint is missing or does not fit the model."""
        version = self.version(step)
        return self.model if version is None else self.other_models.get(version, partial(self._load, version[0]))

    def _load(self, file: Path) -> GPT:
        if file.parent.name == "snapshots":
            return self._build(replace(self.checkpoint, path=file, model=read_snapshot(file)))
        return self._build(checkpoint.load(file.parent, optimizer=False))

    def _build(self, loaded: Checkpoint) -> GPT:
        """Build the model in float32 and eval mode. Copies the weights, because a run may remove the mapped file."""
        size = sum(4 * t.numel() for t in loaded.model.values())
        memory.require_free(size, f"{loaded.path}: its weights in float32", "a smaller model", memory.free(self.device))
        weights = {name: t.to(self.device, torch.float32, copy=True) for name, t in loaded.model.items()}
        return replace(loaded, model=weights).build().requires_grad_(False).eval()

    def describe(self) -> dict[str, Any]:
        """Return facts about the model and its current checkpoints."""
        model = self.model
        return {
            "name": self.name,
            "config": asdict(model.config),
            "tokenizer": self.tokenizer.kind,
            "vocab_size": self.tokenizer.vocab_size,
            "eot": self.tokenizer.eot,
            "step": self.step,
            "checkpoints": self.steps(),
            "limit": self.limit,
            "can_slide": model.position_encoding.can_slide,
            "num_params": model.num_params(),
            "parameters": [{"name": name, "shape": list(p.shape)} for name, p in model.named_parameters()],
        }

    def progress(self, since: int) -> tuple[dict[str, Any], dict[str, list]]:
        """Return facts about the run and its metrics after the step `since`. Both are empty for a model without a run.

        last: step of the last line; below `since` if the run was replaced or resumed from an earlier step.
        training: whether a process is training the run. idle: seconds since the last line. max_iters, stopped_by: from
        the newest checkpoint. Missing metrics are NaN. Raises UserError if the run's folder is gone.
        """
        if self.run is None:
            return {}, {}
        self._require_folder()
        metrics = self.run / "metrics.jsonl"
        lines, last = read_lines(metrics, since)
        state = read_state(self.run)
        facts = {
            "training": is_locked(self.run / ".lock") is not False,
            "idle": max(0.0, time.time() - metrics.stat().st_mtime) if metrics.exists() else None,
            "max_iters": planned_steps(state),
            "stopped_by": state.get("stopped_by"),
            "last": last,
            "samples": [[line["step"], line["text"]] for line in read_samples(self.run)[-RUN_SAMPLES:]],
            "checkpoints": self.steps(),
        }
        columns = {name: [_number(line.get(name)) for line in lines] for name in RUN_METRICS}
        return facts, {"step": [line["step"] for line in lines], **columns}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def choose_text(viewed: ViewedModel, data_dir: str | None = None, quotes_text: bool = True) -> str:
    """Return an initial text that suits the model.

    A held-out text; if the data is not available, a known text for models of Shakespeare, and a sample for others.
    quotes_text: False: never an excerpt of plain text.
    """
    with suppress(UserError):  # the data is not available
        if text := held_out_text(viewed, data_dir, quotes_text):
            return text
    dataset = str(viewed.settings.get("dataset", "shakespeare"))
    if "shakespeare" in dataset and not viewed.music and not viewed.tokenizer.count_unknown(KNOWN_TEXT):
        return KNOWN_TEXT
    try:
        model = LanguageModel(viewed.model, viewed.tokenizer, str(viewed.device))
        return model.generate("", max_new_tokens=min(MAX_INITIAL_TOKENS, viewed.limit))
    except UserError:  # for example, if the model computes NaN
        return "" if viewed.music else KNOWN_TEXT


def held_out_text(viewed: ViewedModel, data_dir: str | None, quotes_text: bool) -> str:
    """Return the beginning of a validation piece, a validation pair, or sentences of plain text.

    It is the first of MAX_EXCERPTS that does not occur in the training data; if all do, the one of which least does.
    quotes_text: False: "" for a model of plain text. Raises UserError if the data is not available.
    """
    tokenizer, datasets = viewed.tokenizer, open_training_data(viewed.checkpoint, data_dir)
    is_plain = not viewed.music and datasets[0].val[0].mask is None
    if is_plain and not quotes_text:
        return ""
    max_tokens = min(MAX_INITIAL_TOKENS, viewed.limit) if viewed.music or is_plain else viewed.limit
    index = TrainingIndex(datasets, tokenizer.eot, OVERLAP_TOKENS)
    chosen, least = "", math.inf
    for excerpt in excerpts(datasets[0].val[0].ids, tokenizer.eot, SEARCHED_TOKENS if is_plain else max_tokens):
        text = tokenizer.decode(excerpt).strip()
        if is_plain:
            text = first_sentences(text, lambda text: tokenizer.decode(tokenizer.encode(text)[:max_tokens]))
        overlap = find_overlap(index, tokenizer, tokenizer.encode(text)) if text else None
        if overlap and overlap.in_training < least:
            chosen, least = text, overlap.in_training
        if not least:
            break
    return chosen


def excerpts(ids: np.ndarray, eot: int | None, max_tokens: int) -> Iterator[np.ndarray]:
    """Yield the beginnings of the first MAX_EXCERPTS documents; if there is only one, parts that are evenly spaced.

    max_tokens: of each.
    """
    ends = np.flatnonzero(ids == eot)[:MAX_EXCERPTS]
    starts = [0, *(ends + 1)[:-1]]
    if len(ends) < 2:
        starts = [int(start) for start in np.linspace(0, max(len(ids) - max_tokens, 0), MAX_EXCERPTS)]
    for start in starts:
        yield np.array([*takewhile(lambda token: token != eot, ids[start : start + max_tokens].tolist())], np.int64)


def first_sentences(text: str, cut: Callable[[str], str]) -> str:
    """Return the first complete sentences of an excerpt that fit, or at least complete words.

    The excerpt may begin within a sentence. cut(text): the beginning of a text that fits.
    """
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    begin = 0 if text[:1].isupper() or not ends else ends[0]
    text = text[begin:].strip()
    part = cut(text).rstrip("\ufffd")  # an incomplete character
    if part == text:
        return text
    ends = [match.end() for match in SENTENCE_END.finditer(text) if match.end() <= len(part)]
    return (part[: ends[-1]] if ends else re.sub(r"\s\S*$", "", part)).strip()
