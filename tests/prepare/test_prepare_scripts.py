import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import datasets
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from folio import UserError
from folio.base.files import read_json
from folio.base.settings import ConfigError, load, run_script
from folio.data import inputs, tokenizer
from folio.data import prepare as prepare_module
from folio.data.inputs import SizeLimits, find_sources
from folio.data.prepare import default_name
from folio.data.shards import Dataset, open_dataset
from folio.data.sources import shakespeare as sources_shakespeare
from folio.data.sources.pairs import write_pairs
from prepare import openwebtext, pairs
from prepare import text as prepare_text
from prepare.openwebtext import DOCUMENTS, OpenWebTextConfig, validation_rows
from prepare.pairs import PairsConfig
from prepare.text import TextConfig
from tests.support.hub import serving
from tests.support.prepared import assert_same_data_set, interrupted_after, prepare_pairs, read_all, read_report
from tests.support.processes import ROOT, run, run_in_turn
from tests.support.tiny_tokenizers import bpe
from train import TrainConfig, train

# --- text -------------------------------------------------------------------------------------------------------------


def prepare_file(path: Path, *words: str) -> Dataset:
    """Run prepare/text.py on a file, with the data sets in its folder."""
    cfg = load(TextConfig, [str(path), f"--data_dir={path.parent}", *words])
    prepare_text.main(cfg)
    return open_dataset(path.parent / (cfg.name or path.stem))


@pytest.mark.parametrize(
    "name, words",
    [
        ("a.txt", ["--vocab_size=500"]),
        ("a.txt", ["--tokenizer=byte", "--vocab_size=500"]),
        ("a.txt", ["--tokenizer=byte", "--on_unknown=skip"]),
        ("a.txt", ["--dedup=True"]),
        ("a.txt", ["--field=body"]),
        ("a.jsonl", ["--split_on=###"]),
    ],
)
def test_a_setting_without_effect_is_named_and_does_not_make_another_data_set(name, words, tmp_path, capsys):
    """--vocab_size was ignored with characters, and afterwards the same data was "another data set"."""
    lines = "".join(json.dumps({"text": f"line {k}"}) + "\n" for k in range(50))
    (tmp_path / name).write_text(lines if name.endswith(".jsonl") else f"A text.\n{lines}")
    prepare_file(tmp_path / name, *words)
    assert "has no effect: " in capsys.readouterr().out
    prepare_file(tmp_path / name, *words[:-1])
    out = capsys.readouterr().out
    assert "has no effect: " not in out
    assert "is already prepared" in out


def test_documents_without_a_token_between_them_are_said(tmp_path, capsys):
    """With a tokenizer without an end-of-text token, they were joined without a word."""
    (tmp_path / "a.txt").write_text("abc\n" * 50)
    (tmp_path / "b.txt").write_text("".join(f"{'abc'[: k % 4]}{'cab' * k}\n" for k in range(40)))
    prepare_file(tmp_path / "a.txt")
    words = [f"--tokenizer={tmp_path / 'a'}", "--val_fraction=0.3"]
    prepare_file(tmp_path / "b.txt", *words)
    assert "no end-of-text token" not in capsys.readouterr().out
    prepare_file(tmp_path / "b.txt", *words, "--split_on=\\n", "--name=c")
    assert "no end-of-text token, so nothing is between two documents" in capsys.readouterr().out


@pytest.fixture
def prepare_input(tmp_path, monkeypatch) -> Callable[..., Path]:
    """A function that runs prepare/text.py with a text on standard input, and returns the folder of the data set."""

    def prepare_input(text: str, *words: str) -> Path:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        cfg = load(TextConfig, ["-", "--tokenizer=byte", f"--data_dir={tmp_path}", *words])
        prepare_text.main(cfg)
        return tmp_path / (cfg.name or "stdin")

    return prepare_input


def test_standard_input_with_separators(prepare_input):
    texts = [f"text {k}" for k in range(40)]
    assert read_all(prepare_input("\n--\n".join(texts), "--val_fraction=0.3", "--split_on=\\n--\\n")) == sorted(texts)
    with pytest.raises(UserError, match=r"standard input:2: .*not JSON"):
        prepare_input('{"text": "a"}\n{"text": ', "--name=lines", "--format=jsonl")


def test_standard_input_that_does_not_fit_on_the_disk_is_reported(prepare_input, monkeypatch):
    """It caused a traceback."""
    full = Mock()
    full.update.side_effect = OSError(28, "No space left on device")
    monkeypatch.setattr(inputs, "blake2b", lambda **_: full)
    with pytest.raises(UserError, match=r"^standard input .* \(No space left on device\); set TMPDIR"):
        prepare_input("text")


def test_the_same_standard_input_is_the_same_data_set(prepare_input, monkeypatch, capsys):
    """The time of its copy was in the recipe: a finished data set was "another one", and none was resumed."""
    text = "".join(json.dumps({"text": f"text {k} " * 20}) + "\n" for k in range(2000))
    words = [text, "--shard_tokens=10_000", "--num_workers=0"]
    monkeypatch.setattr(prepare_text, "find_sources", partial(find_sources, limits=SizeLimits(block=20_000)))
    straight = prepare_input(*words, "--name=straight")
    prepare_input(*words, "--name=straight")
    assert "straight is already prepared" in capsys.readouterr().out
    with interrupted_after(1, monkeypatch):
        prepare_input(*words, "--name=cut")
    assert_same_data_set(prepare_input(*words, "--name=cut"), straight)
    assert "resuming after" in capsys.readouterr().out


def test_arguments_without_dashes_are_inputs():
    assert load(TextConfig, ["a.txt", "-", "b/*.md", "--name=x"]).inputs == ("a.txt", "-", "b/*.md")
    for argv, message in (
        ([], "name a file, a folder, a pattern"),
        (["a.txt", "--split_on="], "split_on=: it must not be empty"),
        (["--inputs=a.txt"], "name the inputs without --inputs"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(TextConfig, argv)


@pytest.mark.parametrize(
    "inputs, name",
    [
        ("verses/a.txt verses/b.txt", "verses"),
        ("verses/*.txt", "verses"),
        ("verses/**/*.txt", "verses"),
        ("verses letters", "my texts"),
        ("a.txt verses/a.txt", "my texts"),
        ("{folder}/verses/a.txt verses/b.txt", "verses"),
        ("../my?texts/verses/a.txt ./verses/b.txt", "verses"),
        ("/ verses", "text"),
        ("- a.txt", "my texts"),
        ("a.txt", "a"),
        ("verses/", "verses"),
        (".", "my texts"),
        ("/", "text"),
        ("-", "stdin"),
    ],
)
def test_the_default_name_is_that_of_the_input_or_of_the_common_folder(inputs, name, tmp_path, monkeypatch, capsys):
    """`prepare/text.py *.txt` required --name, and `prepare/pairs.py` used the name of the first input."""
    folder = tmp_path / "my texts"
    for file in ("a.txt", "b.txt", "verses/a.txt", "verses/b.txt", "letters/a.txt"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("text")
    monkeypatch.chdir(folder)
    assert default_name([text.format(folder=folder).replace("?", " ") for text in inputs.split()]) == name
    printed = f"several inputs: the data set is named {name}; to change it: --name=NAME\n"
    assert capsys.readouterr().out == (printed if " " in inputs or "*" in inputs else "")


TINY = ["--n_layer=1", "--n_head=1", "--n_embd=8", "--block_size=8", "--batch_size=2", "--max_iters=1"]
TINY += ["--warmup_iters=0", "--eval_iters=1", "--device=cpu", "--compile=False", "--dropout=0.0"]


@pytest.mark.parametrize("file, name", [("Smith, John", "Smith_ John"), ("b:0.5, c", "b_0"), (" d\n", "d_")])
def test_the_printed_command_works(file, name, tmp_path, monkeypatch, capsys):
    """--dataset="Smith, John" was parsed as a mixture of two data sets."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{file}.txt").write_text("It was a dark and stormy night; the rain fell in torrents. " * 10)
    prepare_text.main(load(TextConfig, [str(tmp_path / f"{file}.txt"), f"--data_dir={tmp_path / 'data'}"]))
    assert open_dataset(tmp_path / "data" / name)
    words = printed_runs(capsys.readouterr().out)["train on it"]
    assert load(TrainConfig, words).size == "auto"
    train(load(TrainConfig, [*words, "--size=None", "--minutes=None", *TINY]))


def test_the_printed_command_is_that_of_the_readme(tmp_path, text, monkeypatch, capsys):
    """It was another recipe, Shakespeare's, which overfits a short text and is too small for a long one."""
    monkeypatch.chdir(tmp_path)
    Path("novel.txt").write_text(text)
    Path("pairs.tsv").write_text("".join(f"{n}\tb\n" for n in range(200)))
    prepare_text.main(TextConfig(inputs=("novel.txt",), data_dir="data"))
    words = printed_runs(capsys.readouterr().out)["train on it"]
    line = f"python train.py {shlex.join(words)} ".replace(" --data_dir=data", "")
    assert line in (ROOT / "README.md").read_text(encoding="utf-8")
    pairs.main(PairsConfig(inputs=("pairs.tsv",), tokenizer="char", data_dir="data"))  # completions are masked
    assert "config/shakespeare_char.py" in printed_runs(capsys.readouterr().out)["train on it"][0]


def test_the_same_files_from_another_folder_are_already_prepared(tmp_path, monkeypatch, capsys):
    """The error said that the folder contains another data set."""
    (tmp_path / "verses").mkdir()
    for name in ("a", "b"):
        (tmp_path / "verses" / f"{name}.txt").write_text(name * 99)
    for cwd, names in ("verses", ["a.txt", "b.txt"]), ("", ["verses/a.txt", str(tmp_path / "verses" / "b.txt")]):
        monkeypatch.chdir(tmp_path / cwd)
        prepare_text.main(TextConfig(inputs=tuple(names), data_dir=str(tmp_path / "data")))
    assert "is already prepared" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, args, message",
    [
        ({"a.txt": "abc" * 50}, [], r"the input file a.txt \(99 bytes, now 150 bytes\); set"),
        ({"a.txt": "cba" * 33}, [], r"the input file a.txt \(another date or format\);"),
        ({"b.txt": "xy" * 9, "c.txt": "z"}, ["c.txt"], r"b.txt \(66 bytes, now 18 bytes\), and 1 other input file;"),
        ({"c.txt": "z"}, ["c.txt"], r"the input file c.txt \(missing, now 1 bytes\);"),
        ({}, ["--val_fraction=0.2", "--dedup=near"], r"dedup False \(now near\), val_fraction 0.01 \(now 0.2\);"),
    ],
)
def test_the_error_for_another_data_set_says_what_differs(text, args, message, tmp_path, monkeypatch):
    """For a changed file, it said that the new data set would use the tokenizer char, as the old one did."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("abc" * 33)
    Path("b.txt").write_text("xy" * 33)
    command = ["a.txt", "b.txt", "--name=mine", "--data_dir=data"]
    prepare_text.main(load(TextConfig, command))
    for name, words in text.items():
        Path(name).write_text(words)
        os.utime(name, (1, 1))
    with pytest.raises(UserError, match=message):
        prepare_text.main(load(TextConfig, [*command, *args]))


def test_the_error_for_other_documents_says_that_they_differ(tmp_path):
    old = {"val": 2, "train": 9, "blake2b": "0", "recipe": {"seed": 1, "documents_only": False}, "tokenizer": "f0"}
    new = {"val": 2, "train": 8, "blake2b": "1", "recipe": {"seed": 2, "documents_only": False}, "tokenizer": "char"}
    changes = ["training documents: 9 (now 8)", "the documents", "seed 1 (now 2)", "the tokenizer"]
    assert prepare_module._describe_changes(old, new) == changes
    sources = [["a.txt", 3, 1], ["b.txt", 3, 1]]
    changes = prepare_module._describe_changes({"sources": sources}, {"sources": sources[::-1]})
    assert changes == ["the order of the input files"]


def printed_runs(out: str) -> dict[str, list[str]]:
    """The arguments of train.py in each printed command, by purpose."""
    runs = {}
    for line in out.splitlines():
        purpose, _, command = line.partition(": python ")
        if command:
            script, *words = shlex.split(command)
            assert Path(script).resolve() == ROOT / "train.py"
            runs[purpose] = words
    return runs


def train_one_step(words: list[str], **settings) -> TrainConfig:
    """Train one step with the arguments of a printed command. Returns the settings."""
    words += [f"--{name}={value}" for name, value in settings.items()]
    cfg = load(TrainConfig, [*words, "--max_iters=1", "--eval_iters=1", "--batch_size=2", "--device=cpu"])
    train(cfg)
    return cfg


def test_the_command_after_preparing_with_the_tokenizer_of_a_run_finetunes_it(
    tiny, data_dir, tmp_path, monkeypatch, capsys
):
    """It trained another model from scratch, for which the run's tokenizer is not suitable."""
    monkeypatch.chdir(tmp_path)
    train(tiny(out_dir="out verse", max_iters=1))
    Path("letters.txt").write_text("the king and his crown; " * 50)

    def commands_with(tokenizer: str) -> dict[str, list[str]]:
        capsys.readouterr()
        settings = dict(inputs=("letters.txt",), tokenizer=tokenizer, on_unknown="skip", data_dir="my data")
        prepare_text.main(TextConfig(**settings, overwrite=True))
        return printed_runs(capsys.readouterr().out)

    (checkpoint,) = Path("out verse").glob("step-*")
    for source in ("out verse", str(checkpoint)):
        ((purpose, words),) = commands_with(source).items()
        assert purpose == f"finetune {source} on it"
        cfg = train_one_step(words, overwrite=True)
        assert cfg.init_from == source
        assert cfg.out_dir == "out-letters-finetuned"
        assert cfg.learning_rate < 8e-3 and cfg.muon_learning_rate < 0.03
    shutil.copytree(data_dir / "verse", "my data/verse")
    for source, name in ((f"{data_dir}/verse", f"{data_dir}/verse"), ("my data/verse", "verse")):
        runs = commands_with(source)
        assert list(runs) == ["train on it", "or on both"]
        assert load(TrainConfig, runs["train on it"]).init_from == "scratch"
        small = dict(n_layer=1, n_head=1, n_embd=8, block_size=8, overwrite=True)
        cfg = train_one_step([*runs["or on both"], "--size=None", "--minutes=None"], **small)
        assert cfg.dataset == f"{name}:0.5,letters:0.5"
        assert cfg.out_dir == "out-verse-letters"


def test_gpt2_tokens_can_be_used_to_finetune_gpt2(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tokenizer, "gpt2_tokenizer", bpe)
    (tmp_path / "mine.txt").write_text(text)
    prepare_file(tmp_path / "mine.txt", "--tokenizer=gpt2")
    runs = printed_runs(capsys.readouterr().out)
    assert list(runs) == ["train on it", "or finetune GPT-2"]
    cfg = load(TrainConfig, runs["or finetune GPT-2"])
    assert (cfg.init_from, cfg.dataset, cfg.out_dir) == ("gpt2", "mine", "out-mine-finetuned")


@pytest.mark.parametrize("cwd", [ROOT, ROOT.parent, ROOT / "prepare"])
def test_the_path_in_the_command_depends_on_the_working_directory(cwd, text, tmp_path, monkeypatch, capsys):
    """It was train.py, which does not exist in other folders."""
    monkeypatch.chdir(cwd)
    (tmp_path / "mine.txt").write_text(text)
    prepare_file(tmp_path / "mine.txt")
    first = capsys.readouterr().out.splitlines()[-1]
    script, name = re.search(": python (.*) --dataset=(.*) --size", first).groups()
    assert Path(script).samefile(ROOT / "train.py") and name == "mine"
    assert script == "train.py" or cwd != ROOT
    prepare_file(tmp_path / "mine.txt")
    assert capsys.readouterr().out.splitlines()[-1] == first  # repeating the command prints the same


# --- nanoGPT's paths --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["shakespeare_char", "shakespeare", "openwebtext"])
def test_nanogpts_command_runs_the_script(name, rows, tmp_path, monkeypatch, capsys):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(rows))
    script = ROOT / "data" / name / "prepare.py"
    words = [f"--data_dir={tmp_path}", "--tokenizer=byte"]
    words += [f"--source={tmp_path / 'source'}"] if name == "openwebtext" else []
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    monkeypatch.setattr(sources_shakespeare, "tiny_shakespeare", lambda: text)
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.startswith(f"running prepare/{name}.py\n")
    assert open_dataset(tmp_path / name).load_tokenizer().kind == "byte"


def test_git_tracks_only_the_prepare_scripts_in_data(tmp_path):
    git = shutil.which("git")
    if git is None:
        pytest.skip("git is not installed")
    shutil.copy(ROOT / ".gitignore", tmp_path)
    tracked = [f"data/{name}/prepare.py" for name in ("openwebtext", "shakespeare", "shakespeare_char")]
    ignored = ["mine/prepare.py", "mine/train.bin", ".mine.part/train_000000.bin", ".mine.lock", "shakespeare/a/b"]
    ignored += ["shakespeare_char/train.bin", ".shakespeare_char.replaced/shakespeare_char/prepare.py"]
    for file in (*tracked, *(f"data/{name}" for name in ignored)):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("content")
    subprocess.run([git, "init", "--quiet"], cwd=tmp_path, check=True)
    status = subprocess.run([git, "status", "--porcelain", "-uall"], cwd=tmp_path, capture_output=True, text=True)
    assert sorted(line[3:] for line in status.stdout.splitlines()) == sorted([".gitignore", *tracked])


@pytest.mark.skipif(sys.platform != "linux", reason="file names are Unicode on other systems")
def test_a_file_whose_name_is_not_utf8(tmp_path, capsys):
    """Writing meta.json raised UnicodeEncodeError."""
    path = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")
    Path(path).write_text("It was a dark and stormy night. " * 10)
    for line in ("--dataset=caf_ ", "is already prepared"):
        prepare_text.main(load(TextConfig, [path, f"--data_dir={tmp_path / 'data'}"]))
        assert line in capsys.readouterr().out
    assert read_json(tmp_path / "data" / "caf_" / "meta.json")["source"]["first"][0]["name"] == path


def test_an_error_in_the_input_prints_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "x.txt").write_bytes(b"caf\xe9")
    (tmp_path / "x.jsonl").write_text('{"text": null}')
    (tmp_path / "x.csv").write_bytes(b"\xef\xbb\xbf")
    for name, word, message in (
        ("x.txt", "--format=text", "x.txt:1, byte 3 of the line is not UTF-8 text"),
        ("x.txt", "--tokenizer=" + "x" * 300, "use char, byte, gpt2, bpe, or the folder"),
        ("x.txt", "--tokenizer=.", "has no tokenizer"),
        ("x.jsonl", "--field=body", "no field 'body', only text; set --field=NAME"),
        ("x.jsonl", "--format=jsonl", "x.jsonl is empty"),
        ("x.csv", "--format=csv", "x.csv is empty"),
        ("y.txt", "--format=text", "y.txt: no such file"),
    ):
        monkeypatch.setattr(sys, "argv", ["text.py", str(tmp_path / name), word, f"--data_dir={tmp_path / 'data'}"])
        with pytest.raises(SystemExit) as end:
            run_script(prepare_text.main, TextConfig)
        error = capsys.readouterr().err
        assert end.value.code == 2
        assert error.startswith("error: ") and error.count("\n") == 1
        assert message in error
        assert not list(tmp_path.glob("data/*"))


def test_an_input_without_a_name_does_not_overwrite_data_dir(tmp_path, monkeypatch):
    """`prepare/pairs.py . --overwrite=True` replaced data/ and its content by the data set."""
    (tmp_path / "data" / "other").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    write_pairs(Path("a.jsonl"), [{"text": word, "prompt": "", "completion": word} for word in "abc"])
    for script, config in ((prepare_text, TextConfig), (pairs, PairsConfig)):
        script.main(config(inputs=(".",), tokenizer="byte", data_dir=str(tmp_path / "data"), overwrite=True))
        assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["mine", "other"]


# --- OpenWebText and FineWeb ------------------------------------------------------------------------------------------


@pytest.fixture
def rows(tmp_path: Path) -> list[str]:
    """Texts, which are also written to three parquet files in the folder "source"."""
    (tmp_path / "source").mkdir()
    texts = [f"text number {k} of some" for k in range(3000)]
    for number in range(3):
        table = pyarrow.table({"text": texts[number * 1000 : (number + 1) * 1000]})
        parquet.write_table(table, tmp_path / "source" / f"{number:04d}.parquet", row_group_size=300)
    return texts


@pytest.mark.parametrize("rows, test_size", [(2000, 0.0005), (2001, 0.0005), (37, 0.1), (10_007, 0.0005)])
def test_the_validation_rows_match_the_datasets_library(rows, test_size):
    split = datasets.Dataset.from_dict({"row": range(rows)}).train_test_split(test_size=test_size, seed=2357)
    assert sorted(split["test"]["row"]) == validation_rows(rows, test_size).tolist()


def test_the_validation_rows_of_openwebtext():
    expected = np.random.default_rng(2357).permutation(8_013_769)[:4007]
    assert validation_rows(DOCUMENTS, 0.0005).tolist() == sorted(expected.tolist())


def test_openwebtext_from_a_folder(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "gpt2_tokenizer", bpe)
    settings = dict(source=str(tmp_path / "source"), data_dir=str(tmp_path / "data"))
    openwebtext.main(OpenWebTextConfig(**settings))
    data = open_dataset(tmp_path / "data" / "openwebtext")
    encoding, val_rows = data.load_tokenizer(), set(validation_rows(3000, 0.0005).tolist())
    for shard, is_val in ((data.train[0], False), (data.val[0], True)):
        texts = [text for k, text in enumerate(rows) if (k in val_rows) == is_val]
        assert shard.ids.tolist() == [i for text in texts for i in [*encoding.encode(text).tolist(), encoding.eot]]
    openwebtext.main(OpenWebTextConfig(**settings, limit=1200, name="first"))
    assert read_report(tmp_path / "data" / "first")["documents"] == {"train": 1199, "val": 1}
    (tmp_path / "data" / "first" / "report.json").write_text("{")  # this was a traceback
    with pytest.raises(UserError, match=r"report\.json is damaged .*--overwrite=True"):
        openwebtext.main(OpenWebTextConfig(**settings, limit=1200, name="first"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="could not be downloaded from the Hugging Face hub"):
        openwebtext.main(OpenWebTextConfig(source=str(tmp_path / "empty"), data_dir=str(tmp_path / "data"), name="x"))


def test_totals_that_differ_from_nanogpt_are_an_error(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "gpt2_tokenizer", bpe)
    monkeypatch.setattr(openwebtext, "DOCUMENTS", 3000)
    with pytest.raises(UserError, match=r"not nanoGPT's"):
        openwebtext.main(OpenWebTextConfig(source=str(tmp_path / "source"), data_dir=str(tmp_path / "data")))


def test_downloads_from_a_hub(rows, tmp_path):
    """Run datasets and huggingface_hub against a local hub, with interrupted downloads."""
    paths = sorted((tmp_path / "source").iterdir())
    files = {f"Skylion007/openwebtext/plain_text/train/{path.name}": path.read_bytes() for path in paths}
    files["HuggingFaceFW/fineweb-edu/sample/10BT/000_00000.parquet"] = paths[0].read_bytes()
    files["HuggingFaceFW/fineweb-edu/README.md"] = (
        b"---\nconfigs:\n- config_name: sample-10BT\n  data_files:\n  - split: train\n    path: sample/10BT/*\n---\n"
    )
    header = np.array([20240520, 1, 5000, *[0] * 253], dtype="<i4").tobytes()
    for number in range(3):
        name = f"kjj0/finewebedu10B-gpt2/finewebedu_{'train' if number else 'val'}_{number:06d}.bin"
        files[name] = header + np.arange(number, 5000 + number, dtype="<u2").tobytes()
    data_dir = tmp_path / "data"
    words = ["--tokenizer=byte", f"--data_dir={data_dir}"]
    with serving(files) as hub:
        env = dict(HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "hf"), HF_HUB_DISABLE_PROGRESS_BARS="1")
        hub.interrupt_next = 1
        commands = [
            [ROOT / "prepare/openwebtext.py", "--limit=1500", *words],
            [ROOT / "prepare/openwebtext.py", "--limit=1400", "--name=again", *words],
            [ROOT / "prepare/fineweb.py", "--val_fraction=0.01", *words],
        ]
        done = run_in_turn(commands, **env)
        assert done.returncode == 0, done.stderr
        assert read_report(data_dir / "openwebtext")["documents"] == {"train": 1499, "val": 1}
        assert read_report(data_dir / "again")["documents"]["train"] == 1399
        assert sum(read_report(data_dir / "fineweb")["documents"].values()) == 1000
        assert hub.interrupt_next == 0
        assert not any("0002.parquet" in request for request in hub.requests)  # not needed
        downloads = [request for request in hub.requests if request.startswith("GET") and "/0000.parquet" in request]
        assert len(downloads) == 2  # the interrupted download and its continuation; none for the second data set
        hub.interrupt_next = 1
        ready = [ROOT / "prepare/fineweb.py", "--ready=True", words[1]]
        done = run_in_turn([[*ready, "--shards=1", "--name=ready"], [*ready, "--shards=7", "--name=more"]], **env)
        assert done.returncode == 2 and "has no file *_train_000003.bin" in done.stderr
        data = open_dataset(data_dir / "ready")
        assert data.train[0].ids[:3].tolist() == [1, 2, 3]
        assert data.val[0].ids[:3].tolist() == [0, 1, 2]
        assert sorted(path.suffix for path in data.folder.iterdir()) == [".bin", ".bin"]
    offline = dict(HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "none"))
    done = run([ROOT / "prepare/openwebtext.py", "--name=gone", *words], **offline)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "could not be downloaded from the Hugging Face hub" in done.stderr


# --- pairs ------------------------------------------------------------------------------------------------------------

TURNS = [("system", "Be kind."), ("user", "Who?"), ("assistant", "Me."), ("user", "And?"), ("assistant", "You.")]
LINES = [
    {"prompt": "Say hi:", "completion": " hi"},
    {"messages": [{"role": role, "content": text} for role, text in TURNS]},
]


def test_only_answers_and_their_end_of_text_tokens_are_targets(tmp_path):
    """The two documents may be in either split, so both splits are read."""
    lines = LINES + [{"prompt": f"{k}+0=", "completion": f"{k}"} for k in range(40)]
    data = open_dataset(prepare_pairs(tmp_path / "pairs.jsonl", lines))

    def shown(ids: np.ndarray) -> str:
        return "".join("|" if i == 256 else data.load_tokenizer().decode([i]) for i in ids.tolist())

    shards = [*data.train, *data.val]
    targets, everything = "".join(shown(s.ids[s.mask > 0]) for s in shards), "".join(shown(s.ids) for s in shards)
    assert "User: Who?\n\nAssistant: Me.|User: And?\n\nAssistant: You.|" in everything
    assert "Say hi: hi|" in everything
    assert " Me.| You.|" in targets
    assert sorted(targets.split("|")) == sorted(["", " hi", " Me.", " You.", *map(str, range(40))])


@pytest.mark.parametrize("noun", ["pair", "chat"])
def test_the_report_has_the_lengths_of_pairs_and_chats(noun, tmp_path, capsys):
    """With the end-of-text token. Nothing said that some pairs were longer than any context."""
    lines = [{"prompt": "a" * k, "completion": "b"} for k in range(1, 101)]
    if noun == "chat":
        answer = {"role": "assistant", "content": "b"}
        lines = [{"messages": [{"role": "user", "content": "a" * k}, answer]} for k in range(1, 101)]
    folder = prepare_pairs(tmp_path / "x.jsonl", lines)
    more = len("b" if noun == "pair" else "User: \n\nAssistant: b") + 1
    lengths = {"median": 50 + more, "90%": 90 + more, "99%": 99 + more, "maximum": 100 + more}
    assert read_report(folder)["document_lengths"] == lengths
    line = f"tokens per {noun}: {', '.join(f'{name} {n}' for name, n in lengths.items())}"
    assert line in capsys.readouterr().out
