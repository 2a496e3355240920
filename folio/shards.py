"""Token shards: the writer, and the reader of Folio's, nanoGPT's and llm.c's formats.

A data set is a folder:

    train.bin, val.bin    raw little-endian uint16 token ids, as nanoGPT writes them (uint32 when the ids need it);
                          many shards of a split are train_000000.bin and on
    *_mask.bin            perhaps, beside a shard: a byte a token, 0 where it does not count as a target
    tokenizer.json        the tokenizer, whole
    meta.json             format version, counts, sha256 of the tokenizer and of each shard, how it was made

Read as they are, too: nanoGPT's folders (train.bin, val.bin and perhaps meta.pkl) and llm.c's shards (*train*.bin and
*val*.bin, each with a header of 256 int32). docs/data.md has the formats in full.

Nothing here needs torch.
"""

import errno
import hashlib
import io
import os
import pickle
import pickletools
import reprlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from folio import UserError, tokenizer
from folio.files import read_json, sha256, sync, write_json
from folio.tokenizer import EOT_TEXT, CharTokenizer, Tokenizer

FORMAT_VERSION = 2
SPLITS = ("train", "val")
VERIFY_BYTES = 1 << 26  # data sets up to this size (64 MiB, under 0.1 s) have their sha256 checked at every open
LLMC_MAGIC, LLMC_VERSION, LLMC_HEADER = 20240520, 1, 256  # llm.c's and modded-nanogpt's header, in int32


class DatasetError(UserError):
    """A data set that cannot be used, and the way to mend it."""


# --- writing ----------------------------------------------------------------------------------------------------------


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 where every id fits, else uint32; little-endian."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class ShardWriter:
    """The shards of one split: SPLIT.bin, or, when there is more than `shard_tokens`, SPLIT_000000.bin and on.

    Each is written under a temporary name, synced and renamed when it is full. `state` says how to go on after an
    interruption. masked: a *_mask.bin beside each shard says which tokens count as targets.
    Usable as a context, which closes the files. write raises DatasetError for an id outside 0 .. vocab_size - 1.
    """

    def __init__(self, folder: Path, split: str, vocab_size: int, shard_tokens: int, masked=False, state=None):
        self.folder, self.split, self.vocab_size, self.shard_tokens = folder, split, vocab_size, shard_tokens
        self.dtype = token_dtype(vocab_size)
        self.done: list[dict[str, Any]] = state["shards"] if state else []
        self.open_tokens = state["open"] if state else 0
        self.parts = {}
        for suffix, size in {"": self.dtype.itemsize, "_mask": 1}.items() if masked else [("", self.dtype.itemsize)]:
            part = folder / f".{split}{suffix}.part"
            ended = [folder / f"{name}{suffix}.bin" for name in (f"{split}_{len(self.done):06d}", split)]
            if state and (ended := [path for path in ended if path.exists()]):
                os.replace(ended[0], part)  # a shard that ended after `state` was written, and is ended again
            self.parts[suffix] = _PartFile(part, self.open_tokens * size)

    @property
    def tokens(self) -> int:
        return sum(entry["tokens"] for entry in self.done) + self.open_tokens

    def write(self, ids: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Append ids of any integer type, (N,), and with masks, 1 for each that counts as a target and 0 else."""
        if len(ids) and not (0 <= ids.min() and ids.max() < self.vocab_size):
            wrong = ids.min() if ids.min() < 0 else ids.max()
            raise DatasetError(f"{self.split}: token id {wrong} does not fit a vocabulary of {self.vocab_size}")
        while len(ids):
            room = self.shard_tokens - self.open_tokens
            self.parts[""].write(ids[:room].astype(self.dtype, copy=False))
            if "_mask" in self.parts:
                self.parts["_mask"].write(mask[:room].astype(np.uint8, copy=False))
                mask = mask[room:]
            self.open_tokens += min(room, len(ids))
            ids = ids[room:]
            if self.open_tokens == self.shard_tokens:
                self._end_shard(f"{self.split}_{len(self.done):06d}")

    def _end_shard(self, name: str) -> None:
        entry = {"file": f"{name}.bin", "tokens": self.open_tokens}
        for suffix, part in self.parts.items():
            entry["mask_sha256" if suffix else "sha256"] = part.rename(self.folder / f"{name}{suffix}.bin")
        self.done.append(entry)
        self.open_tokens = 0

    def finish(self) -> list[dict[str, Any]]:
        """End the last shard. Returns the split's entry in meta.json."""
        if self.open_tokens:
            self._end_shard(f"{self.split}_{len(self.done):06d}" if self.done else self.split)
        return self.done

    def state(self) -> dict[str, Any]:
        """What a writer needs to go on from here; it is on the disk when this returns."""
        for part in self.parts.values():
            part.sync()
        return {"shards": list(self.done), "open": self.open_tokens}

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        for part in self.parts.values():
            part.close()


class _PartFile:
    """A file that is not whole yet, with its running sha256. One that is there is cut to `size` bytes and goes on."""

    def __init__(self, path: Path, size: int):
        self.path = path
        self._open(size)

    def _open(self, size: int) -> None:
        self.file = open(self.path, "r+b" if size else "w+b")  # noqa: SIM115  it stays open
        self.file.truncate(size)
        self.digest = hashlib.sha256()
        while piece := self.file.read(1 << 20):
            self.digest.update(piece)

    def write(self, array: np.ndarray) -> None:
        content = memoryview(np.ascontiguousarray(array)).cast("B")
        self.file.write(content)
        self.digest.update(content)

    def sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    def rename(self, path: Path) -> str:
        """End the file and give it its name, and begin another. Returns the sha256 of what was in it."""
        self.sync()
        self.file.close()
        os.replace(self.path, path)
        sync(path.parent)
        digest = self.digest.hexdigest()
        self._open(0)
        return digest

    def close(self) -> None:
        """Close the file; one with nothing in it goes."""
        self.file.close()
        if not self.path.stat().st_size:
            self.path.unlink()


def write_meta(
    folder: Path, tokenizer: Tokenizer, train: list[dict], val: list[dict], made_by: str, **about: Any
) -> None:
    """Write tokenizer.json, then meta.json, last of all: only with it is the folder a data set.

    train, val: what ShardWriter.finish returned. made_by: the command. about: more to record, such as the sources.
    """
    write_json(folder / "tokenizer.json", tokenizer.to_json())
    meta = {
        "format_version": FORMAT_VERSION,
        "made_by": made_by,
        **about,
        "vocab_size": tokenizer.vocab_size,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "tokenizer": {"kind": tokenizer.kind, "sha256": tokenizer.hash},
        "splits": {"train": train, "val": val},
    }
    write_json(folder / "meta.json", meta)


# --- opening ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """Memory-mapped token ids, (N,), read page by page as they are used; and perhaps which count as targets, (N,)."""

    ids: np.ndarray
    mask: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Dataset:
    """An opened data set."""

    folder: Path
    train: list[Shard]
    val: list[Shard]
    vocab_size: int
    hash: str  # of the content: the same hash, the same tokens
    made_with: Tokenizer | None  # None: GPT-2's, as nanoGPT and llm.c mean it when they say nothing

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids. GPT-2's is fetched if the folder does not hold one."""
        return self.made_with or tokenizer.gpt2_tokenizer()


def open_dataset(folder: Path) -> Dataset:
    """Open a data set of Folio, nanoGPT or llm.c. Raises DatasetError if it is missing, damaged or incomplete."""
    if (folder / "meta.json").exists():
        return _open_folio(folder)
    train, val = folder / "train.bin", folder / "val.bin"
    if train.exists() and val.exists() and not _has_llmc_header(train):
        return _open_nanogpt(folder, train, val)
    splits = {split: [p for p in sorted(folder.glob(f"*{split}*.bin")) if not _is_mask(p)] for split in SPLITS}
    missing = [f"*{split}*.bin" for split, paths in splits.items() if not paths]
    if missing:
        raise DatasetError(
            f"{folder} is not a data set: it has no meta.json and no {' or '.join(missing)}; "
            f"prepare it again (python prepare/NAME.py)"
        )
    shards = {split: [_map_llmc(path) for path in paths] for split, paths in splits.items()}
    return Dataset(folder, **shards, vocab_size=50257, hash=_hash_ends(splits), made_with=None)


def _open_folio(folder: Path) -> Dataset:
    again = "prepare the data set again"
    try:
        meta = read_json(folder / "meta.json")
        if meta["format_version"] != FORMAT_VERSION:
            version = meta["format_version"]
            raise DatasetError(f"{folder / 'meta.json'}: format version {version} is not {FORMAT_VERSION}; {again}")
        dtype = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}[meta["dtype"]]
        splits = {
            split: [(s["file"], s["tokens"], s["sha256"], s.get("mask_sha256")) for s in meta["splits"][split]]
            for split in SPLITS
        }
        entries = [entry for split in SPLITS for entry in splits[split]]
        content = hashlib.sha256("".join(digest + (mask or "") for _, _, digest, mask in entries).encode())
        vocab_size, tokenizer_hash = int(meta["vocab_size"]), meta["tokenizer"]["sha256"]
        if vocab_size < 1 or not all(splits.values()):
            raise ValueError("a split or the vocabulary is missing")
        if outside := [file for file, *_ in entries if Path(file).name != file]:
            raise ValueError(f"it names a file outside its folder: {outside[0]!r}")
        verify = sum(tokens for _, tokens, *_ in entries) * dtype.itemsize <= VERIFY_BYTES
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        what = f"{type(error).__name__}: {error}"
        raise DatasetError(f"{folder / 'meta.json'} is not as Folio writes it ({what}); {again}") from None
    try:
        made_with = tokenizer.load(folder)
    except UserError as error:
        raise DatasetError(f"{error}; {again}") from None
    if made_with.hash != tokenizer_hash or made_with.vocab_size != vocab_size:
        raise DatasetError(f"{folder / 'tokenizer.json'} is not the tokenizer that meta.json speaks of; {again}")
    shards = {split: [_map_checked(folder, dtype, verify, *entry) for entry in splits[split]] for split in SPLITS}
    return Dataset(folder, shards["train"], shards["val"], vocab_size, content.hexdigest(), made_with)


def _map_checked(folder: Path, dtype: np.dtype, verify: bool, file: str, tokens: int, *digests: str | None) -> Shard:
    """A shard, and its mask if it has one, whose number of tokens and perhaps sha256 are those of meta.json."""
    arrays = []
    paths = (folder / file, mask_path(folder / file))
    for path, kind, digest in zip(paths, (dtype, np.dtype("u1")), digests, strict=True):
        if digest is None:
            continue
        arrays.append(_map_raw(path, kind))
        if len(arrays[-1]) != tokens:
            raise DatasetError(
                f"{path} is truncated or another file: it has {len(arrays[-1]):,} tokens, and meta.json speaks of "
                f"{tokens}; prepare the data set again"
            )
        if verify and sha256(path) != digest:
            raise DatasetError(
                f"{path} has changed since it was written: its sha256 is not meta.json's; prepare the data set again"
            )
    return Shard(*arrays)


def mask_path(shard: Path) -> Path:
    """Where the mask of a shard lies, if it has one."""
    return shard.with_name(f"{shard.stem}_mask.bin")


def _is_mask(path: Path) -> bool:
    return path.name.endswith("_mask.bin")


def _with_mask(path: Path, ids: np.ndarray) -> Shard:
    """A foreign shard, and its mask if there is one beside it."""
    if not mask_path(path).exists():
        return Shard(ids)
    mask = _map_raw(mask_path(path), np.dtype("u1"))
    if len(mask) != len(ids):
        raise DatasetError(f"{mask_path(path)} has {len(mask):,} entries for the {len(ids):,} tokens of {path.name}")
    return Shard(ids, mask)


def _open_nanogpt(folder: Path, train: Path, val: Path) -> Dataset:
    made_of = None
    vocab_size = 50257
    if (folder / "meta.pkl").exists():
        made_of = nanogpt_tokenizer(folder / "meta.pkl")
        vocab_size = made_of.vocab_size
    digest = _hash_ends({"train": [train], "val": [val]})
    shards = ([_with_mask(path, _map_raw(path, np.dtype("<u2")))] for path in (train, val))
    return Dataset(folder, *shards, vocab_size, digest, made_of)


def nanogpt_tokenizer(meta: Path, vocab_size: int | None = None) -> CharTokenizer:
    """The characters by id that nanoGPT keeps in meta.pkl; vocab_size: of the model that is to be trained with them.

    Raises DatasetError for tokens that are not single characters, the end-of-text token at the end excepted, and for
    tables that contradict each other.
    """
    table = load_plain_pickle(meta)
    itos, stoi = table.get("itos"), table.get("stoi")
    if not isinstance(itos, dict) or itos.keys() != set(range(len(itos))) or not itos:
        raise DatasetError(f"{meta} has no table itos of the characters by id, from 0 without a gap, as nanoGPT's has")
    tokens = [itos[i] for i in range(len(itos))]
    eot = tokens[-1] == EOT_TEXT
    for i, token in enumerate(tokens[: len(tokens) - eot]):
        if not isinstance(token, str) or len(token) != 1:
            shown = reprlib.repr(token) if isinstance(token, (str, int)) else f"a {type(token).__name__}"
            raise DatasetError(
                f"{meta}: itos gives the id {i} to {shown}, and Folio reads only tables of single characters: tokenize "
                f"the text with prepare/text.py instead"
            )
    if len(set(tokens)) != len(tokens):
        raise DatasetError(f"{meta}: itos gives two ids to {Counter(tokens).most_common(1)[0][0]!r}")
    if stoi is not None and (not isinstance(stoi, dict) or stoi.keys() != set(tokens)):
        raise DatasetError(f"{meta}: stoi and itos do not hold the same characters: prepare the data set again")
    for i, token in enumerate(tokens):
        if stoi is not None and stoi[token] != i:
            raise DatasetError(f"{meta}: itos gives {token!r} the id {i}, and stoi another: prepare the data set again")
    rows = table.get("vocab_size", len(tokens))
    if not isinstance(rows, int) or rows < len(tokens):
        raise DatasetError(f"{meta}: vocab_size is {reprlib.repr(rows)}, and itos holds {len(tokens):,} characters")
    if vocab_size not in (None, rows):
        raise DatasetError(
            f"{meta} is of a vocabulary of {rows:,}, and the model has one of {vocab_size:,}: put the meta.pkl there "
            f"that the model was trained with"
        )
    return CharTokenizer("".join(tokens[: len(tokens) - eot]), eot)


def _map_raw(path: Path, dtype: np.dtype) -> np.ndarray:
    size = path.stat().st_size if path.is_file() else None
    if not size:
        raise DatasetError(f"{path} is {'missing' if size is None else 'empty'}; prepare the data set again")
    if size % dtype.itemsize:
        raise DatasetError(f"{path} has {size:,} bytes, not a whole number of {dtype.name} tokens; it is cut off")
    return _map(path, dtype)


def _map(path: Path, dtype: np.dtype, offset: int = 0) -> np.ndarray:
    """The file from byte `offset` on. It stays open, so the limit to open files rises with the number of shards."""
    try:
        return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset))
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    import resource  # Windows does not have it, nor such a limit

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    more = 2 * soft if hard == resource.RLIM_INFINITY else min(2 * soft, hard)
    if more == soft:
        raise DatasetError(
            f"{path.parent} has more shards than the {hard:,} files that a process may open here: prepare it again "
            f"with a larger --shard_tokens, or allow more with ulimit -Hn"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
    return _map(path, dtype, offset)


def _has_llmc_header(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == LLMC_MAGIC.to_bytes(4, "little")


def _map_llmc(path: Path) -> Shard:
    header = np.fromfile(path, dtype="<i4", count=LLMC_HEADER)
    if len(header) < LLMC_HEADER:
        raise DatasetError(f"{path} is cut off: {header.nbytes:,} bytes are less than llm.c's header")
    magic, version, tokens = (int(n) for n in header[:3])
    if magic != LLMC_MAGIC or version != LLMC_VERSION:
        raise DatasetError(
            f"{path}: wrong magic: it begins with {magic}, version {version}, where llm.c's shards begin with "
            f"{LLMC_MAGIC}, version {LLMC_VERSION}; a raw shard without header goes by the name of train.bin or val.bin"
        )
    size = path.stat().st_size
    if size != 4 * LLMC_HEADER + 2 * tokens or not tokens:
        raise DatasetError(f"{path} has {size:,} bytes, but its header speaks of {tokens:,} tokens; fetch it again")
    return _with_mask(path, _map(path, np.dtype("<u2"), 4 * LLMC_HEADER))


def _hash_ends(splits: dict[str, list[Path]]) -> str:
    """A quick hash for shards that come without one: names, sizes, and 64 KiB from both ends of each file."""
    digest = hashlib.sha256()
    for path in (path for paths in splits.values() for path in paths):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as file:
            digest.update(file.read(1 << 16))
            file.seek(max(0, size - (1 << 16)))
            digest.update(file.read())
    return digest.hexdigest()


PLAIN_OPCODES = frozenset(
    "PROTO FRAME STOP MARK EMPTY_DICT SETITEM SETITEMS MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET "
    "BININT BININT1 BININT2 BINUNICODE SHORT_BINUNICODE".split()
)
PLAIN_BYTES = 1 << 24  # 16 MiB


def load_plain_pickle(path: Path) -> dict[str, Any]:
    """A pickle of dicts, strings and integers, such as nanoGPT's meta.pkl.

    Raises DatasetError for any other opcode, so that nothing in the file can run code, and above 16 MiB.
    """
    if path.stat().st_size > PLAIN_BYTES:
        raise DatasetError(f"{path} is larger than {PLAIN_BYTES:,} bytes: not nanoGPT's meta.pkl")
    content = path.read_bytes()
    try:
        strange = set()
        for opcode, argument, _ in pickletools.genops(content):
            # a number for the memo makes room for as many entries, so it must not exceed what the file can fill
            if opcode.name not in PLAIN_OPCODES or (opcode.name.endswith("PUT") and argument > len(content)):
                strange.add(opcode.name)
        if strange:
            raise DatasetError(f"{path} is not plain data: it uses {', '.join(sorted(strange))}; it was not opened")
        value = pickle.load(io.BytesIO(content))
    except (ValueError, TypeError, LookupError, EOFError, OverflowError, pickle.UnpicklingError) as error:
        raise DatasetError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise DatasetError(f"{path} holds no table, as nanoGPT's meta.pkl does")
    return value
