"""Clients of OpenAI's completions protocol against a running server."""

import asyncio
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from folio.decoding.language_model import LanguageModel
from folio.web.api import ServedModel, make_app
from folio.web.engine import Engine
from tests.support.decoding import random_model
from tests.support.servers import serving_app
from tests.support.tiny_tokenizers import trained
from tests.support.waiting import in_thread

pytestmark = pytest.mark.needs("openai", "llm")

MODEL, KEY = "the-run", "key-of-the-tests"
PROMPT = "hello wör"
AS_THE_API = {"temperature": 1.0, "top_k": None}  # OpenAI's defaults instead of GenerationConfig's


@pytest.fixture(scope="module")
def gpt() -> LanguageModel:
    """A model with a trained BPE: many tokens are parts of characters, and the vocabulary is padded."""
    return LanguageModel(random_model(3, block_size=64, vocab_size=272), trained(), "cpu", "float32")


@pytest.fixture(scope="module")
def url(gpt: LanguageModel) -> Iterator[str]:
    """The address of a server with a key."""
    served = ServedModel(Engine(gpt), MODEL, "fp_0")
    with serving_app(lambda hosts: make_app(served, hosts, key=KEY)) as port:
        yield f"http://127.0.0.1:{port}/v1"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "DO_NOT_TRACK", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


# --- openai -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    import openai

    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def test_openai_completes_and_streams(client, gpt):
    (model,) = client.models.list().data
    assert model == client.models.retrieve(MODEL) and model.id == MODEL
    request = dict(model=MODEL, prompt=PROMPT, max_tokens=20, seed=7, n=2, extra_body={"top_k": 40})
    expected = gpt.generate(PROMPT, num_samples=2, max_new_tokens=20, seed=7, temperature=1.0, top_k=40)
    answer = client.completions.create(**request)
    assert [(choice.text, choice.finish_reason) for choice in answer.choices] == [(text, "length") for text in expected]
    assert answer.usage.completion_tokens == 40
    *chunks, last = client.completions.create(**request, stream=True, stream_options={"include_usage": True})
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected and last.choices == [] and last.usage == answer.usage
    (choice,) = client.completions.create(**request | {"n": 1}, logprobs=3).choices
    assert choice.text == expected[0] and len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == 20


def test_openai_raises_its_errors(client):
    import openai

    request = dict(model=MODEL, prompt=PROMPT)
    with pytest.raises(openai.NotFoundError) as raised:
        client.completions.create(**{**request, "model": "gpt-4"})
    assert raised.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello"}])
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(**request, extra_body={"logprobs": 1000})
    assert raised.value.param == "logprobs" and "logprobs" in raised.value.message
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another key").completions.create(**request)


def test_openai_sends_requests_at_once(url, gpt):
    import openai

    texts = [PROMPT, "world's", "日本"]
    expected = [gpt.generate(text, max_new_tokens=20, seed=7, **AS_THE_API) for text in texts]

    async def complete_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            create = partial(client.completions.create, model=MODEL, max_tokens=20, seed=7)
            completions = await asyncio.gather(*(create(prompt=text) for text in texts))
        return [completion.choices[0].text for completion in completions]

    assert in_thread(asyncio.run, complete_all()) == expected


# --- llm --------------------------------------------------------------------------------------------------------------


def test_llm_prompts_and_streams(url, gpt, tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    entry = dict(model_id="folio", model_name=MODEL, api_base=url, completion=True, api_key_name="folio")
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([entry]), encoding="utf-8")  # JSON is valid YAML
    import llm

    model = llm.get_model("folio")
    model.key = KEY
    expected = gpt.generate(PROMPT, max_new_tokens=20, seed=7, **AS_THE_API)
    for stream in (True, False):
        response = model.prompt(PROMPT, stream=stream, max_tokens=20, seed=7, temperature=1, logprobs=2)
        assert response.text() == expected
        assert response.json()["usage"]["completion_tokens"] == 20
