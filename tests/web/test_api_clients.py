"""The programs that people use with OpenAI's completions protocol, against a running tools/serve.py."""

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from folio.decoding.language_model import LanguageModel
from folio.evaluation.benchmarks import MultipleChoice, hellaswag, score_endings
from folio.evaluation.text_loss import token_losses
from tests.support import processes
from tests.support.tiny_tokenizers import trained
from tests.support.viewed_models import save_random_run
from tests.support.waiting import in_thread

pytestmark = pytest.mark.needs("openai", "llm", "langchain_openai", "lm_eval")

SEED = 3  # of the weights
KEY = "key-of-the-tests"
PROMPT = "hello wör"
AS_THE_API = {"temperature": 1.0, "top_k": None}  # OpenAI's defaults instead of GenerationConfig's


class Api(NamedTuple):
    """A server."""

    base_url: str  # such as http://127.0.0.1:8080/v1
    model: str  # as the server names it
    key: str


@contextmanager
def serving(folder: Path, run: Path, *options: str) -> Iterator[str]:
    """Run a server in a process of its own. Yields what clients call its base URL."""
    files = [folder / name for name in ("stdin", "stdout", "stderr")]
    for file in files:
        file.touch()
    words = [processes.ROOT / "tools" / "serve.py", run, "--port=0", "--device=cpu", "--dtype=float32", *options]
    process = processes.start(words, files)
    try:
        until = time.monotonic() + 120
        while not (output := files[1].read_text(encoding="utf-8")):
            assert process.is_alive() and time.monotonic() < until, files[2].read_text(encoding="utf-8")
            time.sleep(0.05)
        yield output.split()[0]
    finally:
        process.terminate()
        processes.wait(process, 60)
    assert "Traceback" not in files[2].read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a model with a trained BPE. Many of its tokens are parts of characters, and its vocabulary is padded."""
    folder = tmp_path_factory.mktemp("run")
    save_random_run(folder, trained(), SEED, block_size=64, vocab_size=272)
    return folder


@pytest.fixture(scope="module")
def gpt(run: Path) -> LanguageModel:
    return LanguageModel.load(run, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def api(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A server that wants a key."""
    with serving(tmp_path_factory.mktemp("api"), run, f"--key={KEY}") as base_url:
        yield Api(base_url, run.name, KEY)


@pytest.fixture(scope="module")
def narrow_api(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A server without a key that generates one completion at a time, while one more may wait."""
    with serving(tmp_path_factory.mktemp("narrow"), run, "--rows=1", "--max_waiting=1") as base_url:
        yield Api(base_url, run.name, "unused")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "DO_NOT_TRACK", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")


def log_probabilities(gpt: LanguageModel, ids: list[int]) -> torch.Tensor:
    """What the model gives after each of the ids, without the decoder: (T, V)."""
    with torch.inference_mode():
        return gpt.model.logits(torch.tensor([ids]))[0].float().log_softmax(-1)


# --- openai -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def client(api: Api) -> Iterator[Any]:
    import openai

    with openai.OpenAI(base_url=api.base_url, api_key=api.key, max_retries=0, timeout=60) as client:
        yield client


def test_openai_lists_the_model(client, api):
    (model,) = client.models.list().data
    assert model == client.models.retrieve(api.model) and (model.id, model.object) == (api.model, "model")


def test_openai_completes(client, api, gpt):
    answer = client.completions.create(model=api.model, prompt=PROMPT, max_tokens=20, seed=7)
    (choice,) = answer.choices
    assert choice.text == gpt.generate(PROMPT, max_new_tokens=20, seed=7, **AS_THE_API)
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion" and answer.model == api.model
    again = client.completions.create(model=api.model, prompt=PROMPT, max_tokens=20, seed=7)
    assert again.choices == answer.choices and again.id != answer.id
    assert again.system_fingerprint == answer.system_fingerprint is not None
    count = len(gpt.encode_prompt(PROMPT).ids)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (count, 20, count + 20)


def test_openai_streams(client, api, gpt):
    expected = gpt.generate(PROMPT, max_new_tokens=20, seed=7, **AS_THE_API)
    request = dict(model=api.model, prompt=PROMPT, max_tokens=20, seed=7, stream=True)
    chunks = list(client.completions.create(**request))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks) and len({chunk.id for chunk in chunks}) == 1
    *chunks, last = client.completions.create(**request, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert last.choices == [] and last.usage.completion_tokens == 20
    assert all(chunk.usage is None for chunk in chunks)


def test_openai_gets_several_samples(client, api, gpt):
    expected = gpt.generate(PROMPT, num_samples=3, max_new_tokens=12, seed=7, **AS_THE_API)
    request = dict(model=api.model, prompt=PROMPT, max_tokens=12, seed=7, n=3)
    answer = client.completions.create(**request)
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage.completion_tokens == 36 and answer.usage.prompt_tokens == len(gpt.encode_prompt(PROMPT).ids)
    texts = ["", "", ""]
    for chunk in client.completions.create(**request, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected


def test_openai_sends_texts_and_ids(client, api, gpt):
    texts = ["hello", "world's", "日本"]
    ids = [gpt.encode_prompt(text).ids for text in texts]
    settings = dict(model=api.model, max_tokens=8, temperature=0)
    expected = [gpt.generate(text, max_new_tokens=8, temperature=0.0) for text in texts]
    for prompt in (texts, ids):
        choices = client.completions.create(prompt=prompt, **settings).choices
        assert [(choice.index, choice.text) for choice in choices] == list(enumerate(expected))
    for prompt in (texts[2], ids[2], [texts[2]], [ids[2]]):
        assert client.completions.create(prompt=prompt, **settings).choices[0].text == expected[2]


def test_openai_gets_the_models_log_probabilities(client, api, gpt):
    """Those of the prompt and of what follows, as the model computes them for the whole text at a time."""
    ids = gpt.encode_prompt(PROMPT).ids
    request = dict(model=api.model, prompt=ids, max_tokens=6, logprobs=3, seed=7, temperature=0.7)
    (choice,) = client.completions.create(**request, echo=True).choices
    got = choice.logprobs
    assert choice.text.startswith(PROMPT)
    assert len(got.tokens) == len(got.token_logprobs) == len(got.top_logprobs) == len(got.text_offset) == len(ids) + 6
    assert got.token_logprobs[0] is got.top_logprobs[0] is None
    assert got.text_offset[0] == 0 and got.text_offset == sorted(got.text_offset)
    generated = generated_ids(gpt, ids, 6, seed=7, temperature=0.7)
    expected = log_probabilities(gpt, ids + generated)  # (T, V)
    for t, token in enumerate(ids + generated):
        if t == 0:
            continue
        assert got.token_logprobs[t] == pytest.approx(float(expected[t - 1, token]), abs=1e-4)
        top = sorted(got.top_logprobs[t].values(), reverse=True)
        assert top[:3] == pytest.approx(expected[t - 1, : gpt.tokenizer.vocab_size].topk(3).values.tolist(), abs=1e-4)
        assert got.top_logprobs[t][got.tokens[t]] == got.token_logprobs[t]  # the same float, as lm-eval needs
        assert 3 <= len(top) <= 4
    (without_echo,) = client.completions.create(**request).choices
    assert without_echo.logprobs.token_logprobs == got.token_logprobs[len(ids) :]
    assert without_echo.text == choice.text[len(PROMPT) :]
    only_prompt = client.completions.create(**{**request, "max_tokens": 0}, echo=True)
    assert only_prompt.choices[0].text == PROMPT and only_prompt.usage.completion_tokens == 0
    assert only_prompt.choices[0].logprobs.token_logprobs == got.token_logprobs[: len(ids)]


def generated_ids(gpt: LanguageModel, prompt: list[int], count: int, **settings) -> list[int]:
    from folio.decoding.language_model import GenerationConfig

    config = GenerationConfig(max_new_tokens=count, top_k=None, **settings)
    return [step.tokens[0] for step in gpt.steps([prompt], [0], config)]


def test_openai_sets_how_to_sample(client, api, gpt):
    request = dict(model=api.model, prompt=PROMPT, max_tokens=30, seed=5)
    own = dict(top_k=40, min_p=0.001, repetition_penalty=1.2)
    answer = client.completions.create(**request, temperature=0.9, top_p=0.95, extra_body=own)
    expected = gpt.generate(PROMPT, max_new_tokens=30, seed=5, temperature=0.9, top_p=0.95, **own)
    assert answer.choices[0].text == expected
    token = gpt.tokenizer.encode("hello")[0]
    answer = client.completions.create(**request, logit_bias={str(token): 100})
    assert answer.choices[0].text == gpt.tokenizer.decode([token]) * 30
    penalized = client.completions.create(**request, frequency_penalty=2, presence_penalty=2, user="a user")
    assert penalized.choices[0].text != client.completions.create(**request).choices[0].text


def test_openai_stops_at_a_text(client, api, gpt):
    text = gpt.generate(PROMPT, max_new_tokens=20, seed=7, **AS_THE_API)
    stop = text[4:6]
    request = dict(model=api.model, prompt=PROMPT, max_tokens=20, seed=7)
    for given in (stop, ["never", stop]):
        (choice,) = client.completions.create(**request, stop=given).choices
        assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
        chunks = list(client.completions.create(**request, stop=given, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_openai_raises_the_errors_of_its_protocol(client, api):
    import openai

    request = dict(model=api.model, prompt=PROMPT)
    with pytest.raises(openai.NotFoundError) as raised:
        client.completions.create(**{**request, "model": "gpt-4"})
    assert raised.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model=api.model, messages=[{"role": "user", "content": "hello"}])
    for name, value in {"temperature": -1, "n": 0, "logprobs": 1000, "max_tokens": "ten", "stop": [1]}.items():
        with pytest.raises(openai.BadRequestError) as raised:
            client.completions.create(**request, extra_body={name: value})
        assert raised.value.param == name and name in raised.value.message
    with pytest.raises(openai.BadRequestError):  # more than the context holds
        client.completions.create(**request, max_tokens=64)
    for key in ("another key", KEY + "!", "Bearer"):
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key=key).completions.create(**request)


def wait_for(base_url: str, **counts: int) -> None:
    """Wait until /health has these counts of rows and of requests."""
    until = time.monotonic() + 60
    health: dict[str, Any] = {}
    while not health.items() >= counts.items():
        assert time.monotonic() < until, health
        time.sleep(0.02)
        with urllib.request.urlopen(f"{base_url.removesuffix('/v1')}/health", timeout=60) as response:
            health = json.load(response)


def test_openai_is_asked_to_wait_when_the_queue_is_full(narrow_api):
    import openai

    request = dict(model=narrow_api.model, prompt=PROMPT, max_tokens=65_000, stream=True, logit_bias={"269": -100})
    request |= dict(extra_body={"context_stride": 1})
    settings = dict(base_url=narrow_api.base_url, api_key="unused", max_retries=0, timeout=60)
    with openai.OpenAI(**settings) as client, ThreadPoolExecutor() as threads:
        first = client.completions.create(**request)
        next(first)  # it has the only row
        waiting = threads.submit(client.completions.create, **request)
        wait_for(narrow_api.base_url, active=1, waiting=1)
        with pytest.raises(openai.RateLimitError) as raised:
            client.completions.create(**request)
        assert float(raised.value.response.headers["retry-after"]) > 0
        first.close()
        second = waiting.result()  # the row is free again
        assert next(second).choices
        second.close()
    wait_for(narrow_api.base_url, active=0, waiting=0)


def test_openai_streams_to_many_clients(api, gpt):
    """Each gets what it would get alone. Some leave early."""
    import openai

    texts = {seed: gpt.generate(PROMPT, max_new_tokens=30, seed=seed, **AS_THE_API) for seed in range(16)}

    async def complete(client: openai.AsyncOpenAI, seed: int) -> str:
        text = ""
        settings = dict(model=api.model, prompt=PROMPT, max_tokens=30)
        async with await client.completions.create(**settings, seed=seed, stream=True) as stream:
            async for chunk in stream:
                text += chunk.choices[0].text
                if seed % 4 == 3 and text:
                    break
        return text

    async def complete_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=api.base_url, api_key=api.key, max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(complete(client, seed) for seed in texts))

    for seed, text in enumerate(in_thread(asyncio.run, complete_all())):
        assert text and texts[seed].startswith(text) if seed % 4 == 3 else text == texts[seed]


# --- langchain --------------------------------------------------------------------------------------------------------


def test_langchain_invokes_streams_and_batches(api, gpt):
    from langchain_openai import OpenAI

    settings = dict(temperature=1, max_tokens=20, seed=7, max_retries=0, timeout=60)
    model = OpenAI(model=api.model, base_url=api.base_url, api_key=api.key, **settings)
    texts = [PROMPT, "world's", "日本"]
    expected = [gpt.generate(text, max_new_tokens=20, seed=7, **AS_THE_API) for text in texts]
    assert model.invoke(PROMPT) == expected[0]
    assert "".join(model.stream(PROMPT)) == expected[0]
    assert model.batch(texts)[0] == expected[0] and len(model.batch(texts)) == 3

    async def invoke_all() -> list[str]:
        try:
            return await asyncio.gather(*map(model.ainvoke, texts))
        finally:
            await model.async_client._client.close()

    assert in_thread(asyncio.run, invoke_all()) == expected
    assert model.invoke(PROMPT, stop=[expected[0][3]]) == expected[0][:3]
    model.client._client.close()


# --- llm --------------------------------------------------------------------------------------------------------------


def test_llm_prompts_and_streams(narrow_api, gpt, tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    entry = dict(model_id="folio", model_name=narrow_api.model, api_base=narrow_api.base_url, completion=True)
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([entry]), encoding="utf-8")  # YAML, too
    import llm

    model = llm.get_model("folio")
    expected = gpt.generate(PROMPT, max_new_tokens=20, seed=7, **AS_THE_API)
    for stream in (True, False):
        response = model.prompt(PROMPT, stream=stream, max_tokens=20, seed=7, temperature=1, logprobs=2)
        assert response.text() == expected
        assert response.json()["usage"]["completion_tokens"] == 20
    assert "".join(model.prompt(PROMPT, max_tokens=20, seed=7, temperature=1)) == expected


# --- lm-eval ----------------------------------------------------------------------------------------------------------

QUESTIONS = [
    MultipleChoice(context, [f" {ending}" for ending in endings], correct)
    for context, endings, correct in (
        ("hello", ["world", "worlds hello", "w"], 0),
        ("The world's", ["hello", "wörld 日本", "end"], 2),
        ("hello hello hello\n日本", ["🎉", "hello", "it was said, world"], 1),
    )
]


def write_task(folder: Path, name: str, documents: list[dict], **fields: Any) -> None:
    """A task of lm-eval over a local file."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "metadata": {"version": 1.0},
        **fields,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")  # YAML, too


@pytest.fixture
def lm_eval_tasks(tmp_path: Path) -> Path:
    """The folder of three tasks: choices by likelihood, texts by likelihood, and generated texts."""
    choices = [
        {"context": context, "endings": [ending[1:] for ending in endings], "correct": correct}
        for context, endings, correct in QUESTIONS
    ]
    write_task(
        tmp_path,
        "choices",
        choices,
        output_type="multiple_choice",
        doc_to_text="{{context}}",
        doc_to_choice="{{endings}}",
        doc_to_target="{{correct}}",
        metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    )
    texts = [{"text": question.context + question.endings[0]} for question in QUESTIONS]
    write_task(
        tmp_path,
        "texts",
        texts,
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}],
    )
    write_task(
        tmp_path,
        "answers",
        [{"text": question.context, "answer": "x"} for question in QUESTIONS],
        output_type="generate_until",
        doc_to_text="{{text}}",
        doc_to_target="{{answer}}",
        generation_kwargs={"until": ["o"], "do_sample": False, "temperature": 0.0, "max_gen_toks": 12},
        metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    )
    return tmp_path


@pytest.mark.parametrize("tokenized, batch_size, concurrent", [(True, 2, 1), (False, 1, 4)])
def test_lm_eval_agrees_with_our_evaluation(
    api, gpt, run, lm_eval_tasks, monkeypatch, tokenized, batch_size, concurrent
):
    """Requests of ids or of text, several prompts per request or several requests at a time."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("OPENAI_API_KEY", api.key)
    arguments = dict(model=api.model, base_url=f"{api.base_url}/completions", tokenizer_backend="remote")
    arguments |= dict(tokenized_requests=tokenized, num_concurrent=concurrent, max_retries=1, max_length=64)
    results = simple_evaluate(
        model="local-completions",
        model_args={**arguments, "auth_token": api.key},
        tasks=["choices", "texts", "answers"],
        task_manager=TaskManager(include_path=str(lm_eval_tasks), include_defaults=False),
        batch_size=batch_size,
        bootstrap_iters=0,
    )
    samples = {task: sorted(rows, key=lambda row: row["doc_id"]) for task, rows in results["samples"].items()}

    scores = score_endings(gpt.model, gpt.tokenizer, gpt.runtime, "choices", QUESTIONS)
    for question, expected, sample in zip(QUESTIONS, scores, samples["choices"], strict=True):
        for ending, score, (nats, greedy) in zip(question.endings, expected, sample["filtered_resps"], strict=True):
            tokens = len(gpt.tokenizer.encode(ending))
            assert -float(nats) == pytest.approx(score.nats, abs=1e-4 * tokens)
            assert greedy == score.greedy
    (accuracy, _) = hellaswag(QUESTIONS, scores)
    assert results["results"]["choices"]["acc,none"] == pytest.approx(accuracy.ratio)

    for question, sample in zip(QUESTIONS, samples["texts"], strict=True):
        ids = [gpt.tokenizer.eot, *gpt.encode_prompt(question.context + question.endings[0]).ids]
        losses = token_losses(gpt.model, np.array(ids), gpt.runtime, 64)
        (nats,) = sample["filtered_resps"]
        assert -float(nats) == pytest.approx(losses.sum(), abs=1e-4 * len(losses))

    for question, sample in zip(QUESTIONS, samples["answers"], strict=True):
        expected_text = gpt.generate(question.context, max_new_tokens=12, temperature=0.0, stop="o")
        assert sample["filtered_resps"] == [expected_text]
