"""The model's greedy answers to prompts, compared with the expected completions.

Dimensions: n pairs; D documents (pairs, or items if pairs have the field "item"); S statistics.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from folio.base.progress import note, progress_bar
from folio.data.sources.pairs import Pair, strip_tldr
from folio.decoding.language_model import GenerationConfig, LanguageModel, Request
from folio.evaluation.intervals import leave_one_out_influence
from folio.evaluation.scores import Coverage, Evaluation, Measure, count_characters

EXACT = "exact match"
ROUGE = {"ROUGE-1": "rouge1", "ROUGE-2": "rouge2", "ROUGE-L": "rougeL"}
BATCH_SIZE = 128  # maximum number of answers generated at once


def answer_pairs(
    model: LanguageModel, name: str, pairs: Sequence[Pair], stop: str | None = None, batch_size: int = BATCH_SIZE
) -> list[str]:
    """Return the model's answer to each prompt, by greedy decoding up to the end-of-text token.

    An answer also ends before the text `stop`, and at twice the tokens of the longest completion.
    """
    prompts = [model.encode_prompt(pair.prompt, "skip").ids for pair in pairs]
    context = model.model.config.block_size
    if long := sum(len(prompt) > context for prompt in prompts):
        longer = "1 prompt is longer" if long == 1 else f"{long:,} prompts are longer"
        note(f"{name}: {longer} than the context; the model sees only the end")
    max_new_tokens = 2 * max(len(model.tokenizer.encode(pair.completion, "skip")) for pair in pairs) + 1
    config = GenerationConfig(
        temperature=0.0, max_new_tokens=max_new_tokens, stop=stop, batch_size=batch_size, on_unknown="skip"
    )
    return generate_texts(model, [(prompt, 0) for prompt in prompts], config, name)


def generate_texts(
    model: LanguageModel,
    requests: Sequence[Request],
    config: GenerationConfig,
    name: str,
    unit: str = "answer",
    stop: tuple[str, ...] = (),
) -> list[str]:
    """Generate the text that follows each prompt, and show the progress. name, unit: of the progress bar.

    stop: texts before which the generated ones end, in addition to that of the config.
    """
    order = sorted(range(len(requests)), key=lambda i: len(requests[i][0]))  # batches of prompts of similar lengths
    texts = [""] * len(requests)
    with progress_bar(total=len(requests), unit=unit, desc=name) as progress:
        for batch in model.batches([requests[i] for i in order], config, stop):
            for number, text in zip(batch.numbers, batch.run(), strict=True):
                texts[order[number]] = text
            progress.update(len(batch.numbers))
    return texts


def first_sentence(prompt: str) -> str:
    """Return the first sentence of the document in a prompt: up to ., ! or ? before white space, or a blank line."""
    document = strip_tldr(prompt).strip()
    return " ".join(re.split(r"(?<=[.!?])\s|\n\s*\n", document, maxsplit=1)[0].split())


BASELINES: dict[str, Callable[[str], str]] = {"first_sentence": first_sentence}  # answers without a model


def exact_matches(pairs: Sequence[Pair], answers: Sequence[str]) -> np.ndarray:
    """Return whether each answer equals the completion, ignoring white space at both ends: bool, (n,)."""
    return np.array([pair.completion.strip() == answer.strip() for pair, answer in zip(pairs, answers, strict=True)])


def documents_of(pairs: Sequence[Pair]) -> tuple[np.ndarray, str]:
    """Return each pair's document number, (n,), and the unit, "items" or "pairs".

    Pairs with the same field "item" form one document: a model that knows an item in one language tends to know it in
    others, so their results are not independent.
    """
    if all("item" in pair.fields for pair in pairs):
        _, numbers = np.unique([str(pair.fields["item"]) for pair in pairs], return_inverse=True)
        return numbers, "items"
    return np.arange(len(pairs)), "pairs"


def measure_answers(source: str, pairs: Sequence[Pair], answers: Sequence[str]) -> tuple[list[Measure], dict[str, str]]:
    """Return exact match and ROUGE (0 to 1), chrF and BLEU (0 to 100), and sacrebleu's signatures by metric name.

    ROUGE is the mean F-measure by rouge-score without stemming, which splits words at all but ASCII letters and digits.
    """
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics import BLEU, CHRF

    documents, unit = documents_of(pairs)
    answers = [answer.strip() for answer in answers]
    expected = [pair.completion.strip() for pair in pairs]
    measures = [mean_measure(source, EXACT, unit, documents, exact_matches(pairs, answers))]
    signatures, weights = {}, np.bincount(documents, [len(text) + 1 for text in expected])  # (D,)
    for name, metric in {"chrF": CHRF(), "BLEU": BLEU()}.items():
        # As in sacrebleu.significance, the score is a function of the summed statistics.
        statistics = np.array(metric._extract_corpus_statistics(answers, [expected]))  # (n, S)
        sums = np.zeros((documents.max() + 1, statistics.shape[1]), dtype=np.int64)  # (D, S)
        np.add.at(sums, documents, statistics)

        def score(total: np.ndarray, metric: Any = metric) -> float:
            return metric._compute_score_from_stats(total.tolist()).score

        # A ratio with this influence, in which long completions have more weight, as in the score.
        values = score(sums.sum(axis=0)) * weights + leave_one_out_influence(sums, score) * weights.mean()
        measures.append(Measure(source, name, unit, values, weights, better="higher"))
        signatures[name] = str(metric.get_signature())
    scorer = RougeScorer(list(ROUGE.values()))
    scores = [scorer.score(target, answer) for target, answer in zip(expected, answers, strict=True)]
    for name, kind in ROUGE.items():
        values = np.array([pair_scores[kind].fmeasure for pair_scores in scores])
        measures.append(mean_measure(source, name, unit, documents, values))
    return measures, signatures


def mean_measure(source: str, name: str, unit: str, documents: np.ndarray, values: np.ndarray) -> Measure:
    """Return the mean of `values` (n,) over pairs, with an interval over `documents` (n,)."""
    _, group = np.unique(documents, return_inverse=True)
    return Measure(source, name, unit, np.bincount(group, values), np.bincount(group), better="higher", is_share=True)


def group_rows(
    source: str, pairs: Sequence[Pair], answers: Sequence[str], fields: Sequence[str]
) -> list[dict[str, Any]]:
    """Return a row with the exact match for each group of pairs with equal values in `fields`.

    Fields that some pairs lack are ignored. The list is empty if no field remains.
    """
    if not (fields := [field for field in fields if all(field in pair.fields for pair in pairs)]):
        return []
    documents, unit = documents_of(pairs)
    matches = exact_matches(pairs, answers)
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, pair in enumerate(pairs):
        groups.setdefault(tuple(str(pair.fields[field]) for field in fields), []).append(i)
    return [
        {"by": dict(zip(fields, values, strict=True)), "pairs": len(members)}
        | mean_measure(source, EXACT, unit, documents[members], matches[members]).row()
        for values, members in groups.items()
    ]


# --- evaluation -------------------------------------------------------------------------------------------------------


def evaluate_pairs(
    evaluation: Evaluation,
    model: LanguageModel,
    name: str,
    pairs: list[Pair],
    stop: str | None = None,
    by: Sequence[str] = (),
) -> None:
    """Add measures of the model's answers to the pairs of one source, with the line ends of its training data.

    stop: as in answer_pairs. by: fields for group_rows.
    """
    clean = model.tokenizer.clean
    pairs = [pair._replace(prompt=clean(pair.prompt), completion=clean(pair.completion)) for pair in pairs]
    texts = [text for pair in pairs for text in pair[:2]]
    size = sum(len(text.encode("utf-8", "replace")) for text in texts)
    evaluation.coverage[name] = replace(count_characters(texts, model.tokenizer), bytes=size)
    add_answers(evaluation, name, pairs, answer_pairs(model, name, pairs, stop), by)


def evaluate_baseline(baseline: str, models: Sequence[Evaluation], by: Sequence[str] = ()) -> Evaluation:
    """Evaluate a baseline without a model on the pairs that the models answered."""
    evaluation = Evaluation(baseline)
    for name, pairs in {name: pairs for model in models for name, pairs in model.pairs.items()}.items():
        evaluation.coverage[name] = Coverage()
        add_answers(evaluation, name, pairs, [BASELINES[baseline](pair.prompt) for pair in pairs], by)
    return evaluation


def add_answers(
    evaluation: Evaluation, name: str, pairs: list[Pair], answers: Sequence[str], by: Sequence[str]
) -> None:
    """Add measures of answers to the pairs of one source."""
    measures, evaluation.signatures = measure_answers(name, pairs, answers)
    evaluation.measures += measures
    evaluation.pairs[name] = pairs
    source = {"run": evaluation.run, "of": name}
    evaluation.groups += [source | row for row in group_rows(name, pairs, answers, by)]
    evaluation.answers += [source | pair.fields | {"answer": text} for pair, text in zip(pairs, answers, strict=True)]
