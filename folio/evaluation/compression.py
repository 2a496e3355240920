"""What xz reaches on a validation set after the training set: a baseline for bits per byte."""

import hashlib
import lzma
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from folio import UserError
from folio.base.download import cache_folder
from folio.base.files import read_json, write_json
from folio.base.progress import progress_bar
from folio.data.shards import Dataset, Shard
from folio.data.tokenizer import MidiTokenizer, Tokenizer
from folio.evaluation.memorization import blocks
from folio.evaluation.scores import Evaluation
from folio.evaluation.text_loss import token_sizes

MAX_BYTES = 100_000_000  # of both sets; xz takes about 4 minutes and 1.1 GB for these
BLOCK = 1 << 20  # bytes compressed at once
END_OF_TEXT = b"\0"  # xz compresses where documents end, because a model's loss includes these tokens


def xz_rows(models: Sequence[Evaluation], max_bytes: int = MAX_BYTES) -> Iterator[dict[str, Any]]:
    """Yield what xz reaches on each validation set that the models were measured on.

    It yields no row for a data set of more than `max_bytes`, of music, or with masked targets.
    """
    datasets = {(name, dataset.hash): dataset for model in models for name, dataset in model.datasets.items()}
    for (name, _), dataset in datasets.items():
        tokenizer, shards = dataset.load_tokenizer(), dataset.train + dataset.val
        if tokenizer.kind == MidiTokenizer.kind or any(shard.mask is not None for shard in shards):
            continue
        if sum(map(len, shards)) <= max_bytes and count_bytes(shards, tokenizer) <= max_bytes:
            yield {"of": name, **measure_xz(name, dataset)}


def format_xz(row: dict[str, Any]) -> str:
    """Format a row of xz_rows."""
    return f"xz reaches {row['bits_per_byte']:.4f} bits per byte on {row['of']}, after compressing the training set"


def measure_xz(name: str, dataset: Dataset) -> dict[str, Any]:
    """Return what xz reaches on a validation set, from the cache if it was measured before.

    bits_per_byte: 8 * (C(training + validation) - C(training)) / bytes of the validation set, where C is the size of
    the compressed text. name: for the progress bar.
    """
    tokenizer = dataset.load_tokenizer()
    key = hashlib.sha256(f"{dataset.hash} {tokenizer.hash}".encode()).hexdigest()
    with suppress(OSError, ValueError, LookupError, TypeError, UserError):  # it is missing, or damaged
        row = read_json(cache_folder() / f"xz-{key}.json")
        sizes = {name: int(row[name]) for name in ("train_bytes", "val_bytes")}
        return {"bits_per_byte": float(row["bits_per_byte"]), **sizes}
    train, val = shard_text(dataset.train, tokenizer), shard_text(dataset.val, tokenizer)
    with progress_bar(total=2 * len(train) + len(val), unit="byte", unit_scale=True, desc=f"xz, {name}") as progress:
        # An xz compressor cannot be copied, so the training set is compressed twice.
        sizes = [compressed_size(text, len(train) + len(val), progress) for text in (train, train + val)]
    val_bytes = count_bytes(dataset.val, tokenizer)
    row = {
        "bits_per_byte": 8 * (sizes[1] - sizes[0]) / val_bytes,
        "train_bytes": count_bytes(dataset.train, tokenizer),
        "val_bytes": val_bytes,
    }
    with suppress(OSError, UserError):
        write_json(cache_folder() / f"xz-{key}.json", row)
    return row


def compressed_size(text: bytes, window: int, progress: Any) -> int:
    """Return the size of a text compressed by xz -9e, which searches for repetitions in the last `window` bytes."""
    lzma2 = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": max(window, 4096)}  # the minimum
    xz, size = lzma.LZMACompressor(lzma.FORMAT_RAW, filters=[lzma2]), 0
    for begin in range(0, len(text), BLOCK):  # so that Ctrl-C stops it
        piece = text[begin : begin + BLOCK]
        size += len(xz.compress(piece))
        progress.update(len(piece))
    return size + len(xz.flush())


def shard_text(shards: Sequence[Shard], tokenizer: Tokenizer) -> bytes:
    """Return the text of shards in UTF-8, with END_OF_TEXT for each end-of-text token."""
    contents = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    if tokenizer.eot is not None:
        contents[tokenizer.eot] = END_OF_TEXT
    parts = (ids.tolist() for shard in shards for _, ids in blocks(shard.ids))
    return b"".join(b"".join(map(contents.__getitem__, ids)) for ids in parts)


def count_bytes(shards: Sequence[Shard], tokenizer: Tokenizer) -> int:
    """Return the number of UTF-8 bytes in shards, where end-of-text tokens have none."""
    sizes = token_sizes(tokenizer)
    return sum(int(sizes[ids].sum()) for shard in shards for _, ids in blocks(shard.ids))
