"""Parts 3, 7 and 8 of tools/check_gpu.py: runs of train.py, with several processes, and end to end."""

import math
import re
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import train
from folio import UserError
from folio.base import settings
from folio.base.files import read_json, write_json
from folio.base.settings import ROOT
from folio.data.find_data import find_datasets
from folio.training import setup
from folio.training.run_log import read_lines
from folio.training.state import TrainState
from lab import kill_and_resume
from lab.gpu.part import (
    TINY_RUN,
    Part,
    Skip,
    can_compile,
    compiler_counters,
    logged,
    name_of,
    prepare_text,
    quick_compiler,
    run_python,
    supported_dtypes,
    tiny_run,
    write_random_tokens,
)

# --- 3 control --------------------------------------------------------------------------------------------------------

WARMUP_STEPS = 5  # which compile, capture and allocate, and may wait for the device


def check_control(part: Part) -> None:
    """Kill a run and resume it; then check losses, samples, compiled graphs and waiting with each mode and dtype."""
    prepare_text(part, "sentences")
    with part.attempt("kill and resume"):
        check_resume(part)
    part.table("compile", "dtype", "first losses", "last", "graphs, breaks", "CUDA graphs skipped", "sample", "")
    for mode in (False, True, "reduce-overhead"):
        if mode and not (can_compile(part.device) and (mode is True or part.device.type == "cuda")):
            part.note(f"not run: compile={mode}, which does not apply to this device")
            continue
        for dtype in supported_dtypes(part.device)[: 1 if mode and part.is_small else None]:
            what = f"compile={mode}, {name_of(dtype)}"
            if part.is_late:
                part.note(f"not run: {what}")
                continue
            with part.attempt(what):
                check_run(part, mode, name_of(dtype))


def check_run(part: Part, mode: bool | str, dtype: str) -> None:
    out_dir, what, failures = part.folder / f"run-{mode}-{dtype}", f"compile={mode}, {dtype}", part.failures
    code = "import sys; from lab.gpu import runs; runs.train_watched(sys.argv[1:])"
    run_python("-c", code, *tiny_run(part, out_dir.name, compile=mode, dtype=dtype))
    counts, losses = read_json(out_dir / "compiler.json"), logged(out_dir, "loss")
    first, last = statistics.mean(losses[:5]), statistics.mean(losses[-5:])
    samples = [line["text"] for line in read_lines(out_dir / "samples.jsonl")[0]]
    graphs = 2 if mode else 0  # of training and of evaluation
    part.check(all(map(math.isfinite, losses)), f"{what}: a loss is not finite")
    part.check(last < first - 0.3, f"{what}: the loss falls only from {first:.3f} to {last:.3f}")
    part.check(counts["graphs"] == graphs, f"{what}: {counts['graphs']} graphs instead of {graphs}")
    part.check(not counts["breaks"], f"{what}: graph breaks: {'; '.join(counts['breaks'])}")
    part.check(not counts["skipped"], f"{what}: {counts['skipped']} CUDA graphs were skipped")
    part.check(len(samples) == 2 and all(samples), f"{what}: the samples are {samples}, and should be two texts")
    graph_cells = f"{counts['graphs']}, {len(counts['breaks'])}", counts["skipped"]
    sample = repr(samples[-1]) if samples else "none"
    part.row(mode, dtype, f"{first:.3f}", f"{last:.3f}", *graph_cells, sample, part.result_since(failures))


def train_watched(arguments: list[str]) -> None:
    """Run train.py. On CUDA, waiting for the device in a step, or when it is logged, is an error.

    Writes the compiler's counters to compiler.json in out_dir.
    """
    cfg, counters = settings.load(train.TrainConfig, arguments), compiler_counters()
    device = torch.device(cfg.device)

    def compile_and_count(*arguments: Any) -> Any:
        counters.clear()  # resolve_runtime has compiled a function
        return make_loss(*arguments)

    make_loss = setup.make_loss
    train_step = forbid_waiting(train.train_step, device, lambda state: state)
    end_step = forbid_waiting(train.Session.end_step, device, lambda session: session.state)
    replacements = (
        mock.patch.object(setup, "make_loss", compile_and_count),
        mock.patch.object(train, "train_step", train_step),
        mock.patch.object(train.Session, "end_step", end_step),
    )
    with ExitStack() as stack:
        for context in (*replacements, quick_compiler(device)):
            stack.enter_context(context)
        train.train(cfg)
    counts = {"graphs": counters["stats"]["unique_graphs"], "breaks": [*counters["graph_break"]]}
    write_json(Path(cfg.out_dir, "compiler.json"), counts | {"skipped": counters["inductor"]["cudagraph_skips"]})


def forbid_waiting(function: Callable[..., Any], device: torch.device, state_of: Callable[[Any], TrainState]) -> Any:
    """Wrap a function so that an operation that waits for a CUDA device raises an error, except in the first steps.

    state_of: returns the training state, given the function's first argument.
    """

    def watched(first: Any, *arguments: Any) -> Any:
        if device.type != "cuda" or state_of(first).step < WARMUP_STEPS:
            return function(first, *arguments)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return function(first, *arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return watched


def check_resume(part: Part) -> None:
    """Kill a run with deterministic kernels, resume it, and compare it bitwise with an uninterrupted one."""
    kills, dtype, failures = 1 if part.is_small else 2, name_of(supported_dtypes(part.device)[0]), part.failures
    changes = dict(max_iters=200, eval_interval=10, eval_iters=1, sample_tokens=5, compile=False, deterministic=True)
    places = dict(device=str(part.device), data_dir=str(part.folder / "data"))
    cfg = train.TrainConfig(**{**TINY_RUN, **changes, **places}, dtype=dtype)
    reference, killed = part.folder / "reference", part.folder / "killed"
    kill_and_resume.finish(kill_and_resume.start(cfg, reference), reference)
    _, lost = kill_and_resume.kill_and_resume(cfg, killed, kills, fraction_in_write=0.0)
    kill_and_resume.finish(kill_and_resume.start(cfg, killed), killed)
    differences = "; ".join(kill_and_resume.compare(reference, killed))
    part.check(not lost, f"{lost} runs were lost")
    part.check(not differences, f"the resumed run differs: {differences}")
    part.table("deterministic run", "kills", "differences after resuming", "")
    part.row(dtype, kills, differences or "none", part.result_since(failures))


# --- 7 processes ------------------------------------------------------------------------------------------------------


LARGE_VOCABULARY = 50_000


def large_run(processes: int) -> dict[str, Any]:
    """Settings for a run with what distinguishes training on several GPUs, also if there is only one: gradients in
    several buckets of DDP, at whose ends compiled graphs are split, and a loss in chunks, also if it is compiled.
    """
    shape = dict(n_layer=6, n_head=8, n_embd=512, block_size=1024)
    return dict(dataset="random", batch_size=8 * processes, eval_iters=1, **shape)  # 8 sequences per process


def check_processes(part: Part) -> None:
    """Compare the losses of DDP and FSDP in float32, with NCCL on all GPUs, with those of one process."""
    if part.device.type == "mps":
        raise Skip("torch.distributed has no backend for Apple's GPUs")
    if part.device.type == "cuda" and not torch.distributed.is_nccl_available():
        raise Skip("this build of torch has no NCCL")
    processes = 2 if part.is_small else torch.cuda.device_count()
    if processes == 1:
        part.note("there is one GPU, so NCCL has one process")
    changes = dict(dtype="float32", device=part.device.type, max_iters=20, eval_interval=10, sample_tokens=0)
    changes |= dict(learning_rate=1e-3, warmup_iters=5)
    if part.is_small:
        prepare_text(part, "sentences")
    else:
        write_random_tokens(part, "random", LARGE_VOCABULARY)
        changes |= large_run(processes)
    run_python(ROOT / "train.py", *tiny_run(part, "one", **changes, compile=False))
    part.table(
        *("parallel", "compile", "recompute", "processes", "graphs", "largest difference of a loss", "tokens/s", "")
    )
    variants = [*product(("ddp", "fsdp"), (False, True), (False, True))]
    for parallel, compiled, recompute in variants if not part.is_small else [("fsdp", False, True)]:
        what, failures = f"{parallel}, compile={compiled}, recompute={recompute}", part.failures
        if part.is_late or (compiled and not can_compile(part.device)):
            part.note(f"not run: {what}")
            continue
        with part.attempt(what):
            out_dir = part.folder / f"{parallel}-{compiled}-{recompute}"
            options = tiny_run(part, out_dir.name, **changes, parallel=parallel, compile=compiled, recompute=recompute)
            launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}")
            compilation = re.search(r"compiled: ([\d,]+) graph", run_python(*launcher, ROOT / "train.py", *options))
            difference = largest_difference(part.folder / "one", out_dir)
            speed = statistics.median(logged(out_dir, "tokens_per_second")[5:])
            part.check(difference <= 1e-4, f"{what}: a loss differs by {difference:.1e}")  # as in test_distributed.py
            cells = f"{difference:.1e}", f"{speed:,.0f}", part.result_since(failures)
            graphs = compilation[1] if compilation else "0"
            part.row(parallel, compiled, recompute, processes, graphs, *cells)


def largest_difference(first: Path, second: Path) -> float:
    """The largest difference of a logged loss; NaN if a loss is NaN.

    Raises ValueError if the runs logged different numbers of losses.
    """
    pairs = zip(*(logged(folder, "loss") + logged(folder, "val_loss") for folder in (first, second)), strict=True)
    return float(np.max([abs(a - b) for a, b in pairs]))  # the built-in max can ignore NaN


# --- 8 end to end -----------------------------------------------------------------------------------------------------

RECIPE = "config/shakespeare_char.py"


def check_end_to_end(part: Part) -> None:
    """Run the README's two commands."""
    options, out_dir = [], part.folder / "out"
    limit = 1.5  # of the validation loss; the median of three seeds on a CPU is 1.441
    try:
        if part.is_small:
            raise UserError("this is a rehearsal")
        find_datasets("shakespeare_char", None)
    except UserError as reason:
        part.note(f"the text is random sentences, not Shakespeare's: {reason}")
        data_dir, limit = prepare_text(part, "shakespeare_char", 2000 if part.is_small else 30_000), 2.0
        options.append(f"--data_dir={data_dir}")
    if part.is_small:
        options += ["--max_iters=20", "--eval_interval=10", "--snapshots=0"]
    part.table("command", "seconds", "result", "")
    failures, places = part.failures, (f"--out_dir={out_dir}", f"--device={part.device}")
    seconds, _ = timed_run("train.py", RECIPE, *places, *options)
    loss = min(logged(out_dir, "val_loss"))
    part.check(loss < limit, f"the best validation loss is {loss:.4f}, and should be below {limit}")
    part.row(f"`train.py {RECIPE}`", f"{seconds:.1f}", f"validation loss {loss:.4f}", part.result_since(failures))
    failures = part.failures
    seconds, text = timed_run("sample.py", *places)
    speed = re.search(r"[\d,]+ tokens/s", text)
    part.check(len(text) > 500 and bool(speed), f"sample.py prints {text[:200]!r}")
    part.row("`sample.py`", f"{seconds:.1f}", speed[0] if speed else "", part.result_since(failures))


def timed_run(script: str, *arguments: str) -> tuple[float, str]:
    """Run a script. Returns its seconds, including imports, and its output."""
    start_time = time.perf_counter()
    output = run_python(ROOT / script, *arguments)
    return time.perf_counter() - start_time, output
