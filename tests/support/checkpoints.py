"""Checkpoints without a model, which are written at once."""

from pathlib import Path

import torch

from folio.base.files import read_json
from folio.checkpoints import checkpoint, run_folder
from folio.data.tokenizer import CharTokenizer
from tests.support.runs import blank_state

WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.ones(1, dtype=torch.bfloat16)}
OPTIMIZER = {"a.weight/exp_avg": torch.rand(2, 3), "a.weight/step": torch.tensor(3.0)}


def save(out_dir: Path, step: int, best: bool = True, keep_last: int = 1) -> Path:
    """Save a step of a run. best: whether its validation loss is the lowest of all steps; each is lower than before."""
    state = blank_state(step, next_sequence=7 * step, config={"start": "é\n"}, best_val_loss=1 / step)
    del state["format_version"]
    if not best:
        named = run_folder.RunFolder(out_dir).expected("best")
        best_before = read_json(named[0] / "state.json") if named else {"best_step": 0, "best_val_loss": None}
        state |= {name: best_before[name] for name in ("best_step", "best_val_loss")}
    out_dir.mkdir(parents=True, exist_ok=True)
    return checkpoint.save(out_dir, step, WEIGHTS, OPTIMIZER, CharTokenizer("ab"), state, keep_last)
