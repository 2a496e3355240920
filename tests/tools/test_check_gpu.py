import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from folio.base import settings
from folio.base.files import read_json, write_json
from folio.base.settings import ConfigError
from folio.decoding.torch_decoder import TorchBatch
from folio.machine import kernels
from folio.machine.kernels import ChunkedCrossEntropy
from folio.training.optim import Muon
from model import POSITIONS
from tests.support.repository import ROOT
from tools import check_gpu, verify_resume
from tools.check_gpu import CheckConfig, PartSpec, Report, main
from tools.gpu import correctness, decoding, runs
from tools.gpu.part import Part, Skip
from train import train


@pytest.fixture
def new_part(tmp_path) -> Callable[..., Part]:
    """A function that creates a part of a rehearsal, or of a check of another device."""
    return lambda device="cpu": Part("a part", 1000.0, torch.device(device), tmp_path, lambda record: None)


def run_in_process(tmp_path: Path, parts: str) -> tuple[int, dict]:
    """The exit code of a rehearsal, and the parts of its report."""
    code = 0
    try:
        main(CheckConfig(parts=parts, device="cpu", out_dir=str(tmp_path), in_process=True))
    except SystemExit as exit:
        code = exit.code
    return code, read_json(tmp_path / "gpu-report.json")["parts"]


# --- rehearsals -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch.compile
def test_a_rehearsal_of_the_parts_that_start_no_processes(tmp_path, capsys):
    code, parts = run_in_process(tmp_path, "1,2,4,5,6")
    assert code == 0 and {name: part["status"] for name, part in parts.items()} == dict.fromkeys("12456", "passed")
    rows = {name: [row for table in part["tables"] for row in table["rows"]] for name, part in parts.items()}
    assert [row[-2:] for row in rows["4"]] == [["passed", "passed"]] * 12
    assert [row[0] for row in rows["2"][-3:]] == ["adamw", "muon", "muon"]
    assert {row[-1] for row in rows["2"][2:]} == {"passed"} and len(rows["2"]) == 2 + 9 + 3
    report = (tmp_path / "gpu-report.md").read_text(encoding="utf-8")
    for number, part in parts.items():
        assert f"## {number} {part['title']}: passed after " in report
    for row in (row for table in rows.values() for row in table):
        assert f"| {' | '.join(row)} |" in report and f"| {' | '.join(row)} |" in capsys.readouterr().out + report


@pytest.mark.slow
def test_a_rehearsal_of_all_parts(tmp_path):
    command = [sys.executable, str(ROOT / "tools" / "check_gpu.py"), "--device=cpu", f"--out_dir={tmp_path}"]
    result = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert result.returncode == 0, result.stdout + result.stderr
    parts = read_json(tmp_path / "gpu-report.json")["parts"]
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys("12345678", "passed")
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
def one_position(monkeypatch, allowed):
    """Check a single position method, in eager mode."""
    monkeypatch.setattr(correctness, "POSITIONS", ["learned"])
    monkeypatch.setattr(correctness, "applicable_positions", lambda part, variant: ["learned"][variant.is_compiled :])
    monkeypatch.setattr(correctness, "allowed_errors", lambda dtype, *arguments: allowed[dtype])


def scaled_gradients(factor_x: float, factor_weight: float) -> Callable:
    """A ChunkedCrossEntropy.chunk_loss with wrong gradients."""
    chunk_loss = ChunkedCrossEntropy.chunk_loss

    def wrong(*arguments):
        loss, grad_x, grad_weight = chunk_loss(*arguments)
        return loss, grad_x * factor_x, grad_weight * factor_weight

    return staticmethod(wrong)


@pytest.mark.parametrize("factors", [(-1.0, 1.0), (1.0001, 1.0), (1.0, 1.0001)])
def test_wrong_gradients_of_the_chunked_loss_are_detected(new_part, one_position, monkeypatch, factors):
    monkeypatch.setattr(ChunkedCrossEntropy, "chunk_loss", scaled_gradients(*factors))
    found = failures(new_part(), correctness.check_correctness)
    assert found and all(("chunked" in failure and "float32" in failure) or factors[0] < 0 for failure in found)
    assert not any("plain" in failure for failure in found)


def test_a_mask_that_is_off_by_one_is_detected(new_part, one_position, monkeypatch):
    """In bfloat16 only, because a rehearsal uses these weights there only."""

    def attention_weights(q, k, mask=None):
        T = q.shape[2]
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[3])
        return (scores + scores.new_full((T, T), -math.inf).triu(diagonal=2)).softmax(dim=-1)

    monkeypatch.setattr(kernels, "attention_weights", attention_weights)
    found = failures(new_part(), correctness.check_correctness)
    assert found and all("bfloat16" in failure for failure in found)
    assert {"the logits", "the loss"} <= {failure.split("error of ")[1].split(" is")[0] for failure in found}


def test_a_loss_that_counts_the_padding_is_detected(new_part, one_position, monkeypatch):
    wrong = lambda x, weight, targets, vocab_size, **settings: kernels_loss(x, weight, targets, **settings)  # noqa: E731
    kernels_loss = kernels.chunked_cross_entropy
    monkeypatch.setattr(kernels, "chunked_cross_entropy", wrong)
    found = failures(new_part(), correctness.check_correctness)
    assert found and all(
        ", padded" in failure and "the padding of the vocabulary has a gradient" in failure for failure in found
    )


def test_a_skipped_step_that_changes_a_moment_is_detected(new_part, one_position, monkeypatch):
    step = Muon.step

    def forgetful_step(self):
        found_inf, self.found_inf = self.found_inf, None
        if found_inf.item():
            for p, state in self.state.items():
                state.get("momentum_buffer", p.new_zeros(1)).mul_(0.95)
        self.found_inf = found_inf
        step(self)

    monkeypatch.setattr(Muon, "step", forgetful_step)
    found = failures(new_part(), correctness.check_optimizers)
    assert len(found) == 2 and all("muon" in failure and "momentum_buffer" in failure for failure in found)


def test_an_error_in_a_variant_does_not_end_the_part(new_part, one_position, monkeypatch, capsys):
    monkeypatch.setattr(correctness, "pad_vocabulary", lambda model, multiple: 1 / 0)
    part = new_part()
    assert all(
        "ZeroDivisionError: division by zero" in failure for failure in failures(part, correctness.check_correctness)
    )
    results = [row[-1] for row in part.record["tables"][1]["rows"]]
    assert results.count("FAILED") == results.count("passed") == 4


def healthy_run(out_dir: Path, mode: bool) -> dict:
    """The files of a run without faults."""
    losses = [3.0 - step / 30 for step in range(30)]
    samples = [{"step": step, "text": "a text"} for step in (15, 30)]
    return dict(losses=losses, samples=samples, counts={"graphs": 2 * mode, "breaks": [], "skipped": 0})


@pytest.mark.parametrize("mode", [False, True])
@pytest.mark.parametrize(
    "fault, failure",
    [
        ({}, None),
        ({"losses": [3.0 - step / 30 for step in range(29)] + [math.nan]}, "a loss is not finite"),
        ({"losses": [3.0] * 30}, "falls only from 3.000 to 3.000"),
        ({"samples": []}, r"the samples are \[\]"),
        ({"samples": [{"step": 15, "text": "a text"}, {"step": 30, "text": ""}]}, "the samples are"),
        ({"counts": {"graphs": 3, "breaks": [], "skipped": 0}}, "3 graphs instead of"),
        ({"counts": {"graphs": 2, "breaks": ["a reason"], "skipped": 0}}, "graph breaks: a reason"),
        ({"counts": {"graphs": 2, "breaks": [], "skipped": 1}}, "1 CUDA graphs were skipped"),
    ],
)
def test_faults_of_a_run_are_detected(new_part, monkeypatch, mode, fault, failure):
    part = new_part()

    def write_run(*words):
        out_dir = Path(next(word for word in words if word.startswith("--out_dir=")).partition("=")[2])
        content = healthy_run(out_dir, mode) | fault
        out_dir.mkdir()
        lines = [{"step": step, "loss": loss} for step, loss in enumerate(content["losses"], 1)]
        for name, entries in (("metrics", lines), ("samples", content["samples"])):
            (out_dir / f"{name}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        write_json(out_dir / "compiler.json", content["counts"])

    monkeypatch.setattr(runs, "run_python", write_run)
    part.table("")
    found = failures(part, lambda part: runs.check_run(part, mode, "float32"))
    if failure is None:
        assert not found
    else:
        assert any(re.search(failure, line) for line in found)
    assert part.record["tables"][0]["rows"][0][-1] == ("FAILED" if failure else "passed")


@pytest.mark.parametrize("fault, failure", [({}, None), ({"seed": 2}, "the resumed run differs: last: .* bits")])
def test_a_run_that_differs_after_resuming_is_detected(new_part, monkeypatch, fault, failure):
    """The killed run is an uninterrupted one here, with another seed as the fault."""
    part = new_part()
    runs.prepare_text(part, "sentences", 300)

    def start(cfg, out_dir):
        values = {name: getattr(cfg, name) for name in runs.train.TrainConfig.__dataclass_fields__}
        changes = dict(out_dir=str(out_dir), max_iters=20, **(fault if out_dir.name == "killed" else {}))
        return train(runs.train.TrainConfig(**{**values, **changes}))

    monkeypatch.setattr(verify_resume, "start", start)
    monkeypatch.setattr(verify_resume, "finish", lambda process, out_dir: None)
    monkeypatch.setattr(verify_resume, "kill_and_resume", lambda cfg, out_dir: (1, 0, 0))
    try:
        found = failures(part, runs.check_resume)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(found) == (failure is not None) and (not failure or re.search(failure, found[0]))


def test_waiting_for_the_device_is_an_error_after_the_first_steps(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    state = SimpleNamespace(step=0)

    def step(state, fails):
        modes.append(f"step {state.step}")
        if fails:
            raise RuntimeError("called a synchronizing CUDA operation")

    watched = runs.forbid_waiting(step, torch.device("cuda", 0), lambda state: state)
    watched(state, False)
    state.step = runs.WARMUP_STEPS
    with pytest.raises(RuntimeError, match="synchronizing"):
        watched(state, True)
    runs.forbid_waiting(step, torch.device("cpu"), lambda state: state)(state, False)
    assert modes == ["step 0", "error", "step 5", "default", "step 5"]


@pytest.mark.parametrize("place", ["the device", "a thread"])
def test_a_token_of_another_row_is_detected(new_part, monkeypatch, place):
    monkeypatch.setattr(decoding, "POSITIONS", ["rotary"])
    if place == "the device":
        sample = TorchBatch.sample
        monkeypatch.setattr(TorchBatch, "sample", lambda self, rows: roll(sample(self, rows)))
    else:
        decode = decoding.decode_in_thread
        monkeypatch.setattr(decoding, "decode_in_thread", lambda *arguments: decode(*arguments)[::-1])
    part = new_part()
    found = failures(part, decoding.check_tokens)
    assert len(found) == 2 and all(f"{place}: the tokens of rows [0, 1, 2, 3]" in failure for failure in found)
    assert [row[-2:].index("FAILED") for row in part.record["tables"][0]["rows"]] == [place == "a thread"] * 2


def roll(fetch: Callable[[], list[int]]) -> Callable[[], list[int]]:
    return lambda: fetch()[1:] + fetch()[:1]


# --- the report -------------------------------------------------------------------------------------------------------


def fail(part: Part) -> None:
    part.check(False, "a fault")


def skip(part: Part) -> None:
    raise Skip("a reason")


def raise_error(part: Part) -> None:
    part.table("a head")
    part.row("a row")
    raise ValueError("an error\nand its second line")


def test_the_exit_code_is_the_number_of_failed_parts(tmp_path, monkeypatch, capsys):
    functions = {1: lambda part: part.note("a note"), 2: fail, 3: skip, 4: raise_error}
    specs = {number: PartSpec(f"part {number}", function, 10) for number, function in functions.items()}
    monkeypatch.setattr(check_gpu, "PARTS", specs)
    code, parts = run_in_process(tmp_path, "1,2,3,4")
    statuses = [part["status"] for part in parts.values()]
    assert code == 2 and statuses == ["passed", "failed", "skipped", "failed"]
    assert parts["4"]["failures"] == ["error: ValueError: an error"]
    report = (tmp_path / "gpu-report.md").read_text()
    assert "| a row |" in report and "- skipped: a reason" in report and "- failed: a fault" in report
    assert "2 of 4 parts failed" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu-report.json", "gpu-report.md"]


def test_other_parts_of_an_earlier_report_on_the_same_machine_are_kept(tmp_path):
    for machine, number, expected in (("a", 1, "1"), ("a", 2, "12"), ("a", 1, "12"), ("b", 3, "3")):
        part = Part("title", 1.0, torch.device("cpu"), tmp_path, lambda record: None)
        Report(tmp_path, {"device": machine}).save(number, part.record)
        assert "".join(read_json(tmp_path / "gpu-report.json")["parts"]) == expected


def test_a_part_is_stopped_at_its_time_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(check_gpu, "PARTS", {1: check_gpu.PARTS[1]._replace(seconds=0.3)})
    with pytest.raises(SystemExit) as exit:
        main(CheckConfig(parts="1", device="cpu", out_dir=str(tmp_path)))
    assert exit.value.code == 1
    part = read_json(tmp_path / "gpu-report.json")["parts"]["1"]
    assert part["status"] == "failed" and part["failures"] == ["stopped at its time limit of 0.3 s"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--parts=9", "--device=cpu"], r"parts=9: '9' is not one of 1, 2"),
        (["--device=tpu"], r"device=tpu: use auto, cpu, cuda, mps"),
        (["--device=cuda"], r"device=cuda: .*--device=cpu"),
        ([], r"device=auto: .*--device=cpu"),
    ],
)
def test_bad_settings_are_an_error(arguments, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        settings.load(CheckConfig, arguments)
