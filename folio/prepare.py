"""A corpus to a data set: documents are tokenized by all cores, in order, into shards; then counted and reported.

What is made grows in DATA_DIR/.NAME.part, which becomes DATA_DIR/NAME when it is whole. Interrupted after a whole shard
and started again, it goes on behind that shard and ends with the same bytes.
"""

import itertools
import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import sys
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from tqdm import tqdm

from folio import UserError
from folio import tokenizer as tokenizers
from folio.configurator import ROOT, Settings
from folio.corpus import END, Block, Corpus, CorpusError, Part, document_hash
from folio.files import locked, read_json, sync, write_json
from folio.shards import SPLITS, ShardWriter, token_dtype, write_meta
from folio.tokenizer import EOT_TEXT, BPETokenizer, ByteTokenizer, CharTokenizer, TextError, Tokenizer

SMALL_CORPUS = 1 << 22  # bytes up to which other processes take longer to start than they save
BPE_TEXT = 100_000_000  # bytes of text that a BPE is trained on, about, spread evenly over a larger corpus
MOST_TOKENS = 1_000_000  # in the vocabulary of a BPE; GPT-4's has 100,000
LONGEST_NAME = 200  # bytes of a data set's name; file systems take 255, and its temporary folder's name is longer
PROGRESS_VERSION = 2  # of progress.json, and of how a corpus is divided into blocks


@dataclass(frozen=True)
class PrepareConfig(Settings):
    # --- the data set ---
    name: str | None = None  # folder under data_dir; None: the script's or the input's name
    data_dir: str | None = None  # folder of the data sets; None: data/ beside train.py
    overwrite: bool = False  # True: replace another data set of this name
    val_fraction: float | None = None  # for validation; None: 0.1 of a single file, else 0.01
    dedup: bool = False  # True: leave out documents that have come before
    shard_tokens: int = 100_000_000  # tokens a shard has at most
    # --- the tokenizer ---
    tokenizer: str = "char"  # char, byte, gpt2, bpe (trained on this text), or the folder of a data set or a run
    vocab_size: int = 8192  # tokens of a bpe
    on_unknown: Literal["error", "skip", "replace"] = "error"  # what becomes of characters that a char tokenizer lacks
    # --- the machine ---
    num_workers: int | None = None  # processes that tokenize; None: one a core, none for a small text; 0: none

    def problems(self) -> list[tuple[str, str]]:
        """(setting, what is wrong with it and how to mend it) for all that cannot work."""
        found = []
        if self.val_fraction is not None and not 0 < self.val_fraction < 1:
            found.append(("val_fraction", "it must be above 0 and below 1, such as 0.1"))
        if self.shard_tokens < 2:
            found.append(("shard_tokens", "it must be at least 2"))
        if self.vocab_size < 258:
            found.append(("vocab_size", "it must be at least 258: the 256 bytes, one merge, and the end-of-text token"))
        if self.vocab_size > MOST_TOKENS:
            found.append(("vocab_size", f"it must be at most {MOST_TOKENS:,}"))
        if self.num_workers is not None and self.num_workers < 0:
            found.append(("num_workers", "it must not be negative"))
        if self.name is not None and (not self.name or self.name != name_from(self.name)):
            rule = (
                "--dataset must be able to name it: a folder's name without commas, colons, control characters, a dot "
            )
            rule += f"at the start or white space at the ends, of 1 to {LONGEST_NAME} bytes"
            found.append(
                ("name", f"{rule}; {f'take {name_from(self.name)!r}' if name_from(self.name) else 'take None'}")
            )
        return found

    @property
    def data_folder(self) -> Path:
        return Path(self.data_dir) if self.data_dir else ROOT / "data"


def name_from(text: str) -> str:
    """The name nearest to `text` that --dataset, in which commas and colons divide, can name; it may be empty."""
    forbidden = ("Cc", "Cs", "Zl", "Zp")  # control characters, halves of surrogate pairs, line and paragraph separators
    name = "".join("_" if c in ",:" or unicodedata.category(c) in forbidden else c for c in Path(text).name)
    name = re.sub(r"^[.\s]+", "", name).encode()[:LONGEST_NAME].decode("utf-8", "ignore")
    return name.rstrip()


def default_name(file: str) -> str:
    """A name for the data set that is made from a file or folder. Raises UserError where there is none."""
    name = name_from(Path(file).name.split(".")[0])
    if not name or "*" in name:
        raise UserError(f"{file} makes no good name for a data set: say --name=NAME")
    return name


Split = Callable[[np.ndarray, np.ndarray], np.ndarray]  # numbers and hashes of documents -> True for validation


def by_hash(fraction: float) -> Split:
    """That share of all documents, chosen by what they say: more documents never move an old one."""
    return lambda numbers, hashes: hashes < np.uint64(fraction * 2**64)


def by_smallest(bound: int) -> Split:
    """The documents of which 63 bits of the hash are below a bound."""
    return lambda numbers, hashes: hashes >> np.uint64(1) < np.uint64(bound)


def by_number(chosen: np.ndarray) -> Split:
    """The documents with these numbers."""
    return lambda numbers, hashes: np.isin(numbers, chosen)


# --- tokenizing -------------------------------------------------------------------------------------------------------


class Encoded(NamedTuple):
    """What became of a block: D documents, N tokens."""

    ids: np.ndarray  # (N,), in the shards' type, each document with its end-of-text id
    mask: np.ndarray | None  # (N,) uint8, which of them count as targets
    lengths: np.ndarray  # (D,) tokens a document
    sizes: np.ndarray  # (D,) bytes of UTF-8
    hashes: np.ndarray  # (D,) uint64


def encode(block: Block, tokenizer: Tokenizer, eot: int | None, masked: bool) -> Encoded:
    """Tokenize the documents of a block. An empty document gives nothing, not even an end."""
    dtype = token_dtype(tokenizer.vocab_size)
    ends = eot is not None and not (isinstance(block, Part) and not block.last)
    end = np.array([eot] if ends else [], dtype=dtype)
    ids, mask, lengths, sizes, hashes = [end[:0]], [np.array([], dtype=np.uint8)], [], [], []
    for number, document in enumerate(block.documents()):
        texts = document if isinstance(document, list) else [(document or "", True), (END, True)]
        content = "".join(text or "" for text, _ in texts).encode("utf-8", "replace")
        found = []
        for text, counts in texts if content or isinstance(block, Part) else []:
            try:
                found.append((end if text is END else tokenizer.encode(text).astype(dtype, copy=False), counts))
            except TextError as error:
                raise UserError(f"{block.place(number, error.at)}: {error.what}") from None
            except UserError as error:
                raise UserError(f"{block.place(number)}: {error}") from None
        ids += [tokens for tokens, _ in found]
        if masked:
            mask += [np.full(len(tokens), counts, dtype=np.uint8) for tokens, counts in found]
        lengths.append(sum(len(tokens) for tokens, _ in found))
        sizes.append(len(content))
        hashes.append(block.hash if isinstance(block, Part) else document_hash(content))
    return Encoded(
        np.concatenate(ids),
        np.concatenate(mask) if masked else None,
        np.array(lengths, dtype=np.int64),
        np.array(sizes, dtype=np.int64),
        np.array(hashes, dtype=np.uint64),
    )


def alphabet(block: Block) -> str:
    """The characters that occur in a block."""
    return "".join(set().union(*texts_of(block)))


def texts_of(block: Block) -> Iterator[str]:
    for document in block.documents():
        yield from (text or "" for text, _ in document) if isinstance(document, list) else [document or ""]


def mapped(function: Callable, blocks: Iterable[Block], workers: int, *arguments: Any) -> Iterator[tuple[Block, Any]]:
    """Each block with function(block, *arguments), in order, computed by so many processes; 0: by this one.

    Only a few blocks are ahead at a time, so that the memory does not grow with the corpus. Raises UserError if a
    process ends by itself.
    """
    if not workers:
        for block in blocks:
            yield block, function(block, *arguments)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context(), _start, (function, arguments))
    with _uninterrupted():  # a Ctrl-C while processes start left some dead and the others waiting
        for _ in range(workers):
            pool.submit(int)
    waiting: deque[tuple[Block, Future]] = deque()
    try:
        for block in blocks:
            waiting.append((block, pool.submit(_apply, block)))
            if len(waiting) > 2 * workers:
                block, result = waiting.popleft()
                yield block, result.result()
        for block, result in waiting:
            yield block, result.result()
    except BrokenProcessPool:
        raise UserError(
            "a process that tokenized was ended from outside, most often because the memory ran out; "
            "start again with a smaller --num_workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait until the block has ended. Processes that start in it never see one. Nothing on Windows."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(function: Callable, arguments: tuple[Any, ...]) -> None:
    """Begin a worker process: what it does to each block."""
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asked for the work
    _work = function, arguments


def _apply(block: Block) -> Any:
    function, arguments = _work
    return function(block, *arguments)


def make_tokenizer(cfg: PrepareConfig, corpus: Corpus, eot: bool, workers: int) -> Tokenizer:
    """The tokenizer that cfg.tokenizer names; char and bpe are made from the corpus. Raises UserError."""
    if cfg.tokenizer == "byte":
        return ByteTokenizer()
    if cfg.tokenizer == "gpt2":
        return tokenizers.gpt2_tokenizer()
    if cfg.tokenizer == "char":
        found: set[str] = set(tokenizers.REPLACEMENT if cfg.on_unknown == "replace" else "")
        for _, characters in mapped(alphabet, corpus.blocks(), workers):
            found.update(characters)
        if not found:
            raise UserError(f"{corpus.sources[0].name} is empty; there is nothing to learn from")
        return CharTokenizer.of(found, eot)
    if cfg.tokenizer == "bpe":
        share = min(1.0, BPE_TEXT / max(1, corpus.text_bytes))
        some = (block for k, block in enumerate(corpus.blocks()) if int((k + 1) * share) > int(k * share))
        learned = BPETokenizer.train((text for block in some for text in texts_of(block)), cfg.vocab_size)
        if learned.vocab_size < cfg.vocab_size:
            print(f"the text gives a vocabulary of {learned.vocab_size:,}, not {cfg.vocab_size:,}: it is small")
        return learned
    path = Path(cfg.tokenizer)
    if not os.path.exists(path):  # unlike Path.exists, it answers False for a name that is too long
        raise UserError(
            f"tokenizer={cfg.tokenizer}: take char, byte, gpt2, bpe, or the folder of a data set or of a run"
        )
    return tokenizers.load(path)


# --- writing ----------------------------------------------------------------------------------------------------------


class Seen:
    """Hashes of documents, 8 bytes each, in sorted arrays of growing size."""

    def __init__(self) -> None:
        self.levels: list[np.ndarray] = []

    def add(self, hashes: np.ndarray) -> np.ndarray:
        """Which of these, (D,), have been added before, or stand before in this very array."""
        again = np.ones(len(hashes), dtype=bool)
        unique, first = np.unique(hashes, return_index=True)
        new = np.ones(len(unique), dtype=bool)
        for level in self.levels:
            new &= level[np.searchsorted(level, unique).clip(max=len(level) - 1)] != unique
        again[first[new]] = False
        if new.any():
            self.levels.append(unique[new])
        while len(self.levels) > 1 and len(self.levels[-2]) <= 2 * len(self.levels[-1]):
            self.levels[-2:] = [np.sort(np.concatenate(self.levels[-2:]))]
        return again


@dataclass
class Progress:
    """What has been done, up to the end of a block: with the files that it speaks of, enough to go on from there."""

    blocks: int = 0
    number: int = 0  # of the next document; empty and left-out ones have numbers, too
    documents: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    bytes: int = 0  # of the documents that are in the set
    empty: int = 0
    left_out: int = 0  # as duplicates
    longest: int = 0  # tokens
    longest_number: int = 0
    remembered: int = 0  # documents in the file of their hashes
    open: dict[str, Any] | None = None  # the document whose parts are coming; split is None if it is left out
    writers: dict[str, Any] = field(default_factory=dict)


REMEMBERED = np.dtype([("hash", "<u8"), ("tokens", "<u4")])  # of a document: twice 63 bits and 1 for validation; tokens


class Build:
    """The data set while it grows in its folder. A context, which closes the files.

    notes: what progress.json says beside the progress, for `_saved_notes`.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, split: Split, cfg: PrepareConfig, masked: bool, notes: dict):
        self.folder, self.split, self.notes = folder, split, notes
        saved = read_json(folder / "progress.json") if (folder / "progress.json").exists() else None
        self.progress = Progress(**saved["progress"]) if saved else Progress()
        size, writers = tokenizer.vocab_size, self.progress.writers
        self.writers = {s: ShardWriter(folder, s, size, cfg.shard_tokens, masked, writers.get(s)) for s in SPLITS}
        known = self.progress.remembered
        self.documents = open(folder / "documents", "r+b" if saved else "w+b")  # noqa: SIM115
        hashes = np.fromfile(self.documents, dtype=REMEMBERED, count=known)["hash"]
        self.documents.seek(REMEMBERED.itemsize * known)
        self.documents.truncate()
        self.seen = Seen() if cfg.dedup else None
        if self.seen:
            self.seen.add(hashes >> np.uint64(1))
            if self.progress.open:
                self.seen.add(np.array([self.progress.open["hash"]], dtype=np.uint64) >> np.uint64(1))

    def __enter__(self) -> "Build":
        return self

    def __exit__(self, *_: object) -> None:
        self.documents.close()
        for writer in self.writers.values():
            writer.__exit__()

    @property
    def tokens(self) -> int:
        return sum(writer.tokens for writer in self.writers.values())

    def add(self, block: Block, encoded: Encoded) -> None:
        """Take in the next block; when it ended a shard, all that is done is on the disk when this returns."""
        shards = sum(len(writer.done) for writer in self.writers.values())
        if isinstance(block, Part):
            self._add_part(block, encoded)
        else:
            self._add_documents(encoded)
        self.progress.blocks += 1
        if sum(len(writer.done) for writer in self.writers.values()) > shards:
            self.documents.flush()
            os.fsync(self.documents.fileno())
            self.progress.writers = {split: writer.state() for split, writer in self.writers.items()}
            write_json(self.folder / "progress.json", {**self.notes, "progress": asdict(self.progress)})

    def _add_documents(self, encoded: Encoded) -> None:
        p = self.progress
        numbers = p.number + np.arange(len(encoded.lengths))
        keep = encoded.sizes > 0
        p.empty += int((~keep).sum())
        if self.seen:
            again = np.zeros_like(keep)
            again[keep] = self.seen.add(encoded.hashes[keep] >> np.uint64(1))
            p.left_out += int(again.sum())
            keep &= ~again
        val = self.split(numbers, encoded.hashes)
        for split, chosen in (("train", keep & ~val), ("val", keep & val)):
            if chosen.all():
                self.writers[split].write(encoded.ids, encoded.mask)
            elif chosen.any():
                tokens = np.repeat(chosen, encoded.lengths)
                mask = None if encoded.mask is None else encoded.mask[tokens]
                self.writers[split].write(encoded.ids[tokens], mask)
            p.documents[split] += int(chosen.sum())
        self._remember(encoded.hashes[keep], val[keep], encoded.lengths[keep])
        p.bytes += int(encoded.sizes[keep].sum())
        lengths = np.where(keep, encoded.lengths, 0)
        if len(lengths) and lengths.max() > p.longest:
            p.longest, p.longest_number = int(lengths.max()), int(numbers[lengths.argmax()])
        p.number += len(numbers)

    def _add_part(self, block: Part, encoded: Encoded) -> None:
        p = self.progress
        hashes = np.array([block.hash], dtype=np.uint64)
        if p.open is None:
            val = block.split == "val" if block.split else bool(self.split(np.array([p.number]), hashes)[0])
            again = self.seen is not None and not block.split and self.seen.add(hashes >> np.uint64(1))[0]
            p.open = {"split": None if again else SPLITS[val], "tokens": 0, "bytes": 0, "hash": block.hash}
            p.number += 1
        split = p.open["split"]
        if split:
            self.writers[split].write(encoded.ids, encoded.mask)
        p.open["tokens"] += len(encoded.ids)
        p.open["bytes"] += int(encoded.sizes.sum())
        if not block.last:
            return
        if split is None:
            p.left_out += 1
        elif not p.open["bytes"]:
            p.empty += 1
        else:
            if not block.split:
                self._remember(hashes, np.array([split == "val"]), np.array([p.open["tokens"]]))
            p.documents[split] += 1
            p.bytes += p.open["bytes"]
            if p.open["tokens"] > p.longest:
                p.longest, p.longest_number = p.open["tokens"], p.number - 1
        p.open = None

    def _remember(self, hashes: np.ndarray, val: np.ndarray, tokens: np.ndarray) -> None:
        self.progress.remembered += len(hashes)
        documents = np.empty(len(hashes), dtype=REMEMBERED)
        documents["hash"] = (hashes | np.uint64(1)) ^ (~val).astype("<u8")
        documents["tokens"] = tokens.clip(max=2**32 - 1)
        self.documents.write(documents.tobytes())

    def _remembered(self) -> np.ndarray:
        """All documents in the set."""
        self.documents.flush()
        return np.fromfile(self.folder / "documents", dtype=REMEMBERED)

    def empty_split(self) -> str | None:
        """The split that has nothing to predict, if there is one. Raises UserError if there is no text at all."""
        if not self.progress.bytes:
            raise UserError("there is no text in the input; there is nothing to learn from")
        return next((split for split in ("val", "train") if self.writers[split].tokens < 2), None)

    def nearest_division(self, fraction: float) -> int:
        """The bound for `by_smallest` that comes nearest to this fraction of the documents.

        Both splits get at least one document and two tokens, and documents that are the same get into one split.
        Raises UserError where that cannot be.
        """
        documents = self._remembered()
        documents["hash"] >>= np.uint64(1)
        documents.sort(order="hash")
        ends = np.flatnonzero(np.diff(documents["hash"])) + 1  # how many documents validation may have
        tokens = np.cumsum(documents["tokens"], dtype=np.int64)
        fit = ends[(tokens[ends - 1] >= 2) & (tokens[-1] - tokens[ends - 1] >= 2)]
        if not len(fit):
            what = f"the {len(documents):,} documents have {tokens[-1]:,} tokens, too few for two splits"
            if not len(ends):
                what = (
                    "there is only one document"
                    if len(documents) == 1
                    else f"all {len(documents):,} documents are the same"
                )
                what += ", and no document is in both splits"
            raise UserError(f"{what}; add another one, or join all text in one .txt file, which is divided at its tail")
        nearest = fit[np.abs(fit - max(1, round(fraction * len(documents)))).argmin()]
        return int(documents["hash"][nearest])

    def duplicates(self) -> dict[str, int]:
        """Documents that stand more than once in the set, and those of validation that stand in training, too."""
        hashes = np.sort(self._remembered()["hash"])
        same = hashes[1:] >> np.uint64(1) == hashes[:-1] >> np.uint64(1)
        val = (hashes & np.uint64(1)).astype(bool)
        train_hashes, val_hashes = (np.unique(hashes[chosen] >> np.uint64(1)) for chosen in (~val, val))
        leaked = np.intersect1d(train_hashes, val_hashes, assume_unique=True)
        in_both = np.isin(hashes[val] >> np.uint64(1), leaked).sum()
        return {"repeated": int(same.sum()), "val_in_train": int(in_both), "left_out": self.progress.left_out}


# --- all of it --------------------------------------------------------------------------------------------------------


def prepare(cfg: PrepareConfig, corpus: Corpus, name: str, split: Split | None = None, masked: bool = False) -> Path:
    """Make the data set `name` out of the corpus, say what is in it and how to train on it; returns its folder.

    split: which documents are for validation; None: by cfg.val_fraction, a single text at its tail and many by hash.
    Where the hash leaves a split empty, a second pass takes those with the smallest hashes.
    masked: the documents come in segments, not all of which count as targets.
    Raises UserError, and then leaves no data set and nothing half-written, but for whole shards from which the same
    command goes on.
    """
    assert name and name == name_from(name)
    started = time.perf_counter()
    val_fraction = cfg.val_fraction or (0.1 if corpus.is_one_file else 0.01)
    folder, part = cfg.data_folder / name, cfg.data_folder / f".{name}.part"
    if folder.is_file():
        raise UserError(f"{folder} is a file, not the folder of a data set; give it another --name, or remove the file")
    recipe = json.loads(json.dumps(_recipe(cfg, corpus, val_fraction)))
    if not cfg.overwrite and _is_there(folder, recipe, cfg):
        return folder
    workers = cfg.num_workers
    if workers is None:
        workers = 0 if corpus.text_bytes <= SMALL_CORPUS else cores()
    with _alone(part):
        if not _goes_on(part, recipe):
            shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir(parents=True, exist_ok=True)
            if (part / "tokenizer.json").exists():
                tokenizer = tokenizers.load(part)
            else:
                tokenizer = make_tokenizer(cfg, corpus, not corpus.is_one_text, workers)
                write_json(part / "tokenizer.json", tokenizer.to_json())
            tokenizer.on_unknown = cfg.on_unknown
            notes = _saved_notes(part) or {"version": PROGRESS_VERSION, "recipe": recipe, "bound": None}
            while True:
                by_fraction = split or by_hash(val_fraction)
                chosen = by_fraction if notes["bound"] is None else by_smallest(notes["bound"])
                with Build(part, tokenizer, chosen, cfg, masked, notes) as build:
                    _fill(build, corpus, tokenizer, val_fraction, masked, workers)
                    if not (empty := build.empty_split()):
                        how = "chosen" if split else "tail" if corpus.is_one_text else "hash"
                        how = "smallest hashes" if notes["bound"] is not None else how
                        splits = {s: writer.finish() for s, writer in build.writers.items()}
                        report = _report(build, splits, tokenizer, {"by": how, "val_fraction": val_fraction})
                        break
                    if split or corpus.is_one_text or notes["bound"] is not None:
                        _refuse_empty(build, empty, val_fraction)
                    notes["bound"] = build.nearest_division(val_fraction)
                _clear(part)
            made_by = shlex.join(["python", *sys.argv])
            sources = [{"name": s.name, "bytes": s.bytes} for s in corpus.sources[:100]]
            about = {"source": {"files": len(corpus.sources), "bytes": corpus.bytes, "first": sources}}
            write_json(part / "report.json", report)
            write_meta(part, tokenizer, **splits, made_by=made_by, **about, val_fraction=val_fraction, recipe=recipe)
            _put_in_place(part, folder)
            for left in ("progress.json", "documents"):
                (folder / left).unlink(missing_ok=True)
        except OSError as error:
            kept = _give_up(part)
            raise UserError(f"{folder} could not be written ({error}); {kept}") from None
        except KeyboardInterrupt:
            print(f"\nstopped; {_give_up(part)}", file=sys.stderr)
            raise
        except CorpusError:  # when it is mended, it is another corpus
            shutil.rmtree(part, ignore_errors=True)
            raise
        except UserError:
            _give_up(part)
            raise
    seconds = time.perf_counter() - started
    print(described(folder, report, tokenizer, seconds))
    settings = [f"--dataset={name}", f"--out_dir=out-{name}", *([f"--data_dir={cfg.data_dir}"] if cfg.data_dir else [])]
    print(f"train on it: {shlex.join(['python', 'train.py', 'config/shakespeare_char.py', *settings])}")
    return folder


def _fill(build: Build, corpus: Corpus, tokenizer: Tokenizer, val_fraction: float, masked: bool, workers: int) -> None:
    """Tokenize what is not done yet, with a bar."""
    eot = None if corpus.is_one_text else tokenizer.eot
    blocks = itertools.islice(corpus.blocks(val_fraction), build.progress.blocks, None)
    if build.progress.blocks:
        print(f"going on behind {sum(len(w.done) for w in build.writers.values())} whole shards")
    bar, first_tokens, begun = None, build.tokens, time.perf_counter()
    with closing(mapped(encode, blocks, workers, tokenizer, eot, masked)) as results:
        for block, encoded in results:
            if bar is None:  # after the other processes have started: its thread must not be copied into them
                _check_disk(build, corpus, encoded)
                bar = tqdm(total=corpus.bytes, initial=0, unit="B", unit_scale=True, disable=None, leave=False)
            build.add(block, encoded)
            bar.set_postfix_str(
                f"{(build.tokens - first_tokens) / (time.perf_counter() - begun):,.0f} tokens/s", refresh=False
            )
            bar.update(block.read - bar.n)
    if bar is not None:
        bar.close()


def _check_disk(build: Build, corpus: Corpus, first: Encoded) -> None:
    """Raise UserError where the disk has less room than the shards will take, by the first block's tokens a byte."""
    itemsize = first.ids.itemsize + (first.mask is not None)
    tokens = corpus.text_bytes * len(first.ids) / max(1, first.sizes.sum()) - build.tokens
    free = shutil.disk_usage(build.folder).free
    if tokens * itemsize > free:
        raise UserError(
            f"{build.folder.parent} has {free / 1e9:.2f} GB free, and the shards will take about "
            f"{tokens * itemsize / 1e9:.2f} GB; make room, or choose another --data_dir"
        )


def _refuse_empty(build: Build, split: str, val_fraction: float) -> None:
    """Raise UserError for a split that has nothing to predict."""
    word, change = ("validation", "larger") if split == "val" else ("training", "smaller")
    raise UserError(
        f"the {word} split would be empty with val_fraction={val_fraction}: tokens in all: {build.tokens:,}; "
        f"take a {change} --val_fraction, or more text"
    )


def _recipe(cfg: PrepareConfig, corpus: Corpus, val_fraction: float) -> dict[str, Any]:
    """Changes when the data set would be another one."""
    made_with = cfg.tokenizer
    if os.path.exists(made_with) and made_with not in ("char", "byte", "gpt2", "bpe"):
        made_with = tokenizers.load(Path(made_with)).hash
    settings = {name: getattr(cfg, name) for name in ("vocab_size", "on_unknown", "dedup", "shard_tokens")}
    return {"tokenizer": made_with, **settings, "val_fraction": val_fraction, **corpus.fingerprint()}


def _is_there(folder: Path, recipe: dict[str, Any], cfg: PrepareConfig) -> bool:
    """Whether this very data set has been made already. Raises UserError if the folder holds something else."""
    if not folder.exists() or not any(folder.iterdir()):
        return False
    try:
        meta = read_json(folder / "meta.json")
        if meta.get("recipe") == recipe:
            print(f"{folder} is prepared already; --overwrite=True makes it anew")
            return True
        what = f"another data set ({meta['tokenizer']['kind']}, {meta['vocab_size']:,} tokens, by {meta['made_by']})"
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        what = "other files"
    raise UserError(
        f"{folder} holds {what}, and this one would be {cfg.tokenizer}: give it another --name, or replace what is "
        f"there with --overwrite=True"
    )


def _saved_notes(part: Path) -> dict[str, Any] | None:
    """What progress.json says beside the progress of an interrupted run, or None."""
    try:
        saved = read_json(part / "progress.json")
        return {name: saved[name] for name in ("version", "recipe", "bound")}
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _goes_on(part: Path, recipe: dict[str, Any]) -> bool:
    """Whether an interrupted run has left what this one can resume from."""
    notes = _saved_notes(part)
    return notes is not None and notes["version"] == PROGRESS_VERSION and notes["recipe"] == recipe


def _clear(part: Path) -> None:
    """Remove what a pass over the corpus has written, its progress first."""
    (part / "progress.json").unlink(missing_ok=True)
    for path in part.iterdir():
        if path.name != "tokenizer.json":
            path.unlink()


def _give_up(part: Path) -> str:
    """Remove what cannot be used again; says what is kept."""
    if (part / "progress.json").exists():
        return "the whole shards are kept, and the same command goes on behind them"
    shutil.rmtree(part, ignore_errors=True)
    return "nothing was kept"


def _put_in_place(part: Path, folder: Path) -> None:
    """Give the finished folder its name; what was there goes."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _alone(part: Path) -> Iterator[None]:
    """Keep other processes from making the same data set. Raises UserError if one does."""
    busy = f"{part.parent}: another process is preparing this data set; wait for it"
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(part.with_suffix(".lock"), busy))
        except OSError as error:
            raise UserError(f"{part.parent} cannot be written ({error}); choose another --data_dir") from None
        yield


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- the report -------------------------------------------------------------------------------------------------------


def _report(
    build: Build, splits: dict[str, list[dict[str, Any]]], tokenizer: Tokenizer, validation: dict[str, Any]
) -> dict[str, Any]:
    """What report.json holds."""
    p = build.progress
    tokens = {split: sum(entry["tokens"] for entry in entries) for split, entries in splits.items()}
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    for entry in (entry for entries in splits.values() for entry in entries):
        ids = np.memmap(build.folder / entry["file"], dtype=token_dtype(tokenizer.vocab_size), mode="r")
        for begin in range(0, len(ids), 1 << 20):
            counts += np.bincount(ids[begin : begin + (1 << 20)], minlength=len(counts))
    common = np.argsort(-counts, kind="stable")[:20]
    return {
        "documents": p.documents,
        "validation": validation,
        "tokens": tokens,
        "bytes": p.bytes,
        "bytes_per_token": p.bytes / sum(tokens.values()),
        "longest_document": {"number": p.longest_number, "tokens": p.longest},
        "empty_documents": p.empty,
        "duplicates": build.duplicates(),
        "vocabulary_used": int((counts > 0).sum()),
        "most_common_tokens": [
            {"id": int(i), "text": _shown(tokenizer, int(i)), "count": int(counts[i])} for i in common if counts[i]
        ],
    }


def _shown(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; bytes that are not a whole character as \\x and their number."""
    return EOT_TEXT if token == tokenizer.eot else tokenizer.token_bytes(token).decode("utf-8", "backslashreplace")


VALIDATION = {  # how the validation split was chosen -> what the report says
    "tail": "the tail of the text",
    "hash": "by a hash of each document",
    "smallest hashes": "the documents with the smallest hashes, because one split would be empty otherwise",
    "chosen": "the documents that this script chooses",
}


def described(folder: Path, report: dict[str, Any], tokenizer: Tokenizer, seconds: float) -> str:
    """The report in a few lines."""
    tokens, documents, twice = report["tokens"], report["documents"], report["duplicates"]
    words = [repr(token["text"]) for token in report["most_common_tokens"][:8]]
    lines = [
        f"{folder}: {tokens['train']:,} training and {tokens['val']:,} validation tokens of {tokenizer.vocab_size:,} "
        f"({tokenizer.kind}), in {seconds:,.1f} s",
        f"{documents['train']:,} + {documents['val']:,} documents, {report['bytes']:,} bytes, "
        f"{report['bytes_per_token']:.2f} a token; the longest has {report['longest_document']['tokens']:,} tokens, "
        f"{report['empty_documents']:,} are empty",
        f"validation: {VALIDATION[report['validation']['by']]} (val_fraction={report['validation']['val_fraction']})",
        f"the most common tokens: {' '.join(words)}; {report['vocabulary_used']:,} of the vocabulary occur",
    ]
    if twice["left_out"]:
        lines.append(f"{twice['left_out']:,} duplicates were left out")
    if twice["repeated"]:
        lines.append(
            f"{twice['repeated']:,} documents repeat another one to the letter, and {twice['val_in_train']:,} of the "
            f"validation documents stand in training, too; --dedup=True leaves them out"
        )
    return "\n".join(lines)
