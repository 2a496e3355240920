"""Task files of lm-eval over local data, and the requests of a task."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROWS = [  # the first context is longer than 64 tokens of a small BPE
    {"text": "It was said that " + "hello world, " * 12 + "and then", "endings": ["hello", "wörld"], "gold": 1},
    {"text": "hello", "endings": ["world", "hello worlds"], "gold": 0},
    {"text": "The world's", "endings": ["end 日本", "he"], "gold": 0},
    {"text": "hello hello\n日本", "endings": ["🎉 it was said", "hello, world"], "gold": 1},
]
CHOICES = dict(output_type="multiple_choice", doc_to_text="{{text}}", doc_to_target="gold", doc_to_choice="endings")
LAST_WORDS = dict(output_type="loglikelihood", doc_to_text="{{text}}", doc_to_target=" {{endings[gold]}}")
TEXTS = dict(output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}} {{endings[0]}}")
ANSWERS = dict(
    output_type="generate_until",
    doc_to_text="{{text}}",
    doc_to_target="{{endings[gold]}}",
    generation_kwargs={"until": ["o", "\n"], "do_sample": False, "max_gen_toks": 12},
)


def metric(name: str, aggregation: str = "mean", higher_is_better: bool = True) -> dict[str, Any]:
    return {"metric": name, "aggregation": aggregation, "higher_is_better": higher_is_better}


def write_task(
    folder: Path,
    name: str,
    kind: dict[str, Any],
    metrics: Sequence[dict] = (),
    rows: Sequence[dict] = ROWS,
    **fields: Any,
) -> str:
    """Write a task file and its data. Returns its path. metrics: accuracy by default."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "fewshot_split": "test",
        "metric_list": list(metrics) or [metric("acc")],
        "metadata": {"version": 1.0},
        **kind,
        **fields,
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(task), encoding="utf-8")  # JSON is valid YAML
    return str(path)
