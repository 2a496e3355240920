"""Plant one-line faults in a copy of the repository, and run the tests of each one's module, which must fail.

    python lab/bench/planted_faults.py
    python lab/bench/planted_faults.py --only=rollback

A fault replaces a part of a line that occurs once in its file; if it no longer does, the fault is stale. The tests are
those of the module, up to the first failure. A fault that no test catches is a hole in the suite: add the test. The
copy has the files that git tracks, and new ones, in a temporary folder. The faults in JavaScript need Chromium.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from queue import SimpleQueue
from typing import Literal, NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.base.files import shorten  # noqa: E402
from folio.base.settings import PositiveInt, Settings, run_script  # noqa: E402

PYTEST = ("-m", "pytest", "-x", "--numprocesses=0", "-pno:cacheprovider")
MAX_SECONDS = 900  # for the tests of a fault
TESTS_FAILED = 1  # exit status of pytest; another one means that it did not run the tests


@dataclass(frozen=True)
class FaultsBenchConfig(Settings):
    only: str = ""  # faults whose file, or whose line before or after, contains this text; "": all
    jobs: PositiveInt = 1  # number of copies, in which faults are tested at the same time

    def problems(self) -> list[tuple[str, str]]:
        return [] if self.faults else [("only", "no fault contains this text; use a part of the name of a file")]

    @property
    def faults(self) -> list["Fault"]:
        return [fault for fault in FAULTS if self.only in str(fault)]


class Fault(NamedTuple):
    """A plausible error in a line."""

    file: str
    old: str  # a part of a line
    new: str
    other_tests: str = ""  # files, separated by spaces; "": the file in tests/ that has the module's name

    @property
    def tests(self) -> list[str]:
        """The test files of the module."""
        path = PurePosixPath(self.file.removeprefix("folio/"))
        return self.other_tests.split() or [str("tests" / path.parent / f"test_{path.name}")]

    def is_in(self, root: Path) -> bool:
        """Whether the line occurs once in the repository in `root`, so that the fault is not stale."""
        file = root / self.file
        return file.is_file() and file.read_text(encoding="utf-8").count(self.old) == 1

    def __str__(self) -> str:
        return f"{self.file}: {self.old} -> {self.new}"


ATTENTION_TESTS = "tests/machine/test_compiled_attention.py"
STORY_TESTS = "tests/web/page/test_page_story.py"
MACHINE_TESTS = "tests/web/page/test_page_machine.py"
ENGINE_TESTS = "tests/web/browser/test_browser_engine.py"

FAULTS = (
    # --- base ---
    Fault("folio/base/files.py", "        sync(temporary)", "        pass"),
    Fault("folio/base/randomness.py", "b = np.uint64(-(-n // int(a)))", "b = np.uint64(n // int(a))"),
    Fault("folio/base/download.py", "if delay is None or getattr", "if getattr"),
    Fault("folio/base/settings.py", "Le: (operator.le,", "Le: (operator.lt,", "tests/test_every_setting.py"),
    # --- machine ---
    Fault("folio/machine/memory.py", ".read_text()) - file_cache", ".read_text()) + file_cache"),
    Fault("folio/machine/kernels.py", "mask[vocab_size:] = -math.inf", "mask[vocab_size + 1 :] = -math.inf"),
    Fault("folio/machine/distributed.py", "[0 if known else flag for", "[flag for"),
    # --- data ---
    Fault(
        "folio/data/windows.py",
        "counts = mask[start + 1 : start + 1 + len(row)]",
        "counts = mask[start : start + len(row)]",
    ),
    Fault("folio/data/windows.py", "selected = np.arange(count) * len(shard) // count", "selected = np.arange(count)"),
    Fault("folio/data/shards.py", "        os.fsync(self.file.fileno())", "        pass"),
    Fault("folio/data/tokenizer.py", "cuts.append(run.end() - 1)", "cuts.append(run.end())"),
    Fault(
        "folio/data/sources/music.py",
        'np.maximum.accumulate(down + pedals["duration"][order])',
        'down + pedals["duration"][order]',
    ),
    # --- checkpoints ---
    Fault("folio/checkpoints/checkpoint.py", "            sync(path)", "            pass"),
    Fault(
        "folio/checkpoints/checkpoint.py",
        '*islice(folder.newest_first(), keep_last), *folder.expected("best")',
        "*islice(folder.newest_first(), keep_last)",
    ),
    Fault("folio/checkpoints/snapshots.py", "after is None or step > after", "after is None or step >= after"),
    Fault(
        "folio/checkpoints/foreign.py",
        "if sum(storages.values()) > path.stat().st_size:",
        "if max(storages.values(), default=0) > path.stat().st_size:",
    ),
    # --- training: planning, batches, workers, the attention kernel, rollbacks ---
    Fault(
        "folio/training/schedule.py",
        "((self.counts.max_iters - recipe_step) / (max_iters - begin))",
        "((self.counts.max_iters - recipe_step) / max_iters)",
    ),
    Fault(
        "folio/training/schedule.py",
        "round((1 + last) * ratio) - 1))",
        "round((1 + last) * ratio)))",
        "tests/checkpoints/test_snapshots.py",
    ),
    Fault(
        "folio/training/planning/budget.py",
        "remaining -= evaluations * (self.evaluation_seconds + self.saving_seconds)",
        "remaining -= evaluations * self.evaluation_seconds",
    ),
    Fault(
        "folio/training/planning/budget.py",
        "if abs(max_iters - self.reported_max_iters) >",
        "if max_iters - self.reported_max_iters >",
    ),
    Fault(
        "folio/training/planning/forecast.py",
        "for n in (N, workers * N, 2 * N - muon_sizes.total())",
        "for n in (N, N, 2 * N - muon_sizes.total())",
    ),
    Fault("folio/training/planning/law.py", "(D / U - 1).clamp(min=0)", "(D / U).clamp(min=0)"),
    Fault(
        "folio/training/planning/measured_law.py",
        "return measured if measured.data_hash == data.hash else None",
        "return measured",
    ),
    Fault(
        "folio/training/loader.py",
        "max_sequences = -(-sequences // group.size)",
        "max_sequences = sequences // group.size",
    ),
    Fault("folio/training/loader.py", "ids &= 0xFFFF", "ids &= 0x7FFF"),
    Fault(
        "folio/machine/data_parallel.py",
        "counts = [int((part != -1).sum()) for part in targets]",
        "counts = [part.numel() for part in targets]",
    ),
    Fault(
        "folio/machine/data_parallel.py",
        'derive_seed("worker", seed, self.index)',
        'derive_seed("worker", seed)',
    ),
    Fault(
        "folio/machine/data_parallel.py",
        "worker.model.train(self.model.training)",
        "worker.model.train()",
    ),
    Fault(
        "folio/machine/causal_attention.py",
        "for j in range(i + r + 1, end):",
        "for j in range(i + r + 2, end):",
        ATTENTION_TESTS,
    ),
    Fault(
        "folio/machine/causal_attention.py",
        "narrow_all(scores, BLOCK * D, scale, a.grad_k + offset + row)",
        "narrow_all(scores, BLOCK * D, np.float32(1), a.grad_k + offset + row)",
        ATTENTION_TESTS,
    ),
    Fault(
        "folio/machine/causal_attention.py",
        "mix(np.uint32(a.seed + (b * H + h) * T + i + r))",
        "mix(np.uint32(a.seed + h * T + i + r))",
        ATTENTION_TESTS,
    ),
    Fault(
        "folio/training/session.py",
        "load_before(self.out_dir, 1 + ",
        "load_before(self.out_dir, 0 + ",
        "tests/training/test_rollback.py",
    ),
    Fault(
        "folio/training/rollback.py",
        'rollbacks[0]["skipped_sequences"][0]',
        'rollbacks[-1]["skipped_sequences"][0]',
    ),
    # --- training: the rest ---
    Fault(
        "folio/training/guard.py",
        "(1 - weight) * (variance + weight * deviation**2)",
        "(1 - weight) * variance + weight * deviation**2",
    ),
    Fault(
        "folio/training/optim.py",
        '[p for p in rest if p.dim() < 2], "weight_decay": 0.0}',
        '[p for p in rest if p.dim() < 2], "weight_decay": weight_decay}',
    ),
    Fault(
        "folio/training/graphs/step_graph.py",
        "        set_rates(state.optimizer, rates, state.step)",
        "        self.graph or set_rates(state.optimizer, rates, state.step)",
    ),
    Fault("folio/training/graphs/step_graph.py", "seed_dropout(seed, state.step, 0)", "seed_dropout(seed, 0, 0)"),
    Fault("folio/training/graphs/step_graph.py", "append(self.judged.clone())", "append(self.judged)"),
    Fault("folio/training/graphs/step_graph.py", "key = (state.loads,", "key = (0,"),
    Fault("folio/training/graphs/step_graph.py", ", *(x.shape for x, _, _ in batches))", ")"),
    Fault(
        "folio/training/guard.py", "self.moments.copy_(", "self.moments = (", "tests/training/graphs/test_step_graph.py"
    ),
    Fault("folio/training/evaluations.py", "self.since_best >= patience", "self.since_best > patience"),
    # --- decoding ---
    Fault(
        "folio/decoding/sampling.py",
        "probabilities.cumsum(dim=-1) - probabilities >= p",
        "probabilities.cumsum(dim=-1) >= p",
    ),
    Fault("folio/decoding/kv_cache.py", ".triu(S - T + 1)", ".triu(S - T + 2)"),
    Fault(
        "folio/decoding/text_stream.py",
        "key=lambda match: (match[0] + len(match[1]), match[0])",
        "key=lambda match: match[0]",
    ),
    Fault(
        "folio/decoding/scheduler.py",
        "shared_length(context[:-1], cached[:-1])",
        "shared_length(context, cached[:-1])",
    ),
    # --- evaluation ---
    Fault("folio/evaluation/intervals.py", "float(group.var(ddof=1))", "float(group.var())"),
    Fault("folio/evaluation/extraction.py", "chosen[-1] + length))", "chosen[-1] + length - 1))"),
    Fault(
        "folio/evaluation/comparison.py", "second_wins = (difference.value < 0)", "second_wins = (difference.value > 0)"
    ),
    # --- experiments ---
    Fault(
        "folio/experiments/sweep/folder_queue.py",
        'if not self.locks.take(trial.key, stack) or self.recorded(trial).state != "waiting":',
        "if not self.locks.take(trial.key, stack):",
    ),
    Fault(
        "folio/experiments/selection.py",
        'reverse=sort.startswith("-") != (column == "date")',
        'reverse=sort.startswith("-")',
    ),
    Fault("folio/experiments/runs.py", 'line["step"] > begin]', 'line["step"] >= begin]'),
    # --- web ---
    Fault("folio/web/streaming.py", "status=500, headers=NO_RETRY)", "status=500)"),
    Fault("folio/web/engine.py", "if self.waiting >= self.max_waiting:", "if self.waiting > self.max_waiting:"),
    Fault("folio/web/browser/sampling.js", "&& ties-- <= 0)", "&& ties-- < 0)", ENGINE_TESTS),
    Fault("folio/web/browser/gpt.js", "sign * 2 ** -24 * fraction", "sign * 2 ** -25 * fraction", ENGINE_TESTS),
    # --- web: the story and its machine ---
    Fault(
        "folio/web/page/machine_stops.js",
        "Math.round(i * last / (count - 1))",
        "Math.round(i * last / count)",
        STORY_TESTS,
    ),
    Fault(
        "folio/web/page/machine_stops.js",
        "isHidden(context, token, t)",
        "isHidden(context, token - first, t - first)",
        STORY_TESTS,
    ),
    Fault(
        "folio/web/page/machine_acts.js",
        "sumOf(products.subarray(0, count))",
        "sumOf(products.subarray(0, count + 1))",
        STORY_TESTS,
    ),
    Fault("folio/web/page/machine_layout.js", "(layer * n + n - 1) * C", "(layer * n + n) * C", MACHINE_TESTS),
    Fault("folio/web/page/machine_sheet.js", "...reference[tensor].data", "...tensors[tensor].data", MACHINE_TESTS),
    Fault("folio/web/page/machine_camera.js", "if (t >= 1) return to;", "if (t > 1) return to;", MACHINE_TESTS),
    # --- the network and the scripts ---
    Fault(
        "model.py",
        "return F.pad(last_ends[:, :-1], (1, 0))",
        "return last_ends",
        "tests/test_model.py tests/test_documents.py",
    ),
    Fault("model.py", "std = 0.02 / math.sqrt(2 * self.config.n_layer)", "std = 0.02 / math.sqrt(self.config.n_layer)"),
    Fault("train.py", "float(batch_losses @ weights / weights.sum())", "float(batch_losses.mean())"),
    Fault(
        "folio/decoding/language_model.py",
        "sum(token is not None for token in step.tokens)",
        "len(step.tokens)",
        "tests/test_sample.py",
    ),
    Fault("prepare/summaries.py", "text[: length + 1], re.DOTALL)", "text[:length], re.DOTALL)"),
    Fault(
        "lab/kill_and_resume.py",
        'for which in ("last", "best"):',
        'for which in ("last",):',
        "tests/tools/test_verify_resume.py",
    ),
    Fault("tools/runs.py", "{text[head + 1 - length :]}", "{text[head - length :]}", "tests/experiments/test_runs.py"),
)


def main(cfg: FaultsBenchConfig) -> None:
    start_time = time.perf_counter()
    with copies(ROOT, cfg.jobs) as free_copies, ThreadPoolExecutor(cfg.jobs) as pool:
        results = list(pool.map(lambda fault: try_fault(free_copies, fault), cfg.faults))
    caught = results.count("caught")
    print(f"{caught} of {len(results)} faults caught in {time.perf_counter() - start_time:,.0f} s")
    if caught < len(results):
        raise SystemExit(1)


@contextmanager
def copies(root: Path, count: int) -> Iterator["SimpleQueue[Path]"]:
    """Copy the repository in `root` several times to a temporary folder. Yields a queue of the copies."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        names = subprocess.run(command, cwd=root, capture_output=True, encoding="utf-8", check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise UserError(f"git does not list the files of {root}: install git, and clone the repository") from None
    files, queue = [name for name in names.split("\0") if (root / name).is_file()], SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="planted-faults-") as folder:
        for number in range(count):
            for name in files:
                path = Path(folder, str(number), name)
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(root / name, path)
            queue.put(Path(folder, str(number)))
        yield queue


Result = Literal["caught", "not caught", "stale", "no result"]


def try_fault(free_copies: "SimpleQueue[Path]", fault: Fault) -> Result:
    """Test a fault in the next free copy, and print a line about it."""
    copy, start_time = free_copies.get(), time.perf_counter()
    try:
        result, remark = plant(copy, fault)
    finally:
        free_copies.put(copy)
    seconds = time.perf_counter() - start_time
    print(f"{result:10} {seconds:5.0f} s  {fault}{remark and f'  ({remark})'}", flush=True)
    return result


def plant(copy: Path, fault: Fault) -> tuple[Result, str]:
    """Run the tests of a fault with the fault in a copy of the repository. Returns the result, and a remark."""
    if not fault.is_in(copy):
        return "stale", "update it: the line must occur once in the file"
    file = copy / fault.file
    correct = file.read_text(encoding="utf-8")
    file.write_text(correct.replace(fault.old, fault.new), encoding="utf-8")
    try:
        return run_tests(copy, fault)
    finally:
        file.write_text(correct, encoding="utf-8")


def run_tests(copy: Path, fault: Fault) -> tuple[Result, str]:
    """Run the tests of a fault up to the first failure."""
    markers = ["-m", "browser and not slow"] if fault.file.endswith(".js") else []
    command = [sys.executable, *PYTEST, *markers, *fault.tests]
    # Python takes a cached module if its time in seconds and its size are unchanged, which a fault may not change.
    options = {"stdin": subprocess.DEVNULL, "env": {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}}
    with subprocess.Popen(
        command, cwd=copy, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", **options
    ) as process:
        try:
            output, _ = process.communicate(timeout=MAX_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return "no result", f"the tests did not end within {MAX_SECONDS} s"
    if process.returncode == TESTS_FAILED:
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        return "caught", failed[1] if failed else ""
    if process.returncode:
        return "no result", shorten(" ".join(output.split()[-60:]))
    return "not caught", ""


if __name__ == "__main__":
    run_script(main, FaultsBenchConfig)
