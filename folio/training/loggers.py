"""Programs that also show a run's metrics while it trains: wandb and TensorBoard."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from folio import UserError
from folio.base import packages
from folio.training.planning.train_settings import TrainSettings


class Logger:
    """Sends the metrics of a run to a program. The methods may raise any error of the program."""

    name: ClassVar[str]
    package: ClassVar[str]
    run_id: str | None = None  # under which the program continues a resumed run

    def __init__(self, out_dir: Path, step: int, config: dict[str, Any], run_id: str | None):
        """Start, or continue a resumed run. Raises UserError, or OSError if a file cannot be written.

        step: the last step that the run has kept; -1: none, for a new run. What was sent about later steps is obsolete.
        config: the settings to show. run_id: of the resumed run, or None.
        """

    def log(self, step: int, values: dict[str, float]) -> None:
        """Send values after a step, by name."""

    def sample(self, step: int, text: str) -> None:
        """Send a sample of the model."""

    def roll_back(self, step: int) -> None:
        """Continue after `step`: what was sent about later steps is obsolete."""

    def close(self, succeeded: bool) -> None:
        """Send what is left."""


class WandbLogger(Logger):
    """A run of wandb, whose charts have the steps of training on the horizontal axis.

    wandb has a step of its own, and ignores values unless it increases. It therefore differs from the step of training
    after a rollback, and after resuming from an earlier step. The obsolete values stay in the charts: wandb cannot
    remove them.
    """

    name, package = "wandb", "wandb"

    def __init__(self, out_dir: Path, step: int, config: dict[str, Any], run_id: str | None):
        import wandb

        try:
            self.run = wandb.init(
                project=config["wandb_project"],
                name=config["wandb_run_name"],
                id=run_id,
                resume="allow" if run_id else None,
                config=config,
                dir=str(out_dir),
            )
            self.run.define_metric("*", step_metric="step")
        except Exception as error:  # no login, no network, or any other error of the service
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"wandb_log=True: wandb cannot start ({reason}); use wandb login, WANDB_MODE=offline, or leave it out"
            ) from None
        self.run_id, self.next_step = self.run.id, self.run.starting_step

    def log(self, step: int, values: dict[str, float]) -> None:
        self.next_step = max(self.next_step, step)
        self.run.log({"step": step, **values}, step=self.next_step)
        self.next_step += 1

    def close(self, succeeded: bool) -> None:
        self.run.finish(exit_code=0 if succeeded else 1)


class TensorBoardLogger(Logger):
    """Event files in out_dir/tensorboard. They record what is obsolete, which TensorBoard does not show."""

    name, package = "TensorBoard", "tensorboard"

    def __init__(self, out_dir: Path, step: int, config: dict[str, Any], run_id: str | None):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(out_dir / "tensorboard"), purge_step=step + 1)
        settings = "".join(f"    {name} = {value!r}\n" for name, value in config.items())  # a code block of Markdown
        self.writer.add_text("settings", settings, step + 1)
        self.writer.flush()

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()  # a killed run keeps what its checkpoints do not repeat

    def sample(self, step: int, text: str) -> None:
        self.writer.add_text("sample", "".join(f"    {line}\n" for line in text.splitlines()), step)
        self.writer.flush()

    def roll_back(self, step: int) -> None:
        self.writer.close()  # the next value opens a new file
        self.writer.purge_step = step + 1

    def close(self, succeeded: bool) -> None:
        self.writer.close()


LOGGERS: Mapping[str, type[Logger]] = {"wandb_log": WandbLogger, "tensorboard_log": TensorBoardLogger}  # by setting


def require_packages(cfg: TrainSettings) -> None:
    """Raise UserError if the package of a logger is not installed."""
    for setting, logger in LOGGERS.items():
        if getattr(cfg, setting) and not cfg.eval_only:
            packages.require(f"{setting}=True", logger.package)


def start_loggers(out_dir: Path, step: int, config: dict[str, Any], run_id: str | None) -> list[Logger]:
    """Start the loggers that are enabled. The arguments are those of Logger."""
    return [logger(out_dir, step, config, run_id) for setting, logger in LOGGERS.items() if config[setting]]
