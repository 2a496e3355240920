"""Apply the diffs of docs/code/change-it.md to a copy of Folio, and run that page's commands with tiny models."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from folio.base.files import read_json
from lab.ideas.make_branches import read_changes
from tests.support.repository import ROOT, copy_repository, run_commands
from tests.support.runs import read_metrics, same_tensors

PAGE = (ROOT / "docs" / "code" / "change-it.md").read_text(encoding="utf-8")
SMALL = (
    "--n_layer=1 --n_head=1 --n_embd=16 --block_size=16 --batch_size=2 --eval_iters=1 --eval_interval=2 --keep_last=9 "
    "--log_interval=1 --bias=True --warmup_iters=1 --lr_decay_iters=4 --sample_tokens=0 --min_lr=0 --dtype=float32"
)
ANSWERS = {f"What is {n} + {n}?": f"It is {2 * n}." for n in range(100)}


CHANGES = read_changes(PAGE)


def apply(diff: str, folder: Path) -> str:
    """Apply a diff in a folder. Returns git's message if it does not fit, and then changes nothing."""
    result = subprocess.run(["git", "apply"], input=diff, cwd=folder, capture_output=True, encoding="utf-8")
    return result.stderr if result.returncode else ""


@pytest.fixture(scope="module")
def changed_folder(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of Folio with all changes that fit, in which their commands have run.

    Runs of two steps are resumed up to four.
    """
    folder = tmp_path_factory.mktemp("folio")
    copy_repository(folder)
    (folder / "novel.txt").write_text(text, encoding="utf-8")
    rows = [f'"{question}",ignored,{answer}\n' for question, answer in ANSWERS.items()]
    (folder / "faq.csv").write_text("question,topic,answer\n" + "".join(rows), encoding="utf-8")
    commands = ["python prepare/text.py novel.txt --name=shakespeare_char"]
    applied = [change for change in CHANGES if not apply(change.diff, folder)]
    for command in (command for change in applied for command in change.commands):
        if "train.py" not in command:
            commands.append(command)
            continue
        commands.append(f"{command} {SMALL} --max_iters=2")
        commands.append(f"{command} {SMALL} --max_iters=4 --init_from=resume")
        commands.append(f"python sample.py {command.split()[-1]} --max_new_tokens=4 --top_k=None")
        if "--optimizer" in command:
            commands.append(f"{command}-straight {SMALL} --max_iters=4")
    run_commands(commands, folder)
    return folder


@pytest.fixture
def changed(changed_folder: Path) -> Callable[[str], Path]:
    """A function that returns a folder that the commands of a change have made.

    Skips the test if the change's diff does not fit, which test_each_diff_applies_to_the_repository reports.
    """

    def find(name: str) -> Path:
        if not (changed_folder / name).exists():
            pytest.skip(f"the diff for {name} does not fit")
        return changed_folder / name

    return find


@pytest.mark.parametrize(
    "change", CHANGES, ids=lambda change: re.search(r"^\+\+\+ b/(\S+)", change.diff, re.MULTILINE)[1]
)
def test_each_diff_applies_to_the_repository(change, tmp_path):
    copy_repository(tmp_path)
    problem = apply(change.diff, tmp_path)
    assert not problem, f"{problem}edit this diff in docs/code/change-it.md, so that it fits the code:\n{change.diff}"


def test_a_diff_that_does_not_fit_is_reported(tmp_path):
    """After a change of the same lines, ten tests failed without saying what to edit."""
    copy_repository(tmp_path)
    path = tmp_path / "model.py"
    changed = path.read_text(encoding="utf-8").replace("LayerNorm(config.n_embd, bias=config.bias)", "norm(config)")
    path.write_text(changed, encoding="utf-8")
    problems = {change.diff: problem for change in CHANGES if (problem := apply(change.diff, tmp_path))}
    assert problems
    for diff, problem in problems.items():
        assert "RMSNorm" in diff and "patch does not apply" in problem


def tensors(run: Path, file: str = "model", step: int = 4) -> dict[str, torch.Tensor]:
    return load_file(run / f"step-{step:06d}" / f"{file}.safetensors")


def test_activation(changed):
    assert read_json(changed("out-relu2") / "step-000004" / "state.json")["model"]["activation"] == "relu2"


def test_position_encoding(changed):
    first, last = (tensors(changed("out-kerple"), step=step)["transformer.log_r.weight"] for step in (2, 4))
    assert first.shape == (2, 1) and not torch.equal(first, last)  # it is trained


def test_norm(changed):
    names = tensors(changed("out-rms")).keys()
    assert "transformer.h.0.mlp.c_fc.bias" in names and "transformer.h.0.ln_1.weight" in names
    assert not any(".ln_" in name and name.endswith("bias") for name in names)


def test_schedule(changed):
    lines = read_metrics(str(changed("out-sqrt")))
    rates = {line["step"]: line["lr"] / lines[1]["lr"] for line in lines}  # step 2 has the full rate
    expected = {1: 0.5} | {step: 1 - ((step - 2) / 3) ** 0.5 for step in (2, 3, 4)}  # a warmup of 1 step, a decay of 3
    assert rates == pytest.approx(expected)


KEYS = {"nadam": {"step", "mu_product", "exp_avg", "exp_avg_sq"}, "lion": {"exp_avg"}}


@pytest.mark.parametrize("name", KEYS)
def test_optimizers_resume_exactly(name, changed):
    runs = changed(f"out-{name}"), changed(f"out-{name}-straight")
    assert {key.rpartition("/")[2] for key in tensors(runs[0], "optimizer")} == KEYS[name]
    for file in ("model", "optimizer"):
        assert same_tensors(*(tensors(run, file) for run in runs))


def test_tokenizer(changed, text):
    folder = changed("data/words")
    words = read_json(folder / "tokenizer.json")["words"]
    shards = [np.fromfile(folder / f"{split}.bin", dtype="<u2") for split in ("train", "val")]
    assert "".join(words[token] for token in np.concatenate(shards)) == text
    assert max(map(len, words)) > 1 and sorted(words) == words


def test_data_set_counts_only_the_answers(changed):
    folder = changed("data/questions")
    characters = read_json(folder / "tokenizer.json")["characters"]
    counted, all_text = [], []
    for split in ("train", "val"):
        ids, mask = np.fromfile(folder / f"{split}.bin", dtype="<u2"), np.fromfile(folder / f"{split}_mask.bin", "u1")
        all_text += [(characters + "|")[token] for token in ids]
        counted += [(characters + "|")[token] for token in ids[mask != 0]]
    assert sorted("".join(counted).split("|")) == sorted(["", *ANSWERS.values()])
    assert sorted("".join(all_text).split("|")) == sorted(["", *map("\n".join, ANSWERS.items())])


def test_sampling_filter(changed):
    sample = "python sample.py --out_dir=out-epsilon --max_new_tokens=50 --top_k=None --temperature"
    outputs = run_commands([f"{sample}=1", f"{sample}=1 --epsilon=1", f"{sample}=0"], changed("out-epsilon").parent)
    free, filtered, greedy = outputs.values()
    assert filtered == greedy != free  # the most likely token is always kept
