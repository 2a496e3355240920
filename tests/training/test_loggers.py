"""folio/training/loggers.py: what wandb and TensorBoard show of a run, through the files that they write."""

import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from folio import UserError
from folio.checkpoints import checkpoint
from folio.training.loggers import TensorBoardLogger, WandbLogger
from folio.training.run_log import Metrics, read_lines
from train import train

CONFIG = dict(wandb_log=False, tensorboard_log=False, wandb_project="folio", wandb_run_name=None)
tensorboard = pytest.mark.needs("tensorboard")


def shown(folder: Path) -> dict[str, dict]:
    """What TensorBoard shows of the run in a folder: step -> value, of each scalar and text."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    events = EventAccumulator(str(folder / "tensorboard"), {"tensors": 0}).Reload()
    series: dict[str, dict] = {}
    for tag in events.Tags()["tensors"]:
        values = {event.step: tensor_util.make_ndarray(event.tensor_proto).item() for event in events.Tensors(tag)}
        name = tag.removesuffix("/text_summary")
        series[name] = values if name == tag else {step: text.decode() for step, text in values.items()}
    return series


def accepted_by_wandb(folder: Path) -> list[dict]:
    """The values that wandb has accepted from the run in a folder, by name, one dict per step."""
    (path,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 60
    records = read_records(path.read_bytes())
    while not any(record.HasField("exit") for record in records):  # run.finish() does not wait for it
        assert time.monotonic() < deadline, "wandb's process has not written the end of the run"
        time.sleep(0.05)
        records = read_records(path.read_bytes())
    steps = [record.history.item for record in records if record.HasField("history")]
    return [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in items} for items in steps if items]


def read_records(content: bytes) -> list[Any]:
    """The complete records in the file of an offline run of wandb.

    They are in LevelDB's log format: 7 bytes of header, then blocks of 32 KiB.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    position, data, records = 7, b"", []
    while position + 7 <= len(content):
        if position % 2**15 > 2**15 - 7:  # no space for a record
            position += 2**15 - position % 2**15
            continue
        size, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        if position + 7 + size > len(content):
            break
        data += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # the whole record, or its end
            records.append(Record.FromString(data))
            data = b""
    return records


def log_losses(metrics: Metrics, loss: float, *steps: int) -> None:
    for step in steps:
        metrics.log(dict(step=step, loss=loss, val_loss=None, tokens_per_second=None, mfu=None))


@tensorboard
def test_tensorboard_shows_the_lines_of_metrics_jsonl_and_samples_jsonl(tiny):
    cfg = tiny(tensorboard_log=True, max_iters=6, eval_interval=3, bias=True)
    train(cfg)
    train(tiny(max_iters=9, eval_interval=3, init_from="resume"))  # the setting is the checkpoint's
    values, out_dir = shown(Path(cfg.out_dir)), Path(cfg.out_dir)
    (lines, _), (samples, _) = (read_lines(out_dir / name) for name in ("metrics.jsonl", "samples.jsonl"))
    for name in lines[0].keys() - {"step"}:
        expected = {line["step"]: line[name] for line in lines if line[name] is not None}
        assert values.get(name, {}) == pytest.approx(expected), name
    assert [*values["loss"]] == list(range(1, 10)) and [*values["val_loss"]] == [0, 3, 6, 9]
    texts = {step: text.replace("    ", "") for step, text in values["sample"].items()}
    assert texts == {sample["step"]: "".join(f"{s}\n" for s in sample["text"].splitlines()) for sample in samples}
    assert "bias = True\n" in values["settings"][0] and "max_iters = 9\n" in values["settings"][7]


@tensorboard
def test_tensorboard_removes_what_another_run_or_a_rollback_replaces(tmp_path):
    config = {**CONFIG, "tensorboard_log": True}
    with Metrics(tmp_path, None, 20, config, None) as metrics:
        log_losses(metrics, 1.0, 0, 1, 2, 3, 4)
    with Metrics(tmp_path, 2, 20, config, None) as metrics:  # killed before the checkpoint of step 4
        log_losses(metrics, 2.0, 3)
        assert shown(tmp_path)["loss"] == {0: 1, 1: 1, 2: 1, 3: 2}  # also if this run is killed
        metrics.sample(3, lambda: "a text")
        metrics.abandon_after(1, 1)
        metrics.roll_back(1, 20)
        log_losses(metrics, 3.0, 2)
    assert shown(tmp_path)["loss"] == {0: 1, 1: 1, 2: 3} and shown(tmp_path)["sample"] == {}
    with Metrics(tmp_path, None, 20, config, None) as metrics:
        log_losses(metrics, 4.0, 0)
    assert shown(tmp_path)["loss"] == {0: 4}


def test_wandb_shows_the_steps_after_a_rollback(tmp_path):
    """wandb ignored all values until the run had passed the step at which it was rolled back."""
    with Metrics(tmp_path, None, 20, {**CONFIG, "wandb_log": True}, None) as metrics:
        log_losses(metrics, 1.0, 1, 2, 30)
        metrics.abandon_after(2, 1)
        metrics.roll_back(2, 20)
        log_losses(metrics, 2.0, 3)
    losses = [(values["step"], values["loss"]) for values in accepted_by_wandb(tmp_path)]
    assert losses == [(1, 1.0), (2, 1.0), (30, 1.0), (3, 2.0)]


@pytest.mark.parametrize("last_step, own_steps", [(0, [3, 4, 10]), (5, [5, 6, 10]), (31, [31, 32, 33])])
def test_wandbs_own_step_increases_in_a_resumed_run(tmp_path, monkeypatch, last_step, own_steps):
    """A run that resumed from an earlier step than its last one was not shown until it had passed that step."""
    import wandb

    service = mock.Mock(id="x", starting_step=last_step)  # a run that has logged steps before
    monkeypatch.setattr(wandb, "init", lambda **settings: service)
    logger, steps = WandbLogger(tmp_path, 2, CONFIG, "x"), (3, 4, 10)
    for step in steps:
        logger.log(step, {"loss": 1.0})
    expected = [mock.call({"step": step, "loss": 1.0}, step=own) for own, step in zip(own_steps, steps, strict=True)]
    assert service.log.call_args_list == expected
    assert service.define_metric.call_args_list == [mock.call("*", step_metric="step")]


def test_a_run_keeps_its_wandb_id_while_wandb_is_off(tiny):
    """Such a run continued as a new run of wandb later."""
    train(tiny(wandb_log=True, max_iters=2))
    wandb_id = checkpoint.load(Path(tiny().out_dir)).state["wandb_id"]
    train(tiny(max_iters=4, init_from="resume", wandb_log=False))
    assert wandb_id and checkpoint.load(Path(tiny().out_dir)).state["wandb_id"] == wandb_id


@pytest.mark.parametrize("package, setting", [("tensorboard", "tensorboard_log"), ("wandb", "wandb_log")])
def test_a_missing_package_ends_the_run_before_it_begins(tiny, monkeypatch, package, setting):
    train(tiny(max_iters=2))
    monkeypatch.setitem(sys.modules, package, None)
    for changes in (dict(overwrite=True), dict(init_from="resume", max_iters=4)):
        with pytest.raises(UserError, match=rf"^{setting}=True: the package {package} is not installed: pip install"):
            train(tiny(**{setting: True}, data_dir="missing", **changes))
    train(tiny(**{setting: True}, init_from="resume", eval_only=True))


@tensorboard
def test_an_error_of_a_logger_is_reported_once_and_does_not_end_the_run(tiny, monkeypatch, capsys):
    for name in ("log", "sample", "close"):
        monkeypatch.setattr(TensorBoardLogger, name, mock.Mock(side_effect=OSError("No space left on device")))
    train(tiny(tensorboard_log=True, max_iters=6))
    printed = capsys.readouterr()
    assert printed.out.count("TensorBoard failed to log (No space left on device); training continues") == 1
    assert "TensorBoard could not finish (No space" in printed.err and "finished: 6 of 6 steps" in printed.out
