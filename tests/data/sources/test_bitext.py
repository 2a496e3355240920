import gzip
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from folio import UserError
from folio.base.files import read_json
from folio.base.settings import load
from folio.data.blocks import CorpusError, Document
from folio.data.corpus import Corpus
from folio.data.inputs import find_sources
from folio.data.records import Columns
from folio.data.shards import open_dataset
from folio.data.sources.bitext import detect_language, language_problem
from folio.data.sources.pairs import split_pairs, validation_pairs
from folio.data.tokenizer import ByteTokenizer
from prepare import translation
from prepare.translation import TranslationConfig
from tests.support.hub import serving
from tests.support.prepared import read_pairs, read_report
from tests.support.processes import ROOT, run_in_turn

pytestmark = pytest.mark.needs("babel", "num2words")

SENTENCES = [(f"{n} green bottles", f"{n} grüne Flaschen") for n in range(30)]
EXPECTED = sorted((f"en: {en} | de:", f" {de}") for en, de in SENTENCES)
REVERSED = sorted((f"de: {de} | en:", f" {en}") for en, de in SENTENCES)
ROWS = [f"{en}\t{de}" for en, de in SENTENCES]
EN, DE = ("\n".join(texts) for texts in zip(*SENTENCES, strict=True))
JSON = [
    *({"en": en, "de": de} for en, de in SENTENCES[:10]),
    *({"translation": {"de": de, "en": en}} for en, de in SENTENCES[10:20]),
    *({"prompt": f"en: {en} | de:", "completion": f" {de}"} for en, de in SENTENCES[20:]),
    {"en": None, "de": "left out"},
]
FILES = {
    "s.tsv": "".join(f"{en}\t{de}\tCC-BY\r\n" for en, de in SENTENCES) + "\n",
    "s.jsonl": "\n".join(map(json.dumps, JSON)),
    "corpus.en": EN,
    "corpus.de.gz": gzip.compress(f"{DE}\n".encode()),
}


def prepared(folder: Path, *words: str) -> Path:
    """Run the script, and return the folder of the data set, which the next run replaces."""
    shutil.rmtree(folder / "data", ignore_errors=True)
    options = ["--tokenizer=byte", f"--data_dir={folder / 'data'}", "--val_fraction=0.2"]
    translation.main(load(TranslationConfig, [*options, *words]))
    (prepared_folder,) = [path for path in (folder / "data").iterdir() if not path.name.startswith(".")]
    return prepared_folder


@pytest.fixture
def write(tmp_path, monkeypatch) -> Callable[[dict[str, str | bytes]], None]:
    """A function that writes files into the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(files: dict[str, str | bytes]) -> None:
        for name, content in files.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_bytes(content.encode() if isinstance(content, str) else content)

    return write


HEADERS = ["english\tdeutsch", "en-US\tde-DE", "eng\tdeu", "sentence_en\tsentence_de", "source\ttarget"]
CASES = {  # files, the arguments of the script, and the expected pairs
    "a table": (FILES, "s.tsv --languages=en,de", EXPECTED),
    "JSON": (FILES, "s.jsonl --languages=en,de", EXPECTED),
    "aligned files": (FILES, "corpus.en corpus.de.gz", EXPECTED),
    "aligned files and languages": (FILES, "corpus.en corpus.de.gz --languages=en,de", EXPECTED),
    "the other direction": (FILES, "corpus.de.gz corpus.en", REVERSED),
    "empty texts": ({"s.tsv": "\n".join([*ROWS, "\tx", "y\t "])}, "s.tsv --languages=en,de", EXPECTED),
    **{header: ({"s.tsv": "\n".join([header, *ROWS])}, "s.tsv --languages=en,de", EXPECTED) for header in HEADERS},
    "a reversed header": (
        {"s.tsv": "\n".join(["German\tEn", *(f"{de}\t{en}" for en, de in SENTENCES)])},
        "s.tsv --languages=en,de",
        EXPECTED,
    ),
    "a folder of tables": (
        {"tables/a.tsv": "\n".join(ROWS[:10]), "tables/b.tsv": "\n".join(ROWS[10:])},
        "tables --languages=en,de",
        EXPECTED,
    ),
    # the error proposed a pattern for one of the files, which was refused, too
    "a folder of aligned files": ({"pair/corpus.de": DE, "pair/corpus.en": EN}, "pair", REVERSED),
    "a folder and languages": ({"pair/corpus.de": DE, "pair/corpus.en": EN}, "pair --languages=en,de", EXPECTED),
    # with x.de.txt before x.en.txt, as in a folder, all pairs were reversed
    "languages before .txt": ({"x.en.txt": EN, "x.de.txt": DE}, "x.en.txt x.de.txt", EXPECTED),
    "languages as names": ({"en.txt": EN, "de.txt": DE}, "en.txt de.txt", EXPECTED),
    "compressed": (
        {"x.en.txt.gz": gzip.compress(EN.encode()), "x.de.txt.gz": gzip.compress(DE.encode())},
        "x.en.txt.gz x.de.txt.gz",
        EXPECTED,
    ),
}


@pytest.mark.parametrize("files, words, expected", CASES.values(), ids=CASES)
def test_user_texts(files, words, expected, write, tmp_path):
    write(files)
    assert read_pairs(prepared(tmp_path, *words.split())) == expected


def test_the_name_is_that_of_the_aligned_files(write, tmp_path):
    write(FILES)
    assert prepared(tmp_path, "corpus.de.gz", "corpus.en").name == "corpus"


def test_preparing_the_same_files_again_does_nothing(write, capsys):
    write(FILES)
    settings = dict(inputs=("s.tsv",), languages="en,de", tokenizer="byte", data_dir="data")
    for _ in range(2):
        translation.main(TranslationConfig(**settings))
    assert "is already prepared" in capsys.readouterr().out
    with pytest.raises(UserError, match="contains another data set"):
        translation.main(TranslationConfig(**{**settings, "languages": "de,en"}))


def test_all_translations_of_a_sentence_are_in_one_split(write, tmp_path):
    write({"s.tsv": "".join(f"sentence {n // 10}\tSatz {n}\n" for n in range(200))})
    dataset = open_dataset(prepared(tmp_path, "s.tsv", "--languages=en,de", "--val_fraction=0.1"))
    train, val = (
        Counter(prompt for prompt, _ in split_pairs(shards, ByteTokenizer())) for shards in (dataset.train, dataset.val)
    )
    assert {*train.values(), *val.values()} == {10}
    assert (len(train), len(val)) == (18, 2)
    assert [pair.fields["target"] for pair in validation_pairs(dataset)] == ["de"] * 20


def test_what_is_left_out_of_aligned_files_is_in_the_account(write, tmp_path):
    """Lines without a translation, and white space, counted as used text."""
    en, de = ["a one", "   two   ", "lost", "a three"], ["ein", "zwei", "", "drei"]
    write({"s.en": "\n".join(en), "s.de": "\n".join(de)})
    account = read_report(prepared(tmp_path, "s.en", "s.de"))["account"]
    white, used = len("      "), sum(len(a.strip()) + len(b) for a, b in zip(en, de, strict=True) if b)
    left_out = {"left out of used fields": white, "records without a document": len("lost")}
    assert account["characters"] == {"in": sum(map(len, en + de)), "used": used, **left_out}
    assert account["pairs"] == {"in": 4, "used": 3, "with an empty text": 1}


def test_rows_after_the_limit_are_in_the_account(tmp_path):
    """All 1,000 rows of a file counted as documents, of which 10 were used."""
    columns = {"en": [f"{n}" for n in range(1000)], "de": [f"d{n}" for n in range(1000)]}
    write_parquet(tmp_path / "many" / "train-00000-of-00001.parquet", **columns)
    folder = prepared(tmp_path, f"--source={tmp_path / 'many'}", "--languages=en,de", "--limit=10")
    assert len(read_pairs(folder)) == 10
    records = read_report(folder)["account"]["records"]
    assert records == {"documents": 10, "in": 1000, "record after --limit": 990}


def write_parquet(path: Path, **columns: list) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path)


OPUS = dict(translation=[{"de": de, "en": en} for en, de in SENTENCES])
TATOEBA = dict(english=[en for en, _ in SENTENCES], non_english=[de for _, de in SENTENCES])


def test_parquet_files_of_opus_and_tatoeba(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, columns in (("opus", OPUS), ("spoken", TATOEBA)):
        write_parquet(tmp_path / name / "train-00000-of-00001.parquet", **columns)
        assert read_pairs(prepared(tmp_path, f"--source={name}", "--languages=en,de")) == EXPECTED
    assert len(read_pairs(prepared(tmp_path, "--source=opus", "--languages=de,en", "--limit=20"))) == 20
    write_parquet(tmp_path / "flat" / "train.parquet", translation=["a", "b"])
    for name, languages, message in (
        ("opus", "en,fr", r"it has no fr, only de, en; set --languages"),
        ("flat", "en,de", r"it has no en, only translation; set --languages"),
        ("spoken", "de,fr", r"columns are english and non_english; .* with en in --languages"),
    ):
        with pytest.raises(CorpusError, match=message):
            prepared(tmp_path, f"--source={name}", f"--languages={languages}")


def test_downloads_from_a_hub(tmp_path):
    """Run datasets and huggingface_hub against a local hub."""
    opus, tatoeba = "Helsinki-NLP/opus-100", "sentence-transformers/parallel-sentences-tatoeba"
    readme = "---\nconfigs:\n- config_name: {0}\n  data_files:\n  - split: train\n    path: {0}/train-*\n---\n"
    files = {}
    for name, languages, columns in ((opus, "de-en", OPUS), (tatoeba, "en-de", TATOEBA)):
        write_parquet(tmp_path / "x.parquet", **columns)
        files[f"{name}/{languages}/train-00000-of-00001.parquet"] = (tmp_path / "x.parquet").read_bytes()
        files[f"{name}/README.md"] = readme.format(languages).encode()
    data_dir, sources = tmp_path / "data", ("opus-100", "tatoeba")
    words = ["--languages=en,de", "--tokenizer=byte", f"--data_dir={data_dir}", "--val_fraction=0.2"]
    with serving(files) as hub:
        env = dict(HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "hf"), HF_HUB_DISABLE_PROGRESS_BARS="1")
        commands = [[ROOT / "prepare/translation.py", f"--source={source}", *words] for source in sources]
        done = run_in_turn(commands, **env)
    assert done.returncode == 0, done.stderr
    for source in sources:
        assert read_pairs(data_dir / f"{source}-en-de") == EXPECTED
        assert read_json(data_dir / f"{source}-en-de" / "meta.json")["recipe"]["val_fraction"] == 0.2


def test_language_codes():
    assert [language_problem(code) for code in ("en", "gsw", "zh-Hans", "pt_BR")] == [None] * 4
    assert language_problem("german") == "'german' is not a language code; did you mean de?"
    assert language_problem("Englisch").endswith("did you mean en?")
    assert language_problem("EN").endswith("did you mean en?") and "such as en or de" in language_problem("xx")
    names = ["a.en", "b/a.tok.de.zst", "corpus.txt", "corpus"]
    assert [detect_language(Path(name)) for name in names] == ["en", "de", None, None]


@pytest.mark.parametrize(
    "words, message",
    [
        ("s.tsv", r"^s.tsv: .*--languages=en,de$"),
        ("s.tsv --languages=en,dee", r"^command line: languages=en,dee: 'dee'"),
        ("s.tsv --languages=en", r"languages=en: .*two different"),
        ("s.tsv --languages=en,en", r"languages=en,en: .*two different"),
        ("s.tsv --languages=en,de,fr", r"languages=en,de,fr: name two: "),
        ("--languages=en,kk", r"languages=en,kk: .*'kk', only in am, .*, en, .*, vi$"),
        (
            "header.tsv --languages=en,de",
            r"header\.tsv: its first row, English, Haus, may be a header or a pair; begin",
        ),
        ("corpus.en short.de", r"^corpus.en has 30 lines and short.de 29, .*not aligned"),
        ("short.de corpus.en", r"^short.de has 29 lines and corpus.en 30, .*not aligned"),
        ("corpus.en corpus.de.gz --languages=de,en", r"^corpus.en, corpus.de.gz: .*order of --languages=de,en"),
        ("corpus.en one.txt", r"^corpus.en, one.txt: .*--languages=en,de$"),
        ("corpus.en", r"^corpus.en: .*two files with one sentence per line$"),
        ("corpus.en s.tsv", r"^corpus.en, s.tsv: .*two files"),
        ("one.csv one.csv --languages=en,de", r"^one.csv: it has 1 column: a; write two columns"),
        ("s.jsonl --languages=en,fr", r"^s.jsonl:1: it has no fr, only en, de; set --languages"),
        ("s.jsonl", r"^s.jsonl:1: .*no prompt and completion.* set --languages"),
        ("number.jsonl --languages=en,de", "en and de must be strings; set --languages"),
        ("list.jsonl --languages=en,de", "en and de must be strings; set --languages"),
        ("s.tsv --languages=en,de --source=tatoeba", r"source=tatoeba: .*input files"),
        ("--source=tatoeba", r"languages: .*--languages=en,de$"),
        ("--source=tatoeba --languages=fr,de", r"^languages=fr,de: .*tatoeba.*English"),
        ("mixed --languages=en,de", r"^mixed: .*two files with one sentence per line"),
        ("three --languages=en,de", r"^three: this folder has no"),
        ("--val_fraction=0.999", r"val_fraction=0.999: for phrases, use 0.01 to 0.9$"),
        ("--val_fraction=1e-6 --held_out=1", r"val_fraction=1e-06: for phrases, use 0.01 to 0.9$"),
        ("--limit=5", r"limit=5: .*--source$"),
    ],
)
def test_bad_input_is_one_line(words, message, write, tmp_path):
    write(FILES | {"one.txt": "a\n" * 30, "one.csv": "a\n" * 30, "short.de": DE.rpartition("\n")[0]})
    write({"header.tsv": "English\tHaus\na\tb\n", "mixed/s.jsonl": "{}", "mixed/README.md": "read me"})
    write({"three/a.en": EN, "three/a.de": DE, "three/LICENSE": "MIT"})
    write({"number.jsonl": '{"en": 5, "de": "x"}', "list.jsonl": '{"translation": {"en": ["a"], "de": "x"}}'})
    with pytest.raises(UserError, match=message) as error:
        prepared(tmp_path, *words.split())
    assert "\n" not in str(error.value)
    assert not [path for path in tmp_path.glob("data/*") if path.suffix != ".lock"]


def texts_of(record):
    return Document(tuple(record.values()), frozenset(record))


def test_a_long_line_is_read_completely(tmp_path):
    long = "é" * 3_000_000
    (tmp_path / "s.tsv").write_text(f"{long}\tb\nc\td", encoding="utf-8")
    corpus = Corpus(
        find_sources([str(tmp_path / "s.tsv")]), texts_of, name_columns=lambda rows: Columns(["a", "b"], False)
    )
    assert list(corpus.documents()) == [(long, "b"), ("c", "d")]
