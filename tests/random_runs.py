"""Runs of small models with random weights, as folders on disk."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from decoding import random_model

from folio import checkpoint
from folio.tokenizer import Tokenizer
from model import GPT


def save_run(folder: Path, tokenizer: Tokenizer, seed: int, settings: dict[str, Any] | None = None, **sizes) -> GPT:
    """Save a random model as step 20 of a run, and return it. sizes: fields of GPTConfig; settings: of the run."""
    model = random_model(seed, **{"vocab_size": tokenizer.vocab_size, **sizes})
    state: dict[str, Any] = {key: 0 for key in ("next_sequence", "best_step", "evaluations_since_best")}
    state |= {key: {} for key in ("resolved", "dataset", "guard", "grad_scaler", "versions")}
    state |= {"model": asdict(model.config), "config": settings or {}}
    checkpoint.save(folder, 20, dict(model.named_parameters()), {}, tokenizer, state, best=True)
    return model
