"""The loss of a model on each token of a text: over its documents, or by position in windows of any length.

Dimensions: B batch, T time, V vocabulary; n tokens or documents; W windows of N + 1 tokens.
"""

import hashlib
import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from folio import UserError
from folio.base.progress import progress_bar
from folio.data.blocks import DocumentPart
from folio.data.corpus import Corpus
from folio.data.shards import Shard
from folio.data.tokenizer import Tokenizer
from folio.evaluation.scores import LOSS, Measure, PositionLoss
from folio.machine.runtime import Runtime
from model import GPT

BATCH_TOKENS = 4096  # tokens per forward pass
MIN_DOCUMENTS = 20  # with fewer documents, an interval is over blocks of the text
BLOCK_BYTES = 1024  # size of these blocks


class Stream(NamedTuple):
    """Consecutive tokens."""

    ids: np.ndarray  # (n,)
    counted: np.ndarray  # (n,) whether a token counts
    document: np.ndarray  # (n,) the number of its document
    skipped: np.ndarray  # (n,) bytes of the characters that were left out right before it


def corpus_stream(corpus: Corpus, tokenizer: Tokenizer) -> Stream:
    """The documents as in a data set: each is followed by the end-of-text token or, without one, by the separator."""
    end = tokenizer.encode(corpus.split_on or "") if tokenizer.eot is None else np.array([tokenizer.eot])
    empty = np.zeros(0, dtype=np.int64)
    pieces, documents, skipped, number = [empty], [empty], [empty], 0
    for block in corpus.blocks():
        # a document that is larger than a block comes in parts
        is_end = not isinstance(block, DocumentPart) or block.last
        for text in block.documents():
            ids = tokenizer.encode(text)
            if is_end:
                ids = np.concatenate([ids, end])
            pieces.append(ids.astype(np.int64))
            documents.append(np.full(len(ids), number))
            skipped.append(np.zeros(len(ids), np.int64))
            if tokenizer.count_unknown(text):
                before = skipped_bytes(text, tokenizer)
                skipped[-1][: len(before)] = before
            if is_end:
                number += 1
    ids = np.concatenate(pieces)
    if len(ids) < 2:
        raise UserError("the text has fewer than 2 tokens: there is nothing to predict")
    return Stream(ids, np.ones(len(ids), bool), np.concatenate(documents), np.concatenate(skipped))


def skipped_bytes(text: str, tokenizer: Tokenizer) -> list[int]:
    """The size of the characters that are left out right before each character of the vocabulary."""
    unknown = {character for character in set(text) if tokenizer.count_unknown(character)}
    sizes, size = [], 0
    for character in text:
        if character in unknown:
            size += len(character.encode("utf-8", "replace"))
        else:
            sizes.append(size)
            size = 0
    return sizes


def shard_streams(shards: list[Shard], tokenizer: Tokenizer) -> list[Stream]:
    """Each shard as a stream. A document ends after each end-of-text token, and at the end of a shard."""
    streams, first = [], 0
    for shard in shards:
        ids = np.asarray(shard.ids, dtype=np.int64)
        counted = np.ones(len(ids), bool) if shard.mask is None else np.asarray(shard.mask) != 0
        begins = np.concatenate([[False], ids[:-1] == tokenizer.eot])  # without an end-of-text token, only the first
        streams.append(Stream(ids, counted, first + np.cumsum(begins), np.zeros(len(ids), np.int64)))
        first = streams[-1].document[-1] + 1
    return streams


def token_sizes(tokenizer: Tokenizer) -> np.ndarray:
    """The number of UTF-8 bytes of each token: (V,)."""
    return np.array([len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)])


def measure_text(
    model: GPT, tokenizer: Tokenizer, runtime: Runtime, name: str, streams: list[Stream], stride: int
) -> list[Measure]:
    """Loss, perplexity and bits per byte. Every token of each stream but its first is predicted once."""
    progress = progress_bar(total=sum(len(stream.ids) - 1 for stream in streams), unit="token", desc=name)
    losses = [token_losses(model, stream.ids, runtime, stride, progress) for stream in streams]
    progress.close()
    # (n,) each, over the tokens of all streams; a stream's first token is not predicted and does not count
    nats = np.concatenate([np.concatenate([[0.0], stream_losses]) for stream_losses in losses])
    counted = np.concatenate([np.concatenate([[False], stream.counted[1:]]) for stream in streams])
    documents = np.concatenate([stream.document for stream in streams])
    sizes = token_sizes(tokenizer)[np.concatenate([stream.ids for stream in streams])]
    unit = "documents"
    if len(np.unique(documents[counted])) < MIN_DOCUMENTS:
        # the same blocks for all models, including characters that some of them left out
        skipped = np.concatenate([stream.skipped for stream in streams])
        documents, unit = np.cumsum(sizes + skipped) // BLOCK_BYTES, f"blocks of {BLOCK_BYTES:,} bytes"
    _, group = np.unique(documents[counted], return_inverse=True)
    # (n,) each, over documents
    total_nats, n_tokens, n_bytes = (np.bincount(group, column[counted]) for column in (nats, counted, sizes))
    loss = Measure(name, LOSS, unit, total_nats, n_tokens)
    measures = [loss, replace(loss, name="perplexity", transform=math.exp)]
    if n_bytes.any():
        measures.append(Measure(name, "bits per byte", unit, total_nats / math.log(2), n_bytes))
    return measures


def token_losses(model: GPT, ids: np.ndarray, runtime: Runtime, stride: int, progress: Any = None) -> np.ndarray:
    """The loss in nats of each of the ids (n,) but the first: (n - 1,).

    A context of block_size tokens begins every `stride` tokens, and each token is predicted in the first context that
    contains it. With stride = block_size the contexts do not overlap; with a smaller stride each token after the first
    context has at least block_size - stride tokens before it.
    """
    n = len(ids)
    T = min(model.config.block_size, max(1, n - 1))
    losses = np.empty(n - 1)
    starts = list(range(0, max(1, n - 1 - T + stride), stride))
    B = max(1, BATCH_TOKENS // T)
    for first in range(0, len(starts), B):
        batch_starts = starts[first : first + B]
        windows = np.full((len(batch_starts), T + 1), -1)
        for window, start in zip(windows, batch_starts, strict=True):
            context = ids[start : start + T + 1]
            window[: len(context)] = context
        window_losses = batch_losses(model, torch.from_numpy(windows), runtime)  # (B, T)
        for row, start in zip(window_losses, batch_starts, strict=True):
            predicted = T - stride if start else 0  # losses that the previous context has given
            end = min(start + T, n - 1)
            losses[start + predicted : end] = row[predicted : end - start]
            if progress is not None:
                progress.update(end - start - predicted)
    return losses


def measure_positions(model: GPT, runtime: Runtime, name: str, streams: list[Stream], context: int) -> PositionLoss:
    """The loss at each position of windows of `context` + 1 tokens, which may be longer than block_size.

    A model with learned positions predicts only the first block_size positions. Raises UserError if the text has fewer
    than 2 windows.
    """
    ids, counted = (cut_windows([getattr(s, field) for s in streams], context + 1) for field in ("ids", "counted"))
    if len(ids) < 2:
        n = sum(len(stream.ids) for stream in streams)
        raise UserError(
            f"{name} has {n:,} tokens, and --context={context} needs 2 windows of {context + 1:,}: set a smaller "
            f"--context or give a longer text"
        )
    block_size = model.config.block_size
    T = min(context, block_size) if model.config.position == "learned" else context
    losses = np.empty((len(ids), T))
    B = max(1, BATCH_TOKENS // T)
    progress = progress_bar(total=losses.size, unit="token", desc=name)
    for first in range(0, len(ids), B):
        batch = ids[first : first + B, : T + 1]
        losses[first : first + B] = batch_losses(model, torch.from_numpy(batch), runtime)
        progress.update(len(batch) * T)
    progress.close()
    counted = counted[:, 1:]
    nats = np.where(counted[:, :T], losses, 0.0)
    return PositionLoss(name, hashlib.sha256(ids.tobytes()).hexdigest(), block_size, nats, counted)


def cut_windows(columns: list[np.ndarray], size: int) -> np.ndarray:
    """Consecutive windows of each of the columns (n,), which do not overlap; a shorter rest is left out: (W, size)."""
    return np.concatenate([column[: len(column) // size * size].reshape(-1, size) for column in columns])


@torch.inference_mode()
def batch_losses(model: GPT, ids: torch.Tensor, runtime: Runtime) -> np.ndarray:
    """The loss in nats of each of the ids (B, T + 1) but the first of each row: (B, T). An id of -1 is padding."""
    ids = ids.to(runtime.device)
    with runtime.compute():
        logits = model.logits(ids[:, :-1].clamp(min=0))  # (B, T, V)
    losses = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), ignore_index=-1, reduction="none")
    return losses.view(len(ids), -1).double().cpu().numpy()
