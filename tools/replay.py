"""Replay one step of a run: its sequences, the loss of each token, gradients and updates.

    python tools/replay.py out-shakespeare-char --step=1200
    python tools/replay.py out-shakespeare-char --step=1200 --json=step.json
    torchrun --standalone --nproc_per_node=2 tools/replay.py out-two --step=1200     a run with two processes

Step N has the number N in metrics.jsonl. It is replayed from the newest checkpoint before it, or from the start, with
the run's settings at that time. Its loss and gradient norm should be bitwise identical to the logged ones. The page,
replay-N.html, opens offline. Nothing else changes in the run's folder, where another process may be training.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import folio.machine.openmp  # noqa: E402, F401  # isort: skip  (before torch)
import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from folio import UserError  # noqa: E402
from folio.base.files import write_json  # noqa: E402
from folio.base.number_format import counted, format_seconds  # noqa: E402
from folio.base.progress import progress_bar  # noqa: E402
from folio.base.settings import NonEmptyStr, PositiveInt, Settings, run_script  # noqa: E402
from folio.base.terminal import say  # noqa: E402
from folio.base.workers import under_torchrun  # noqa: E402
from folio.checkpoints.checkpoint import Checkpoint  # noqa: E402
from folio.checkpoints.find_runs import find_runs  # noqa: E402
from folio.checkpoints.training_data import open_training_mixture  # noqa: E402
from folio.data.tokenizer import Tokenizer  # noqa: E402
from folio.data.windows import Mixture  # noqa: E402
from folio.experiments import static_page  # noqa: E402
from folio.experiments.replay import Comparison, History, InMemoryCheckpoint, Part, StepRecorder  # noqa: E402
from folio.experiments.replay_report import Report, as_page, as_text  # noqa: E402
from folio.machine import distributed  # noqa: E402
from folio.machine.data_parallel import with_workers  # noqa: E402
from folio.machine.runtime import Runtime, resolve_runtime  # noqa: E402
from folio.training.graphs.step_graph import StepGraph  # noqa: E402
from folio.training.guard import JudgedStep  # noqa: E402
from folio.training.loader import BatchLoader, BatchShape  # noqa: E402
from folio.training.planning.data import unknown_order  # noqa: E402
from folio.training.planning.resolve import meta_model, model_config, resident_memory  # noqa: E402
from folio.training.planning.resume import load_weights  # noqa: E402
from folio.training.schedule import Schedule  # noqa: E402
from folio.training.setup import LossFunction, build_run, new_state  # noqa: E402
from folio.training.state import TrainState  # noqa: E402
from train import TrainConfig, train_step  # noqa: E402


@dataclass(frozen=True)
class ReplayConfig(Settings):
    # --- step ---
    run: tuple[str, ...] = ()  # the run's folder
    step: PositiveInt | None = None  # step number in metrics.jsonl, from 1
    data_dir: str | None = None  # folder of the data sets, used if the training data has moved
    # --- output ---
    output: NonEmptyStr | None = None  # file of the page; None: replay-STEP.html in the run's folder
    json: NonEmptyStr | None = None  # also write the report to this file
    # --- machine ---
    device: NonEmptyStr | None = None  # "cpu", "cuda", "cuda:1", "mps", "auto"; None: as in training
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None  # dtype of matmuls; None: as in training
    backend: str = "nccl"  # torch.distributed backend; without GPUs always gloo

    def problems(self) -> list[tuple[str, str]]:
        """Require a run and a step."""
        example = "python tools/replay.py out-shakespeare-char --step=1200"
        problems = [("run", f"name one run's folder, as in {example}")] if len(self.run) != 1 else []
        return problems if self.step else [*problems, ("step", f"name a step, as in {example}")]


class Training(NamedTuple):
    """The arguments of train.train_step for a part of a run."""

    cfg: TrainConfig
    runtime: Runtime
    state: TrainState
    loss_fn: LossFunction
    loader: BatchLoader
    schedule: Schedule
    step: Callable[..., None]  # train_step, or the graph of it

    @classmethod
    def of(
        cls, cfg: TrainConfig, weights: Checkpoint | None, resumes: bool, part: Part, runtime: Runtime, data: Mixture
    ) -> "Training":
        """Set up a part as train.train does. resumes: whether the optimizer's state comes with the weights."""
        config = model_config(cfg, weights, data)
        done = weights.state["step"] if resumes else 0
        resident = resident_memory(cfg, meta_model(cfg, config, runtime), runtime, data, done)
        batch = BatchShape.of(cfg.batch_size, cfg.accumulation, runtime.group, resident > 0)
        run = build_run(weights, config, cfg, data, runtime, batch)
        schedule = cfg.schedule(cfg.step_counts, part.record)
        state = new_state(run, cfg)
        if resumes:
            state.load(weights.state, weights.optimizer())
        if "skipped_sequences" in part.record and state.step == part.begin:
            state.next_sequence = part.record["skipped_sequences"][1]
        step = StepGraph(train_step) if cfg.step_graph else train_step
        return cls(cfg, runtime, state, run.loss_fn, run.loader, schedule, step)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return self.schedule.learning_rate_at(self.state.step)

    def train_step(self) -> None:
        rates = self.schedule.learning_rates_at(self.state.step)
        self.step(self.state, self.loss_fn, self.loader, rates, self.cfg.grad_clip, self.cfg.seed)

    def read_steps(self) -> list[JudgedStep]:
        """Return the guard's results for the steps since the last call."""
        guard = self.state.guard
        if not guard.judged:
            return []
        guard.send()
        return guard.read(self.state.step)

    def pause(self, tokenizer: Tokenizer) -> InMemoryCheckpoint:
        """Return a checkpoint in memory. All steps must have been read."""
        return InMemoryCheckpoint.of(self.state, tokenizer, {"model": asdict(self.state.model.config)})


def replay(args: ReplayConfig) -> None:
    """Replay a step and print the report; rank 0 also writes it. Raises UserError."""
    folder, step = find_single_run(args.run[0]), args.step
    history = History.of(folder, TrainConfig)
    history.require_step(step)
    saved = history.checkpoint_before(step)
    begin = saved.state["step"] if saved else 0
    parts = history.parts_between(begin, step)
    data = open_data(history, args.data_dir)
    runtimes = [resolve_part(part, args)[1] for part in parts]
    group = runtimes[-1].group
    group.require_same("checkpoints or data", [begin, data.hash[:8]])
    say(runtimes[-1].description)
    say(describe_work(history, begin, step))
    inexact_reasons = history.inexact_reasons(begin, step, runtimes)
    for reason in inexact_reasons:
        say(f"it may not be bitwise identical: {reason}")

    source = saved or initial_weights(history)  # start of the next part
    training: Training | None = None
    before: list[JudgedStep] = []  # the replayed steps except the last
    with progress_bar(total=step, initial=begin, unit="step") if group.rank == 0 else tqdm(disable=True) as bar:
        for part in parts:
            cfg, runtime = resolve_part(part, args)  # again: sets torch's modes and threads for this part
            if training:
                source = training.pause(history.newest.tokenizer)
            is_resumed = training is not None or saved is not None
            training = Training.of(cfg, source, is_resumed, part, runtime, data)
            while training.state.step < min(part.end, step - 1):
                training.train_step()
                bar.update()
                if training.state.step % 100 == 0:
                    before += training.read_steps()
            before += training.read_steps()
        learning_rate, epochs = training.learning_rate, data.epochs(training.state.next_sequence)
        recorder = StepRecorder(training.state, training.loss_fn, training.loader)
        training = training._replace(state=recorder.state, loss_fn=recorder.loss_fn)
        training.train_step()
        (judged,) = training.read_steps()
        if judged.loss is None:
            raise UserError(f"step={step}: it has no targets, so it has no loss and changed no weights; choose another")
        sequences, parameters = recorder.sequences(), recorder.parameters()  # collective calls
        bar.update()

    report = Report(
        run=folder.resolve().name,
        step=step,
        start=describe_start(begin, history),
        comparison=Comparison.of(before, judged, learning_rate, history.lines, inexact_reasons),
        grad_clip=training.cfg.grad_clip,
        skipped=recorder.skip_reason(judged, training.cfg.skip_spikes),
        epochs=epochs,
        sequences=sequences,
        parameters=parameters,
        tokenizer=history.newest.tokenizer,
    )
    output = Path(args.output or folder / f"replay-{step}.html")
    try:
        if group.rank == 0:
            write_report(report, output, args.json)
    finally:  # print the report even if a file cannot be written
        print(f"\n{as_text(report)}\n")
    say(f"{output}: open it in a browser")


def find_single_run(name: str) -> Path:
    """Return the folder of the run that a name or pattern matches. Raises UserError."""
    runs = find_runs(name)
    if len(runs) > 1:
        raise UserError(f"{name} matches {len(runs)} folders; name one run: {runs[0]}")
    return Path(runs[0])


def resolve_part(part: Part, args: ReplayConfig) -> tuple[TrainConfig, Runtime]:
    """Return a part's settings on this machine, and its runtime. Sets torch's modes and number of threads.

    Raises UserError.
    """
    cfg, resolved = part.cfg, part.record["resolved"]
    device = args.device or (resolved["device"] if cfg.device == "auto" else cfg.device)
    parallel = cfg.parallel if under_torchrun() else "ddp"
    cfg = cfg.replace(device=device, dtype=args.dtype or cfg.dtype, parallel=parallel)
    torch.set_num_threads(part.record["threads"])
    runtime = resolve_runtime(cfg.device, cfg.dtype, cfg.compile, cfg.deterministic, resolved, None, args.backend)
    return cfg, with_workers(runtime, None, cfg.batch_size, cfg.block_size * cfg.n_embd, resolved)


def open_data(history: History, data_dir: str | None) -> Mixture:
    """Open the run's training data. Raises UserError if it is missing or has changed, or was read in another order."""
    try:
        data = open_training_mixture(history.newest, data_dir)
        for part in history.parts:
            if order := unknown_order(part.cfg, part.record, data):
                raise UserError(order)
        return data
    except UserError as error:
        raise UserError(f"{history.folder} cannot be replayed: {error}") from None


def initial_weights(history: History) -> Checkpoint | None:
    """Load the run's initial weights; None: random weights. Raises UserError if they cannot be loaded."""
    if history.init_from in ("scratch", None):
        return None
    try:
        return load_weights(history.init_from)
    except UserError as error:
        raise UserError(
            f"{history.folder} has no checkpoint before this step, and the weights that it started from cannot be "
            f"loaded: {error}"
        ) from None


def describe_start(begin: int, history: History) -> str:
    if begin:
        return f"the checkpoint of step {begin:,}"
    origin = history.init_from
    return f"step 0, {'random weights' if origin in ('scratch', None) else f'the weights of {origin}'}"


def describe_work(history: History, begin: int, step: int) -> str:
    """Describe the number of steps to replay, and the estimated time."""
    steps, speed = step - begin, history.steps_per_second
    line = f"replaying {counted(steps, 'step')} from {describe_start(begin, history)}"
    if speed is None:
        return f"{line}; the run's speed is unknown"
    return f"{line}: about {format_seconds(steps / speed)}, at the run's {speed:.3g} steps per second"


def write_report(report: Report, output: Path, json: str | None) -> None:
    """Write the page and, if given, the JSON file. Raises UserError."""
    try:
        static_page.write(output, as_page(report))
    except OSError as error:
        raise UserError(f"output={output} cannot be written ({error}); choose another --output") from None
    if json:
        try:
            write_json(Path(json), report.to_json())
        except OSError as error:
            raise UserError(f"json={json} cannot be written ({error}); choose another --json") from None


def main(cfg: ReplayConfig) -> None:
    try:
        replay(cfg)
    except KeyboardInterrupt as stop:
        stop.args = ("nothing was written",)
        raise
    distributed.destroy_process_group()


if __name__ == "__main__":
    run_script(main, ReplayConfig, needs_output=False)
