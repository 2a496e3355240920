"""Texts for a model, in all inputs: line ends are those of its training data, <|endoftext|> is its special token."""

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import sample
from folio import UserError
from folio.data.shards import PromptFormat
from folio.data.sources.pairs import Pair
from folio.data.tokenizer import EOT_TEXT, ByteTokenizer, CharTokenizer, Tokenizer
from folio.decoding import prompts
from folio.decoding.language_model import LanguageModel, Request
from folio.decoding.prompt_files import read_prompt
from folio.decoding.prompts import encode_prompt, prompt_warnings
from folio.decoding.scheduler import Step
from folio.decoding.text_stream import TextStream
from folio.evaluation.answers import answer_pairs
from folio.evaluation.texts import open_files
from folio.web import completions
from folio.web.completions import Limits, RequestError, read_request
from folio.web.questions import Question, TraceProvider
from sample import SampleConfig, Sampler
from tests.support.decoding import random_model

SIZES = dict(block_size=64, n_layer=1, n_head=1, n_embd=8)


@pytest.fixture
def seen(monkeypatch) -> list[list[int]]:
    """The ids of the prompts that a model gets. It generates nothing."""
    ids_of_prompts: list[list[int]] = []

    def steps(model: LanguageModel, requests: list[Request], *args: Any) -> Iterator[Step]:
        ids_of_prompts.extend(ids for ids, _ in requests)
        return iter(())

    monkeypatch.setattr(LanguageModel, "_steps", steps)
    return ids_of_prompts


def model_of(tokenizer: Tokenizer, kind: type[LanguageModel] = LanguageModel) -> LanguageModel:
    return kind(random_model(1, vocab_size=tokenizer.vocab_size, **SIZES), tokenizer, "cpu")


Input = Callable[[Tokenizer, str, Path, pytest.MonkeyPatch, list[list[int]]], list[int]]


def by_sample(make_settings: Callable[[str, Path], dict]) -> Input:
    """An input of sample.py. make_settings: writes the text to where the settings find it."""

    def encode(tokenizer, text, folder, monkeypatch, seen):
        monkeypatch.setattr(sample, "load_sampler", lambda cfg: model_of(tokenizer, Sampler))
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
        monkeypatch.setattr("builtins.input", Mock(side_effect=[text, EOFError]))
        sample.main(SampleConfig(**make_settings(text, folder)))
        return seen[0]

    return encode


def file_of(text: str, folder: Path, name: str = "prompt.txt") -> str:
    (folder / name).write_bytes(text.encode())
    return str(folder / name)


def json_lines_of(text: str, folder: Path) -> str:
    return file_of(json.dumps({"prompt": text}) + "\n", folder, "prompts.jsonl")


def by_model(call: Callable[[LanguageModel, str], object]) -> Input:
    def encode(tokenizer, text, folder, monkeypatch, seen):
        call(model_of(tokenizer), text)
        return seen[0]

    return encode


def by_request(body: Callable[[str], dict], chat: PromptFormat | None = None) -> Input:
    def encode(tokenizer, text, *_):
        return read_request(body(text), model_of(tokenizer), Limits(), chat).choices[0].completion.prompt

    return encode


def by_viewer(tokenizer, text, *_):
    viewed = SimpleNamespace(tokenizer=tokenizer, limit=64)
    provider = SimpleNamespace(_viewed=lambda question: viewed)
    return TraceProvider.tokens(provider, Question("tokens", text=text)).facts["ids"]


def by_text_file(tokenizer, text, folder, *_):
    (stream,) = open_files([file_of(text, folder)], "text", None, tokenizer).streams
    return stream.ids.tolist()[:-1]  # without the end of the document


def by_pairs(tokenizer, text, folder, monkeypatch, seen):
    answer_pairs(model_of(tokenizer), "pairs", [Pair(text, "a", {})])
    return seen[0]


def by_benchmark(tokenizer, text, *_):
    instance = pytest.importorskip("lm_eval.api.instance")
    from folio.evaluation.benchmarks import HarnessModel

    model = HarnessModel(model_of(tokenizer).model, tokenizer, None, None)
    ids, n = model._encode(instance.Instance("loglikelihood", {}, (text, " a"), 0, ("task", 0, 1)))
    return ids[:-n]


INPUTS: dict[str, Input] = {
    "sample --start": by_sample(lambda text, folder: {"start": text}),
    "sample --start=FILE:": by_sample(lambda text, folder: {"start": f"FILE:{file_of(text, folder)}"}),
    "sample --start=-": by_sample(lambda text, folder: {"start": "-"}),
    "sample --prompts": by_sample(lambda text, folder: {"prompts": json_lines_of(text, folder)}),
    "sample --interactive": by_sample(lambda text, folder: {"interactive": True}),
    "generate": by_model(lambda gpt, text: gpt.generate(text)),
    "generate, several": by_model(lambda gpt, text: gpt.generate([text], num_samples=1)),
    "stream": by_model(lambda gpt, text: list(gpt.stream(text))),
    "completions": by_request(lambda text: {"prompt": text}),
    "completions, several": by_request(lambda text: {"prompt": [text]}),
    "tokenize": lambda tokenizer, text, *_: completions.encode(text, "prompt", tokenizer),
    "viewer": by_viewer,
    "evaluate --text": by_text_file,
    "evaluate --pairs": by_pairs,
    "evaluate --tasks": by_benchmark,
}
CHAT = by_request(lambda text: {"messages": [{"role": "user", "content": text}]}, "pairs")


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", [*INPUTS, "chat"])
def test_line_ends_are_those_of_the_training_data(name, keep, tmp_path, monkeypatch, seen):
    """\\r\\n in a prompt gave other tokens than in the training data, and in a prompt file \\r did."""
    tokenizer = ByteTokenizer().with_keep_line_ends(keep)
    text = "a\r\nb\rc\r\r\n\nd"
    ids = {**INPUTS, "chat": CHAT}[name](tokenizer, text, tmp_path, monkeypatch, seen)
    assert tokenizer.decode(ids) == (text if keep else "a\nb\nc\n\n\nd")


@pytest.mark.parametrize("name", INPUTS)
def test_the_special_text_is_the_special_token(name, tmp_path, monkeypatch, seen):
    """It was ordinary text in tools/evaluate.py."""
    ids = INPUTS[name](ByteTokenizer(), f"a{EOT_TEXT}{EOT_TEXT}b", tmp_path, monkeypatch, seen)
    eots = [256] if name == "evaluate --text" else [256, 256]  # an empty document has no tokens
    assert ids == [ord("a"), *eots, ord("b")]


@pytest.mark.parametrize("name", INPUTS)
def test_without_the_special_token_a_line_says_that_it_is_ordinary_text(name, tmp_path, monkeypatch, seen, capsys):
    """Nothing said so."""
    prompts._note_missing_eot.cache_clear()
    tokenizer = CharTokenizer.of(f"\n ab{EOT_TEXT}")
    ids = INPUTS[name](tokenizer, f"{EOT_TEXT}b", tmp_path, monkeypatch, seen)
    rest = [] if name != "evaluate --text" else [tokenizer.characters.index("b")]  # no separator follows
    assert tokenizer.decode(ids + rest) == f"{EOT_TEXT}b"
    assert capsys.readouterr().err.count(f"{EOT_TEXT} is ordinary text here") == 1
    INPUTS[name](tokenizer, f"{EOT_TEXT}b", tmp_path, monkeypatch, seen)
    assert f"{EOT_TEXT} is ordinary text here" not in capsys.readouterr().err  # only once


def test_what_a_model_computes_for_a_text():
    gpt = model_of(ByteTokenizer())
    ids = [ord("a"), ord("\n"), 256, ord("b")]
    for compute in (gpt.losses, gpt.logits, gpt.attention, gpt.hidden_states):
        np.testing.assert_array_equal(compute(f"a\r\n{EOT_TEXT}b"), compute(ids))


def test_documents_of_an_evaluated_text(tmp_path):
    """A document in which <|endoftext|> separates documents was one document."""
    tokenizer = CharTokenizer("ab\n", eot=True)
    text = open_files([file_of(f"é{EOT_TEXT}ab\r\n{EOT_TEXT}", tmp_path)], "text", None, tokenizer, on_unknown="skip")
    (stream,) = text.streams
    assert stream.ids.tolist() == [3, 0, 1, 2, 3] and stream.document.tolist() == [0, 1, 1, 1, 1]
    assert stream.skipped.tolist() == [0, 0, 0, 0, 0]
    assert (text.coverage.characters, dict(text.coverage.unknown)) == (4, {"é": 1})


def test_warnings_about_a_prompt_do_not_name_the_special_text():
    """They listed its characters, and \\r, as left out."""
    tokenizer = CharTokenizer("a\n", eot=True)
    text = f"a\r\n{EOT_TEXT}é"
    prompt = encode_prompt(tokenizer, text, "skip")
    assert prompt == ([0, 1, 2], f"a\n{EOT_TEXT}", 1)
    (line,) = prompt_warnings(prompt, text, "the prompt", tokenizer, model_of(tokenizer).model.config, "skip")
    assert line == "left out 1 of 16 characters of the prompt, not in the vocabulary: 'é'"
    assert prompt.truncate(3, tokenizer) == prompt and prompt.truncate(2, tokenizer).text == "a\n"
    # The text before it and the text after it were printed as one.
    prompt = encode_prompt(ByteTokenizer(), f"a{EOT_TEXT}bc")
    assert prompt.truncate(3, ByteTokenizer()).text == f"a{EOT_TEXT}b"


def test_the_last_line_break_of_a_prompt_file(tmp_path):
    for keep, line_end in ((False, "\r"), (False, "\r\n"), (True, "\r"), (True, "\r\n"), (True, "\n")):
        tokenizer = ByteTokenizer().with_keep_line_ends(keep)
        value = f"FILE:{file_of(f'a{line_end}b{line_end}', tmp_path)}"
        assert read_prompt("start", value, tokenizer) == (f"a{line_end}b" if keep else "a\nb")


def test_stop_strings():
    """\\r\\n never occurred, and neither did text with <|endoftext|>, which ends every text."""
    text = TextStream(ByteTokenizer(), ["x\r\n", EOT_TEXT])
    assert "".join(map(text.push, b"ax\nb")) == "a" and text.ended
    assert TextStream(ByteTokenizer().with_keep_line_ends(True), "x\r\n").stop == ("x\r\n",)
    assert TextStream(CharTokenizer("ab"), f"a{EOT_TEXT}").stop == (f"a{EOT_TEXT}",)  # ordinary text
    with pytest.raises(UserError, match=r"stop=.*ends every text"):
        TextStream(ByteTokenizer(), f"a{EOT_TEXT}")
    with pytest.raises(UserError, match=r"stop=.*ends every text"):
        model_of(ByteTokenizer()).generate("a", stop=f"a{EOT_TEXT}")
    with pytest.raises(RequestError, match=r"stop=.*ends every text") as error:
        read_request({"prompt": "a", "stop": ["b", f"{EOT_TEXT}\n"]}, model_of(ByteTokenizer()), Limits())
    assert error.value.param == "stop"


def test_the_error_of_the_server_names_the_special_text():
    """It listed its characters as missing in the vocabulary."""
    with pytest.raises(RequestError, match="which ends a message"):
        CHAT(ByteTokenizer(), f"a{EOT_TEXT}b")
    for tokenizer, is_named in ((CharTokenizer("ab"), True), (CharTokenizer("ab", eot=True), False)):
        with pytest.raises(RequestError, match="'é'") as error:
            completions.encode(f"é{EOT_TEXT}", "prompt", tokenizer)
        assert (f"{EOT_TEXT} is ordinary text to this model" in str(error.value)) == is_named
