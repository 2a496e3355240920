import json
import re
from pathlib import Path

from folio.training.run_log import Metrics
from tests.support.terminals import terminal


def new_metrics(folder: Path, resume_step: int | None = None, steps: int = 20) -> Metrics:
    return Metrics(folder, resume_step, steps, dict(wandb_log=False, tensorboard_log=False), None)


def line(step: int, loss: float | None, **numbers: float | None) -> dict:
    return dict(val_loss=None, tokens_per_second=None, mfu=None, step=step, loss=loss) | numbers


def test_a_step_without_targets_is_printed_without_a_loss():
    assert Metrics._format(line(3, None)) == "no targets"
    assert Metrics._format(line(3, None, val_loss=2.0), " (best)") == "no targets, val 2.0000 (best)"
    assert Metrics._format(line(0, None, val_loss=2.0)) == "val 2.0000"  # the evaluation before the first step


def read_lines(path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_each_logged_step_is_a_line_in_the_file_and_in_the_output(tmp_path, capsys):
    with new_metrics(tmp_path) as metrics:
        metrics.log(line(1, 4.0))
        metrics.log(line(2, 3.0, val_loss=3.5, tokens_per_second=1234.5, mfu=0.41), " (0.1 above the best)")
        metrics.log(line(3, float("nan"), grad_norm=float("inf")))
    assert read_lines(tmp_path)[-1]["loss"] is None and read_lines(tmp_path)[-1]["grad_norm"] is None
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 2, 3]
    assert capsys.readouterr().out.splitlines() == [
        "step 1/20: loss 4.0000",
        "step 2/20: loss 3.0000, val 3.5000 (0.1 above the best), 1,234 tok/s, 41.0% MFU",
        "step 3/20: loss nan",
    ]


def test_resuming_removes_later_incomplete_and_damaged_lines(tmp_path):
    """If a power loss had damaged a line in the middle of the file, resuming ended in a traceback."""
    lines = [b'{"step": 1}\n', b'{"st\xff\n', b"\0\0\0\n", b"[]\n", b'{"step": 2}\n', b'{"step": 3}\n', b'{"step": 2']
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    with new_metrics(tmp_path, 2) as metrics:
        assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1}\n{"step": 2}\n'
        metrics.log(line(3, 2.0))
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 2, 3]


def test_a_full_disk_leaves_no_incomplete_line(tmp_path, capsys):
    with new_metrics(tmp_path) as metrics:
        metrics.log(line(1, 4.0))
        file = metrics.files["metrics.jsonl"]

        class FileOnFullDisk:
            """Only the first 5 bytes of each line are written."""

            truncate, close, seek = file.truncate, file.close, file.seek

            def write(self, line: bytes) -> int:
                return file.write(line[:5])

        metrics.files["metrics.jsonl"] = FileOnFullDisk()
        for step in (2, 3):
            metrics.log(line(step, 3.0))
        metrics.files["metrics.jsonl"] = file
        metrics.log(line(4, 2.0))
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 4]
    assert capsys.readouterr().out.count("cannot be written (the disk is full); training continues") == 1


def log_in_terminal(folder: Path, columns: int, evaluations: list, resume_step: int | None = None, **env: str) -> list:
    """Log evaluations (step, validation loss), and return the lines of the terminal that are about them."""
    with terminal(columns, **env) as lines, new_metrics(folder, resume_step, steps=3000) as metrics:
        for step, val_loss in evaluations:
            metrics.log(line(step, 4.0, val_loss=val_loss, tokens_per_second=53_210.0), " (worse)")
            metrics.log(line(step + 1, 4.0))
            metrics.sample(step, lambda: "\nROMEO:\nBut soft, what the wind of my lord is a king, and shall be so")
    return [line for line in lines if line.startswith(("step ", "  ")) and "%|" not in line]


def test_evaluations_remain_visible_in_a_terminal(tmp_path):
    """The progress bar overwrote every evaluation."""
    shown = log_in_terminal(tmp_path, 80, [(0, 9.0), (1000, 3.5), (2000, 3.0), (3000, 3.25)])
    sample = "  ROMEO: But soft, what the wind of my lord is a king, and shall be so"
    assert shown[:2] == ["step 0: loss 4.0000, val 9.0000 (worse), 53.2k tok/s", sample]
    assert re.fullmatch(r"step 1,000: loss 4.0000, val 3.5000 ▼5.5000 best, 53.2k tok/s, [\d:]+ left", shown[2])
    assert re.fullmatch(r"step 2,000: .*, val 3.0000 ▼0.5000 best, 53.2k tok/s, [\d:]+ left █▁", shown[4])
    assert shown[6] == "step 3,000: loss 4.0000, val 3.2500 ▲0.2500 (worse), 53.2k tok/s █▁▅"
    assert shown[7] == sample and max(map(len, shown)) <= 80


def test_a_narrow_terminal_wraps_an_evaluation(tmp_path):
    shown = log_in_terminal(tmp_path, 40, [(1000, 3.5), (3000, 3.0)], NO_COLOR="1")
    assert shown[-3:] == [
        "step 3,000: loss 4.0000, val 3.0000",
        "  ▼0.5000 best, 53.2k tok/s █▁",
        "  ROMEO: But soft, what the wind of my…",
    ]


def test_a_dumb_terminal_has_the_lines_of_a_file(tmp_path):
    assert log_in_terminal(tmp_path, 40, [(1000, 3.5)], TERM="dumb") == [
        "step 1,000/3,000: loss 4.0000, val 3.5000 (worse), 53,210 tok/s"
    ]


def test_a_resumed_run_compares_to_the_evaluations_before(tmp_path):
    """Of a text that is no longer measured, or that a rollback has abandoned, the losses are not compared."""
    log_in_terminal(tmp_path, 80, [(0, 9.0), (10, 3.5), (20, 3.0), (30, 3.25)])
    shown = log_in_terminal(tmp_path, 80, [(3000, 3.25)], resume_step=20)
    assert shown[0].endswith("val 3.2500 ▲0.2500 (worse), 53.2k tok/s █▁▅")
    config = dict(wandb_log=False, tensorboard_log=False)
    with Metrics(tmp_path, 20, 3000, config, None, measured_since=10) as metrics:
        assert metrics.val_losses == {20: 3.0}
    with Metrics(tmp_path, 20, 3000, config, None) as metrics:
        metrics.abandon_after(10, 1)
        assert metrics.val_losses == {0: 9.0, 10: 3.5}
