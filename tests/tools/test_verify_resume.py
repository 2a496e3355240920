import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.numpy import load_file, save_file

from folio import UserError
from folio.base.files import read_json, sha256, write_json
from folio.checkpoints import checkpoint
from lab import kill_and_resume
from lab.kill_and_resume import compare
from tests.support import processes
from tests.support.runs import run_with_losses
from tools.verify_resume import VerifyConfig, main


@pytest.fixture
def fast_start(monkeypatch) -> None:
    """Start processes like subprocess.Popen, but faster."""

    def start_forked(command, stdout, stderr, **options):
        process = processes.start(command[1:], [os.devnull, stdout.name, stderr.name])
        process.poll, process.wait = lambda: process.exitcode, lambda: processes.wait(process)
        return process

    monkeypatch.setattr(kill_and_resume, "subprocess", SimpleNamespace(Popen=start_forked))


def test_a_run_that_is_killed_and_resumed_is_bitwise_identical(tiny, tmp_path, capsys, fast_start):
    """A short version of the runs in docs/lab/reproducibility.md. With this seed, the first kill is in a write."""
    cfg = tiny(max_iters=240, eval_interval=20, eval_iters=1, patience=1000, seed=1356)
    main(VerifyConfig(**asdict(cfg), kills=2, kills_in_write=0.5, work_dir=str(tmp_path / "work")))
    out = capsys.readouterr().out
    certificate = json.loads(out[out.index("{") :])
    assert certificate["kills"] == 2 and certificate["runs lost"] == 0
    assert certificate["differences"].startswith("none")
    assert len(checkpoint.load(tmp_path / "work" / "killed").state["parts"]) >= 2


def test_a_run_too_short_for_its_kills_is_an_error(tiny, tmp_path, fast_start):
    cfg = tiny(max_iters=3, eval_interval=100)
    with pytest.raises(UserError, match=r"ended after .* kills; use more --max_iters"):
        kill_and_resume.kill_and_resume(cfg, tmp_path / "killed", kills=5, fraction_in_write=0)


def test_a_time_budget_is_an_error(tiny):
    """The lengths of the runs would depend on measured times."""
    ((setting, message),) = VerifyConfig(**asdict(tiny(minutes=1))).problems()
    assert setting == "minutes" and "--max_iters" in message


def flip_bit(folder: Path) -> None:
    """Change a bit of a weight in a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.ln_f.weight"].view("u4")[0] ^= 1
    save_file(tensors, folder / "model.safetensors")
    manifest = read_json(folder / "manifest.json")
    manifest["model.safetensors"]["sha256"] = sha256(folder / "model.safetensors")
    write_json(folder / "manifest.json", manifest)


def test_compare_reports_a_single_bit_of_each_checkpoint(tiny, tmp_path, monkeypatch, capsys):
    run_with_losses(tiny, monkeypatch, capsys, [1.0, 2.0])
    run, other = Path(tiny().out_dir), Path(shutil.copytree(tiny().out_dir, tmp_path / "other"))
    assert compare(run, other) == []
    assert checkpoint.load(other, "best").path != checkpoint.load(other).path
    flip_bit(checkpoint.load(other, "best").path)
    assert compare(run, other) == ["best: 1 bits of the weights"]
    flip_bit(checkpoint.load(other).path)
    assert "last: 1 bits of the weights" in compare(run, other)
    log = (other / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (other / "metrics.jsonl").write_text("".join(log[:-1]), encoding="utf-8")
    assert "metrics.jsonl, first at their length" in compare(run, other)
