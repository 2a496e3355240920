"""Finds a data set by its name, and prepares it when it is missing."""

import subprocess
import sys
from pathlib import Path

from folio.configurator import ROOT
from folio.shards import Dataset, DatasetError, data_root, open_dataset
from folio.windows import Mixture, parse_mixture


def open_mixture(
    dataset: str,
    data_dir: str | None,
    *,
    block_size: int,
    seed: int,
    sampling: str,
    max_val_windows: int | None = None,
) -> Mixture:
    """Open the data sets that `dataset` names, as one stream of training sequences. See Mixture for the settings."""
    return Mixture(find_datasets(dataset, data_dir), block_size, seed, sampling, max_val_windows)


def find_datasets(dataset: str, data_dir: str | None) -> list[tuple[Dataset, float]]:
    """Open the data sets that `dataset` names ("a", or "a:0.7,b:0.3"), each with its weight."""
    root = data_root(data_dir)
    return [(find_dataset(name, root), weight) for name, weight in parse_mixture(dataset)]


def find_dataset(name: str, root: Path) -> Dataset:
    """Open the data set root/name. If it is missing and prepare/NAME.py exists, run that script first.

    Raises DatasetError if the data set is missing and cannot be prepared, or cannot be opened.
    """
    folder = root / name
    if not folder.exists():
        script = ROOT / "prepare" / f"{folder.name}.py"
        if name != folder.name or not script.exists():  # only the project's own scripts are run, not one beside a path
            prepared = sorted(path.parent.name for path in root.glob("*/meta.json"))
            raise DatasetError(
                f"dataset={name}: {folder} does not exist, and there is no prepare/{name}.py to prepare it; "
                f"prepared data sets: {', '.join(prepared) or 'none'}; "
                f"to use your own text: python prepare/text.py FILE --name={name}"
            )
        run_script(script, root)
    return open_dataset(folder)


def run_script(script: Path, root: Path) -> None:
    """Prepare a data set with its script. Raises DatasetError under torchrun, or if the script fails."""
    from folio.distributed import under_torchrun  # imports torch, which preparing a data set does not need

    if under_torchrun():
        command = f"python prepare/{script.name}"
        raise DatasetError(f"dataset={script.stem}: prepare it before the processes start: {command}")
    print(f"{script.stem} is not prepared yet; running prepare/{script.name}")
    if subprocess.run([sys.executable, str(script), f"--data_dir={root}"]).returncode:
        raise DatasetError(f"prepare/{script.name} failed; fix the error above, or run the script by itself")
