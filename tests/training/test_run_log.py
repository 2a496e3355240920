import contextlib
import json
import os
import sys
from pathlib import Path

import pytest

from folio.training.run_log import Metrics


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


def test_evaluations_remain_visible_in_a_terminal(tmp_path, monkeypatch):
    """The progress bar overwrote every evaluation."""
    master, slave = pytest.importorskip("pty").openpty()
    with open(slave, "w", encoding="utf-8") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setattr(sys, "stderr", terminal)
        with new_metrics(tmp_path, steps=3) as metrics:
            for step, val_loss in ((1, None), (2, 3.5), (3, None)):
                metrics.advance()
                metrics.log(line(step, 4.0, val_loss=val_loss), " (best)")
    output = b""
    with contextlib.suppress(OSError):  # the end of the terminal
        while chunk := os.read(master, 4096):
            output += chunk
    os.close(master)
    shown = [line.rpartition(b"\r")[2] for line in output.replace(b"\r\n", b"\n").split(b"\n")]
    assert [line for line in shown if line.startswith(b"step ")] == [b"step 2/3: loss 4.0000, val 3.5000 (best)"]
    assert output.count(b"(best)") == 1  # a remark is too long for the bar
