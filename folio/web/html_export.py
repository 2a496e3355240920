"""What an HTML file of a model holds, from its checkpoint and its training data: the weights, losses, and languages."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from folio import UserError
from folio.base.packages import is_installed
from folio.base.progress import progress_bar
from folio.checkpoints.checkpoint import Checkpoint
from folio.checkpoints.export_formats import with_position_table
from folio.data.shards import Dataset
from folio.data.sources.pairs import Pair, validation_pairs
from folio.decoding.prompt_files import read_prompt
from folio.decoding.prompts import encode_prompt
from folio.evaluation.export_checks import check_computes_gpt2
from folio.evaluation.memorization import open_training_data
from folio.evaluation.scores import LOSS
from folio.evaluation.text_loss import Stream, measure_text, shard_streams
from folio.machine.runtime import resolve_runtime
from folio.web import html_file
from folio.web.questions import MOST_CHARACTERS
from folio.web.viewed_model import ViewedModel, choose_text
from model import GPT

LOSS_TOKENS = 100_000  # for validation, the first ones, on which the loss of a file's weights is measured
LOSS_WORK = 2e11  # parameters times tokens: fewer tokens of a large model, but at least MIN_LOSS_TOKENS
MIN_LOSS_TOKENS = 10_000


class TrainingFacts(NamedTuple):
    """What a file says about the data that its model was trained on."""

    losses: list[dict[str, Any]]  # see measure_losses; one for each data set
    languages: dict[str, Any] | None = None  # see html_file.find_languages
    index: dict[str, Any] | None = None  # see html_file.pack_index, as its content
    index_content: bytes = b""


def checked_checkpoint(viewed: ViewedModel) -> Checkpoint:
    """The opened checkpoint. Raises UserError if a file cannot hold it, or if the engine would not compute the same."""
    loaded = replace(viewed.saved, model=dict(viewed.opened.named_parameters()))
    html_file.check_fits(loaded)
    gpt2 = with_position_table(loaded)
    if gpt2.config().position == "learned" and is_installed("transformers"):  # the page compares its logits, too
        check_computes_gpt2(loaded, gpt2, "html")
    return loaded


def first_text(viewed: ViewedModel, text: str, data_dir: str | None) -> str:
    """The text to show first: the given one, or one that suits the model. Raises UserError."""
    text = read_prompt("text", text, viewed.tokenizer) or choose_text(viewed, data_dir)
    if len(text) > MOST_CHARACTERS:
        raise UserError(f"text: it has {len(text):,} characters; the limit is {MOST_CHARACTERS:,}")
    encode_prompt(viewed.tokenizer, text, "skip")  # raises UserError if it is not music, but should be
    return text


def read_training_data(
    viewed: ViewedModel, stored: GPT, data_dir: str | None, index_offset: int | None
) -> TrainingFacts:
    """Measure and index the data that a model was trained on, and print what takes so long. Raises UserError.

    stored: the model with the weights as the file stores them. index_offset: of the index among the bytes of the file;
    None: without an index.
    """
    datasets = open_training_data(viewed.saved, data_dir)
    print("measuring the loss of the stored weights, and writing the file", flush=True)
    losses = [measure_losses(dataset, viewed.opened, stored) for dataset in progress_bar(iterable=datasets)]
    languages = html_file.find_languages(held_out_pairs(datasets))
    if index_offset is None:
        return TrainingFacts(losses, languages)
    print("making the index of the training data", flush=True)
    search = html_file.index_training_data(datasets, viewed.tokenizer)
    return TrainingFacts(losses, languages, *html_file.pack_index(search, index_offset))


def held_out_pairs(datasets: list[Dataset]) -> list[Pair]:
    """The pairs for validation of the first data set that has some."""
    for dataset in datasets:
        with suppress(UserError):  # a data set of text
            return validation_pairs(dataset)
    return []


def measure_losses(dataset: Dataset, model: GPT, stored: GPT) -> dict[str, Any]:
    """The loss on the first tokens for validation, before and after the weights were rounded.

    of: the data set. tokens: that count.
    """
    runtime, tokenizer = resolve_runtime("cpu", "float32", False), dataset.load_tokenizer()
    most = int(max(MIN_LOSS_TOKENS, min(LOSS_TOKENS, LOSS_WORK // model.num_params()["total"])))
    streams = []
    for stream in shard_streams(dataset.val, tokenizer):
        streams.append(Stream(*(column[:most] for column in stream)))
        most -= len(streams[-1].ids)
        if most < 2:
            break
    counted = sum(int(np.count_nonzero(stream.counted[1:])) for stream in streams)
    if not counted:
        raise UserError(f"{dataset.folder} has no tokens for validation")
    losses = {}
    for name, measured in (("before", model), ("after", stored)):
        name_of_set = f"{dataset.folder.name}, validation"
        measures = measure_text(measured.eval(), tokenizer, runtime, name_of_set, streams, measured.config.block_size)
        (loss,) = (measure for measure in measures if measure.name == LOSS)
        losses[name] = loss.ratio
    return {"of": dataset.folder.name, "tokens": counted, **losses}


def describe_losses(loss: dict[str, Any], dtype: str) -> str:
    """A line about what measure_losses returned."""
    line = f"loss on {loss['tokens']:,} validation tokens of {loss['of']}: {loss['before']:.4f} nats per token"
    if dtype == "float32":
        return line
    change = round(loss["after"] - loss["before"], 4) + 0.0  # never -0.0000
    return f"{line}, {loss['after']:.4f} as stored in {dtype} ({change:+.4f})"


def describe_file(output: Path, header: dict[str, Any]) -> Iterator[str]:
    """Lines about a file that was written with this header."""
    dtype, stored_bytes = header["storage"]["dtype"], header["storage"]["bytes"]
    yield f"{output}: {output.stat().st_size / 1e6:.1f} MB, {stored_bytes / 1e6:.1f} MB of weights in {dtype}"
    if index := header["index"]:
        yield f"the index of the training data has {(index['end'] - stored_bytes) / 1e6:.1f} MB"
    for loss in header["losses"]:
        yield describe_losses(loss, dtype)
    if languages := header["languages"]:
        yield f"it translates between {', '.join(sorted({code for pair in languages['pairs'] for code in pair}))}"
    if not header["traced"]:
        yield f"it only generates: views of what is inside are for at most {html_file.MOST_TRACED:,} parameters"
    yield f"open it in a browser: {output.resolve().as_uri()}"
