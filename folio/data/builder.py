"""Writes a data set: assigns documents to splits, removes duplicates, and saves progress to resume from."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from folio import UserError
from folio.base.files import read_json, write_json
from folio.base.number_format import counted
from folio.data.account import IN, Account
from folio.data.blocks import CorpusBlock, DocumentPart, EncodedBlock
from folio.data.leakage import KeySet, content_keys
from folio.data.shards import SPLITS, ShardWriter
from folio.data.tokenizer import OnUnknown, Tokenizer

# --- which documents are for validation -------------------------------------------------------------------------------

SplitRule = Callable[[np.ndarray, np.ndarray], np.ndarray]  # indices and groups of documents -> True for validation


def split_by_hash(fraction: float) -> SplitRule:
    """Select this fraction of the documents by their content, so that adding documents does not move others."""
    return lambda numbers, groups: groups < np.uint64(fraction * 2**64)


def split_by_smallest_keys(bound: int) -> SplitRule:
    """Select the documents with a content key below `bound`."""
    return lambda numbers, groups: content_keys(groups) < np.uint64(bound)


def split_by_number(selected: np.ndarray) -> SplitRule:
    """Select the documents with these indices."""
    return lambda numbers, groups: np.isin(numbers, selected)


# --- records of documents ---------------------------------------------------------------------------------------------

Dedup = bool | Literal["near"]  # True: remove duplicates; "near": also remove near duplicates


# The file "documents" has the hash, the group (EncodedBlock.groups), and the number of tokens of each document. The
# lowest bit of the hash is replaced by 1 for validation and 0 for training.
DOCUMENT_RECORD = np.dtype([("hash", "<u8"), ("group", "<u8"), ("tokens", "<i8")])
LENGTH_SHARES = {"median": 0.5, "90%": 0.9, "99%": 0.99, "maximum": 1.0}  # of the documents, in report.json


# --- characters that are not in the vocabulary ------------------------------------------------------------------------


def describe_unknown(unknown: int, characters: int, on_unknown: OnUnknown) -> str:
    """Describe how many characters are not in the vocabulary, and how they were handled."""
    share = unknown / characters
    shown = f"{share:.1%}" if share >= 0.001 else "less than 0.1%"
    outcome = "left out" if on_unknown == "skip" else "replaced by U+FFFD"
    are, were = ("is", "was") if unknown == 1 else ("are", "were")
    return (
        f"{unknown:,} of {counted(characters, 'character')} ({shown}) {are} not in the vocabulary and {were} {outcome}"
    )


# --- the builder ------------------------------------------------------------------------------------------------------


@dataclass
class BuildProgress:
    """The state of the output after a block. With the files that it describes, a build can resume."""

    blocks: int = 0
    number: int = 0  # index of the next document in the input, where empty documents and duplicates count
    characters: int = 0  # total of the documents in the data set
    unknown: int = 0  # characters outside the vocabulary, which were removed or replaced
    longest: int = 0  # tokens of the longest document
    longest_number: int = 0  # index of the longest document
    remembered: int = 0  # records in the file "documents"
    open: dict[str, Any] | None = None  # the current document in parts, and its split or the reason to remove it
    writers: dict[str, Any] = field(default_factory=dict)  # ShardWriter.state of each split
    account: dict[str, dict[str, int]] = field(default_factory=dict)  # Account.to_json of the blocks


class DatasetBuilder:
    """Adds encoded blocks to the shards in a folder, and saves the progress when a shard is full.

    It resumes from progress.json if the folder contains one. Use it as a context manager, which closes the files.

    split_rule: selects the documents for validation. dedup: remove duplicates. near_duplicates: content keys of
    documents to remove, in order, (K,). masked: blocks have masks. metadata: additional entries of progress.json;
    "ignores_prompts": documents with the same prompt can be in different splits.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        split_rule: SplitRule,
        *,
        shard_tokens: int,
        dedup: bool,
        near_duplicates: np.ndarray,
        masked: bool,
        on_unknown: OnUnknown,
        metadata: dict[str, Any],
    ):
        self.folder, self.tokenizer, self.split_rule, self.metadata = folder, tokenizer, split_rule, metadata
        self.masked, self.on_unknown = masked, on_unknown
        saved = read_json(folder / "progress.json") if (folder / "progress.json").exists() else None
        self.progress = BuildProgress(**saved["progress"]) if saved else BuildProgress()
        self.account = Account(self.progress.account)
        self.writers = {
            split: ShardWriter(
                folder, split, tokenizer.vocab_size, shard_tokens, masked, self.progress.writers.get(split)
            )
            for split in SPLITS
        }
        self.records = open(folder / "documents", "r+b" if saved else "w+b")  # noqa: SIM115
        # np.fromfile turns a Ctrl-C that comes while it looks at the kind of the file into a TypeError.
        known = self.records.read(self.progress.remembered * DOCUMENT_RECORD.itemsize)
        records = np.frombuffer(known, dtype=DOCUMENT_RECORD)
        self.records.seek(records.nbytes)
        self.records.truncate()
        self.near_duplicates = KeySet(near_duplicates)
        self.known_keys = None
        if dedup:  # with the documents before an interruption
            self.known_keys = KeySet(content_keys(records["hash"]))
            self.known_keys.add(near_duplicates[: self.account["documents"]["near duplicates"]])
            if self.progress.open:
                self.known_keys.add(content_keys(np.array([self.progress.open["hash"]], dtype=np.uint64)))

    def __enter__(self) -> "DatasetBuilder":
        return self

    def __exit__(self, *_: object) -> None:
        self.records.close()
        for writer in self.writers.values():
            writer.__exit__()

    @property
    def tokens(self) -> int:
        """Tokens written so far, in both splits."""
        return sum(writer.tokens for writer in self.writers.values())

    @property
    def documents(self) -> dict[str, int]:
        """Documents written so far, by split."""
        return {split: self.account["documents"][split] for split in SPLITS}

    @property
    def full_shards(self) -> int:
        return sum(len(writer.done) for writer in self.writers.values())

    def add(self, block: CorpusBlock, encoded: EncodedBlock) -> None:
        """Add the next block. If it fills a shard, all data is synced to disk before this returns."""
        shards_before = self.full_shards
        self.account.add(block.account)
        self.account.add(encoded.account)
        if isinstance(block, DocumentPart):
            self._add_part(block, encoded)
        else:
            self._add_documents(encoded)
        self.progress.blocks += 1
        if self.full_shards > shards_before:
            self._save_progress()

    def _save_progress(self) -> None:
        self.records.flush()
        os.fsync(self.records.fileno())
        self.progress.writers = {split: writer.state() for split, writer in self.writers.items()}
        self.progress.account = self.account.to_json()
        write_json(self.folder / "progress.json", {**self.metadata, "progress": asdict(self.progress)})

    def _add_documents(self, encoded: EncodedBlock) -> None:
        p = self.progress
        numbers = p.number + np.arange(len(encoded.lengths))
        keep = encoded.sizes > 0
        self._count("empty", encoded.sizes[~keep])
        if self.known_keys:
            duplicate = np.zeros_like(keep)
            duplicate[keep] = self.known_keys.add(content_keys(encoded.hashes[keep]))
            self._count("duplicates", encoded.sizes[duplicate])
            keep &= ~duplicate
            near = keep & self.near_duplicates.contains(content_keys(encoded.hashes))
            self._count("near duplicates", encoded.sizes[near])
            keep &= ~near
        groups = encoded.hashes if self.metadata["ignores_prompts"] else encoded.groups
        val = self.split_rule(numbers, groups)
        self._write("train", encoded, keep & ~val)
        self._write("val", encoded, keep & val)
        self._record(encoded.hashes[keep], encoded.groups[keep], val[keep], encoded.lengths[keep])
        p.characters += int(encoded.characters[keep].sum())
        p.unknown += int(encoded.unknown[keep].sum())
        lengths = np.where(keep, encoded.lengths, 0)
        if len(lengths) and lengths.max() > p.longest:
            p.longest, p.longest_number = int(lengths.max()), int(numbers[lengths.argmax()])
        p.number += len(numbers)

    def _count(self, use: str, sizes: np.ndarray) -> None:
        """Count documents of these sizes. use: their split, or the reason why they are left out."""
        self.account["documents"][use] += len(sizes)
        self.account["document bytes"][use] += int(sizes.sum())

    def _write(self, split: str, encoded: EncodedBlock, selected: np.ndarray) -> None:
        """Write the selected documents, (D,) bool, to a split."""
        if selected.all():
            self.writers[split].write(encoded.ids, encoded.mask)
        elif selected.any():
            tokens = np.repeat(selected, encoded.lengths)  # (N,)
            mask = None if encoded.mask is None else encoded.mask[tokens]
            self.writers[split].write(encoded.ids[tokens], mask)
        self._count(split, encoded.sizes[selected])

    def _add_part(self, block: DocumentPart, encoded: EncodedBlock) -> None:
        p = self.progress
        if p.open is None:
            use = block.split or self._reason_to_remove(block) or self._select_split(block)
            p.open = {"use": use, "tokens": 0, "bytes": 0, "hash": block.hash}
            p.number += 1
        p.open["tokens"] += len(encoded.ids)
        p.open["bytes"] += int(encoded.sizes.sum())
        if p.open["use"] in SPLITS and p.open["bytes"]:  # an empty document has no tokens
            self.writers[p.open["use"]].write(encoded.ids, encoded.mask)
            p.characters += int(encoded.characters.sum())
            p.unknown += int(encoded.unknown.sum())
        if block.last:
            self._end_document(block)
            p.open = None

    def _reason_to_remove(self, block: DocumentPart) -> str | None:
        """Return the reason to leave out the document of this first part, or None."""
        keys = content_keys(np.array([block.hash], dtype=np.uint64))
        if self.known_keys and self.known_keys.add(keys)[0]:
            return "duplicates"
        return "near duplicates" if self.near_duplicates.contains(keys)[0] else None

    def _select_split(self, block: DocumentPart) -> str:
        """Return the split of the document of this first part."""
        is_val = self.split_rule(np.array([self.progress.number]), np.array([block.hash], dtype=np.uint64))[0]
        return "val" if is_val else "train"

    def _end_document(self, block: DocumentPart) -> None:
        p = self.progress
        use, tokens, size = p.open["use"], p.open["tokens"], p.open["bytes"]
        self.account["documents"][IN] += 1
        self._count(use if size else "empty", np.array([size]))
        if not size or use not in SPLITS:
            return
        if not block.split:
            hashes = np.array([block.hash], dtype=np.uint64)
            self._record(hashes, hashes, np.array([use == "val"]), np.array([tokens]))
        if tokens > p.longest:
            p.longest, p.longest_number = tokens, p.number - 1

    def _record(self, hashes: np.ndarray, groups: np.ndarray, val: np.ndarray, tokens: np.ndarray) -> None:
        """Append documents to the file "documents"."""
        self.progress.remembered += len(hashes)
        records = np.empty(len(hashes), dtype=DOCUMENT_RECORD)
        records["hash"] = (hashes & ~np.uint64(1)) | val
        records["group"] = groups
        records["tokens"] = tokens
        self.records.write(records.tobytes())

    def read_records(self) -> np.ndarray:
        """Read the records of all documents in the data set."""
        self.records.flush()
        return np.fromfile(self.folder / "documents", dtype=DOCUMENT_RECORD)

    def document_lengths(self) -> dict[str, int] | None:
        """Return the lengths, in tokens, that shares of the documents do not exceed; None for a text that is split at
        its tail.
        """
        lengths = self.read_records()["tokens"]
        if not len(lengths):
            return None
        values = np.quantile(lengths, list(LENGTH_SHARES.values()), method="inverted_cdf")  # lengths that occur
        return dict(zip(LENGTH_SHARES, values.tolist(), strict=True))

    def unknown_summary(self) -> str:
        """Return the number of unknown characters, in parentheses, for an error about too few tokens."""
        p = self.progress
        return f" ({describe_unknown(p.unknown, p.characters, self.on_unknown)})" if p.unknown else ""

    def empty_split(self) -> str | None:
        """Return a split with fewer than 2 tokens, or None. Raises UserError if all documents are empty."""
        if not any(self.documents.values()):
            raise UserError("there is no text in the input; use files that contain text")
        return next((split for split in ("val", "train") if self.writers[split].tokens < 2), None)

    def nearest_bound(self, fraction: float) -> tuple[int, bool]:
        """Return the bound for `split_by_smallest_keys` that gives validation about this fraction of the documents.

        Each split has at least one document and two tokens. Documents of a group are in the same split, unless there is
        only one group, all with the same prompt: then the second result is True, and the bound is for hashes of
        documents. Raises UserError if that is impossible.
        """
        documents = self.read_records()
        documents["group"], hashes = content_keys(documents["group"]), content_keys(documents["hash"])
        ignores_prompts = bool((documents["group"] == documents["group"][0]).all() and (hashes != hashes[0]).any())
        if ignores_prompts:
            documents["group"] = hashes
        documents.sort(order="group")
        counts = np.flatnonzero(np.diff(documents["group"])) + 1  # possible numbers of documents for validation
        tokens = np.cumsum(documents["tokens"], dtype=np.int64)
        possible = counts[(tokens[counts - 1] >= 2) & (tokens[-1] - tokens[counts - 1] >= 2)]
        if not len(possible):
            self._refuse_to_split(len(documents), int(tokens[-1]), all_equal=not len(counts))
        nearest = possible[np.abs(possible - max(1, round(fraction * len(documents)))).argmin()]
        return int(documents["group"][nearest]), ignores_prompts

    def _refuse_to_split(self, documents: int, tokens: int, all_equal: bool) -> None:
        texts = counted(documents, "document has", "documents have")
        problem = f"the {texts} {counted(tokens, 'token')}, too few for two splits{self.unknown_summary()}"
        if all_equal:
            problem = "there is only one document" if documents == 1 else f"all {documents:,} documents are the same"
            problem += ", and a document cannot be in both splits"
        text = "" if self.masked else ", or join all text in one .txt file, which is split at its tail"
        raise UserError(f"{problem}; add another one{text}")
