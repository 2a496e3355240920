"""Token shards: writes Folio's format, and reads Folio's, nanoGPT's and llm.c's formats.

A data set is a folder:

    train.bin, val.bin    token ids as raw little-endian uint16, as nanoGPT writes them (uint32 if the ids need it);
                          a split with several shards has train_000000.bin, train_000001.bin, ...
    *_mask.bin            optional, for each shard: one byte per token, 0 if it does not count as a target
    tokenizer.json        the complete tokenizer
    meta.json             format version, counts, sha256 of the tokenizer and of each shard, command, sources

Two other formats can be read: nanoGPT's folders (train.bin, val.bin and optionally meta.pkl) and llm.c's shards
(*train*.bin and *val*.bin, each with a header of 256 int32). docs/code/files.md describes Folio's.

This module does not import torch.
"""

import errno
import hashlib
import io
import os
import pickle
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from folio import UserError
from folio.base import pickles
from folio.base.files import (
    check_regular,
    other_version,
    read_json,
    refuse_lfs_pointer,
    sha256,
    short_repr,
    shorten,
    sync,
    write_json,
)
from folio.base.number_format import counted
from folio.base.settings import ROOT
from folio.data import tokenizer as tokenizers
from folio.data.tokenizer import EOT_TEXT, CharTokenizer, Tokenizer

FORMAT_VERSION = 2
SPLITS = ("train", "val")
Shards = dict[str, list[dict[str, Any]]]  # split -> its entries in meta.json
NANOGPT_SCRIPT = "prepare.py"  # nanoGPT's script in a data set's folder, kept when the data set is replaced
VERIFY_BYTES = 1 << 26  # the sha256 of data sets of up to 64 MiB is verified on opening (under 0.1 s)
MIN_DOCUMENTS = 5  # fewer documents represent themselves rather than text of their kind
READ_AT_ONCE = 1 << 20  # tokens
LLMC_MAGIC, LLMC_VERSION, LLMC_HEADER = 20240520, 1, 256  # the header of llm.c and modded-nanogpt, in int32

PromptFormat = Literal["chat", "pairs"]  # chat: User: ..., a blank line, Assistant:; pairs: plain prompts
LAST_TARGET = 2  # in a mask: a target that ends a document; a user's mask for another format may have only 0 and 1


class DatasetError(UserError):
    """A data set that cannot be used. The message says how to fix it."""


# --- writing ----------------------------------------------------------------------------------------------------------


def token_dtype(vocab_size: int) -> np.dtype:
    """Return little-endian uint16 if every id fits, otherwise uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class ShardWriter:
    """Writes the shards of one split: SPLIT.bin, or SPLIT_000000.bin, SPLIT_000001.bin, ... if there are several.

    A shard is written under a temporary name, and synced and renamed when it is full. Use the writer as a context
    manager, which closes the files.

    shard_tokens: tokens per shard. masked: also write a *_mask.bin for each shard. state: the result of `state`, to
    resume from.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        vocab_size: int,
        shard_tokens: int,
        masked: bool = False,
        state: dict[str, Any] | None = None,
    ):
        self.folder, self.split, self.vocab_size, self.shard_tokens = folder, split, vocab_size, shard_tokens
        self.dtype = token_dtype(vocab_size)
        self.done: list[dict[str, Any]] = state["shards"] if state else []
        self.open_tokens = state["open"] if state else 0  # tokens in the current shard
        if state:
            self._reopen_shard("")
            self._reopen_shard("_mask")
        self.ids_file = _PartFile(self._part_path(""), self.open_tokens * self.dtype.itemsize)
        self.mask_file = _PartFile(self._part_path("_mask"), self.open_tokens) if masked else None

    def _part_path(self, suffix: str) -> Path:
        return self.folder / f".{self.split}{suffix}.part"

    def _reopen_shard(self, suffix: str) -> None:
        """If the current shard was finished after the state was saved, restore its temporary name."""
        for name in (f"{self.split}_{len(self.done):06d}", self.split):
            finished = self.folder / f"{name}{suffix}.bin"
            if finished.exists():
                os.replace(finished, self._part_path(suffix))
                return

    @property
    def tokens(self) -> int:
        """Number of tokens written to all shards."""
        return sum(entry["tokens"] for entry in self.done) + self.open_tokens

    def write(self, ids: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Append token ids, (N,), and their mask, (N,), which is 1 for tokens that count as targets, otherwise 0.

        Raises DatasetError for an id outside the vocabulary.
        """
        if len(ids) and not (0 <= ids.min() and ids.max() < self.vocab_size):
            invalid = ids.min() if ids.min() < 0 else ids.max()
            raise DatasetError(f"{self.split}: token id {invalid} is outside the vocabulary of {self.vocab_size}")
        while len(ids):
            free = self.shard_tokens - self.open_tokens
            self.ids_file.write(ids[:free].astype(self.dtype, copy=False))
            if self.mask_file:
                self.mask_file.write(mask[:free].astype(np.uint8, copy=False))
                mask = mask[free:]
            self.open_tokens += min(free, len(ids))
            ids = ids[free:]
            if self.open_tokens == self.shard_tokens:
                self._finish_shard(f"{self.split}_{len(self.done):06d}")

    def _finish_shard(self, name: str) -> None:
        path = self.folder / f"{name}.bin"
        entry = {"file": path.name, "tokens": self.open_tokens, "sha256": self.ids_file.rename(path)}
        if self.mask_file:
            entry["mask_sha256"] = self.mask_file.rename(mask_path(path))
        self.done.append(entry)
        self.open_tokens = 0

    def finish(self) -> list[dict[str, Any]]:
        """Finish the last shard. Returns the entries of the split in meta.json."""
        if self.open_tokens:
            self._finish_shard(f"{self.split}_{len(self.done):06d}" if self.done else self.split)
        return self.done

    def state(self) -> dict[str, Any]:
        """Sync all data to disk, and return the state from which another writer can resume."""
        self.ids_file.sync()
        if self.mask_file:
            self.mask_file.sync()
        return {"shards": list(self.done), "open": self.open_tokens}

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.ids_file.close()
        if self.mask_file:
            self.mask_file.close()


class _PartFile:
    """A file under its temporary name, and its sha256. An existing file is truncated to `size` bytes and continued."""

    def __init__(self, path: Path, size: int):
        self.path = path
        self._open(size)

    def _open(self, size: int) -> None:
        self.file = open(self.path, "r+b" if size else "w+b")  # noqa: SIM115  close() closes it
        self.file.truncate(size)
        self.digest = hashlib.sha256()
        while chunk := self.file.read(1 << 20):
            self.digest.update(chunk)

    def write(self, array: np.ndarray) -> None:
        content = memoryview(np.ascontiguousarray(array)).cast("B")
        self.file.write(content)
        self.digest.update(content)

    def sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    def rename(self, path: Path) -> str:
        """Rename the file to its final name, and start an empty one. Returns the sha256 of the finished file."""
        self.sync()
        self.file.close()
        os.replace(self.path, path)
        sync(path.parent)
        digest = self.digest.hexdigest()
        self._open(0)
        return digest

    def close(self) -> None:
        """Close the file, and delete it if it is empty."""
        self.file.close()
        if not self.path.stat().st_size:
            self.path.unlink()


def write_meta(
    folder: Path, tokenizer: Tokenizer, train: list[dict], val: list[dict], made_by: str, **entries: Any
) -> None:
    """Write tokenizer.json and then meta.json, which completes the data set.

    train, val: the results of ShardWriter.finish. made_by: the command. entries: other entries, such as the sources.
    """
    write_json(folder / "tokenizer.json", tokenizer.to_json())
    meta = {
        "format_version": FORMAT_VERSION,
        "made_by": made_by,
        **entries,
        "vocab_size": tokenizer.vocab_size,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "tokenizer": {"kind": tokenizer.kind, "sha256": tokenizer.hash},
        "splits": {"train": train, "val": val},
    }
    write_json(folder / "meta.json", meta)


# --- opening ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """The memory-mapped token ids of a file, (N,), and an optional mask of the tokens that count as targets, (N,)."""

    ids: np.ndarray
    mask: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Dataset:
    """An open data set."""

    folder: Path
    train: list[Shard]
    val: list[Shard]
    vocab_size: int
    hash: str  # hash of the content: data sets with the same hash have the same tokens
    tokenizer: Tokenizer | None  # None: GPT-2's, which nanoGPT and llm.c do not save
    prompt_format: PromptFormat | None = None  # None: plain text without prompts

    def load_tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the data set. GPT-2's is downloaded if the folder has none."""
        return self.tokenizer or tokenizers.gpt2_tokenizer()


def count_documents(shards: list[Shard], eot: int | None) -> int:
    """Count end-of-text tokens, up to MIN_DOCUMENTS. 0: the text is not divided into documents."""
    count = 0
    for shard in shards if eot is not None else []:
        for begin in range(0, len(shard), READ_AT_ONCE):
            count += int((shard.ids[begin : begin + READ_AT_ONCE] == eot).sum())
            if count >= MIN_DOCUMENTS:
                return MIN_DOCUMENTS
    return count


def pair_lengths(shards: list[Shard], eot: int | None) -> np.ndarray:
    """Return the tokens of each pair in masked shards, (pairs,): a prompt, its completion, and the end-of-text token.

    An answer of a chat is a pair with the messages since the previous answer. A pair ends at a target that is an
    end-of-text token or is followed by masked text; it may begin in the shard before. Without masks, there are none.
    """
    ends, tokens_before = [np.array([-1])], 0
    for shard in shards if all(shard.mask is not None for shard in shards) else []:
        for begin in range(0, len(shard), READ_AT_ONCE):
            ids = shard.ids[begin : begin + READ_AT_ONCE]
            is_target = shard.mask[begin : begin + READ_AT_ONCE + 1] != 0  # also of the next token, if there is one
            is_followed = np.append(is_target[1:], True)[: len(ids)]  # by another target, or by another shard
            is_end = is_target[: len(ids)] & (~is_followed | (ids == eot))
            ends.append(tokens_before + begin + np.flatnonzero(is_end))
        tokens_before += len(shard)
    return np.diff(np.concatenate(ends))


def describe_few_documents(documents: int, tokens: int, masked: bool) -> str:
    """Return a warning about a validation set of fewer than MIN_DOCUMENTS documents. masked: they are pairs."""
    split_on = "" if masked else " or with --split_on"
    return (
        f"the validation set is only {counted(documents, 'document')}, {counted(tokens, 'token')}, which may be harder "
        f"or easier than the training text: a validation loss above the training loss need not be overfitting, but the "
        f"losses of runs on this data can be compared; to validate on more documents, or parts of them, prepare the "
        f"text with a larger --val_fraction{split_on}, and --overwrite"
    )


def data_root(data_dir: str | None) -> Path:
    """Return the folder of the data sets: `data_dir`, or data/ next to train.py."""
    return Path(data_dir) if data_dir else ROOT / "data"


def has_data(folder: Path) -> bool:
    """Whether a folder contains shards or a meta.json. The data set may be incomplete."""
    return os.path.isdir(folder) and ((folder / "meta.json").exists() or any(folder.glob("*.bin")))


def dataset_name(folder: Path, root: Path) -> str:
    """Return the value of --dataset for a folder: its name if it is in `root`, otherwise its path."""
    folder = Path(os.path.abspath(folder))
    return folder.name if folder.parent == Path(os.path.abspath(root)) else str(folder)


def open_dataset(folder: Path) -> Dataset:
    """Open a data set of Folio, nanoGPT or llm.c. Raises DatasetError if it is missing, damaged or incomplete."""
    if (folder / "meta.json").exists():
        return _open_folio(folder)
    train, val = folder / "train.bin", folder / "val.bin"
    if train.exists() and val.exists() and not _has_llmc_header(train):
        return _open_nanogpt(folder, train, val)
    return _open_llmc(folder)


# --- Folio's format ---------------------------------------------------------------------------------------------------


class _ShardEntry(NamedTuple):
    """The entry of a shard in meta.json."""

    file: str
    tokens: int
    sha256: str
    mask_sha256: str | None


class _Meta(NamedTuple):
    """The entries of meta.json that are necessary to open the data set."""

    dtype: np.dtype
    vocab_size: int
    tokenizer_hash: str
    splits: dict[str, list[_ShardEntry]]
    prompt_format: PromptFormat | None

    @property
    def shards(self) -> list[_ShardEntry]:
        return [shard for split in SPLITS for shard in self.splits[split]]

    @property
    def hash(self) -> str:
        """A hash of the content of all shards."""
        digests = [shard.sha256 + (shard.mask_sha256 or "") for shard in self.shards]
        return hashlib.sha256("".join(digests).encode()).hexdigest()

    @property
    def is_small(self) -> bool:
        return sum(shard.tokens for shard in self.shards) * self.dtype.itemsize <= VERIFY_BYTES


def _open_folio(folder: Path) -> Dataset:
    path = folder / "meta.json"
    try:
        meta = _parse_meta(read_json(path), path)
        content_hash, verify = meta.hash, meta.is_small
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        reason = f"{type(error).__name__}: {shorten(str(error))}"
        raise DatasetError(f"{path} is not a valid meta.json of Folio ({reason}); prepare the data set again") from None
    refuse_lfs_pointer(folder / "tokenizer.json")
    try:
        tokenizer = tokenizers.load(folder)
    except UserError as error:
        raise DatasetError(f"{error}; prepare the data set again") from None
    if tokenizer.hash != meta.tokenizer_hash or tokenizer.vocab_size != meta.vocab_size:
        raise DatasetError(
            f"{folder / 'tokenizer.json'} is not the tokenizer that meta.json describes; prepare the data set again"
        )
    train, val = ([_map_folio(folder, meta.dtype, shard, verify) for shard in meta.splits[split]] for split in SPLITS)
    return Dataset(folder, train, val, meta.vocab_size, content_hash, tokenizer, meta.prompt_format)


def _parse_meta(meta: Any, path: Path) -> _Meta:
    """Parse and validate meta.json. Raises DatasetError for another version, or other errors for invalid content."""
    if problem := other_version(meta, FORMAT_VERSION):
        raise DatasetError(f"{path}: {problem}; prepare the data set again")
    dtype = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}[meta["dtype"]]
    splits = {
        split: [_ShardEntry(s["file"], s["tokens"], s["sha256"], s.get("mask_sha256")) for s in meta["splits"][split]]
        for split in SPLITS
    }
    prompt_format = meta["prompt_format"]
    if prompt_format not in (None, *get_args(PromptFormat)):
        raise ValueError(f"prompt_format is {short_repr(prompt_format)}")
    parsed = _Meta(dtype, int(meta["vocab_size"]), meta["tokenizer"]["sha256"], splits, prompt_format)
    if parsed.vocab_size < 1 or not all(splits.values()):
        raise ValueError("a split or the vocabulary is missing")
    for shard in parsed.shards:
        if Path(shard.file).name != shard.file:
            raise ValueError(f"it names a file outside its folder: {short_repr(shard.file)}")
    return parsed


def _map_folio(folder: Path, dtype: np.dtype, shard: _ShardEntry, verify: bool) -> Shard:
    """Map a shard and its mask, if any, and check the number of tokens. verify: also check the sha256."""
    path = folder / shard.file
    ids = _map_checked(path, dtype, shard.tokens, shard.sha256 if verify else None)
    if shard.mask_sha256 is None:
        return Shard(ids)
    return Shard(
        ids, _map_checked(mask_path(path), np.dtype("u1"), shard.tokens, shard.mask_sha256 if verify else None)
    )


def _map_checked(path: Path, dtype: np.dtype, tokens: int, digest: str | None) -> np.ndarray:
    """Map a file. Raises DatasetError if the number of tokens or the sha256 (digest) differs."""
    array = _map_raw(path, dtype)
    if len(array) != tokens:
        raise DatasetError(
            f"{path} is truncated or not the original file: it has {counted(len(array), 'token')}, but meta.json says "
            f"{short_repr(tokens)}; prepare the data set again"
        )
    if digest is not None and sha256(path) != digest:
        raise DatasetError(
            f"{path} has changed since it was written: its sha256 does not match meta.json; prepare the data set again"
        )
    return array


def mask_path(shard: Path) -> Path:
    """Return the path of a shard's mask, which may not exist."""
    return shard.with_name(f"{shard.stem}_mask.bin")


# --- nanoGPT's format -------------------------------------------------------------------------------------------------


def _open_nanogpt(folder: Path, train: Path, val: Path) -> Dataset:
    tokenizer = None
    vocab_size = 50257
    if (folder / "meta.pkl").exists():
        tokenizer = nanogpt_tokenizer(folder / "meta.pkl")
        vocab_size = tokenizer.vocab_size
    splits = [[_with_mask(path, _map_raw(path, np.dtype("<u2")))] for path in (train, val)]
    return Dataset(folder, *splits, vocab_size, _hash_ends([train, val]), tokenizer)


def nanogpt_tokenizer(meta: Path, vocab_size: int | None = None) -> CharTokenizer:
    """Read the character tokenizer in nanoGPT's meta.pkl. vocab_size: the vocabulary size of the model.

    Raises DatasetError if a token other than a final end-of-text token is not a single character, or if the tables are
    inconsistent.
    """
    table = load_plain_pickle(meta)
    itos, stoi = table.get("itos"), table.get("stoi")
    if not isinstance(itos, dict) or itos.keys() != set(range(len(itos))) or not itos:
        raise DatasetError(
            f"{meta} has no dict itos that maps the ids from 0 to n - 1 to characters, as nanoGPT's does"
        )
    tokens = [itos[i] for i in range(len(itos))]
    eot = tokens[-1] == EOT_TEXT
    characters = tokens[:-1] if eot else tokens
    for i, token in enumerate(characters):
        if not isinstance(token, str) or len(token) != 1:
            shown = short_repr(token) if isinstance(token, (str, int)) else f"a {type(token).__name__}"
            raise DatasetError(
                f"{meta}: itos maps the id {i} to {shown}, but Folio reads only single characters: tokenize the text "
                f"with prepare/text.py instead"
            )
    if len(set(tokens)) != len(tokens):
        raise DatasetError(f"{meta}: itos maps two ids to {Counter(tokens).most_common(1)[0][0]!r}")
    if stoi is not None and (not isinstance(stoi, dict) or stoi.keys() != set(tokens)):
        raise DatasetError(f"{meta}: stoi and itos do not have the same characters: prepare the data set again")
    for i, token in enumerate(tokens):
        if stoi is not None and stoi[token] != i:
            raise DatasetError(
                f"{meta}: itos maps the id {i} to {token!r}, but stoi maps {token!r} to another id: "
                f"prepare the data set again"
            )
    rows = table.get("vocab_size", len(tokens))
    if not isinstance(rows, int) or rows < len(tokens):
        raise DatasetError(
            f"{meta}: vocab_size is {short_repr(rows)}, but itos has {counted(len(tokens), 'character')}"
        )
    if vocab_size not in (None, rows):
        raise DatasetError(
            f"{meta} has a vocabulary of {rows:,}, but the model has one of {vocab_size:,}: replace it with the "
            f"meta.pkl that the model was trained with"
        )
    return CharTokenizer("".join(characters), eot)


PLAIN_BYTES = 1 << 24  # 16 MiB


def load_plain_pickle(path: Path) -> dict[str, Any]:
    """Load a pickle of dicts, strings and integers, such as nanoGPT's meta.pkl.

    Raises DatasetError for any other opcode, so that the file cannot run code, and for more than 16 MiB.
    """
    try:
        check_regular(path, PLAIN_BYTES)
        content = path.read_bytes()
        pickles.check(io.BytesIO(content), pickles.PLAIN)
        value = pickle.loads(content)
    except (OSError, ValueError, TypeError, LookupError, EOFError, OverflowError, pickle.UnpicklingError) as error:
        raise DatasetError(f"{path} is not plain data and was not opened: {shorten(str(error))}") from None
    if not isinstance(value, dict):
        raise DatasetError(f"{path} does not contain a dict, as nanoGPT's meta.pkl does")
    return value


# --- llm.c's format ---------------------------------------------------------------------------------------------------


def _open_llmc(folder: Path) -> Dataset:
    splits = {
        split: [path for path in sorted(folder.glob(f"*{split}*.bin")) if not path.name.endswith("_mask.bin")]
        for split in SPLITS
    }
    missing = [f"*{split}*.bin" for split in SPLITS if not splits[split]]
    if missing:
        raise DatasetError(
            f"{folder} is not a data set: it has no meta.json and no {' or '.join(missing)}; "
            f"prepare it again (python prepare/NAME.py)"
        )
    train, val = ([_map_llmc(path) for path in splits[split]] for split in SPLITS)
    content_hash = _hash_ends(splits["train"] + splits["val"])
    return Dataset(folder, train, val, vocab_size=50257, hash=content_hash, tokenizer=None)


def _has_llmc_header(path: Path) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(4) == LLMC_MAGIC.to_bytes(4, "little")


def _map_llmc(path: Path) -> Shard:
    try:
        check_regular(path)
    except OSError:
        raise DatasetError(
            f"{path} is not a file, but a folder, a device or a broken link: remove it, or download it again"
        ) from None
    header = np.fromfile(path, dtype="<i4", count=LLMC_HEADER)
    if len(header) < LLMC_HEADER:
        raise DatasetError(
            f"{path} is truncated: it has {counted(path.stat().st_size, 'byte')}, fewer than llm.c's header"
        )
    magic, version, tokens = (int(n) for n in header[:3])
    if magic != LLMC_MAGIC or version != LLMC_VERSION:
        raise DatasetError(
            f"{path}: wrong magic: it starts with {magic}, version {version}, but llm.c's shards start with "
            f"{LLMC_MAGIC}, version {LLMC_VERSION}; a raw shard without a header must be named train.bin or val.bin"
        )
    size = path.stat().st_size
    if size != 4 * LLMC_HEADER + 2 * tokens or not tokens:
        raise DatasetError(
            f"{path} has {counted(size, 'byte')}, but its header says {counted(tokens, 'token')}; download it again"
        )
    return _with_mask(path, _map(path, np.dtype("<u2"), 4 * LLMC_HEADER))


# --- memory-mapped files ----------------------------------------------------------------------------------------------


def _map_raw(path: Path, dtype: np.dtype) -> np.ndarray:
    """Map a file without a header. Raises DatasetError if it is missing, empty or truncated."""
    refuse_lfs_pointer(path)
    size = path.stat().st_size if path.is_file() else None
    if not size:
        problem = "missing, or not a file" if size is None else "empty"
        raise DatasetError(f"{path} is {problem}; prepare the data set again")
    if size % dtype.itemsize:
        raise DatasetError(
            f"{path} is truncated: it has {counted(size, 'byte')}, not a multiple of {dtype.itemsize} ({dtype.name})"
        )
    return _map(path, dtype)


def _map(path: Path, dtype: np.dtype, offset: int = 0) -> np.ndarray:
    """Map a file from byte `offset`. If too many files are open, increase the limit on open files and retry."""
    while True:
        try:
            return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset))
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
        _raise_open_file_limit(path.parent)


def _raise_open_file_limit(folder: Path) -> None:
    """Double this process's limit on open files. Raises DatasetError if the system does not allow it."""
    import resource  # not available on Windows, which has no such limit

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    larger = 2 * soft if hard == resource.RLIM_INFINITY else min(2 * soft, hard)
    if larger == soft:
        raise DatasetError(
            f"{folder} has more shards than the limit of {hard:,} open files per process: prepare it again with a "
            f"larger --shard_tokens, or raise the limit with ulimit -Hn"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (larger, hard))


def _with_mask(path: Path, ids: np.ndarray) -> Shard:
    """Return a shard of nanoGPT or llm.c, with its mask if the file exists."""
    if not mask_path(path).exists():
        return Shard(ids)
    mask = _map_raw(mask_path(path), np.dtype("u1"))
    if len(mask) != len(ids):
        raise DatasetError(
            f"{mask_path(path)} has {counted(len(mask), 'entry', 'entries')}, but {path.name} has "
            f"{counted(len(ids), 'token')}"
        )
    return Shard(ids, mask)


def _hash_ends(paths: list[Path]) -> str:
    """Compute a fast hash of shards without a saved hash: the name, the size, and 64 KiB from each end of each file."""
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as file:
            digest.update(file.read(1 << 16))
            file.seek(max(0, size - (1 << 16)))
            digest.update(file.read())
    return digest.hexdigest()
