"""Prepares a data set: tokenizes a corpus on all cores, writes the token ids as shards, and prints a report.

The shards are written to DATA_DIR/.NAME.part, which is renamed to DATA_DIR/NAME when they are complete. After an
interruption, the same command resumes after the last full shard, and the result is bitwise identical.
"""

import itertools
import json
import os
import re
import shlex
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Gt, Le, Lt
from tqdm import tqdm

from folio import UserError
from folio.base.commands import STARTED_BY_TRAINING, command
from folio.base.files import locked, read_json, replace_folder, replaced, settle_folder, write_json
from folio.base.number_format import counted
from folio.base.progress import progress_bar
from folio.base.settings import NonNegativeInt, Settings, read_config
from folio.base.terminal import say
from folio.base.workers import cores, map_in_order
from folio.data import tokenizer as tokenizers
from folio.data.account import Account, describe
from folio.data.blocks import CorpusBlock, CorpusError, EncodedBlock, encode, iterate_texts, unique_characters
from folio.data.builder import (
    BuildProgress,
    DatasetBuilder,
    Dedup,
    describe_unknown,
    split_by_hash,
    split_by_smallest_keys,
)
from folio.data.corpus import Corpus, Documents
from folio.data.inputs import TEXT_FORMATS
from folio.data.leakage import (
    OVERLAP,
    ShardText,
    compare_splits,
    count_duplicates,
    count_near_duplicates,
    near_duplicates,
    sign_documents,
)
from folio.data.shards import (
    MIN_DOCUMENTS,
    NANOGPT_SCRIPT,
    Shards,
    data_root,
    dataset_name,
    describe_few_documents,
    token_dtype,
    write_meta,
)
from folio.data.tokenizer import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    OnUnknown,
    RankedTokenizer,
    Tokenizer,
    describe_large_vocabulary,
    vocabulary_is_large,
)
from folio.data.word_cache import TEXT_STEP
from folio.machine import compiled

SMALL_CORPUS = 1 << 22  # bytes; for less, starting other processes takes longer than it saves
BPE_TEXT = 100_000_000  # approximate bytes of text to train a BPE on, sampled evenly from a larger corpus
MAX_VOCAB_SIZE = 1_000_000  # largest vocabulary of a BPE; GPT-4's has 100,000 tokens
MAX_NAME_BYTES = 200  # of a data set; file systems allow 255, and the temporary folder's name is longer
MAX_CHECKED_BYTES = 1_000_000_000  # largest text that is checked for leakage by default
MAX_COMPARED_DOCUMENTS = 100_000  # near duplicates of more are not counted by default; this takes about 5 s and 300 MB
MAX_NOTES = 5  # printed lines on files that are not read as their names say
PROGRESS_VERSION = 7  # of progress.json and of the division of a corpus into blocks

Fraction = Annotated[float, Gt(0), Lt(1)]
VocabSize = Annotated[int, Ge(258), Le(MAX_VOCAB_SIZE)]


@dataclass(frozen=True)
class PrepareConfig(Settings):
    config_file: ClassVar[str | None] = None  # a recipe for the data set, for the printed training command
    accepts_any_path: ClassVar[bool] = True  # a collection of texts may have names in an old encoding

    # --- the data set ---
    name: str | None = None  # folder under data_dir; None: the name of the script, the input, or the inputs' folder
    data_dir: str | None = None  # folder of the data sets; None: data/ next to train.py
    overwrite: bool = False  # True: replace another data set with this name
    val_fraction: Fraction | None = None  # share for validation; None: 0.1 for a single file, otherwise 0.01
    dedup: Dedup = False  # True: remove duplicate documents; near: also near duplicates
    check_leakage: bool | None = None  # count text shared by validation and training; None: if the text is at most 1 GB
    shard_tokens: Annotated[int, Ge(2)] = 100_000_000  # maximum number of tokens per shard
    # --- the tokenizer ---
    tokenizer: str = "char"  # char, byte, gpt2, bpe (trained on this text), or the folder of a data set or a run
    vocab_size: VocabSize = 8192  # vocabulary size of a bpe; at least the 256 bytes, one merge, and end-of-text
    on_unknown: OnUnknown = "error"  # characters that a char tokenizer lacks: error, skip, or replace with U+FFFD
    # --- the machine ---
    num_workers: NonNegativeInt | None = None  # processes that tokenize; None: one per core, or 0 for a small text

    def unused(self, corpus: Corpus | Documents) -> Iterator[tuple[str, str]]:
        """Yield settings that have no effect on this corpus, with the reason. Those that the user gave are printed."""
        if self.tokenizer != "bpe":
            yield "vocab_size", "only --tokenizer=bpe has one to choose"
        if self.tokenizer in ("byte", "gpt2", "bpe"):
            yield "on_unknown", f"--tokenizer={self.tokenizer} can encode any text"
        if corpus.is_one_text:
            yield "dedup", "a single text has no other documents"

    def problems(self) -> list[tuple[str, str]]:
        """Return an error for a name that --dataset does not accept."""
        if self.name is None or (self.name and self.name == name_from(self.name)):
            return []
        rule = (
            f"for use with --dataset, it must have 1 to {MAX_NAME_BYTES} bytes without slashes, commas, colons, "
            f"control characters, a leading dot, or white space at either end"
        )
        nearest = name_from(self.name)
        return [("name", f"{rule}; for example {nearest!r}" if nearest else rule)]


def name_from(text: str) -> str:
    """Convert text to a name that --dataset accepts, where commas and colons are separators. It may be empty."""
    forbidden = ("Cc", "Cs", "Zl", "Zp")  # control characters, lone surrogates, line and paragraph separators
    name = "".join("_" if c in ",:" or unicodedata.category(c) in forbidden else c for c in Path(text).name)
    name = re.sub(r"^[.\s]+", "", name).encode()[:MAX_NAME_BYTES].decode("utf-8", "ignore")
    return name.rstrip()


def default_name(inputs: Sequence[str]) -> str:
    """Return the default name for a data set: the name of the single input, or of the common folder of all inputs.

    inputs: files, folders, and patterns. If there are several files, the name is also printed.
    """
    if list(inputs) == ["-"]:
        return "stdin"
    paths = [Path(os.path.abspath(os.path.expanduser(name))) for name in inputs]
    existing = [next(folder for folder in (path, *path.parents) if os.path.exists(folder)) for path in paths]
    try:
        common = os.path.commonpath(existing)
    except ValueError:  # different drives on Windows
        common = ""
    name = name_from(Path(common).name.split(".")[0]) or "text"
    if len(inputs) > 1 or existing != paths:
        say(f"several inputs: the data set is named {name}; to change it: --name=NAME")
    return name


# --- from a corpus to a folder of shards ------------------------------------------------------------------------------


def prepare(
    cfg: PrepareConfig,
    corpus: Corpus | Documents,
    name: str,
    tokenizer: Tokenizer | None = None,
) -> Path:
    """Prepare the data set `name` from a corpus. Print a report and the training command, and return the folder.

    If the corpus has no split_rule, cfg.val_fraction is for validation: the tail of a single text, or documents
    selected by their hash. If this leaves a split empty, a second pass selects the documents with the smallest hashes.

    tokenizer: None: the one that cfg.tokenizer names. Raises UserError. After an error, nothing remains on disk except
    full shards to resume from.
    """
    assert name and name == name_from(name)
    started = time.perf_counter()
    job = _Job(cfg, corpus, name, tokenizer)
    if job.folder.is_file():
        raise UserError(f"{job.folder} is a file, not the folder of a data set; set another --name, or remove the file")
    if replaced(job.folder).exists():  # a killed process was replacing the data set
        with _only_process(job.part):
            settle_folder(job.folder)
    if job.folder.exists():
        refuse_inputs_inside(job.folder, (source.path for source in corpus.sources))
    for line in [*corpus.notes[:MAX_NOTES], *_describe_unused(cfg, corpus)]:
        say(line)
    if not cfg.overwrite and _is_prepared(job):
        _print_hints(job)
        return job.folder
    with _only_process(job.part), _cleanup_after_errors(job):
        _open_part_folder(job)
        loaded = _load_or_make_tokenizer(job)
        shards, report = _write_shards(job, loaded)
        write_json(job.part / "report.json", report)
        _write_meta(job, loaded, shards)
        if (job.folder / NANOGPT_SCRIPT).exists():
            shutil.copy2(job.folder / NANOGPT_SCRIPT, job.part)
        replace_folder(job.part, job.folder)
        for temporary in ("progress.json", "documents"):
            (job.folder / temporary).unlink(missing_ok=True)
    say(_describe(job, report, loaded, time.perf_counter() - started))
    _print_hints(job)
    return job.folder


def _describe_unused(cfg: PrepareConfig, corpus: Corpus | Documents) -> Iterator[str]:
    for name, reason in cfg.unused(corpus):
        if name in cfg.origins:
            yield f"{name}={getattr(cfg, name)!r} has no effect: {reason}"


@dataclass
class _Job:
    """The arguments of `prepare`, and values derived from them."""

    cfg: PrepareConfig
    corpus: Corpus | Documents
    name: str
    tokenizer: Tokenizer | None

    def __post_init__(self):
        self.folder = data_root(self.cfg.data_dir) / self.name
        self.part = self.folder.with_name(f".{self.name}.part")  # the temporary folder
        self.val_fraction = self.cfg.val_fraction or (0.1 if len(self.corpus.sources) == 1 else 0.01)
        self.recipe = self._recipe()

    def _recipe(self) -> dict[str, Any]:
        """Return a JSON value that identifies the data set: it changes if its content would change."""
        tokenizer = self.tokenizer.hash if self.tokenizer else self.cfg.tokenizer
        if tokenizer not in TOKENIZERS and os.path.exists(tokenizer):
            tokenizer = self.load_tokenizer().hash
        unused = {name for name, _ in self.cfg.unused(self.corpus)}
        names = ("vocab_size", "on_unknown", "dedup", "shard_tokens")
        settings = {name: getattr(type(self.cfg) if name in unused else self.cfg, name) for name in names}
        documents = {"val_fraction": self.val_fraction, **self.corpus.fingerprint()}
        return json.loads(json.dumps({"tokenizer": tokenizer, **settings, **documents}))

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer from the folder cfg.tokenizer. For pairs, add an end-of-text token if it has none."""
        loaded = tokenizers.load(Path(self.cfg.tokenizer))
        return loaded.with_eot() if self.corpus.masked else loaded

    @property
    def checks_leakage(self) -> bool:
        """Whether to count text shared by validation and training."""
        check = self.cfg.check_leakage
        return self.reason_to_skip_check is None if check is None else check

    @cached_property
    def reason_to_skip_check(self) -> str | None:
        """The reason not to check for leakage by default, or None."""
        if self.corpus.text_bytes > MAX_CHECKED_BYTES:
            return f"the text has more than {MAX_CHECKED_BYTES / 1e9:g} GB; --check_leakage=True counts it"
        return compiled.why_unavailable(TEXT_STEP, "hash_words")

    @cached_property
    def workers(self) -> int:
        """The number of worker processes; 0: only this process."""
        if self.cfg.num_workers is not None:
            return self.cfg.num_workers
        return 0 if self.corpus.text_bytes <= SMALL_CORPUS else cores()


def refuse_inputs_inside(folder: Path, inputs: Iterable[Path]) -> None:
    """Raise UserError if an input is in the data set's folder, where it would be overwritten."""
    for path in inputs:
        if folder.resolve() in (path.resolve(), *path.resolve().parents):
            raise UserError(f"{path} is in {folder}, which the data set would replace; set another --name")


def _is_prepared(job: _Job) -> bool:
    """Whether this data set is already prepared. Raises UserError if the folder contains other files."""
    if not job.folder.exists() or all(path.name == NANOGPT_SCRIPT for path in job.folder.iterdir()):
        return False
    try:
        meta = read_json(job.folder / "meta.json")
        if meta["recipe"] == job.recipe:
            say(f"{job.folder} is already prepared; --overwrite=True prepares it again")
            return True
        content = f"another data set ({meta['tokenizer']['kind']}, {meta['vocab_size']:,} tokens, by {meta['made_by']})"
        if changes := _describe_changes(meta["recipe"], job.recipe):
            content = f"{content}; it differs in {', '.join(changes)}"
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        content = "other files"
    raise UserError(f"{job.folder} contains {content}; set another --name, or replace it with --overwrite=True")


def _describe_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Describe the differences between the recipes of a prepared data set and of a new one; empty if `old` is."""
    changes, labels = [], {"train": "training documents:", "val": "validation documents:"}
    for name in (name for name in new if name in old and old[name] != new[name]):
        if name == "sources":
            changes.append(_describe_changed_files(old[name], new[name]))
        elif name == "blake2b":
            changes.append("the documents")
        elif isinstance(old[name], dict) and isinstance(new[name], dict):
            changes += _describe_changes(old[name], new[name])
        elif name == "tokenizer" and not {old[name], new[name]} <= TOKENIZERS.keys():
            changes.append("the tokenizer")
        else:
            changes.append(f"{labels.get(name, name)} {old[name]} (now {new[name]})")
    return changes


def _describe_changed_files(old: list[list], new: list[list]) -> str:
    """Describe the differences between the fingerprints of sources."""
    sizes = [{name: f"{size:,} bytes" for name, size, *_ in sources} for sources in (old, new)]
    names = sorted({name for name, *_ in [source for source in old + new if (source in old) != (source in new)]})
    if not names:
        return "the order of the input files"
    before, now = [sources.get(names[0], "missing") for sources in sizes]
    change = "another date or format" if before == now else f"{before}, now {now}"
    others = f", and {counted(len(names) - 1, 'other input file')}" if len(names) > 1 else ""
    return f"the input file {names[0]} ({change}){others}"


# --- the temporary folder ---------------------------------------------------------------------------------------------


@contextmanager
def _only_process(part: Path) -> Iterator[None]:
    """Prevent other processes from preparing the same data set. Raises UserError if one already does."""
    busy = f"{part.parent}: another process is preparing this data set; wait for it"
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(part.with_suffix(".lock"), busy))
        except OSError as error:
            raise UserError(f"{part.parent} cannot be written ({error}); set another --data_dir") from None
        yield


def _open_part_folder(job: _Job) -> None:
    """Create the temporary folder, or reuse the one from an interrupted run of the same recipe."""
    metadata = _saved_metadata(job.part)
    if metadata is None or metadata["version"] != PROGRESS_VERSION or metadata["recipe"] != job.recipe:
        shutil.rmtree(job.part, ignore_errors=True)
    job.part.mkdir(parents=True, exist_ok=True)
    for path in job.part.glob(".*.tmp"):  # incomplete files of a killed process
        path.unlink()


def _saved_metadata(part: Path) -> dict[str, Any] | None:
    """Read the metadata in progress.json. Returns None if the file is missing or invalid."""
    try:
        saved = read_json(part / "progress.json")
        BuildProgress(**saved["progress"])
        return {name: saved[name] for name in ("version", "recipe", "bound", "ignores_prompts")}
    except (OSError, ValueError, LookupError, TypeError):
        return None


@contextmanager
def _cleanup_after_errors(job: _Job) -> Iterator[None]:
    """Delete files that cannot be resumed after an error. An OSError becomes a UserError."""
    try:
        yield
    except OSError as error:
        outcome = _keep_full_shards(job.part)
        raise UserError(f"{job.folder} could not be written ({error}); {outcome}") from None
    except KeyboardInterrupt as stop:
        stop.args = (_keep_full_shards(job.part),)
        raise
    except CorpusError:  # a corrected corpus has another fingerprint
        shutil.rmtree(job.part, ignore_errors=True)
        raise
    except UserError:
        _keep_full_shards(job.part)
        raise


def _keep_full_shards(part: Path) -> str:
    """Delete the temporary folder unless it has full shards to resume from. Returns a description for a message."""
    if (part / "progress.json").exists():
        return "the full shards are kept, and the same command resumes after them"
    shutil.rmtree(part, ignore_errors=True)
    return "nothing was kept"


def _delete_pass(part: Path) -> None:
    """Delete the files of a pass over the corpus except the tokenizer, starting with progress.json."""
    (part / "progress.json").unlink(missing_ok=True)
    for path in part.iterdir():
        if path.name != "tokenizer.json":
            path.unlink()


# --- the tokenizer ----------------------------------------------------------------------------------------------------


def _load_or_make_tokenizer(job: _Job) -> Tokenizer:
    """Return the tokenizer of the interrupted run, or a new one."""
    path = job.part / "tokenizer.json"
    if path.exists():
        tokenizer = tokenizers.load(job.part)
    else:
        tokenizer = _make_tokenizer(job)
        write_json(path, tokenizer.to_json())
    keeps = any(source.keep_line_ends for source in job.corpus.sources)
    return tokenizer.with_keep_line_ends(keeps or tokenizer.keep_line_ends)


def _make_tokenizer(job: _Job) -> Tokenizer:
    """Create or load the tokenizer that cfg.tokenizer names. Raises UserError."""
    name = job.cfg.tokenizer
    if job.tokenizer:
        return job.tokenizer
    if name in TOKENIZERS:
        return TOKENIZERS[name](job)
    if not os.path.exists(name):  # unlike Path.exists, it returns False for a name that is too long
        raise UserError(f"tokenizer={name}: use {', '.join(TOKENIZERS)}, or the folder of a data set or of a run")
    loaded = job.load_tokenizer()
    if loaded.eot is None and not job.corpus.is_one_text:
        say(f"the tokenizer of {name} has no end-of-text token, so nothing is between two documents")
    if tokenizers.load(Path(name)).eot is None and loaded.eot is not None:
        say(f"the tokenizer of {name} has no end-of-text token; it is added, with the id {loaded.eot:,}")
    return loaded


def _make_char(job: _Job) -> CharTokenizer:
    characters: set[str] = set()
    if job.cfg.on_unknown == "replace":
        characters.add(tokenizers.REPLACEMENT)
    for _, block_characters in map_in_order(unique_characters, job.corpus.blocks(), job.workers):
        characters.update(block_characters)
    if not characters:
        raise UserError(f"{job.corpus.sources[0].name} is empty; use a file that contains text")
    return CharTokenizer.of(characters, eot=not job.corpus.is_one_text)


def _make_bpe(job: _Job) -> BPETokenizer:
    share = min(1.0, BPE_TEXT / max(1, job.corpus.text_bytes))
    blocks = (block for k, block in enumerate(job.corpus.blocks()) if int((k + 1) * share) > int(k * share))
    tokenizer = BPETokenizer.train((text for block in blocks for text in iterate_texts(block)), job.cfg.vocab_size)
    if tokenizer.vocab_size < job.cfg.vocab_size:
        say(f"the text is small: the vocabulary has {tokenizer.vocab_size:,} tokens, not {job.cfg.vocab_size:,}")
    return tokenizer


TOKENIZERS: dict[str, Callable[[_Job], Tokenizer]] = {  # values of --tokenizer other than folders
    "char": _make_char,
    "byte": lambda job: ByteTokenizer(),
    "gpt2": lambda job: tokenizers.gpt2_tokenizer(),
    "bpe": _make_bpe,
}


# --- the shards -------------------------------------------------------------------------------------------------------


def _write_shards(job: _Job, tokenizer: Tokenizer) -> tuple[Shards, dict[str, Any]]:
    """Write the shards of both splits. Returns their entries in meta.json, and the report.

    If a split would be empty, the first pass over the corpus computes a bound for split_by_smallest_keys, and a second
    pass uses it. Raises UserError if a split would still be empty.
    """
    metadata = _saved_metadata(job.part) or {
        "version": PROGRESS_VERSION,
        "recipe": job.recipe,
        "bound": None,
        "ignores_prompts": False,
    }
    if job.cfg.check_leakage:
        compiled.function(TEXT_STEP, "hash_words", 3)  # without numba, an error now, and not after tokenization
    similar = _find_near_duplicates(job)
    while True:
        with _open_builder(job, tokenizer, metadata, similar) as builder:
            _tokenize(job, tokenizer, builder)
            empty_split = builder.empty_split()
            if empty_split is None:
                shards = {split: writer.finish() for split, writer in builder.writers.items()}
                return shards, _report(job, tokenizer, builder, shards, _split_method(job, metadata))
            if job.corpus.split_rule or job.corpus.is_one_text or metadata["bound"] is not None:
                _refuse_empty_split(job, builder, empty_split)
            metadata["bound"], metadata["ignores_prompts"] = builder.nearest_bound(job.val_fraction)
        _delete_pass(job.part)


def _find_near_duplicates(job: _Job) -> np.ndarray:
    """Return the content keys of the near duplicates to remove, in order, by a pass of its own over the corpus."""
    if job.cfg.dedup != "near" or job.corpus.is_one_text:
        return np.array([], np.uint64)
    with closing(_map_blocks(job, sign_documents, job.corpus.blocks(), job.corpus.masked)) as results:
        return near_duplicates(signed for *_, signed in results)


def _open_builder(job: _Job, tokenizer: Tokenizer, metadata: dict[str, Any], similar: np.ndarray) -> DatasetBuilder:
    if metadata["bound"] is None:
        split_rule = job.corpus.split_rule or split_by_hash(job.val_fraction)
    else:
        split_rule = split_by_smallest_keys(metadata["bound"])
    cfg = job.cfg
    return DatasetBuilder(
        job.part,
        tokenizer,
        split_rule,
        shard_tokens=cfg.shard_tokens,
        dedup=bool(cfg.dedup),
        near_duplicates=similar,
        masked=job.corpus.masked,
        on_unknown=cfg.on_unknown,
        metadata=metadata,
    )


def _tokenize(job: _Job, tokenizer: Tokenizer, builder: DatasetBuilder) -> None:
    """Tokenize the remaining blocks."""
    eot = None if job.corpus.is_one_text else tokenizer.eot
    blocks = itertools.islice(job.corpus.blocks(job.val_fraction), builder.progress.blocks, None)
    if builder.progress.blocks:
        say(f"resuming after {builder.full_shards} full shards")
    tokens_before, started = builder.tokens, time.perf_counter()
    if job.workers and isinstance(tokenizer, RankedTokenizer):
        tokenizer.new_word_cache()  # compiles its functions once, before worker processes start
    with closing(_map_blocks(job, encode, blocks, tokenizer, eot, job.corpus.masked, job.cfg.on_unknown)) as results:
        for bar, block, encoded in results:
            if builder.tokens == tokens_before:
                _check_disk_space(job, builder, encoded)
            builder.add(block, encoded)
            speed = (builder.tokens - tokens_before) / (time.perf_counter() - started)
            bar.set_postfix_str(f"{speed:,.0f} tokens/s", refresh=False)


def _map_blocks(
    job: _Job, function: Callable, blocks: Iterable[CorpusBlock], *arguments: Any
) -> Iterator[tuple[tqdm, CorpusBlock, Any]]:
    """Yield a progress bar, each block, and function(block, *arguments), which is computed in the worker processes."""
    with closing(map_in_order(function, blocks, job.workers, *arguments)) as results, ExitStack() as stack:
        bar = None
        for block, result in results:
            if bar is None:  # created after the workers, which must not inherit its thread
                bar = stack.enter_context(progress_bar(total=job.corpus.bytes, unit="B", unit_scale=True, leave=False))
            yield bar, block, result
            bar.update(block.bytes_read - bar.n)


def _check_disk_space(job: _Job, builder: DatasetBuilder, first: EncodedBlock) -> None:
    """Raise UserError if the disk is too small for the shards, based on the tokens per byte of the first block."""
    written = [array.nbytes for array in (first.ids, first.mask) if array is not None]
    bytes_per_token = sum(written) / max(1, len(first.ids))
    tokens = job.corpus.text_bytes * len(first.ids) / max(1, first.sizes.sum()) - builder.tokens
    free = shutil.disk_usage(job.part).free
    if tokens * bytes_per_token > free:
        raise UserError(
            f"{job.part.parent} has {free / 1e9:.2f} GB free, but the shards need about "
            f"{tokens * bytes_per_token / 1e9:.2f} GB; free some space, or set another --data_dir"
        )


def _refuse_empty_split(job: _Job, builder: DatasetBuilder, split: str) -> None:
    split_name, change = ("validation", "larger") if split == "val" else ("training", "smaller")
    raise UserError(
        f"the {split_name} split would be empty with val_fraction={job.val_fraction}: the text has "
        f"{counted(builder.tokens, 'token')}{builder.unknown_summary()}; set a {change} --val_fraction, "
        f"or use more text"
    )


def _write_meta(job: _Job, tokenizer: Tokenizer, shards: Shards) -> None:
    corpus = job.corpus
    sources = [{"name": source.name, "bytes": source.bytes} for source in corpus.sources[:100]]
    write_meta(
        job.part,
        tokenizer,
        **shards,
        made_by=shlex.join(["python", *sys.argv]),
        source={"files": len(corpus.sources), "bytes": corpus.bytes, "first": sources},
        val_fraction=job.val_fraction,
        recipe=job.recipe,
        prompt_format=corpus.prompt_format,
    )


# --- the report -------------------------------------------------------------------------------------------------------

SPLIT_METHODS = {  # how the documents for validation were selected, in report.json and in words
    "tail": "the tail of the text",
    "hash": "by a hash of each document",
    "smallest hashes": "the documents with the smallest hashes, because one split would be empty otherwise",
    "same prompt": "the documents with the smallest hashes; all have the same prompt, which is in both splits",
    "chosen": "selected by the script",
}


def _split_method(job: _Job, metadata: dict[str, Any]) -> str:
    if metadata["bound"] is not None:
        return "same prompt" if metadata["ignores_prompts"] else "smallest hashes"
    if job.corpus.split_rule:
        return "chosen"
    return "tail" if job.corpus.is_one_text else "hash"


def _report(job: _Job, tokenizer: Tokenizer, builder: DatasetBuilder, shards: Shards, method: str) -> dict[str, Any]:
    """Return the content of report.json."""
    p = builder.progress
    tokens = {split: sum(entry["tokens"] for entry in entries) for split, entries in shards.items()}
    counts = _count_tokens(job.part, shards, tokenizer.vocab_size)
    most_common = [int(i) for i in np.argsort(-counts, kind="stable")[:20] if counts[i]]
    account = job.corpus.account()
    account.add(builder.account)
    outcome = "replaced" if job.cfg.on_unknown == "replace" else "left out"
    account["characters outside the vocabulary"][outcome] += p.unknown
    account.check()
    text_bytes = sum(account["document bytes"][split] for split in shards)
    return {
        "documents": builder.documents,
        "validation": {"by": method, "val_fraction": job.val_fraction},
        "tokens": tokens,
        "bytes": text_bytes,
        "bytes_per_token": text_bytes / sum(tokens.values()),
        "characters": p.characters,
        "unknown_characters": p.unknown,
        "longest_document": {"number": p.longest_number, "tokens": p.longest},
        "document_lengths": builder.document_lengths(),
        "empty_documents": account["documents"]["empty"],
        **_count_repeated_text(job, tokenizer, builder, shards),
        "vocabulary_used": int((counts > 0).sum()),
        "most_common_tokens": [{"id": i, "text": tokenizer.piece(i), "count": int(counts[i])} for i in most_common],
        **job.corpus.report_entries,
        "account": account.to_json(),
    }


def _count_repeated_text(job: _Job, tokenizer: Tokenizer, builder: DatasetBuilder, shards: Shards) -> dict[str, Any]:
    """Return the entries of report.json on duplicates, near duplicates, and text in both splits."""
    documents, left_out = builder.read_records(), builder.account["documents"]
    lengths, val = documents["tokens"], (documents["hash"] & np.uint64(1)).astype(bool)
    if job.corpus.is_one_text:  # its splits are its documents, without records
        lengths, val = np.array([writer.tokens for writer in builder.writers.values()]), np.array([False, True])
    has_few_documents = job.cfg.check_leakage or len(documents) <= MAX_COMPARED_DOCUMENTS
    near, overlap = {"repeated": None, "val_in_train": None}, None
    if job.checks_leakage:
        signed = has_few_documents and not job.corpus.is_one_text
        text = ShardText(job.part, shards, tokenizer)
        overlap, signatures = compare_splits(text, lengths, val, signed, job.workers)
        if signed:
            near = count_near_duplicates(signatures, val)
    return {
        "duplicates": {**count_duplicates(documents["hash"]), "left_out": left_out["duplicates"]},
        "near_duplicates": {**near, "left_out": left_out["near duplicates"]},
        "ngram_overlap": overlap,
    }


def _count_tokens(folder: Path, shards: Shards, vocab_size: int) -> np.ndarray:
    """Return the number of occurrences of each token, (vocab_size,)."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for entry in itertools.chain(*shards.values()):
        ids = np.memmap(folder / entry["file"], dtype=token_dtype(vocab_size), mode="r")
        for begin in range(0, len(ids), 1 << 20):
            counts += np.bincount(ids[begin : begin + (1 << 20)], minlength=vocab_size)
    return counts


def _describe(job: _Job, report: dict[str, Any], tokenizer: Tokenizer, seconds: float) -> str:
    """Return a summary of the report."""
    cfg, vocab_size = job.cfg, tokenizer.vocab_size
    tokens, documents, duplicates = report["tokens"], report["documents"], report["duplicates"]
    split = report["validation"]
    most_common = [repr(token["text"]) for token in report["most_common_tokens"][:8]]
    lines = [
        f"{job.folder}: {tokens['train']:,} training and {tokens['val']:,} validation tokens "
        f"({tokenizer.kind}, vocabulary of {vocab_size:,}), {seconds:,.1f} s",
        f"{counted(documents['train'], 'training document')} and {counted(documents['val'], 'validation document')}, "
        f"{counted(report['bytes'], 'byte')}, {report['bytes_per_token']:.2f} bytes per token; "
        f"longest: {counted(report['longest_document']['tokens'], 'token')}; empty: {report['empty_documents']:,}",
        f"validation: {SPLIT_METHODS[split['by']]} (val_fraction={split['val_fraction']})",
        f"most common tokens: {' '.join(most_common)}; "
        f"{counted(report['vocabulary_used'], 'token of the vocabulary is', 'tokens of the vocabulary are')} used",
    ]
    if job.corpus.masked:
        lengths = ", ".join(f"{name} {n:,}" for name, n in report["document_lengths"].items())
        lines.append(f"tokens per {'chat' if job.corpus.prompt_format == 'chat' else 'pair'}: {lengths}")
    if report["unknown_characters"]:
        unknown, characters = report["unknown_characters"], report["characters"]
        lines.append(describe_unknown(unknown, characters, cfg.on_unknown))
    if cfg.tokenizer in ("gpt2", "bpe") and vocabulary_is_large(tokens["train"], vocab_size):
        lines.append(describe_large_vocabulary(tokens["train"], vocab_size))
    share = tokens["val"] / sum(tokens.values())
    is_default_split = not job.corpus.split_rule and not job.corpus.is_one_text
    has_few_documents = is_default_split and documents["val"] < MIN_DOCUMENTS
    if share > 3 * job.val_fraction and share > 0.05 and not job.corpus.split_rule:
        has_text = any(source.format in TEXT_FORMATS for source in job.corpus.sources)
        remedy = ": set --split_on to divide them" if has_text and not has_few_documents else ""
        lines.append(
            f"validation has {share:.0%} of the tokens, more than val_fraction={job.val_fraction:g}, because there are "
            f"only a few long documents{remedy}"
        )
    if has_few_documents:
        lines.append(describe_few_documents(documents["val"], tokens["val"], job.corpus.masked))
    if duplicates["left_out"]:
        lines.append(f"{counted(duplicates['left_out'], 'duplicate was', 'duplicates were')} left out")
    if duplicates["repeated"]:
        repeated = counted(duplicates["repeated"], "document repeats", "documents repeat")
        lines.append(
            f"{repeated} another one exactly, and {duplicates['val_in_train']:,} of the validation documents are also "
            f"in training; --dedup=True removes duplicates"
        )
    lines += describe(Account(report["account"]), job.corpus.split_on)
    return "\n".join([*lines, *_describe_leakage(job, report)])


def _describe_leakage(job: _Job, report: dict[str, Any]) -> Iterator[str]:
    """Yield lines about near duplicates and about n-grams shared by validation and training."""
    near, overlap, n_val = report["near_duplicates"], report["ngram_overlap"], report["documents"]["val"]
    if near["left_out"]:
        yield f"{counted(near['left_out'], 'near duplicate was', 'near duplicates were')} left out"
    if near["repeated"] or near["val_in_train"]:
        advice = "" if job.cfg.dedup == "near" else "; --dedup=near removes near duplicates"
        repeated = counted(near["repeated"], "document nearly repeats", "documents nearly repeat")
        yield (
            f"{repeated} a previous one, and {near['val_in_train']:,} of {counted(n_val, 'validation document')} "
            f"{'has' if near['val_in_train'] == 1 else 'have'} a near duplicate in training{advice}"
        )
    if overlap and overlap["words_in_overlap"]:
        documents = f", in {overlap['documents_with_overlap']:,} of {n_val:,} documents" if n_val > 1 else ""
        share = overlap["words_in_overlap"] / overlap["words"]
        yield f"{share:.2%} of the words for validation are in {OVERLAP}-grams that occur in training{documents}"
    if not job.checks_leakage and job.cfg.check_leakage is None:
        yield f"text shared by validation and training was not counted, because {job.reason_to_skip_check}"
        return
    documents = sum(report["documents"].values())
    if job.checks_leakage and near["repeated"] is None and documents > MAX_COMPARED_DOCUMENTS:
        yield (
            f"near duplicates were not counted, because there are more than {MAX_COMPARED_DOCUMENTS:,} documents; "
            f"--check_leakage=True counts them"
        )


# --- training commands ------------------------------------------------------------------------------------------------


def _print_hints(job: _Job) -> None:
    """Print the commands for training on the data set, unless train.py started this script."""
    if STARTED_BY_TRAINING not in os.environ:
        for purpose, settings in _training_commands(job):
            data_dir = [f"--data_dir={job.cfg.data_dir}"] if job.cfg.data_dir else []
            say(f"{purpose}: {command('train.py', *settings, *data_dir)}")


RECIPE = "config/shakespeare_char.py"  # for finetuning, and for pairs, if the data set has none
CHOICE = ["--size=auto", "--minutes=30"]  # for text, because the best model depends on its length
FINETUNING_EPOCHS = 16  # about 300 steps on texts of 75,000 characters, as measured in _training_commands
MIN_FINETUNING_STEPS = 10


def _max_iters_option(job: _Job, recipe: str) -> list[str]:
    """Return --max_iters for finetuning on this text if it needs fewer steps than the recipe's max_iters."""
    settings = {"batch_size": 12, "block_size": 1024, "gradient_accumulation_steps": 1, **read_config(recipe)}
    step_tokens = settings["batch_size"] * settings["block_size"] * settings["gradient_accumulation_steps"]
    tokens = sum(shard["tokens"] for shard in read_json(job.folder / "meta.json")["splits"]["train"])
    steps = max(MIN_FINETUNING_STEPS, -(-FINETUNING_EPOCHS * tokens // step_tokens))
    return [f"--max_iters={steps}"] if steps < settings["max_iters"] else []


def _training_commands(job: _Job) -> Iterator[tuple[str, list[str]]]:
    """Yield the purpose and the arguments of train.py for each run that suits the data set and its tokenizer."""
    recipe, name, source = job.cfg.config_file or RECIPE, job.folder.name, job.cfg.tokenizer
    data, out_dir = f"--dataset={name}", f"--out_dir=out-{name}"
    is_folder = source not in TOKENIZERS and os.path.isdir(source)
    if is_folder and not (Path(source) / "meta.json").exists():  # a run or a checkpoint
        # About a tenth of the recipe's rates. On two texts of 75,000 characters, 300 steps from a Shakespeare model
        # reached losses of 1.53 and 1.19; with the recipe's rates 1.60 and 1.23, with AdamW at 1e-4 1.77 and 1.37.
        settings = [data, *_max_iters_option(job, recipe), "--learning_rate=1e-3", "--muon_learning_rate=3e-3"]
        yield f"finetune {source} on it", [recipe, f"--init_from={source}", *settings, f"{out_dir}-finetuned"]
        return
    chooses_size = job.cfg.config_file is None and not job.corpus.masked

    def new_run(dataset: str, out_dir: str) -> list[str]:
        return [dataset, *CHOICE, out_dir] if chooses_size else [recipe, dataset, out_dir]

    yield "train on it", new_run(data, out_dir)
    if source == "gpt2":
        recipe = "config/finetune_shakespeare.py"
        yield "or finetune GPT-2", [recipe, data, *_max_iters_option(job, recipe), f"{out_dir}-finetuned"]
    if is_folder and tokenizers.load(Path(source)).hash == tokenizers.load(job.folder).hash:
        other = dataset_name(Path(source), job.folder.parent)
        if other != name and "," not in other:
            mixture = f"--dataset={other}:0.5,{name}:0.5"
            yield "or on both", new_run(mixture, f"--out_dir=out-{Path(other).name}-{name}")
