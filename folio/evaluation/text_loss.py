"""The loss of a model on each token of a text, averaged over documents or by position in windows of any length.

Dimensions: B batch, T time, V vocabulary; n tokens or documents; W windows of N + 1 tokens.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from folio import UserError
from folio.base import number_format
from folio.base.progress import progress_bar
from folio.data.account import Account
from folio.data.blocks import DocumentPart
from folio.data.corpus import Corpus
from folio.data.shards import MIN_DOCUMENTS, Shard
from folio.data.tokenizer import OnUnknown, Tokenizer
from folio.data.windows import divide
from folio.decoding.prompts import documents_of
from folio.evaluation.scores import LOSS, Measure, PositionLoss
from folio.machine.data_parallel import DataParallelLoss
from folio.machine.runtime import Runtime
from model import GPT

BATCH_TOKENS = 4096  # tokens per forward pass
BLOCK_BYTES = 1024  # of the blocks over which intervals are, if there are fewer than MIN_DOCUMENTS


class Stream(NamedTuple):
    """Consecutive tokens."""

    ids: np.ndarray  # (n,)
    counted: np.ndarray  # (n,) False: the token is masked
    document: np.ndarray  # (n,) document number of each token
    skipped: np.ndarray  # (n,) bytes of the unknown characters that were left out right before each token


def corpus_stream(corpus: Corpus, tokenizer: Tokenizer, on_unknown: OnUnknown = "error") -> Stream:
    """Tokenize documents as for a data set: each ends with the end-of-text token or, without one, the separator.

    A document that contains <|endoftext|> is several documents.
    """
    end = tokenizer.encode(corpus.split_on or "", on_unknown) if tokenizer.eot is None else np.array([tokenizer.eot])
    empty = np.zeros(0, dtype=np.int64)
    pieces, documents, skipped, number = [empty], [empty], [empty], 0
    for block in corpus.blocks():
        # A document that is larger than a block is split into parts.
        is_end = not isinstance(block, DocumentPart) or block.last
        for content in block.documents(Account()):
            texts = documents_of(tokenizer, content)
            for text, ends in zip(texts, [True] * (len(texts) - 1) + [is_end], strict=True):
                if not text and len(texts) > 1:  # <|endoftext|> at the beginning or the end
                    continue
                ids = tokenizer.encode(text, on_unknown)
                if ends:
                    ids = np.concatenate([ids, end])
                pieces.append(ids.astype(np.int64))
                documents.append(np.full(len(ids), number))
                skipped.append(np.zeros(len(ids), np.int64))
                if tokenizer.count_unknown(text):
                    before = skipped_bytes(text, tokenizer)
                    skipped[-1][: len(before)] = before
                number += ends
    ids = np.concatenate(pieces)
    if len(ids) < 2:
        raise UserError("the text has fewer than 2 tokens: there is nothing to predict")
    return Stream(ids, np.ones(len(ids), bool), np.concatenate(documents), np.concatenate(skipped))


def skipped_bytes(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the bytes of the unknown characters right before each known character."""
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
    """Return a stream per shard. Documents end after an end-of-text token and at the end of a shard."""
    streams, first = [], 0
    for shard in shards:
        ids = np.asarray(shard.ids, dtype=np.int64)
        counted = np.ones(len(ids), bool) if shard.mask is None else np.asarray(shard.mask) != 0
        is_start = np.concatenate([[False], ids[:-1] == tokenizer.eot])  # never, without an end-of-text token
        streams.append(Stream(ids, counted, first + np.cumsum(is_start), np.zeros(len(ids), np.int64)))
        first = streams[-1].document[-1] + 1
    return streams


def token_sizes(tokenizer: Tokenizer) -> np.ndarray:
    """Return the number of UTF-8 bytes of each token: (V,)."""
    return np.array([len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)])


def measure_text(
    model: GPT, tokenizer: Tokenizer, runtime: Runtime, name: str, streams: list[Stream], stride: int
) -> list[Measure]:
    """Measure loss, perplexity and bits per byte. Each token of a stream except the first is predicted once."""
    progress = progress_bar(total=sum(len(stream.ids) - 1 for stream in streams), unit="token", desc=name)
    losses = [token_losses(model, s.ids, runtime, stride, progress, number) for number, s in enumerate(streams)]
    progress.close()
    # (n,) each, over the tokens of all streams; a stream's first token is not predicted, so it is masked
    nats = np.concatenate([np.concatenate([[0.0], stream_losses]) for stream_losses in losses])
    counted = np.concatenate([np.concatenate([[False], stream.counted[1:]]) for stream in streams])
    documents = np.concatenate([stream.document for stream in streams])
    sizes = token_sizes(tokenizer)[np.concatenate([stream.ids for stream in streams])]
    n_documents, unit, parts_of = len(np.unique(documents[counted])), "documents", None
    if n_documents < MIN_DOCUMENTS:
        parts_of = n_documents
        # Blocks include skipped bytes, so that they are the same for models with different vocabularies.
        skipped = np.concatenate([stream.skipped for stream in streams])
        documents, unit = np.cumsum(sizes + skipped) // BLOCK_BYTES, f"blocks of {BLOCK_BYTES:,} bytes"
    _, group = np.unique(documents[counted], return_inverse=True)
    # (n,) each, over documents
    total_nats, n_tokens, n_bytes = (np.bincount(group, column[counted]) for column in (nats, counted, sizes))
    loss = Measure(name, LOSS, unit, total_nats, n_tokens, parts_of=parts_of)
    measures = [loss, replace(loss, name="perplexity", transform=math.exp)]
    if n_bytes.any():
        measures.append(replace(loss, name="bits per byte", values=total_nats / math.log(2), weights=n_bytes))
    return measures


def token_losses(
    model: GPT, ids: np.ndarray, runtime: Runtime, stride: int, progress: Any = None, shard: int = 0
) -> np.ndarray:
    """Return the loss in nats of each token of ids (n,) except the first: (n - 1,).

    With stride = block_size the contexts do not overlap: they are the validation windows of the shard with this number.
    With a smaller stride, a context of block_size tokens begins every `stride` tokens, and each token is predicted in
    the first context that contains it. So each token after the first context has at least block_size - stride tokens
    before it.
    """
    logits_fn = make_logits(model, runtime)
    n = len(ids)
    T = min(model.config.block_size, max(1, n - 1))
    losses = np.empty(n - 1)
    if stride < T:
        starts = range(0, max(1, n - 1 - T + stride), stride)
        contexts = [(start, start + (T - stride if start else 0), min(start + T, n - 1)) for start in starts]
    else:
        contexts = [(start, start, end) for start, end in zip(*divide(n - 1, T, shard), strict=True)]
    B = max(1, BATCH_TOKENS // T)
    for first in range(0, len(contexts), B):
        batch = contexts[first : first + B]
        windows = np.full((len(batch), T + 1), -1)
        for window, (start, _, end) in zip(windows, batch, strict=True):
            window[: end - start + 1] = ids[start : end + 1]
        window_losses = batch_losses(logits_fn, torch.from_numpy(windows).to(runtime.device))  # (B, T)
        for row, (start, begin, end) in zip(window_losses, batch, strict=True):  # predicts the targets begin to end
            losses[begin:end] = row[begin - start : end - start]
            if progress is not None:
                progress.update(int(end - begin))
    return losses


def measure_positions(
    model: GPT, runtime: Runtime, name: str, streams: list[Stream], context: int, batch_tokens: int = BATCH_TOKENS
) -> PositionLoss:
    """Measure the loss at each position of windows of `context` + 1 tokens, which may exceed block_size.

    A model with learned positions predicts only the first block_size positions. Raises UserError if the text has fewer
    than 2 windows.
    """
    size = context + 1
    columns = zip(*((s.ids, s.counted, s.document) for s in streams), strict=True)
    ids, counted, document = (  # (W, size) each; the remainder of a stream is dropped
        np.concatenate([part[: len(part) // size * size].reshape(-1, size) for part in column]) for column in columns
    )
    if len(ids) < 2:
        n = sum(len(stream.ids) for stream in streams)
        raise UserError(
            f"{name} has {number_format.counted(n, 'token')}, but --context={context} needs 2 windows of "
            f"{context + 1:,}: set a smaller --context or give a longer text"
        )
    logits_fn = make_logits(model, runtime)
    block_size = model.config.block_size
    T = min(context, block_size) if model.config.position == "learned" else context
    losses = np.empty((len(ids), T))
    B = max(1, batch_tokens // T)
    progress = progress_bar(total=losses.size, unit="token", desc=name)
    for first in range(0, len(ids), B):
        batch = ids[first : first + B, : T + 1]
        losses[first : first + B] = batch_losses(logits_fn, torch.from_numpy(batch).to(runtime.device))
        progress.update(len(batch) * T)
    progress.close()
    counted = counted[:, 1:]
    nats = np.where(counted[:, :T], losses, 0.0)
    return PositionLoss(name, hashlib.sha256(ids.tobytes()).hexdigest(), block_size, nats, counted, document[:, 0])


def make_logits(model: GPT, runtime: Runtime) -> Callable[[Tensor], Tensor]:
    """model.logits as computed on the runtime, where the rows are divided among the workers."""
    if runtime.workers > 1:
        return DataParallelLoss(model, runtime).logits

    def logits(idx: Tensor) -> Tensor:
        with runtime.autocast():
            return model.logits(idx)

    return logits


@torch.inference_mode()
def batch_losses(logits_fn: Callable[[Tensor], Tensor], ids: Tensor) -> np.ndarray:
    """Return the loss in nats of each token of ids (B, T + 1) except the first of a row: (B, T). -1 is padding."""
    logits = logits_fn(ids[:, :-1].clamp(min=0))  # (B, T, V)
    losses = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), ignore_index=-1, reduction="none")
    return losses.view(len(ids), -1).double().cpu().numpy()
