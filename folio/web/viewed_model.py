"""A model that the viewer shows: weights, tokenizer, checkpoints and progress of its run, and a text to show first."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import torch

from folio import UserError
from folio.base.files import is_locked, step_number
from folio.checkpoints import checkpoint, foreign, run_folder
from folio.checkpoints.checkpoint import Checkpoint
from folio.checkpoints.find_runs import resolve
from folio.checkpoints.snapshots import find_snapshots, read_snapshot
from folio.data.sources.music import EventFormat
from folio.data.tokenizer import MidiTokenizer
from folio.decoding.language_model import LanguageModel
from folio.evaluation.overlap import open_training_data
from folio.experiments.runs import planned_steps, read_samples, read_state
from folio.machine import memory
from folio.training.run_log import read_lines
from model import GPT

KNOWN_TEXT = "ROMEO:\nBut soft, what light through yonder window breaks?\nIt is the east, and Juliet is the sun."
FIRST_TOKENS = 100  # of a text that is chosen
MAX_VIEWED_TOKENS = 2048  # of a text, if the context is longer
MODEL_BYTES = 2**30  # weights of other checkpoints to keep in memory
RUN_METRICS = ("loss", "val_loss", "lr", "grad_norm", "tokens_per_second")  # of metrics.jsonl
RUN_SAMPLES = 10  # of samples.jsonl, the newest ones

T = TypeVar("T")


class Cache:
    """The newest values by their keys, as long as their sizes sum to at most `most`; always the newest one."""

    def __init__(self, most: int, size: Callable[[Any], int] = lambda value: 1):
        self.most, self.size = most, size
        self.values: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, compute: Callable[[], T]) -> T:
        if key not in self.values:
            self.values[key] = compute()
        self.values.move_to_end(key)
        while len(self.values) > 1 and sum(map(self.size, self.values.values())) > self.most:
            self.values.popitem(last=False)
        return self.values[key]


class ViewedModel:
    """A model, its tokenizer, and the other checkpoints of its run."""

    def __init__(self, init_from: str, which: str, device: torch.device):
        """Load whatever foreign.load does. Raises UserError."""
        self.name, self.device = resolve(init_from), device
        loaded = foreign.load(self.name, which)
        self.tokenizer = loaded.tokenizer
        is_music = isinstance(self.tokenizer, MidiTokenizer)
        self.music = EventFormat.of(self.tokenizer) if is_music else None
        self.opened = self._build(loaded)
        self.step: int | None = loaded.state.get("step")
        self.run = loaded.path.parent if self.step is not None else None  # the folder
        self.settings = loaded.settings()
        self.saved = replace(loaded, model={})  # without the weights
        self.others = Cache(MODEL_BYTES, lambda model: sum(p.nbytes for p in model.parameters()))
        self.limit = min(self.opened.config.block_size, MAX_VIEWED_TOKENS)  # tokens of a text

    def checkpoints(self) -> dict[int, Path]:
        """The checkpoints and snapshots of the run by their steps, in order, as they are now."""
        if self.run is None:
            return {}
        complete = {step_number(path.name): path for path in run_folder.directories(self.run)}
        return dict(sorted({**complete, **find_snapshots(self.run)}.items()))

    def steps(self) -> list[int]:
        """The steps of the checkpoints, and of the one that was opened, which may have been removed since."""
        return sorted({*self.checkpoints(), *([] if self.step is None else [self.step])})

    def version(self, step: int | None) -> tuple[Path, int] | None:
        """The file of a step's weights, and when it was written, because a run that is started again may replace it.

        None for the checkpoint that was opened, which stays as it was then. Raises UserError for a step without one.
        """
        if step is None or step == self.step:
            return None
        path = self.checkpoints().get(step)
        if path is None or not path.exists():
            raise UserError(f"{self.name} has no checkpoint of step {step:,}")
        file = path / "model.safetensors" if path.is_dir() else path
        try:
            return file, file.stat().st_mtime_ns
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error}") from None

    def at(self, step: int | None) -> GPT:
        """The model after so many steps. Raises UserError if there is no such checkpoint, or another model's."""
        version = self.version(step)
        return self.opened if version is None else self.others.get(version, partial(self._load, version[0]))

    def _load(self, file: Path) -> GPT:
        if file.parent.name == "snapshots":
            return self._build(replace(self.saved, path=file, model=read_snapshot(file)))
        return self._build(checkpoint.load(file.parent, optimizer=False))

    def _build(self, loaded: Checkpoint) -> GPT:
        """The model as a trace needs it. The weights are copied, because a run may remove the file that is mapped."""
        size = sum(4 * t.numel() for t in loaded.model.values())
        what = f"{loaded.path}: its weights in float32"
        memory.require_free(size, what, "a smaller model", memory.free(self.device))
        weights = {name: t.to(self.device, torch.float32, copy=True) for name, t in loaded.model.items()}
        return replace(loaded, model=weights).build().requires_grad_(False).eval()

    def piece(self, token: int) -> str:
        return self.tokenizer.piece(token)

    def content(self, token: int) -> bytes:
        """The bytes of a token; none of the end-of-text token, and of ids that the tokenizer does not have."""
        return self.tokenizer.token_bytes(token) if token < self.tokenizer.vocab_size else b""

    def describe(self) -> dict[str, Any]:
        """The facts about the model, which do not change, and its checkpoints as they are now."""
        model = self.opened
        return {
            "name": self.name,
            "config": asdict(model.config),
            "tokenizer": self.tokenizer.kind,
            "vocab_size": self.tokenizer.vocab_size,
            "eot": self.tokenizer.eot,
            "step": self.step,
            "checkpoints": self.steps(),
            "limit": self.limit,
            "can_slide": model.config.can_slide,
            "num_params": model.num_params(),
            "parameters": [{"name": name, "shape": list(p.shape)} for name, p in model.named_parameters()],
        }

    def progress(self, since: int) -> tuple[dict[str, Any], dict[str, list]]:
        """The facts about the run as far as it has come, and its steps and metrics after the step `since`.

        last: the last step of all metrics; if it is before `since`, another run has replaced this one, or the run was
        resumed from an earlier step. training: whether a process is training it now, unless that was killed. idle:
        seconds since the last line. max_iters, stopped_by: as of the newest checkpoint. Unknown metrics are NaN.
        Nothing for a model without a run.
        """
        if self.run is None:
            return {}, {}
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


def choose_text(viewed: ViewedModel, data_dir: str | None = None) -> str:
    """A text for a model of Shakespeare or of general English, a held-out one for a model of music or of prompts and
    completions, and a sample of any other model.
    """
    dataset = str(viewed.settings.get("dataset", "shakespeare"))
    if "shakespeare" in dataset and not viewed.music and not viewed.tokenizer.count_unknown(KNOWN_TEXT):
        return KNOWN_TEXT
    with suppress(UserError):  # the data is not here
        if text := held_out_text(viewed, data_dir):
            return text
    try:
        model = LanguageModel(viewed.opened, viewed.tokenizer, str(viewed.device))
        return model.generate("", max_new_tokens=min(FIRST_TOKENS, viewed.limit))
    except UserError:  # such as a model that computes NaN
        return "" if viewed.music else KNOWN_TEXT


def held_out_text(viewed: ViewedModel, data_dir: str | None) -> str:
    """The beginning of the first piece for validation, or the first prompt with its completion; "" for a model of text
    alone. Raises UserError if the data is not available.
    """
    shard = open_training_data(viewed.saved, data_dir)[0].val[0]
    if not viewed.music and shard.mask is None:
        return ""
    most = min(FIRST_TOKENS, viewed.limit) if viewed.music else viewed.limit
    document = takewhile(lambda token: token != viewed.tokenizer.eot, shard.ids[:most].tolist())
    return viewed.tokenizer.decode([*document]).strip()
