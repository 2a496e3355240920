"""Time budgets: planning step counts, and keeping a run within its time."""

import random
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

import train as train_script
from folio import UserError
from folio.base import settings
from folio.base.settings import COMMAND_LINE
from folio.checkpoints import checkpoint, run_folder
from folio.training import session
from folio.training.planning import budget, data, resolve
from folio.training.planning.budget import (
    ENDING_SECONDS,
    EVALUATION_SHARE,
    FINAL_SAMPLE_TOKENS,
    Budget,
    affordable_tokens,
    evaluation_seconds,
    with_time_budget,
)
from folio.training.schedule import STEP_COUNTS, Schedule, StepCounts
from folio.training.session import Session
from tests.support.runs import assert_same_run, read_metrics, set_losses
from tests.support.simulated import SimulatedMachine, assert_on_time
from train import TrainConfig, train

# --- planning ---------------------------------------------------------------------------------------------------------


def counts_within(
    cfg: TrainConfig, seconds: float, step_seconds: float, val_tokens: int = 0, origins: dict | None = None
) -> StepCounts:
    """The step counts that fit into this time."""
    scaling = cfg.step_counts.scaling_with_max_iters(origins or {})
    evaluation = evaluation_seconds(val_tokens, cfg.step_tokens, step_seconds)
    return with_time_budget(cfg.step_counts, cfg.minutes, seconds, step_seconds, evaluation, scaling, 10)[0]


def test_a_time_budget_scales_all_step_counts():
    recipe = TrainConfig(block_size=10, batch_size=2, max_iters=1000, warmup_iters=50, eval_interval=500, minutes=1)
    recipe = replace(recipe, lr_schedule="wsd", wsd_decay_iters=700)
    scaled = StepCounts(600, warmup_iters=30, wsd_decay_iters=420, eval_interval=300, lr_decay_iters=None)
    assert counts_within(recipe, 61, step_seconds=0.1) == scaled
    assert counts_within(recipe, 71, step_seconds=0.1, val_tokens=1200).max_iters == 640  # 3 evaluations of 2 s
    eval_interval_is_set = dict(eval_interval=COMMAND_LINE)  # an evaluation of 2 s every 500 steps
    assert counts_within(recipe, 57.01, 0.1, 1200, eval_interval_is_set).max_iters == 500
    assert counts_within(replace(recipe, warmup_iters=0), 61, 0.1).warmup_iters == 0
    odd = counts_within(recipe, 57.95, step_seconds=0.1)  # an eval_interval rounded down would add a third evaluation
    assert (odd.max_iters, odd.eval_interval) == (569, 285)


def test_a_part_of_a_large_validation_set_is_evaluated():
    """A single evaluation took 65 of 90 seconds."""
    assert affordable_tokens(1, [10**6], 1e-6) is None  # 1 s
    assert affordable_tokens(1, [10**6], 2.9e-6) is None and affordable_tokens(1, [10**6], 3.1e-6) == 2**19  # 2 in 6 s
    assert affordable_tokens(1, [2**20], 1e-5) == 2**18
    assert affordable_tokens(1, [2**20, 1000], 1e-5) == 2**18
    assert affordable_tokens(1, [10**9], 1.0) == 2**14 and affordable_tokens(1, [1000], 1.0) is None  # not fewer


def test_a_run_evaluates_the_same_part_throughout(tiny, monkeypatch, capsys):
    monkeypatch.setattr(budget, "MIN_VAL_TOKENS", 128)
    cfg = tiny(minutes=0.1, max_iters=100, eval_interval=5, eval_iters=None, patience=None)
    with monkeypatch.context() as patch:
        SimulatedMachine(patch, lambda step: 0.1, lambda step: 0.1)
        for module in (data, resolve):
            patch.setattr(module, "evaluation_seconds", lambda tokens, *rest: tokens / 1000)
        train(cfg)
    out = capsys.readouterr().out
    assert "validation: 256 of 2,064 tokens, in evenly spaced contexts, the same ones throughout" in out
    state = checkpoint.load(Path(cfg.out_dir)).state
    assert state["parts"][-1]["max_val_tokens"] == 256
    train(cfg.replace(init_from="resume", max_iters=state["step"] + 2, minutes=None))
    assert "other text" not in capsys.readouterr().out
    assert checkpoint.load(Path(cfg.out_dir)).state["parts"][-1]["max_val_tokens"] == 256


@pytest.mark.parametrize(
    "val_tokens, origins, evaluations, max_iters",
    [
        (900, {}, 3, 520),  # 1.5 s each; 4 are a tenth
        (900, {"eval_interval": COMMAND_LINE}, 3, 520),
        (12000, {}, 1, 380),  # 20 s, which is more than a tenth
    ],
)
def test_evaluations_take_at_most_a_tenth_of_the_time(val_tokens, origins, evaluations, max_iters):
    """A budget with slow evaluations was refused."""
    recipe = TrainConfig(block_size=10, batch_size=2, max_iters=1000, warmup_iters=50, eval_interval=100, minutes=1)
    counts = counts_within(recipe, 59, 0.1, val_tokens, origins)
    assert (counts.evaluations, counts.max_iters) == (evaluations, max_iters)


@pytest.mark.parametrize(
    "args, counts",
    [
        (["--minutes=1", "--eval_interval=50"], dict(eval_interval=50, warmup_iters=None)),
        (["--minutes=1", "--warmup_iters=7"], dict(eval_interval=60, warmup_iters=7)),
        (["--minutes=1", "--max_iters=1000", "--warmup_iters=50"], dict(eval_interval=60, warmup_iters=30)),
        (["x.py", "--minutes=1", "--eval_interval=50"], dict(eval_interval=50, warmup_iters=12)),
        (["x.py", "--minutes=1", "--max_iters=1000"], dict(eval_interval=240, warmup_iters=12)),
    ],
)
def test_a_time_budget_keeps_counts_of_the_command_line(tmp_path, monkeypatch, args, counts):
    """A count of the command line was scaled from the default max_iters of 600,000: --eval_interval=50 became 1."""
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text("dataset = 'a'\nmax_iters = 500\nwarmup_iters = 10\neval_interval = 200\n")
    cfg = settings.load(TrainConfig, args)
    scaled = counts_within(cfg, 601, step_seconds=1.0, origins=cfg.origins)
    assert scaled.max_iters == 600 and {name: getattr(scaled, name) for name in counts} == counts


def test_a_run_with_a_time_budget_equals_a_run_with_its_step_counts(tiny, monkeypatch, tmp_path, at_step):
    """Measuring steps changes nothing. Resuming keeps the plan, without measuring again."""
    SimulatedMachine(monkeypatch, lambda step: 0.3, lambda step: 0.0, trains=True)
    measured, measure_step = [], train_script.measure_step

    def measure_but_return_200_ms(*args):
        measured.append(measure_step(*args))
        return 0.2

    monkeypatch.setattr(Budget, "plan", lambda self, step, schedule: (schedule.max_iters, 0))  # never replanned
    monkeypatch.setattr(train_script, "measure_step", measure_but_return_200_ms)
    cfg = tiny(minutes=0.15, optimizer="muon", eval_interval=4)
    uninterrupted, stopped = (replace(cfg, out_dir=str(tmp_path / name)) for name in ("uninterrupted", "stopped"))
    train(uninterrupted)
    config = checkpoint.load(Path(uninterrupted.out_dir)).state["config"]
    counts = {name: config[name] for name in STEP_COUNTS}
    evaluation = evaluation_seconds(4 * 4 * 32, 4 * 32, step_seconds=0.2)
    available = 60 * 0.15 - 3 * 0.3 - ENDING_SECONDS - 3 * evaluation  # 3 measured steps; 2 evaluations and the first
    assert counts["max_iters"] == int(available / 0.2) and measured == [pytest.approx(0.3)]
    with_counts = replace(cfg, minutes=None, **counts)
    train(with_counts)
    assert_same_run(uninterrupted.out_dir, with_counts.out_dir)
    at_step(2, signal.raise_signal, signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(resolve, "with_time_budget", lambda *args: (StepCounts(**counts), False))
        train(stopped)
    assert run_folder.last_state(Path(stopped.out_dir))["step"] == 3 and len(measured) == 2
    train(replace(stopped, init_from="resume"))
    assert len(measured) == 2
    assert_same_run(stopped.out_dir, with_counts.out_dir)


def simulate_samples(monkeypatch, machine, token_seconds: float, first: float = 0.0) -> list[float]:
    """Let samples take this time per token, and the first one additional time. Returns the seconds of each token."""
    sampling, starts = [], iter([first])

    def sample(model, tokenizer, runtime, seed, tokens):
        machine.now += next(starts, 0.0)
        for _ in range(tokens):
            machine.now += token_seconds
            sampling.append(token_seconds)
            yield "x"

    monkeypatch.setattr(train_script, "sample_text", sample)
    monkeypatch.setattr(session, "FINAL_SAMPLE_TOKENS", FINAL_SAMPLE_TOKENS)
    return sampling


SPEEDS = {"fast": (0.1, 0.002), "ordinary": (0.5, 0.01), "slow": (4.0, 0.08)}  # seconds: step, token of a sample
SMALLEST = dict(n_layer=1, n_head=1, n_embd=8, block_size=8, batch_size=1, dropout=0.0, max_iters=100)


@pytest.mark.parametrize(
    "speed, minutes",
    [("fast", 0.1), ("fast", 5), ("ordinary", 0.1), ("ordinary", 1), ("ordinary", 60), ("slow", 1), ("slow", 60)],
)
@pytest.mark.parametrize("val_batches", [1, 100])
def test_a_run_of_any_length_keeps_its_minutes(tiny, monkeypatch, capsys, minutes, speed, val_batches):
    """Evaluations and samples took too long, or the budget was refused, and short budgets were exceeded.

    The model does not train: only the clock advances. An evaluation takes three times as long as forecast.
    """
    step_seconds, token_seconds = SPEEDS[speed]
    evaluation, seconds, evaluating = val_batches * step_seconds, 60 * minutes, []
    machine = SimulatedMachine(monkeypatch, lambda step: step_seconds, lambda step: evaluation)
    sampling = simulate_samples(monkeypatch, machine, token_seconds)

    def evaluate(*args):
        machine.now += evaluation
        evaluating.append(evaluation)
        return {"val_loss": 3.0}

    monkeypatch.setattr(train_script, "evaluate", evaluate)
    monkeypatch.setattr(resolve, "evaluation_seconds", lambda *args: evaluation / 3)
    monkeypatch.setattr(checkpoint, "save", lambda *args: None)
    try:
        result = train(tiny(**SMALLEST, minutes=minutes, eval_interval=10, sample_tokens=50, log_interval=10**6))
    except UserError as error:
        assert seconds < 4 * (step_seconds + evaluation) + 2 and "it is too short" in str(error)
        return
    last = evaluating[-1] + FINAL_SAMPLE_TOKENS * token_seconds  # the last evaluation and sample are not limited
    assert result.step == result.max_iters
    assert machine.now < seconds + last + step_seconds
    others = sum(evaluating[:-1]) + sum(sampling[:-FINAL_SAMPLE_TOKENS])
    assert others <= EVALUATION_SHARE * seconds + 2 * evaluation
    assert capsys.readouterr().out.count("steps instead of") <= len(evaluating)
    if val_batches == 1 and minutes >= 5 and speed != "slow":
        assert_on_time(machine.now, minutes, step_seconds, last)
        assert 9 <= len(evaluating) <= 12


def test_the_suggestions_for_a_short_budget_work(seed):
    """It suggested --eval_iters=-10, or a number with which the budget was still too short."""
    rng, steps = random.Random(seed), {"minutes": [], "eval_iters": []}
    while len(steps["minutes"]) < 200:
        minutes, spent, step, evaluation = (10 ** rng.uniform(*ends) for ends in ((-2, 1), (-1, 2), (-3, 2), (-2, 3)))
        batches, recipe = rng.randint(1, 1000), StepCounts(1000, eval_interval=100)

        def plan(minutes: float, n: int) -> int:
            """The steps that fit if an evaluation has n batches."""
            times = 60 * minutes - spent, step, evaluation / batches * n  # noqa: B023
            return with_time_budget(recipe, minutes, *times, {}, n)[0].max_iters  # noqa: B023

        try:
            plan(minutes, batches)
        except UserError as error:
            remedies = dict(re.findall(r"--(\w+)=([-\d.]+)", str(error)))
            steps["minutes"].append(plan(float(remedies["minutes"]), batches))
            if n := int(remedies.get("eval_iters", 0)):
                assert 1 <= n < batches and evaluation / batches * n <= 0.1 * 60 * minutes
                steps["eval_iters"].append(plan(minutes, n))
    assert all(min(counts) >= 1 for counts in steps.values()), steps


def test_a_plan_leaves_time_for_evaluations_checkpoints_and_the_end(monkeypatch):
    """Checkpoints could be left out, so that runs took longer than their minutes."""
    monkeypatch.setattr(time, "perf_counter", lambda: 1000.0)
    times = dict(step_seconds=1.0, evaluation_seconds=2.0, saving_seconds=3.0, ending_seconds=10.0, spent=90.0)
    schedule = Schedule(StepCounts(1000, eval_interval=100))
    assert Budget(10, **times).plan(0, schedule) == (600 - 90 - 10 * (2 + 3) - 10, 0)


@pytest.mark.parametrize("compiles", [False, True])
def test_compiling_does_not_count_as_an_evaluation(compiles):
    """The first evaluation compiled for 40 s, so that the run had only one of ten evaluations."""
    run = mock.Mock()
    run.runtime.compile, run.data.tokenizer.vocab_size, run.cfg.snapshots = compiles, 5, 0
    run.plan.head_start = None
    Session.log_start(run, {"val_loss": 1.0})
    assert run.plan.budget.end_evaluation.called != compiles


@pytest.mark.parametrize("seconds", [0, 60])
def test_an_incomplete_sample_is_not_timed(seconds):
    """The time per token was underestimated, and with it the end of the run."""
    run = mock.Mock()
    run.plan.budget.sample_deadline.return_value = time.perf_counter() + seconds
    run.cfg.sample_tokens = 100
    Session.sample(run)
    assert run.plan.budget.end_sample.call_args.args[0] == (100 if seconds else 0)


# --- a run on a simulated machine -------------------------------------------------------------------------------------


SLOWER_SOON = "three times slower soon"
MACHINES = {  # seconds per step and per evaluation
    "constant speed": (lambda step: 0.1, lambda step: 0.5),
    "three times slower from the middle": (lambda step: 0.1 if step < 150 else 0.3, lambda step: 0.5),
    SLOWER_SOON: (lambda step: 0.1 if step < 40 else 0.3, lambda step: 0.5 if step < 40 else 1.5),
    "twice as fast from the middle": (lambda step: 0.1 if step < 100 else 0.05, lambda step: 0.5),
    "a pause of five seconds": (lambda step: 5.0 if step == 100 else 0.1, lambda step: 0.5),
    "evaluations that take much longer than planned": (lambda step: 0.1, lambda step: 2.0),
}


@pytest.mark.parametrize(
    "name, asynchronous", [*((name, True) for name in MACHINES), ("constant speed", False), (SLOWER_SOON, False)]
)
def test_a_run_keeps_its_minutes_if_the_speed_of_the_machine_changes(tiny, monkeypatch, name, asynchronous):
    """--minutes=2 took over 6 if the machine slowed down after the first two seconds, in which it was measured."""
    machine = SimulatedMachine(monkeypatch, *MACHINES[name], asynchronous)
    recipe = dict(eval_interval=20, lr_schedule="wsd", wsd_decay_iters=50, warmup_iters=5)
    cfg = tiny(**recipe, **SMALLEST, minutes=1, sample_tokens=0, log_interval=7 if asynchronous else 1)
    train(cfg)
    assert_on_time(machine.now, 1, MACHINES[name][0](machine.steps), MACHINES[name][1](machine.steps))
    state = checkpoint.load(Path(cfg.out_dir)).state
    decisions, metrics = state["parts"][-1]["decisions"], read_metrics(cfg.out_dir)
    assert decisions[0][0] == 0 and len(decisions) < 12 and state["step"] == decisions[-1][1]
    evaluated_steps = [line["step"] for line in metrics if line["val_loss"] is not None]
    minimum, maximum = (2, 3) if "evaluations" in name else (4, 7)  # the recipe's, or a tenth of the time
    assert minimum <= len(evaluated_steps) <= maximum
    rates = [line["lr"] for line in metrics]
    decay = (rates[-2] - rates[-1]) / (metrics[-1]["step"] - metrics[-2]["step"])  # per step
    assert max(rates) == cfg.learning_rate and rates[-1] - decay == pytest.approx(cfg.learning_rate / 10)
    counts = StepCounts(**{name: state["config"][name] for name in STEP_COUNTS})
    schedule = Schedule(counts, "wsd", cfg.learning_rate, cfg.min_lr, decisions)
    if name == "constant speed":  # only the estimate of evaluations is corrected
        steps = (1 + len(evaluated_steps)) * 0.5 / 0.1  # in the time of all evaluations
        assert all(abs(max_iters - decisions[0][1]) <= steps for _, max_iters in decisions)
    assert rates == [schedule.learning_rate_at(line["step"] - 1) for line in metrics]


def test_decisions_lost_by_a_kill_are_made_again(tiny, monkeypatch):
    """Decisions after the checkpoint are made again, so resuming is not exact."""
    SimulatedMachine(monkeypatch, lambda step: 0.1 if step < 60 else 0.4, lambda step: 0.2)
    settings = dict(**SMALLEST, eval_interval=10, minutes=0.5, sample_tokens=0)
    decide, lost_decisions = Schedule.decide, []

    def decide_and_kill(self, step, max_iters):
        evaluates = self.evaluates(step)
        decide(self, step, max_iters)
        if step and not evaluates:  # an evaluation would save the decision
            lost_decisions.append(step)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Schedule, "decide", decide_and_kill)
        train(tiny(**settings))
    before = checkpoint.load(Path(tiny().out_dir)).state
    assert before["config"]["eval_interval"] == 26 and 0 < before["step"] < lost_decisions[0]
    assert all(step <= before["step"] for step, _ in before["parts"][-1]["decisions"])
    assert before["stopped_by"] is None and before["budget"]["spent"] > 0
    train(tiny(**settings, init_from="resume"))
    after = checkpoint.load(Path(tiny().out_dir)).state
    first, resumed = after["parts"]
    saved_decisions = before["parts"][0]["decisions"]
    assert first["decisions"] == saved_decisions == resumed["decisions"][: len(saved_decisions)]
    assert resumed["from_step"] == before["step"] and not resumed["exact"]
    assert before["budget"]["spent"] < after["budget"]["spent"]
    assert_on_time(after["budget"]["spent"], 0.5, step_seconds=0.4, evaluation_seconds=0.2)


def test_a_budget_includes_the_start_of_a_resumed_run_and_the_last_sample(tiny, monkeypatch, at_step):
    """A resumed run did not count the time of its start. The estimate ignored the last sample of 300 tokens."""
    machine = SimulatedMachine(monkeypatch, lambda step: 0.1, lambda step: 0.5)
    simulate_samples(monkeypatch, machine, 0.02)
    settings = dict(**SMALLEST, eval_interval=50, minutes=1, sample_tokens=20)
    at_step(120, signal.raise_signal, signal.SIGINT)
    train(tiny(**settings))
    spent = checkpoint.load(Path(tiny().out_dir)).state["budget"]["spent"]
    resumed_at, open_state = machine.now, train_script.open_state

    def slow_open_state(*args):
        machine.now += 20.0
        return open_state(*args)

    monkeypatch.setattr(train_script, "open_state", slow_open_state)
    train(tiny(**settings, init_from="resume"))
    assert_on_time(spent + machine.now - resumed_at, 1, step_seconds=0.1, evaluation_seconds=0.5)


def test_compiling_the_decoder_does_not_count_as_sampling(tiny, monkeypatch):
    """A second of compiling, attributed to 20 tokens of a sample, reserved 15 s for the 300 tokens at the end."""
    machine = SimulatedMachine(monkeypatch, lambda step: 0.1, lambda step: 0.1)
    simulate_samples(monkeypatch, machine, 0.001, first=1.0)
    train(tiny(**SMALLEST, eval_interval=50, minutes=0.5, sample_tokens=20))
    assert_on_time(machine.now, 0.5, step_seconds=0.1, evaluation_seconds=1.12)  # with compiling and 20 tokens


@pytest.mark.parametrize("slowdown, is_reported", [(1.05, False), (1.5, True)])
def test_only_large_changes_of_the_number_of_steps_are_printed(tiny, monkeypatch, capsys, slowdown, is_reported):
    """A run of a minute printed eleven lines about changes of a few percent."""
    SimulatedMachine(monkeypatch, lambda step: 0.1 * (slowdown if step > 90 else 1), lambda step: 0.1)
    train(tiny(**SMALLEST, eval_interval=10, minutes=1, sample_tokens=0))
    lines = re.findall("the run now has .* instead of", capsys.readouterr().out)
    assert (0 < len(lines) < 4) if is_reported else not lines


def test_a_run_whose_time_is_used_up_ends_at_once(tiny, monkeypatch):
    """It took at least one more step, which may be slow."""
    machine = SimulatedMachine(monkeypatch, lambda step: 1.0 if step < 30 else 20.0, lambda step: 0.0)
    train(tiny(max_iters=100, eval_interval=100, minutes=1, sample_tokens=0))
    assert machine.now <= 60 + 20
    state = checkpoint.load(Path(tiny().out_dir)).state
    assert state["step"] == state["parts"][-1]["decisions"][-1][1]
    assert read_metrics(tiny().out_dir)[-1]["val_loss"] is not None


def test_a_run_resumed_after_its_time_is_used_up_is_evaluated_and_saved(tiny, monkeypatch, at_step):
    """The resumed run ended without a step, an evaluation or a checkpoint."""
    SimulatedMachine(monkeypatch, lambda step: 0.1, lambda step: 0.5)
    settings = dict(max_iters=100, eval_interval=50, minutes=0.2, sample_tokens=0, save_interval_minutes=1e-9)
    at_step(5, mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        train(tiny(**settings))
    saved = run_folder.last_state(Path(tiny().out_dir))
    assert saved["step"] == 4 and saved["best_step"] == 0
    monkeypatch.setattr(Budget, "plan", lambda self, step, schedule: (step, 0))  # no time is left
    result = train(tiny(**settings, init_from="resume"))
    assert result.step == result.max_iters == 5 and result.best_val_loss < 10
    assert run_folder.last_state(Path(tiny().out_dir))["parts"][-1]["decisions"][-1] == [4, 5]


def test_the_last_step_is_saved_if_a_sample_uses_up_the_time(tiny, monkeypatch):
    """The run ended after an evaluation that was not the best, so that it was not saved."""
    machine = SimulatedMachine(monkeypatch, lambda step: 0.1, lambda step: 0.1)
    set_losses(monkeypatch, *range(3, 30))
    at_evaluation = iter([0.1, 100.0])

    def sample(model, tokenizer, runtime, seed, tokens):
        machine.now += next(at_evaluation, 0.1)
        yield "x"

    monkeypatch.setattr(train_script, "sample_text", sample)
    settings = dict(eval_interval=20, minutes=1, sample_tokens=5, always_save_checkpoint=False)
    result = train(tiny(**SMALLEST, **settings))
    state = run_folder.last_state(Path(tiny().out_dir))
    assert state["step"] == result.step == result.max_iters and state["stopped_by"] == "its end"
    evaluated_steps = [line["step"] for line in read_metrics(tiny().out_dir) if line["val_loss"] is not None]
    assert evaluated_steps[1:] == [result.step - 1, result.step]


def test_a_checkpoint_excludes_decisions_made_while_it_is_written(tiny, monkeypatch):
    """The writing thread shared the list with the loop, which appended to it."""
    SimulatedMachine(monkeypatch, lambda step: 0.1 if step < 60 else 0.4, lambda step: 0.5)
    decided, save, decide = threading.Event(), checkpoint.save, Schedule.decide

    def slow_save(out_dir, step, model, optimizer, tokenizer, state, *args):
        decided.clear()  # the decision of the evaluation before this save belongs in the checkpoint
        decided.wait(timeout=0.2)
        assert all(decision_step <= step for decision_step, _ in state["parts"][-1]["decisions"])
        return save(out_dir, step, model, optimizer, tokenizer, state, *args)

    def decide_and_notify(self, step, max_iters):
        decide(self, step, max_iters)
        decided.set()

    monkeypatch.setattr(checkpoint, "save", slow_save)
    monkeypatch.setattr(Schedule, "decide", decide_and_notify)
    train(tiny(**SMALLEST, eval_interval=30, minutes=0.5, sample_tokens=0))
