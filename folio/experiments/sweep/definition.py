"""What a sweep trains: each combination of settings with each seed, as a run of train.py in a folder of its own."""

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from folio.base.settings import COMMAND_LINE
from folio.data.find_data import find_datasets
from folio.experiments.sweep.outcome import Trial
from folio.experiments.sweep.space import Dimension, Values, grid
from folio.training.schedule import scaled_to_override

NOT_DEFINING = {"out_dir", "overwrite", "wandb_project", "wandb_run_name", "wandb_log", "data_dir", "print_config"}


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep."""

    base: Any  # train.py's settings that all trials share
    arguments: list[str]  # of train.py, for all trials
    space: list[Dimension]
    out_dir: Path
    seeds: list[int]  # of the runs of a trial
    trials: int | None  # combinations that a search tries; None: the whole grid
    tokens: int | None  # to train on per run; None: as train.py does

    @property
    def is_search(self) -> bool:
        return self.trials is not None

    @cached_property
    def points(self) -> int:
        """How many combinations of settings are tried."""
        return self.trials or len(grid(self.space))

    @property
    def evaluations(self) -> int:
        """The evaluations of each run, unless a setting that is varied changes their number."""
        counts = self.base.step_counts
        if self.tokens:
            shorter, origins = replace(counts, max_iters=self.max_iters_of({})), {**self.base.origins}
            counts = scaled_to_override(shorter, {**origins, "max_iters": COMMAND_LINE}, counts.max_iters)
        return counts.evaluations

    @property
    def name(self) -> str:
        """The name of the folder, and of the study in the database."""
        return self.out_dir.resolve().name

    def folder(self, point: int, seed: int) -> Path:
        return self.out_dir / f"trial-{point:03d}-seed-{seed}"

    def description(self, trial: Trial) -> dict[str, Any]:
        """What a trial's folder is for."""
        return {"sweep": self.record, "params": trial.params, "seed": trial.seed}

    def arguments_of(self, params: dict[str, Any], seed: int) -> list[str]:
        """The arguments of train.py for a trial, without its folder."""
        arguments = [*self.arguments, *options(params), f"--seed={seed}"]
        if self.tokens:
            arguments.append(f"--max_iters={self.max_iters_of(params)}")
        return arguments

    def max_iters_of(self, params: dict[str, Any]) -> int:
        cfg = self.base.replace(**params)
        return max(1, round(self.tokens / cfg.step_tokens)) if self.tokens else cfg.max_iters

    def fraction(self, params: dict[str, Any], step: int, seconds: float) -> float:
        """How much of a trial is done after this step and time."""
        if self.base.minutes:
            return min(1.0, seconds / (60 * self.base.minutes))
        return min(1.0, step / self.max_iters_of(params))

    @cached_property
    def record(self) -> dict[str, Any]:
        """What defines the sweep: to be continued, it must be the same."""
        settings = {name: value for name, value in asdict(self.base).items() if name not in NOT_DEFINING}
        varied = next((d.values for d in self.space if isinstance(d, Values) and d.name == "dataset"), None)
        names = varied or [self.base.dataset]
        data = {name: [d.hash for d, _ in find_datasets(name, self.base.data_dir)] for name in names}
        return {
            "settings": " ".join(map(str, self.space)),
            "tokens": self.tokens,
            "search": self.is_search,
            **settings,
            "data": ", ".join(f"{name} ({' '.join(h[:8] for h in hashes)})" for name, hashes in data.items()),
        }


def options(params: dict[str, Any]) -> list[str]:
    """The options of train.py for a trial."""
    return [f"--{name}={value}" for name, value in params.items()]
