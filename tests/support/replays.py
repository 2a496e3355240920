"""Replayed steps of runs, and a report without a run."""

import json
import math
import shutil
from pathlib import Path

import numpy as np

from folio.checkpoints import run_folder
from folio.data.tokenizer import CharTokenizer
from folio.data.windows import Place
from folio.experiments.replay import Comparison, ParameterChange, SequenceLosses
from folio.experiments.replay_report import Report
from folio.training.guard import JudgedStep
from tools.replay import ReplayConfig, main


def replay(out_dir: str, step: int, **settings) -> dict:
    """Replay a step of a run. Returns the content of --json."""
    path = Path(out_dir).with_suffix(".json")
    main(ReplayConfig(run=(out_dir,), step=step, json=str(path), **settings))
    return json.loads(path.read_text(encoding="utf-8"))


def remove_older_checkpoints(out_dir: str) -> None:
    """Keep only the newest checkpoint of a run."""
    for path in run_folder.directories(Path(out_dir))[:-1]:
        shutil.rmtree(path)


SMALLEST = dict(n_layer=1, n_head=1, n_embd=8, batch_size=1, dropout=0.0)
CHARACTERS = "ab<&\n é'"


def random_report(rng: np.random.Generator, sequences: int = 5, T: int = 12) -> Report:
    """A report on a step with random losses: some masked, some not finite, and many equal."""

    def sequence(number: int) -> SequenceLosses:
        counted = rng.random(T) < 0.7
        losses = rng.choice([0.25, 1.5, 3.0, math.nan, math.inf, 0.125, 2.0], T).astype(np.float32)
        ids, guesses = rng.integers(len(CHARACTERS), size=T + 1), rng.integers(len(CHARACTERS), size=T)
        place = Place("verse", 0, 1, 40 * number)
        return SequenceLosses(number, place, ids, losses, guesses, rng.random(T), counted)

    comparison = Comparison(JudgedStep(3, 1.5, 2.0, False), {"loss": 1.5, "grad_norm": 2.0}, [], [], [])
    norms = [float(norm) for norm in (*rng.random(3), math.nan)]
    parameters = [ParameterChange(f"<{n}>", [2, 3], "AdamW", 1e-3, 0.1, norm, 1.0, 0.5) for n, norm in enumerate(norms)]
    losses = [sequence(7 + n) for n in range(sequences)]
    tokenizer = CharTokenizer(CHARACTERS)
    return Report("out", 3, "step 0", comparison, 1.0, None, {"verse": 0.5}, losses, parameters, tokenizer)
