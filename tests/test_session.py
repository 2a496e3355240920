import os
import signal
from pathlib import Path

import pytest
from test_distributed import LONG, output, run, start, wait_for_step, workers
from test_train import assert_same_end, logged

from folio import checkpoint


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
