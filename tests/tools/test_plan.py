import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from folio import UserError
from folio.base import settings
from folio.base.files import read_json
from folio.experiments.report_page import report_page
from folio.experiments.runs import Run
from folio.machine import memory
from folio.training.planning.budget import ENDING_SECONDS
from folio.training.planning.forecast import memory_per_process
from model import GPT
from tests.support.processes import run_code
from tests.support.simulated import SimulatedMachine
from tests.support.simulated_gpu import SimulatedGPU
from tools import plan
from train import TrainConfig, train


def arguments(cfg: TrainConfig) -> list[str]:
    """Return the command line for these settings."""
    return [f"--{name}={value}" for name, value in asdict(cfg).items() if value is not None]


@pytest.fixture
def planned(tmp_path, capsys) -> Callable[..., tuple[dict, str]]:
    """A function that runs the tool. Returns the content of plan.json, and the output."""
    folders = [f"--data_dir={tmp_path}", f"--out_dir={tmp_path / 'out'}"]

    def run_plan(*args: str) -> tuple[dict, str]:
        capsys.readouterr()
        cfg = settings.load(plan.PlanConfig, [*folders, *args, "--save"])
        plan.main(cfg)
        return read_json(Path(cfg.out_dir, "plan.json")), capsys.readouterr().out

    return run_plan


@pytest.mark.architecture("model.py: GPTConfig.flops_per_token; and in this test's counts")
def test_a_plan_from_a_data_sheet(planned):
    """GPT-2 124M on eight H100, against a manual calculation."""
    args = ["config/gpt2_124m.py", "--device=H100", "--gpus=8", "--mfu=0.5"]
    facts, out = planned(*args, "--price=2")
    assert facts["parameters"] == 124_337_664 and facts["tokens"] == facts["steps"] * 524_288
    flops_per_token = 6 * (12 * 12 * 768**2 + 50257 * 768) + 12 * 12 * 768 * 1024
    assert facts["flops"] == facts["tokens"] * flops_per_token
    seconds = facts["flops"] / (8 * 0.5 * 989.4e12)
    assert facts["seconds"] - facts["evaluation_seconds"] == pytest.approx(seconds)
    assert facts["kilowatt_hours"] == pytest.approx(8 * 0.7 * facts["seconds"] / 3600)
    assert facts["price"] == pytest.approx(8 * 2 * facts["seconds"] / 3600)
    assert "8 x H100, from its data sheet" in out and "because openwebtext is not prepared" in out
    assert re.search(r"memory .* of 74.5 GiB: fits\n", out)
    tenth, out = planned(*args, "--tflops=98.94")
    assert tenth["tokens_per_second"] == pytest.approx(facts["tokens_per_second"] / 10)
    assert "8 x H100, at 50% of 99 TFLOP/s" in out
    one_hour, _ = planned(*args, "--minutes=60")
    step_seconds = 524_288 / one_hour["tokens_per_second"]
    assert 3600 - ENDING_SECONDS - step_seconds <= one_hour["seconds"] <= 3600
    steps = (one_hour["seconds"] - one_hour["evaluation_seconds"]) / (seconds / facts["steps"])
    assert one_hour["steps"] == pytest.approx(steps)
    _, out = planned(args[0], "--device=T4", "--batch_size=64")
    assert "1 x T4, from its data sheet, at 40% of 65 TFLOP/s" in out
    assert re.search(r"memory .* of 14.9 GiB: does not fit; use --batch_size=\d+", out)


COUNT_TRAFFIC = """
import json, torch
from dataclasses import replace
from types import SimpleNamespace
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import parallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from folio.machine.distributed import Group, to_local
from folio.machine.kernels import compile_loss
from folio.machine.runtime import resolve_runtime
from folio.training.planning.forecast import memory_per_process
from folio.training.guard import StepGuard
from folio.training.optim import LearningRates
from folio.training.setup import OpenRun, new_state, wrap
from folio.training.state import TrainState
from model import GPTConfig
from tools.plan import PlanConfig, traffic
from train import train_step

class Sent(TorchDispatchMode):
    total = 0.0  # bytes that this process sends in ring collectives

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor's collectives come here later
        result = operator(*args, **(kwargs or {}))
        name, factor = operator.overloadpacket.__name__, 7 / 8
        if name in ("allreduce_", "all_reduce"):
            self.total += 2 * factor * max(t.nbytes for t in tree_leaves(args) if isinstance(t, torch.Tensor))
        elif name == "allgather_":  # lists of outputs and inputs
            self.total += factor * sum(t.nbytes for t in tree_leaves(args[0]))
        elif name in ("_allgather_base_", "_reduce_scatter_base_", "all_gather_into_tensor"):
            self.total += factor * max(t.nbytes for t in tree_leaves((args, result)) if isinstance(t, torch.Tensor))
        else:
            assert "c10d" not in operator._schema.name or name in ("wait_tensor", "_wrap_tensor_autograd"), name
        return result

def all_reduce(state, bucket):
    dist.all_reduce(bucket.buffer())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())  # a FakeProcessGroup returns none
    return future

class VisibleDDP(parallel.DistributedDataParallel):
    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.register_comm_hook(None, all_reduce)

parallel.DistributedDataParallel = VisibleDDP
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
group, x = Group(0, 8, dist.group.WORLD), torch.zeros(2, 16, dtype=torch.long)
config = GPTConfig(block_size=16, vocab_size=64, n_layer=8, n_head=2, n_embd=32)
for kind in ("ddp", "fsdp"):
    for optimizer, dtype in (("adamw", "float32"), ("adamw", "bfloat16"), ("muon", "bfloat16")):
        sizes = dict(block_size=16, batch_size=2, gradient_accumulation_steps=16, gpus=8)  # 2 micro-batches each
        cfg = PlanConfig(parallel=kind, optimizer=optimizer, **sizes)
        runtime = replace(resolve_runtime("cpu", dtype, False), group=group)
        model, net = wrap(None, config, cfg, runtime)
        batches = [(x, x, 1 / 16)] * 2
        shape = SimpleNamespace(count=2, sequences=32)
        loader = SimpleNamespace(runtime=runtime, shape=shape, micro_batches=lambda first: batches)
        loader.seed_dropout = lambda *step: None
        state = new_state(OpenRun(model, net, None, loader), cfg)
        with Sent() as sent:
            train_step(state, compile_loss(net, runtime), loader, LearningRates(1e-3, 0.02), 1.0, 1)
        planned = traffic(cfg, model, 4 if dtype == "float32" else 2)
        required = memory_per_process(cfg, model, runtime.dtype, "cuda", 8)
        moments = [value for values in state.optimizer.state.values() for value in values.values() if value.dim()]
        print(json.dumps(dict(
            kind=kind, planned=planned, sent=sent.total, parameters=len([*model.parameters()]),
            forecast=[required.weights, required.optimizer],
            held=[sum(to_local(t).nbytes for t in tensors) for tensors in (model.parameters(), moments)],
        )))
"""


def test_the_planned_traffic_and_memory_are_those_of_a_process():
    """Counted from the collectives of a step of rank 0 of 8, with torch's FakeProcessGroup, which sends nothing.

    The loss and the norms of FSDP's gradients are not planned. FSDP keeps the weights outside of the blocks between the
    passes, which was not considered: 9 % too much for GPT-2 124M in bfloat16.
    """
    result = run_code(COUNT_TRAFFIC)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(lines) == 6
    for line in lines:
        numbers = 1 + line["parameters"] if line["kind"] == "fsdp" else 1
        assert line["sent"] - line["planned"] == 2 * 4 * numbers * 7 / 8, line
        assert line["held"] == line["forecast"], line


def test_a_plan_of_a_short_run_has_only_the_final_evaluation(planned):
    """The plan included an evaluation before the first step, and exceeded --minutes."""
    args = ["config/gpt2_124m.py", "--device=T4", "--batch_size=4", "--eval_iters=4000", "--minutes=20"]
    facts, _ = planned(*args)
    assert 120 < facts["evaluation_seconds"] and facts["seconds"] <= 1200


@pytest.mark.architecture("model.py: GPT.num_params, and this test's counts")
@pytest.mark.parametrize("position, parameters", [("learned", 1024 * 768), ("relative", 32 * 12), ("rotary", 0)])
def test_a_plan_counts_the_parameters_of_a_position_encoding(position, parameters, planned):
    """Other encodings have no parameters. The FLOPs are independent of the encoding."""
    args = ["config/gpt2_124m.py", "--device=H100"]
    facts, without = (planned(*args, f"--position={method}")[0] for method in (position, "none"))
    assert facts["parameters"] == without["parameters"] + parameters
    assert facts["flops"] == without["flops"]


def test_a_plan_writes_files_only_with_save(planned, tmp_path, capsys):
    """Each plan wrote OUT_DIR/plan.json, even if the run was never started."""
    args = [f"--out_dir={tmp_path / 'out'}", f"--data_dir={tmp_path}", "--device=4090"]
    plan.main(settings.load(plan.PlanConfig, args))
    out = capsys.readouterr().out
    assert "1 x RTX 4090, from its data sheet" in out and f"add --save to write {tmp_path / 'out' / 'plan.json'}" in out
    assert not list(tmp_path.iterdir())
    planned(*args)
    assert [path.name for path in tmp_path.rglob("*.*")] == ["plan.json"]


def test_an_unlisted_gpu_is_planned_by_its_memory(planned):
    """Only listed GPUs could be planned."""
    args = ["--device=24GB", "--gpus=2", "--watts=300", "--price=1"]
    facts, out = planned(*args)
    assert facts["memory"] and facts["flops"] and facts["tokens"]
    timed = ("seconds", "tokens_per_second", "evaluation_seconds", "kilowatt_hours", "price")
    assert [facts[name] for name in timed] == [None] * 5
    assert re.search(r"memory .* of 22.4 GiB: fits\n", out)
    assert re.search(r"time +unknown: .*--device=H100.*--tflops\n", out)
    assert "energy" not in out and "price" not in out
    facts, out = planned(*args, "--tflops=100", "--bandwidth=1e9", "--mfu=0.25")
    seconds = facts["flops"] / (2 * 0.25 * 100e12)
    assert facts["seconds"] - facts["evaluation_seconds"] == pytest.approx(seconds)
    assert facts["kilowatt_hours"] == pytest.approx(2 * 0.3 * facts["seconds"] / 3600)
    assert "2 x card with 24 GB, at 25% of 100 TFLOP/s" in out


def test_steps_are_measured_only_if_they_fit_with_headroom(tiny, planned, monkeypatch):
    """The model was built and a step was run, which exhausted the machine's memory."""
    measured = []
    monkeypatch.setattr(plan.train, "measure_step", lambda *_: measured.append(1) or 1.0)
    required = planned(*arguments(tiny()))[0]["memory"]
    for free, shown in (
        (0.01 * required, "does not fit; use a smaller model"),
        (1.1 * required, r"does not fit \(1.2 times as much must be available\); use --batch_size="),
        (2.0 * required, "fits"),
        (None, ""),
    ):
        measured.clear()
        monkeypatch.setattr(memory, "free", lambda device, free=free: free)
        facts, out = planned(*arguments(tiny()))
        fits = shown in ("fits", "")
        assert bool(measured) == fits == (facts["seconds"] is not None)
        assert bool(re.search(r"time +not measured, because the run does not fit into memory\n", out)) == (not fits)
        of = rf" of [\d.]+ .iB: {shown}" if shown else ""
        assert re.search(rf"\nmemory +[\d.]+ .iB \(weights [^()]*\){of}{'$' if fits else ''}", out, re.MULTILINE)


def test_a_plan_for_a_gpu_keeps_tokens_in_its_memory_as_training_does(tiny, planned, monkeypatch):
    """Steps were measured that copy each batch from the host, and the tokens were missing from the memory."""
    runs = []
    monkeypatch.setattr(plan.train, "measure_step", lambda run, cfg: runs.append(run) or 1.0)
    with SimulatedGPU():
        on_gpu, out = planned(*arguments(tiny(device="cuda", max_iters=1000)))
    assert runs[0].loader.shape.is_resident and ", data 0 MiB) of" in out
    without = memory_per_process(tiny(), GPT(runs[0].model.config), torch.float32, "cuda", 1, compiled=True).total
    tokens = 2 * runs[0].loader.data.training_tokens  # uint16
    assert on_gpu["memory"] == without + tokens
    assert planned(*arguments(tiny(device="H100", dtype="float32", max_iters=1000)))[0]["memory"] == without + tokens


def test_a_plan_of_a_run_from_a_checkpoint_is_for_its_model(tiny, planned, monkeypatch):
    """It was for the shape of the command line, or the default one, which is not that of the model to train."""
    monkeypatch.setattr(plan.train, "measure_step", lambda run, cfg: 1.0)
    expected = planned(*arguments(tiny()))[0]["parameters"]
    train(tiny(max_iters=1))
    data = [f"--data_dir={tiny().data_dir}", "--dataset=verse"]
    for words in ([f"--init_from={tiny().out_dir}"], ["--init_from=resume", f"--out_dir={tiny().out_dir}"]):
        for device in ("cpu", "H100"):
            assert planned(*data, *words, f"--device={device}")[0]["parameters"] == expected


def test_one_micro_batch_is_measured_after_its_memory_is_shown(tiny, planned, capsys, monkeypatch):
    """All micro-batches of a step were measured several times, without any output before."""
    cfg = tiny(gradient_accumulation_steps=40)
    printed = []

    def measure_step(run, cfg):
        printed.append(capsys.readouterr().out)
        return 0.25 * run.loader.shape.sequences / cfg.batch_size

    monkeypatch.setattr(plan.train, "measure_step", measure_step)
    facts, _ = planned(*arguments(cfg))
    assert re.search(r"measuring one micro-batch on cpu; memory: \d+ MiB \(weights .*: fits\n", printed[0])
    assert facts["tokens_per_second"] == 40 * 4 * 32 / 10
    assert facts["by"].startswith("one micro-batch of 40 per step measured on cpu")


def test_a_plan_from_measured_steps_and_its_comparison_with_the_run(tiny, planned, monkeypatch):
    SimulatedMachine(monkeypatch, lambda step: 0.1, lambda step: 0.5)
    cfg = tiny(max_iters=40, eval_interval=20, log_interval=4, eval_iters=None)
    assert "steps measured on cpu" in planned(*arguments(cfg))[1]
    train(cfg)  # a folder that contains only a plan is not an earlier run
    run = Run.of(Path(cfg.out_dir))
    totals = run.totals()
    assert totals["steps"] == run.plan["steps"] == 40 and totals["tokens"] == run.plan["tokens"] == 40 * 4 * 32
    intervals = zip(run.lines[1:], run.lines[2:], strict=False)  # the first line is the evaluation before step 1
    seconds = sum((b["tokens"] - a["tokens"]) / b["tokens_per_second"] for a, b in intervals)
    assert totals["seconds"] == pytest.approx(seconds * 40 / 39)
    page = report_page([run])
    assert "measured / planned" in page and "steps measured on cpu" in page


@pytest.mark.parametrize("device", ["--device=H100", "--device=24GB", "--device=cpu"])
def test_the_model_of_size_auto_and_its_race_are_planned(tiny, planned, device, monkeypatch):
    """size=auto was refused."""
    cfg = tiny()
    words = [f"--data_dir={cfg.data_dir}", "--dataset=verse", "--size=auto", "--minutes=5", device]
    monkeypatch.setattr(plan.train, "measure_step", lambda run, cfg: 1e-6 * cfg.step_tokens)
    if device == "--device=24GB":
        with pytest.raises(UserError, match=r"size=auto: the time of a step is unknown; .*--tflops"):
            planned(*words)
        words.append("--tflops=100")
    facts, out = planned(*words)
    assert re.search(r"race +about [\d.]+ (s|min) for the speed of \d+x\d+( and \d+x\d+)?(, and at most 25%.*)?\n", out)
    assert "complete runs, because the text is small" in out or device == "--device=cpu"
    assert facts["tokens"] <= 40 * 18_581 and 0 < facts["seconds"] <= 300


@pytest.mark.parametrize(
    "args, message",
    [
        (["--device=H1000", "--gpus=8"], "device=H1000: use auto, cpu, cuda, mps, .* --device=12GB --tflops=N$"),
        (["--gpus=8"], "gpus=8.*--device=H100.*--device=24GB"),
        (["--tflops=80"], r"tflops=80\.0.*--device=H100.*--device=24GB"),
        (["--device=24GB", "--minutes=5"], "minutes=5.*--device=H100"),
        (["--dataset=nothing"], "dataset=nothing: to measure steps here, prepare it or .*--device=H100"),
        (["--dataset=openwebtext"], r"\(python \S*prepare/openwebtext.py --data_dir=elsewhere\) or name a"),
        (["--dataset=x", "--size=auto", "--minutes=5"], "size=auto: the choice depends on the text; prepare x first"),
        (["--dataset=text"], "dataset=text: to measure steps here, prepare it or"),
    ],
)
def test_impossible_plans_are_an_error(args, message, planned):
    with pytest.raises(UserError, match=message):
        planned("--data_dir=elsewhere", *args)
