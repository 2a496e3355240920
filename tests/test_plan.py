import json
from dataclasses import asdict
from pathlib import Path

import pytest

from folio import UserError, configurator
from folio.gpus import GPUS
from tools import plan, report
from train import train


def planned(*words: str) -> tuple[plan.PlanConfig, dict]:
    cfg = configurator.load(plan.PlanConfig, list(words))
    plan.main(cfg)
    return cfg, json.loads(Path(cfg.out_dir, "plan.json").read_text())


def test_by_a_data_sheet(tmp_path, capsys):
    """GPT-2 124M on eight H100: the arithmetic by hand."""
    words = ["config/gpt2_124m.py", f"--data_dir={tmp_path}", f"--out_dir={tmp_path / 'out'}", "--device=H100"]
    cfg, found = planned(*words, "--gpus=8", "--mfu=0.5", "--price=2")
    assert found["parameters"] == 124_337_664 and found["tokens"] == cfg.max_iters * 524_288
    a_token = 6 * (12 * 12 * 768**2 + 50257 * 768) + 12 * 12 * 768 * 1024
    assert found["flops"] == found["tokens"] * a_token
    seconds = found["flops"] / (8 * 0.5 * 989.4e12)
    assert found["seconds"] - found["evaluation_seconds"] == pytest.approx(seconds)
    assert found["kilowatt_hours"] == pytest.approx(8 * 0.7 * found["seconds"] / 3600)
    assert found["price"] == pytest.approx(8 * 2 * found["seconds"] / 3600)
    told = capsys.readouterr().out
    assert "8 x H100" in told and "because openwebtext is not prepared" in told and "too little" not in told
    _, hour = planned(*words, "--gpus=8", "--mfu=0.5", "--minutes=60")
    assert 3570 < hour["seconds"] <= 3600 and hour["steps"] == pytest.approx(19072 * 3600 / found["seconds"], rel=0.01)
    planned(*words[:-1], "--device=T4", "--batch_size=64")
    assert "too little; what would fit: --batch_size=" in capsys.readouterr().out


def test_by_measuring_and_then_by_what_happened(tiny, capsys):
    cfg = tiny(max_iters=40, eval_interval=20, log_interval=4, eval_iters=None)
    settings = {name: value for name, value in asdict(cfg).items() if value is not None}
    planned(*[f"--{name}={value}" for name, value in settings.items()])
    assert "steps measured on cpu" in capsys.readouterr().out
    train(cfg)  # a folder with a plan in it is no earlier run
    run = report.Run.of(Path(cfg.out_dir))
    measured = run.measured()
    assert measured["steps"] == run.plan["steps"] == 40 and measured["tokens"] == run.plan["tokens"] == 40 * 4 * 32
    lines = run.lines[1:]
    by_hand = sum((b["tokens"] - a["tokens"]) / b["tokens_per_second"] for a, b in zip(run.lines, lines, strict=False))
    assert measured["seconds"] == pytest.approx(by_hand * 40 / 39)
    page = report.report([run])
    assert "measured / planned" in page and "steps measured on cpu" in page


@pytest.mark.parametrize(
    "words, message",
    [
        (["--device=H1000"], "device=H1000: use auto, cpu, cuda, mps, or one of B200"),
        (["--gpus=8"], "gpus=8: name the GPU with --device=B200"),
        (["--dataset=nothing"], "dataset=nothing: prepare it to measure steps here, or name a GPU"),
        (["--gpus=0", "--mfu=2"], "gpus=0: it must be at least 1"),
    ],
)
def test_what_cannot_be_planned(words, message, tmp_path):
    with pytest.raises(UserError, match=message):
        planned(*words, f"--out_dir={tmp_path}")
    assert all(gpu.tflops > 0 and gpu.memory > 0 and gpu.watts > 0 for gpu in GPUS.values())
