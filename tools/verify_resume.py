"""Verify on this machine that a run killed by SIGKILL resumes bitwise identically.

    python tools/verify_resume.py config/shakespeare_char.py --kills=20 --eval_interval=10 --eval_iters=1
    python tools/verify_resume.py config/shakespeare_char.py --processes=2 --device=cpu    kills one of two processes

Trains once without interruption. Then trains with the same settings, but is killed at random steps and resumed with
--init_from=resume. Compares weights, optimizer, data state and logged metrics bitwise. Prints a certificate, and exits
with 1 on any difference. Every setting of train.py is accepted; on a GPU, add --deterministic=True.
"""

import hashlib
import json
import platform
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import torch
from annotated_types import Ge, Le

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio.base.settings import PositiveInt, run_script  # noqa: E402
from folio.checkpoints import checkpoint  # noqa: E402
from folio.data.find_data import find_datasets  # noqa: E402
from folio.training.planning.resolve import versions  # noqa: E402
from lab.kill_and_resume import compare, finish, kill_and_resume, start  # noqa: E402
from train import TrainConfig  # noqa: E402


@dataclass(frozen=True)
class VerifyConfig(TrainConfig):
    # --- verification ---
    kills: PositiveInt = 20  # number of kills of the second run
    processes: PositiveInt = 1  # more than 1: train by torchrun, and kill a random process
    kills_in_write: Annotated[float, Ge(0), Le(1)] = 0.3  # fraction of kills during a checkpoint write
    work_dir: str | None = None  # folder of both runs; None: a temporary folder

    def problems(self) -> list[tuple[str, str]]:
        """Check the settings of training, and refuse a time budget."""
        if self.minutes:
            return [*super().problems(), ("minutes", "both runs must have the same length; give --max_iters")]
        return super().problems()


def main(cfg: VerifyConfig) -> None:
    find_datasets(cfg.dataset, cfg.data_dir)  # prepares missing data before the first run is timed
    with tempfile.TemporaryDirectory(prefix="verify-resume-", ignore_cleanup_errors=True) as temporary:
        folder = Path(cfg.work_dir or temporary)
        reference, killed = folder / "reference", folder / "killed"
        start_time = time.perf_counter()
        finish(start(cfg, reference, cfg.processes), reference)
        print(f"uninterrupted: {time.perf_counter() - start_time:.1f} s")
        in_write, lost = kill_and_resume(cfg, killed, cfg.kills, cfg.kills_in_write, cfg.processes)
        finish(start(cfg, killed, cfg.processes), killed)
        differences = compare(reference, killed)
        weights = checkpoint.load(killed).model
        digest = hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest()
        certificate = {
            "settings": {f.name: v for f in fields(TrainConfig) if (v := getattr(cfg, f.name)) != f.default},
            "computed": checkpoint.load(killed).state["parts"][-1]["resolved"],
            "processes": cfg.processes,
            "machine": f"{platform.platform()}, {platform.machine()}, {torch.get_num_threads()} threads",
            "versions": versions(),
            "kills": cfg.kills,
            "kills during a checkpoint write": in_write,
            "runs lost": lost,
            "differences": differences or "none: 0 bits of weights, optimizer, data state and logged numbers",
            "sha256 of the weights": digest,
        }
        print(json.dumps(certificate, indent=1, ensure_ascii=False))
        if differences or lost:
            raise SystemExit(1)


if __name__ == "__main__":
    run_script(main, VerifyConfig, needs_output=False)
