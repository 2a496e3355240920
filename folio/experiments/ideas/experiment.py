"""An experiment: two arms, a recipe, and a budget, in a folder of its own under the folder of all ideas."""

import hashlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from folio import UserError
from folio.base.files import locked, read_json, write_json
from folio.base.settings import Settings
from folio.base.workers import child_options
from folio.checkpoints.schema import measured_text
from folio.data.find_data import find_dataset
from folio.data.shards import Dataset, data_root, has_data
from folio.evaluation.sequential import MAX_PAIRS, Spread
from folio.evaluation.text_loss import token_sizes
from folio.experiments.ideas import ledger
from folio.experiments.ideas.pair_queue import Pair
from folio.experiments.runs import Run
from folio.experiments.sweep.arms import CODE, Arm, Change, freeze, read_arms, record_arms
from folio.experiments.sweep.definition import Sweep
from folio.experiments.sweep.space import Values
from folio.experiments.sweep.sweep_folder import copy_config_files, freeze_code
from folio.experiments.sweep.trial import failure_reason

DESCRIPTION = "experiment.json"
# Code that decides what a validation loss measures, and code that decides what the data are
MEASURING = ("folio/data/", "folio/evaluation/", "folio/training/evaluations.py", "prepare/")
PREPARING = ("folio/data/", "prepare/")


@dataclass(frozen=True)
class Experiment:
    """An experiment. names: of its arms A and B."""

    folder: Path
    began: str  # ISO 8601
    names: tuple[str, str]
    sweep: Sweep  # over the code of the two arms
    recipe: str  # identifies the settings, budget and data: experiments with the same one have a similar spread
    spread: Spread | None  # of the differences in earlier ones, when it began

    @property
    def arms(self) -> list[Arm]:
        return [self.sweep.arms[name] for name in self.names]

    def new_entry(self, **fields: Any) -> dict[str, Any]:
        """Return the experiment's line of the ledger as it begins. fields: more than the experiment knows."""
        a, b = ({"name": arm.name, "commit": arm.commit, "hash": arm.hash, "options": arm.options} for arm in self.arms)
        known = {"recipe": self.recipe, "a": a, "b": b, "seed": self.sweep.seeds[0]}
        return ledger.new_entry(self.folder.name, self.began, **known, **fields)


def open_experiment(
    cfg: Settings, base: Any, arguments: list[str], name: str, entries: Sequence[dict[str, Any]]
) -> tuple[Experiment, str | None]:
    """Return the experiment of a command, resumed or new, and a line if the code has changed since it began.

    cfg: the settings of tools/ab.py. base, arguments: the settings of train.py, and the arguments they are from. name:
    of the recipe. entries: of the ledger. Raises UserError.
    """
    root = Path(cfg.out_dir)
    root.mkdir(parents=True, exist_ok=True)
    with locked(root / ".ideas.lock", f"another process is still opening an experiment in {root}", timeout=60.0):
        a = freeze(cfg.a, root / "code")
        b = freeze(cfg.b, root / "code", a)
        if (a.hash, a.options) == (b.hash, b.options):
            raise UserError(f"a={cfg.a} and b={cfg.b} are the same code and settings; change one of them")
        current = {cfg.a: a, cfg.b: b}
        command = {"a": cfg.a, "b": cfg.b, "arguments": arguments}
        space = [Values(CODE, (cfg.a, cfg.b))]
        draft = Sweep(base, arguments, space, root, [base.seed], None, None)
        recipe = hashlib.sha256(json.dumps(unseeded(draft.definition), default=str).encode()).hexdigest()[:12]
        records = {folder: record for folder in root.glob("[0-9]*-*") if (record := read_experiment(folder))}
        for folder in () if cfg.new else sorted(records, reverse=True):
            record = records[folder]
            if record["command"] != command:
                continue
            same = [arm.hash for arm in read_arms(folder).values()] == [arm.hash for arm in current.values()]
            id_ = f"{folder.name} {record['began']}"
            verdict = next((entry["verdict"] for entry in entries if entry["id"] == id_), None)
            if not (same or verdict in (None, "unfinished", "failed")):
                break
            line = None
            if not same:
                line = f"resuming {folder}, with the code as it was when it began; --new starts with the code of now"
            return experiment(folder, record, draft, cfg), line
        numbers = [int(folder.name.split("-")[0]) for folder in root.glob("[0-9]*-*")]
        folder = root / f"{max(numbers, default=0) + 1:03d}-{slug(cfg.note or cfg.b) or name}"
        folder.mkdir()
        record_arms(current, folder)
        # An experiment that another process has just begun may not be in the ledger yet.
        seed = base.seed if base.is_set("seed") else next_seed([*entries, *records.values()], recipe, base.seed)
        spread = ledger.spread_for(entries, recipe)
        record = {"began": ledger.now(), "command": command, "seed": seed, "recipe": recipe}
        record["spread"] = spread and [spread.value, spread.df]
        write_json(folder / DESCRIPTION, record)
        return experiment(folder, record, draft, cfg), None


def next_seed(experiments: Sequence[dict[str, Any]], recipe: str, first: int) -> int:
    """Return the first seed that no experiment with this recipe has used, so that experiments are independent.

    experiments: lines of the ledger, or records of experiments.
    """
    return max([first, *(known["seed"] + MAX_PAIRS for known in experiments if known["recipe"] == recipe)])


def experiment(folder: Path, record: dict[str, Any], draft: Sweep, cfg: Settings) -> Experiment:
    """Return the experiment in a folder. record: the content of experiment.json. draft: a sweep over its arms."""
    max_pairs = MAX_PAIRS if cfg.confirm else cfg.max_seeds
    seeds = [record["seed"] + number for number in range(max_pairs)]
    sweep = copy_config_files(freeze_code(replace(draft, out_dir=folder, seeds=seeds)))
    spread = Spread(*record["spread"]) if record["spread"] else None
    return Experiment(folder, record["began"], (cfg.a, cfg.b), sweep, record["recipe"], spread)


def read_experiment(folder: Path) -> dict[str, Any] | None:
    """Return the content of experiment.json; None if it is missing or damaged."""
    with suppress(OSError, ValueError):
        record = read_json(folder / DESCRIPTION)
        return record if isinstance(record, dict) and "command" in record else None
    return None


def unseeded(definition: dict[str, Any]) -> dict[str, Any]:
    """Return what of a sweep's definition two experiments share if they have the same recipe and budget."""
    return {name: value for name, value in definition.items() if name not in ("seed", "settings", "code")}


def slug(text: str) -> str:
    """Return a short name for a folder."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")


# --- data -------------------------------------------------------------------------------------------------------------


def prepare_data(experiment: Experiment, changes: Sequence[Change]) -> Experiment:
    """Let each arm prepare its own data if the arms differ in how data are prepared. Raises UserError."""
    if not any(change.path.startswith(PREPARING) for change in changes):
        return experiment
    arms = {}
    for letter, arm in zip("ab", experiment.arms, strict=True):
        root = experiment.folder / f"data-{letter}"
        dataset = setting_of(experiment, arm, "dataset")
        if not has_data(root / dataset):
            words = prepare_command(arm, dataset, data_root(experiment.sweep.base.data_dir))
            words = [sys.executable, *words, f"--data_dir={root}"]
            done = subprocess.run(words, **child_options(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            if done.returncode:
                raise UserError(f"{arm.name} cannot prepare {dataset}: {failure_reason(done.returncode, done.stderr)}")
        arms[arm.name] = replace(arm, options=(*arm.options, f"--data_dir={root.resolve()}"))
    return replace(experiment, sweep=replace(experiment.sweep, arms=arms))


def prepare_command(arm: Arm, dataset: str, data_dir: Path) -> list[str]:
    """Return the script of an arm that prepares a data set, with its options but --data_dir.

    A data set without a script of its own is prepared by the command that made it in data_dir, from the same files.
    """
    script = arm.folder / "prepare" / f"{dataset}.py"
    if script.exists():
        return [str(script)]
    made_by = shlex.split(read_json(data_dir / dataset / "meta.json")["made_by"])
    options = [word for word in made_by[2:] if not word.startswith(("--data_dir=", "--name="))]
    return [str(arm.folder / "prepare" / Path(made_by[1]).name), *options, f"--name={dataset}"]


def setting_of(experiment: Experiment, arm: Arm, name: str) -> Any:
    """Return the value that an arm's options give a setting or, without one, the shared value."""
    values = [option.partition("=")[2] for option in arm.options if option.startswith(f"--{name}=")]
    return values[-1] if values else getattr(experiment.sweep.base, name)


def validation_set(experiment: Experiment, arm: Arm) -> Dataset:
    return find_dataset(setting_of(experiment, arm, "dataset"), data_root(setting_of(experiment, arm, "data_dir")))


def validation_text(dataset: Dataset) -> tuple[str, int, int]:
    """Return a hash of a data set's validation text, its bytes, and its tokens."""
    tokenizer = dataset.load_tokenizer()
    sizes, digest, n_bytes, n_tokens = token_sizes(tokenizer), hashlib.sha256(), 0, 0
    for shard in dataset.val:
        ids = np.asarray(shard.ids, dtype=np.int64)
        n_bytes, n_tokens = n_bytes + int(sizes[ids].sum()), n_tokens + len(ids)
        for token in ids:
            digest.update(tokenizer.token_bytes(int(token)))
    return digest.hexdigest(), n_bytes, n_tokens


def units(experiment: Experiment, pair: Pair) -> tuple[float, float] | str:
    """Return the factors that make the losses of A and B comparable, or why they are not.

    Both are 1 if the losses are on the same tokens, in nats per token. Otherwise, they give nats per byte, if both
    arms measure the whole validation set, and its bytes are the same.
    """
    a, b = pair
    if a.text == b.text:
        return 1.0, 1.0
    runs = [Run.of(experiment.sweep.folder(outcome.point, outcome.seed)) for outcome in pair]
    if any(measured_text(run.parts[-1])[1] for run in runs):
        return "the arms measure different parts of the validation text; --eval_iters=None measures all of it"
    texts = [validation_text(validation_set(experiment, arm)) for arm in experiment.arms]
    if texts[0][:2] != texts[1][:2]:
        return "the arms measure different validation texts, so that their losses are not comparable"
    return tuple(tokens / n_bytes for _, n_bytes, tokens in texts)
