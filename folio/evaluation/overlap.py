"""Whether passages of a text, called probes, occur in the data sets that a model was trained on."""

import math
from dataclasses import replace

import numpy as np

from folio import UserError
from folio.base.progress import note
from folio.checkpoints.checkpoint import Checkpoint
from folio.data.shards import Dataset, data_root, has_data, open_dataset
from folio.data.windows import Mixture, parse_mixture
from folio.evaluation.scores import Reading
from folio.evaluation.texts import EvaluatedText

PROBES = 20  # passages of a text
PROBE_TOKENS = 32  # length of each of them
SEARCHED_BYTES = 100_000_000  # at the start of each data set


def open_training_data(saved: Checkpoint, data_dir: str | None) -> list[Dataset]:
    """The data sets of `open_training_mixture`."""
    return [dataset for dataset, _ in open_training_mixture(saved, data_dir).datasets]


def open_training_mixture(saved: Checkpoint, data_dir: str | None) -> Mixture:
    """The data that a checkpoint was trained on. Raises UserError if it is not available or has changed.

    data_dir: the folder of data sets to look in if it is not where it was in training. A missing one is not prepared.
    """
    config = saved.state.get("config", {})
    if not {"dataset", "data_dir"} <= config.keys():
        raise UserError("its checkpoint does not record the training data")
    datasets = []
    for name, weight in parse_mixture(config["dataset"]):
        folders = [data_root(place) / name for place in (config["data_dir"], data_dir)]
        folder = next((folder for folder in folders if has_data(folder)), None)
        if not folder and data_dir:
            raise UserError(f"its training data is neither {folders[0]} nor {folders[1]}; set --data_dir")
        if not folder:
            raise UserError(f"its training data, {folders[0]}, does not exist; set --data_dir")
        datasets.append((open_dataset(folder), weight))
    mixture = Mixture(datasets, config["block_size"], config["seed"], config["sampling"])
    if mixture.hash != saved.state["dataset"]["hash"]:
        raise UserError(f"its training data, {config['dataset']}, has been prepared again since then")
    return mixture


def search_training_data(text: EvaluatedText, run: str, saved: Checkpoint, data_dir: str | None) -> Reading:
    """Look up passages of a text in the run's training data, unless it is the validation set of that data.

    Prints a line if any are found, or if the text could not be looked up. Returns the text's reading with the counts.
    """
    try:
        training = open_training_data(saved, data_dir)
        if text.dataset and text.dataset.hash in [dataset.hash for dataset in training]:
            return text.reading
        ids, document = (np.concatenate([getattr(s, name) for s in text.streams]) for name in ("ids", "document"))
        if not (probes := choose_probes(ids, document)):
            raise UserError(f"no document has more than {PROBE_TOKENS} tokens")
    except UserError as error:
        note(f"{text.name}: could not check whether {run} was trained on this text: {error}")
        return text.reading
    matches, complete = count_matches(probes, training)
    where = f"the training data of {run}"
    if not complete:
        where = f"the first {SEARCHED_BYTES // 10**6} MB of {where}, which is all that was searched"
    if matches:
        how_much = "this text" if 2 * matches > len(probes) else "parts of this text, or on the same passages elsewhere"
        line = f"{matches} of {len(probes)} probes of {PROBE_TOKENS} tokens occur in {where}: it was trained on "
        line += f"{how_much}, so its values here say little about new text"
        note(f"{text.name}: {line}")
    elif not complete:
        note(f"{text.name}: no probe of {PROBE_TOKENS} tokens occurs in {where}")
    elif (base := saved.state["config"]["init_from"]) not in ("scratch", "resume"):
        line = f"could not check whether {base} was trained on it, from which {run} started"
        note(f"{text.name}: {line}")
    return replace(text.reading, probes=len(probes), probes_matched=matches)


def choose_probes(ids: np.ndarray, document: np.ndarray) -> list[np.ndarray]:
    """Evenly spaced passages of a text, (PROBE_TOKENS,) each. None crosses the end of a document.

    ids: the tokens of the text, (n,). document: the number of the document that each of them belongs to, (n,).
    """
    # one token more must be in the document, because its last one is the end of text or a separator
    starts = np.flatnonzero(document[:-PROBE_TOKENS] == document[PROBE_TOKENS:])
    n = min(PROBES, math.ceil(len(starts) / PROBE_TOKENS))
    chosen = starts[np.linspace(0, len(starts) - 1, n).astype(int)] if n else []
    return [ids[start : start + PROBE_TOKENS] for start in chosen]


def count_matches(probes: list[np.ndarray], datasets: list[Dataset]) -> tuple[int, bool]:
    """How many of the probes occur in the training shards, and whether all shards were searched to their ends.

    Of each data set, the first SEARCHED_BYTES are searched.
    """
    missing, complete = probes, True
    for dataset in datasets:
        remaining = SEARCHED_BYTES
        for shard in dataset.train:
            ids = shard.ids[: remaining // shard.ids.itemsize]
            remaining -= ids.nbytes
            complete = complete and len(ids) == len(shard)
            content = ids.tobytes()
            missing = [probe for probe in missing if not occurs(probe.astype(ids.dtype), content)]
    return len(probes) - len(missing), complete


def occurs(probe: np.ndarray, content: bytes) -> bool:
    """Whether the tokens `probe`, (n,), occur one after another in `content`, the bytes of tokens of the same dtype."""
    at = content.find(probe.tobytes())
    while at > 0 and at % probe.itemsize:  # this match begins in the middle of a token
        at = content.find(probe.tobytes(), at + 1)
    return at >= 0
