"""The browser engine's answers compared with folio/web/questions.py."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from folio import UserError
from folio.data.shards import Shard
from folio.data.tokenizer import EOT_TEXT, ByteTokenizer, CharTokenizer, GPT2Tokenizer, Tokenizer
from folio.evaluation.memorization import MIN_QUOTE, TrainingSearch, covering_lengths, find_overlap
from folio.web import html_file
from folio.web.questions import TraceProvider, probe_ids
from folio.web.viewed_model import ViewedModel
from tests.support.datasets import dataset_of, random_case
from tests.support.decoding import random_model
from tests.support.engine import Engine, engine_in
from tests.support.music_models import PERFORMANCE, SCORE, random_text, tokenizer_of
from tests.support.numpy_gpt import FLOAT32_ERROR
from tests.support.questions import MISTAKES, read
from tests.support.tiny_tokenizers import trained
from tests.support.viewed_models import SHAPES, STRANGE, TEXT, TOKENIZERS, build_model, save_run

SEED = 5  # of models and texts; with some seeds, two tokens are equally likely in float32
SIZES = dict(block_size=48, n_layer=2, n_head=2, n_embd=32)
LARGE = [bytes([a]) for a in range(256)] + [bytes([a, b]) for a in range(4) for b in range(256)]  # tokens
OTHERS: dict[str, tuple[Tokenizer, dict[str, Any]]] = {  # models in addition to those of tests/support/viewed_models.py
    "sinusoidal": (trained(), dict(position="sinusoidal", activation="gelu")),
    "alibi": (CharTokenizer.of(TEXT, eot=True), dict(position="alibi", n_head=3, n_embd=33, bias=False)),
    "none": (ByteTokenizer(), dict(position="none", n_layer=1, n_head=1)),
    "documents": (CharTokenizer.of("abcd", eot=True), dict(position="learned", document_token=4)),
    "documents, biased": (CharTokenizer.of("abcd", eot=True), dict(position="relative", document_token=4)),
    "score": (tokenizer_of(SCORE), dict(position="relative")),
    "performance": (tokenizer_of(PERFORMANCE), dict(position="learned", vocab_size=20)),
    "large": (GPT2Tokenizer(LARGE), dict(position="learned", n_layer=1, n_head=2, n_embd=80, block_size=100)),
    "tiny": (CharTokenizer.of("ab"), dict(block_size=1, n_embd=1, n_head=1)),
}
TRACED = ("overview", "head", "layer", "alignment", "notes", "token", "lens", "logits", "machine")  # about a trace
SWITCHES = [
    dict(mask="after", scale=False, heads_off="0.0"),
    dict(mask="off", mlps_off="0"),
    dict(heads_off=",0.0,0.0", mlps_off=",0,"),
    dict(scale=False),
]


@pytest.fixture(scope="module")
def engine(browser) -> Iterator[Engine]:
    with engine_in(browser, *html_file.ENGINE_SCRIPTS) as engine:
        engine("void (globalThis.models = {})")
        yield engine


@dataclass
class Case:
    """A model in Python and in the browser."""

    provider: TraceProvider
    engine: Engine
    name: str

    @property
    def limit(self) -> int:
        return self.provider.viewed[0].limit

    def text_of(self, count: int) -> str:
        tokenizer = self.provider.viewed[0].tokenizer
        return EOT_TEXT.join([tokenizer.decode(random_ids(self, 20))] * count)

    def in_python(self, question: Any) -> Any:
        try:
            return read(self.provider.answer(question).to_bytes())
        except UserError as error:
            return str(error)

    def in_browser(self, questions: list[Any]) -> list[Any]:
        """Return the answers (facts, tensors) or error messages."""
        script = """questions.map(question => {
          try { return finish(models[name].answer(question)); } catch ({message}) { return message; }
        })"""
        answers = self.engine(script, questions=questions, name=self.name)
        return [answer if isinstance(answer, str) else self._with_shapes(answer) for answer in answers]

    def _with_shapes(self, answer: dict[str, Any]) -> tuple[dict, dict[str, np.ndarray]]:
        return answer["facts"], {name: t["data"].reshape(t["shape"]) for name, t in answer["tensors"].items()}

    def check(self, questions: list[Any]) -> None:
        """Check that the answers are the same."""
        for question, actual in zip(questions, self.in_browser(questions), strict=True):
            assert_same_answer(actual, self.in_python(question), question)


ERROR = 2 * FLOAT32_ERROR  # of two computations in float32


def assert_same_answer(actual: Any, expected: Any, question: Any) -> None:
    if isinstance(expected, str) or isinstance(actual, str):
        assert actual == expected, question
        return
    (facts, tensors), (expected_facts, expected_tensors) = actual, expected
    facts, expected_facts = leaves(facts), leaves(expected_facts)
    for path in [path for path, value in expected_facts.items() if isinstance(value, float)]:  # of the order of 1
        assert facts.pop(path) == pytest.approx(expected_facts.pop(path), rel=ERROR, abs=ERROR), (question, path)
    assert facts == expected_facts, question
    assert tensors.keys() == expected_tensors.keys(), question
    for name, tensor in expected_tensors.items():
        assert (tensors[name].dtype, tensors[name].shape) == (tensor.dtype, tensor.shape), (question, name)
        largest = np.abs(tensor, where=np.isfinite(tensor), out=np.zeros(tensor.shape)).max(initial=0)
        tolerance = {"int32": 0, "uint8": 1, "float32": ERROR * largest}[tensor.dtype.name]  # 1: rounded otherwise
        np.testing.assert_allclose(
            tensors[name].astype(float), tensor.astype(float), 0, tolerance, True, (question, name)
        )


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """The values in nested lists and dicts by their paths."""
    if not value or not isinstance(value, (list, dict)):
        return {path: value}
    if isinstance(value, list) and value[1:] == [0]:  # a head that is off has equal effects on all tokens: any of them
        return {path: 0}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {inner: leaf for key, item in items for inner, leaf in leaves(item, f"{path}.{key}").items()}


@pytest.fixture(scope="module")
def cases(engine, tmp_path_factory) -> dict[str, Case]:
    """Cases by name."""
    models = {kind: (TOKENIZERS[kind], build_model(kind, SEED)) for kind in SHAPES}
    for name, (tokenizer, settings) in OTHERS.items():
        models[name] = tokenizer, random_model(SEED, **{"vocab_size": tokenizer.vocab_size, **SIZES, **settings})
    models["nan"] = TOKENIZERS["char"], build_model("char", SEED)
    opened = {}
    for name, (tokenizer, model) in models.items():
        run = save_run(tmp_path_factory.mktemp(name), {200: model}, tokenizer, {})
        provider = TraceProvider([ViewedModel(run, "best", torch.device("cpu"))], STRANGE)
        if name == "nan":
            block = provider.viewed[0].model.transformer.h[0]
            block.mlp.c_fc.weight[3, 4] = math.nan
            edges = 0.1 * torch.arange(96).remainder(65) - 0.7  # of histogram bins
            block.attn.c_attn.bias.copy_(edges)
        engine.load(provider.viewed[0].model, simd=name != "bpe")
        script = "void (models[name] = new Answers(gpt, makeTokenizer(header.tokenizer), header))"
        engine(script, name=name, header=header_of(provider))
        opened[name] = Case(provider, engine, name)
    return opened


def header_of(provider: TraceProvider) -> dict[str, Any]:
    viewed = provider.viewed[0]
    return {
        **viewed.describe(),
        "tokenizer": viewed.tokenizer.to_json() | {"kind": viewed.tokenizer.kind},
        "text": STRANGE,
        "music": viewed.music and asdict(viewed.music),
        "probe_ids": probe_ids(viewed.model.config, viewed.tokenizer.vocab_size, viewed.limit),
    }


@pytest.fixture(params=[name for name in (*SHAPES, *OTHERS) if name != "large"])
def case(request, cases) -> Case:
    return cases[request.param]


def random_ids(case: Case, count: int) -> list[int]:
    tokenizer = case.provider.viewed[0].tokenizer
    if tokenizer.kind == "midi":
        return tokenizer.encode(random_text(tokenizer, SEED, count)).tolist()[:count]
    return np.random.default_rng(count).integers(0, tokenizer.vocab_size, count).tolist()


def test_questions_about_a_text_equal_python(case):
    config, questions = case.provider.viewed[0].model.config, []
    for count in {case.limit, min(9, case.limit), 1}:
        ids = random_ids(case, count)
        for token in {0, count // 2, count - 1}:
            fields = {"ids": ids, "token": token, "layer": token % config.n_layer, "head": token % config.n_head}
            questions += [{"kind": kind, **fields, "source": token or 99} for kind in TRACED]
    case.check(questions)


def test_switches_equal_python(case):
    kinds, ids = ("head", "overview", "layer", "machine"), random_ids(case, min(40, case.limit))
    case.check([{"kind": kind, "ids": ids, **switches} for switches in SWITCHES for kind in kinds])
    window = {"ids": ids, "token": len(ids) * 3 // 4, "first": len(ids) // 3}
    case.check([{"kind": "machine", **window, **switches} for switches in [{}, *SWITCHES]])


def test_questions_about_the_model_equal_python(case):
    viewed = case.provider.viewed[0]
    parameters = [name for name, _ in viewed.model.named_parameters()]
    questions = [{"kind": "parameter", "name": name} for name in parameters]
    questions += [{"kind": "parameter", "name": name, "row": 0} for name in parameters]
    questions += [{"kind": "vocabulary", "row": row} for row in (None, 1, viewed.tokenizer.vocab_size - 1)]
    questions += [{"kind": kind} for kind in ("models", "positions")]
    for text in (TEXT, STRANGE, "", "ab" * 40, "\U0001f600", *map(case.text_of, range(3))):
        questions += [{"kind": "tokens", "text": text, "whole": whole} for whole in (True, False)]
    case.check(questions)


def test_large_tables_are_pooled_and_projected(cases):
    """With more rows than a heat map, the map of the vocabulary, and one matrix product."""
    names = ("transformer.wte.weight", "transformer.h.0.mlp.c_proj.weight")
    questions = [{"kind": "parameter", "name": name} for name in names]
    questions += [{"kind": "vocabulary", "row": 1100}, {"kind": "overview", "ids": random_ids(cases["large"], 100)}]
    cases["large"].check(questions)


def test_nan_weights_can_be_shown(cases):
    ids, names = random_ids(cases["nan"], 12), ("mlp.c_fc.weight", "attn.c_attn.bias")
    questions = [{"kind": kind, "ids": ids, "layer": 1} for kind in ("overview", "head")]
    questions.append({"kind": "machine", "ids": ids, "token": 9, "first": 3})
    questions += [{"kind": "parameter", "name": f"transformer.h.0.{name}"} for name in names]
    cases["nan"].check(questions)


def test_a_file_has_no_run_and_may_have_no_index(cases):
    case = cases["char"]
    kinds = ("memorized", "overlap", "run")
    memorized, overlap, run = case.in_browser([{"kind": kind, "ids": [1]} for kind in kinds])
    assert list(memorized[0]) == ["reason"] and "training data" in memorized[0]["reason"]
    assert overlap == ({"reason": "this file has no index of it"}, {})
    assert run == ({}, {})
    case.check([{"kind": "memorized"}, {"kind": "overlap"}])


def test_answers_do_not_share_memory_and_four_traces_are_cached(cases):
    """The page may transfer the arrays of an answer."""
    script = """(() => {
      const answers = models.char, question = {kind: "layer", ids: [1, 2, 3], layer: 1, token: 1};
      const first = finish(answers.answer(question)).tensors, before = first.hidden.data.slice();
      for (const {data} of Object.values(first)) structuredClone(data.buffer, {transfer: [data.buffer]});
      const again = finish(answers.answer(question)).tensors.hidden.data;
      for (let id = 0; id < 9; id++) finish(answers.answer({kind: "head", ids: [id]}));
      return [before, again, answers.traces.size];
    })()"""
    before, again, traces = cases["char"].engine(script)
    assert before.tolist() == again.tolist() and traces == 4


# --- mistakes ---------------------------------------------------------------------------------------------------------

INVALID_QUESTIONS = [
    *[question for question, _ in MISTAKES],
    *[{"kind": kind} for kind in ("constructor", "answer", "__proto__", "it's", "'\"\\\n\x01\xad\u2028\U000e0001é")],
    *[{"kind": value} for value in (None, True, [1, "a", [None]], {"a'": {"b": [False]}}, 12345678901)],
    *[{"kind": "head", name: value} for name in ("layer", "step", "row", "mask", "scale") for value in (-1, "", 2**63)],
    {"kind": "head", "layer": -1, "head": -2, "row": -3},
    *[{"kind": "head", "ids": [1], "heads_off": off} for off in ("1.0.1", "0.-1", "a.1", "+1. 1 ", "0.4", ".")],
    *[{"kind": kind, "step": 1234567} for kind in ("overview", "parameter", "vocabulary", "positions", "tokens")],
    *[{"kind": kind, "ids": [1], "step": 7, "layer": 9} for kind in ("notes", "token")],
    {"kind": "notes", "ids": [1]},
    {"kind": "tokens", "text": "🎉" * 100_001},
    {"kind": "tokens", "text": "🎉" * 100_000, "ids": [99]},
    {"kind": "overview", "ids": [1] * 1234},
]


@pytest.mark.parametrize("name", ["char", "score"])
def test_error_messages_equal_python(cases, name):
    case = cases[name]
    case.check(INVALID_QUESTIONS)
    assert all(isinstance(case.in_python(question), str) for question in INVALID_QUESTIONS[:20])


# --- the search of the training data ----------------------------------------------------------------------------------

SEARCHES = 50
TOKENIZER = """({kind, eot, decode: ids => ids.map(id => `<${id}>`).join(""),
  tokenBytes: id => id === eot ? new Uint8Array() : new TextEncoder().encode("é".repeat(id % 20))})"""  # the same as:


class StrangeTokenizer:
    def __init__(self, eot: int | None, kind: str):
        self.eot, self.kind = eot, kind

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == self.eot else ("é" * (token % 20)).encode()

    def decode_prompt(self, ids: np.ndarray) -> str:
        return "".join(EOT_TEXT if token == self.eot else f"<{token}>" for token in ids)


def test_spans_of_the_training_data_equal_python(engine, seed):
    rng, quoted = np.random.default_rng(seed), 0
    for _ in range(SEARCHES):
        datasets, text, eot = random_case(rng)
        held_out = Shard(rng.choice(text, size=30).astype("<u4"))
        tokenizer = StrangeTokenizer(eot, rng.choice(["bpe", "midi"]))
        search = TrainingSearch([replace(dataset, val=[held_out]) for dataset in datasets], tokenizer)
        facts, longest = search.search(text)
        index, content = html_file.pack_index(search, offset := int(rng.integers(3)) * 4)
        script = f"""(search => [finish(search.search(text)), finish(search.overlap(text))])(
          TrainingSearch.read(index, bytes, {TOKENIZER}))"""
        values = dict(index=index, bytes=bytes(offset) + content, text=text.tolist(), eot=eot, kind=tokenizer.kind)
        answer, overlap = engine(script, **values)
        assert overlap == find_overlap(search.index, tokenizer, text)._asdict()
        quoted += overlap["in_training"]
        assert answer["facts"] == facts
        assert answer["longest"].tolist() == longest.tolist()
        covering = engine("coveringLengths(longest)", longest=longest.astype(np.int32))
        assert covering.tolist() == covering_lengths(longest).tolist()
    assert quoted


def test_the_shortest_quote_is_that_of_python(engine):
    """Spans of MIN_QUOTE characters count, and no test noticed a limit of one more. Each event counts as one."""
    tokenizer = StrangeTokenizer(None, "midi")
    dataset = replace(dataset_of(np.arange(200)), val=[Shard(np.arange(200, 220, dtype="<u4"))])
    search = TrainingSearch([dataset], tokenizer)
    index, content = html_file.pack_index(search, 0)
    for length, quoted in ((MIN_QUOTE - 1, 0), (MIN_QUOTE, MIN_QUOTE)):
        text = np.arange(100, 100 + length)
        script = f"finish(TrainingSearch.read(index, bytes, {TOKENIZER}).overlap(text))"
        overlap = engine(script, index=index, bytes=content, text=text.tolist(), eot=None, kind="midi")
        assert overlap == find_overlap(search.index, tokenizer, text)._asdict() and overlap["in_training"] == quoted
