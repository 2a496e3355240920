import json

from folio.metrics import Metrics

CONFIG = dict(wandb_log=False)
LINE = dict(val_loss=None, tokens_per_second=None, mfu=None)


def lines(path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_a_line_a_step_in_the_file_and_on_the_screen(tmp_path, capsys):
    with Metrics(tmp_path, 0, 20, CONFIG, None) as metrics:
        metrics.log({**LINE, "step": 1, "loss": 4.0})
        metrics.log({**LINE, "step": 2, "loss": 3.0, "val_loss": 3.5, "tokens_per_second": 1234.5, "mfu": 0.41})
        metrics.log({**LINE, "step": 3, "loss": float("nan"), "grad_norm": float("inf")})
    assert lines(tmp_path)[-1]["loss"] is None and lines(tmp_path)[-1]["grad_norm"] is None
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
    assert capsys.readouterr().out.splitlines() == [
        "step 1/20: loss 4.0000",
        "step 2/20: loss 3.0000, val 3.5000, 1,234 tok/s, 41.0% MFU",
        "step 3/20: loss nan, val 3.5000",
    ]


def test_going_on_cuts_what_lies_beyond_and_a_torn_line(tmp_path):
    with Metrics(tmp_path, 0, 20, CONFIG, None) as metrics:
        for step in range(1, 6):
            metrics.log({**LINE, "step": step, "loss": 1.0})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')
    with Metrics(tmp_path, 3, 20, CONFIG, None) as metrics:
        metrics.log({**LINE, "step": 4, "loss": 2.0})
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [(1, 1), (2, 1), (3, 1), (4, 2)]


def test_a_full_disk_leaves_whole_lines(tmp_path, capsys):
    with Metrics(tmp_path, 0, 20, CONFIG, None) as metrics:
        metrics.log({**LINE, "step": 1, "loss": 4.0})
        whole = metrics.files["metrics.jsonl"]

        class Full:
            """As a full disk does: it takes a part of the line, then nothing."""

            truncate, close, seek = whole.truncate, whole.close, whole.seek

            def write(self, line: bytes) -> int:
                return whole.write(line[:5])

        metrics.files["metrics.jsonl"] = Full()
        metrics.log({**LINE, "step": 2, "loss": 3.0})
        metrics.log({**LINE, "step": 3, "loss": 3.0})
        metrics.files["metrics.jsonl"] = whole
        metrics.log({**LINE, "step": 4, "loss": 2.0})
    assert [line["step"] for line in lines(tmp_path)] == [1, 4]
    assert capsys.readouterr().out.count("cannot be written (the disk is full); training continues") == 1


def test_damaged_lines_are_dropped(tmp_path):
    """A line that a power loss had left in the middle of the file ended each later start in a traceback."""
    lines = [b'{"step": 1}\n', b'{"st\xff\n', b"\0\0\0\n", b"[]\n", b'{"step": 2}\n', b'{"step": 3}\n', b'{"step": 2']
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    Metrics(tmp_path, 2, 10, {"wandb_log": False}, None).__exit__(None)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1}\n{"step": 2}\n'
