"""The browser engine compared with model.py, folio.decoding and folio.web.playground."""

import itertools
import math
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from folio import UserError
from folio.base import settings
from folio.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from folio.decoding.language_model import LanguageModel
from folio.decoding.sampling import Sampling, next_token_probabilities, uniforms
from folio.web.engine import Engine as BatchEngine
from folio.web.html_file import DTYPES, ENGINE, KERNEL_FILE
from folio.web.playground import GenerationQuestion, SampleLines
from model import GPT, POSITIONS
from tests.support.decoding import random_model
from tests.support.engine import Engine, engine_in
from tests.support.questions import entries_of, sample_lines
from tests.support.tiny_tokenizers import bpe
from tests.support.tolerances import largest_logit, logits_error, rounding_error, within

SCRIPTS = ("sampling.js", "gpt.js", "tokenizers.js", "questions.js", "playground.js", "host.js")
MODES = pytest.mark.parametrize("simd", [True, False], ids=["wasm", "plain"])


@pytest.fixture
def seed() -> int:
    """A fixed seed: sometimes, rounding in float32 decides which token is sampled."""
    return 1337


@pytest.fixture(scope="module")
def engine(browser) -> Iterator[Engine]:
    with engine_in(browser, *SCRIPTS) as engine:
        yield engine


def test_the_kernel_is_built_from_its_source():
    wasmtime = pytest.importorskip("wasmtime")
    source = (ENGINE / "kernels.wat").read_text(encoding="utf-8")
    assert bytes(wasmtime.wat2wasm(source)) == (ENGINE / KERNEL_FILE).read_bytes()


# --- the forward pass -------------------------------------------------------------------------------------------------


def assert_same_logits(actual: Any, model: GPT, ids: list[int]) -> None:
    """Compare logits of the last tokens, (V,) or (..., V), with those of model.py."""
    expected = model.logits(torch.tensor([ids]))[0].detach().numpy()  # (T, V)
    actual = np.reshape(actual, (-1, expected.shape[1]))
    error = within(expected, logits_error(model.config, len(ids)))
    np.testing.assert_allclose(actual, expected[-len(actual) :], **error)


@pytest.mark.parametrize("position", POSITIONS)
@MODES
def test_logits_equal_model_py(simd, position, engine, seed):
    """After a prefill and after each step, with rounded weights. Not all sizes are multiples of 4."""
    settings = itertools.cycle([dict(activation="gelu", bias=True), dict(activation="gelu_new", bias=False)])
    for n_embd, storage in itertools.product((12, 30), DTYPES):
        sizes = dict(block_size=41, vocab_size=21, n_embd=n_embd, n_head=3)
        stored = engine.load(random_model(seed, position=position, **sizes, **next(settings)), storage, simd)
        ids = torch.randint(21, (41,)).tolist()
        script = """(() => {
          const cache = gpt.newCache(), logits = [finish(gpt.prefill(cache, ids.slice(0, 21))).slice()];
          for (const id of ids.slice(21)) logits.push(finish(gpt.step([cache], [id])).slice());
          return logits;
        })()"""
        actual = engine(script, ids=ids)
        assert len(actual) == 21
        assert_same_logits(actual, stored, ids)


def test_rows_of_a_step_do_not_depend_on_each_other(engine, seed):
    """With contexts of different lengths. The second iteration reuses the caches."""
    model = random_model(seed, block_size=40, vocab_size=21, position="rotary")
    engine.load(model)
    rows = [torch.randint(20, (length,)).tolist() for length in (3, 40, 17, 1)]
    for _ in range(2):
        engine("globalThis.caches = rows.map(() => gpt.newCache())", rows=rows)
        engine("rows.forEach((ids, i) => finish(gpt.prefill(caches[i], ids.slice(0, -1))))", rows=rows)
        logits = engine("finish(gpt.step(caches, rows.map(ids => ids.at(-1))))", rows=rows).reshape(4, 21)
        engine("caches.forEach(cache => gpt.freeCache(cache))")
        for row, ids in zip(logits, rows, strict=True):
            assert_same_logits(row, model, ids)


@MODES
def test_nan_does_not_remain_in_a_cache(simd, engine, seed):
    """A freed cache with NaN in a slot that the next text does not use."""
    model = random_model(seed, block_size=40)
    engine.load(model, simd=simd)
    script = """(() => {
      const cache = gpt.newCache();
      gpt.kernels.floats.fill(NaN, cache.index, cache.index + gpt.cacheSize);
      gpt.freeCache(cache);
      return finish(gpt.prefill(gpt.newCache(), [1, 2, 3, 4, 5]));
    })()"""
    assert_same_logits(engine(script), model, [1, 2, 3, 4, 5])


@MODES
def test_long_computations_pause(simd, engine, seed):
    """Other computations in the pauses, and allocations, which may move the memory, do not change the result."""
    model = random_model(seed, block_size=40, vocab_size=300)
    engine.load(model, simd=simd)
    rows = torch.randint(300, (2, 40)).tolist()
    script = """(() => {
      gpt.kernels.slice = 1000;
      const pass = gpt.prefill(gpt.newCache(), rows[0]), positions = rows[1].map((_, t) => t), others = [];
      for (;;) {
        const {done, value} = pass.next();
        if (done) return {logits: value, pauses: others.length, others: others.at(-1)};
        if (value !== undefined) throw new Error("a pause has no value");
        if (others.length % 20 === 0) gpt.newCache();
        const x = gpt.layerNorm(gpt.embed(rows[1], positions), "transformer.h.0.ln_1", 40);
        others.push(gpt.linear(x, "transformer.h.0.mlp.c_fc", 40));
      }
    })()"""
    ours, first = engine(script, rows=rows), model.transformer.h[0]
    assert ours["pauses"] > 100
    assert_same_logits(ours["logits"], model, rows[0])
    with torch.no_grad():
        expected = first.mlp.c_fc(first.ln_1(model.embed(torch.tensor(rows[1]), torch.arange(40)))).flatten()
    np.testing.assert_allclose(ours["others"], expected, **within(expected, logits_error(model.config, 40)))


def test_activations_have_float32_precision(engine):
    x = np.linspace(-14, 14, 20001)
    ours = engine("Float64Array.from(x, ACTIVATIONS.gelu)", x=x)
    expected = [0.5 * value * math.erfc(-value / math.sqrt(2)) for value in x]
    np.testing.assert_allclose(ours, expected, rtol=rounding_error(1), atol=0)  # of the result in float32
    ours = engine("Float64Array.from(x, ACTIVATIONS.gelu_new)", x=x)
    expected = torch.nn.functional.gelu(torch.tensor(x), approximate="tanh")
    u = math.sqrt(2 / math.pi) * (14 + 0.044715 * 14**3)  # exp turns an absolute error of 2u into a relative one
    error = rounding_error(6, torch.float64)
    np.testing.assert_allclose(ours, expected, rtol=2 * u * error, atol=14 * error)  # torch computes x (1 + tanh(u))


def test_half_floats_equal_numpy(engine):
    bits = np.arange(65536, dtype=np.uint16)
    ours = engine("Float32Array.from({length: 65536}, (_, bits) => halfToFloat(bits))")
    np.testing.assert_array_equal(ours, bits.view(np.float16).astype(np.float32))


# --- sampling ---------------------------------------------------------------------------------------------------------

FILTERS = dict(
    repetition_penalty=[1, 0.8, 1.3],
    temperature=[0, 0.7, 1, 1.5],
    top_k=[None, 1, 5, 40],
    top_p=[None, 1e-9, 0.8, 1],
    min_p=[None, 0.02, 1],
)


def test_filters_equal_python(engine, seed):
    """Also with many equal logits, where top-p in torch may keep any of them."""
    rng = random.Random(seed)
    script = "(toProbabilities(logits, occurred, settings), logits)"
    for _ in range(40):
        settings = {name: rng.choice(values) for name, values in FILTERS.items()}
        for logits in (torch.randn(300) * 3, torch.randint(-6, 7, (300,)) / 2):
            occurred = torch.rand(300) < 0.3
            expected = next_token_probabilities(logits, Sampling(**settings), occurred)
            actual = torch.tensor(engine(script, logits=logits, occurred=occurred.to(torch.uint8), settings=settings))
            # exp turns the error of a logit after the penalty and the temperature into a relative one.
            largest = 1.3 * logits.abs().max().item() / (settings["temperature"] or 1)
            relative = 2 * (2 * largest + 2) * rounding_error(3) + 2 * rounding_error(300)
            # top-p may keep or remove tokens whose probability is less than the rounding of its sum.
            error = dict(rtol=relative, atol=rounding_error(300))
            if len(logits.unique()) == 300:
                torch.testing.assert_close(actual, expected, **error)
            torch.testing.assert_close(actual.sort().values, expected.sort().values, **error)


def test_random_numbers_equal_python(engine, seed):
    seeds, samples, first = [0, seed, 2**53 - 1], [0, 1, 15], random.Random(seed).randrange(2**20)
    script = """Float64Array.from(seeds.flatMap(seed => samples.flatMap(k =>
      Array.from({length: 50}, (_, i) => uniform(seed, k, first + i)))))"""
    ours = engine(script, seeds=seeds, samples=samples, first=first)
    expected = torch.stack([uniforms(seed, samples, first, 50) for seed in seeds])
    assert np.array_equal(ours, expected.numpy().ravel())
    assert len(set(ours)) == 450


def sample_events(engine: Engine, tokenizer: Tokenizer, **question: Any) -> list[dict]:
    script = "eventsOf(generate(gpt, makeTokenizer(json), question))"
    return engine(script, json=tokenizer.to_json() | {"kind": tokenizer.kind}, question=question)


CHARACTERS = CharTokenizer("\n abcdefghijklmnopqr.,é日", eot=True)
MASKED = dict(document_token=CHARACTERS.eot)
QUESTIONS: list[tuple[Tokenizer, dict, dict]] = [  # tokenizer, fields of GPTConfig, question
    (CHARACTERS, dict(vocab_size=32), dict(num_samples=3)),
    (CHARACTERS, dict(vocab_size=32), dict(temperature=0, repetition_penalty=1.2)),
    (CHARACTERS, {}, dict(num_samples=3, max_new_tokens=30, stop="a", begun=2, temperature=1.5, top_k=None)),
    (CHARACTERS, {}, dict(ids=[2, 3, 4], begun=5, stop="b")),
    (CHARACTERS, MASKED, dict(ids=[2, 3, 24], num_samples=3, max_new_tokens=60)),
    (CHARACTERS, {**MASKED, "position": "rotary"}, dict(ids=[24, 2, 3, 24, 24, 5, 6], num_samples=2)),
    (CHARACTERS, {**MASKED, "position": "alibi"}, dict(ids=[24], num_samples=2, context_stride=3)),
    (CHARACTERS, {}, dict(ids=[5] * 40, num_samples=2, top_p=0.9, repetition_penalty=1.1)),
    (CHARACTERS, dict(position="rotary"), dict(num_samples=2, ids=[5] * 40, min_p=0.05)),
    (CHARACTERS, dict(position="alibi"), dict(num_samples=2, max_new_tokens=1)),
    (CHARACTERS, dict(position="relative", n_head=4), dict(num_samples=5, temperature=1.2)),
    (CHARACTERS, dict(position="relative"), dict(context_stride=3, num_samples=2)),
    (CHARACTERS, dict(position="sinusoidal", bias=False), dict(context_stride=1, num_samples=2)),
    (CHARACTERS, dict(position="none", block_size=1), dict(num_samples=16, context_stride=20)),
    (ByteTokenizer(), {}, dict(num_samples=16, max_new_tokens=20, temperature=1.5)),
    (bpe(), dict(activation="gelu"), dict(num_samples=2, top_k=10)),
    (ByteTokenizer(), dict(block_size=96, n_embd=32), dict(num_samples=2, max_new_tokens=500)),
]


@pytest.mark.parametrize("tokenizer, sizes, question", QUESTIONS, ids=range(len(QUESTIONS)))
def test_events_equal_python(tokenizer, sizes, question, engine, seed):
    model = random_model(seed, **{"block_size": 16, "vocab_size": tokenizer.vocab_size, **sizes})
    question = {"ids": [1, 2, 3], "max_new_tokens": 60, "seed": seed, **question}
    lm = LanguageModel(model, tokenizer, "cpu", "float32")
    server_question = GenerationQuestion(**{**question, "ids": tuple(question["ids"])})
    expected = sample_lines(BatchEngine(lm, rows=16), SampleLines(tokenizer, server_question))
    engine.load(model)
    actual = sample_events(engine, tokenizer, **question)
    assert actual[0] == expected[0]
    # An error of all logits changes a probability p by at most 2 p (1 - p) times it.
    error = logits_error(model.config, model.config.block_size) * largest_logit(model) / 2
    for ours, theirs in zip(entries_of(actual), entries_of(expected), strict=True):
        assert [entry[:2] for entry in ours] == [entry[:2] for entry in theirs]
        assert ours[-1] == theirs[-1]
        for (_, _, p, others), (_, _, expected_p, expected_others) in zip(ours[:-1], theirs[:-1], strict=True):
            shares, expected_shares = [p for _, p in others], [p for _, p in expected_others]
            assert [p, *shares] == pytest.approx([expected_p, *expected_shares], rel=0, abs=error)
            certain = {token for token, p in others if p > expected_shares[-1] + error}
            assert certain <= {token for token, _ in expected_others}


def as_floats(text: str) -> str:
    """A message with numbers as in Python's floats, because JavaScript has no integers and writes 1e-6 otherwise."""
    return re.sub(r"\d[\d.]*(e[-+]?\d+)?", lambda number: str(float(number[0])), text)


def test_invalid_settings_have_the_errors_of_python(engine):
    """Also several at the same time. A value that Python accepts is accepted, too.

    num_samples=2**63 had to be less than 2**63, not at most 16, and a top_k or context_stride of 2**63 was refused.
    """
    values = [-1, 0, 0.5, 1, 1.5, 17, 5000, 1e6 + 0.5, 2**63, None, "", "x", True]
    names = [name for name in engine("Object.keys(SETTINGS)") if name != "model"]  # a file has one model
    questions = [dict(num_samples=None, top_k=0), dict(max_new_tokens=5000, top_k=0, stop="")]
    questions += [{name: value} for name in names for value in values]
    script = "questions.map(question => errorOf(() => readSettings({...question, ids: [1]}, 20)) ?? null)"
    for question, actual in zip(questions, engine(script, questions=questions), strict=True):
        try:
            settings.from_json(GenerationQuestion, question)
            assert actual is None, question
        except UserError as error:
            assert actual and as_floats(actual) == as_floats(str(error)), question
    for ids in ([], [20], [-1], ["1"], 3):
        assert engine("errorOf(() => readSettings({ids}, 20))", ids=ids).startswith("ids must ")
    assert "2**53" in engine("errorOf(() => readSettings({ids: [1], seed: 2 ** 53}, 20))")


@MODES
def test_after_an_error_the_engine_is_as_before(simd, engine, seed):
    """NaN is an error, and running out of memory is one that frees the memory."""
    model = random_model(seed, vocab_size=257)
    engine.load(model, simd=simd)
    expected = sample_events(engine, ByteTokenizer(), ids=[1], num_samples=2)
    engine("void (gpt.kernels.grow = () => { throw new RangeError('out of memory'); })")
    script = "errorOf(() => eventsOf(generate(gpt, makeTokenizer({kind: 'byte'}), {ids: [1], num_samples: 16})))"
    for _ in range(2):
        engine("gpt.kernels.used = gpt.kernels.floats.length - 100")
        assert "memory" in engine(script)
    assert sample_events(engine, ByteTokenizer(), ids=[1], num_samples=2) == expected
    model.transformer.ln_f.weight.data[0] = math.nan
    engine.load(model, simd=simd)
    assert "NaN" in engine(script)


# --- several computations ---------------------------------------------------------------------------------------------

HOST = """
function* work(slices, isDone = () => false) { // of 5 ms
  for (let slice = 0; slice < slices && !isDone(); slice++) {
    for (const began = performance.now(); performance.now() < began + 5;);
    yield;
  }
}
// A host with a model and a generator that answers questions. It passes messages to `receive` instead of to a page.
function hostOf(gpt, answer, receive) {
  const host = new Host(message => receive(message, host)), tokenizer = makeTokenizer({kind: "byte"});
  return Object.assign(host, {loaded: Promise.resolve(), gpt, tokenizer, answers: {answer}});
}
const ANSWER = {facts: {}, tensors: {}};
"""


def run_host(engine: Engine, script: str, **names: Any) -> Any:
    """The value with which the script calls `resolve`."""
    engine.load(random_model(1, vocab_size=257))
    return engine(f"await new Promise(resolve => {{ {HOST} {script} }})", **names)


def test_texts_are_generated_during_a_long_question(engine, seed):
    """Two texts at the same time are the same as one at a time."""
    questions = [dict(ids=[1, 2], max_new_tokens=20, seed=k, num_samples=2) for k in range(2)]
    script = """
      const messages = [], ended = () => messages.filter(({done}) => done).length === 2;
      const answer = function* () { yield* work(1000, ended); return ANSWER; };
      const host = hostOf(gpt, answer, message => messages.push(message) && message.answer && resolve(messages));
      host.receive({kind: "ask", id: 0, question: {}});
      questions.forEach((question, k) => host.receive({kind: "generate", id: k + 1, question}));
    """
    messages = run_host(engine, script, questions=questions)
    assert sum("done" in message for message in messages) == 2  # before the answer
    for k, question in enumerate(questions):
        events = [event for message in messages if message["id"] == k + 1 for event in message.get("events", [])]
        assert events == sample_events(engine, ByteTokenizer(), **question)


def test_questions_wait_for_a_new_text_only_at_first(engine):
    """Then both take turns: an endless text does not block the answer."""
    script = """
      const began = performance.now(), times = [];
      const answer = function* () {
        for (; times.length < 10; yield* work(1)) times.push(performance.now() - began);
        return ANSWER;
      };
      const endless = Object.create(gpt, {prefill: {value: () => work(Infinity)}});
      const host = hostOf(endless, answer, (message, host) => {
        if (!message.answer) return;
        host.receive({kind: "stop", id: 1});
        resolve(times.slice(1)); // the first slice may be before the text
      });
      host.receive({kind: "ask", id: 0, question: {}});
      host.receive({kind: "generate", id: 1, question: {ids: [1]}});
    """
    assert min(run_host(engine, script)) >= engine("HEAD_START")


@pytest.mark.parametrize("kind", ["ask", "generate"])
def test_tokenizing_does_not_wait_for_traces_or_stopped_texts(kind, engine):
    """A stop also ends a long prefill."""
    script = """
      const ended = [];
      let slices = 0;
      const long = function* () {
        yield* work(10);
        if (kind === "generate") host.receive({kind: "stop", id: "long"});
        host.receive({kind: "ask", id: "tokens", question: {kind: "tokens"}});
        yield* work(1000, () => ++slices && ended.length);
      };
      const answer = function* (question) { if (question.kind !== "tokens") yield* long(); return ANSWER; };
      const slow = Object.create(gpt, {prefill: {value: long}});
      const host = hostOf(slow, answer, ({id, answer, done, error}) => {
        if ((answer || done || error) && ended.push(id) === 2) resolve({ended, slices});
      });
      host.receive({kind, id: "long", question: {kind: "overview", ids: [1]}});
    """
    answer = run_host(engine, script, kind=kind)
    assert answer["slices"] < 1000
    assert answer["ended"] == ["tokens", "long"] if kind == "ask" else set(answer["ended"]) == {"tokens", "long"}
