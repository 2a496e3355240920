"""The training data of a checkpoint: opened again, and compared with what the run recorded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from folio import UserError
from folio.checkpoints.checkpoint import Checkpoint
from folio.data.shards import Dataset, data_root, has_data, open_dataset
from folio.data.windows import Mixture, parse_mixture


def data_record(dataset: str, data: Mixture, source: Checkpoint | None) -> dict[str, Any]:
    """Return the DatasetRecord of a run, and the format of its prompts.

    dataset: the setting of train.py. source: the checkpoint that the run starts from.
    """
    return {
        "folder": dataset,
        "hash": data.hash,
        "parts": {part.folder.name: part.hash for part, _ in data.datasets},
        "not_held_out": [part.folder.name for part, _ in data.datasets if source and prepared_again(source, part)],
        "prompt_format": data.prompt_format,
    }


def changed_data(state: Mapping[str, Any], data: Mixture) -> list[str]:
    """Return the names of the data sets that are not the ones that a run recorded; empty if the data is the same.

    If only the shares of a mixture differ, all names are returned. state: state.json.
    """
    record = state["dataset"]
    if record["hash"] == data.hash:
        return []
    parts = record["parts"]
    return [part.folder.name for part, _ in data.datasets if part.hash != parts.get(part.folder.name)] or data.names


def trained_on(saved: Checkpoint, dataset: Dataset) -> bool:
    """Whether a run was trained on this data set, with the same tokens and the same split."""
    record = saved.state.get("dataset")
    return record is not None and dataset.hash in (record["hash"], *record["parts"].values())


def prepared_again(saved: Checkpoint, dataset: Dataset) -> bool:
    """Whether a data set has the name of one that a run was trained on, but other tokens or another split.

    Then its validation set may contain training text of the run. This also holds if the weights that the run started
    from were trained on another split.
    """
    record = saved.state.get("dataset")
    if record is None:  # a model of another program
        return False
    if trained_on(saved, dataset):
        return dataset.folder.name in record["not_held_out"]
    return dataset.folder.name in [Path(name).name for name, _ in parse_mixture(record["folder"])]


def open_training_data(saved: Checkpoint, data_dir: str | None) -> list[Dataset]:
    """Open the data sets of `open_training_mixture`."""
    return [dataset for dataset, _ in open_training_mixture(saved, data_dir).datasets]


def open_training_mixture(saved: Checkpoint, data_dir: str | None) -> Mixture:
    """Open the training data of a checkpoint. Raises UserError if it is missing or has changed.

    data_dir: directory to search if the data is no longer where it was in training. Missing data is not prepared.
    """
    config = saved.state.get("config", {})
    if not {"dataset", "data_dir"} <= config.keys():
        raise UserError("its checkpoint does not record the training data")
    datasets = []
    for name, weight in parse_mixture(config["dataset"]):
        folders = [data_root(directory) / name for directory in (config["data_dir"], data_dir)]
        folder = next((folder for folder in folders if has_data(folder)), None)
        if not folder and data_dir:
            raise UserError(f"its training data is neither {folders[0]} nor {folders[1]}; set --data_dir")
        if not folder:
            raise UserError(f"its training data, {folders[0]}, does not exist; set --data_dir")
        datasets.append((open_dataset(folder), weight))
    mixture = Mixture(datasets, config["block_size"], config["seed"], config["sampling"])
    if changed := changed_data(saved.state, mixture):
        raise UserError(f"its training data, {', '.join(changed)}, has been prepared again since then")
    return mixture
