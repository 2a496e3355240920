"""Parse the command line of a sweep: varied settings, shared settings, and unsupported ones."""

import re
from contextlib import redirect_stdout, suppress
from pathlib import Path

from folio.base import settings
from folio.base.roles import UNVARIED, Role, names_with, role_of
from folio.base.settings import COMMAND_LINE, Config, ConfigError, Settings, split_arguments
from folio.base.terminal import say
from folio.checkpoints.find_runs import LATEST, is_run
from folio.experiments.sweep.arms import CODE
from folio.experiments.sweep.definition import Sweep, options
from folio.experiments.sweep.space import Dimension, corners, grid, parse_space
from folio.training.planning.train_settings import TrainSettings

LEAVE_OUT = "leave it out"
EXAMPLE = "python tools/sweep.py config/shakespeare_char.py learning_rate=1e-3,3e-3"
REMEDIES = {  # for settings that a sweep does not vary; the default: leave it out
    "out_dir": "each trial has its own folder in the sweep's --out_dir",
    "data_dir": "vary dataset, which can be a folder's path",
    "seed": "set the number of seeds with --seeds, and the first one with --seed",
    "overwrite": "remove the sweep's folder to start again",
    "minutes": "set the same --minutes for all trials",
}


def parse_sweep(cls: type[Config], train_settings: type[TrainSettings], argv: list[str]) -> tuple[Config, Sweep]:
    """Parse the settings and the sweep from a command line. Raises ConfigError.

    cls: the settings of tools/sweep.py. train_settings: those of train.py.
    """
    sweep_arguments, rest = split_arguments(cls, train_settings, argv)
    varied = [argument for argument in rest if not argument.startswith("--") and "=" in argument]
    arguments = [argument for argument in rest if argument not in varied]
    cfg = settings.load(cls, [*sweep_arguments, *varied])
    space = parse_space(train_settings, varied)
    if not space:
        raise ConfigError(f"name a setting and its values, as in {EXAMPLE}{list_hint(arguments)}")
    base = shared_settings(train_settings, arguments, space)
    check_training_settings(base, space)
    check_sweep_settings(cfg, base, space)
    for name in (dimension.name for dimension in space):
        if base.origins.get(name) == COMMAND_LINE:
            say(f"--{name}={getattr(base, name)} has no effect, because {name} is varied")
    if cfg.trials is None:
        grid(space)  # raises an error for a range
    config_file = next((Path(argument).stem for argument in arguments if not argument.startswith("--")), "gpt2")
    out_dir = Path(cfg.out_dir or f"sweep-{config_file}")
    seeds = [base.seed + i for i in range(cfg.seeds)]
    return cfg, Sweep(base, arguments, space, out_dir, seeds, cfg.trials, cfg.tokens)


def list_hint(arguments: list[str]) -> str:
    """Return a hint on how to write the first list or range that is given as an option."""
    lists = [argument for argument in arguments if argument.startswith("--") and re.search(r",|\.\.", argument)]
    return f"; write {lists[0].removeprefix('--')} without --" if lists else ""


def shared_settings(train_settings: type[TrainSettings], arguments: list[str], space: list[Dimension]) -> TrainSettings:
    """Load the shared settings, which may be invalid without the varied ones. Raises ConfigError."""
    try:
        return settings.load(train_settings, arguments)
    except ConfigError:
        for params in corners(space):
            with suppress(ConfigError), redirect_stdout(None):
                return settings.load(train_settings, [*arguments, *options(params)])
        raise


def check_training_settings(base: TrainSettings, space: list[Dimension]) -> None:
    """Raise ConfigError for settings of train.py that a sweep cannot vary or use."""
    for name in (dimension.name for dimension in space):
        if name != CODE and role_of(type(base), name) & UNVARIED:
            raise ConfigError(f"{name} cannot be varied: {REMEDIES.get(name, LEAVE_OUT)}")
    for name in names_with(type(base), Role.COMMAND):
        if base.is_set(name) and name != "out_dir":  # config files set it, for single runs
            raise ConfigError(f"--{name}: a sweep does not support it; {REMEDIES.get(name, LEAVE_OUT)}")
    starts = {base.init_from, *next((d.values for d in space if d.name == "init_from"), ())}
    if "resume" in starts:
        raise ConfigError("--init_from=resume: repeat the command to resume its runs")
    if LATEST in starts and not Path(LATEST).is_dir():
        raise ConfigError(f"--init_from={LATEST}: name the run's folder, because the latest run would be a trial")


def check_sweep_settings(cfg: Settings, base: TrainSettings, space: list[Dimension]) -> None:
    """Raise ConfigError for contradictory settings, and for a folder that a sweep cannot use."""
    sets_max_iters = base.origins.get("max_iters") == COMMAND_LINE or "max_iters" in [d.name for d in space]
    if cfg.tokens and (base.minutes or sets_max_iters):
        raise ConfigError("--tokens determines max_iters; leave out --minutes and max_iters")
    if cfg.storage and cfg.trials is None:
        raise ConfigError(
            f"--storage={cfg.storage}: only a search, with --trials, uses a database; for a grid, start the same "
            f"command on each machine, with a shared folder as --out_dir"
        )
    if not base.origins:
        raise ConfigError(f"name a config file, as in {EXAMPLE}; without one, the trials would be GPT-2")
    if cfg.out_dir == LATEST:
        raise ConfigError(f"--out_dir={LATEST}: this name means the latest run; choose another --out_dir")
    if cfg.out_dir and is_run(Path(cfg.out_dir)):
        raise ConfigError(f"--out_dir={cfg.out_dir}: it is a run's folder; choose another --out_dir")
