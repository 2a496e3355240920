import json
from pathlib import Path

import numpy as np
import pytest

from folio import UserError
from folio.data.shards import Shard, open_dataset, pair_lengths
from folio.data.sources.pair_records import pair_document
from folio.data.sources.pairs import (
    Pair,
    describe_pair,
    make_pair,
    name_pair_columns,
    record_pairs,
    split_pairs,
    validation_pairs,
    write_pairs,
)
from folio.data.sources.pairs import read_pairs as read_pairs_of_file
from folio.data.tokenizer import ByteTokenizer
from prepare import translation
from prepare.translation import TranslationConfig
from tests.support.prepared import prepare_pairs, read_pairs, read_report

EOT = 256  # of ByteTokenizer
PAIRS = [{"prompt": f"{k} + {k} =", "completion": f" {2 * k}ä"} for k in range(40)]


def shard_of(*segments: tuple[str | None, int]) -> Shard:
    """A shard of texts, or None for the end of text, with their masks."""
    parts = [[EOT] if text is None else list(text.encode()) for text, _ in segments]
    mask = np.repeat([mask for _, mask in segments], [len(part) for part in parts])
    return Shard(np.concatenate(parts).astype(np.uint16), mask.astype(np.uint8))


def chat(*contents: str) -> dict[str, list[dict[str, str]]]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[k % 2], "content": text} for k, text in enumerate(contents)]}


MASKED = {"role": "assistant", "content": "Hm.", "weight": 0}
RECORDS = {  # the records, and one of the pairs
    "in two shards": (PAIRS, ("7 + 7 =", " 14ä")),
    # the prompt was the last message, and chats that end with a message of the user ran into the next one
    "chats": (
        [chat(f"I am {k}.", "Hi", "Who am I?", f"{k}", *["Thanks"] * (k % 2)) for k in range(20)],
        ("User: I am 7.\n\nAssistant: Hi<|endoftext|>User: Who am I?\n\nAssistant:", " 7"),
    ),
    # a prompt with the token was restored without it, which has other ids
    "a special token in prompts": (
        [{"prompt": f"<|endoftext|>{k}:", "completion": f" {k}<|endoftext|>"} for k in range(20)],
        ("<|endoftext|>7:", " 7"),
    ),
    "masked answers": (
        [{"messages": [{"role": "user", "content": f"{k}"}, MASKED, MASKED | {"weight": 1}]} for k in range(20)],
        ("User: 7\n\nAssistant: Hm.<|endoftext|>Assistant:", " Hm."),
    ),
}


@pytest.mark.parametrize("val_fraction", [0.4, 1e-9])  # 1e-9: in a second pass of the split
@pytest.mark.parametrize("records, pair", RECORDS.values(), ids=RECORDS)
def test_pairs_are_restored_from_shards(records, pair, val_fraction, tmp_path):
    folder = prepare_pairs(tmp_path / "x.jsonl", records, val_fraction=val_fraction, shard_tokens=50)
    pairs, data = read_pairs(folder), open_dataset(folder)
    assert pairs == sorted(pair[:2] for record in records for pair in record_pairs(record).content)
    assert pair in pairs
    assert [pair[:2] for pair in validation_pairs(data)] == list(split_pairs(data.val, ByteTokenizer()))
    assert len(pair_lengths(data.train, 256)) + len(pair_lengths(data.val, 256)) == len(pairs)


def test_pairs_of_chats_and_of_empty_and_incomplete_answers():
    chat = [("User: a\n\nAssistant:", 0), (" b", 1), (None, 1), ("User: c\n\nAssistant:", 0), (" d", 1), (None, 1)]
    shard = shard_of(*chat, ("empty", 0), (None, 1), ("", 0), ("no prompt", 1), (None, 1), ("cut", 0), ("off", 1))
    assert list(split_pairs([shard], ByteTokenizer())) == [
        ("User: a\n\nAssistant:", " b"),
        ("User: c\n\nAssistant:", " d"),
        ("empty", ""),
        ("", "no prompt"),
    ]


def test_the_languages_of_a_translation_are_fields():
    value = {"prompt": "en: a | b: c | de:", "completion": " x", "kind": "date"}
    assert make_pair(value).fields == {"source": "en", "target": "de", **value}
    assert make_pair({"prompt": "Question: a | b", "completion": ""}).fields.keys() == {"prompt", "completion"}


@pytest.mark.needs("babel", "num2words")
def test_held_out_phrases_keep_their_kinds(tmp_path):
    settings = dict(data_dir=str(tmp_path), languages="en,de,pl", pairs=300, held_out=40, tokenizer="byte")
    translation.main(TranslationConfig(**settings))
    dataset = open_dataset(tmp_path / "translation")
    pairs = validation_pairs(dataset)
    lines = (tmp_path / "translation" / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [pair.fields for pair in pairs]
    assert len(pairs) == 40 * 3 and {pair.fields["kind"] for pair in pairs} == {"date", "cardinal", "ordinal", "unit"}
    training = {prompt for prompt, _ in split_pairs(dataset.train, ByteTokenizer())}
    assert len(training) > 200 and not training & {pair.prompt for pair in pairs}


@pytest.mark.needs("babel", "num2words")
def test_preparing_phrases_again_does_nothing(tmp_path, capsys):
    settings = dict(data_dir=str(tmp_path), languages="en,it", pairs=15, held_out=8, tokenizer="byte")
    translation.main(TranslationConfig(**settings))
    out = capsys.readouterr().out
    assert "train on it: python train.py config/translate.py --dataset=translation " in out and "--split_on" not in out
    before = open_dataset(tmp_path / "translation").hash
    translation.main(TranslationConfig(**settings))
    assert "is already prepared" in capsys.readouterr().out
    translation.main(TranslationConfig(**settings, seed=2, overwrite=True))
    assert open_dataset(tmp_path / "translation").hash != before


def pairs_of_splits(folder: Path) -> tuple[set, set]:
    """The pairs of training and of validation."""
    dataset = open_dataset(folder)
    return {*split_pairs(dataset.train, ByteTokenizer())}, {*split_pairs(dataset.val, ByteTokenizer())}


def test_a_chat_and_its_beginning_are_in_one_split(tmp_path):
    """The answers of 8 of 9 short chats for validation were also in training, in longer ones."""
    values = [chat(f"{k}?", f"{k}!", *more) for k in range(20) for more in ((), (f"more {k}?", "yes"))]
    train, val = pairs_of_splits(prepare_pairs(tmp_path / "x.jsonl", values, val_fraction=0.3))
    assert val and not train & val


def test_pairs_with_one_prompt_are_split(tmp_path, capsys):
    """They were refused: "all documents are the same, or have the same prompt"."""
    values = [{"prompt": "Write a line:", "completion": f" line {k}"} for k in range(20)]
    train, val = pairs_of_splits(prepare_pairs(tmp_path / "x.jsonl", values, val_fraction=0.2))
    assert "all have the same prompt, which is in both splits" in capsys.readouterr().out
    assert (len(train), len(val), len(train | val)) == (16, 4, 20)


def test_chats_that_differ_in_their_targets_are_not_duplicates(tmp_path):
    values = [chat("a", "b", "c", "d"), chat("a", "b", "c", "d"), *(chat(f"{k}", "e") for k in range(20))]
    values[1]["messages"][1]["weight"] = 0
    folder = prepare_pairs(tmp_path / "x.jsonl", values, dedup=True)
    assert sum(read_report(folder)["documents"].values()) == 22


@pytest.mark.parametrize("completion", ["b<|endoftext|>", "b<|endoftext|>\n", "b<|endoftext|> \n"])
def test_the_special_text_at_the_end_of_a_completion_is_its_end(completion):
    """A line end after it became a second document."""
    (pair,) = record_pairs({"prompt": "a", "completion": completion}).content
    assert pair[:2] == ("a", "b")


def test_a_file_of_pairs(tmp_path):
    write_pairs(tmp_path / "a.jsonl", PAIRS[:2])
    assert read_pairs_of_file(str(tmp_path / "a.jsonl")) == [Pair(p["prompt"], p["completion"], p) for p in PAIRS[:2]]
    for name, content, message in (
        (
            "b.jsonl",
            '{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n',
            r"b.jsonl:2: completion .*missing.* write ",
        ),
        ("c.jsonl", "\n", "c.jsonl has no pairs; write "),
        ("d.txt", "Q A", "d.txt is text without records; use JSON"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=message):
            read_pairs_of_file(str(tmp_path / name))


def test_each_answer_of_a_chat_is_a_pair_with_all_text_before_it():
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    pairs = record_pairs({"conversations": [*turns, *turns], "id": 5}).content
    first = "User: a\n\nAssistant:"
    assert pairs == [
        Pair(first, " b", {"id": 5, "prompt": first, "completion": " b"}),
        Pair(prompt := f"{first} b<|endoftext|>{first}", " b", {"id": 5, "prompt": prompt, "completion": " b"}),
    ]


RECORD = {"instruction": "Q", "input": "x", "output": "A", "kind": "k"}


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.jsonl", f'{json.dumps(RECORD)}\n{{"question": "Q", "answer": ""}}\n'),
        ("a.json", json.dumps([RECORD, {"query": "Q", "response": ""}])),
        ("a.csv", 'kind,Question,Context,Answer\nk,Q,x,A\nk,Q,x,""\n'),
        ("a.tsv", "kind\tanswer\tquestion\tcontext\nk\tA\tQ\tx\nk\t\tQ\tx\n"),
    ],
)
def test_pairs_are_read_from_what_can_be_prepared(name, content, tmp_path, capsys):
    """tools/evaluate.py --pairs accepted only JSON lines with prompt and completion."""
    (tmp_path / name).write_text(content)
    (pair,) = read_pairs_of_file(str(tmp_path / name))
    assert pair == Pair("Q\n\nx", " A", {"kind": "k", "prompt": "Q\n\nx", "completion": " A"})
    assert "left out 1 pair with an empty completion" in capsys.readouterr().err


def test_the_first_answer_of_a_chat_is_described():
    """The line joined all answers, and the text between them as if it were one prompt."""
    document = pair_document({"messages": [{"role": r, "content": r[0]} for r in ("user", "assistant") * 2]}).content
    assert describe_pair(document) == r'"User: u\n\nAssistant:" -> " a"'
    assert describe_pair(pair_document({"prompt": "x" * 90, "completion": "y"}).content) == f'"{"x" * 77}..." -> "y"'


@pytest.mark.parametrize(
    "first, names",
    [
        (["a", "b"], None),
        (["id", "b"], None),
        (["Answer ", " QUESTION"], ["Answer ", " QUESTION"]),
        (["id", "instruction", "input", "output"], ["id", "instruction", "input", "output"]),
        (["user", "assistant"], ["user", "assistant"]),
        (["id", "messages"], ["id", "messages"]),  # an error follows, because a cell has no messages
    ],
)
def test_headers_of_tables(first, names):
    columns = name_pair_columns([first, ["c", "d"]])
    assert columns == ((names, True) if names else (["prompt", "completion"], False))


def test_a_data_set_without_completions_is_an_error(data_dir):
    with pytest.raises(UserError, match=r"verse has no prompts .*prepare/pairs.py"):
        validation_pairs(open_dataset(data_dir / "verse"))
