"""Fields that the server does not use: accepted if they change nothing, and otherwise refused by name."""

import re
from typing import Any

import pytest

from folio.base.settings import ROOT
from folio.data.tokenizer import ByteTokenizer
from folio.decoding.language_model import LanguageModel
from folio.web.completions import (
    ChatFields,
    GenerationRequest,
    Limits,
    RequestError,
    TextFields,
    field_names,
    read_request,
)
from folio.web.unused_fields import HARMLESS, REFUSED
from tests.support.decoding import random_model

GPT = LanguageModel(random_model(1, vocab_size=ByteTokenizer.vocab_size, block_size=64), ByteTokenizer(), "cpu")
CHAT = "chat"
ENDPOINTS = ["completions", "chat"]


def read(endpoint: str, **fields: Any) -> GenerationRequest:
    """Read a request that is valid without the fields."""
    if endpoint == "completions":
        return read_request({"prompt": "a", **fields}, GPT, Limits())
    return read_request({"messages": [{"role": "user", "content": "a"}], **fields}, GPT, Limits(), CHAT)


TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(
    "fields, param",
    [
        ({"tools": [TOOL]}, "tools"),
        ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice"),
        ({"functions": [TOOL["function"]]}, "functions"),
        ({"function_call": {"name": "add"}}, "function_call"),
    ],
)
def test_tools_that_may_be_called_are_an_error(endpoint, fields, param):
    """They were ignored: the answer was prose for a request that asked for a call."""
    with pytest.raises(RequestError, match=f"^{param} is not supported: ") as raised:
        read(endpoint, **fields)
    assert raised.value.param == param and raised.value.status == 400


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "auto", "functions": [], "parallel_tool_calls": True},
        {"tools": [TOOL], "tool_choice": "none", "functions": [TOOL["function"]], "function_call": "none"},
        {"repeat_penalty": 1.0, "min_tokens": 0, "user": 5, "stream_options": {}, "unknown": None},
    ],
)
def test_a_field_that_changes_nothing_is_accepted(endpoint, fields):
    given, plain = read(endpoint, seed=1, **fields), read(endpoint, seed=1)
    assert [vars(each.completion) for each in given.choices] == [vars(each.completion) for each in plain.choices]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_listed_value_is_accepted_and_others_are_not(endpoint):
    """Each field was ignored: the answer was prose for a request that asked for JSON."""
    used = field_names(ChatFields if endpoint == "chat" else TextFields)
    for name in HARMLESS:
        read(endpoint, **{name: [{"a": 1}]})
    for name in REFUSED.keys() - {*used}:
        for value in REFUSED[name].neutral:
            read(endpoint, **{name: value})
        with pytest.raises(RequestError, match="is not supported") as raised:
            read(endpoint, **{name: {"another": "value"}})
        assert raised.value.param == name


@pytest.mark.parametrize(
    "endpoint, name, remedy",
    [
        ("completions", "temprature", "did you mean temperature?"),
        ("completions", "max_completion_tokens", "use max_tokens"),
        ("completions", "messages", "/v1/chat/completions"),
        ("completions", "top_logprobs", "use logprobs"),
        ("chat", "prompt", "/v1/completions"),
        ("completions", "echo", "only the new text"),
        ("completions", "prompt_logprobs", "folio.load"),
        ("chat", "num_samples", "use n"),
        ("chat", "a field of the future", "leave it out"),
        ("chat", "x" * 10**6, "leave it out"),
    ],
)
def test_an_unknown_field_is_an_error_with_a_remedy(endpoint, name, remedy):
    """A typing error, or a setting of sample.py, was ignored."""
    with pytest.raises(RequestError, match=re.escape(remedy)) as raised:
        read(endpoint, **{name: 3})
    assert name.startswith(raised.value.param.removesuffix("...")) and len(str(raised.value)) < 400


def test_the_docs_list_every_field():
    """They said that unknown fields are ignored, and were silent about those of other servers."""
    page = (ROOT / "docs/use/serving.md").read_text(encoding="utf-8")
    requests, others = page.split("\n## Requests")[1].split("\n## Chat")[0].split("\n## Other fields")
    accepted, refused = others.split("\n**Refused** ")

    def names(text: str) -> set[str]:
        return {*re.findall(r"`(\w+)[`=]", text)}

    used = {*field_names(TextFields), *field_names(ChatFields)}
    assert used <= names(requests)
    assert HARMLESS == names(accepted)
    known = REFUSED.keys()
    assert known - used <= names(refused) <= known | {"logit_bias", "model"}
