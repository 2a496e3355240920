"""Show runs on a page: one HTML file that opens offline.

    python tools/report.py out-shakespeare-char
    python tools/report.py out-a out-b out-c --output=compared.html
    python tools/report.py "out-*"                                     all folders that match the pattern
    python tools/report.py sweep-x --filter=state=finished --limit=10  the ten best finished runs in a folder

The page starts with a sentence on the best run, and a table of the runs, sorted by validation loss or --sort. It shows
curves of the training and validation loss, learning rate, gradient norm, speed, memory and skipped steps, with a
vertical line where a run was resumed (dashed after a kill); the forecast of tools/plan.py --save and the measured
values; the samples of each evaluation; the settings that differ between the runs; and all settings and the environment
of each run. tools/runs.py takes the same --filter, --sort and --limit, and lists runs in the terminal.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.base.progress import note  # noqa: E402
from folio.base.roles import UNLISTED, names_with  # noqa: E402
from folio.base.settings import NonEmptyStr, run_script  # noqa: E402
from folio.base.terminal import say  # noqa: E402
from folio.checkpoints.find_runs import find_runs, runs_of  # noqa: E402
from folio.experiments import static_page  # noqa: E402
from folio.experiments.report_page import report_page  # noqa: E402
from folio.experiments.selection import Selection  # noqa: E402
from train import TrainConfig  # noqa: E402


@dataclass(frozen=True)
class ReportConfig(Selection):
    # --- files ---
    runs: tuple[str, ...] = ()  # runs, folders with runs, quoted patterns such as "out-*", or latest
    output: str | None = None  # file of the page; None: report.html in the first folder
    # --- selection, as in tools/runs.py ---
    sort: NonEmptyStr = "loss"  # lowest first; or date, name, steps, tokens, time, state, a setting; -loss: descending

    def problems(self) -> list[tuple[str, str]]:
        """Require a run."""
        example = "python tools/report.py out-shakespeare-char"
        return [] if self.runs else [("runs", f"name at least one run's folder, as in {example}")]


def main(cfg: ReportConfig) -> None:
    folders = [Path(folder) for name in cfg.runs for folder in find_runs(name)]
    selected = cfg.select([run for folder in folders for run in runs_of(folder)])
    runs = [run for run in selected if run.lines]
    for run in selected:
        if not run.lines and len(selected) > 1:
            note(f"{run.folder} is skipped, because the run has not logged a step yet")
    if not runs:
        folder = selected[0].folder
        if selected[0].state:
            raise UserError(f"{folder / 'metrics.jsonl'} is missing or damaged: it contains none of the run's steps")
        raise UserError(f"{folder}: the run has not logged a step yet")
    content = report_page(runs, names_with(TrainConfig, UNLISTED))
    output = Path(cfg.output) if cfg.output else folders[0] / "report.html"
    try:
        static_page.write(output, content)
    except OSError as error:
        raise UserError(f"output={output} cannot be written ({error}); choose another --output") from None
    say(f"{output}: {len(content) / 2**20:.1f} MiB; open it in a browser")


if __name__ == "__main__":
    run_script(main, ReportConfig, needs_output=False)
