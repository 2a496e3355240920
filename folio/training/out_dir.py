"""The folder of a run: locked while the run writes there, and repaired after a run that was killed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from folio import UserError
from folio.base.files import is_utf8, locked
from folio.base.settings import NOT_UTF8
from folio.base.workers import check_launch, under_torchrun
from folio.checkpoints import checkpoint, run_folder
from folio.machine import distributed
from folio.training.planning.resume import RACE


@contextmanager
def reserve(out_dir: Path, eval_only: bool) -> Iterator[None]:
    """Lock out_dir for this run, unless it only evaluates. Raises UserError if another run holds the lock, or if one of
    several processes would train the whole run.

    On exit, a new folder is removed if it is empty.
    """
    check_launch()
    if eval_only:
        yield
        return
    if not is_utf8(str(out_dir)):
        raise UserError(f"out_dir={out_dir}: {NOT_UTF8}")
    existed = os.path.exists(out_dir)  # False for an impossible name
    busy = f"out_dir={out_dir}: another run is writing there; wait for it, or choose another --out_dir"
    # A failed node's lock can remain for a while, and is_locked() briefly acquires a free one.
    timeout = 60.0 if under_torchrun() else 0.5
    try:
        with ExitStack() as stack:
            if distributed.rank_from_env() == 0:
                try:
                    stack.enter_context(locked(out_dir / ".lock", busy, timeout))
                except OSError as error:
                    raise cannot_write(out_dir, error) from None
            yield
    finally:
        if not existed:
            with suppress(OSError):  # it is not empty, or was not created
                out_dir.rmdir()


def repair(out_dir: Path, resuming: bool) -> None:
    """Finish or undo what a killed run left unfinished in out_dir. Raises UserError if it cannot be written.

    resuming: otherwise, the files of an earlier run stay until the new one has saved.
    """
    try:
        checkpoint.clear_unfinished(out_dir)
        if resuming:
            run_folder.restore_pointers(out_dir)
            remove_race(out_dir)
    except OSError as error:
        raise cannot_write(out_dir, error) from None


def remove_race(out_dir: Path) -> None:
    """Remove the files of a race that is over (folio/training/planning/race.py)."""
    shutil.rmtree((out_dir / RACE).parent, ignore_errors=True)


def cannot_write(out_dir: Path, error: OSError) -> UserError:
    return UserError(f"out_dir={out_dir}: it cannot be written ({error}); choose another --out_dir")
