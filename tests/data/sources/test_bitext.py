import gzip
import json
from collections import Counter
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from folio import UserError
from folio.base.files import read_json
from folio.base.settings import ConfigError, load
from folio.data.blocks import CorpusError, Document
from folio.data.corpus import Corpus
from folio.data.inputs import find_sources
from folio.data.records import Columns
from folio.data.shards import open_dataset
from folio.data.sources.bitext import detect_language, language_problem, translation_pair
from folio.data.sources.pairs import split_pairs, validation_pairs
from folio.data.tokenizer import ByteTokenizer
from prepare import translation
from prepare.translation import TranslationConfig
from tests.support.hub import serving
from tests.support.processes import ROOT, run_in_turn

pytestmark = pytest.mark.needs("babel", "num2words")

SENTENCES = [(f"{n} green bottles", f"{n} grüne Flaschen") for n in range(30)]
EXPECTED = sorted((f"en: {en} | de:", f" {de}") for en, de in SENTENCES)


def prepared(folder: Path, *words: str) -> list[tuple[str, str]]:
    """Run the script, and return the prompts and completions of both splits."""
    options = ["--tokenizer=byte", f"--data_dir={folder / 'data'}", "--val_fraction=0.2", "--overwrite=True"]
    translation.main(load(TranslationConfig, [*options, *words]))
    (prepared_folder,) = [path for path in (folder / "data").iterdir() if not path.name.startswith(".")]
    dataset = open_dataset(prepared_folder)
    splits = [list(split_pairs(shards, ByteTokenizer())) for shards in (dataset.train, dataset.val)]
    assert all(splits)
    prepared_folder.rename(folder / f"made-{prepared_folder.name}-{len(list(folder.iterdir()))}")
    return sorted(splits[0] + splits[1])


def write_files(folder: Path) -> None:
    """Write the sentences as a table, as two line-aligned files, and as JSON lines in three formats."""
    (folder / "s.tsv").write_text("".join(f"{en}\t{de}\tCC-BY\r\n" for en, de in SENTENCES) + "\n", encoding="utf-8")
    (folder / "corpus.en").write_text("\n".join(en for en, _ in SENTENCES), encoding="utf-8")
    (folder / "corpus.de.gz").write_bytes(gzip.compress("".join(f"{de}\n" for _, de in SENTENCES).encode()))
    kinds = [
        {"en": en, "de": de} if n % 3 == 0 else {"translation": {"de": de, "en": en}} if n % 3 == 1 else
        {"prompt": f"en: {en} | de:", "completion": f" {de}"}
        for n, (en, de) in enumerate(SENTENCES)
    ]  # fmt: skip
    (folder / "s.jsonl").write_text("\n".join(map(json.dumps, kinds)))


@pytest.mark.parametrize(
    "words",
    [
        ["s.tsv", "--languages=en,de"],
        ["s.jsonl", "--languages=en,de"],
        ["corpus.en", "corpus.de.gz"],
        ["corpus.en", "corpus.de.gz", "--languages=en,de"],
    ],
)
def test_user_texts(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    assert prepared(tmp_path, *words) == EXPECTED


def test_the_other_direction_and_the_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    assert prepared(tmp_path, "corpus.de.gz", "corpus.en") == sorted((f"de: {d} | en:", f" {e}") for e, d in SENTENCES)
    assert [path.name.rpartition("-")[0] for path in tmp_path.glob("made-*")] == ["made-corpus"]


def test_preparing_the_same_files_again_does_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    settings = dict(inputs=("s.tsv",), languages="en,de", tokenizer="byte", data_dir=str(tmp_path / "data"))
    for _ in range(2):
        translation.main(TranslationConfig(**settings))
    assert "is already prepared" in capsys.readouterr().out
    with pytest.raises(UserError, match="contains another data set"):
        translation.main(TranslationConfig(**{**settings, "languages": "de,en"}))


def test_pairs_with_an_empty_text_are_left_out(tmp_path):
    path = tmp_path / "s.tsv"
    path.write_text("".join(f"{en}\t{de}\n" for en, de in SENTENCES) + "\tx\ny\t \n", encoding="utf-8")
    assert prepared(tmp_path, str(path), "--languages=en,de") == EXPECTED


def test_all_translations_of_a_sentence_are_in_one_split(tmp_path):
    sentences = "".join(f"sentence {n // 10}\tSatz {n}\n" for n in range(200))
    (tmp_path / "s.tsv").write_text(sentences, encoding="utf-8")
    words = [str(tmp_path / "s.tsv"), "--languages=en,de", "--tokenizer=byte", f"--data_dir={tmp_path}"]
    translation.main(load(TranslationConfig, words))
    dataset = open_dataset(tmp_path / "s")
    train, val = (
        Counter(prompt for prompt, _ in split_pairs(shards, ByteTokenizer())) for shards in (dataset.train, dataset.val)
    )
    assert {*train.values(), *val.values()} == {10} and (len(train), len(val)) == (18, 2)
    assert [pair.fields["target"] for pair in validation_pairs(dataset)] == ["de"] * 20


@pytest.mark.parametrize(
    "header",
    ["english\tdeutsch", "en-US\tde-DE", "eng\tdeu", "sentence_en\tsentence_de", "source\ttarget", "German\tEn"],
)
def test_a_header_of_languages_is_not_a_pair(header, tmp_path):
    reverse = header.startswith("German")
    lines = [header, *("\t".join(texts[::-1] if reverse else texts) for texts in SENTENCES)]
    (tmp_path / "s.tsv").write_text("\n".join(lines), encoding="utf-8")
    assert prepared(tmp_path, str(tmp_path / "s.tsv"), "--languages=en,de") == EXPECTED


def test_a_row_that_may_be_a_header_is_refused(tmp_path):
    (tmp_path / "s.tsv").write_text("English\tHaus\na\tb\n")
    with pytest.raises(UserError, match=r"s\.tsv: its first row, English, Haus, may be a header or a pair; begin with"):
        prepared(tmp_path, str(tmp_path / "s.tsv"), "--languages=en,de")


def test_a_folder_of_two_aligned_files(tmp_path):
    """The error proposed a pattern for one of the files, which was refused, too."""
    (tmp_path / "pair").mkdir()
    for name, texts in zip(
        ("corpus.de", "corpus.en"), zip(*(pair[::-1] for pair in SENTENCES), strict=True), strict=True
    ):
        (tmp_path / "pair" / name).write_text("\n".join(texts), encoding="utf-8")
    assert prepared(tmp_path, str(tmp_path / "pair")) == sorted((f"de: {de} | en:", f" {en}") for en, de in SENTENCES)
    assert prepared(tmp_path, str(tmp_path / "pair"), "--languages=en,de") == EXPECTED
    (tmp_path / "pair" / "LICENSE").write_text("MIT")
    with pytest.raises(UserError, match="this folder has no"):
        prepared(tmp_path, str(tmp_path / "pair"), "--languages=en,de")


@pytest.mark.parametrize("names", [("x.en.txt", "x.de.txt"), ("en.txt", "de.txt"), ("x.en.txt.gz", "x.de.txt.gz")])
def test_the_names_of_two_files_say_their_languages(names, tmp_path):
    """With x.de.txt before x.en.txt, as in a folder, all pairs were reversed."""
    paths = [tmp_path / name for name in names]
    for path, texts in zip(paths, zip(*SENTENCES, strict=True), strict=True):
        content = "\n".join(texts).encode()
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    assert prepared(tmp_path, *map(str, paths)) == EXPECTED
    with pytest.raises(UserError, match="put them in the order of --languages=en,de"):
        prepared(tmp_path, *map(str, paths[::-1]), "--languages=en,de")


def test_what_is_left_out_of_aligned_files_is_in_the_account(tmp_path):
    """Lines without a translation, and white space, counted as used text."""
    (tmp_path / "s.en").write_text("a one\n   two   \nlost\na three\n")
    (tmp_path / "s.de").write_text("ein\nzwei\n\ndrei\n")
    prepared(tmp_path, str(tmp_path / "s.en"), str(tmp_path / "s.de"))
    account = read_json(next(tmp_path.glob("made-*")) / "report.json")["account"]
    assert account["characters"] == {
        "in": 36, "left out of used fields": 6, "records without a document": 4, "used": 26
    }  # fmt: skip
    assert account["pairs"] == {"in": 4, "used": 3, "with an empty text": 1}


def test_rows_after_the_limit_are_in_the_account(tmp_path):
    """All 1,000 rows of a file counted as documents, of which 10 were used."""
    columns = {"en": [f"{n}" for n in range(1000)], "de": [f"d{n}" for n in range(1000)]}
    write_parquet(tmp_path / "many" / "train-00000-of-00001.parquet", **columns)
    pairs = prepared(tmp_path, f"--source={tmp_path / 'many'}", "--languages=en,de", "--limit=10")
    assert len(pairs) == 10
    account = read_json(next(tmp_path.glob("made-*")) / "report.json")["account"]
    assert account["records"] == {"documents": 10, "in": 1000, "record after --limit": 990}


def test_a_folder_of_files(tmp_path):
    write_files(tmp_path)
    (tmp_path / "tables").mkdir()
    lines = (tmp_path / "s.tsv").read_text(encoding="utf-8").splitlines(keepends=True)
    for name, part in (("a.tsv", lines[:10]), ("b.tsv", lines[10:])):
        (tmp_path / "tables" / name).write_text("".join(part), encoding="utf-8")
    assert prepared(tmp_path, str(tmp_path / "tables"), "--languages=en,de") == EXPECTED


def write_parquet(path: Path, **columns: list) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path)


def test_parquet_files_of_opus_and_tatoeba(tmp_path):
    write_parquet(
        tmp_path / "opus" / "train-00000-of-00001.parquet", translation=[{"de": de, "en": en} for en, de in SENTENCES]
    )
    write_parquet(
        tmp_path / "tatoeba" / "train-00000-of-00001.parquet",
        english=[en for en, _ in SENTENCES],
        non_english=[de for _, de in SENTENCES],
    )
    for name in ("opus", "tatoeba"):
        assert prepared(tmp_path, f"--source={tmp_path / name}", "--languages=en,de") == EXPECTED
    assert len(prepared(tmp_path, f"--source={tmp_path / 'opus'}", "--languages=de,en", "--limit=20")) == 20
    with pytest.raises(CorpusError, match=r"it has no fr, only de, en; set --languages"):
        prepared(tmp_path, f"--source={tmp_path / 'opus'}", "--languages=en,fr")
    write_parquet(tmp_path / "flat" / "train.parquet", translation=["a", "b"])
    with pytest.raises(CorpusError, match=r"it has no en, only translation; set --languages"):
        prepared(tmp_path, f"--source={tmp_path / 'flat'}", "--languages=en,de")
    with pytest.raises(CorpusError, match=r"columns are english and non_english; .* with en in --languages"):
        prepared(tmp_path, f"--source={tmp_path / 'tatoeba'}", "--languages=de,fr")


def test_downloads_from_a_hub(tmp_path):
    """Run datasets and huggingface_hub against a local hub."""
    write_parquet(tmp_path / "opus.parquet", translation=[{"de": de, "en": en} for en, de in SENTENCES])
    columns = dict(english=[en for en, _ in SENTENCES], non_english=[de for _, de in SENTENCES])
    write_parquet(tmp_path / "tatoeba.parquet", **columns)
    opus, tatoeba = "Helsinki-NLP/opus-100", "sentence-transformers/parallel-sentences-tatoeba"
    readme = "---\nconfigs:\n- config_name: {0}\n  data_files:\n  - split: train\n    path: {0}/train-*\n---\n"
    files = {
        f"{opus}/de-en/train-00000-of-00001.parquet": (tmp_path / "opus.parquet").read_bytes(),
        f"{opus}/README.md": readme.format("de-en").encode(),
        f"{tatoeba}/en-de/train-00000-of-00001.parquet": (tmp_path / "tatoeba.parquet").read_bytes(),
        f"{tatoeba}/README.md": readme.format("en-de").encode(),
    }
    with serving(files) as hub:
        env = dict(HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "hf"), HF_HUB_DISABLE_PROGRESS_BARS="1")
        words = ["--languages=en,de", "--tokenizer=byte", f"--data_dir={tmp_path / 'data'}", "--val_fraction=0.2"]
        sources = ("opus-100", "tatoeba")
        done = run_in_turn(
            [[ROOT / "prepare/translation.py", f"--source={source}", *words] for source in sources], **env
        )
        assert done.returncode == 0, done.stderr
        for source in sources:
            dataset = open_dataset(tmp_path / "data" / f"{source}-en-de")
            pairs = [*split_pairs(dataset.train, ByteTokenizer()), *split_pairs(dataset.val, ByteTokenizer())]
            assert sorted(pairs) == EXPECTED
    assert read_json(tmp_path / "data" / "tatoeba-en-de" / "meta.json")["recipe"]["val_fraction"] == 0.2


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
        (["one.tsv", "--languages=en,de"], r"^one.tsv:2: .*1 cell, but 2"),
        (["s.tsv"], r"^s.tsv: .*--languages=en,de$"),
        (["s.tsv", "--languages=en,dee"], r"^command line: languages=en,dee: 'dee'"),
        (["s.tsv", "--languages=en"], r"languages=en: .*two different"),
        (["s.tsv", "--languages=en,en"], r"languages=en,en: .*two different"),
        (["s.tsv", "--languages=en,de,fr"], r"languages=en,de,fr: name two: "),
        (["--languages=en,kk"], r"languages=en,kk: .*'kk', only in am, .*, en, .*, vi$"),
        (["corpus.en", "short.de"], r"^corpus.en has 30 lines and short.de 29, .*not aligned"),
        (["short.de", "corpus.en"], r"^short.de has 29 lines and corpus.en 30, .*not aligned"),
        (["corpus.en", "corpus.de.gz", "--languages=de,en"], r"^corpus.en, corpus.de.gz: .*order of --languages"),
        (["corpus.en", "a.txt"], r"^corpus.en, a.txt: .*--languages=en,de$"),
        (["corpus.en"], r"^corpus.en: .*two files with one sentence per line$"),
        (["corpus.en", "s.tsv"], r"^corpus.en, s.tsv: .*two files"),
        (["s.csv", "t.csv", "--languages=en,de"], r"^s.csv: it has 1 column: a; write two columns"),
        (["none.tsv", "--languages=en,de"], r"^none.tsv: no such file$"),
        (["latin.tsv", "--languages=en,de"], r"^latin.tsv:1, byte 2 .* not UTF-8"),
        (["s.jsonl", "--languages=en,fr"], r"^s.jsonl:1: it has no fr, only en, de; set --languages"),
        (["s.jsonl"], r"^s.jsonl:1: .*no prompt and completion.* set --languages"),
        (["s.tsv", "--languages=en,de", "--source=tatoeba"], r"source=tatoeba: .*input files"),
        (["--source=tatoeba"], r"languages: .*--languages=en,de$"),
        (["--source=tatoeba", "--languages=fr,de"], r"^languages=fr,de: .*tatoeba.*English"),
        (["mixed", "--languages=en,de"], r"^mixed: .*two files with one sentence per line"),
        (["--val_fraction=0.999"], r"val_fraction=0.999: for phrases, use 0.01 to 0.9$"),
        (["--val_fraction=1e-6", "--held_out=1"], r"val_fraction=1e-06: for phrases, use 0.01 to 0.9$"),
        (["--limit=5"], r"limit=5: .*--source$"),
    ],
)
def test_bad_input_is_one_line(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    (tmp_path / "one.tsv").write_text("a\tb\nc d\n")
    (tmp_path / "short.de").write_text("\n".join(de for _, de in SENTENCES[:-1]), encoding="utf-8")
    (tmp_path / "latin.tsv").write_bytes(b"x\t\xe9\n")
    for name in ("a.txt", "s.csv", "t.csv"):
        (tmp_path / name).write_text("a\n" * 30)
    (tmp_path / "mixed").mkdir()
    for name in ("s.jsonl", "README.md"):
        (tmp_path / "mixed" / name).write_text("{}" if name == "s.jsonl" else "read me")
    with pytest.raises(UserError, match=message) as error:
        prepared(tmp_path, *words)
    assert "\n" not in str(error.value)
    assert not [path for path in tmp_path.glob("data/*") if path.suffix != ".lock"]


def test_values_that_are_not_text_are_refused():
    languages = ("en", "de")
    for value in ({"en": 5, "de": "x"}, {"translation": {"en": ["a"], "de": "x"}}):
        with pytest.raises(CorpusError, match="en and de must be strings; set --languages"):
            translation_pair(languages, value)
    for empty in (None, " "):
        assert translation_pair(languages, {"en": empty, "de": "x"}).content is None
    with pytest.raises(ConfigError):
        translation.main(TranslationConfig(languages="en"))


def texts_of(record):
    return Document(tuple(record.values()), frozenset(record))


def test_a_long_line_is_read_completely(tmp_path):
    long = "é" * 3_000_000
    (tmp_path / "s.tsv").write_text(f"{long}\tb\nc\td", encoding="utf-8")
    corpus = Corpus(
        find_sources([str(tmp_path / "s.tsv")]), texts_of, name_columns=lambda rows: Columns(["a", "b"], False)
    )
    assert list(corpus.documents()) == [(long, "b"), ("c", "d")]
