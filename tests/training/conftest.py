"""Fixtures of the tests of training: what happens at a step, and command lines with a config file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from folio.base import settings
from folio.checkpoints import checkpoint
from folio.training.run_log import Metrics
from train import TrainConfig, train


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that lets a run call another one, once it has logged a step: at_step(step, function, *arguments).

    It replaces what an earlier call has set.
    """
    log, planned = Metrics.log, {}

    def log_and_call(self: Metrics, line: dict[str, Any], *remark: str) -> None:
        log(self, line, *remark)
        if line["step"] in planned:
            function, *arguments = planned.pop(line["step"])
            function(*arguments)

    monkeypatch.setattr(Metrics, "log", log_and_call)

    def at_step(step: int, *call: Any) -> None:
        planned.clear()
        planned[step] = call

    return at_step


@pytest.fixture
def run_file(tiny: Callable[..., TrainConfig], write: Callable[[str], str]) -> Callable[..., dict]:
    """A function that trains with x.py, in the working directory, and options; returns the settings in the checkpoint.

    x.py has the shape and the data of tiny(), and 6 steps, of which the last 3 decay.
    """
    names = "n_layer n_head n_embd block_size batch_size learning_rate eval_iters dataset data_dir dtype".split()
    lines = [f"{name} = {getattr(tiny(), name)!r}" for name in names]
    counts = ["max_iters = 6", "lr_schedule = 'wsd'", "wsd_decay_iters = 3", "sample_tokens = 0", "log_interval = 1"]
    write("\n".join([*lines, *counts, ""]))

    def run(*args: str) -> dict:
        cfg = settings.load(TrainConfig, list(args))
        train(cfg)
        return checkpoint.load(Path(cfg.out_dir)).state["config"]

    return run
