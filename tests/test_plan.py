import json
from dataclasses import asdict
from pathlib import Path

import pytest

from folio import UserError, configurator
from tools import plan, report
from train import train


def run_plan(*args: str) -> tuple[plan.PlanConfig, dict]:
    """The settings, and the content of plan.json."""
    cfg = configurator.load(plan.PlanConfig, list(args))
    plan.main(cfg)
    return cfg, json.loads(Path(cfg.out_dir, "plan.json").read_text())


@pytest.mark.architecture("model.py: GPTConfig.flops_per_token; and in this test's counts")
def test_a_plan_from_a_data_sheet(tmp_path, capsys):
    """GPT-2 124M on eight H100, against a calculation in the test."""
    args = ["config/gpt2_124m.py", f"--data_dir={tmp_path}", f"--out_dir={tmp_path / 'out'}", "--device=H100"]
    cfg, planned = run_plan(*args, "--gpus=8", "--mfu=0.5", "--price=2")
    assert planned["parameters"] == 124_337_664 and planned["tokens"] == cfg.max_iters * 524_288
    flops_per_token = 6 * (12 * 12 * 768**2 + 50257 * 768) + 12 * 12 * 768 * 1024
    assert planned["flops"] == planned["tokens"] * flops_per_token
    seconds = planned["flops"] / (8 * 0.5 * 989.4e12)
    assert planned["seconds"] - planned["evaluation_seconds"] == pytest.approx(seconds)
    assert planned["kilowatt_hours"] == pytest.approx(8 * 0.7 * planned["seconds"] / 3600)
    assert planned["price"] == pytest.approx(8 * 2 * planned["seconds"] / 3600)
    out = capsys.readouterr().out
    assert "8 x H100" in out and "because openwebtext is not prepared" in out and "too little" not in out
    _, one_hour = run_plan(*args, "--gpus=8", "--mfu=0.5", "--minutes=60")
    assert 3570 < one_hour["seconds"] <= 3600
    assert one_hour["steps"] == pytest.approx(19072 * 3600 / planned["seconds"], rel=0.01)
    run_plan(*args[:-1], "--device=T4", "--batch_size=64")
    assert "too little; what would fit: --batch_size=" in capsys.readouterr().out


def test_a_plan_from_measured_steps_and_its_comparison_with_the_run(tiny, capsys):
    cfg = tiny(max_iters=40, eval_interval=20, log_interval=4, eval_iters=None)
    settings = {name: value for name, value in asdict(cfg).items() if value is not None}
    run_plan(*[f"--{name}={value}" for name, value in settings.items()])
    assert "steps measured on cpu" in capsys.readouterr().out
    train(cfg)  # a folder that only holds a plan is not an earlier run
    run = report.Run.of(Path(cfg.out_dir))
    measured = run.measured()
    assert measured["steps"] == run.plan["steps"] == 40 and measured["tokens"] == run.plan["tokens"] == 40 * 4 * 32
    intervals = zip(run.lines, run.lines[1:], strict=False)
    seconds = sum((b["tokens"] - a["tokens"]) / b["tokens_per_second"] for a, b in intervals)
    assert measured["seconds"] == pytest.approx(seconds * 40 / 39)
    page = report.report([run])
    assert "measured / planned" in page and "steps measured on cpu" in page


@pytest.mark.parametrize(
    "args, message",
    [
        (["--device=H1000"], "device=H1000: use auto, cpu, cuda, mps, or one of B200"),
        (["--gpus=8"], "gpus=8: name the GPU with --device=B200"),
        (["--dataset=nothing"], "dataset=nothing: prepare it to measure steps here, or name a GPU"),
        (["--gpus=0", "--mfu=2"], "gpus=0: it must be at least 1"),
    ],
)
def test_impossible_plans_are_refused(args, message, tmp_path):
    with pytest.raises(UserError, match=message):
        run_plan(*args, f"--out_dir={tmp_path}")
