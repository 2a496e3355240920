"""Tiny checkpoints without a model."""

from pathlib import Path
from typing import Any

import torch

from folio.base.files import read_json
from folio.checkpoints import checkpoint, run_folder
from folio.data.tokenizer import CharTokenizer
from tests.support.runs import blank_state

WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.ones(1, dtype=torch.bfloat16)}
OPTIMIZER = {"a.weight/exp_avg": torch.rand(2, 3), "a.weight/step": torch.tensor(3.0)}


def save(out_dir: Path, step: int, best: bool = True, keep_last: int = 1) -> Path:
    """Save a step of a run. best: whether it has the lowest validation loss so far, 1 / step."""
    state = blank_state(step, next_sequence=7 * step, config={"start": "é\n"}, best_val_loss=1 / step)
    if not best:
        previous = run_folder.RunFolder(out_dir).expected("best")
        best_state = read_json(previous[0] / "state.json") if previous else {"best_step": 0, "best_val_loss": None}
        state |= {name: best_state[name] for name in ("best_step", "best_val_loss")}
    out_dir.mkdir(parents=True, exist_ok=True)
    return save_state(out_dir, state, keep_last)


def save_state(out_dir: Path, state: dict[str, Any], keep_last: int = 1, replace: bool = False) -> Path:
    """Save a checkpoint with this state.json."""
    del state["format_version"]
    return checkpoint.save(out_dir, state["step"], WEIGHTS, OPTIMIZER, CharTokenizer("ab"), state, keep_last, replace)
