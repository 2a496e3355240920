"""The browser engine compared with model.py, folio.decoding and folio.web.playground."""

import itertools
import math
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
from folio.machine.runtime import Runtime, resolve_runtime
from folio.web.engine import Engine as BatchEngine
from folio.web.playground import GenerationQuestion, SampleLines
from model import GPT, POSITIONS
from tests.support.decoding import generate_tokens, random_model
from tests.support.engine import FOLDER, Engine, engine_in
from tests.support.questions import entries_of, sample_lines
from tests.support.tiny_tokenizers import bpe
from tests.support.viewers import CHROMIUM, in_browser
from tests.support.waiting import in_thread
from tools.bench import html_file as bench_html
from tools.bench.html_file import HtmlBenchConfig, Size

SCRIPTS = ("sampling.js", "gpt.js", "tokenizers.js", "questions.js", "playground.js", "host.js")
STORAGES = ("float32", "float16", "int8")
BOUNDARY = 1e-5  # a draw this close to the boundary between two tokens may give either


@pytest.fixture
def seed() -> int:
    """A fixed seed: sometimes, rounding in float32 decides which token is sampled."""
    return 1337


@pytest.fixture(scope="module")
def engine(browser) -> Iterator[Engine]:
    with engine_in(browser, *SCRIPTS) as engine:
        yield engine


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return resolve_runtime("cpu", "float32", False)


def test_the_kernel_is_built_from_its_source():
    wasmtime = pytest.importorskip("wasmtime")
    source = (FOLDER / "kernels.wat").read_text(encoding="utf-8")
    assert bytes(wasmtime.wat2wasm(source)) == (FOLDER / "kernels.wasm").read_bytes()


# --- the forward pass -------------------------------------------------------------------------------------------------


def logits_of(model: GPT, ids: list[int]) -> np.ndarray:
    """Return the logits of model.py, (T, V)."""
    ids = torch.tensor([ids])
    return model.logits(ids)[0].detach().numpy()


@in_browser
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("simd", [True, False], ids=["wasm", "plain"])
def test_logits_equal_model_py(simd, position, engine, seed):
    """After a prefill and after each step, with rounded weights. Not all sizes are multiples of 4."""
    settings = itertools.cycle([dict(activation="gelu", bias=True), dict(activation="gelu_new", bias=False)])
    for n_embd, storage in itertools.product((12, 30), STORAGES):
        sizes = dict(block_size=41, vocab_size=21, n_embd=n_embd, n_head=3)
        model = random_model(seed, position=position, **sizes, **next(settings))
        stored = engine.load(model, storage, simd)
        ids = torch.randint(21, (41,)).tolist()
        expected = logits_of(stored, ids)
        script = """(() => {
          const cache = gpt.newCache(), logits = [finish(gpt.prefill(cache, ids.slice(0, 21))).slice()];
          for (const id of ids.slice(21)) logits.push(finish(gpt.step([cache], [id])).slice());
          return logits;
        })()"""
        actual = engine(script, ids=ids)
        assert len(actual) == 21 and np.abs(np.array(actual) - expected[20:]).max() <= 1e-4


@in_browser
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
            assert np.abs(row - logits_of(model, ids)[-1]).max() <= 1e-4


@in_browser
@pytest.mark.parametrize("simd", [True, False], ids=["wasm", "plain"])
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
    assert np.abs(engine(script) - logits_of(model, [1, 2, 3, 4, 5])[-1]).max() <= 1e-4


@in_browser
def test_long_computations_pause(engine, seed):
    """Pauses do not change the results."""
    model = random_model(seed, block_size=40, vocab_size=300)
    engine.load(model)
    ids = torch.randint(300, (40,)).tolist()
    engine("Object.assign(gpt.kernels, {slice: 1000})")
    script = "Array.from((function* () { yield (yield* gpt.prefill(gpt.newCache(), ids)).slice(); })())"
    *pauses, logits = engine(script, ids=ids)
    assert len(pauses) > 100 and set(pauses) == {None}
    assert np.abs(logits - logits_of(model, ids)[-1]).max() <= 1e-4


@in_browser
@pytest.mark.parametrize("simd", [True, False], ids=["wasm", "plain"])
def test_pauses_allow_other_computations(simd, engine, seed):
    """Single modules, and allocations, which may move the memory."""
    model = random_model(seed, block_size=40, vocab_size=300)
    engine.load(model, simd=simd)
    rows = torch.randint(300, (2, 40)).tolist()
    script = """(() => {
      gpt.kernels.slice = 1000;
      const pass = gpt.prefill(gpt.newCache(), rows[0]), positions = rows[1].map((_, t) => t), others = [];
      for (;;) {
        const {done, value} = pass.next();
        if (done) return {logits: value, others: others.at(-1)};
        if (others.length % 20 === 0) gpt.newCache();
        const x = gpt.layerNorm(gpt.embed(rows[1], positions), "transformer.h.0.ln_1", 40);
        others.push(gpt.linear(x, "transformer.h.0.mlp.c_fc", 40));
      }
    })()"""
    ours, transformer = engine(script, rows=rows), model.transformer
    assert np.abs(ours["logits"] - logits_of(model, rows[0])[-1]).max() <= 1e-4
    first = transformer.h[0]
    with torch.no_grad():
        expected = first.mlp.c_fc(first.ln_1(model.embed(torch.tensor(rows[1]), torch.arange(40))))
    np.testing.assert_allclose(ours["others"], expected.flatten(), rtol=1e-4, atol=1e-4)


@in_browser
def test_single_modules_equal_torch(engine, seed):
    """With more tokens than a chunk, and a vocabulary smaller than the MLP."""
    for position in ("learned", "sinusoidal"):
        model = random_model(seed, block_size=40, position=position).requires_grad_(False)
        engine.load(model, simd=False)
        x, ids = torch.randn(37, 16), torch.randint(20, (37,))
        transformer, block = model.transformer, model.transformer.h[1]
        expected = {
            "gpt.linear(x, 'transformer.h.1.mlp.c_fc', 37)": block.mlp.c_fc(x),
            "gpt.linear(x, 'lm_head', 37)": model.lm_head(x),
            "gpt.layerNorm(x, 'transformer.ln_f', 37)": transformer.ln_f(x),
            "gpt.activation(x)": block.mlp.activation(x),
            "gpt.embed(ids, positions)": model.embed(ids, torch.arange(37).flip(0)),
            "gpt.param('transformer.h.0.ln_1.bias').data": transformer.h[0].ln_1.bias,
        }
        for expression, value in expected.items():
            ours = engine(expression, x=x, ids=ids.tolist(), positions=list(range(36, -1, -1)))
            np.testing.assert_allclose(ours, value.flatten(), rtol=1e-5, atol=1e-5)


@in_browser
def test_activations_have_float32_precision(engine):
    x = np.linspace(-14, 14, 20001)
    ours = engine("Float64Array.from(x, ACTIVATIONS.gelu)", x=x)
    expected = [0.5 * value * math.erfc(-value / math.sqrt(2)) for value in x]
    np.testing.assert_allclose(ours, expected, rtol=2e-8, atol=0)
    ours = engine("Float64Array.from(x, ACTIVATIONS.gelu_new)", x=x)
    expected = torch.nn.functional.gelu(torch.tensor(x), approximate="tanh")
    np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-14)


@in_browser
def test_half_floats_equal_numpy(engine):
    bits = np.arange(65536, dtype=np.uint16)
    ours = engine("Float32Array.from({length: 65536}, (_, bits) => halfToFloat(bits))")
    np.testing.assert_array_equal(ours, bits.view(np.float16).astype(np.float32))


# --- sampling ---------------------------------------------------------------------------------------------------------

NO_FILTER = dict(repetition_penalty=1, temperature=1, top_k=None, top_p=None, min_p=None)
FILTERS = [
    dict(temperature=0),
    dict(temperature=0.7, top_k=5),
    dict(top_k=1),
    dict(temperature=1.3, top_p=0.8),
    dict(top_p=1e-9),
    dict(top_p=1),
    dict(temperature=0.5, top_k=20, top_p=0.6),
    dict(temperature=1.5, min_p=0.1),
    dict(min_p=1),
    dict(repetition_penalty=0.8, temperature=0),
    dict(repetition_penalty=1.3, temperature=0.9, top_k=40, top_p=0.9, min_p=0.02),
]


@in_browser
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_equal_python(filters, engine, seed):
    """Also with many equal logits, where top-p in torch may keep any of them."""
    torch.manual_seed(seed)
    settings = {**NO_FILTER, **filters}
    for logits in (torch.randn(300) * 3, torch.randint(-6, 7, (300,)) / 2):
        occurred = torch.rand(300) < 0.3
        expected = next_token_probabilities(logits, Sampling(**settings), occurred)
        script = "(toProbabilities(logits, occurred, settings), logits)"
        actual = torch.tensor(engine(script, logits=logits, occurred=occurred.to(torch.uint8), settings=settings))
        if len(logits.unique()) == 300:
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(actual.sort().values, expected.sort().values, rtol=1e-5, atol=1e-6)


@in_browser
def test_random_numbers_equal_python(engine, seed):
    seeds, samples, first = [0, seed, 2**53 - 1], [0, 1, 15], np.random.default_rng(seed).integers(2**20)
    ours = engine(
        "Float64Array.from(seeds.flatMap(seed => samples.flatMap(k => "
        "Array.from({length: 50}, (_, i) => uniform(seed, k, first + i)))))",
        seeds=seeds,
        samples=samples,
        first=int(first),
    )
    expected = torch.stack([uniforms(seed, samples, int(first), 50) for seed in seeds])
    assert np.array_equal(ours, expected.numpy().ravel())
    assert len(set(ours)) == 450


def near_tokens(model: GPT, ids: list[int], sampling: Sampling, uniform: float) -> tuple[float, range]:
    """Return the distance of a draw after `ids` from the nearest boundary, and the tokens within BOUNDARY.

    Each time the context was full, folio.decoding.scheduler.generate has dropped half of it.
    """
    size = model.config.block_size
    dropped = size // 2 * max(0, math.ceil((len(ids) - size) / (size // 2)))
    logits = torch.from_numpy(logits_of(model, ids[dropped:])[-1])
    sums = next_token_probabilities(logits, sampling).double().cumsum(0)
    draws = torch.tensor([uniform - BOUNDARY, uniform + BOUNDARY], dtype=torch.float64)
    first, last = torch.searchsorted(sums, draws, right=True).tolist()
    return (sums - uniform).abs().min().item(), range(first, last + 1)


@in_browser
def test_20_samples_equal_python(engine, runtime, seed):
    """500 tokens each, far beyond the context, except for draws within BOUNDARY."""
    model = random_model(seed, block_size=96, vocab_size=65, n_embd=32)
    prompt, settings = [1, 2, 3], dict(max_new_tokens=500, temperature=0.8, top_k=200)
    engine.load(model)
    tokenizer = CharTokenizer("".join(map(chr, range(33, 98))))
    sampling, samples, differing = Sampling(temperature=0.8, top_k=200), range(10), []
    for number in range(2):
        ours = sample_tokens(engine, tokenizer, ids=prompt, seed=number, num_samples=10, **settings)
        theirs = generate_tokens(model, [prompt] * 10, runtime, max_new_tokens=500, sampling=sampling, seed=number)
        for k in samples:
            assert len(ours[k]) == 500
            t = next((t for t in range(500) if ours[k][t] != theirs[k][t]), 499)  # first difference, or the last token
            ids, uniform = [*prompt, *theirs[k][:t]], uniforms(number, [k], t, 1).item()
            distance, tokens = near_tokens(model, ids, sampling, uniform)
            assert ours[k][t] in tokens and theirs[k][t] in tokens
            if ours[k] != theirs[k]:
                print(f"seed {number}, sample {k} differs at token {t}: the draw is {distance:.1e} from a boundary")
                differing.append((number, k))
    assert len(differing) <= 1


def sample(engine: Engine, tokenizer: Tokenizer, **question: Any) -> list[dict]:
    script = "eventsOf(generate(gpt, makeTokenizer(json), question))"
    return engine(script, json=tokenizer.to_json() | {"kind": tokenizer.kind}, question=question)


def sample_tokens(engine: Engine, tokenizer: Tokenizer, **question: Any) -> list[list[int]]:
    """Return the tokens of each sample."""
    script = """eventsOf(generate(gpt, makeTokenizer(json), question)).slice(1).map(
      ({samples}) => samples.map(entry => entry && entry[0]))"""
    steps = engine(script, json=tokenizer.to_json() | {"kind": tokenizer.kind}, question=question)
    return [[token for token in row if token is not None] for row in zip(*steps, strict=True)]


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
]


@in_browser
@pytest.mark.parametrize("number", range(len(QUESTIONS)))
def test_events_equal_python(number, engine, seed):
    tokenizer, sizes, question = QUESTIONS[number]
    model = random_model(seed, **{"block_size": 16, "vocab_size": tokenizer.vocab_size, **sizes})
    question = {"ids": [1, 2, 3], "max_new_tokens": 60, "seed": seed, **question}
    lm = LanguageModel(model, tokenizer, "cpu", "float32")
    server_question = GenerationQuestion(**{**question, "ids": tuple(question["ids"])})
    expected = sample_lines(BatchEngine(lm, rows=16), SampleLines(tokenizer, server_question))
    engine.load(model)
    actual = sample(engine, tokenizer, **question)
    assert actual[0] == expected[0]
    for ours, theirs in zip(entries_of(actual), entries_of(expected), strict=True):
        for entry, other in zip(ours, theirs, strict=True):
            if entry[0] is None:
                assert entry == other
                continue
            assert entry[:2] == other[:2]
            assert entry[2] == pytest.approx(other[2], abs=1e-5)
            assert [p for _, p in entry[3]] == pytest.approx([p for _, p in other[3]], abs=1e-5)
            assert {i for i, p in entry[3] if p > 1e-4} == {i for i, p in other[3] if p > 1e-4}


@in_browser
def test_seeds_beyond_float64_are_refused(engine):
    script = "errorOf(() => readSettings({ids: [1], seed: 2 ** 53}, 20))"
    assert engine(script) == "seed=9007199254740992: a browser rounds whole numbers above 2**53 - 1"


INVALID_SETTINGS = [
    dict(temperature=-0.5),
    dict(temperature=1e6 + 0.5),
    dict(temperature=None),
    dict(num_samples=17),
    dict(num_samples=1.5),
    dict(num_samples=None, top_k=0),
    dict(max_new_tokens=5000, top_k=0, stop=""),
    dict(top_p=1.5),
    dict(min_p=-0.25),
    dict(stop=3),
    dict(seed=-1),
    dict(seed=2**63),
    dict(begun=-1),
    dict(context_stride=0),
    dict(top_k="many"),
]


@in_browser
def test_invalid_settings_have_the_errors_of_python(engine, seed):
    engine.load(random_model(seed))
    for question in INVALID_SETTINGS:
        with pytest.raises(UserError) as expected:
            settings.from_json(GenerationQuestion, question)
        actual = engine("errorOf(() => readSettings(question, 20))", question={"ids": [1], **question})
        assert actual.split("\n") == str(expected.value).split("\n")
    for ids in ([], [20], [-1], ["1"], 3):
        assert engine("errorOf(() => readSettings({ids}, 20))", ids=ids).startswith("ids must ")


@in_browser
def test_nan_is_an_error(engine, seed):
    model = random_model(seed, vocab_size=257)
    model.transformer.ln_f.weight.data[0] = math.nan
    engine.load(model)
    script = "errorOf(() => eventsOf(generate(gpt, makeTokenizer({kind: 'byte'}), {ids: [1]})))"
    assert "NaN" in engine(script)


@in_browser
@pytest.mark.parametrize("simd", [True, False], ids=["wasm", "plain"])
def test_running_out_of_memory_frees_the_memory(simd, engine, seed):
    model = random_model(seed, vocab_size=257)
    engine.load(model, simd=simd)
    expected = sample(engine, ByteTokenizer(), ids=[1], num_samples=2)
    engine("gpt.kernels.grow = () => { throw new RangeError('out of memory'); }")
    script = "errorOf(() => eventsOf(generate(gpt, makeTokenizer({kind: 'byte'}), {ids: [1], num_samples: 16})))"
    for _ in range(2):
        engine("gpt.kernels.used = gpt.kernels.floats.length - 100")
        assert "memory" in engine(script)
    assert sample(engine, ByteTokenizer(), ids=[1], num_samples=2) == expected


@in_browser
def test_texts_are_generated_during_a_long_question(engine, seed):
    """Two texts at the same time are the same as one at a time."""
    engine.load(random_model(seed, vocab_size=257))
    questions = [dict(ids=[1, 2], max_new_tokens=20, seed=k, num_samples=2) for k in range(2)]
    script = """new Promise(resolve => {
      const messages = [], host = new Host(message => {
        messages.push(message);
        if (messages.filter(({done, answer}) => done || answer).length === 3) resolve(messages);
      });
      const answer = function* () {
        for (let slice = 0; slice < 100; slice++) {
          for (const began = performance.now(); performance.now() < began + 5;);
          yield;
        }
        return {facts: {}, tensors: {}};
      };
      const tokenizer = makeTokenizer({kind: "byte"});
      Object.assign(host, {loaded: Promise.resolve(), gpt, tokenizer, answers: {answer}});
      host.receive({kind: "ask", id: 0, question: {}});
      questions.forEach((question, k) => host.receive({kind: "generate", id: k + 1, question}));
    })"""
    messages = engine(f"await {script}", questions=questions)
    assert messages[-1].keys() == {"id", "answer"}
    for k, question in enumerate(questions):
        events = [event for message in messages if message["id"] == k + 1 for event in message.get("events", [])]
        assert events == sample(engine, ByteTokenizer(), **question)


@in_browser
def test_questions_wait_for_a_new_text_only_at_first(engine, seed):
    """Then both take turns: an endless text does not block the answer."""
    script = """new Promise(resolve => {
      const began = performance.now(), host = new Host(message => {
        if (!message.answer) return;
        host.receive({kind: "stop", id: 1});
        resolve(times.slice(1)); // the first slice may be before the text
      });
      const work = function* (count) {
        for (; count; count--) {
          for (const began = performance.now(); performance.now() < began + 5;);
          yield;
        }
      };
      const times = [], answer = function* () {
        for (let slice = 0; slice < 50; slice++, yield* work(1)) times.push(performance.now() - began);
        return {facts: {}, tensors: {}};
      };
      const endless = Object.create(gpt, {prefill: {value: () => work(Infinity)}});
      const tokenizer = makeTokenizer({kind: "byte"});
      Object.assign(host, {loaded: Promise.resolve(), gpt: endless, tokenizer, answers: {answer}});
      host.receive({kind: "ask", id: 0, question: {}});
      host.receive({kind: "generate", id: 1, question: {ids: [1]}});
    })"""
    engine.load(random_model(seed, vocab_size=257))
    times = engine(f"await {script}")
    assert len(times) == 49 and min(times) >= engine("HEAD_START")


@in_browser
@pytest.mark.parametrize("kind", ["ask", "generate"])
def test_tokenizing_does_not_wait_for_traces_or_stopped_texts(kind, engine):
    """A stop also ends a long prefill."""
    script = """new Promise(resolve => {
      let slices = 0;
      const ended = [], host = new Host(({id, answer, done, error}) => {
        if ((answer || done || error) && ended.push(id) === 2) resolve({ended, slices});
      });
      const work = function* (count) {
        for (let i = 0; i < count; i++, slices++) {
          for (const began = performance.now(); performance.now() < began + 5;);
          yield;
        }
      };
      const answer = function* ({kind}) {
        yield* work(kind === "tokens" ? 1 : 200);
        return {facts: {}, tensors: {}};
      };
      const slow = Object.create(gpt, {prefill: {value: () => work(200)}}), tokenizer = makeTokenizer({kind: "byte"});
      Object.assign(host, {loaded: Promise.resolve(), gpt: slow, tokenizer, answers: {answer}});
      host.receive({kind, id: "long", question: {kind: "overview", ids: [1]}});
      setTimeout(() => {
        if (kind === "generate") host.receive({kind: "stop", id: "long"});
        host.receive({kind: "ask", id: "tokens", question: {kind: "tokens"}});
      }, 50);
    })"""
    engine.load(random_model(1, vocab_size=257))
    answer = engine(f"await {script}", kind=kind)
    if kind == "ask":
        assert answer["ended"] == ["tokens", "long"]
    else:
        assert set(answer["ended"]) == {"tokens", "long"} and answer["slices"] < 200


# --- the benchmark ----------------------------------------------------------------------------------------------------


@in_browser
def test_the_benchmark_compares_a_file_with_sample_py(monkeypatch, capsys):
    """The benchmark fails if the texts differ."""
    shape = dict(block_size=24, n_layer=2, n_head=2, n_embd=16, activation="gelu")
    monkeypatch.setattr(bench_html, "MODELS", {"tiny": Size(shape, 0.3)})
    cfg = HtmlBenchConfig(models="tiny", repeats=1, tokens=60, browser=CHROMIUM)
    in_thread(bench_html.main, cfg)
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| tiny"))
    _, sample, file, ratio, bar, first_token, most = (cell.strip() for cell in row.strip("|").split("|"))
    file, sample = (float(number.replace(",", "")) for number in (file, sample))
    assert float(ratio.split()[0]) == pytest.approx(file / sample, rel=0.01, abs=0.006)
    assert bar == "0.5" and float(first_token) > 0 and most == "0.3"
