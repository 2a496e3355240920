import gzip
import re
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from folio import UserError
from folio.base.files import sha256
from folio.base.settings import load
from folio.data.shards import open_dataset
from folio.data.sources import prepare_pairs
from folio.data.sources.pairs import split_pairs, validation_pairs, write_pairs
from folio.data.tokenizer import ByteTokenizer
from prepare import summaries
from prepare.summaries import SummariesConfig, truncate
from tests.support.hub import fake_wheel, serving
from tests.support.prepared import read_all, read_back, read_pairs, read_report
from tests.support.processes import ROOT, run_in_turn

TEXTS = [(f"{n} bottles stand on the wall. One falls down.", f"{n - 1} bottles are left") for n in range(30)]
EXPECTED = sorted((f"{document}\n\nTL;DR:", f" {summary}") for document, summary in TEXTS)
JSON = [{"document": document, "summary": summary} for document, summary in TEXTS[:15]]
JSON += [{"prompt": f"{document}\n\nTL;DR:", "completion": f" {summary}"} for document, summary in TEXTS[15:]]


def run_script(folder: Path, *words: str) -> Path:
    """Run the script, and return the folder of the data set."""
    is_pretraining = "--pretraining=True" in words
    options = [f"--data_dir={folder / 'data'}", "--val_fraction=0.2"]
    summaries.main(load(SummariesConfig, [*words, *options, *([] if is_pretraining else ["--tokenizer=byte"])]))
    paths = [path for path in (folder / "data").iterdir() if not path.name.startswith(".")]
    (folder,) = [path for path in paths if path.name.endswith("-documents") == is_pretraining]
    return folder


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch) -> None:
    """The texts as JSON lines, plain and in a folder, in the working directory."""
    monkeypatch.chdir(tmp_path)
    write_pairs(Path("s.jsonl"), JSON)
    Path("texts").mkdir()
    Path("texts", "z.jsonl.gz").write_bytes(gzip.compress(Path("s.jsonl").read_bytes()))
    Path("texts", "README.md").write_text("# Sources")


@pytest.mark.parametrize("name", ["s.jsonl", "texts/z.jsonl.gz", "texts"])
def test_user_texts(name, tmp_path):
    assert read_pairs(run_script(tmp_path, name)) == EXPECTED


@pytest.mark.parametrize("words", [["data/mine/s.jsonl", "--name=mine"], ["--source=data/mine"]])
def test_inputs_in_the_folder_of_the_data_set_are_not_replaced(words, tmp_path):
    write_parquet(tmp_path / "data" / "mine" / "train.parquet", "document", "summary")
    (tmp_path / "s.jsonl").rename(tmp_path / "data" / "mine" / "s.jsonl")
    with pytest.raises(UserError, match=r"is in data/mine, .*set another --name"):
        summaries.main(load(SummariesConfig, [*words, "--data_dir=data", "--tokenizer=byte", "--overwrite=True"]))
    assert len(list((tmp_path / "data" / "mine").iterdir())) == 2


def test_held_out_pairs_are_written_if_they_are_missing(tmp_path, monkeypatch):
    with monkeypatch.context() as patches:
        patches.setattr(prepare_pairs, "write_pairs", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(UserError, match=r"held_out\.jsonl could not be written .*free some space"):
            run_script(tmp_path, "s.jsonl")
    path = run_script(tmp_path, "s.jsonl") / "held_out.jsonl"
    expected = path.read_bytes()
    path.unlink()  # as after an interruption
    assert run_script(tmp_path, "s.jsonl") == path.parent
    assert path.read_bytes() == expected
    path.write_text("edited")
    assert run_script(tmp_path, "s.jsonl") == path.parent
    assert path.read_text() == "edited"


def test_pretraining_has_the_same_documents_in_the_same_splits(tmp_path):
    pairs = open_dataset(run_script(tmp_path, "s.jsonl"))
    folder = run_script(tmp_path, "s.jsonl", "--pretraining=True")
    assert folder.name == "s-documents"
    documents = open_dataset(folder)
    assert documents.load_tokenizer().hash == pairs.load_tokenizer().hash
    for split in ("train", "val"):
        assert all(shard.mask is None for shard in getattr(documents, split))
        prompts = [prompt for prompt, _ in split_pairs(getattr(pairs, split), ByteTokenizer())]
        assert read_back(folder, split) == [prompt.removesuffix("\n\nTL;DR:") for prompt in prompts]
        assert len(prompts) >= 6
    assert read_all(folder) == sorted(document for document, _ in TEXTS)


def test_preparing_the_same_files_again_does_nothing(tmp_path, capsys):
    for _ in range(2):
        run_script(tmp_path, "s.jsonl")
    assert "is already prepared" in capsys.readouterr().out
    with pytest.raises(UserError, match="contains another data set"):
        run_script(tmp_path, "s.jsonl", "--document_length=10")


def test_empty_texts_are_skipped_and_fields_and_items_are_kept(tmp_path, capsys):
    lines = [{"document": d, "summary": s, "item": n // 5, "kind": "x"} for n, (d, s) in enumerate(TEXTS)]
    lines += [{"document": " ", "summary": "a"}, {"document": "a", "summary": None}, {"prompt": "a", "completion": ""}]
    write_pairs(tmp_path / "s.jsonl", lines)
    folder = run_script(tmp_path, "s.jsonl")
    assert "left out: 3 pairs with an empty text" in capsys.readouterr().out
    assert read_pairs(folder) == EXPECTED
    held_out = validation_pairs(open_dataset(folder))
    assert {pair.fields["kind"] for pair in held_out} == {"x"}
    assert len(held_out) == 5
    assert len({pair.fields["item"] for pair in held_out}) == 1


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
    for first, name in ((0, "one"), (100, "two")):
        files = {f"{name}/part{n // 2}/m{n}.py": docstring_source(first + n) for n in range(20)}
        path = fake_wheel(tmp_path / f"{name}.whl", files | {f"{name}/repeated.py": docstring_source(3)}, root="")
        pinned_wheels.append(summaries.Wheel(f"{name}==1", sha256(path)))
        path.rename(tmp_path / "cache" / pinned_wheels[-1].sha256)
    monkeypatch.setattr(summaries, "WHEELS", tuple(pinned_wheels))


def test_docstrings_are_split_by_folder(wheels, tmp_path):
    folder = run_script(tmp_path)
    assert folder.name == "summaries"
    pairs = read_pairs(folder)
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
    assert read_report(tmp_path / "summaries")["documents"] == {"train": 6004, "val": 733}


# --- parquet files ----------------------------------------------------------------------------------------------------


def write_parquet(path: Path, *names: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [{**dict(zip(names, texts, strict=True)), "id": "x"} for texts in TEXTS]
    parquet.write_table(pyarrow.Table.from_pylist(records), path)


@pytest.mark.parametrize("names", [("article", "highlights"), ("document", "summary")])
def test_a_folder_with_the_columns_of_the_hub(names, tmp_path):
    write_parquet(tmp_path / "news" / "train-00000-of-00001.parquet", *names)
    folder = run_script(tmp_path, "--source=news")
    assert folder.name == "news"
    assert read_pairs(folder) == EXPECTED
    assert len(read_pairs(run_script(tmp_path, "--source=news", "--limit=20", "--overwrite=True"))) == 20


def test_downloads_from_a_hub(tmp_path):
    """Run datasets and huggingface_hub against a local hub."""
    write_parquet(tmp_path / "cnn.parquet", "article", "highlights")
    write_parquet(tmp_path / "xsum.parquet", "document", "summary")
    subset = "- config_name: {0}\n  data_files:\n  - split: train\n    path: {0}/train-*\n"
    readme = f"---\nconfigs:\n{subset.format('1.0.0')}{subset.format('3.0.0')}---\n"
    files = {
        "abisee/cnn_dailymail/3.0.0/train-00000-of-00001.parquet": (tmp_path / "cnn.parquet").read_bytes(),
        "abisee/cnn_dailymail/1.0.0/train-00000-of-00001.parquet": b"of another version",
        "abisee/cnn_dailymail/README.md": readme.encode(),
        "EdinburghNLP/xsum/default/train/0000.parquet": (tmp_path / "xsum.parquet").read_bytes(),
    }
    words = ["--tokenizer=byte", f"--data_dir={tmp_path / 'data'}", "--val_fraction=0.2"]
    sources = ("cnn_dailymail", "xsum")
    with serving(files) as hub:
        env = dict(HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "hf"), HF_HUB_DISABLE_PROGRESS_BARS="1")
        done = run_in_turn([[ROOT / "prepare/summaries.py", f"--source={source}", *words] for source in sources], **env)
    assert done.returncode == 0, done.stderr
    for source in sources:
        assert read_pairs(tmp_path / "data" / source) == EXPECTED


# --- bad input --------------------------------------------------------------------------------------------------------

GOOD = '{"document": "a", "summary": "b"}\n'
BAD = {
    "a.txt": "a",
    "field.jsonl": f'{GOOD}{{"document": "a"}}\n',
    "number.jsonl": '{"document": "a", "summary": 5}\n',
    "prompt.jsonl": '{"prompt": "a"}\n',
    "empty.jsonl": "\n",
    "one.jsonl": GOOD,
    "same.jsonl": GOOD * 2,
}


@pytest.mark.parametrize(
    "words, message",
    [
        ("a.txt", r"a.txt is text without records; "),
        ("field.jsonl", r'^field.jsonl:2: it has no summary, only document; write {"document": '),
        ("number.jsonl", r"^number.jsonl:1: document and summary must be strings; write "),
        ("prompt.jsonl", r"^prompt.jsonl:1: completion is missing.*: write "),
        ("empty.jsonl", r"^the input has no pair"),
        ("one.jsonl", r"^there is only one pair, .*add another$"),
        ("same.jsonl", r"^all pairs have the same prompt, .*add another$"),
        ("s.jsonl --source=xsum", r"source=xsum: .*input files"),
        ("s.jsonl --limit=5", r"limit=5: .*--source"),
        ("s.jsonl --pretraining=True", r"^pretraining=True: .*tokenizer of .*s, which is not prepared; "),
        ("--source=columns", r"^.*train.parquet, row 0: it has no document, only a, b, id; write"),
        ("--source=tests", r"^tests has no files for training, only for test; rename them train-*"),
        ("--source=nothing", r"^nothing could not be downloaded from the Hugging Face hub: "),
    ],
)
def test_bad_input_is_one_line(words, message, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, content in BAD.items():
        Path(name).write_text(content)
    Path("nothing").mkdir()
    write_parquet(tmp_path / "columns" / "train.parquet", "a", "b")
    write_parquet(tmp_path / "tests" / "test.parquet", "document", "summary")
    with pytest.raises(UserError, match=message) as error:
        run_script(tmp_path, *words.split())
    assert "\n" not in str(error.value)
    assert not [path for path in tmp_path.glob("data/*") if path.suffix != ".lock"]
