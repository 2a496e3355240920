"""The definition of a sweep: each combination of settings with each seed is a run of train.py in its own folder."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from folio.base.roles import UNLISTED, names_without
from folio.base.settings import COMMAND_LINE, ROOT, find_config
from folio.data.find_data import find_datasets
from folio.experiments.sweep.arms import CODE, Arm
from folio.experiments.sweep.outcome import Trial
from folio.experiments.sweep.space import Dimension, Values, grid
from folio.training.schedule import scaled_to_override


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep."""

    base: Any  # train.py's settings that all trials share
    arguments: list[str]  # of train.py, for all trials
    space: list[Dimension]
    out_dir: Path
    seeds: list[int]  # of the runs of a trial
    trials: int | None  # number of combinations in a search; None: the whole grid
    tokens: int | None  # training tokens per run; None: train.py's settings
    arms: Mapping[str, Arm] = field(default_factory=dict)  # by name, if code varies

    @property
    def is_search(self) -> bool:
        return self.trials is not None

    @cached_property
    def points(self) -> int:
        """Number of combinations of settings."""
        return self.trials or len(grid(self.space))

    @property
    def evaluations(self) -> int:
        """Number of evaluations per run, unless a varied setting changes it."""
        counts = self.base.step_counts
        if self.tokens:
            shorter, origins = replace(counts, max_iters=self.max_iters_of({})), {**self.base.origins}
            counts = scaled_to_override(shorter, {**origins, "max_iters": COMMAND_LINE}, counts.max_iters)
        return counts.evaluations

    @property
    def name(self) -> str:
        """Name of the folder, and of the study in the database."""
        return self.out_dir.resolve().name

    def folder(self, point: int, seed: int) -> Path:
        return self.out_dir / f"trial-{point:03d}-seed-{seed}"

    def description(self, trial: Trial) -> dict[str, Any]:
        """Return the content of a trial's trial.json."""
        return {"sweep": self.definition, "params": trial.params, "seed": trial.seed}

    def arguments_of(self, params: dict[str, Any], seed: int) -> list[str]:
        """Return the arguments of train.py for a trial, without --out_dir."""
        arm = self.arms.get(params.get(CODE))
        arguments = [*self.arguments, *options(params)]
        if arm:
            arguments = [*(in_arm(argument, arm) for argument in arguments), *arm.options]
        arguments.append(f"--seed={seed}")
        if self.tokens:
            arguments.append(f"--max_iters={self.max_iters_of(params)}")
        return arguments

    def max_iters_of(self, params: dict[str, Any]) -> int:
        cfg = self.base.replace(**settings_in(params))
        return max(1, round(self.tokens / cfg.step_tokens)) if self.tokens else cfg.max_iters

    def code_of(self, params: dict[str, Any]) -> Path:
        """Return the folder of the code that trains a trial."""
        return self.arms[params[CODE]].folder if CODE in params else ROOT

    def fraction(self, params: dict[str, Any], step: int, seconds: float) -> float:
        """Return the completed fraction of a trial after this step and time."""
        if self.base.minutes:
            return min(1.0, seconds / (60 * self.base.minutes))
        return min(1.0, step / self.max_iters_of(params))

    @cached_property
    def definition(self) -> dict[str, Any]:
        """The definition of the sweep as JSON. A command can continue a sweep only with the same one."""
        recorded = names_without(type(self.base), UNLISTED)
        settings = {name: getattr(self.base, name) for name in recorded} | asdict(self.base.step_counts)
        varied = next((d.values for d in self.space if isinstance(d, Values) and d.name == "dataset"), None)
        names = varied or [self.base.dataset]
        data = {name: [d.hash for d, _ in find_datasets(name, self.base.data_dir)] for name in names}
        return {
            "settings": " ".join(map(str, self.space)),
            "tokens": self.tokens,
            "search": self.is_search,
            **settings,
            **({"code": ", ".join(arm.definition for arm in self.arms.values())} if self.arms else {}),
            "data": ", ".join(f"{name} ({' '.join(h[:8] for h in hashes)})" for name, hashes in data.items()),
        }


def options(params: dict[str, Any]) -> list[str]:
    """Return the options of train.py for a trial."""
    return [f"--{name}={value}" for name, value in settings_in(params).items()]


def settings_in(params: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of train.py among a trial's values."""
    return {name: value for name, value in params.items() if name != CODE}


def in_arm(argument: str, arm: Arm) -> str:
    """Return an argument of train.py with the arm's version of a config file that is part of Folio."""
    if argument.startswith("--") or not is_in_project(argument):
        return argument
    return str(arm.folder / find_config(argument).resolve().relative_to(ROOT))


def is_in_project(config_file: str) -> bool:
    """Return whether a config file is one of Folio's, or of the user's in Folio's folder."""
    path = find_config(config_file)
    return path is not None and path.resolve().is_relative_to(ROOT)
