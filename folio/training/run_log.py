"""The logs of a run: a progress bar, metrics.jsonl and samples.jsonl in out_dir, and the loggers that are enabled."""

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from folio.base.files import atomic_write
from folio.base.number_format import format_tokens
from folio.base.progress import note, progress_bar
from folio.base.terminal import display_width, fit, one_line, sparkline, terminal_width
from folio.machine.runtime import DeviceTime
from folio.training.guard import JudgedStep, StepGuard
from folio.training.loggers import Logger, start_loggers

ABANDONED = "rollback"  # key of lines that a rollback has made obsolete: its number
MIN_CURVE, MAX_CURVE = 6, 24  # characters of the curve of the validation losses


class StepReader:
    """Reads the numbers of training steps from the device, and measures their speed."""

    def __init__(self, guard: StepGuard):
        self.guard = guard
        self.sent: int | None = None  # the step whose numbers are being copied from the device
        self.step = 0  # the last step that was read
        self.steps: list[JudgedStep] = []  # the steps of the last read
        self.rate: float | None = None  # their steps per second; None at the first read, whose steps are warmup
        self.start: tuple[DeviceTime, int] | None = None  # of the speed measurement: time and step

    def send(self, step: int) -> None:
        """Start copying the numbers of the steps up to `step` to the host."""
        self.guard.send()
        self.sent = step

    def read(self) -> list[JudgedStep]:
        """Return the steps that were sent. Waits for the device to finish them."""
        self.step, self.sent = self.sent, None
        self.steps = self.guard.read(self.step)
        if self.start:
            start_time, start_step = self.start
            self.rate = (self.step - start_step) / start_time.seconds_until(self.guard.sent_time)
        self.start = self.guard.sent_time, self.step
        return self.steps

    def restart(self) -> None:
        """Restart the speed measurement, so that it excludes the time since the last step."""
        self.start = DeviceTime(self.guard.device), self.step


class Metrics:
    """Writes one JSON line per logged step. A context manager, which closes the progress bar and the loggers.

    step: the step from which the run is resumed; existing lines after it are removed, except those of earlier
    rollbacks, of which there are `rollbacks`. None: a new run, which removes all lines. config: the settings, which the
    loggers show. wandb_id: the wandb run to resume, or None. measured_since: the step after which evaluations measure
    the present text.
    """

    def __init__(
        self,
        out_dir: Path,
        step: int | None,
        max_iters: int,
        config: dict[str, Any],
        wandb_id: str | None,
        rollbacks: int = 0,
        measured_since: int = -1,
    ):
        self.loggers = start_loggers(out_dir, -1 if step is None else step, config, wandb_id)
        self.wandb_id = next((logger.run_id for logger in self.loggers if logger.run_id), wandb_id)
        self.failed_loggers: set[str] = set()
        self.files = {}
        for name in ("metrics.jsonl", "samples.jsonl"):
            _drop_lines_after(out_dir / name, step, rollbacks)
            self.files[name] = open(out_dir / name, "ab", buffering=0)  # noqa: SIM115  (closed by __exit__)
        numbers = [line for line in read_lines(out_dir / "metrics.jsonl")[0] if line["step"] > measured_since]
        losses = {line["step"]: line.get("val_loss") for line in numbers}
        self.val_losses = {step: loss for step, loss in losses.items() if isinstance(loss, float)}  # of evaluations
        self.first_step, self.start_time = step or 0, time.perf_counter()
        self.bar = progress_bar(total=max_iters, initial=step or 0, unit="step", smoothing=0.05)
        self.has_gaps = False  # whether a line could not be written

    def log(self, line: dict[str, Any], remark: str = "") -> None:
        """Log one step. Unknown values are None; values that are not finite become None in the file.

        An evaluation is printed, with the remark. In a terminal, other steps are only shown in the progress bar, and
        an evaluation is compared to the ones before it.
        """
        not_finite = [key for key, value in line.items() if value is not None and not math.isfinite(value)]
        json_line = {**line, **dict.fromkeys(not_finite)}
        self.append("metrics.jsonl", json_line)
        values = {key: value for key, value in json_line.items() if value is not None and key != "step"}
        self._send(lambda logger: logger.log(line["step"], values))
        if line["loss"] is not None:
            self.bar.set_postfix_str(f"loss {line['loss']:.4f}", refresh=False)  # more does not fit into 80 columns
        is_evaluation, width = line["val_loss"] is not None, terminal_width(sys.stdout)
        if is_evaluation and width:
            self.say(self._describe_evaluation(line, remark, width))
        elif is_evaluation or self.bar.disable:
            self.say(f"step {line['step']:,}/{self.bar.total:,}: {self._format(line, remark)}")
        if is_evaluation:
            self.val_losses[line["step"]] = line["val_loss"]

    def _describe_evaluation(self, line: dict[str, Any], remark: str, width: int) -> str:
        """The line of an evaluation for a terminal of this width: also its change, the curve so far, and the time left.

        The loss before the first step is not in the curve, because it would hide the differences between the others.
        """
        step, loss, before = line["step"], line["val_loss"], self.val_losses
        text = f"step {step:,}: "
        text += f"loss {line['loss']:.4f}, " if line["loss"] is not None else "no targets, " if step else ""
        text += f"val {loss:.4f}"
        if before:
            change = loss - [*before.values()][-1]
            text += f" {'▲' if change > 0 else '▼' if change < 0 else '='}{abs(change):.4f}"
        text += " best" if before and loss < min(before.values()) else remark
        if line["tokens_per_second"]:
            text += f", {format_tokens(round(line['tokens_per_second']))} tok/s"
        if line["mfu"]:
            text += f", {line['mfu']:.0%} MFU"
        if left := self._time_left(step):
            text += f", {left} left"
        losses = [loss for step, loss in [*before.items(), (step, loss)] if step]
        free = width - display_width(text) - 1
        if len(losses) > 1:
            text += " " + sparkline(losses, min(free, MAX_CURVE) if free >= MIN_CURVE else MAX_CURVE)
        return text

    def _time_left(self, step: int) -> str:
        """The time that the remaining steps will take at the average speed so far; empty if it is not known."""
        done, remaining = step - self.first_step, self.bar.total - step
        if done <= 0 or remaining <= 0:
            return ""
        return tqdm.format_interval((time.perf_counter() - self.start_time) / done * remaining)

    def _send(self, send: Callable[[Logger], None]) -> None:
        """Call a function with each logger. An error is reported once per logger."""
        for logger in self.loggers:
            try:
                send(logger)
            except Exception as error:  # any error of the program
                if logger.name not in self.failed_loggers:
                    self.say(f"{logger.name} failed to log ({error}); training continues")
                self.failed_loggers.add(logger.name)

    @staticmethod
    def _format(line: dict[str, Any], remark: str = "") -> str:
        """Format the known values for the terminal."""
        numbers = []
        if line["loss"] is not None:
            numbers.append(f"loss {line['loss']:.4f}")
        elif line["step"]:
            numbers.append("no targets")
        if line["val_loss"] is not None:
            numbers.append(f"val {line['val_loss']:.4f}{remark}")
        if line["tokens_per_second"]:
            numbers.append(f"{line['tokens_per_second']:,.0f} tok/s")
        if line["mfu"]:
            numbers.append(f"{line['mfu']:.1%} MFU")
        return ", ".join(numbers)

    def sample(self, step: int, generate: Callable[[], str]) -> None:
        """Write a sample of the model after a step, and show its beginning in a terminal.

        An error is printed and does not end the run.
        """
        try:
            text = generate()
            self.append("samples.jsonl", {"step": step, "text": text})
            self._send(lambda logger: logger.sample(step, text))
            if width := terminal_width(sys.stdout):
                self.say("  " + one_line(text, width - 2))
        except Exception as error:
            self.say(f"step {step:,}: no sample ({type(error).__name__}: {error}); training continues")

    def append(self, name: str, line: dict[str, Any]) -> None:
        """Append a line to the file. If this fails, the file is unchanged, and the error is reported once."""
        file, content = self.files[name], json.dumps(line).encode() + b"\n"
        size = file.seek(0, 2)
        try:
            if file.write(content) == len(content):
                return
            error = "the disk is full"
        except OSError as os_error:
            error = os_error
        file.truncate(size)
        if not self.has_gaps:
            self.say(f"{name} cannot be written ({error}); training continues without it")
        self.has_gaps = True

    def abandon_after(self, step: int, number: int) -> None:
        """Mark the lines after `step` as abandoned by the rollback with this number. Raises OSError."""
        self.val_losses = {at: loss for at, loss in self.val_losses.items() if at <= step}
        for name, file in self.files.items():
            path = Path(file.name)
            lines = [line for content in _complete_lines(path) if (line := _parse(content))]
            for line in lines:
                if line["step"] > step:
                    line.setdefault(ABANDONED, number)
            file.close()
            _write_lines(path, [json.dumps(line).encode() for line in lines])
            self.files[name] = open(path, "ab", buffering=0)  # noqa: SIM115  (closed by __exit__)

    def say(self, text: str) -> None:
        """Print a line above the progress bar, wrapped on a terminal."""
        tqdm.write(fit(text, sys.stdout))
        sys.stdout.flush()

    def roll_back(self, step: int, max_iters: int) -> None:
        """Continue the loggers and the progress bar after a rollback to `step`."""
        self._send(lambda logger: logger.roll_back(step))
        self.bar.n = self.first_step = step
        self.start_time = time.perf_counter()
        self.set_max_iters(max_iters)

    def set_max_iters(self, max_iters: int) -> None:
        self.bar.total = max_iters
        self.bar.refresh()

    def advance(self, steps: int = 1) -> None:
        """Count steps."""
        self.bar.update(steps)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.bar.close()
        for file in self.files.values():
            file.close()
        for logger in self.loggers:
            try:
                logger.close(succeeded=exception[0] is None)
            except Exception as error:  # any error of the program
                note(f"{logger.name} could not finish ({error}); the run's own files are complete")


class NullMetrics(Metrics):
    """Metrics that write nothing, for all ranks but 0."""

    wandb_id = None

    def __init__(self) -> None:
        self.bar = tqdm(disable=True)
        self.files, self.loggers = {}, []

    def log(self, line: dict[str, Any], remark: str = "") -> None: ...

    def sample(self, step: int, generate: Callable[[], str]) -> None: ...

    def append(self, name: str, line: dict[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...


def read_lines(path: Path, since: int = 0, abandoned: bool = False) -> tuple[list[dict[str, Any]], int | None]:
    """Read the lines of metrics.jsonl or samples.jsonl after a step (0: all lines), and the last line's step.

    Skipped: damaged lines, and an incomplete last line, which another process may be writing. abandoned: read the lines
    that rollbacks have made obsolete, instead of the others.
    """
    lines: list[dict[str, Any]] = []
    last = None
    for content in reversed(_complete_lines(path)):
        line = _parse(content)
        if line is None or (ABANDONED in line) != abandoned:
            continue
        last = line["step"] if last is None else last
        if since and line["step"] <= since:
            break
        lines.append(line)
    return lines[::-1], last


def add_lost_sample(out_dir: Path, step: int, generate: Callable[[], str]) -> None:
    """Add the sample after `step` to samples.jsonl if the run was killed between the evaluation and the sample.

    There is no sample before the first step.
    """
    try:
        numbers, samples = (read_lines(out_dir / name)[0] for name in ("metrics.jsonl", "samples.jsonl"))
        was_evaluated = step and any(line["step"] == step and line.get("val_loss") is not None for line in numbers)
        if was_evaluated and all(line["step"] != step for line in samples):
            line = json.dumps({"step": step, "text": generate()}).encode()
            _write_lines(out_dir / "samples.jsonl", [*_complete_lines(out_dir / "samples.jsonl"), line])
    except Exception as error:  # a sample is optional
        print(f"step {step:,}: no sample ({type(error).__name__}: {error})")


def _drop_lines_after(path: Path, step: int | None, rollbacks: int) -> None:
    """Remove the lines after `step` (None: all), and damaged or incomplete lines. The lines of earlier rollbacks stay.

    A rollback with a higher number than `rollbacks` was not saved, because of a kill: it has abandoned no lines.
    """
    kept = []
    for content in _complete_lines(path) if step is not None else []:
        line = _parse(content)
        if line and line.get(ABANDONED, 0) > rollbacks:
            del line[ABANDONED]
            content = json.dumps(line).encode()
        if line and (ABANDONED in line or line["step"] <= step):
            kept.append(content)
    _write_lines(path, kept)


def _write_lines(path: Path, lines: list[bytes]) -> None:
    with atomic_write(path) as temporary:
        temporary.write_bytes(b"".join(content + b"\n" for content in lines))


def _complete_lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1] if path.is_file() else []


def _parse(content: bytes) -> dict[str, Any] | None:
    """Parse a line, which must have a step. None if it is damaged."""
    try:
        line = json.loads(content)
    except (ValueError, RecursionError):
        return None
    is_valid = isinstance(line, dict) and type(line.get("step")) is int and type(line.get(ABANDONED, 0)) is int
    return line if is_valid else None
