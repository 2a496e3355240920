import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train as train_script
from folio import UserError
from folio.base import settings
from folio.base.files import read_json, write_json
from folio.base.settings import ConfigError, setting_names
from folio.decoding.torch_decoder import TorchBatch
from folio.machine import kernels
from folio.machine.distributed import Group
from folio.machine.kernels import ChunkedCrossEntropy, choose_attention
from folio.training.loader import BatchShape
from folio.training.optim import Muon
from folio.training.planning.data import open_data
from lab import kill_and_resume
from lab.bench import training
from lab.gpu import correctness, decoding, processes, runs, speed
from lab.gpu.part import Part, Skip
from lab.gpu.processes import PartSpec
from lab.gpu.report import Report, describe_machine
from model import GPT, POSITIONS, AttentionKernel, GPTConfig, Mask
from tests.support.documents import attend_by_document
from tests.support.repository import ROOT
from tests.support.simulated_gpu import SimulatedGPU
from tools import check_gpu
from tools.check_gpu import CheckConfig, main
from train import train


@pytest.fixture
def new_part(tmp_path) -> Callable[..., Part]:
    """A function that creates a part of a rehearsal, or of a check of another device."""
    return lambda device="cpu": Part("a part", 1000.0, torch.device(device), tmp_path, lambda record: None)


@pytest.fixture
def run_in_process(tmp_path, monkeypatch) -> Callable[[str], tuple[int, dict]]:
    """A function that runs parts of a rehearsal. Returns the exit code, and the parts of the report."""

    def run_part(number, device, peer, report):
        folder = tmp_path / "part"
        processes.run_part([str(number), str(device), str(folder)])
        report.save(number, read_json(folder / "gpu-report.json")["parts"][str(number)])

    def run(parts):
        code = 0
        try:
            main(CheckConfig(parts=parts, device="cpu", out_dir=str(tmp_path / "out")))
        except SystemExit as exit:
            code = exit.code
        return code, read_json(tmp_path / "out" / "gpu-report.json")["parts"]

    monkeypatch.setattr(check_gpu, "run_process", run_part)
    return run


def statuses_of(parts: dict[str, dict]) -> dict[str, str]:
    return {name: part["status"] for name, part in parts.items()}


# --- rehearsals -------------------------------------------------------------------------------------------------------


def test_a_rehearsal_of_the_parts_that_start_no_processes(run_in_process, tmp_path, monkeypatch, capsys):
    """Without compiling, which takes 3 s, and with some of the position methods."""
    monkeypatch.setattr(correctness, "can_compile", lambda device: False)
    monkeypatch.setattr(correctness, "POSITIONS", ["learned", "relative"])
    code, parts = run_in_process("1,2,4,5,6")
    assert code == 0 and statuses_of(parts) == dict.fromkeys("12456", "passed")
    rows = {name: [row for table in part["tables"] for row in table["rows"]] for name, part in parts.items()}
    assert [row[-2:] for row in rows["4"]] == [["passed", "passed"]] * 12
    assert [row[0] for row in rows["2"][2:5]] == ["adamw", "muon", "muon"]
    assert {row[-1] for row in rows["2"][2:]} == {"passed"} and len(rows["2"]) == 2 + 8 + 3
    report = (tmp_path / "out" / "gpu-report.md").read_text(encoding="utf-8")
    for number, part in parts.items():
        assert f"## {number} {part['title']}: passed after " in report
    printed = capsys.readouterr().out
    for row in (row for table in rows.values() for row in table):
        assert f"| {' | '.join(row)} |" in report and f"| {' | '.join(row)} |" in printed


@pytest.mark.slow
def test_a_rehearsal_of_all_parts(tmp_path):
    command = [sys.executable, str(ROOT / "tools" / "check_gpu.py"), "--device=cpu", f"--out_dir={tmp_path}"]
    result = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert result.returncode == 0, result.stdout + result.stderr
    assert statuses_of(read_json(tmp_path / "gpu-report.json")["parts"]) == dict.fromkeys("12345678", "passed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu-report.json", "gpu-report.md"]


# --- planted faults ---------------------------------------------------------------------------------------------------


def failures(part: Part, check: Callable[[Part], None]) -> list[str]:
    part.run(check)
    assert (part.record["status"] == "failed") == bool(part.record["failures"])
    return part.record["failures"]


@pytest.fixture(scope="module")
def allowed() -> dict[torch.dtype, dict[str, float]]:
    """The allowed errors, from all position methods."""
    batch, exact = correctness.random_batch(), correctness.cpu_runtime(torch.float32)
    models = {position: correctness.small_model(position).double() for position in POSITIONS}
    references = {position: correctness.compute(model, exact, batch) for position, model in models.items()}
    dtypes = correctness.supported_dtypes(torch.device("cpu"))
    return {dtype: correctness.allowed_errors(dtype, references, batch) for dtype in dtypes}


@pytest.fixture
def reported(monkeypatch, allowed, new_part) -> Callable[[Callable], list[str]]:
    """A function that returns the failures of a check of a single position method, in eager mode."""
    monkeypatch.setattr(correctness, "POSITIONS", ["learned"])
    monkeypatch.setattr(correctness, "applicable_positions", lambda part, variant: ["learned"][variant.is_compiled :])
    monkeypatch.setattr(correctness, "allowed_errors", lambda dtype, *arguments: allowed[dtype])
    return partial(failures, new_part())


@pytest.mark.parametrize(
    "factor_x, factor_weight, dtypes",
    [(-1.0, 1.0, ["bfloat16", "float32"]), (1.0001, 1.0, ["float32"]), (1.0, 1.0001, ["float32"])],
)
def test_wrong_gradients_of_the_chunked_loss_are_detected(reported, monkeypatch, factor_x, factor_weight, dtypes):
    """Small errors are detected in float32 only."""
    chunk_loss = ChunkedCrossEntropy.chunk_loss

    def wrong(*arguments):
        loss, grad_x, grad_weight = chunk_loss(*arguments)
        return loss, grad_x * factor_x, grad_weight * factor_weight

    monkeypatch.setattr(ChunkedCrossEntropy, "chunk_loss", staticmethod(wrong))
    lines = reported(correctness.check_correctness)
    variants = {f"learned, {dtype}, eager, chunked, {words}padded" for dtype in dtypes for words in ("", "not ")}
    assert {line.partition(":")[0] for line in lines} == variants


def test_a_mask_that_is_off_by_one_is_detected(reported, monkeypatch):
    """In the kernel of one dtype."""

    class OffByOne(AttentionKernel):
        def __call__(self, layer, q, k, v, mask):
            T = q.shape[2]
            return super().__call__(layer, q, k, v, Mask(q.new_full((T, T), -math.inf).triu(diagonal=2)))

    def choose_wrong_attention(device_type, dtype, config):
        return OffByOne() if dtype == torch.bfloat16 else choose_attention(device_type, dtype, config)

    monkeypatch.setattr(kernels, "choose_attention", choose_wrong_attention)
    lines = reported(correctness.check_correctness)
    assert all("bfloat16" in line for line in lines)
    assert {"the logits", "the loss"} <= {line.split("error of ")[1].split(" is")[0] for line in lines}
    assert correctness.relative_error(torch.tensor([math.nan]), torch.ones(1)) == math.inf  # too large, too


@pytest.mark.parametrize("error", ["ValueError: the padding", "ZeroDivisionError: division by zero"])
def test_an_error_in_a_variant_does_not_end_the_part(reported, monkeypatch, error):
    """Such as that of a loss that counts the padding."""
    make = kernels.make_cross_entropy
    if error.startswith("Zero"):
        monkeypatch.setattr(correctness, "pad_vocabulary", lambda model, multiple: 1 / 0)
    for module in (kernels, correctness):
        monkeypatch.setattr(module, "make_cross_entropy", lambda *args: make())
    lines = reported(correctness.check_correctness)
    assert len(lines) == 4 and all(f", padded: {error}" in line for line in lines)


def test_a_skipped_step_that_changes_a_moment_is_detected(reported, monkeypatch):
    step = Muon.step

    def forgetful_step(self):
        if self.found_inf.item():
            for p, state in self.state.items():
                state.get("momentum_buffer", p.new_zeros(1)).mul_(0.95)
        step(self)

    monkeypatch.setattr(Muon, "step", forgetful_step)
    lines = reported(correctness.check_optimizers)
    assert len(lines) == 2 and all("muon" in line and "momentum_buffer" in line for line in lines)


@pytest.mark.parametrize("fault", [0, 1])
def test_a_bound_of_a_document_that_is_off_by_one_is_detected(gpu, new_part, monkeypatch, fault):
    def attend(q, k, v, bounds, *arguments, **settings):
        moved = torch.where((bounds > 0) & (bounds < len(q)), bounds + fault, bounds)
        return attend_by_document(q, k, v, moved, moved, *arguments[1:], **settings)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend)
    monkeypatch.setattr(correctness, "supported_dtypes", lambda device: [torch.float32, torch.bfloat16])
    lines = failures(new_part("cuda:0"), correctness.check_documents)
    assert bool(lines) == bool(fault) and all(line.startswith("documents in bfloat16: the error") for line in lines)


def out_dir_of(words) -> Path:
    return Path(next(word for word in words if str(word).startswith("--out_dir=")).partition("=")[2])


def write_lines(folder: Path, name: str, lines: list[dict]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


FALLING = [3.0 - step / 30 for step in range(30)]


@pytest.mark.parametrize(
    "fault, failure",
    [
        ({}, None),
        ({"mode": False, "graphs": 0}, None),
        ({"mode": False}, "2 graphs instead of 0"),
        ({"losses": [*FALLING[:-1], math.nan]}, "a loss is not finite"),
        ({"losses": [3.0] * 30}, "the loss falls only from 3.000"),
        ({"samples": []}, "the samples are"),
        ({"samples": ["a text", ""]}, "the samples are"),
        ({"graphs": 3}, "3 graphs"),
        ({"breaks": ["a reason"]}, "graph breaks: a reason"),
        ({"skipped": 1}, "1 CUDA graphs were skipped"),
    ],
)
def test_faults_of_a_run_are_detected(new_part, monkeypatch, fault, failure):
    def write_run(*words):
        folder, content = out_dir_of(words), dict(losses=FALLING, samples=["a text"] * 2) | fault
        write_lines(folder, "metrics", [{"step": n, "loss": loss} for n, loss in enumerate(content["losses"], 1)])
        write_lines(folder, "samples", [{"step": 15, "text": text} for text in content["samples"]])
        counts = dict(graphs=2, breaks=[], skipped=0)
        write_json(folder / "compiler.json", {name: fault.get(name, count) for name, count in counts.items()})

    part = new_part()
    monkeypatch.setattr(runs, "run_python", write_run)
    part.table("")
    lines = failures(part, lambda part: runs.check_run(part, fault.get("mode", True), "float32"))
    assert (failure or "") in "".join(lines)
    assert part.record["tables"][0]["rows"][0][-1] == ("FAILED" if failure else "passed")


@pytest.mark.parametrize("seed, differs", [(1337, False), (2, True)])
def test_a_run_that_differs_after_resuming_is_detected(new_part, monkeypatch, seed, differs):
    """The killed run is an uninterrupted one here, with another seed as the fault."""
    part = new_part()
    runs.prepare_text(part, "sentences", 300)

    def start(cfg, out_dir):
        values = {name: getattr(cfg, name) for name in setting_names(runs.train.TrainConfig)}
        changes = dict(out_dir=str(out_dir), max_iters=20, seed=seed if out_dir.name == "killed" else 1337)
        return train(runs.train.TrainConfig(**{**values, **changes}))

    monkeypatch.setattr(kill_and_resume, "start", start)
    monkeypatch.setattr(kill_and_resume, "finish", lambda process, out_dir: None)
    monkeypatch.setattr(kill_and_resume, "kill_and_resume", lambda cfg, out_dir, kills, fraction_in_write: (0, 0))
    try:
        lines = failures(part, runs.check_resume)
    finally:
        torch.use_deterministic_algorithms(False)
    assert ["the resumed run differs: last: " in line for line in lines] == [True] * differs


def test_waiting_for_the_device_is_an_error_after_the_first_steps():
    with SimulatedGPU() as gpu:
        number, state = torch.ones((), device="cuda"), SimpleNamespace(step=0)
        watched = runs.forbid_waiting(lambda state: number.item(), torch.device("cuda", 0), lambda state: state)
        assert watched(state) == 1
        state.step = runs.WARMUP_STEPS
        with pytest.raises(RuntimeError, match="synchronizing"):
            watched(state)
        assert runs.forbid_waiting(lambda state: number.item(), torch.device("cpu"), None)(state) == 1
    assert gpu.sync_debug_mode == "default"


@pytest.mark.parametrize("place", ["the device", "a thread"])
def test_a_token_of_another_row_is_detected(new_part, monkeypatch, place):
    monkeypatch.setattr(decoding, "POSITIONS", ["rotary"])
    if place == "the device":
        sample = TorchBatch.sample

        def rolled(self, rows):
            fetch = sample(self, rows)
            return lambda: fetch()[1:] + fetch()[:1]

        monkeypatch.setattr(TorchBatch, "sample", rolled)
    else:
        decode = decoding.decode_in_thread
        monkeypatch.setattr(decoding, "decode_in_thread", lambda *arguments: decode(*arguments)[::-1])
    part = new_part()
    reported = failures(part, decoding.check_tokens)
    assert len(reported) == 2 and all(f"{place}: the tokens of rows [0, 1, 2, 3]" in failure for failure in reported)
    assert [row[-2:].index("FAILED") for row in part.record["tables"][0]["rows"]] == [place == "a thread"] * 2


def test_nanogpt_is_measured_on_the_same_sizes(new_part, peer, tmp_path, monkeypatch):
    """By its train.py and Folio's."""
    part, run_timestamped, own_words = new_part(), training.run_timestamped, []

    def record(words, folder):
        own_words.extend(words if "config/nanogpt_char.py" in words else [])
        return run_timestamped(words, folder)

    monkeypatch.setattr(training, "run_timestamped", record)
    speed.compare_with_nanogpt(part, peer, speed.SMALL_GPT2, 4, correctness.cpu_runtime(torch.float32))
    (row,) = part.record["tables"][0]["rows"]
    assert row[2] == "2,560" and float(row[1].replace(",", "")) > 0  # 4 x 32 tokens in 50 ms
    words = (tmp_path / "nanogpt" / "words").read_text().split("\n")
    assert {"--n_layer=2", "--block_size=32", "--batch_size=4", "--dtype=float32", "--compile=False"} <= {*words}
    tokens = np.fromfile(tmp_path / "nanogpt" / "data" / "random" / "train.bin", dtype="<u2")
    assert len(tokens) == 2**20 and tokens.max() == 299 and not (tmp_path / "nanogpt/data/random/meta.pkl").exists()
    shared = {word for word in words if word.startswith("--")}
    assert {"--log_interval=1", "--eval_iters=1"} <= shared <= {*own_words}  # its loop had no loader, guard or logs


# --- branches for CUDA ------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch) -> Iterator[SimulatedGPU]:
    """Two simulated H100, with small sizes. Nothing is compiled."""
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 1))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    tiny = GPTConfig(block_size=16, vocab_size=50, n_layer=1, n_head=1, n_embd=16, bias=False)
    for module in (speed, decoding):
        monkeypatch.setattr(module, "GPT2", tiny)
    monkeypatch.setattr(speed, "COPY_BYTES", 2**20)
    monkeypatch.setitem(training.SUSTAINED_SECONDS, "cuda", 1e-9)
    monkeypatch.setattr(speed, "time_calls", lambda action, count: (action(), 1.0)[1])
    monkeypatch.setitem(training.MATMUL_SIZES, "cuda", 64)
    with SimulatedGPU(device_count=2) as gpu:
        yield gpu


def test_rates_and_speeds_are_measured_on_cuda(new_part, gpu, monkeypatch):
    """Attention also with the kernels that are available, but not the default."""
    decoding_speed = decoding.decoding_speed
    monkeypatch.setattr(decoding, "decoding_speed", lambda decoder, rows, count: decoding_speed(decoder, rows, 24))
    monkeypatch.setattr(speed, "describe_attention", lambda *arguments: "torch's cudnn kernel")
    part = new_part("cuda:0")
    for check in (speed.check_hardware, speed.check_training_speed, decoding.check_speed):
        assert failures(part, check) == []
    kinds, copies, attention, _, steps, decode = ([row[0] for row in table["rows"]] for table in part.record["tables"])
    assert kinds == ["bfloat16", "float16", "float32", "float32 as TF32"]
    assert len(copies) == 5 and len(attention) == 4
    assert steps == ["32", "32", "32", "32", "64", "16", "4"] and decode == ["1", "64"]
    assert gpu.captures
    machine = describe_machine(torch.device("cuda", 0))
    assert machine["device"] == "2 x NVIDIA H100 80GB HBM3, sm_90" and machine["NCCL"] == "2.30.1"


def test_more_memory_than_the_forecast_is_a_failure(new_part, gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**30)
    monkeypatch.setattr(speed, "fits", lambda *arguments: False)
    monkeypatch.setattr(speed, "time_attention", lambda *arguments: [])
    monkeypatch.setattr(speed, "profile", lambda *arguments: None)
    reported = failures(new_part("cuda:0"), speed.check_training_speed)
    assert len(reported) == 2 and all("1.2 times the forecast is less" in failure for failure in reported)


@pytest.mark.parametrize("count, fault", [(2, 0.0), (1, 0.0), (2, 1e-3), (2, math.nan)])
def test_processes_run_on_all_gpus(new_part, gpu, monkeypatch, count, fault):
    """With NCCL, also on a single GPU. The fault is a loss that differs from that of one process."""
    part, commands = new_part("cuda:0"), []

    def write_run(*words):
        commands.append(" ".join(map(str, words)))
        line = {"loss": 3.0, "val_loss": 2.0 + (fault if "parallel=fsdp" in commands[-1] else 0.0)}
        write_lines(out_dir_of(words), "metrics", [{"step": n, "tokens_per_second": 5.0, **line} for n in range(20)])
        return "compiled: 14 graphs, 0 graph breaks" if "--compile=True" in words else ""

    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(runs, "run_python", write_run)
    reported = failures(part, runs.check_processes)
    assert len(commands) == 9 and all("--device=cuda " in command for command in commands)
    assert all(f"torch.distributed.run --standalone --nproc_per_node={count} " in command for command in commands[1:])
    assert len(set(commands)) == 9 and len(reported) == (4 if fault else 0)
    assert all("fsdp" in failure for failure in reported)
    assert [row[4] for row in part.record["tables"][0]["rows"]] == ["0", "0", "14", "14"] * 2
    assert ("there is one GPU, so NCCL has one process" in part.record["notes"]) == (count == 1)


@pytest.mark.parametrize("processes", [1, 2, 8])
def test_a_run_with_several_processes_has_what_distinguishes_it(new_part, processes):
    """Its model was smaller than DDP's first bucket, and its loss was never computed in chunks."""
    part, MiB = new_part(), 2**20
    data_dir = runs.write_random_tokens(part, "random", runs.LARGE_VOCABULARY, 2**16)
    cfg = settings.load(train_script.TrainConfig, runs.tiny_run(part, "out", **runs.large_run(processes)))
    data = open_data(cfg)
    assert data.vocab_size == runs.LARGE_VOCABULARY and str(data_dir) == cfg.data_dir
    shape = {name: getattr(cfg, name) for name in ("n_layer", "n_head", "n_embd", "block_size")}
    with torch.device("meta"):
        sizes = [p.nbytes for p in GPT(GPTConfig(vocab_size=data.vocab_size, **shape)).parameters()]
    assert sum(sizes) - max(sizes) > MiB + 2 * 25 * MiB  # DDP's first bucket, and later ones, without the embeddings
    batch = BatchShape.of(cfg.batch_size, cfg.accumulation, Group(0, processes))
    logits = batch.rows * cfg.block_size * data.vocab_size
    assert logits > kernels.max_logits(compiled=True) > kernels.max_logits(compiled=False)


def test_the_last_gpu_is_used_in_a_thread(new_part, gpu, monkeypatch):
    devices = []
    monkeypatch.setattr(decoding, "POSITIONS", ["rotary"])
    monkeypatch.setattr(decoding, "LanguageModel", lambda model, tokenizer, device, dtype: device)
    monkeypatch.setattr(decoding, "decode", lambda decoder, *arguments: [[1]] * 4)
    for name in ("decode_with_torch", "decode_in_thread"):
        decode = lambda device, *arguments, name=name: devices.append((name, device)) or [[1]] * 4  # noqa: E731
        monkeypatch.setattr(decoding, name, decode)
    assert failures(new_part("cuda:0"), decoding.check_tokens) == []
    in_thread = [("decode_in_thread", "cuda:0"), ("decode_in_thread", "cuda:1")]
    assert devices == [("decode_with_torch", "cuda:0"), *in_thread] * 2


SAMPLE = "a" * 500 + "500 tokens, 1,234 tokens/s"


@pytest.mark.parametrize(
    "is_prepared, loss, sample, expected",
    [
        (True, 1.45, SAMPLE, ""),
        (True, 1.6, SAMPLE, "loss is 1.6000, and should be below 1.5"),
        (False, 1.6, SAMPLE, ""),
        (False, 2.1, SAMPLE, "loss is 2.1000, and should be below 2.0"),
        (True, 1.45, "", "sample.py prints ''"),
    ],
)
def test_the_two_commands_run_on_the_gpu(new_part, monkeypatch, is_prepared, loss, sample, expected):
    """Without a network, the text is random sentences."""
    part, commands = new_part("mps"), []

    def write_run(*words):
        commands.append(words)
        write_lines(part.folder / "out", "metrics", [{"step": 9, "val_loss": loss}])
        return sample

    def find_datasets(name, data_dir):
        if not is_prepared:
            raise UserError("no network")

    monkeypatch.setattr(runs, "run_python", write_run)
    monkeypatch.setattr(runs, "find_datasets", find_datasets)
    monkeypatch.setattr(runs, "prepare_text", lambda *arguments: "FOLDER")
    assert "".join(failures(part, runs.check_end_to_end)).endswith(expected)
    assert [Path(words[0]).name for words in commands] == ["train.py", "sample.py"]
    assert all("--device=mps" in words and f"--out_dir={part.folder / 'out'}" in words for words in commands)
    assert ("--data_dir=FOLDER" in commands[0]) != is_prepared
    assert part.record["notes"] == [] if is_prepared else "no network" in part.record["notes"][0]


# --- the report -------------------------------------------------------------------------------------------------------


def test_the_exit_code_is_the_number_of_failed_parts(run_in_process, tmp_path, monkeypatch, capsys):
    def skip(part: Part) -> None:
        raise Skip("a reason")

    def raise_error(part: Part) -> None:
        part.table("a head")
        part.row("a row")
        raise ValueError("an error\nand its second line")

    functions = [lambda part: part.note("a note"), lambda part: part.check(False, "a fault"), skip, raise_error]
    specs = {number: PartSpec(f"part {number}", function, 10) for number, function in enumerate(functions, 1)}
    for module in (check_gpu, processes):
        monkeypatch.setattr(module, "PARTS", specs)
    code, parts = run_in_process("1,2,3,4")
    assert code == 2
    assert statuses_of(parts) == {"1": "passed", "2": "failed", "3": "skipped", "4": "failed"}
    assert parts["4"]["failures"] == ["error: ValueError: an error"]
    report = (tmp_path / "out" / "gpu-report.md").read_text()
    assert "| a row |" in report and "- skipped: a reason" in report and "- failed: a fault" in report
    assert "2 of 4 parts failed" in capsys.readouterr().out


def test_other_parts_of_an_earlier_report_on_the_same_machine_are_kept(tmp_path):
    for machine, number, expected in (("a", 1, "1"), ("a", 2, "12"), ("a", 1, "12"), ("b", 3, "3")):
        part = Part("title", 1.0, torch.device("cpu"), tmp_path, lambda record: None)
        Report(tmp_path, {"device": machine}).save(number, part.record)
        assert "".join(read_json(tmp_path / "gpu-report.json")["parts"]) == expected


def test_a_part_is_stopped_at_its_time_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "PARTS", {1: processes.PARTS[1]._replace(seconds=0.3)})
    with pytest.raises(SystemExit) as exit:
        main(CheckConfig(parts="1", device="cpu", out_dir=str(tmp_path)))
    assert exit.value.code == 1
    part = read_json(tmp_path / "gpu-report.json")["parts"]["1"]
    assert part["status"] == "failed" and part["failures"] == ["stopped at its time limit of 0.3 s"]


@pytest.mark.parametrize(
    "setting, remedy",
    [
        ("device=cuda", "--device=cpu"),
        ("device=cuda:first", "--device=cpu"),
        ("device=auto", "--device=cpu"),
        ("device=tpu", "cuda, mps"),
        ("parts=9", "1"),
        ("parts=,", "--parts=1"),
        ("peer=missing", "nanoGPT"),
    ],
)
def test_bad_settings_are_an_error(setting, remedy, monkeypatch):
    """A missing GPU proposes a rehearsal."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"{setting}: .*{remedy}"):
        settings.load(CheckConfig, ["--device=cpu", f"--{setting}"])


def test_an_index_beyond_the_last_gpu_is_an_error(gpu):
    assert settings.load(CheckConfig, ["--device=cuda:1"]).torch_device == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="device=cuda:2: torch finds no such GPU"):
        settings.load(CheckConfig, ["--device=cuda:2"])


def test_an_interrupted_part_is_in_the_report(tmp_path, monkeypatch):
    """Ctrl-C removed the rows of the part."""

    def interrupt(seconds):
        raise KeyboardInterrupt

    def start(command, **options):
        *_, folder = command
        part = Part("hardware", 1.0, torch.device("cpu"), tmp_path, partial(Report(Path(folder), {}).save, 1))
        part.table("a head")
        part.row("a row")
        return SimpleNamespace(wait=interrupt, poll=lambda: 130)

    monkeypatch.setattr(check_gpu, "describe_machine", lambda device: {})
    monkeypatch.setattr(processes.subprocess, "Popen", start)
    with pytest.raises(KeyboardInterrupt):
        main(CheckConfig(parts="1", device="cpu", out_dir=str(tmp_path)))
    part = read_json(tmp_path / "gpu-report.json")["parts"]["1"]
    assert part["failures"] == ["interrupted"] and part["tables"][0]["rows"] == [["a row"]]


@pytest.mark.parametrize("content", ["", '{"machine": {}, "par', "[]", "{}", '{"machine": {}, "parts": {"1": 2}}'])
def test_a_damaged_report_or_a_file_as_its_folder_is_one_line(content, tmp_path):
    """A truncated gpu-report.json was a traceback."""
    path = tmp_path / "gpu-report.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"gpu-report\.json is damaged .*; remove it"):
        Report(tmp_path, {})
    for folder in (path, path / "folder"):
        with pytest.raises(UserError, match=r"out_dir=.*: it is not a folder"):
            Report(folder, {})
