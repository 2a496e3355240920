"""The inputs of an evaluation: the documents of files, the validation sets of data sets, and pairs."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from folio import UserError
from folio.base.progress import note
from folio.base.settings import line_breaks
from folio.checkpoints.checkpoint import Checkpoint
from folio.data.account import describe
from folio.data.blocks import Field
from folio.data.corpus import Corpus
from folio.data.find_data import find_datasets
from folio.data.inputs import Format, find_sources
from folio.data.shards import Dataset
from folio.data.sources.pairs import Pair
from folio.data.tokenizer import OnUnknown, Tokenizer
from folio.decoding.prompts import encode_text
from folio.evaluation.scores import Coverage, count_characters
from folio.evaluation.text_loss import Stream, corpus_stream, shard_streams, token_sizes


class EvaluatedText(NamedTuple):
    """A text to measure a model on."""

    name: str
    streams: list[Stream]
    coverage: Coverage
    dataset: Dataset | None = None  # None: the text is not a validation set
    are_pairs: bool = False  # True: its documents are pairs


def open_files(
    files: Sequence[str],
    field: str,
    split_on: str | None,
    tokenizer: Tokenizer,
    format: Format | None = None,
    on_unknown: OnUnknown = "error",
) -> EvaluatedText:
    """Open the documents of files and folders, as prepare/text.py does. Raises UserError."""
    inputs = find_sources(files, format, keep_line_ends=tokenizer.keep_line_ends)
    corpus = Corpus(inputs, Field(field), split_on=split_on and line_breaks(split_on))
    stream, account = corpus_stream(corpus, tokenizer, on_unknown), corpus.account()
    coverage = count_characters(corpus.documents(account), tokenizer)
    for line in [*inputs.notes, *describe(account, corpus.split_on, can_keep=False)]:
        note(line)
    return EvaluatedText(", ".join(files), [stream], coverage)


def open_validation_set(dataset: Dataset, saved: Checkpoint) -> EvaluatedText:
    """Open the validation set of a data set. Raises UserError if its tokenizer is not the model's."""
    if dataset.load_tokenizer().hash != saved.tokenizer.hash:
        raise UserError(
            f"{dataset.folder} was prepared with a different tokenizer than {saved.path}: give a --text instead"
        )
    streams, sizes = shard_streams(dataset.val, saved.tokenizer), token_sizes(saved.tokenizer)
    coverage = Coverage(bytes=sum(int(sizes[stream.ids].sum()) for stream in streams))
    return EvaluatedText(f"{dataset.folder.name}, validation", streams, coverage, dataset)


def open_pairs(
    name: str, pairs: Sequence[Pair], coverage: Coverage, tokenizer: Tokenizer, dataset: Dataset | None = None
) -> EvaluatedText:
    """Tokenize pairs as in a data set, where each is between two end-of-text tokens.

    dataset: the data set of whose validation set they are.
    """
    end = [] if tokenizer.eot is None else [tokenizer.eot]
    texts = [[encode_text(tokenizer, text, "skip") for text in (pair.prompt, pair.completion)] for pair in pairs]
    documents = [[*end, *prompt, *completion, *end] for prompt, completion in texts]
    ids = np.array([token for document in documents for token in document], np.int64)
    document = np.repeat(np.arange(len(documents)), [len(part) for part in documents])
    stream = Stream(ids, np.ones(len(ids), bool), document, np.zeros(len(ids), np.int64))
    return EvaluatedText(name, [stream], coverage, dataset, are_pairs=True)


def open_datasets(saved: Checkpoint, dataset: str | None, data_dir: str | None, alternative: str) -> list[Dataset]:
    """Open the given data sets, by default those of the training run. Raises UserError.

    alternative: an option to suggest in the error message.
    """
    config = saved.state.get("config", {})
    names, data_dir = dataset or config.get("dataset"), data_dir or config.get("data_dir")
    if not names:
        raise UserError(f"{saved.path} does not record its training data: give --dataset or {alternative}")
    return [dataset for dataset, _ in find_datasets(names, data_dir)]
