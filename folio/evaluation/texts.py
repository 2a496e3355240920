"""What a model is measured on: the documents of files, the validation sets of data sets, and pairs."""

from collections.abc import Sequence
from typing import NamedTuple

from folio import UserError
from folio.base.settings import line_breaks
from folio.checkpoints.checkpoint import Checkpoint
from folio.data.blocks import iterate_texts
from folio.data.corpus import Corpus, find_sources
from folio.data.find_data import find_datasets
from folio.data.shards import Dataset
from folio.data.sources.pairs import Pair, validation_pairs
from folio.data.tokenizer import Tokenizer
from folio.evaluation.scores import Reading, read_characters
from folio.evaluation.text_loss import Stream, corpus_stream, shard_streams, token_sizes


class EvaluatedText(NamedTuple):
    """A text to measure a model on."""

    name: str
    streams: list[Stream]
    reading: Reading
    dataset: Dataset | None = None  # whose validation set it is


def open_files(files: Sequence[str], field: str, split_on: str | None, tokenizer: Tokenizer) -> EvaluatedText:
    """The documents of files and folders, read as by prepare/text.py. Raises UserError."""
    corpus = Corpus(find_sources(files), field=field, split_on=split_on and line_breaks(split_on))
    stream = corpus_stream(corpus, tokenizer)
    texts = (text for block in corpus.blocks() for text in iterate_texts(block))
    return EvaluatedText(", ".join(files), [stream], read_characters(texts, tokenizer))


def open_validation_set(dataset: Dataset, saved: Checkpoint) -> EvaluatedText:
    """The validation set of a data set. Raises UserError if its tokenizer is not the model's."""
    if dataset.load_tokenizer().hash != saved.tokenizer.hash:
        raise UserError(
            f"{dataset.folder} was prepared with a different tokenizer than {saved.path}: give a --text instead"
        )
    streams, sizes = shard_streams(dataset.val, saved.tokenizer), token_sizes(saved.tokenizer)
    reading = Reading(bytes=sum(int(sizes[stream.ids].sum()) for stream in streams))
    return EvaluatedText(f"{dataset.folder.name}, validation", streams, reading, dataset)


def open_pairs(datasets: Sequence[Dataset]) -> dict[str, list[Pair]]:
    """The pairs of the validation sets, by the name of their source. Raises UserError if there are none."""
    return {f"pairs of {dataset.folder.name}, validation": validation_pairs(dataset) for dataset in datasets}


def open_datasets(saved: Checkpoint, dataset: str | None, data_dir: str | None, instead: str) -> list[Dataset]:
    """The data sets that are named or, by default, those of the training run. Raises UserError.

    instead: the option that names a file, for an error.
    """
    config = saved.state.get("config", {})
    names, data_dir = dataset or config.get("dataset"), data_dir or config.get("data_dir")
    if not names:
        raise UserError(f"{saved.path} does not record what it was trained on: give a --dataset or a {instead}")
    return [opened for opened, _ in find_datasets(names, data_dir)]
