"""Worker processes, and processes that end with their parent."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from folio import UserError
from folio.base.settings import ROOT
from folio.base.workers import LAUNCHERS, TORCHRUN, check_launch, child_options, map_in_order
from tests.support import processes
from tests.support.waiting import wait_until

HEADER = f"""
import signal, sys, time
from pathlib import Path
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, processes inherit that it is ignored
sys.path[:0] = [{str(ROOT)!r}]
from folio.base.settings import run_script
"""
# Python can miss a signal that arrives just before a blocking call, until the call returns; so it sleeps briefly.
CHILD = f"{HEADER}\nrun_script(lambda arguments: [time.sleep(0.1) for _ in range(6000)])\n"
PARENT = """
import multiprocessing, threading
from folio.base.workers import map_in_order
from folio.data.find_data import run_script as prepare
from folio.experiments.sweep import trial
from lab import kill_and_resume
from lab.bench.timing import busy_processes
from train import TrainConfig

multiprocessing.set_start_method("fork", force=True)  # Linux's default until Python 3.13
results = map_in_order(time.sleep, [0] + [600] * 9, 2)
next(results)
kill_and_resume.ROOT = Path.cwd()
kill_and_resume.start(TrainConfig(dataset="a"), Path("out"))
trial.train_command = lambda folder, arguments, code: [sys.executable, "train.py"]
threading.Thread(target=trial.run_training, args=(Path(), [], {}, lambda *progress: "train")).start()
with busy_processes(2):
    prepare(Path("train.py"), Path())
"""
N_CHILDREN = 2 + 2 + 1 + 1 + 1


def is_running(child: psutil.Process) -> bool:
    """Whether a process is running. An ended one can remain a zombie until init reaps it."""
    try:
        return child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def has_ended(pipe: int) -> bool:
    """Whether no process has the pipe open for writing. The other threads of a zombie can hold it for an instant."""
    try:
        while os.read(pipe, 1 << 16):
            pass
    except BlockingIOError:
        return False
    return True


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals and no named pipes in folders")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_processes_end_when_their_parent_is_killed(number, tmp_path):
    """Workers and trials kept running. They held their parent's standard output, so that a pipe never closed."""
    (tmp_path / "train.py").write_text(CHILD)
    (tmp_path / "parent.py").write_text(HEADER + PARENT)
    output, errors, children = tmp_path / "output", tmp_path / "errors", []
    os.mkfifo(output)
    pipe = os.open(output, os.O_RDONLY | os.O_NONBLOCK)
    parent = processes.start([tmp_path / "parent.py"], [os.devnull, output, errors], cwd=tmp_path, daemon=False)
    try:
        wait_until(lambda: len(psutil.Process(parent.pid).children()) == N_CHILDREN or not parent.is_alive(), 60)
        children = psutil.Process(parent.pid).children()
        os.kill(parent.pid, number)
        assert processes.wait(parent) == -number, errors.read_text()
        with suppress(AssertionError):
            wait_until(lambda: not any(is_running(child) for child in children), 60)
        assert [(child, child.cmdline(), child.threads()) for child in children if is_running(child)] == []
        wait_until(lambda: has_ended(pipe), 60)
    finally:
        os.close(pipe)
        for child in children:
            if is_running(child):
                child.kill()
        parent.kill()
    assert len(children) == N_CHILDREN


def test_standard_input_of_a_child_is_empty(tmp_path):
    """Otherwise, processes started by a child inherit the pipe and block when they read from it."""
    code = "import os; from folio.base.workers import end_with_parent; end_with_parent(); print(os.read(0, 1))"
    (tmp_path / "parent.py").write_text(
        f"{HEADER}\nimport subprocess\nfrom folio.base.workers import child_options\n"
        f"subprocess.run([sys.executable, '-c', {code!r}], cwd={str(ROOT)!r}, check=True, **child_options())\n"
    )
    result = processes.run([tmp_path / "parent.py"], stdin="text")
    assert result.returncode == 0 and result.stdout == "b''\n", result.stderr


# --- workers ----------------------------------------------------------------------------------------------------------


def double(item: list[int], factor: int) -> list[int]:
    return [factor * number for number in item]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_results_are_in_the_order_of_the_items(workers):
    items = [[k] * (1 if k % 7 else 100_000) for k in range(40)]  # the larger ones do not fit into a pipe's buffer
    assert [result for _, result in map_in_order(double, items, workers, 2)] == [double(item, 2) for item in items]


def raise_on_two(item: int) -> int:
    if item == 2:
        raise UserError("two")
    return item


def test_an_exception_of_a_worker_is_raised_in_its_place():
    results = map_in_order(raise_on_two, range(9), 2)
    assert [next(results)[1], next(results)[1]] == [0, 1]
    with pytest.raises(UserError, match="two"):
        next(results)


@pytest.mark.parametrize("end", [os._exit, lambda _: os.kill(os.getpid(), signal.SIGKILL)])
def test_a_worker_that_ends_is_an_error(end):
    """A process that is killed because memory ran out must not leave the others waiting."""
    if sys.platform == "win32":
        pytest.skip("a lambda cannot be sent to another process")
    before = multiprocessing.active_children()
    with pytest.raises(UserError, match="a smaller --num_workers"):
        list(map_in_order(end, range(100), 2))
    assert {*multiprocessing.active_children()} <= {*before}


def test_a_worker_that_cannot_start_is_an_error(monkeypatch):
    """With `ulimit -n 18`, the second of two workers could not start, and Python's exit waited for the first one."""
    start, before, started = multiprocessing.Process.start, multiprocessing.active_children(), []

    def start_one(process):
        if started:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        start(process)
        started.append(process)

    monkeypatch.setattr(multiprocessing.Process, "start", start_one)
    with pytest.raises(UserError, match=r"num_workers=2: .*open files.* a smaller --num_workers"):
        list(map_in_order(str, range(9), 2))
    assert started and {*multiprocessing.active_children()} <= {*before}


def test_ctrl_c_while_the_workers_start_ends_them(monkeypatch):
    """They ran until Python's exit, which printed a traceback in 1 of 50 cases."""
    start, before, started = multiprocessing.Process.start, multiprocessing.active_children(), []

    def interrupt_and_start(process):
        if not started:  # a second signal could interrupt the end of the workers
            os.kill(os.getpid(), signal.SIGINT)
        started.append(process)
        start(process)

    monkeypatch.setattr(multiprocessing.Process, "start", interrupt_and_start)
    with pytest.raises(KeyboardInterrupt):
        next(map_in_order(str, [1], 2))
    assert {*multiprocessing.active_children()} <= {*before}


def test_a_second_ctrl_c_does_not_wait_forever(tmp_path):
    """`timeout -s INT` sends two signals. The second one interrupted the shutdown of the workers in three of four
    runs."""
    script = tmp_path / "work.py"
    script.write_text(
        "import sys, time\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from folio.base.workers import map_in_order\n"
        "print('started', flush=True)\n"
        "for _ in map_in_order(time.sleep, [0.02] * 10_000, 2): pass\n"
    )
    command = [sys.executable, script]
    pauses = (0, 0.0002, 0.001, 0.005)
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in pauses]
    for process in started:
        process.stdout.readline()
    time.sleep(0.3)
    for process, pause in zip(started, pauses, strict=True):
        process.send_signal(signal.SIGINT)
        time.sleep(pause)
        process.send_signal(signal.SIGINT)
    try:
        assert all(process.wait(60) for process in started)
    finally:
        for process in started:
            process.kill()
            process.stdout.close()


# --- launchers --------------------------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch):
    """A function that sets the environment of a launcher."""
    for name in (*TORCHRUN, *LAUNCHERS):
        monkeypatch.delenv(name, raising=False)
    return lambda **variables: [monkeypatch.setenv(*item) for item in variables.items()]


FULL = dict(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", MASTER_ADDR="localhost")


@pytest.mark.parametrize(
    "variables, message",
    [
        (dict(WORLD_SIZE="2", RANK="1"), r"RANK=1, WORLD_SIZE=2: .*LOCAL_RANK and MASTER_ADDR must be set.*torchrun"),
        (dict(FULL, RANK="2"), r"RANK=2, LOCAL_RANK=1, WORLD_SIZE=2: .*integers from 0"),
        (dict(FULL, WORLD_SIZE="two"), r"WORLD_SIZE=two: .*integers from 0"),
        (dict(SLURM_STEP_NUM_TASKS="2", SLURM_NTASKS="2"), r"SLURM_STEP_NUM_TASKS=2: srun .*RANK.* not set.*torchrun"),
        (dict(OMPI_COMM_WORLD_SIZE="4"), r"OMPI_COMM_WORLD_SIZE=4: Open MPI"),
        (dict(PMI_SIZE="4"), r"PMI_SIZE=4: MPI"),
    ],
)
def test_half_of_a_launchers_environment_is_an_error(variables, message, launched):
    """With RANK and WORLD_SIZE, but no LOCAL_RANK, both processes trained the whole run alone."""
    launched(**variables)
    with pytest.raises(UserError, match=message):
        check_launch()


@pytest.mark.parametrize(
    "variables",
    [
        {},
        FULL,
        dict(FULL, SLURM_STEP_NUM_TASKS="8"),  # srun torchrun
        dict(WORLD_SIZE="1", RANK="0", MASTER_ADDR="localhost"),  # a job of one process
        dict(MASTER_ADDR="localhost"),  # exported by a batch script
        dict(SLURM_NTASKS="4", SLURM_PROCID="0"),  # the batch script itself
        dict(SLURM_NTASKS="1", SLURM_STEP_NUM_TASKS="1", PMI_SIZE="1"),  # srun --ntasks=1, or --pty bash
    ],
)
def test_a_single_process_and_torchrun_start(variables, launched):
    launched(**variables)
    check_launch()


def test_the_runs_of_a_sweep_are_single_processes(launched):
    """`srun python tools/sweep.py` starts a worker of the sweep per task. Its runs are not tasks."""
    launched(SLURM_STEP_NUM_TASKS="4", SLURM_JOB_ID="7")
    environment = child_options(CUDA_VISIBLE_DEVICES="1")["env"]
    assert "SLURM_STEP_NUM_TASKS" not in environment
    assert environment["SLURM_JOB_ID"] == "7" and environment["CUDA_VISIBLE_DEVICES"] == "1"
