"""Compare two trained models, or two settings with several seeds each, and test whether the difference is significant.

    python tools/compare.py out-a out-b                                  two checkpoints
    python tools/compare.py out-a1,out-a2,out-a3 out-b1,out-b2,out-b3    two settings, with three seeds each
    python tools/compare.py "out-a*" "out-b*" --text=novel.txt --json=comparison.json
    python tools/compare.py out-translate out-finetuned --tasks=pairs    answers to held-out prompts

A side is one run, or several runs: separated by commas, or a quoted pattern. Two checkpoints are compared by a paired
t-test over documents, which does not account for the training seed. Settings are compared by a t-test over runs with
different training seeds: paired if both sides have the same seeds, and otherwise Welch's.

The measures are those of tools/evaluate.py; see its --help. docs/use/evaluation.md explains the tests.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import folio.machine.openmp  # noqa: E402, F401  # isort: skip  (before torch)
from folio.base.packages import require  # noqa: E402
from folio.base.roles import UNCOMPARED, names_with  # noqa: E402
from folio.base.settings import run_script  # noqa: E402
from folio.base.terminal import say, terminal_width  # noqa: E402
from folio.evaluation.answers import evaluate_baseline  # noqa: E402
from folio.evaluation.comparison import choose_design, choose_sides, compare  # noqa: E402
from folio.evaluation.measurement import MeasurementConfig, evaluate_model, name_problems, write_results  # noqa: E402
from folio.evaluation.scores import collect_results  # noqa: E402
from folio.evaluation.tables import format_results  # noqa: E402
from train import TrainConfig  # noqa: E402


@dataclass(frozen=True)
class CompareConfig(MeasurementConfig):
    # --- sides ---
    sides: tuple[str, ...] = ()  # SIDE SIDE: a run or what --init_from takes, or a,b,c or "out-a*" for several

    def problems(self) -> list[tuple[str, str]]:
        problems = super().problems() + name_problems("sides", self.sides)
        if "music" in self.task_names:
            problems.append(("tasks", "music cannot be compared; evaluate each run with tools/evaluate.py"))
        return problems


def main(cfg: CompareConfig) -> None:
    require("a comparison", "scipy")
    design = choose_design(choose_sides(cfg.sides), cfg.checkpoint, names_with(TrainConfig, UNCOMPARED))
    evaluations = [[evaluate_model(run, cfg) for run in side] for side in design.sides]
    models = [model for side in evaluations for model in side]
    if cfg.baseline:
        models.append(evaluate_baseline(cfg.baseline, models, cfg.group_fields))
    results = collect_results(models)
    print(format_results(models, results, terminal_width(sys.stdout)))
    comparisons = compare(evaluations, design)
    say("", *design.lines, *(comparison["sentence"] for comparison in comparisons))
    write_results(cfg, models, {**results, "sides": design.sides, "comparisons": comparisons})


if __name__ == "__main__":
    run_script(main, CompareConfig)
