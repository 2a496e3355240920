"""The folder of a sweep: one process at a time runs the sweep in it, and it holds copies of the config files."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from folio.base.files import atomic_write, locked
from folio.base.settings import find_config
from folio.experiments.sweep.definition import Sweep
from folio.training.start import cannot_write


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
