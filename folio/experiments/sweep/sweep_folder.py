"""The folder of a sweep: who may run the sweep in it, what defines the sweep, and copies of its config files."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from folio import UserError
from folio.base.files import atomic_write, locked, read_json, write_json
from folio.base.settings import find_config
from folio.experiments.sweep.definition import Sweep
from folio.training.start import cannot_write

OPENING_SECONDS = 60.0  # for other processes that open the sweep


@contextmanager
def reserve_folder(out_dir: Path, is_shared: bool) -> Iterator[None]:
    """Create the folder, and lock it while the block lasts, unless several machines share it. Raises UserError."""
    busy = f"another process runs the sweep in {out_dir}; wait for it, or choose another --out_dir"
    with ExitStack() as stack:
        with writing(out_dir):
            out_dir.mkdir(parents=True, exist_ok=True)
            if not is_shared:
                stack.enter_context(locked(out_dir / ".sweep.lock", busy))
        yield


@contextmanager
def recorded(sweep: Sweep) -> Iterator[None]:
    """Check the record of the sweep in its folder; a new folder gets one after the block. Raises UserError.

    One process at a time is in the block.
    """
    path, busy = sweep.out_dir / "sweep.json", f"another process has not yet opened the sweep in {sweep.out_dir}"
    with ExitStack() as stack:
        with writing(sweep.out_dir):
            stack.enter_context(locked(sweep.out_dir / ".sweep.json.lock", busy, timeout=OPENING_SECONDS))
        is_new = not path.exists()
        if not is_new:
            try:
                refuse_another_record(sweep.name, read_json(path), sweep.record)
            except (OSError, ValueError, AttributeError, TypeError) as error:
                raise UserError(f"{path} is damaged ({error}); remove it to continue with the sweep's runs") from None
        yield
        if is_new:
            with writing(sweep.out_dir):
                write_json(path, sweep.record)


def refuse_another_record(name: str, recorded: dict[str, Any], record: dict[str, Any]) -> None:
    """Raise UserError if the sweep of this name was started with another record. record: of the command."""
    if differences := [
        f"{key}={recorded.get(key)}, not {record.get(key)}"
        for key in {**recorded, **record}
        if recorded.get(key) != record.get(key)
    ]:
        raise UserError(
            f"{name} was started with {'; '.join(differences)}: repeat its command to continue it, or choose another "
            f"--out_dir"
        )


def with_copied_files(sweep: Sweep) -> Sweep:
    """The sweep with copies of its config files, because people edit those for the next experiment."""
    arguments = list(sweep.arguments)
    for number, argument in enumerate(arguments):
        if not argument.startswith("--"):
            copy = sweep.out_dir / f"{number}-{Path(argument).name}"
            with writing(sweep.out_dir), atomic_write(copy) as temporary:
                temporary.write_bytes(find_config(argument).read_bytes())
            arguments[number] = str(copy)
    return replace(sweep, arguments=arguments)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn a failure to write in the block into one line. Raises UserError."""
    try:
        yield
    except OSError as error:
        raise cannot_write(folder, error) from None
