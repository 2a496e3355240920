"""Show runs on a page: one HTML file that opens offline.

    python tools/report.py out-shakespeare-char
    python tools/report.py out-a out-b out-c --output=compared.html
    python tools/report.py "out-*"                                     all folders that match the pattern
    python tools/report.py sweep-x --filter=state=finished --limit=10  the ten best finished runs in a folder
    python tools/report.py "out-*" --live=True                         follows runs that train; Ctrl-C stops

The page starts with a sentence on the best run, and a table of the runs, sorted by validation loss or --sort. It shows
curves of the training and validation loss, learning rate, gradient norm, speed, memory and skipped steps, over steps,
tokens or time, with a vertical line where a run was resumed (dashed after a kill); the samples of the evaluations side
by side; the forecast of tools/plan.py --save and the measured values; the settings that differ between the runs; and
all settings and the environment of each run. tools/runs.py takes the same --filter, --sort and --limit, and lists runs
in the terminal.
"""

import sys
import threading
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.base.progress import note  # noqa: E402
from folio.base.roles import UNLISTED, names_with  # noqa: E402
from folio.base.settings import NonEmptyStr, run_script  # noqa: E402
from folio.base.terminal import say  # noqa: E402
from folio.checkpoints.find_runs import find_run, find_runs, runs_of  # noqa: E402
from folio.experiments import static_page  # noqa: E402
from folio.experiments.report_page import report_page  # noqa: E402
from folio.experiments.runs import Run  # noqa: E402
from folio.experiments.selection import Selection  # noqa: E402
from folio.web.report_server import LiveReport, make_app  # noqa: E402
from folio.web.server import LOOPBACK, host_headers, listen, make_server, server_url  # noqa: E402
from train import TrainConfig  # noqa: E402


@dataclass(frozen=True)
class ReportConfig(Selection):
    # --- files ---
    runs: tuple[str, ...] = ()  # runs, folders with runs, quoted patterns such as "out-*", or latest
    output: str | None = None  # file of the page; None: report.html in the first folder
    # --- selection, as in tools/runs.py ---
    sort: NonEmptyStr = "loss"  # lowest first; or date, name, steps, tokens, time, state, a setting; -loss: descending
    # --- server ---
    live: bool = False  # True: write no file; serve the page to this computer, updated while runs train
    port: Annotated[int, Ge(0), Le(65535)] = 8000  # port of the server; if it is in use, or 0: a free port
    open: bool = True  # False: do not open the browser on the server's page

    def problems(self) -> list[tuple[str, str]]:
        """Require a run."""
        example = "python tools/report.py out-shakespeare-char"
        problems = [] if self.runs else [("runs", f"name at least one run's folder, as in {example}")]
        if self.live and self.output:
            problems.append(("output", "with --live=True, no file is written; use one of them"))
        return problems


def main(cfg: ReportConfig) -> None:
    cfg = cfg.replace(runs=tuple(map(find_run, cfg.runs)))  # latest is the same run from now on
    if cfg.live:
        serve(cfg)
    else:
        write(cfg)


def run_folders(cfg: ReportConfig) -> list[Path]:
    return [run for name in cfg.runs for folder in find_runs(name) for run in runs_of(Path(folder))]


def read_runs(cfg: ReportConfig) -> list[Run]:
    """Read the selected runs that have logged a step. Raises UserError without any."""
    selected = cfg.select(run_folders(cfg))
    runs = [run for run in selected if run.lines]
    if runs:
        for run in selected if not cfg.live else ():
            if not run.lines:
                note(f"{run.folder} is skipped, because the run has not logged a step yet")
        return runs
    folder = selected[0].folder
    if selected[0].state:
        raise UserError(f"{folder / 'metrics.jsonl'} is missing or damaged: it contains none of the run's steps")
    raise UserError(f"{folder}: the run has not logged a step yet")


def render(cfg: ReportConfig) -> str:
    return report_page(read_runs(cfg), names_with(TrainConfig, UNLISTED), is_live=cfg.live)


def write(cfg: ReportConfig) -> None:
    content = render(cfg)
    output = Path(cfg.output) if cfg.output else Path(find_runs(cfg.runs[0])[0]) / "report.html"
    try:
        static_page.write(output, content)
    except OSError as error:
        raise UserError(f"output={output} cannot be written ({error}); choose another --output") from None
    say(f"{output}: {len(content) / 2**20:.1f} MiB; open it in a browser")


def serve(cfg: ReportConfig) -> None:
    """Serve the report until Ctrl-C. Raises UserError if there is no run yet."""
    report = LiveReport(lambda: run_folders(cfg), lambda: render(cfg))
    report.page()
    listener = listen("127.0.0.1", cfg.port)
    port = listener.getsockname()[1]
    address = f"{server_url('127.0.0.1', port)}/"
    server = make_server(make_app(report, host_headers(LOOPBACK, port)))
    print(f"{address}  (Ctrl-C stops)", flush=True)
    if cfg.open:
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    server.run(sockets=[listener])


if __name__ == "__main__":
    run_script(main, ReportConfig, needs_output=False)
