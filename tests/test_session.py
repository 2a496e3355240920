import os
import signal
from pathlib import Path

import pytest
from test_distributed import LONG, output, run, start, wait_for_step, workers
from test_train import assert_same_end, logged

from folio import checkpoint
from folio.budget import Budget
from folio.metrics import Metrics
from train import train


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in Linux's /proc")
def test_two_fsdp_processes_fail_a_save_stop_by_a_signal_and_resume(tiny, tmp_path):
    """Stopping, gathering weights and a failed save concern every rank, though only rank 0 writes anything."""
    settings = dict(LONG, max_iters=300, lr_decay_iters=300, eval_interval=20, eval_iters=1, dropout=0.1)
    straight = tiny(**settings, parallel="fsdp", out_dir=str(tmp_path / "straight"))
    run(2, straight)
    stopped = tiny(**settings, parallel="fsdp", out_dir=str(tmp_path / "stopped"))
    Path(stopped.out_dir).mkdir()
    Path(stopped.out_dir, "step-000040").write_text("a file where a checkpoint's folder should be")
    torchrun = start(stopped, "--standalone", "--nproc_per_node=2")
    wait_for_step(stopped, 70)
    os.kill(workers(torchrun)[1], signal.SIGTERM)  # rank 1 asks, and both stop
    assert torchrun.wait(timeout=60) == 0, output(stopped)
    assert "step 40 could not be saved" in output(stopped) and "training continues" in output(stopped)
    state = checkpoint.load(Path(stopped.out_dir)).state
    assert state["stopped_by"] == "SIGTERM" and 70 <= state["step"] < 300
    assert state["best_step"] != 40  # a checkpoint that was not saved is not the best
    resumed = tiny(**settings, parallel="fsdp", out_dir=stopped.out_dir, init_from="resume")
    assert "resuming from" in run(2, resumed)
    assert [line["step"] for line in logged(stopped.out_dir)] == [line["step"] for line in logged(straight.out_dir)]
    assert_same_end(straight.out_dir, stopped.out_dir)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in Linux's /proc")
def test_a_request_of_one_process_is_obeyed_once(tiny):
    """What one process asks is agreed to a step later. It asked again meanwhile, so SIGUSR1 saved at two steps."""
    settings = dict(LONG, max_iters=100_000, eval_interval=100_000, save_interval_minutes=None, keep_last=10)
    cfg = tiny(**settings)
    torchrun = start(cfg, "--standalone", "--nproc_per_node=2")
    wait_for_step(cfg, 20)
    os.kill(workers(torchrun)[1], signal.SIGUSR1)
    wait_for_step(cfg, len(logged(cfg.out_dir)) + 40)
    os.kill(workers(torchrun)[0], signal.SIGTERM)
    assert torchrun.wait(timeout=60) == 0, output(cfg)
    assert len(list(Path(cfg.out_dir).glob("step-*"))) == 2  # one for SIGUSR1, one for SIGTERM


def test_a_run_resumed_after_its_time_is_evaluated_and_saved(tiny, monkeypatch):
    """A budget that was used up before a kill ended the resumed run without a step, an evaluation or a checkpoint."""
    settings = dict(max_iters=100, eval_interval=50, minutes=0.2, sample_tokens=0, save_interval_minutes=1e-9)
    log = Metrics.log

    def kill_at_step_5(self, line):
        log(self, line)
        if line["step"] == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "log", kill_at_step_5)
        with pytest.raises(KeyboardInterrupt):
            train(tiny(**settings))
    saved = checkpoint.last_state(Path(tiny().out_dir))
    assert saved["step"] == 4 and saved["best_step"] == 0
    monkeypatch.setattr(Budget, "max_iters", lambda self, step, schedule: step)  # no time is left
    result = train(tiny(**settings, init_from="resume"))
    assert result.step == result.max_iters == 5 and result.best_val_loss < 10
    assert checkpoint.last_state(Path(tiny().out_dir))["decisions"][-1] == [4, 5]
