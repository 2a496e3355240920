"""Rules across train.py's settings, derived step counts, and settings without effect."""

import re
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path

import pytest

import train as train_script
from folio import UserError
from folio.base import settings
from folio.base.files import sha256
from folio.base.settings import ROOT, ConfigError
from folio.machine.distributed import Group
from folio.machine.runtime import resolve_runtime
from folio.training import run_log
from folio.training.loggers import LOGGERS
from folio.training.optim import LR_SCHEDULES
from folio.training.schedule import StepCounts
from model import GPTConfig
from train import TrainConfig


def test_all_broken_rules_are_reported_together():
    words = ["--n_embd=30", "--n_head=4", "--min_lr=1", "--total_batch_tokens=64", "--gradient_accumulation_steps=2"]
    with pytest.raises(ConfigError) as error:
        settings.load(TrainConfig, [*words, "--batch_size=0"])
    named = {line.split(": ")[1].split("=")[0] for line in str(error.value).splitlines()}
    assert named == {"n_head", "min_lr", "total_batch_tokens", "batch_size"}
    assert "use 2, 3 or 5" in str(error.value)


def test_cuda_graphs_need_one_micro_batch_per_process(monkeypatch):
    """Eight processes with eight micro-batches per step were refused, although each has one."""
    words = ["--compile=reduce-overhead", "--gradient_accumulation_steps=8", "--batch_size=4"]
    for processes, is_refused in ((1, True), (4, True), (7, True), (8, False), (16, False)):
        for name, value in dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=processes, MASTER_ADDR="here").items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(ConfigError, match="one micro-batch per process") if is_refused else nullcontext():
            settings.load(TrainConfig, words)


def test_min_lr_is_compared_with_the_rate_that_the_schedule_lowers():
    """With --learning_rate=0, only Muon's matrices are trained, but any min_lr was larger than AdamW's rate."""
    words = ["--learning_rate=0", "--muon_learning_rate=0.02"]
    cfg = settings.load(TrainConfig, [*words, "--optimizer=muon", "--min_lr=0.01", "--max_iters=9"])
    assert cfg.schedule(cfg.step_counts, {}).learning_rates_at(9) == (0.0, 0.01)
    with pytest.raises(ConfigError, match=r"min_lr=0\.03: it must be at most muon_learning_rate=0\.02$"):
        settings.load(TrainConfig, [*words, "--optimizer=muon", "--min_lr=0.03"])
    with pytest.raises(ConfigError, match=r"min_lr=0\.01: it must be at most learning_rate=0$"):
        settings.load(TrainConfig, [*words, "--optimizer=adamw", "--min_lr=0.01"])


@pytest.mark.parametrize("n_embd, n_head, remedy", [(30, 2, "1, 3 or 5"), (30, 4, "1, 3 or 5"), (33, 3, "n_embd=36")])
def test_rotary_positions_need_an_even_head_size(n_embd, n_head, remedy):
    """All suggested values work."""
    with pytest.raises(ConfigError, match=f"^command line: n_head={n_head}: .*; use {remedy}$"):
        settings.load(TrainConfig, ["--position=rotary", f"--n_embd={n_embd}", f"--n_head={n_head}"])
    for number in map(int, re.findall(r"\d+", remedy)):
        changed = {"n_embd": number} if "n_embd" in remedy else {"n_head": number}
        GPTConfig(**{"n_embd": n_embd, "n_head": n_head, "position": "rotary", **changed})


@pytest.mark.parametrize("words", [["--n_embd=0", "--n_head=5"], ["--block_size=0", "--total_batch_tokens=64"]])
def test_an_invalid_setting_causes_only_one_error(words):
    """Rules across settings were checked with the default of an invalid one: "it must divide n_embd=768"."""
    with pytest.raises(ConfigError) as error:
        settings.load(TrainConfig, words)
    assert str(error.value) == f"command line: {words[0].removeprefix('--')}: it must be at least 1"


@pytest.mark.parametrize("tokens, accumulation", [(100_000, 10), (91_000, 9), (96_000, 10), (1, 1)])
def test_total_batch_tokens_determines_the_accumulation(tokens, accumulation):
    """It is rounded to a multiple of the micro-batch. Other values were refused."""
    cfg = settings.load(TrainConfig, [f"--total_batch_tokens={tokens}", "--batch_size=10", "--block_size=1000"])
    assert cfg.accumulation == accumulation and cfg.step_tokens == accumulation * 10_000


def test_a_config_file_without_a_data_set_is_refused(write):
    """nanoGPT's train_gpt2.py, which relies on nanoGPT's default, was run on Tiny Shakespeare."""
    path = write("n_layer = 12\nlr_decay_iters = 600000\n")
    with pytest.raises(ConfigError, match=r"--dataset=NAME.*--dataset=openwebtext"):
        settings.load(TrainConfig, [path])
    resumed = settings.load(TrainConfig, [path, "--init_from=resume"])  # the run knows its data
    settings.check(resumed.replace(init_from="scratch", dataset="verse"))  # named in Python
    assert settings.load(TrainConfig, [path, "--dataset=mine"]).dataset == "mine"
    assert settings.load(TrainConfig, ["--n_layer=2"]).dataset == "shakespeare_char"


def test_max_iters_on_the_command_line_scales_a_config_files_step_counts(write, capsys):
    """--max_iters=10 failed with "warmup must end before max_iters", also with nanoGPT's own config files."""
    write("max_iters = 5000\nlr_decay_iters = 5000\nwarmup_iters = 100\neval_interval = 250\ndataset = 'a'\n")

    def counts(*args: str) -> StepCounts:
        return settings.load(TrainConfig, ["x.py", *args]).step_counts

    recipe = StepCounts(5000, lr_decay_iters=5000, warmup_iters=100, eval_interval=250)
    short = StepCounts(30, lr_decay_iters=30, warmup_iters=1, eval_interval=2)
    assert counts() == recipe and capsys.readouterr().out == ""
    assert counts("--max_iters=30") == short
    assert capsys.readouterr().out == (
        "max_iters=30 instead of the config file's 5,000; scaled in proportion: warmup_iters=1 (was 100), "
        "lr_decay_iters=30 (was 5,000), eval_interval=2 (was 250)\n"
    )
    assert counts("--max_iters=10000") == recipe.scaled(10000, ["lr_decay_iters", "warmup_iters", "eval_interval"])
    by_hand = replace(short, eval_interval=7, wsd_decay_iters=3)
    assert counts("--max_iters=30", "--eval_interval=7", "--wsd_decay_iters=3") == by_hand
    Path("y.py").write_text("max_iters = 40\n")
    assert counts("--max_iters=30", "y.py") == replace(recipe, max_iters=40)  # the last argument decides


# --- settings without effect -----------------------------------------------------------------------------------------

RESUMES = dict(init_from="resume", max_iters=1)
DIVERGES = dict(learning_rate=1e30, grad_clip=0.0, eval_interval=9, max_iters=8, max_bad_steps=2)
# setting -> another value
CHANGES = dict(out_dir="out2", overwrite=True, init_from="resume", print_config=True, dataset="prose")
CHANGES |= dict(data_dir="elsewhere", block_size=16, batch_size=2, gradient_accumulation_steps=2)
CHANGES |= dict(total_batch_tokens=256, sampling="random", mask_documents=True, size="auto", n_layer=1, n_head=1)
CHANGES |= dict(n_embd=16, bias=True, position="rotary", activation="gelu", dropout=0.2, embd_pdrop=0.2)
CHANGES |= dict(attn_pdrop=0.2, resid_pdrop=0.2, max_iters=3, minutes=1e-6, optimizer="muon", learning_rate=1e-3)
CHANGES |= dict(muon_learning_rate=0.03, lr_schedule="linear", decay_lr=False, warmup_iters=0, lr_decay_iters=9)
CHANGES |= dict(wsd_decay_iters=1, min_lr=0.0, weight_decay=0.0, beta1=0.5, beta2=0.5, grad_clip=0.1)
CHANGES |= dict(max_bad_steps=3, skip_spikes=8.0, on_divergence="rollback", eval_interval=1, eval_iters=1)
CHANGES |= dict(eval_only=True, save_interval_minutes=1e-9, keep_last=1, always_save_checkpoint=False, snapshots=2)
CHANGES |= dict(sample_tokens=0, patience=1, log_interval=2, wandb_log=True, tensorboard_log=True)
CHANGES |= dict(wandb_project="mine", wandb_run_name="mine", seed=1, device="mps", dtype="bfloat16", compile=False)
CHANGES |= dict(step_graph=True, workers=2, parallel="fsdp", backend="gloo")
CONTEXTS = {  # settings of both runs
    "overwrite": RESUMES,
    "max_bad_steps": DIVERGES,
    "save_interval_minutes": dict(keep_last=9),
    "always_save_checkpoint": dict(learning_rate=0.0, eval_interval=1, keep_last=9),
    "patience": dict(learning_rate=0.0, eval_interval=1),
}
ONLY_SPEED_OR_MEMORY = {"async_save", "recompute", "deterministic"}  # on a CPU


def test_all_settings_are_tested():
    assert CHANGES.keys() | ONLY_SPEED_OR_MEMORY == {field.name for field in fields(TrainConfig)}


@pytest.fixture(scope="module")
def runs() -> dict:
    """What runs without a change print and write, by their settings."""
    return {}


@pytest.fixture
def observe(tiny, tmp_path, monkeypatch, capsys):
    """A function that returns what a run with these settings prints and writes, without times and recorded settings."""

    def start_loggers(out_dir, step, config, run_id) -> list:
        print(*[name for name in LOGGERS if config[name]])
        return []

    monkeypatch.setattr(run_log, "start_loggers", start_loggers)

    def observe(name: str, **changes) -> tuple[str, dict, str]:
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        output = ""
        try:
            if changes.items() >= RESUMES.items():
                train_script.main(tiny(out_dir="out", max_iters=1))
                capsys.readouterr()
            defaults = dict(out_dir="out", max_iters=4, eval_interval=2, dropout=0.0, sample_tokens=2, warmup_iters=1)
            train_script.main(tiny(**{**defaults, **changes}))
        except UserError as error:
            output = str(error)
        output += capsys.readouterr().out
        unused = " ".join(re.findall("settings without effect: (.*)", output))
        output = re.sub(r"settings without effect: .*\n|[\d.,]+ tok/s| of .* free", "", output)
        files = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
        content = {name: sha256(path) for name, path in files.items() if path.suffix == ".safetensors"}
        for path in folder.glob("*/metrics.jsonl"):
            content["metrics"] = re.sub('"(tokens_per_second|peak_memory)": [^,}]*', "", path.read_text())
        return output, dict.fromkeys(files) | content, unused

    return observe


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_changes_the_run_or_is_named(name, observe, runs):
    """Several had no effect and no line: warmup_iters of a constant rate, muon_learning_rate without Muon, ..."""
    value, context = CHANGES[name], CONTEXTS.get(name, {})
    if repr(context) not in runs:
        runs[repr(context)] = observe("before", **context)
    output, files, _ = runs[repr(context)]
    changed_output, changed_files, unused = observe("after", **{**context, name: value})
    assert (f"{name}={value} (" in unused) == ((output, files) == (changed_output, changed_files))


EFFECTIVE = {  # settings of the learning rates, with two values each
    "learning_rate": (1e-2, 2e-2),
    "muon_learning_rate": (3e-2, 4e-2),
    "warmup_iters": (3, 5),
    "lr_decay_iters": (15, 18),
    "wsd_decay_iters": (4, 6),
    "min_lr": (1e-3, 2e-3),
}


@pytest.mark.parametrize("lr_schedule", LR_SCHEDULES)
@pytest.mark.parametrize("decay_lr", [True, False])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_setting_of_the_learning_rates_has_an_effect_or_is_named(optimizer, decay_lr, lr_schedule):
    """warmup_iters was ignored with lr_schedule=constant, and nothing said so."""
    base = dict(optimizer=optimizer, decay_lr=decay_lr, lr_schedule=lr_schedule, max_iters=200)
    base |= {name: values[0] for name, values in EFFECTIVE.items()}

    def rates(**changes) -> list:
        cfg = TrainConfig(**{**base, **changes})
        return [*map(cfg.schedule(cfg.step_counts, {}).learning_rates_at, range(20))]

    cfg = TrainConfig(**base)
    unused = cfg.unused(resolve_runtime("cpu", "float32", False))
    without_effect = {name for name, (_, value) in EFFECTIVE.items() if rates(**{name: value}) == rates()}
    other = "linear" if lr_schedule != "linear" else "cosine"
    without_effect |= {"lr_schedule"} if rates(lr_schedule=other) == rates() else set()
    assert unused.keys() - {"lr_schedule"} == without_effect - {"lr_schedule"}
    assert not decay_lr or "lr_schedule" not in without_effect


def test_a_constant_rate_has_a_warmup_unless_decay_lr_is_off():
    for decay_lr, first in ((True, 0.25), (False, 1.0)):
        cfg = TrainConfig(lr_schedule="constant", decay_lr=decay_lr, learning_rate=1.0, warmup_iters=3, max_iters=9)
        schedule = cfg.schedule(cfg.step_counts, {})
        assert [schedule.learning_rate_at(step) for step in (0, 3, 8)] == [first, 1.0, 1.0]


@pytest.mark.parametrize("path", sorted(ROOT.glob("config/*.py")), ids=lambda path: path.stem)
def test_recipes_have_no_settings_without_effect(path):
    cfg = settings.load(TrainConfig, [str(path)])
    runtime = resolve_runtime("cpu", "float32", False)
    assert cfg.unused(runtime) == {}


def test_settings_of_several_processes_and_of_a_time_budget_are_named():
    unused = dict(deterministic=True, sample_tokens=9, backend="mpi", max_iters=9, dropout=0.1)
    dropouts = dict(embd_pdrop=0.1, attn_pdrop=0.1, resid_pdrop=0.1)
    cfg = TrainConfig(parallel="fsdp", minutes=1.0, **unused).replace(**dropouts)
    runtime = replace(resolve_runtime("cpu", "float32", False), group=Group(gloo="a group"))
    assert cfg.unused(runtime).keys() == unused.keys()
