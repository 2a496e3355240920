"""Small sweeps, whose runs take a second."""

from pathlib import Path

from folio.experiments.sweep.arguments import parse_sweep
from folio.experiments.sweep.definition import Sweep
from tools.sweep import SweepConfig
from train import TrainConfig

SMALL = (
    "--n_layer=1 --n_head=2 --n_embd=16 --block_size=16 --batch_size=4 --max_iters=8 --eval_interval=2 --log_interval=1"
)
SMALL += " --eval_iters=2 --dataset=verse --dtype=float32 --device=cpu --learning_rate=3e-3 --sample_tokens=0"


def small_sweep(data_dir: Path, out_dir: Path) -> list[str]:
    """Return the arguments of a sweep with trials of a second."""
    return [*SMALL.split(), f"--data_dir={data_dir}", f"--out_dir={out_dir}"]


def parse(words: list[str]) -> tuple[SweepConfig, Sweep]:
    """Parse a sweep's command line."""
    return parse_sweep(SweepConfig, TrainConfig, words)
