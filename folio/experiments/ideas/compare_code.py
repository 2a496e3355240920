"""Run an experiment: freeze its arms, train pair after pair, and say what they show."""

import ast
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from folio import UserError
from folio.base.commands import short_path
from folio.base.number_format import counted
from folio.base.settings import Settings
from folio.base.terminal import say
from folio.evaluation.sequential import LUCK, MAX_PAIRS
from folio.experiments.ideas import ledger
from folio.experiments.ideas.experiment import MEASURING, Experiment, open_experiment, prepare_data
from folio.experiments.ideas.ledger_page import write_page
from folio.experiments.ideas.pair_queue import Pair, PairQueue
from folio.experiments.ideas.paired_runs import warm_up
from folio.experiments.ideas.paired_test import PairedTest
from folio.experiments.sweep.arms import Arm, Change, changes
from folio.experiments.sweep.runner import Runner, environments
from folio.experiments.sweep.sweep_folder import checked_definition, report_write_errors
from folio.training.planning.train_settings import TrainSettings

EVALUATING = ("evaluate", "mean_loss")  # functions of train.py
MAX_FILES = 8  # changed files to list


def compare(cfg: Settings, base: TrainSettings, arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Train pairs until the verdict is known. Returns the ledger's line, and the number of a signal that stopped it.

    cfg: the settings of tools/ab.py. base, arguments: the settings of train.py, and what they were parsed from. Raises
    UserError.
    """
    root = Path(cfg.out_dir)
    config_file = Path(next(argument for argument in arguments if not argument.startswith("--")))
    entries = ledger.read(root)
    with report_write_errors(root):
        experiment, line = open_experiment(cfg, base, arguments, config_file.stem, entries)
    files, diff = changes(*experiment.arms)
    (experiment.folder / "idea.diff").write_text(diff, encoding="utf-8")
    say(line or f"{short_path(experiment.folder)}: {describe_arms(experiment)}")
    say(*describe_changes(experiment, files))
    known = {"note": cfg.note, "config": config_file.name, "budget": describe_budget(base)}
    entry = experiment.new_entry(**known, files=[asdict(file) for file in files])
    ledger.append(root, entry)

    def end(verdict: str, reason: str | None = None) -> dict[str, Any]:
        entry.update(verdict=verdict, reason=reason)
        ledger.append(root, entry)
        write_page(root)
        return entry

    try:
        experiment = prepare_data(experiment, files)
        with checked_definition(experiment.sweep):
            facts = warm_up(experiment, environments(1, base.device)[0])
    except UserError as error:
        say(f"failed: {error}")
        return end("failed", str(error)), 0
    say(describe_models(facts))
    test = PairedTest(experiment, cfg, ledger.level_for(entries, experiment.began))
    queue = PairQueue(experiment.sweep, test.is_decided)
    queue.retry_failed()
    runner = Runner(experiment.sweep, queue, 1)
    stopped = runner.run()
    pairs = queue.complete()
    entry.update(test.measurements(pairs, facts))
    failed = next((outcome for outcome in queue.outcomes() if outcome.state == "failed"), None)
    if failed:
        reason = f"{experiment.names[failed.point]}, seed {failed.seed}: {failed.error}"
        say(f"failed: {reason}")
        return end("failed", reason), 0
    if stopped:
        say(f"stopped {stopped}; repeat the command to resume")
        return end("unfinished"), runner.stopped_by
    end(test.verdict(pairs), test.problem)
    say(conclusion(entry, cfg))
    if entry["verdict"] == "better":
        say(describe_kept(test, pairs))
    return entry, 0


# --- what is printed --------------------------------------------------------------------------------------------------


def describe_arms(experiment: Experiment) -> str:
    return ", ".join(f"{letter} is {describe_arm(arm)}" for letter, arm in zip("AB", experiment.arms, strict=True))


def describe_arm(arm: Arm) -> str:
    commit, _, dirty = (arm.commit or "").partition("-")
    return f"{arm.name} ({commit[:7]}{' with changes' if dirty else ''})" if commit else arm.name


def describe_changes(experiment: Experiment, files: list[Change]) -> list[str]:
    """Return lines on what differs between the arms; first, the code that decides what a loss measures."""
    lines = []
    measuring = [file.path for file in files if file.path.startswith(MEASURING)]
    if any(file.path == "train.py" for file in files):
        a, b = (functions_in(arm.folder / "train.py", EVALUATING) for arm in experiment.arms)
        measuring += [f"{name} in train.py" for name in EVALUATING if a.get(name) != b.get(name)]
    if measuring:
        lines.append(f"caution: B changes how losses are measured, or the data: {', '.join(measuring)}")
    names = [f"{file.path} +{file.added} -{file.removed}" for file in files]
    shown = names if len(names) <= MAX_FILES else [*names[:MAX_FILES], f"and {len(names) - MAX_FILES} more"]
    options = [" ".join(arm.options) or "no options" for arm in experiment.arms]
    differences = [*shown, *([f"options: {options[0]} / {options[1]}"] if options[0] != options[1] else [])]
    return [*lines, f"different: {', '.join(differences)}"]


def functions_in(script: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the code of functions in a script, without comments; empty if it is not valid Python."""
    try:
        nodes = ast.parse(script.read_bytes()).body
    except (SyntaxError, ValueError):
        return {}
    return {node.name: ast.unparse(node) for node in nodes if isinstance(node, ast.FunctionDef) and node.name in names}


def describe_budget(base: TrainSettings) -> str:
    return f"{base.minutes:g} min" if base.minutes else f"{base.max_iters:,} steps"


def describe_models(facts: list[dict[str, Any]]) -> str:
    """Return a line on the size of the models."""
    parts = [
        f"{letter}: {fact['parameters']:,} parameters, {fact['flops_per_token'] / 1e6:,.2f} MFLOP per token"
        if fact
        else f"{letter}: its code cannot count parameters"
        for letter, fact in zip("AB", facts, strict=True)
    ]
    return "; ".join(parts)


def conclusion(entry: dict[str, Any], cfg: Settings) -> str:
    """Return the verdict as a sentence or two."""
    verdict, pairs = entry["verdict"], counted(len(entry["losses"]), "pair")
    ratio = f"\n{describe_costs(entry)}" if entry["speed_ratio"] else ""
    if verdict == "identical":
        return f"identical: both arms end with the same weights, bit for bit.{ratio}"
    if verdict == "failed":
        return f"no verdict: {entry['reason']}"
    interval = f"B - A is {entry['difference']:+.4f} {entry['unit']}, {entry['low']:+.4f} to {entry['high']:+.4f}"
    words = f"no difference larger than {cfg.smallest:g}" if verdict == "no difference" else verdict
    advice = f" More pairs, up to {MAX_PAIRS}: --max_seeds={MAX_PAIRS}." if verdict == "undecided" else ""
    return f"{words}, after {pairs}: {interval}.{advice}{ratio}"


def describe_kept(test: PairedTest, pairs: Sequence[Pair]) -> str:
    """Return a line on whether a better idea is kept."""
    if test.is_kept(pairs):
        return f"kept: at most {LUCK:.0%} of the kept ideas are expected to be luck"
    advice = f"; --confirm trains up to {MAX_PAIRS}" if len(pairs) < MAX_PAIRS else ""
    return f"not kept: of many ideas, some are better by luck, which more pairs would rule out{advice}"


def describe_costs(entry: dict[str, Any]) -> str:
    """Return a line on the speed and memory of both arms: medians over their runs."""
    parts = []
    for letter, model in zip("AB", entry["models"], strict=True):
        memory = f", {model['memory'] / 2**20:,.0f} MiB" if model["memory"] else ""
        parts.append(f"{letter}: {model['tokens_per_second']:,.0f} tokens/s{memory}")
    return f"{'; '.join(parts)}. B trains {entry['speed_ratio']:.2f} times as many tokens per second."
