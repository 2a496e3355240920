"""Record the losses of a recipe's runs with several seeds, to which train.py compares other runs of the recipe.

    python train.py config/shakespeare_char.py --seed=1 --out_dir=out-1       and so on
    python lab/bench/reference_losses.py out-1 out-2 out-3 --recipe=config/shakespeare_char.py

Writes the validation losses after each evaluation to folio/training/reference_losses.json.
"""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.base.files import read_json, write_json  # noqa: E402
from folio.base.roles import WITHOUT_EFFECT, names_without  # noqa: E402
from folio.base.settings import NonEmptyStr, Settings, from_json, run_script  # noqa: E402
from folio.experiments.runs import Run  # noqa: E402
from folio.training.reference import FILE  # noqa: E402
from train import TrainConfig  # noqa: E402


@dataclass(frozen=True)
class ReferenceConfig(Settings):
    runs: tuple[str, ...] = ()  # folders of finished runs with the same settings and different seeds
    recipe: NonEmptyStr = "config/shakespeare_char.py"  # their config file, for messages

    def problems(self) -> list[tuple[str, str]]:
        """Require two runs."""
        example = "python lab/bench/reference_losses.py out-1 out-2 out-3 --recipe=config/shakespeare_char.py"
        return [] if len(self.runs) > 1 else [("runs", f"name two or more runs, as in {example}")]


def main(cfg: ReferenceConfig) -> None:
    runs = [Run.of(Path(folder)) for folder in cfg.runs]
    entries = []
    for run in runs:
        if run.status != "finished":
            raise UserError(f"{run.folder}: it has not finished; name finished runs")
        config = asdict(from_json(TrainConfig, run.config))  # with the defaults of newer settings
        settings = {name: config[name] for name in names_without(TrainConfig, WITHOUT_EFFECT)}
        steps = [step for _, step in run.trained_evaluations()]
        entries.append({"data": run.state["dataset"]["hash"], "settings": settings, "steps": steps})
    if any(entry != entries[0] for entry in entries) or len({run.config["seed"] for run in runs}) < len(runs):
        raise UserError(f"{', '.join(cfg.runs)}: they must differ only in their seeds")
    losses = {str(step): [] for step in entries[0].pop("steps")}
    for run in runs:
        for loss, step in run.trained_evaluations():
            losses[str(step)].append(round(loss, 4))
    others = [entry for entry in read_json(FILE) if entry["recipe"] != cfg.recipe] if FILE.exists() else []
    entry = {"recipe": cfg.recipe, **entries[0], "losses": losses}
    write_json(FILE, sorted([*others, entry], key=lambda entry: entry["recipe"]))
    print(f"{FILE}: {len(losses)} evaluations of {len(runs)} runs of {cfg.recipe}")


if __name__ == "__main__":
    run_script(main, ReferenceConfig)
