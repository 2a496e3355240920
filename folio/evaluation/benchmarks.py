"""Benchmarks of lm-evaluation-harness (the package lm-eval): its tasks, a model that answers their requests, results.

Dimensions: B batch, T time, V vocabulary; n tokens of a continuation.
"""

import functools
import io
import logging
import math
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import lm_eval
import numpy as np
import torch
import torch.nn.functional as F
from lm_eval.api import metrics
from lm_eval.api.group import Group
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.task import Task
from lm_eval.defaults import DEFAULT_MAX_GEN_TOKS, DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows

from folio import UserError
from folio.base.files import finite
from folio.base.progress import note, progress_bar
from folio.data.tokenizer import Tokenizer
from folio.decoding.language_model import GenerationConfig, LanguageModel
from folio.decoding.prompts import default_prompt, encode_text, unknown_characters
from folio.evaluation.answers import generate_texts
from folio.evaluation.scores import Coverage, Evaluation, Measure, count_characters
from folio.evaluation.text_loss import BATCH_TOKENS
from folio.machine.runtime import Runtime
from model import GPT

BOOTSTRAP_ITERS = 1000  # resamples of lm-eval's standard error, where it has no formula; its default takes minutes
UNIT = "examples"
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # lm-eval's names, by priority


@contextmanager
def quiet() -> Iterator[list[str]]:
    """Discard what lm-eval and its libraries print and log, and do not report the use of a data set to the hub.

    Yields the errors that lm-eval has logged.
    """
    loggers = [logging.getLogger(name) for name in ("lm_eval", "huggingface_hub", "datasets")]
    levels = [logger.level for logger in loggers]
    errors, handler = [], logging.Handler()
    handler.emit = lambda record: errors.append(record.getMessage())
    loggers[0].addHandler(handler)
    for logger, level in zip(loggers, (logging.ERROR, logging.CRITICAL, logging.CRITICAL), strict=True):
        logger.setLevel(level)
    counts, datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = datasets.config.HF_UPDATE_DOWNLOAD_COUNTS, False
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield errors
    finally:
        loggers[0].removeHandler(handler)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = counts


# --- tasks ------------------------------------------------------------------------------------------------------------


class Benchmark(NamedTuple):
    """What one name in --tasks stands for."""

    tasks: dict[str, Task]
    groups: dict[str, Group]  # of these tasks, with results of their own


def load_benchmark(name: str, include_path: str | None = None, num_fewshot: int | None = None) -> Benchmark:
    """Load a task, group, tag or pattern of lm-eval, or a task file. Downloads their data. Raises UserError.

    include_path: a folder with more task files. num_fewshot: solved examples in each prompt; None: the task's number.
    """
    manager, specs = find_tasks(name, include_path)
    if not is_file_name(name):
        note(f"{name}: reading the data of the task, from huggingface.co or the cache of its downloads")
    random.seed(DEFAULT_RANDOM_SEED)  # these seeds choose the same examples as lm-eval's command line
    np.random.seed(DEFAULT_OTHER_SEED)
    errors: list[str] = []
    try:
        with quiet() as errors:
            loaded = manager.load(specs)
            for task in loaded["tasks"].values():
                set_num_fewshot(task, num_fewshot)
                task.build_all_requests(limit=1)  # finds mistakes in its file before the model is loaded
                task.set_fewshot_seed(DEFAULT_OTHER_SEED)
    except Exception as error:  # of datasets, jinja2, yaml, ...: they have no common base class
        reason = (errors[0] if errors else str(error)).strip().partition("\n")[0]
        remedy = "docs/use/evaluation.md#tasks shows a task file for data on this computer"
        if isinstance(error, OSError):
            remedy = f"lm-eval's own tasks download their data from huggingface.co; {remedy}"
        raise UserError(f"--tasks={name}: it cannot be loaded ({type(error).__name__}: {reason}); {remedy}") from error
    for task_name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            raise UserError(f"--tasks={name}: {task_name} runs the code that a model writes, which is not supported")
        if getattr(task, "MULTIMODAL", False):
            raise UserError(f"--tasks={name}: {task_name} needs a model that reads images or sound")
        if num_fewshot not in (None, used := task.get_config("num_fewshot")):
            note(f"{task_name}: its file sets num_fewshot={used}, which --num_fewshot={num_fewshot} does not change")
    return Benchmark(loaded["tasks"], loaded["groups"])


def is_file_name(task: str) -> bool:
    """Whether a task is a task file, rather than a name that lm-eval knows."""
    return Path(task).suffix in (".yaml", ".yml")


def find_tasks(name: str, include_path: str | None) -> tuple[TaskManager, list[str]]:
    """Return lm-eval's names of the tasks, and a manager that knows them. Raises UserError for an unknown name."""
    if is_file_name(name):
        if not Path(name).is_file():
            raise UserError(f"--tasks={name}: there is no such file")
        return task_manager(include_path, include_path is not None), [name]
    if include_path and name in task_manager(include_path, False).all_subtasks:
        return task_manager(include_path, False), [name]
    manager = task_manager(include_path, True)
    if names := manager.match_tasks([name]):
        return manager, names
    close = get_close_matches(name, [*manager.all_tasks, "pairs", "music"], n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else "lm-eval ls tasks lists the names"
    raise UserError(f"--tasks={name}: lm-eval {lm_eval.__version__} has no such task; {hint}")


@functools.cache
def task_manager(include_path: str | None, include_defaults: bool) -> TaskManager:
    """Index task files. include_defaults: also lm-eval's own, which takes several seconds."""
    with quiet():
        return TaskManager(include_path=include_path, include_defaults=include_defaults)


def set_num_fewshot(task: Task, num_fewshot: int | None) -> None:
    """Set the number of solved examples and their seed as lm-eval does: a 0 in the task's file is never changed."""
    default = task.get_config("num_fewshot")
    if default is None or (default and num_fewshot is not None):
        task.set_config("num_fewshot", num_fewshot or 0)
    task.set_fewshot_seed(DEFAULT_OTHER_SEED)


# --- requests ---------------------------------------------------------------------------------------------------------


class HarnessModel(LM):
    """A model that answers lm-eval's requests, as lm-eval's own class for transformers does.

    Unknown characters are left out, and counted in the result's coverage.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, runtime: Runtime, make_generator: Callable[[], LanguageModel]):
        """make_generator: called for a task whose answers are generated."""
        super().__init__()
        self.model, self.tokenizer, self.runtime, self.make_generator = model, tokenizer, runtime, make_generator
        self.block_size = model.config.block_size
        self.prefix = default_prompt(tokenizer)[0]  # before a text without a context
        self.requests: Counter[str] = Counter()  # number of requests by task
        self.truncated: Counter[str] = Counter()  # those that are longer than the context
        self.stderr = sys.stderr  # lm-eval's own output is discarded

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood in nats, and whether each of its tokens is the most likely one."""
        return self._score([self._encode(request) for request in requests])

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Return the log-likelihood of each text in nats. Each token is predicted once, in disjoint contexts.

        Raises UserError for unknown characters: lm-eval divides by the number of bytes or words of the whole text.
        """
        windows, counts = [], []
        for request in requests:
            self._count(request, is_truncated=False)
            (text,) = request.args
            if unknown := next(unknown_characters(self.tokenizer, text), None):
                raise UserError(
                    f"{request.task_name}: it measures whole texts, but {unknown!r} is not in the vocabulary of this "
                    f"model; use one with another tokenizer, or --text with --on_unknown=skip"
                )
            ids = encode_text(self.tokenizer, text)
            pairs = list(get_rolling_token_windows(ids, self.prefix, self.block_size, context_len=1))
            windows += [([*context, predicted[-1]], len(predicted)) for context, predicted in pairs]
            counts.append(len(pairs))
        scores = iter(self._score(windows))
        return [math.fsum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Return the text that follows each prompt, up to the end-of-text token or the task's stop strings.

        The prompt loses its beginning if the answer would not fit, but never more than what exceeds half the context.
        """
        with redirect_stderr(self.stderr):
            generator, occurrences, groups = self.make_generator(), Counter(), {}
            for number, request in enumerate(requests):
                config, stop = read_generation(request)
                prompt_tokens = max(self.block_size - config.max_new_tokens, self.block_size // 2, 1)
                ids = encode_text(self.tokenizer, request.args[0], "skip") or [self.prefix]
                self._count(request, is_truncated=len(ids) > prompt_tokens)
                sample = occurrences[id(request)]  # a task can ask for several samples of a prompt
                occurrences[id(request)] += 1
                groups.setdefault((config, stop), []).append((number, ids[-prompt_tokens:], sample))
            texts = [""] * len(requests)
            for (config, stop), prompts in groups.items():
                generated = generate_texts(generator, [prompt[1:] for prompt in prompts], config, "lm-eval", stop=stop)
                for (number, _, _), text in zip(prompts, generated, strict=True):
                    texts[number] = text
        return texts

    def _count(self, request: Instance, is_truncated: bool) -> None:
        self.requests[request.task_name] += 1
        self.truncated[request.task_name] += is_truncated

    def _encode(self, request: Instance) -> tuple[list[int], int]:
        """Return up to block_size + 1 ids of a context and its continuation, and how many belong to the latter.

        White space between them begins the continuation, because that is how GPT-2's BPE divides words.
        """
        context, continuation = request.args
        stripped = context.rstrip()
        before = encode_text(self.tokenizer, stripped, "skip")
        after = encode_text(self.tokenizer, context + continuation, "skip")[len(before) :]
        if not after:
            raise UserError(
                f"{request.task_name}: this tokenizer ({self.tokenizer.kind}) encodes {continuation!r} to no token"
            )
        ids = [*(before or [self.prefix]), *after]
        self._count(request, is_truncated=len(ids) > self.block_size + 1)
        return ids[-self.block_size - 1 :], min(len(after), self.block_size)

    @torch.inference_mode()
    def _score(self, requests: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of the last n ids, and whether each is the most likely token, for each (ids, n)."""
        numbers: dict[tuple[int, ...], list[int]] = {}  # requests by their input, which those of short answers share
        for number, (ids, _) in enumerate(requests):
            numbers.setdefault(tuple(ids[:-1]), []).append(number)
        scores = [(0.0, False)] * len(requests)
        remaining = sorted(numbers, key=len)  # batches of similar lengths, the longest first
        with redirect_stderr(self.stderr):
            progress = progress_bar(total=len(remaining), unit="text", desc="lm-eval")
        while remaining:
            B = max(1, BATCH_TOKENS // len(remaining[-1]))
            batch, remaining = remaining[-B:], remaining[:-B]
            idx = torch.zeros(len(batch), len(batch[-1]), dtype=torch.long)  # (B, T)
            for row, ids in zip(idx, batch, strict=True):
                row[: len(ids)] = torch.tensor(ids)
            with self.runtime.autocast():
                logits = self.model.logits(idx.to(self.runtime.device))  # (B, T, V)
            for row, ids in zip(logits, batch, strict=True):
                for number in numbers[ids]:
                    scores[number] = score_end(row[: len(ids)], *requests[number])
            progress.update(len(batch))
        progress.close()
        return scores


def score_end(logits: torch.Tensor, ids: list[int], n: int) -> tuple[float, bool]:
    """Return the log-likelihood of the last n of T + 1 ids, and whether each is the most likely. logits: (T, V)."""
    targets, predictions = torch.tensor(ids[-n:], device=logits.device), logits[-n:].float()  # (n,), (n, V)
    nats = F.cross_entropy(predictions, targets, reduction="none")  # (n,)
    return -float(nats.double().sum()), bool((predictions.argmax(dim=-1) == targets).all())


def read_generation(request: Instance) -> tuple[GenerationConfig, tuple[str, ...]]:
    """Return how a task wants its answers generated, and its stop strings. Raises UserError for unknown settings."""
    fields = dict(request.args[1])
    until = fields.pop("until", None) or []
    stop = (until,) if isinstance(until, str) else tuple(text for text in until if text)
    lengths = [fields.pop(name) for name in LENGTHS if name in fields]
    do_sample, temperature = fields.pop("do_sample", None), fields.pop("temperature", None)
    if do_sample is False or temperature is None:
        temperature = 1.0 if do_sample else 0.0
    sampling = {name: fields.pop(name, None) or None for name in ("top_k", "top_p")}
    if fields.pop("num_beams", 1) != 1 or fields:
        names = ", ".join(fields) or "num_beams"
        raise UserError(f"{request.task_name}: its generation_kwargs have {names}, which is not supported")
    return GenerationConfig(
        temperature=float(temperature),
        max_new_tokens=int(lengths[0]) if lengths else DEFAULT_MAX_GEN_TOKS,
        batch_size=128,
        on_unknown="skip",
        **sampling,
    ), stop


# --- results ----------------------------------------------------------------------------------------------------------


def evaluate_benchmark(evaluation: Evaluation, model: HarnessModel, benchmark: Benchmark, limit: int | None) -> None:
    """Add the results of a benchmark. limit: number of examples per task."""
    os.environ["DISABLE_MULTIPROC"] = "1"  # or lm-eval's bootstrap starts a process per core
    with quiet():
        results = lm_eval.evaluate(
            model, {"tasks": benchmark.tasks, "groups": benchmark.groups}, limit=limit, bootstrap_iters=BOOTSTRAP_ITERS
        )
    for name, task in benchmark.tasks.items():
        evaluation.coverage[name] = count_characters(requested_texts(results["samples"][name]), model.tokenizer)
        add_measures(evaluation, task, results)
        requests, truncated = model.requests[name], model.truncated[name]
        if truncated:
            note(
                f"{name}: {truncated:,} of {requests:,} requests are longer than the context of {model.block_size:,} "
                f"tokens, so the model sees only their end"
            )
        counts = {"requests": requests, "truncated": truncated}
        evaluation.benchmarks.append(describe(evaluation.run, name, results) | counts)
    for name, group in benchmark.groups.items():
        if group.has_aggregation:
            evaluation.coverage[name] = Coverage()
            evaluation.measures += group_measures(evaluation, group, results["results"][name])
            evaluation.benchmarks.append(describe(evaluation.run, name, results))


def describe(run: str, name: str, results: dict[str, Any]) -> dict[str, Any]:
    """Return lm-eval's own results of a task or group, and what is needed to reproduce them."""
    figures = {key: x for key, x in results["results"][name].items() if isinstance(x, str | int | float | np.number)}
    return {
        "run": run,
        "task": name,
        "lm_eval": lm_eval.__version__,
        "version": results["versions"].get(name),
        "num_fewshot": results["n-shot"].get(name),
        "results": finite({key: float(x) if isinstance(x, np.number) else x for key, x in figures.items()}),
    }


def requested_texts(samples: Iterable[dict[str, Any]]) -> list[str]:
    """Return the distinct texts of the requests of a task: contexts, continuations, and prompts."""
    arguments = (value for sample in samples for request in sample["arguments"] for value in request)
    return list(dict.fromkeys(value for value in arguments if isinstance(value, str)))


def add_measures(evaluation: Evaluation, task: Task, results: dict[str, Any]) -> None:
    """Add a task's metrics, with intervals over its examples if they are means."""
    source = task.task_name
    values: dict[tuple[str, str], list[Any]] = {}  # of each example, by metric and filter of the answers
    for sample in results["samples"][source]:
        for metric in sample["metrics"]:
            values.setdefault((metric, sample["filter"]), []).append(sample[metric])
    for (metric, key), column in values.items():
        figures, name = results["results"][source], metric if key == "none" else f"{metric} ({key})"
        if not math.isfinite(figures[f"{metric},{key}"]):
            note(f"{source}: lm-eval's value of {name} is not a number, so it is left out")
            continue
        stderr = read_stderr(figures, metric, key)
        make = MEASURES.get(task.aggregation().get(metric, metrics.mean))
        if make:
            better = "lower" if task.higher_is_better().get(metric) is False else "higher"
            measure = make(source, name, np.array(column, dtype=float))
            evaluation.measures.append(replace(measure, better=better, stderr=stderr))
        else:
            n = len(column)
            row = {"of": source, "measure": name, "value": float(figures[f"{metric},{key}"]), "low": None, "high": None}
            evaluation.more_rows.append({**row, "n": n, "effective": n, "over": UNIT, "stderr": stderr})


def read_stderr(figures: dict[str, Any], metric: str, key: str) -> float | None:
    """Return lm-eval's standard error of a metric, or None if it has none."""
    stderr = figures.get(f"{metric}_stderr,{key}", "N/A")
    return None if stderr == "N/A" else finite(stderr)


def mean_measure(source: str, name: str, values: np.ndarray) -> Measure:
    """Return the mean of a metric. values: (examples,)."""
    is_share = bool(np.isin(values, (0, 1)).all())
    return Measure(source, name, UNIT, values, np.ones(len(values)), is_share=is_share)


def perplexity_measure(source: str, name: str, values: np.ndarray) -> Measure:
    """Return exp of the mean loss. values: log-likelihoods (examples,), or also numbers of words (examples, 2)."""
    nats, weights = (-values, np.ones(len(values))) if values.ndim == 1 else (-values[:, 0], values[:, 1])
    return Measure(source, name, UNIT, nats, weights, transform=math.exp)


def bits_measure(source: str, name: str, values: np.ndarray) -> Measure:
    """Return bits per byte. values: (examples, 2) log-likelihoods in nats, and numbers of bytes."""
    return Measure(source, name, UNIT, -values[:, 0] / math.log(2), values[:, 1])


MEASURES: dict[Callable, Callable[[str, str, np.ndarray], Measure]] = {  # by lm-eval's aggregation
    metrics.mean: mean_measure,
    metrics.perplexity: perplexity_measure,
    metrics.weighted_perplexity: perplexity_measure,
    metrics.bits_per_byte: bits_measure,
}


def group_measures(evaluation: Evaluation, group: Group, figures: dict[str, Any]) -> list[Measure]:
    """Return a group's metrics: means over the examples of its tasks, or over the tasks if it weights them equally."""
    names = {task.task_name for task in group.get_all_tasks()}
    measures = []
    for config in group.aggregate_metric_list:
        keys = [key.partition(",")[2] for key in figures if key.startswith(f"{config.metric},")]
        for key in keys:
            label = config.metric if key == "none" else f"{config.metric} ({key})"
            parts = [m for m in evaluation.measures if m.source in names and m.name == label and m.transform is float]
            weights = [part.weights * (1 if config.weight_by_size else 1 / len(part.values)) for part in parts]
            if not parts:
                continue
            measure = replace(
                parts[0],
                source=group.name,
                values=np.concatenate([part.values * w for part, w in zip(parts, weights, strict=True)]),
                weights=np.concatenate(weights),
                stderr=read_stderr(figures, config.metric, key),
            )
            measures.append(measure)
    return measures
