"""The token shards: the writer, the reader, and the sequences that training and validation take from them.

A data set is a folder:

    train.bin, val.bin    raw little-endian uint16 token ids, as nanoGPT writes them (uint32 when the ids need it)
    meta.json             format version, tokenizer, counts, sha256 of each shard and of the source, how it was made

Read as they are, too: nanoGPT's folders (train.bin, val.bin and perhaps meta.pkl) and llm.c's shards (*train*.bin and
*val*.bin, each with a header of 256 int32). docs/data.md has the formats in full.

Dimensions: B batch, T time (block_size). Token arrays are int64 numpy; nothing here needs torch.
"""

import hashlib
import io
import pickle
import pickletools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from folio import UserError, tokenizer
from folio.files import read_json, replacing, sha256, write_json
from folio.tokenizer import CharTokenizer, Tokenizer

FORMAT_VERSION = 1
SPLITS = ("train", "val")
VERIFY_BYTES = 1 << 26  # shards up to this size (64 MiB, under 0.1 s) have their sha256 checked at every open
LLMC_MAGIC, LLMC_VERSION, LLMC_HEADER = 20240520, 1, 256  # llm.c's and modded-nanogpt's header, in int32


class DatasetError(UserError):
    """A data set that cannot be used, and the way to mend it."""


# --- writing ----------------------------------------------------------------------------------------------------------


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 where every id fits, else uint32; little-endian."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def write_shard(path: Path, pieces: Iterator[np.ndarray] | Sequence[np.ndarray], vocab_size: int) -> dict[str, Any]:
    """Write one shard from pieces of ids, any integer type, and return its entry in meta.json.

    Raises DatasetError for an id outside 0 .. vocab_size - 1, and then leaves no file.
    """
    tokens, digest, dtype = 0, hashlib.sha256(), token_dtype(vocab_size)
    with replacing(path) as temporary, open(temporary, "wb") as file:
        for ids in pieces:
            if len(ids) and not (0 <= ids.min() and ids.max() < vocab_size):
                wrong = ids.min() if ids.min() < 0 else ids.max()
                raise DatasetError(f"{path.name}: token id {wrong} does not fit a vocabulary of {vocab_size}")
            content = ids.astype(dtype).tobytes()
            file.write(content)
            digest.update(content)
            tokens += len(ids)
    return {"file": path.name, "tokens": tokens, "sha256": digest.hexdigest()}


def write_meta(
    folder: Path, tokenizer: Tokenizer, train: list[dict], val: list[dict], source: dict[str, Any], made_by: str
) -> None:
    """Write meta.json, last of all: only with it is the folder a data set.

    train, val: what write_shard returned. source: name, bytes and sha256 of the text. made_by: the command.
    """
    meta = {
        "format_version": FORMAT_VERSION,
        "made_by": made_by,
        "source": source,
        "vocab_size": tokenizer.vocab_size,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "splits": {"train": train, "val": val},
        "tokenizer": tokenizer.to_json(),
    }
    write_json(folder / "meta.json", meta)


# --- opening ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dataset:
    """An opened data set. Shards are memory-mapped arrays of ids, read page by page as they are used."""

    folder: Path
    train: list[np.ndarray]
    val: list[np.ndarray]
    vocab_size: int
    hash: str  # of the content: the same hash, the same tokens
    tokenizer_json: dict[str, Any] | None  # None: GPT-2's, as nanoGPT and llm.c mean it when they say nothing

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids. GPT-2's is fetched if the folder does not hold one."""
        if self.tokenizer_json is None:
            return tokenizer.gpt2_tokenizer()
        return tokenizer.from_json(self.tokenizer_json)


def open_dataset(folder: Path) -> Dataset:
    """Open a data set of Folio, nanoGPT or llm.c. Raises DatasetError if it is missing, damaged or incomplete."""
    if (folder / "meta.json").exists():
        return _open_folio(folder)
    train, val = folder / "train.bin", folder / "val.bin"
    if train.exists() and val.exists() and not _has_llmc_header(train):
        return _open_nanogpt(folder, train, val)
    splits = {split: sorted(folder.glob(f"*{split}*.bin")) for split in ("train", "val")}
    missing = [f"*{split}*.bin" for split, paths in splits.items() if not paths]
    if missing:
        raise DatasetError(
            f"{folder} is not a data set: it has no meta.json and no {' or '.join(missing)}; "
            f"prepare it again (python prepare/NAME.py)"
        )
    shards = {split: [_map_llmc(path) for path in paths] for split, paths in splits.items()}
    return Dataset(folder, **shards, vocab_size=50257, hash=_hash_ends(splits), tokenizer_json=None)


def _open_folio(folder: Path) -> Dataset:
    again = "prepare the data set again"
    try:
        meta = read_json(folder / "meta.json")
        if meta["format_version"] != FORMAT_VERSION:
            version = meta["format_version"]
            raise DatasetError(f"{folder / 'meta.json'}: format version {version} is not {FORMAT_VERSION}; {again}")
        dtype = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}[meta["dtype"]]
        splits = {split: [(s["file"], s["tokens"], s["sha256"]) for s in meta["splits"][split]] for split in SPLITS}
        content = hashlib.sha256("".join(digest for split in SPLITS for _, _, digest in splits[split]).encode())
        vocab_size, made_with = int(meta["vocab_size"]), meta["tokenizer"]
        if vocab_size < 1 or not all(splits.values()) or not isinstance(made_with, dict):
            raise ValueError("a split, the vocabulary or the tokenizer is missing")
        names = [file for split in SPLITS for file, _, _ in splits[split]]
        if outside := [name for name in names if Path(name).name != name]:
            raise ValueError(f"it names a file outside its folder: {outside[0]!r}")
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        what = f"{type(error).__name__}: {error}"
        raise DatasetError(f"{folder / 'meta.json'} is not as Folio writes it ({what}); {again}") from None
    shards = {split: [_map_checked(folder / file, dtype, *entry) for file, *entry in splits[split]] for split in SPLITS}
    return Dataset(folder, shards["train"], shards["val"], vocab_size, content.hexdigest(), made_with)


def _map_checked(path: Path, dtype: np.dtype, tokens: int, digest: str) -> np.ndarray:
    """A shard whose number of tokens and, where it is small, sha256 are those of meta.json."""
    ids = _map_raw(path, dtype)
    if len(ids) != tokens:
        raise DatasetError(
            f"{path} is truncated or another file: it has {len(ids):,} tokens, and meta.json speaks of {tokens}; "
            f"prepare the data set again"
        )
    if ids.nbytes <= VERIFY_BYTES and sha256(path) != digest:
        raise DatasetError(
            f"{path} has changed since it was written: its sha256 is not meta.json's; prepare the data set again"
        )
    return ids


def _open_nanogpt(folder: Path, train: Path, val: Path) -> Dataset:
    made_of = None
    vocab_size = 50257
    if (folder / "meta.pkl").exists():
        itos = load_plain_pickle(folder / "meta.pkl").get("itos")
        if not isinstance(itos, dict) or list(itos) != list(range(len(itos))):
            raise DatasetError(f"{folder / 'meta.pkl'} has no table itos of the characters by id, as nanoGPT's has")
        made_of, vocab_size = CharTokenizer("".join(itos.values())).to_json(), len(itos)
    digest = _hash_ends({"train": [train], "val": [val]})
    shards = [_map_raw(train, np.dtype("<u2"))], [_map_raw(val, np.dtype("<u2"))]
    return Dataset(folder, *shards, vocab_size, digest, made_of)


def _map_raw(path: Path, dtype: np.dtype) -> np.ndarray:
    size = path.stat().st_size if path.is_file() else None
    if not size:
        raise DatasetError(f"{path} is {'missing' if size is None else 'empty'}; prepare the data set again")
    if size % dtype.itemsize:
        raise DatasetError(f"{path} has {size:,} bytes, not a whole number of {dtype.name} tokens; it is cut off")
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def _has_llmc_header(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == LLMC_MAGIC.to_bytes(4, "little")


def _map_llmc(path: Path) -> np.ndarray:
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
    return np.asarray(np.memmap(path, dtype="<u2", mode="r", offset=4 * LLMC_HEADER))


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


# --- sequences --------------------------------------------------------------------------------------------------------


def hash64(*parts: np.ndarray | int) -> np.ndarray:
    """A uint64 that follows from the parts alone, elementwise: splitmix64's finalizer (Steele et al. 2014), chained."""
    with np.errstate(over="ignore"):
        h = np.zeros(1, dtype=np.uint64)
        for part in parts:
            h = (h ^ np.asarray(part, dtype=np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
            h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            h = h ^ (h >> np.uint64(31))
        return h


def permute(i: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """Where a shuffle of range(n) puts each i: for every key a permutation, in constant memory and time.

    A Feistel network on the smallest even number of bits that holds n; what falls outside is walked on until it falls
    inside (Black & Rogaway 2002, "Ciphers with arbitrary finite domains"). i, key: uint64 (B,). Returns uint64 (B,).
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)

    def network(x: np.ndarray, key: np.ndarray) -> np.ndarray:
        left, right = x >> half, x & mask
        for r in range(6):
            left, right = right, left ^ (hash64(key, r, right) & mask)
        return left << half | right

    x = network(i, key)
    while (outside := x >= n).any():
        x[outside] = network(x[outside], key[outside])
    return x


class _Windows:
    """What training and validation share: gathering windows of tokens out of a list of shards."""

    def __init__(self, shards: list[np.ndarray], block_size: int, vocab_size: int):
        self.shards, self.block_size, self.vocab_size = shards, block_size, vocab_size
        self.lengths = np.array([len(shard) for shard in shards])

    def gather(self, shard: np.ndarray, start: np.ndarray) -> np.ndarray:
        """The block_size + 1 tokens from each start: (B, T + 1). Past a shard's end stands -1."""
        at = start[:, None] + np.arange(self.block_size + 1)  # (B, T + 1)
        ids = np.empty(at.shape, dtype=np.int64)
        for s in np.unique(shard):
            rows = shard == s
            ids[rows] = self.shards[s].take(at[rows], mode="clip")
        largest = ids.max()
        if largest >= self.vocab_size:
            raise DatasetError(
                f"token id {largest} in the shards is outside the vocabulary of {self.vocab_size}: "
                f"the shards are damaged, or were made with another tokenizer; prepare the data set again"
            )
        ids[at >= self.lengths[shard][:, None]] = -1
        return ids


class TrainingWindows(_Windows):
    """The endless stream of training sequences, in which sequence i follows from (seed, i) alone.

    sampling="epoch": each epoch cuts every shard, from a phase drawn anew, into n = max(1, (len - T) // T) windows
    that do not overlap, and takes them all once in a shuffled order. sampling="random": nanoGPT's draws, any start with
    equal probability, with replacement. A window never crosses a shard; a shard of fewer than T + 1 tokens is not used.
    Raises DatasetError when no shard is that long.
    """

    def __init__(self, shards: list[np.ndarray], block_size: int, vocab_size: int, seed: int, sampling: str):
        super().__init__(shards, block_size, vocab_size)
        self.seed, self.sampling = seed, sampling
        T, lengths = block_size, self.lengths
        if lengths.max() < T + 1:
            raise DatasetError(
                f"the training data has {lengths.max():,} tokens in its longest shard, fewer than block_size + 1 = "
                f"{T + 1:,}: take a smaller --block_size, or more text"
            )
        usable = lengths >= T + 1
        choices = np.maximum(1, (lengths - T) // T) if sampling == "epoch" else lengths - T
        self.counts = np.where(usable, choices, 0)  # windows, or starts, a shard
        self.ends = np.cumsum(self.counts)
        self.per_epoch = int(self.ends[-1])  # sequences an epoch

    def locate(self, i: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Shard and first token of each sequence number, (B,) each."""
        i = np.asarray(i, dtype=np.uint64)
        if self.sampling == "random":
            choice = hash64(self.seed, i) % np.uint64(self.per_epoch)
        else:
            epoch, place = np.divmod(i, np.uint64(self.per_epoch))
            choice = permute(place, self.per_epoch, hash64(self.seed, epoch))
        choice = choice.astype(np.int64)
        shard = np.searchsorted(self.ends, choice, side="right")
        nth = choice - (self.ends - self.counts)[shard]  # which window, or start, of its shard
        if self.sampling == "random":
            return shard, nth
        T, n = self.block_size, self.counts[shard]
        phases = np.minimum(T, self.lengths[shard] - n * T)
        phase = hash64(self.seed, epoch, shard) % phases.astype(np.uint64)
        return shard, phase.astype(np.int64) + nth * T

    def batch(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Sequences first .. first + count - 1: inputs and targets, (B, T) each."""
        ids = self.gather(*self.locate(np.arange(first, first + count)))
        return ids[:, :-1], ids[:, 1:]


class ValidationWindows(_Windows):
    """Fixed windows, the same at each evaluation, in which every token but a shard's first is predicted once.

    With max_windows, that many of them, spread evenly.
    """

    def __init__(self, shards: list[np.ndarray], block_size: int, vocab_size: int, max_windows: int | None = None):
        super().__init__(shards, block_size, vocab_size)
        counts = -(-(self.lengths - 1) // block_size)
        self.ends = np.cumsum(counts)
        self.starts = self.ends - counts
        total = int(self.ends[-1])
        if not total:
            raise DatasetError("the validation data has fewer than 2 tokens: take more text")
        taken = min(total, max_windows or total)
        self.chosen = np.arange(taken) * total // taken

    def batches(self, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Inputs and targets, (batch_size, T) each. Where the data ends, targets are -1 and inputs 0."""
        for first in range(0, len(self.chosen), batch_size):
            window = self.chosen[first : first + batch_size]
            shard = np.searchsorted(self.ends, window, side="right")
            ids = self.gather(shard, (window - self.starts[shard]) * self.block_size)
            rest = np.full((batch_size - len(ids), self.block_size + 1), -1)
            ids = np.concatenate([ids, rest])
            yield np.maximum(ids[:, :-1], 0), ids[:, 1:]
