"""Benchmarks of lm-eval, against its own class for transformers' models."""

import json
import logging
import math
import re
import socket
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

lm_eval = pytest.importorskip("lm_eval")

from folio import UserError
from folio.checkpoints.checkpoint import Checkpoint
from folio.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from folio.decoding.language_model import LanguageModel
from folio.evaluation import benchmarks
from folio.evaluation.benchmarks import HarnessModel, evaluate_benchmark, load_benchmark, read_generation
from folio.evaluation.scores import Evaluation, collect_results
from folio.machine.runtime import resolve_runtime
from tests.support.benchmark_tasks import ANSWERS, CHOICES, LAST_WORDS, ROWS, TEXTS, metric, write_task
from tests.support.exports import checkpoint_of
from tests.support.processes import ROOT
from tests.support.tiny_tokenizers import bpe

PERPLEXITY = metric("perplexity", "perplexity", higher_is_better=False)
PER_WORD = metric("word_perplexity", "weighted_perplexity", higher_is_better=False)
PER_BYTE = metric("bits_per_byte", "bits_per_byte", higher_is_better=False)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Work in an empty folder, where any connection is an error."""

    def refuse(*args: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def no_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not index lm-eval's own tasks, which takes seconds."""
    manager = benchmarks.task_manager
    monkeypatch.setattr(benchmarks, "task_manager", lambda include_path, include_defaults: manager(include_path, False))


def harness_model(saved: Checkpoint) -> HarnessModel:
    model, tokenizer = saved.build().eval(), saved.tokenizer
    make_generator = partial(LanguageModel, model, tokenizer, "cpu", "float32")
    return HarnessModel(model, tokenizer, resolve_runtime("cpu", "float32", False), make_generator)


def evaluated(path: str, tokenizer: Tokenizer | None = None, limit: int | None = None, **settings: Any) -> Evaluation:
    """Evaluate a model with random weights and a context of 64 tokens on one task."""
    evaluation = Evaluation("out")
    model = harness_model(checkpoint_of(tokenizer or bpe(), True))
    evaluate_benchmark(evaluation, model, load_benchmark(path, **settings), limit)
    return evaluation


# --- against lm-eval's own class --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """lm-eval's model class, with transformers' GPT-2 and tokenizer."""
    pytest.importorskip("accelerate")
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    from folio.checkpoints.export_formats import write_hugging_face

    folder = tmp_path_factory.mktemp("exported") / "hf"
    write_hugging_face(checkpoint_of(bpe(), True), folder)
    return huggingface.HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=2)


@pytest.mark.needs("transformers")
@pytest.mark.architecture("this test, whose reference is transformers' GPT-2: use another one, or skip it")
@pytest.mark.parametrize(
    "kind, metrics, num_fewshot",
    [
        (CHOICES, [metric("acc"), metric("acc_norm")], None),
        (CHOICES, [metric("acc")], 2),
        (LAST_WORDS, [metric("acc"), PERPLEXITY], None),
        (TEXTS, [PER_WORD, PER_BYTE], None),
        (ANSWERS, [metric("exact_match")], 1),
    ],
)
def test_results_equal_those_of_lm_evals_class_for_transformers(
    theirs, kind, metrics, num_fewshot, tmp_path, monkeypatch
):
    """Contexts, texts and prompts longer than the model's context are truncated in the same way."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # it runs pip
    path = write_task(tmp_path, "task", kind, metrics)
    manager = TaskManager(include_defaults=False)
    expected = simple_evaluate(
        theirs, tasks=[path], num_fewshot=num_fewshot, task_manager=manager, bootstrap_iters=benchmarks.BOOTSTRAP_ITERS
    )
    answers = []
    model = harness_model(checkpoint_of(bpe(), True))
    method = {"multiple_choice": "loglikelihood"}.get(kind["output_type"], kind["output_type"])
    answer = getattr(model, method)
    monkeypatch.setattr(model, method, lambda requests: answers.extend(answer(requests)) or answers)
    evaluation = Evaluation("out")
    evaluate_benchmark(evaluation, model, load_benchmark(path, num_fewshot=num_fewshot), None)
    samples = sorted(expected["samples"]["task"], key=lambda sample: sample["doc_id"])
    their_answers = [answer for sample in samples for (answer,) in sample["resps"]]
    assert len(answers) == len(their_answers)
    for ours, other in zip(answers, their_answers, strict=True):
        if isinstance(ours, tuple):
            assert ours[0] == pytest.approx(other[0], abs=1e-4) and ours[1] == other[1]
        else:
            assert ours == (pytest.approx(other, abs=1e-4) if isinstance(ours, float) else other)
    figures = expected["results"]["task"]
    assert {measure.name for measure in evaluation.measures} == {row["metric"] for row in metrics}
    for row in (measure.row() for measure in evaluation.measures):
        name = row["measure"]
        assert row["n"] == len(ROWS)
        assert row["value"] == pytest.approx(figures[f"{name},none"], rel=1e-4)
        if (stderr := figures[f"{name}_stderr,none"]) != "N/A":
            assert row["stderr"] == pytest.approx(stderr, rel=1e-4)
    (benchmark,) = evaluation.benchmarks
    assert benchmark["num_fewshot"] == (num_fewshot or 0)
    assert (benchmark["truncated"] > 0) == (kind is not TEXTS)


# --- results ----------------------------------------------------------------------------------------------------------


def test_intervals_are_over_the_examples(tmp_path, capsys):
    """Each metric has Folio's interval and lm-eval's standard error."""
    stats = pytest.importorskip("scipy.stats")
    rows = ROWS[1:] * 7
    evaluation = evaluated(write_task(tmp_path, "words", LAST_WORDS, [metric("acc"), PERPLEXITY], rows), limit=20)
    results = collect_results([evaluation])
    perplexity, accuracy = results["results"]
    assert (accuracy["of"], accuracy["over"], accuracy["n"]) == ("words", "examples", 20)
    assert [measure.better for measure in evaluation.measures] == ["lower", "higher"]
    assert 0 <= accuracy["low"] <= accuracy["value"] < accuracy["high"] < 1
    nats = evaluation.measures[0].values
    assert perplexity["value"] == pytest.approx(math.exp(nats.mean()))
    half_width = stats.t(19).ppf(0.975) * nats.std(ddof=1) / math.sqrt(20)
    assert perplexity["low"] == pytest.approx(math.exp(nats.mean() - half_width))
    assert perplexity["high"] == pytest.approx(math.exp(nats.mean() + half_width))
    (benchmark,) = results["benchmarks"]
    figures = benchmark["results"]
    assert (figures["acc,none"], figures["acc_stderr,none"]) == (accuracy["value"], accuracy["stderr"])
    assert figures["perplexity_stderr,none"] == perplexity["stderr"] > 0 and benchmark["version"] == 1.0
    assert (benchmark["requests"], benchmark["truncated"]) == (20, 0)
    json.dumps(results, allow_nan=False)
    assert capsys.readouterr() == ("", "")


def test_a_metric_that_is_not_a_mean_has_no_interval(tmp_path):
    path = write_task(tmp_path, "answers", ANSWERS, [metric("exact_match"), metric("bleu", "bleu")])
    evaluation = evaluated(path)
    (row,) = evaluation.more_rows
    assert (row["measure"], row["low"], row["high"], row["n"]) == ("bleu", None, None, len(ROWS))
    assert evaluation.measures[0].name == "exact_match" and evaluation.rows()


def test_filters_of_the_answers_are_named(tmp_path):
    """A task can report a metric once for each way to read the answers."""
    take = [{"function": "take_first"}]
    lower = [{"function": "lowercase"}, *take]
    filters = [{"name": "strict", "filter": take}, {"name": "lower", "filter": lower}]
    evaluation = evaluated(write_task(tmp_path, "answers", ANSWERS, [metric("exact_match")], filter_list=filters))
    assert [measure.name for measure in evaluation.measures] == ["exact_match (strict)", "exact_match (lower)"]


@pytest.mark.parametrize("weight_by_size", [True, False])
def test_a_group_is_the_mean_over_its_examples_or_tasks(weight_by_size, tmp_path, no_defaults):
    names = ["few", "many"]
    for name, rows in zip(names, (ROWS[1:3], ROWS * 3), strict=True):
        write_task(tmp_path, name, CHOICES, rows=rows)
    group = {
        "group": "both",
        "task": names,
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": weight_by_size}],
    }
    (tmp_path / "both.yaml").write_text(json.dumps(group), encoding="utf-8")
    evaluation = evaluated("both", include_path=str(tmp_path))
    *parts, both = evaluation.measures
    assert [measure.source for measure in evaluation.measures] == [*names, "both"]
    figures = evaluation.benchmarks[-1]["results"]
    assert both.ratio == pytest.approx(figures["acc,none"])
    means, sizes = [part.ratio for part in parts], [2, 12]
    assert both.ratio == pytest.approx(np.average(means, weights=sizes if weight_by_size else None))
    assert both.row()["n"] == 14 and len(evaluation.rows()) == 3


# --- requests ---------------------------------------------------------------------------------------------------------


def test_requests_that_are_longer_than_the_context_are_counted(tmp_path, capsys):
    """A long ending is scored as far as it fits."""
    rows = [{"text": "hello", "endings": ["q" * 100, "hello"], "gold": 1}, *ROWS[1:3]]
    evaluation = evaluated(write_task(tmp_path, "choices", CHOICES, rows=rows))
    assert (evaluation.benchmarks[0]["requests"], evaluation.benchmarks[0]["truncated"]) == (6, 1)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("choices: 1 of 6 requests are longer than the context of 64 tokens")


def test_characters_that_the_tokenizer_lacks_are_counted(tmp_path):
    rows = [{"text": "hello, é", "endings": ["world", "hello!"], "gold": 0}] * 2
    evaluation = evaluated(write_task(tmp_path, "choices", CHOICES, rows=rows), CharTokenizer(" ,dehlorw"))
    coverage = evaluation.coverage["choices"]
    assert dict(coverage.unknown) == {"é": 1, "!": 1}  # each text is counted once
    assert coverage.characters == len("hello, é world hello!")


def test_an_ending_without_a_known_character_is_an_error(tmp_path):
    rows = [{"text": "hello", "endings": ["é", "hello"], "gold": 0}]
    path = write_task(tmp_path, "choices", CHOICES, rows=rows, target_delimiter="")
    with pytest.raises(UserError, match=r"^choices: this tokenizer \(char\) encodes 'é' to no token$"):
        evaluated(path, CharTokenizer("dehlorw"))


def test_a_text_with_unknown_characters_has_no_loss(tmp_path):
    """Characters that were left out counted in the bytes, so the bits per byte were too low."""
    path = write_task(tmp_path, "texts", TEXTS, [PER_BYTE])
    with pytest.raises(UserError, match=r"^texts: .* 'I' is not in the vocabulary"):
        evaluated(path, CharTokenizer(" ,dehlorw"))


def test_a_text_without_a_context_follows_the_default_prompt(tmp_path):
    """An empty context, or one of unknown characters, has no token from which the first one could be predicted."""
    rows = [{"text": text, "endings": ["hello", "held"], "gold": 0} for text in ("", "é")]
    for tokenizer in (CharTokenizer("\ndehlorw "), ByteTokenizer()):
        evaluation = evaluated(write_task(tmp_path, "choices", CHOICES, rows=rows), tokenizer)
        assert evaluation.measures[0].row()["n"] == 2


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({}, (0.0, 256, (), None)),
        ({"until": "\n", "do_sample": False, "temperature": 0.7, "max_gen_toks": 9}, (0.0, 9, ("\n",), None)),
        ({"until": ["a", "b"], "do_sample": True, "max_new_tokens": 9}, (1.0, 9, ("a", "b"), None)),
        ({"temperature": 0.5, "top_k": 0, "top_p": 0.9, "num_beams": 1}, (0.5, 256, (), 0.9)),
    ],
)
def test_settings_of_generation(fields, expected):
    request = lm_eval.api.instance.Instance("generate_until", {}, ("hello", fields), 0, ("task", 0, 1))
    config, stop = read_generation(request)
    assert (config.temperature, config.max_new_tokens, stop, config.top_p) == expected and config.top_k is None


def test_an_unknown_setting_of_generation_is_an_error():
    request = lm_eval.api.instance.Instance("generate_until", {}, ("hello", {"num_beams": 4}), 0, ("task", 0, 1))
    with pytest.raises(UserError, match=r"^task: .*num_beams"):
        read_generation(request)


def test_repeated_samples_differ_and_are_reproducible(tmp_path):
    kwargs = {"until": [], "do_sample": True, "temperature": 1.0, "max_gen_toks": 8}
    kind = {**ANSWERS, "generation_kwargs": kwargs}
    path = write_task(tmp_path, "answers", kind, [metric("exact_match")], repeats=3)
    runs = []
    for _ in range(2):
        task = load_benchmark(path).tasks["answers"]
        task.build_all_requests()
        requests = [request for request in task.instances for _ in range(request.repeats)]
        runs.append(harness_model(checkpoint_of(bpe(), True)).generate_until(requests))
    assert runs[0] == runs[1] and len(set(runs[0])) == 3 * len(ROWS)


# --- tasks ------------------------------------------------------------------------------------------------------------


def test_the_task_file_of_the_docs_works(monkeypatch, tmp_path):
    """Its path is relative to the folder in which the command runs."""
    page = (ROOT / "docs" / "use" / "evaluation.md").read_text(encoding="utf-8")
    file, row = re.search(r"```yaml\n(task: .*?)```.*?```\n({.*?})\n```", page, re.DOTALL).groups()
    Path("questions.yaml").write_text(file, encoding="utf-8")
    rows = [row.replace("A man", subject) for subject in ("A man", "A king", "It")]
    Path("questions.jsonl").write_text("\n".join(rows), encoding="utf-8")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    evaluation = evaluated("questions.yaml", num_fewshot=1)
    assert evaluation.measures[0].row()["n"] == 3 and evaluation.benchmarks[0]["num_fewshot"] == 1


def test_few_shot_examples_are_the_same_each_time(tmp_path):
    path = write_task(tmp_path, "choices", CHOICES)
    prompts = []
    for _ in range(2):
        task = load_benchmark(path, num_fewshot=2).tasks["choices"]
        task.build_all_requests()
        prompts.append([request.args[0] for request in task.instances])
    assert prompts[0] == prompts[1] and all(prompt.count("\n\n") == 2 for prompt in prompts[0])


def test_a_task_that_excludes_solved_examples_is_named(tmp_path, capsys):
    path = write_task(tmp_path, "choices", CHOICES, num_fewshot=0)
    assert load_benchmark(path, num_fewshot=2).tasks["choices"].get_config("num_fewshot") == 0
    assert capsys.readouterr().err.startswith("choices: its file sets num_fewshot=0")


def test_a_misspelled_task_is_an_error_with_a_suggestion(tmp_path, no_defaults):
    write_task(tmp_path, "choices", CHOICES)
    with pytest.raises(UserError, match=r"^--tasks=choicse: .*did you mean choices\?$"):
        load_benchmark("choicse", str(tmp_path))
    with pytest.raises(UserError, match=r"^--tasks=qqqq: .*lm-eval ls tasks"):
        load_benchmark("qqqq", str(tmp_path))
    with pytest.raises(UserError, match=r"^--tasks=none\.yaml: there is no such file$"):
        load_benchmark("none.yaml")


def test_a_pattern_selects_tasks(tmp_path, no_defaults):
    for name in ("a_one", "a_two", "b"):
        write_task(tmp_path, name, CHOICES)
    assert [*load_benchmark("a_*", str(tmp_path)).tasks] == ["a_one", "a_two"]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"doc_to_text": "{{text"}, "TemplateSyntaxError"),
        (
            {"doc_to_target": "{{missing.field}}", "doc_to_choice": None, "output_type": "loglikelihood"},
            "UndefinedError",
        ),
        ({"test_split": "validation"}, "validation"),
        ({"dataset_kwargs": {"data_files": {"test": "/nowhere/none.jsonl"}}}, "none.jsonl"),
        ({"dataset_path": "someone/something", "dataset_kwargs": {}}, "someone/something"),
        ({"metric_list": [{"metric": "no_such_metric"}]}, "KeyError: no_such_metric not found"),
        ({"output_type": "no_such_type"}, "no_such_type"),
        ({"unsafe_code": True}, "runs the code that a model writes"),
    ],
)
def test_a_task_that_cannot_be_loaded_is_an_error_of_one_line(fields, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    path = write_task(tmp_path, "choices", CHOICES, **fields)
    with pytest.raises(UserError, match=message) as raised:
        load_benchmark(path)
    assert str(raised.value).startswith(f"--tasks={path}: ") and "\n" not in str(raised.value)
    assert capsys.readouterr() == ("", "")


def test_a_file_that_is_not_yaml_is_an_error(tmp_path):
    (tmp_path / "task.yaml").write_text("task: [", encoding="utf-8")
    with pytest.raises(UserError, match=r"task\.yaml: it cannot be loaded"):
        load_benchmark(str(tmp_path / "task.yaml"))


def test_nothing_is_printed_logged_or_written_elsewhere(tmp_path, capsys):
    """lm-eval prints progress and logs; libraries report the use of a data set to the hub (`offline` fails then)."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    levels = [logger.level for logger in loggers]
    path = write_task(tmp_path, "words", LAST_WORDS, [PERPLEXITY], ROWS[1:])
    evaluated(path, num_fewshot=0)
    assert capsys.readouterr() == ("", "")
    assert [logger.level for logger in loggers] == levels
    assert list(Path.cwd().iterdir()) == []
    assert {file.name for file in tmp_path.iterdir()} == {"here", "cache", "words.yaml", "words.jsonl"}
