"""Finds data sets by name, and prepares missing ones."""

import difflib
import os
import shlex
from pathlib import Path

from folio.base.commands import STARTED_BY_TRAINING, command, short_path
from folio.base.settings import ROOT
from folio.base.terminal import say
from folio.base.workers import run_child, under_torchrun
from folio.data.shards import NANOGPT_SCRIPT, Dataset, DatasetError, data_root, dataset_name, has_data, open_dataset
from folio.data.windows import parse_mixture

SCRIPTS_FOR_ANY_INPUT = ("text", "pairs")  # in prepare/; other scripts have the name of the data set they prepare


def find_datasets(dataset: str, data_dir: str | None) -> list[tuple[Dataset, float]]:
    """Open one or more data sets, such as "a" or "a:0.7,b:0.3", and return them with their weights."""
    root = data_root(data_dir)
    return [(find_dataset(name, root), weight) for name, weight in parse_mixture(dataset)]


def find_dataset(name: str, root: Path) -> Dataset:
    """Open the data set root/name. If it is missing and prepare/NAME.py exists, run the script first.

    Raises DatasetError if the data set cannot be prepared or opened.
    """
    folder = root / name
    if not has_data(folder):
        script = _scripts().get(folder.name)
        if script is None or len(Path(name).parts) > 1:  # never run a script from outside the project
            raise DatasetError(f"dataset={name}: {_suggest_fix(name, root)}")
        run_script(script, root)
    return open_dataset(folder)


def _scripts() -> dict[str, Path]:
    """Return the scripts in prepare/ that prepare a fixed data set, by the name of the data set."""
    scripts = {path.stem: path for path in sorted((ROOT / "prepare").glob("*.py"))}
    return {name: path for name, path in scripts.items() if name not in SCRIPTS_FOR_ANY_INPUT}


def _suggest_fix(name: str, root: Path) -> str:
    """Return the reason why a data set is missing, and the setting or the command that fixes it."""
    path, advice = Path(os.path.abspath(name)), "use its name, or an absolute path"
    if has_data(path):
        return f"{advice}: set {_option(path, root)}"
    if has_data(root / path.name) or path.name in _scripts():
        return f"{advice}: set {_option(root / path.name, root)}"
    for folder in (root / name, path):
        script = folder / NANOGPT_SCRIPT
        if os.path.isfile(script):
            prepare = shlex.join(["python", short_path(script)])
            return f"it is not prepared yet; for {_option(folder, root)}, run its script first: {prepare}"
        if os.path.isfile(folder) and has_data(folder.parent):
            return f"it is a file of a data set; set {_option(folder.parent, root)}"
        if os.path.exists(folder):
            return _suggest_prepare(folder, root)
    prepared = sorted(folder.name for folder in root.glob("[!.]*") if has_data(folder))
    close = difflib.get_close_matches(path.name, sorted({*prepared, *_scripts()}), n=1, cutoff=0.7)
    others = f"did you mean {close[0]}" if close else f"prepared data sets: {', '.join(prepared) or 'none'}"
    prepare = command("prepare/text.py", "FILE", f"--name={path.name}", *_data_dir_option(root))
    return f"no such data set ({others}); to prepare a text: {prepare}"


def _suggest_prepare(text: Path, root: Path) -> str:
    """Return the command for preparing a text file or folder that was given instead of a data set."""
    from folio.data.prepare import default_name

    name = default_name([str(text)])
    settings = _data_dir_option(root)
    if os.path.abspath(root / name) == os.path.abspath(text):  # the texts are in the folder of this data set
        name = f"{name}-tokens"
        settings.append(f"--name={name}")
    prepare = command("prepare/text.py", short_path(text), *settings)
    return f"it is not a data set; for {_option(root / name, root)}, prepare it first: {prepare}"


def _option(folder: Path, root: Path) -> str:
    """Return the --dataset option for a folder, with its name if it is in `root`."""
    return shlex.quote(f"--dataset={dataset_name(folder, root)}")


def _data_dir_option(root: Path) -> list[str]:
    return [] if root == data_root(None) else [f"--data_dir={root}"]


def run_script(script: Path, root: Path) -> None:
    """Prepare a data set with its script. Raises DatasetError under torchrun, or if the script fails."""
    name = f"prepare/{script.name}"
    if under_torchrun():
        prepare = command(name, *_data_dir_option(root))
        raise DatasetError(f"dataset={script.stem}: prepare it before the processes start: {prepare}")
    say(f"{script.stem} is not prepared yet; running {name}")
    if run_child(str(script), f"--data_dir={root}", **{STARTED_BY_TRAINING: "1"}):
        raise DatasetError(f"{name} failed; fix the error above, or run the script by itself")
