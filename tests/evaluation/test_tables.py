"""Tables of evaluation results, and the lines below them."""

from collections import Counter

import numpy as np

from folio.evaluation.scores import Coverage, Evaluation, PositionLoss, collect_results
from folio.evaluation.tables import format_results, format_table, left_out_lines
from tests.support.evaluations import measure_of


def test_a_row_has_a_value_its_interval_and_its_samples():
    coverage = Coverage(probes=20, probes_matched=3)
    first = Evaluation("a", [measure_of([999, 1000, 1001])], {"text": coverage})
    header, _, row = format_table(first.rows()).splitlines()
    assert header == "| model | data | measure | value | 95 % interval | samples |"
    source = "text (3 of 20 probes are in its training data)"
    assert row == f"| a | {source} | bits per byte | 1,000.0 | 997.5 to 1,002.5 | 3 documents |"
    second = Evaluation("b", [measure_of([1.5])], {"text": Coverage(probes=20, probes_matched=0)})
    _, _, row = format_table(second.rows()).splitlines()
    assert row == "| b | text | bits per byte | 1.5000 | unknown | 1 documents |"


def test_documents_of_very_different_lengths_have_a_warning():
    """Two models were measured on the same text, so it is one line."""
    weights = [1.0] * 19 + [40.0]
    models = [Evaluation(run, [measure_of(weights, weights)], {"text": Coverage()}) for run in "ab"]
    lines = format_results(models, collect_results(models)).splitlines()
    assert lines[2].endswith("| 20 documents (like 2.2) |") and len(lines) == 5
    assert lines[4].startswith("text: its 20 documents differ much in length and count as 2.2 of equal length")
    assert "evaluation.md#intervals" in lines[4]
    similar = [Evaluation("a", [measure_of([1.0] * 20, [1.0] * 19 + [4.0])], {"text": Coverage()})]
    assert format_results(similar, collect_results(similar)).splitlines()[2].endswith("| 20 documents |")


def test_left_out_characters_are_listed():
    coverage = Coverage(200, Counter({"é": 3, "x": 1}))
    (line,) = left_out_lines(Evaluation("a", [], {"text": coverage, "all": Coverage(10)}))
    assert line.startswith("a left out 4 of the 200 characters of text (2.00%), ") and line.endswith(": 'é' 'x'")
    unknown = Counter({chr(ord("a") + i): 9 - i for i in range(9)})
    (line,) = left_out_lines(Evaluation("a", [], {"text": Coverage(100, unknown)}))
    assert line.endswith(": 'a' 'b' 'c' 'd' 'e' 'f' 'g' 'h', ...")


def losses_of(windows: str, nats: list[list[float]], context: int = 2) -> PositionLoss:
    return PositionLoss("text", windows, 8, np.array(nats), np.ones((len(nats), context), bool), np.arange(len(nats)))


def test_models_on_the_same_windows_are_columns_of_one_table():
    """A model with another tokenizer is in another table; a model that lacks a position has no value there."""
    losses = {"a": losses_of("x", [[1, 2], [1, 2]]), "b": losses_of("x", [[1], [2]]), "c": losses_of("y", [[1, 1]])}
    models = [Evaluation(run, coverage={"text": Coverage()}, positions=[loss]) for run, loss in losses.items()]
    results = collect_results(models)
    title = "text: loss in nats per token ± half the width of its 95 % interval, over"
    lines = format_results(models, results).splitlines()
    assert lines[:13] == [
        f"{title} 2 windows of 3 tokens",
        "",
        "| tokens of context      | a               | b    |",
        "| ---------------------- | --------------- | ---- |",
        "| block_size in training | 8               | 8    |",
        "| 1 to 2                 | 1.5000 ± 0.0000 | none |",
        "",
        f"{title} 1 window of 3 tokens",
        "",
        "| tokens of context      | c                |",
        "| ---------------------- | ---------------- |",
        "| block_size in training | 8                |",
        "| 1 to 2                 | 1.0000 ± unknown |",
    ]
    assert lines[13].startswith("text has 2 documents, so its intervals are over windows")
    assert lines[14].startswith("text has 1 document, so its intervals are over windows") and len(lines) == 15
    assert [curve["losses"] for curve in results["curves"]] == [[1, 2], [1.5, None], [1, 1]]


def test_signatures_and_groups_are_below_the_table():
    group = {"run": "a", "of": "text", "by": {"kind": "x"}, "pairs": 2, "measure": "exact match", "value": 1.0}
    group |= {"low": None, "high": None}
    model = Evaluation("a", [measure_of([1, 1])], {"text": Coverage()}, groups=[group], signatures={"BLEU": "nrefs:1"})
    results = collect_results([model])
    assert results["signatures"] == {"BLEU": "nrefs:1"} and results["groups"] == [group]
    assert format_results([model], results).splitlines()[3:] == [
        "BLEU: sacrebleu nrefs:1",
        "",
        "a, text: exact match ± half the width of its 95 % interval (pairs)",
        "",
        "| kind | exact match |",
        "|---|---|",
        "| x | 1.0000 ± unknown (2) |",
    ]
    plain = [Evaluation("a", [measure_of([1, 1])], {"text": Coverage()})]
    assert [*collect_results(plain)] == ["results"]
