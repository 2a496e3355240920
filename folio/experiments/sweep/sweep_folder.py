"""The folder of a sweep: its definition, and copies of its config files."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from folio import UserError
from folio.base.files import atomic_write, locked, read_json, write_json
from folio.base.settings import find_config
from folio.data.shards import data_root
from folio.experiments.sweep.arms import CODE, open_arms
from folio.experiments.sweep.definition import Sweep, is_in_project
from folio.training.out_dir import cannot_write

OPENING_SECONDS = 60.0  # timeout for other processes that are opening the sweep


@contextmanager
def checked_definition(sweep: Sweep) -> Iterator[None]:
    """Check the sweep's definition in its folder, or write it after the block. Raises UserError.

    Only one process at a time runs the block.
    """
    path, busy = sweep.out_dir / "sweep.json", f"another process is still opening the sweep in {sweep.out_dir}"
    with ExitStack() as stack:
        with report_write_errors(sweep.out_dir):
            stack.enter_context(locked(sweep.out_dir / ".sweep.json.lock", busy, timeout=OPENING_SECONDS))
        is_new = not path.exists()
        if not is_new:
            try:
                check_definition(sweep.name, read_json(path), sweep.definition)
            except (OSError, ValueError, AttributeError, TypeError) as error:
                raise UserError(f"{path} is damaged ({error}); remove it to resume the sweep's runs") from None
        yield
        if is_new:
            with report_write_errors(sweep.out_dir):
                write_json(path, sweep.definition)


def check_definition(name: str, saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise UserError if the sweep's saved definition differs from the command's."""
    if differences := [
        f"{key}={saved.get(key)}, not {current.get(key)}"
        for key in {**saved, **current}
        if saved.get(key) != current.get(key)
    ]:
        raise UserError(
            f"{name} was started with {'; '.join(differences)}: repeat its command to resume it, or choose another "
            f"--out_dir"
        )


def copy_config_files(sweep: Sweep) -> Sweep:
    """Copy the config files to the sweep's folder, so that editing them does not affect it. Returns the new sweep."""
    arguments = list(sweep.arguments)
    for number, argument in enumerate(arguments):
        if not argument.startswith("--") and not (sweep.arms and is_in_project(argument)):  # each arm has its own
            copy = sweep.out_dir / f"{number}-{Path(argument).name}"
            with report_write_errors(sweep.out_dir), atomic_write(copy) as temporary:
                temporary.write_bytes(find_config(argument).read_bytes())
            arguments[number] = str(copy)
    return replace(sweep, arguments=arguments)


def freeze_code(sweep: Sweep) -> Sweep:
    """Copy the code of the arms, if code varies, to the sweep's folder. Returns the new sweep. Raises UserError.

    All arms read the same prepared data.
    """
    names = next((d.values for d in sweep.space if d.name == CODE), ())
    if not names:
        return sweep
    with report_write_errors(sweep.out_dir):
        arms = open_arms(names, sweep.out_dir)
    data_dir = data_root(sweep.base.data_dir).resolve()
    return replace(sweep, arms=arms, arguments=[*sweep.arguments, f"--data_dir={data_dir}"])


@contextmanager
def report_write_errors(folder: Path) -> Iterator[None]:
    """Convert an OSError in the block to UserError."""
    try:
        yield
    except OSError as error:
        raise cannot_write(folder, error) from None
