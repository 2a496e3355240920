"""The command line of a sweep: what it varies, what all trials share, and what it refuses."""

import re
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any, TypeVar

from folio.base import settings
from folio.base.settings import COMMAND_LINE, Config, ConfigError, Settings, split_arguments
from folio.checkpoints.find_runs import LATEST, is_run
from folio.experiments.sweep.definition import Sweep, options
from folio.experiments.sweep.space import Dimension, corners, grid, parse_space

EXAMPLE = "python tools/sweep.py config/shakespeare_char.py learning_rate=1e-3,3e-3"
# Settings of train.py that a sweep sets itself, or that make no sense in one, and what to do instead.
REFUSED = {
    "out_dir": "each trial has its own folder in the sweep's --out_dir",
    "data_dir": "vary dataset, which can be a folder's path",
    "seed": "set the number of seeds with --seeds, and the first one with --seed",
    "overwrite": "remove the sweep's folder to start again",
    "print_config": "leave it out",
    "eval_only": "leave it out",
    "minutes": "set one --minutes for all trials",
}
TrainSettings = TypeVar("TrainSettings", bound=Settings)


def parse_sweep(cls: type[Config], train_settings: type[TrainSettings], argv: list[str]) -> tuple[Config, Sweep]:
    """The settings and the sweep that a command line describes. Raises ConfigError.

    cls: the settings of tools/sweep.py. train_settings: those of train.py.
    """
    own, rest = split_arguments(cls, train_settings, argv)
    varied = [argument for argument in rest if not argument.startswith("--") and "=" in argument]
    arguments = [argument for argument in rest if argument not in varied]
    cfg = settings.load(cls, [*own, *varied])
    space = parse_space(train_settings, varied)
    if not space:
        raise ConfigError(f"name a setting and its values, as in {EXAMPLE}{hint_at_list(arguments)}")
    base = shared_settings(train_settings, arguments, space)
    refuse_training(base, space)
    refuse_sweep(cfg, base, space)
    for name in (dimension.name for dimension in space):
        if base.origins.get(name) == COMMAND_LINE:
            print(f"--{name}={getattr(base, name)} has no effect, because {name} is varied")
    if cfg.trials is None:
        grid(space)  # has no range
    config_file = next((Path(argument).stem for argument in arguments if not argument.startswith("--")), "gpt2")
    out_dir = Path(cfg.out_dir or f"sweep-{config_file}")
    seeds = [base.seed + i for i in range(cfg.seeds)]
    return cfg, Sweep(base, arguments, space, out_dir, seeds, cfg.trials, cfg.tokens)


def hint_at_list(arguments: list[str]) -> str:
    """How to write the first list or range that is given as an option."""
    lists = [argument for argument in arguments if argument.startswith("--") and re.search(r",|\.\.", argument)]
    return f"; write {lists[0].removeprefix('--')} without --" if lists else ""


def shared_settings(train_settings: type[TrainSettings], arguments: list[str], space: list[Dimension]) -> TrainSettings:
    """The settings that all trials share. One that the trials replace may contradict others. Raises ConfigError."""
    try:
        return settings.load(train_settings, arguments)
    except ConfigError:
        for params in corners(space):
            with suppress(ConfigError), redirect_stdout(None):
                return settings.load(train_settings, [*arguments, *options(params)])
        raise


def refuse_training(base: Any, space: list[Dimension]) -> None:
    """Raise ConfigError for settings of train.py that a sweep cannot vary, or that a trial cannot have."""
    for name in (dimension.name for dimension in space):
        if name in REFUSED:
            raise ConfigError(f"{name} cannot be varied: {REFUSED[name]}")
    for name in ("overwrite", "print_config", "eval_only"):
        if getattr(base, name):
            raise ConfigError(f"--{name}: a sweep does not take it; {REFUSED[name]}")
    starts = {base.init_from, *next((d.values for d in space if d.name == "init_from"), ())}
    if "resume" in starts:
        raise ConfigError("--init_from=resume: repeat the sweep's command to continue it; it resumes its trials")
    if LATEST in starts and not Path(LATEST).is_dir():
        raise ConfigError(f"--init_from={LATEST}: name the run's folder, because the latest run will be a trial")


def refuse_sweep(cfg: Any, base: Any, space: list[Dimension]) -> None:
    """Raise ConfigError for settings that contradict each other, and for a folder that a sweep cannot have."""
    sets_max_iters = base.origins.get("max_iters") == COMMAND_LINE or "max_iters" in [d.name for d in space]
    if cfg.tokens and (base.minutes or sets_max_iters):
        raise ConfigError("--tokens determines max_iters; leave out --minutes and max_iters")
    if cfg.storage and cfg.trials is None:
        raise ConfigError(
            f"--storage={cfg.storage}: it is for a search, with --trials; a grid needs no database: start the same "
            f"command on each machine, with a folder that all share as --out_dir"
        )
    if not base.origins:
        raise ConfigError(f"without a config file, the trials would be GPT-2; name one, as in {EXAMPLE}")
    if cfg.out_dir == LATEST:
        raise ConfigError(f"--out_dir={LATEST}: this name stands for the latest run; choose another --out_dir")
    if cfg.out_dir and is_run(Path(cfg.out_dir)):
        raise ConfigError(f"--out_dir={cfg.out_dir}: it is the folder of a run; choose another --out_dir")
