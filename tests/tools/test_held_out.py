"""Validation text that a run may have been trained on, in every command that measures a run on it."""

import io
import json
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

import train as train_script
from folio import UserError
from folio.base.files import read_json
from folio.base.settings import load
from prepare import pairs as prepare_pairs
from prepare import text as prepare_text
from tests.support.exports import run_export
from tools import compare, evaluate, memorized, replay, report, runs
from train import TrainConfig, train

AGAIN = "prepared again since the training: may contain training text"


@pytest.fixture(scope="module")
def prepared_again(tiny_in, text, tmp_path_factory) -> Path:
    """A folder with a data set, two runs on it, and another split of the data set in its place."""
    folder = tmp_path_factory.mktemp("again")
    (folder / "tale.txt").write_text(text[:8000], encoding="utf-8")

    def prepare(**settings) -> None:
        inputs = (str(folder / "tale.txt"),)
        prepare_text.main(prepare_text.TextConfig(inputs=inputs, data_dir=str(folder), num_workers=0, **settings))

    with redirect_stdout(io.StringIO()):
        prepare()
        for name in ("a", "b"):
            train(tiny_in(max_iters=2, warmup_iters=1, **settings_of(folder, name)))
        prepare(val_fraction=0.4, overwrite=True)
    return folder


def settings_of(folder: Path, name: str) -> dict[str, str]:
    """The folders of a run in the fixture."""
    return dict(dataset="tale", data_dir=str(folder), out_dir=str(folder / name))


def run_tool(module, settings, *words: str) -> str:
    """Return what a tool prints."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        module.main(load(settings, list(words)))
    return out.getvalue()


@pytest.fixture
def evaluated(tmp_path) -> Callable[..., tuple[str, list[dict]]]:
    """A function that evaluates a run. Returns what the tool prints, and its results."""

    def evaluate_run(*words: str) -> tuple[str, list[dict]]:
        results = tmp_path / "results.json"
        printed = run_tool(evaluate, evaluate.EvaluateConfig, *words, f"--json={results}")
        return printed, read_json(results)["results"]

    return evaluate_run


@pytest.mark.parametrize("words", [[], ["--dataset=tale", "--data_dir={folder}"], ["--context=20"]])
def test_an_evaluation_is_labeled(words, prepared_again, tmp_path, evaluated):
    """The loss of a data set that was prepared again was shown as a validation loss: 0.65 instead of 5.88."""
    run, words = str(prepared_again / "a"), [word.format(folder=prepared_again) for word in words]
    printed, rows = evaluated(run, *words)
    assert AGAIN in printed and all(row["prepared_again"] for row in rows)
    assert "tale, has been prepared again since then" in printed
    shutil.copytree(prepared_again / "tale", tmp_path / "tale")
    arguments = dict(inputs=(str(prepared_again / "tale.txt"),), data_dir=str(tmp_path), overwrite=True)
    prepare_text.main(prepare_text.TextConfig(num_workers=0, **arguments))
    where = ["--dataset=tale", f"--data_dir={tmp_path}", *words[2:]]  # the same data as before, elsewhere
    printed, rows = evaluated(run, *where)
    assert "prepared again" not in printed and not any(row["prepared_again"] for row in rows)


@pytest.mark.needs("scipy")
def test_a_comparison_is_labeled(prepared_again, tmp_path):
    sides = [str(prepared_again / name) for name in ("a", "b")]
    printed = run_tool(compare, compare.CompareConfig, *sides, f"--json={tmp_path / 'results.json'}")
    assert printed.count(f"({AGAIN})") == 2 * 3
    for comparison in read_json(tmp_path / "results.json")["comparisons"]:
        assert comparison["may_be_trained_on"] == sides
        assert f"{sides[0]}, {sides[1]} may have been trained on this text" in comparison["sentence"]


REFUSED: dict[str, Callable[[Path, Path], object]] = {
    "resume": lambda folder, out: train(TrainConfig(init_from="resume", max_iters=4, **settings_of(folder, "a"))),
    "memorized": lambda folder, out: run_tool(memorized, memorized.MemorizedConfig, str(folder / "a")),
    "replay": lambda folder, out: run_tool(replay, replay.ReplayConfig, str(folder / "a"), "--step=1"),
    "export": lambda folder, out: run_export(str(folder / "a"), out / "a.html", "--to=html", "--with_index"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_data_than_in_training_is_refused(name, prepared_again, tmp_path):
    with pytest.raises(UserError, match=r"tale.*(prepared again|not this run's original data)"):
        REFUSED[name](prepared_again, tmp_path)


def test_an_exported_file_has_no_validation_loss(prepared_again, tmp_path, capsys):
    run_export(str(prepared_again / "a"), tmp_path / "a.html", "--to=html")
    printed = capsys.readouterr().out
    assert "the validation loss is not measured: its training data, tale, has been prepared again" in printed
    assert "validation tokens" not in printed


@pytest.mark.parametrize("eval_only", [False, True])
def test_a_run_from_weights_that_were_trained_on_another_split_says_so(
    eval_only, prepared_again, tmp_path, capsys, evaluated
):
    """Finetuning on another split of the same text showed the loss of training text as its validation loss."""
    settings = settings_of(prepared_again, "a") | dict(out_dir=str(tmp_path / "fine"))
    train_script.main(TrainConfig(init_from=str(prepared_again / "a"), max_iters=1, eval_only=eval_only, **settings))
    assert "tale: prepared again since" in (printed := capsys.readouterr().err), printed
    if eval_only:
        return
    fine = settings["out_dir"]
    train_script.main(TrainConfig(init_from="resume", max_iters=2, **settings))  # keeps the record
    printed, rows = evaluated(fine)
    assert AGAIN in printed and rows[0]["prepared_again"]
    note = "fine: started from weights that may have been trained on its validation text"
    assert note in run_tool(runs, runs.RunsConfig, fine)
    new = settings | dict(out_dir=str(tmp_path / "from-scratch"))
    train_script.main(TrainConfig(max_iters=1, n_layer=1, n_head=1, n_embd=8, block_size=32, batch_size=1, **new))
    run_tool(report, report.ReportConfig, fine, new["out_dir"], f"--output={tmp_path / 'report.html'}")
    page = (tmp_path / "report.html").read_text()
    assert "The runs do not all hold out their validation text, so their losses are not comparable." in page
    assert note in page


@pytest.mark.needs("sacrebleu", "rouge_score")
def test_answers_to_pairs_are_labeled(tiny, tmp_path, evaluated):
    """Pairs of a validation set were not compared with the run's, and pairs of a file were never searched."""
    lines = [json.dumps({"prompt": f"{k}:", "completion": f" {k + 1}."}) for k in range(100, 140)]
    source = tmp_path / "sums.jsonl"
    source.write_text("\n".join(lines))

    def prepare(**settings) -> None:
        cfg = prepare_pairs.PairsConfig(inputs=(str(source),), data_dir=str(tmp_path), tokenizer="byte", **settings)
        prepare_pairs.main(cfg)

    prepare()
    train(cfg := tiny(dataset="sums", data_dir=str(tmp_path), max_iters=2, warmup_iters=1))
    words = [cfg.out_dir, "--tasks=pairs"]
    printed, (row, *_) = evaluated(*words)
    assert not row["prepared_again"] and row["probes"] is None and "prepared again" not in printed
    printed, (row, *_) = evaluated(*words, f"--pairs={source}")
    matches = row["probes_matched"]
    assert row["probes"] == 20 and 10 < matches < 20
    assert f"{matches} of 20 pairs occur in the training data of {cfg.out_dir}: it was trained on this text" in printed
    prepare(val_fraction=0.4, overwrite=True)
    printed, (row, *_) = evaluated(*words)
    assert row["prepared_again"] and f"pairs of sums, validation ({AGAIN})" in printed


def test_a_validation_set_is_searched_in_the_other_data_sets_of_a_mixture(tiny, mixed_dir, tmp_path, text, evaluated):
    """A text that is held out from one data set of a mixture may be in the training set of another."""
    source = tmp_path / "rotated.txt"
    source.write_text(text[-4000:] + text[:4000])
    settings = dict(tokenizer=str(Path(mixed_dir, "verse")), on_unknown="skip", data_dir=mixed_dir)
    prepare_text.main(prepare_text.TextConfig(inputs=(str(source),), **settings))
    mixture = dict(dataset="verse:0.4,prose:0.3,rotated:0.3", data_dir=mixed_dir)
    train(cfg := tiny(**mixture, max_iters=2, warmup_iters=1))
    printed, rows = evaluated(cfg.out_dir)
    matched = {row["of"]: row["probes_matched"] for row in rows}
    expected = {"verse, validation": 20, "prose, validation": 0, "rotated, validation": 20}
    assert matched == expected, printed
    for name in ("prose", "verse"):  # as before, if each data set is given
        _, rows = evaluated(cfg.out_dir, f"--dataset={name}")
        assert rows[0]["probes_matched"] == expected[f"{name}, validation"]
