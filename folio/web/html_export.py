"""Collects the contents of a model's HTML file: checked weights, initial text, validation losses, languages, index."""

import unicodedata
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from folio import UserError
from folio.base.packages import is_installed
from folio.base.progress import progress_bar
from folio.base.terminal import say
from folio.checkpoints.checkpoint import Checkpoint
from folio.checkpoints.export_formats import with_position_table
from folio.checkpoints.training_data import open_training_data
from folio.data.shards import Dataset
from folio.data.sources.pairs import Pair, validation_pairs
from folio.decoding.prompt_files import read_prompt
from folio.decoding.prompts import encode_prompt
from folio.decoding.trace import Trace
from folio.evaluation.export_checks import check_computes_gpt2
from folio.evaluation.memorization import OVERLAP_TOKENS, TrainingIndex, TrainingSearch, find_overlap
from folio.evaluation.scores import LOSS
from folio.evaluation.text_loss import Stream, measure_text, shard_streams
from folio.machine.runtime import resolve_runtime
from folio.web import html_file
from folio.web.questions import MAX_CHARACTERS
from folio.web.viewed_model import ViewedModel, choose_text
from model import GPT

LOSS_TOKENS = 100_000  # first validation tokens, on which the loss of the stored weights is measured
LOSS_WORK = 2e11  # parameters times tokens; large models use fewer tokens, but at least MIN_LOSS_TOKENS
MIN_LOSS_TOKENS = 10_000
RECORDED_STEPS = 8  # checkpoints and snapshots whose computation for the first text is recorded
RECORDED_TOKENS = 300  # of the text, so that the record has at most 100 kB
RECORDED_KEYS = 12  # of the followed token's attention: the token and those before it
RECORDED_GUESSES = 3  # most likely tokens after the followed one


def checked_checkpoint(viewed: ViewedModel) -> Checkpoint:
    """Return the opened checkpoint with its weights. Raises UserError if the engine does not support the model."""
    loaded = replace(viewed.checkpoint, model=dict(viewed.model.named_parameters()))
    html_file.check_fits(loaded)
    gpt2 = with_position_table(loaded)
    if gpt2.config().position == "learned" and is_installed("transformers"):  # the page also compares logits
        check_computes_gpt2(loaded, gpt2, "html")
    return loaded


def first_text(viewed: ViewedModel, text: str, data_dir: str | None) -> str:
    """Return the initial text: the given one, or one that suits the model. Raises UserError.

    It does not quote validation data of plain text, because the file may be sent to anyone.
    """
    text = read_prompt("text", text, viewed.tokenizer) or choose_text(viewed, data_dir, quotes_text=False)
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"text: it has {len(text):,} characters; the limit is {MAX_CHARACTERS:,}")
    encode_prompt(viewed.tokenizer, text, "skip")  # raises UserError if a model of music gets text
    return text


def read_training_data(
    viewed: ViewedModel, stored: GPT, text: str, data_dir: str | None, index_offset: int | None
) -> tuple[dict[str, Any], bytes]:
    """Measure losses and index the training data of a model, and print progress. Raises UserError.

    Returns fields of the file's header, see html_file.make_header, and the content of the index, if any. stored: the
    model with its weights as rounded in the file. text: the initial text. index_offset: offset of the index in the
    file's content; None: no index.
    """
    datasets = open_training_data(viewed.checkpoint, data_dir)
    say("measuring the loss of the stored weights and writing the file")
    losses = [measure_losses(dataset, viewed.model, stored) for dataset in progress_bar(iterable=datasets)]
    tokenizer, ids = viewed.tokenizer, encode_prompt(viewed.tokenizer, text, "skip").ids[: viewed.limit]
    overlap = find_overlap(TrainingIndex(datasets, tokenizer.eot, OVERLAP_TOKENS), tokenizer, np.array(ids))
    base = Path(str(viewed.settings.get("init_from"))).name
    header = {
        "losses": losses,
        "languages": html_file.find_languages(held_out_pairs(datasets)),
        "initial_overlap": {"ids": ids, "facts": {"reason": None, **overlap._asdict(), "init_from": base}},
    }
    if index_offset is None:
        return header, b""
    say("indexing the training data")
    index, content = html_file.pack_index(TrainingSearch(datasets, tokenizer), index_offset)
    return {**header, "index": {**index, "init_from": base}}, content


def record_training(viewed: ViewedModel, text: str) -> dict[str, Any] | None:
    """Record what the model computed for a text during its training, for the story.

    ids: the text. steps: of up to RECORDED_STEPS checkpoints and snapshots, the first dimension S of the other lists.
    losses (S, T - 1): of each token except the first. best (S, T - 1): the most likely tokens instead of these.

    token: the followed position, see story_token. weights (S, L, H, n): its attention to the n tokens from `first` on,
    the last of which is the token itself. earlier (S, L, H): the sum of its weights of the tokens before `first`.
    guess_ids, guess_probabilities (S, RECORDED_GUESSES): the most likely tokens after it.

    Returns None for a model with one checkpoint, and for a large model, whose file has no story.
    """
    ids = encode_prompt(viewed.tokenizer, text, "skip").ids[: min(RECORDED_TOKENS, viewed.limit)]
    all_steps = viewed.steps()
    is_traced = viewed.model.num_params()["total"] <= html_file.MAX_TRACED_PARAMETERS
    if len(all_steps) < 2 or len(ids) < 2 or not is_traced:
        return None
    places = np.linspace(0, len(all_steps) - 1, min(RECORDED_STEPS, len(all_steps))).round().astype(int)
    steps, token = [all_steps[place] for place in places], story_token([viewed.tokenizer.piece(id) for id in ids])
    first = max(0, token - RECORDED_KEYS + 1)
    ids_tensor = torch.tensor(ids, device=viewed.device)
    records = [record_step(viewed.model_at(step), ids_tensor, token, first) for step in steps]
    if not all(records):
        return None
    columns = {name: [record[name] for record in records] for name in records[0]}
    return {"ids": ids, "steps": steps, "token": token, "first": first, **columns}


def record_step(model: GPT, ids: Tensor, token: int, first: int) -> dict[str, list]:
    """Return what record_training records of one checkpoint, or nothing if it computes NaN or infinity."""
    rows: list[Tensor] = []  # the attention of `token` in each layer, (H, T)
    trace = Trace(model, ids, on_heads=lambda layer, heads: rows.append(heads.weights[:, token]))
    predictions, weights = trace.predictions, torch.stack(rows)
    if not (predictions.loss.isfinite().all() and predictions.entropy.isfinite().all()):
        return {}
    guesses = trace.lens(trace.stream[-1, token], RECORDED_GUESSES)
    return {
        "losses": significant(predictions.loss.tolist()),
        "best": predictions.best[:-1].tolist(),
        "weights": decimals(weights[:, :, first : token + 1].tolist()),
        "earlier": decimals(weights[:, :, :first].sum(-1).tolist()),
        "guess_ids": guesses.ids.tolist(),
        "guess_probabilities": significant(guesses.probabilities.tolist()),
    }


def story_token(labels: list[str]) -> int:
    """Return the position of the token that the story follows first, as storyToken in page/machine_stops.js does."""
    in_words = (t for t, label in enumerate(labels[:-1]) if any(unicodedata.category(c)[0] in "LN" for c in label))
    return max(in_words, default=len(labels) - 1)


def significant(numbers: list[float]) -> list[float]:
    """Round to four significant digits."""
    return [float(f"{number:.4g}") for number in numbers]


def decimals(numbers: Any) -> Any:
    """Round the numbers in nested lists to four decimals."""
    return [decimals(inner) for inner in numbers] if isinstance(numbers, list) else round(numbers, 4)


def held_out_pairs(datasets: list[Dataset]) -> list[Pair]:
    """Return the validation pairs of the first data set with pairs."""
    for dataset in datasets:
        with suppress(UserError):  # a data set of plain text
            return validation_pairs(dataset)
    return []


def measure_losses(
    dataset: Dataset, model: GPT, stored: GPT, loss_tokens: int = LOSS_TOKENS, min_loss_tokens: int = MIN_LOSS_TOKENS
) -> dict[str, Any]:
    """Measure the loss on the first validation tokens, before and after rounding the weights.

    of: name of the data set. tokens: number of tokens in the loss.
    """
    runtime, tokenizer = resolve_runtime("cpu", "float32", False), dataset.load_tokenizer()
    remaining = int(max(min_loss_tokens, min(loss_tokens, LOSS_WORK // model.num_params()["total"])))
    streams = []
    for stream in shard_streams(dataset.val, tokenizer):
        streams.append(Stream(*(column[:remaining] for column in stream)))
        remaining -= len(streams[-1].ids)
        if remaining < 2:
            break
    counted = sum(int(np.count_nonzero(stream.counted[1:])) for stream in streams)
    if not counted:
        raise UserError(f"{dataset.folder} has no tokens for validation")
    losses = {}
    for name, gpt in (("before", model), ("after", stored)):
        title = f"{dataset.folder.name}, validation"
        measures = measure_text(gpt.eval(), tokenizer, runtime, title, streams, gpt.config.block_size)
        (loss,) = (measure for measure in measures if measure.name == LOSS)
        losses[name] = loss.ratio
    return {"of": dataset.folder.name, "tokens": counted, **losses}


def describe_losses(loss: dict[str, Any], dtype: str) -> str:
    """Format the result of measure_losses as one line."""
    line = f"loss on {loss['tokens']:,} validation tokens of {loss['of']}: {loss['before']:.4f} nats per token"
    if dtype == "float32":
        return line
    change = round(loss["after"] - loss["before"], 4) + 0.0  # never -0.0000
    return f"{line}, {loss['after']:.4f} as stored in {dtype} ({change:+.4f})"


def describe_file(output: Path, header: dict[str, Any]) -> Iterator[str]:
    """Yield lines about a written file."""
    dtype, stored_bytes = header["storage"]["dtype"], header["storage"]["bytes"]
    yield f"{output}: {output.stat().st_size / 1e6:.1f} MB, {stored_bytes / 1e6:.1f} MB of weights in {dtype}"
    if index := header["index"]:
        yield f"the index of the training data takes {(index['end'] - stored_bytes) / 1e6:.1f} MB"
    for loss in header["losses"]:
        yield describe_losses(loss, dtype)
    if languages := header["languages"]:
        yield f"it translates between {', '.join(sorted({code for pair in languages['pairs'] for code in pair}))}"
    if not header["traced"]:
        yield f"the model has more than {html_file.MAX_TRACED_PARAMETERS:,} parameters, so the file only generates"
    yield f"open it in a browser: {output.resolve().as_uri()}"
