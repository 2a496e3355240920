"""Test whether a change of the code is better than the code without it, or whether the difference is luck.

    python tools/ab.py config/shakespeare_char.py --minutes=1                    the working tree (B) against HEAD (A)
    python tools/ab.py config/shakespeare_char.py --a=main --b=my-idea --max_iters=600
    python tools/ab.py config/shakespeare_char.py --b="--n_layer=4 --n_embd=112" settings work, too
    python tools/ab.py --ledger                                                  all ideas tried, as a table and a page

A and B are trained in pairs: with one seed, then with the next, until the difference of their validation losses is
known: better, worse, or no difference larger than --smallest. Each arm is a branch, a tag, a commit, a folder, or ".",
the working tree; options of train.py may follow. Its code is copied when the experiment begins, so you can go on
editing. The same command resumes an experiment that was stopped. OUT_DIR/ledger.jsonl remembers all experiments.

Exit status: 0 better, 10 worse, 11 no difference or identical, 12 undecided, 2 failed.
"""

import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

from annotated_types import Ge, Le

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import folio.machine.openmp  # noqa: E402, F401  # isort: skip  (before torch)
from folio import UserError  # noqa: E402
from folio.base import settings  # noqa: E402
from folio.base.commands import short_path  # noqa: E402
from folio.base.settings import (  # noqa: E402
    ConfigError,
    NonEmptyStr,
    PositiveFloat,
    Settings,
    help_text,
    run_script,
    split_arguments,
)
from folio.base.terminal import say, terminal_width  # noqa: E402
from folio.evaluation.sequential import MAX_PAIRS  # noqa: E402
from folio.experiments.ideas import ledger  # noqa: E402
from folio.experiments.ideas.ledger_page import write_page  # noqa: E402
from folio.experiments.sweep.arms import WORKING_TREE  # noqa: E402

EXIT_CODES = {"better": 0, "worse": 10, "no difference": 11, "identical": 11, "undecided": 12, "failed": 2}


@dataclass(frozen=True)
class AbConfig(Settings):
    # --- arms: a branch, a tag, a commit, a folder, or "." for the working tree, and options of train.py ---
    a: NonEmptyStr = "HEAD"  # the code without the idea
    b: NonEmptyStr = "."  # the code with the idea; options alone: the code of A with these settings
    note: str = ""  # the idea in words, for the ledger
    # --- the test ---
    smallest: PositiveFloat = 0.005  # difference in validation loss that matters, nats per token
    max_seeds: Annotated[int, Ge(2), Le(MAX_PAIRS)] = 8  # pairs after which the verdict is undecided
    confirm: bool = False  # True: after "better", train more pairs, up to 16, until the idea is kept
    # --- output ---
    out_dir: NonEmptyStr = "ideas"  # folder of the experiments and their ledger
    new: bool = False  # True: start a new experiment, with new seeds, rather than resuming one with the same command
    keep: bool = False  # True: keep the weights of all runs; False: remove those of complete pairs
    ledger: bool = False  # True: show the ledger, and write its page
    json: bool = False  # True: print the result as a line of JSON, and everything else to standard error


def main(argv: list[str]) -> None:
    if "--help" in argv or "-h" in argv:
        print(help_text(AbConfig))
        return
    own, arguments = split_arguments(AbConfig, Settings, argv)
    cfg = settings.load(AbConfig, own)
    if cfg.ledger:
        show_ledger(Path(cfg.out_dir))
        return
    try:
        from folio.experiments.ideas.compare_code import compare
        from folio.experiments.sweep.arguments import check_training_settings
        from train import TrainConfig
    except Exception as error:  # the code of the working tree, which an idea may have broken
        report_broken(cfg, arguments, error)
    _, arguments = split_arguments(AbConfig, TrainConfig, argv)  # now with the types of train.py's options
    if all(argument.startswith("--") for argument in arguments):
        raise ConfigError("name a config file, as in python tools/ab.py config/shakespeare_char.py --minutes=1")
    with redirect_stdout(sys.stderr) if cfg.json else nullcontext():
        base = settings.load(TrainConfig, arguments)
        check_training_settings(base, [])
        entry, stopped_by = compare(cfg, base, arguments)
    if cfg.json:
        print(ledger.as_line(entry))
    raise SystemExit(128 + stopped_by if stopped_by else EXIT_CODES[entry["verdict"]])


def report_broken(cfg: AbConfig, arguments: list[str], error: Exception) -> NoReturn:
    """Add a line to the ledger if the idea is in the working tree, whose code cannot be imported. Raises UserError."""
    reason = f"the working tree cannot be imported: {type(error).__name__}: {error}"
    if cfg.b == WORKING_TREE:
        root = Path(cfg.out_dir)
        root.mkdir(parents=True, exist_ok=True)
        fields = {"note": cfg.note, "config": Path(arguments[0]).name if arguments else ""}
        arms = {"a": {"name": cfg.a}, "b": {"name": cfg.b}}
        ledger.append(root, ledger.new_entry("-", ledger.now(), **fields, **arms, verdict="failed", reason=reason))
    raise UserError(reason)


def show_ledger(root: Path) -> None:
    """Print the ledger, and write its page."""
    entries = ledger.read(root)
    if not entries:
        raise UserError(f"{root} has no ledger; test an idea first, or name the folder with --out_dir")
    print(ledger.format_table(entries, terminal_width(sys.stdout)))
    say("", ledger.summary(entries), *ledger.best_lines(entries))
    say(f"{short_path(write_page(root))}: the table as a page; open it in a browser")


if __name__ == "__main__":
    run_script(main, needs_output=False)
