"""The output and errors of tools/evaluate.py."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from folio import UserError
from folio.base.files import read_json
from folio.base.settings import ConfigError, load
from folio.checkpoints import foreign
from folio.checkpoints.export_formats import write_hugging_face
from prepare import text as prepare_text
from tests.support.exports import checkpoint_of
from tests.support.terminals import terminal
from tests.support.tiny_tokenizers import TEXT, bpe
from tests.support.tolerances import logits_error
from tools import evaluate
from tools.evaluate import EvaluateConfig
from train import train


@pytest.fixture
def evaluated(capsys, tmp_path) -> Callable[..., tuple[str, str, dict]]:
    """A function that runs the tool. Returns its output, its errors, and the content of --json."""

    def run_tool(*words: object) -> tuple[str, str, dict]:
        capsys.readouterr()
        evaluate.main(load(EvaluateConfig, [*map(str, words), f"--json={tmp_path / 'results.json'}"]))
        return *capsys.readouterr(), read_json(tmp_path / "results.json")

    return run_tool


# --- text -------------------------------------------------------------------------------------------------------------


def test_the_loss_equals_the_validation_loss_of_training(tiny, evaluated):
    cfg = tiny(max_iters=12, eval_interval=12, eval_iters=None)
    loss = train(cfg).best_val_loss
    out, _, _ = evaluated(cfg.out_dir, "--dtype=float32")
    row = next(line for line in out.splitlines() if "loss, nats per token" in line)
    assert f"| verse, validation | loss, nats per token | {loss:.4f} |" in row and "blocks of 1,024 bytes" in row


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("options", [[], ["--context=64"]])
def test_a_terminal_shows_aligned_tables(run, columns, options, monkeypatch):
    """It showed Markdown, with the name of the run in each row."""
    monkeypatch.chdir(Path(run).parent)
    with terminal(columns) as lines:
        evaluate.main(load(EvaluateConfig, [Path(run).name, *options]))
    rules = [i for i, line in enumerate(lines) if set(line) == {"─", " "}]
    assert len(rules) == 1 and not any("|---" in line or line.startswith("| ") for line in lines)
    starts = [match.start() for match in re.finditer("─+", lines[rules[0]])]
    head = lines[rules[0] - 1]
    assert all(head[start] != " " and head[start - 1] == " " for start in starts[1:])
    assert max(map(len, lines)) <= columns and sum(Path(run).name in line for line in lines[rules[0] :]) == 0


def test_contexts_longer_than_in_training(tiny, data_dir, evaluated):
    """--block_size was limited to that of the training run for all models."""
    train(cfg := tiny(max_iters=2, warmup_iters=1, position="rotary", block_size=16))
    _, _, results = evaluated(cfg.out_dir, "--block_size=50", "--dtype=float32")
    ids = torch.from_numpy(np.fromfile(data_dir / "verse" / "val.bin", "<u2").astype(np.int64))
    model, losses, largest = foreign.load(cfg.out_dir).build().eval(), [], 0.0
    for begin in range(0, len(ids) - 1, 50):
        context = ids[begin : begin + 51]
        with torch.inference_mode():
            logits = model.logits(context[None, :-1])[0]
        losses += F.cross_entropy(logits, context[1:], reduction="none").tolist()
        largest = max(largest, logits.abs().max().item())
    error = 2 * logits_error(model.config, 50) * largest  # a loss is the difference of a logit and a logarithm of a sum
    assert results["results"][0]["value"] == pytest.approx(np.mean(losses), abs=error)


def test_the_command_with_context(tiny, tmp_path, text, data_dir, evaluated):
    """Three models with different block_size on the same windows, and one with another tokenizer."""
    names = {"learned": ("learned", 32), "rotary": ("rotary", 16), "alibi": ("alibi", 64)}
    for name, (position, block_size) in names.items():
        run = dict(position=position, block_size=block_size, out_dir=str(tmp_path / name))
        train(tiny(max_iters=2, warmup_iters=1, **run))
    prepare(data_dir / "verse.txt", tmp_path, tokenizer="byte")
    train(tiny(max_iters=2, warmup_iters=1, data_dir=str(tmp_path), out_dir=str(tmp_path / "bytes")))
    new = tmp_path / "new.txt"
    new.write_text(text[:600] + "é", encoding="utf-8")
    runs = [str(tmp_path / name) for name in ("alibi", "learned", "rotary", "bytes")]
    arguments = [str(tmp_path / "al*"), ",".join(runs[1:])]  # patterns and commas
    out, err, results = evaluated(*arguments, f"--text={new}", "--on_unknown=skip", "--context=64")
    tables = [table for table in out.split("\n\n") if table.startswith("|")]
    cells = [[[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()] for table in tables]
    assert [table[0][1:] for table in cells] == [runs[:3], runs[3:]]
    assert cells[0][2] == ["block_size in training", "64", "32", "16"]
    assert [line[0] for line in cells[0][3:6]] == ["1 to 16", "17 to 32", "33 to 64"]
    assert cells[0][5][2] == "none" and "none" not in cells[0][3] + cells[0][4] + cells[0][5][:2] + cells[0][5][3:]
    rows, curves = results["results"], results["curves"]
    assert [(row["run"], row["last"]) for row in rows] == [(run, last) for run in runs for last in (16, 32, 64)]
    assert [curve["run"] for curve in curves] == runs and curves[1]["losses"][32:] == [None] * 32
    for i, curve in enumerate(curves):
        for line, row in zip(cells[i // 3][3:6], rows[3 * i : 3 * i + 3], strict=True):
            value = "none"
            if row["value"] is not None:
                assert row["n"] == 9
                assert row["value"] == pytest.approx(np.mean(curve["losses"][row["first"] - 1 : row["last"]]))
                value = f"{row['value']:.4f} ± {(row['high'] - row['low']) / 2:.4f}"
            assert line[1 + i % 3] == value
    # messages about the text, as without --context
    assert err.count("probes of 32 tokens occur in the training data of") == 4
    matched = [f"{row['probes_matched']} of {row['probes']}" for row in rows[::3]]
    assert cells[0][6][1:] + cells[1][6][1:] == matched
    assert [f"{run} left out 1 of the 601 characters" in out for run in runs] == [True] * 3 + [False]


def test_characters_that_were_left_out_are_counted(run, tmp_path, evaluated):
    """With --on_unknown=skip, characters were left out without a message."""
    text = tmp_path / "new.txt"
    text.write_text("the king shall love é\n" * 19 + "the king shall lov3 é\n", encoding="utf-8")
    out, _, results = evaluated(run, f"--text={text}", "--on_unknown=skip")
    expected = f"{run} left out 21 of the 440 characters of {text} (4.77%), because they are not in its vocabulary"
    assert f"{expected}: 'é' '3'\n" in out
    row = results["results"][0]
    assert (row["characters"], row["left_out"]) == (440, 21)


def test_xz_is_the_baseline_on_validation_sets(run, data_dir, evaluated):
    for words in ([], ["--dataset=verse", f"--data_dir={data_dir}"]):
        out, _, results = evaluated(run, *words)
        (row,) = results["xz"]
        assert row["of"] == "verse, validation" and 0 < row["bits_per_byte"] < 3
        assert f"\nxz reaches {row['bits_per_byte']:.4f} bits per byte on verse, validation" in out
    for words in ([f"--text={data_dir / 'verse.txt'}"], ["--context=20"]):
        out, _, results = evaluated(run, *words)
        assert results["xz"] == [] and "xz reaches" not in out


# --- training data ----------------------------------------------------------------------------------------------------


def prepare(source: Path, folder: Path, **settings: str) -> None:
    prepare_text.main(prepare_text.TextConfig(inputs=(str(source),), data_dir=str(folder), num_workers=0, **settings))


def test_a_text_that_was_trained_on_is_reported(run, tmp_path, text, data_dir, evaluated):
    """Training on the evaluated text was not reported."""
    new, part = tmp_path / "new.txt", tmp_path / "part.txt"
    new.write_text(text[:3000][::-1], encoding="utf-8")

    def lines_and_row(*words: str) -> tuple[list[str], dict]:
        """Return the printed lines about the training data, and a row of the results."""
        out, err, results = evaluated(run, *words)
        row = results["results"][0]
        mark = f"({row['probes_matched']} of {row['probes']} probes are in its training data) |"
        assert (mark in out) == bool(row["probes_matched"])
        return [line for line in err.splitlines() if "probes of 32" in line or "check" in line], row

    (line,), row = lines_and_row(f"--text={data_dir / 'verse.txt'}")
    matches = row["probes_matched"]
    assert 17 <= matches <= 19 and row["probes"] == 20  # a tenth is for validation
    assert f"verse.txt: {matches} of 20 probes of 32 tokens occur in the training data of {run}: it was" in line
    assert "trained on this text" in line
    lines, row = lines_and_row(f"--text={new}")
    assert lines == [] and (row["probes"], row["probes_matched"]) == (20, 0)
    for words in ([], ["--dataset=verse"]):  # its own validation set
        lines, row = lines_and_row(*words)
        assert lines == [] and row["probes"] is None
    part.write_text(text[:5000], encoding="utf-8")
    prepare(part, tmp_path, tokenizer=run)
    (line,), row = lines_and_row("--dataset=part", f"--data_dir={tmp_path}")
    assert line.startswith("part, validation: ") and row["probes_matched"] == row["probes"]
    new.write_text("the king", encoding="utf-8")
    (line,), row = lines_and_row(f"--text={new}")
    assert "could not check" in line and line.endswith("it has fewer than 32 characters")


def test_a_text_of_short_documents_is_searched(tiny, tmp_path, text, evaluated):
    """A line of the training text was not compared with it, because it has fewer BPE tokens than a probe."""
    source, new = tmp_path / "text.txt", tmp_path / "new.txt"
    source.write_text(text, encoding="utf-8")
    prepare(source, tmp_path / "data", tokenizer="bpe", vocab_size=300)
    train(cfg := tiny(max_iters=2, warmup_iters=1, dataset="text", data_dir=str(tmp_path / "data")))
    line = next(line for line in text.splitlines()[100:] if len(line) >= 35)
    for lines, is_quoted in (([line, line[::-1]], True), ([line[::-1]] * 2, False)):
        new.write_text("\n".join(lines), encoding="utf-8")
        out, err, results = evaluated(cfg.out_dir, f"--text={new}", "--split_on=\\n")
        row = results["results"][0]
        count = row["characters_in_training"]
        assert row["probes"] is None and row["characters_searched"] == len(lines) * len(line)
        assert 32 <= count <= len(line) if is_quoted else count == 0  # a token at the ends may differ
        label = f"{count} of {len(lines) * len(line)} characters"
        assert (f"new.txt: {label} occur in the training data of {cfg.out_dir}" in err) == is_quoted
        assert (f"({label} are in its training data) |" in out) == is_quoted


def test_training_data_that_is_missing_changed_or_unknown_is_reported(tiny, tmp_path, text, data_dir, evaluated):
    """The data of a finetuned model's base is not searched."""
    shutil.copytree(data_dir, tmp_path / "data")
    train(cfg := tiny(max_iters=2, warmup_iters=1, data_dir=str(tmp_path / "data")))
    train(fine := tiny(max_iters=2, warmup_iters=1, init_from=cfg.out_dir, out_dir=str(tmp_path / "fine")))
    moved, part = (tmp_path / "data").rename(tmp_path / "moved"), tmp_path / "part.txt"
    words = [cfg.out_dir, f"--text={moved / 'verse.txt'}"]
    expected = f"verse.txt: could not check whether {cfg.out_dir} was trained on this text: its training data, "
    _, err, _ = evaluated(*words)
    assert f"{expected}{tmp_path / 'data' / 'verse'}, does not exist; set --data_dir\n" in err
    _, err, _ = evaluated(*words, f"--data_dir={moved}")
    assert "it was trained on this text" in err
    part.write_text(text[:9000], encoding="utf-8")
    prepare(part, tmp_path / "data", name="verse")
    _, err, _ = evaluated(*words)
    assert f"{expected}verse, has been prepared again since then\n" in err
    part.write_text(text[:3000][::-1], encoding="utf-8")
    _, err, _ = evaluated(fine.out_dir, f"--text={part}")
    assert f"could not check whether {cfg.out_dir}, from which" in err


# --- command ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, message",
    [
        (["--stride=33"], r"^--stride=33.*32 tokens"),
        (["--block_size=64"], r"--block_size=64.*--block_size=32 or less"),
        (["--text=none.txt"], r"none\.txt"),
        (["--text={short}"], "fewer than 2 tokens"),
        (["--text={strange}", "--on_unknown=skip", "--context=2"], r"strange\.txt has 4 tokens.*--context=2 "),
        (["--text={strange}"], r"the character 'é'"),
        (["--dataset=other", "--data_dir={folder}"], "different tokenizer"),
    ],
)
def test_bad_input_is_an_error(words, message, run, tmp_path, data_dir, evaluated):
    short, strange = tmp_path / "short.txt", tmp_path / "strange.txt"
    short.write_text("a", encoding="utf-8")
    strange.write_text("the é", encoding="utf-8")
    prepare(data_dir / "verse.txt", tmp_path, name="other", tokenizer="byte")
    with pytest.raises(UserError, match=message):
        evaluated(run, *(word.format(short=short, strange=strange, folder=tmp_path) for word in words))


@pytest.mark.parametrize(
    "words, message",
    [
        ([], r"^runs: .*python tools/evaluate\.py"),
        (["out", "--split_on="], "split_on=.*empty"),
        (["out", "--tasks", "arc_easy,hellaswag", "--text=a.txt"], "tasks=arc_easy,hellaswag.*--text"),
        (["out", "--tasks", "hellaswag", "pairs"], "pairs.*--tasks=pairs,"),
        (["out", "--limit=3"], "limit=3.*--tasks"),
        (["out", "--num_fewshot=3"], "num_fewshot=3.*--tasks=hellaswag"),
        (["out", "--num_fewshot=3", "--tasks=pairs"], "num_fewshot=3.*--tasks=hellaswag"),
        (["out", "--include_path=nowhere", "--tasks=hellaswag"], "include_path=nowhere.*not a folder"),
        (["out", "--tasks=pairs", "--temperature=0.5"], r"temperature=0\.5.*--tasks=music"),
        (["out", "--context=9", "--tasks=hellaswag"], "context=9.*--tasks"),
        (["out", "--context=9", "--stride=4"], "context=9.*--stride"),
        (["out", "--context=9", "--block_size=4"], "context=9.*--block_size"),
    ],
)
def test_bad_settings_are_an_error(words, message):
    with pytest.raises(ConfigError, match=message):
        load(EvaluateConfig, words)


@pytest.mark.needs("transformers")
@pytest.mark.architecture("folio/checkpoints/foreign.py, which reads GPT-2's weights only")
def test_a_model_without_a_recorded_data_set_needs_a_text(tmp_path, evaluated):
    write_hugging_face(checkpoint_of(bpe(), True), tmp_path / "hf")
    with pytest.raises(UserError, match="--dataset or --text"):
        evaluated(tmp_path / "hf")
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    _, err, _ = evaluated(tmp_path / "hf", f"--text={tmp_path / 'text.txt'}")
    assert "its checkpoint does not record the training data" in err
