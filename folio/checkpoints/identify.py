"""Says what a path or a name is that is given as a model: in which format Folio loads it, or what to do instead.

It looks at the names of files and folders only. folio/checkpoints/foreign.py reads the formats.
"""

import os
import re
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from folio.checkpoints import run_folder
from folio.checkpoints.run_folder import CheckpointError

HUB = {  # nanoGPT's names -> repositories
    **{name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")},
    "distilgpt2": "distilbert/distilgpt2",
}
HUB_NAMES = ", ".join(HUB)
MAX_SHOWN = 3  # models that a message proposes
MAX_ENTRIES = 1000  # of a folder that is searched
MAX_SEARCHED = 50  # folders in which a message's models are searched

Format = Literal["run", "hub", "hugging_face", "nanogpt", "gguf"]


class Identity(NamedTuple):
    """What a path or a name is."""

    what: str  # completes "it is ..."
    format: Format | None = None  # None: Folio does not load it
    remedy: str = ""  # if Folio does not load it


# --- what Folio does not load -----------------------------------------------------------------------------------------

SAVE_PRETRAINED = "save the model with transformers' save_pretrained, and name that folder"
WEIGHTS = Identity("weights without a config.json", remedy="name a folder with both and with the tokenizer's files")
ADAPTER = Identity(
    "an adapter (LoRA, PEFT) without the weights of its base model",
    remedy=f"merge them with peft's merge_and_unload, {SAVE_PRETRAINED}",
)
TORCH = Identity(
    "a checkpoint of PyTorch Lightning or another program",
    remedy=f"in that program, {SAVE_PRETRAINED}; for nanoGPT's, rename the file to ckpt.pt",
)
OTHER_FRAMEWORK = Identity(
    "a model of TensorFlow or JAX", remedy=f"load it in transformers, {SAVE_PRETRAINED}; GPT-2 itself is {HUB_NAMES}"
)
EXPORT = Identity("an exported model", remedy="name the run or the folder from which it was exported")
ARCHIVE = Identity("an archive", remedy="unpack it, and name its folder")
TOKENIZER = Identity("a tokenizer without a model", remedy="add the model's config.json and model.safetensors")
UNFINISHED = Identity("a run without a checkpoint", remedy="wait for its first evaluation, or start it again")

FILES = (  # (pattern of a file's name, what the file is)
    (r"adapter_(config\.json|model\..*)", ADAPTER),
    (r"(model|pytorch_model).*\.(safetensors|bin)|.*\.safetensors", WEIGHTS),
    (r".*\.(onnx|html)", EXPORT),
    (r".*\.(h5|msgpack|npz|pb)|.*\.ckpt(-\d+)?\.(index|meta|data-.*)|hparams\.json", OTHER_FRAMEWORK),
    (r".*\.(ckpt|pth|pt)", TORCH),
    (r".*\.(zip|tar|gz|tgz|xz|zst|7z)", ARCHIVE),
    (r"tokenizer\.json|vocab\.(json|bpe)|merges\.txt|encoder\.json", TOKENIZER),
    (r"metrics\.jsonl", UNFINISHED),
)


def _identify_name(name: str) -> Identity | None:
    """What the name of a missing path is."""
    what = "neither a path nor a model that Folio loads by name"
    known = dict(zip(HUB.values(), HUB, strict=True))
    similar = [hub_name for hub_name in HUB if hub_name[0] == name[:1]]  # out-gpt2-xl is the name of a run
    if close := known.get(name) or next(iter(get_close_matches(name, similar, n=1, cutoff=0.75)), None):
        return Identity(what, remedy=f"use {close} (or {', '.join(other for other in HUB if other != close)})")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not os.path.exists(name.partition("/")[0]):
        folder = name.partition("/")[2]
        download = f"hf download {name} --local-dir {folder}"
        return Identity(
            what, remedy=f"use {HUB_NAMES}; or, for another GPT-2 on the hub, {download}, and name {folder}"
        )
    return None


def _identify_file(path: Path) -> Identity | None:
    if path.suffix == ".pt":
        return Identity("nanoGPT's ckpt.pt", "nanogpt")
    if path.suffix == ".gguf":
        return Identity("a GGUF file", "gguf")
    folder = identify(path.parent)
    if folder and folder.format and path.suffix in (".json", ".jsonl", ".safetensors", ".bin"):
        return Identity(f"a file of {folder.what}", remedy=f"name the folder, {path.parent}")
    return _file_kind(path.name)


def _file_kind(name: str) -> Identity | None:
    return next((identity for pattern, identity in FILES if re.fullmatch(pattern, name)), None)


def _identify_folder(folder: Path) -> Identity | None:
    try:
        with os.scandir(folder) as entries:
            files = {entry.name for entry in entries if not entry.is_dir()}
    except OSError:  # not readable
        return None
    kinds = {_file_kind(name) for name in files}
    if "config.json" in files and (WEIGHTS in kinds or not kinds & {ADAPTER, EXPORT, OTHER_FRAMEWORK}):
        return Identity("a folder of transformers", "hugging_face")
    if "ckpt.pt" in files and "last.json" not in files:
        return Identity("nanoGPT's out_dir", "nanogpt")
    if "manifest.json" in files or run_folder.exists(folder):
        return Identity("a run of Folio", "run")
    if "meta.json" in files or "train.bin" in files:
        return Identity("a data set", remedy=f"train a model on it: python train.py --dataset={folder}")
    return next((identity for _, identity in FILES if identity in kinds), None)


def identify(path: Path) -> Identity | None:
    """What a path is, or a name if nothing has this path; None if it is not known."""
    if path.as_posix() in HUB:
        return Identity("a model on the Hugging Face hub", "hub")
    if not path.exists():
        return _identify_name(path.as_posix())
    return _identify_folder(path) if path.is_dir() else _identify_file(path)


# --- messages ---------------------------------------------------------------------------------------------------------


class NoCheckpointError(CheckpointError):
    """A path without a checkpoint of Folio. The message says what it is and what to do.

    option: the option that takes a run's folder, such as "--out_dir=".
    """

    def __init__(self, path: Path, option: str = ""):
        self.path, self.identity = path, identify(path)
        if self.identity is None:
            super().__init__(f"{path} holds no checkpoint: {_advice(path, option)}")
        elif self.identity.format:
            new_run = f"start a new run from its weights: --init_from={path} and another --out_dir"
            super().__init__(f"{path} is {self.identity.what}, not a run that can be resumed; {new_run}")
        else:
            super().__init__(f"{path} is {self.identity.what}: {self.identity.remedy}")


def _advice(path: Path, option: str) -> str:
    """What to do if a path is not known: other models, or how to train one."""
    inside = list(_identified_in(path))
    models = [
        f"{option if identity.format == 'run' else option and '--init_from='}{folder}"
        for folder, identity in inside
        if identity.format
    ]
    models = models or [f"{option}{run}" for run in _neighboring_runs(path)]
    if models:
        return f"try {' or '.join(models[:MAX_SHOWN])}"
    for folder, identity in inside:
        return f"{folder} is {identity.what}: {identity.remedy}"
    return "train one first: python train.py config/shakespeare_char.py"


def _identified_in(folder: Path) -> Iterator[tuple[Path, Identity]]:
    """The folders under `folder` whose content is known, the nearest first; not those in them."""
    folders = deque([folder])
    for _ in range(MAX_SEARCHED):
        for child in _subfolders(folders.popleft()) if folders else ():
            identity = identify(child)
            if identity:
                yield child, identity
            else:
                folders.append(child)


def _subfolders(folder: Path) -> list[Path]:
    """Folders in a folder, without hidden ones, at most MAX_SEARCHED. Those like checkpoint-500 begin with the last."""
    with suppress(OSError):  # a missing or unreadable folder
        children = [path for path in islice(folder.iterdir(), MAX_ENTRIES) if not path.name.startswith(".")]
        numbers = {path: int((re.findall(r"\d+$", path.name) or [-1])[0]) for path in children if path.is_dir()}
        return sorted(numbers, key=lambda path: (-numbers[path], path))[:MAX_SEARCHED]
    return []


def _neighboring_runs(path: Path) -> list[Path]:
    """The run folders next to `path`, and its parent if it is one, most recently saved first."""
    with suppress(OSError):  # a missing or unreadable folder
        runs = [run for run in (path.parent, *path.parent.iterdir()) if run_folder.exists(run)]
        return sorted(runs, key=lambda run: run_folder.directories(run)[-1].stat().st_mtime, reverse=True)
    return []
