"""How much of its training data a model reproduces: in generated samples, and from the prefixes of passages.

Dimensions: n samples or passages; P tokens per prefix; B batch; V vocabulary.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from folio import UserError
from folio.base.number_format import counted
from folio.base.progress import progress_bar
from folio.data.shards import Dataset, Shard
from folio.decoding.language_model import GenerationConfig, LanguageModel
from folio.decoding.torch_decoder import inference_context
from folio.evaluation.intervals import estimate_mean, share_interval
from folio.evaluation.memorization import (
    TrainingIndex,
    TrainingSearch,
    covering_lengths,
    evenly_spaced,
    maximal_spans,
)
from folio.evaluation.scores import Measure

BATCH_SIZE = 64  # maximum number of samples generated at once
BATCH_TOKENS = 4096  # per forward pass
N_LONGEST_SPANS = 10  # number of spans to show
PREFIX_TOKENS = 50  # prompt length, and length of the expected completion, as in Carlini et al. 2022
MAX_PASSAGES = 1000  # per row of OCCURRENCES
RARE = 0.01  # share of held-out tokens in spans of a length; shorter spans are common phrases
OCCURRENCES = ((1, 1), (2, 9), (10, 99), (100, None))  # minimum and maximum number in the training data


# --- texts ------------------------------------------------------------------------------------------------------------


def generate_samples(model: LanguageModel, count: int, config: GenerationConfig) -> list[np.ndarray]:
    """Generate samples without a prompt: up to config.max_new_tokens ids each. Sample k equals sample.py's sample k."""
    start, config = model.encode_prompt("").ids, config.replace(batch_size=BATCH_SIZE)
    samples: list[list[int]] = [[] for _ in range(count)]
    with progress_bar(total=count, unit="sample", desc="generating") as progress:
        for batch in model.batches([(start, k) for k in range(count)], config):
            for step in batch.steps:
                for k, token in zip(batch.numbers, step.tokens, strict=True):
                    samples[k] += [] if token is None else [token]
            progress.update(len(batch.numbers))
    return [np.array(sample, np.int64) for sample in samples]


def cut_passages(shards: Sequence[Shard], eot: int | None, length: int, drop_last: bool = False) -> list[np.ndarray]:
    """Cut documents into consecutive passages of `length` tokens, without end-of-text tokens.

    No passage crosses the end of a document or shard. drop_last: leave out a document's last passage if it is shorter.
    """
    passages = []
    for shard in shards:
        for document in np.split(shard.ids, np.flatnonzero(shard.ids == eot)):
            document = document[document != eot]
            end = len(document) - (len(document) % length if drop_last else 0)
            passages += [document[start : start + length] for start in range(0, end, length)]
    return passages


# --- spans in generated text ------------------------------------------------------------------------------------------


def span_lengths(chance: int, tokens: int, span: int | None = None) -> list[int]:
    """Return the span lengths to report: powers of two above `chance`, up to `tokens`, and `span` if given."""
    powers = {2**k for k in range(tokens.bit_length()) if chance < 2**k <= tokens}
    return sorted(powers | ({span} if span else set())) or [tokens]


def span_rows(
    index: TrainingIndex, source: str, unit: str, texts: Iterable[np.ndarray], lengths: Sequence[int]
) -> list[dict[str, Any]]:
    """Return a row per length with the share of the tokens that are in training-data spans of at least this length.

    texts: (tokens,) each. source, unit: labels of the texts in the table.
    """
    covering = [covering_lengths(index.longest(ids)) for ids in texts if len(ids)]
    tokens = np.array([len(span_sizes) for span_sizes in covering])
    rows = []
    for length in lengths:
        values = np.array([(span_sizes >= length).sum() for span_sizes in covering])
        rows.append({**share_row(source, f"tokens in spans of {length} or more", unit, values, tokens), "span": length})
    return rows


def longest_spans(search: TrainingSearch, samples: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """Return the longest unique spans of samples, (tokens,) each, in the training data, and where they occur.

    A span that overlaps a longer one is left out.
    """
    spans = [
        (end - start, sample, start, end)
        for sample, ids in enumerate(samples)
        for start, end in maximal_spans(search.index.longest(ids))
    ]
    longest: dict[bytes, tuple[int, int, int, int]] = {}  # keyed by the bytes of the tokens
    for length, sample, start, end in sorted(spans, key=lambda span: (-span[0], *span[1:])):
        if not any(k == sample and start < e and s < end for _, k, s, e in longest.values()):
            longest.setdefault(samples[sample][start:end].tobytes(), (length, sample, start, end))
        if len(longest) == N_LONGEST_SPANS:
            break
    return [
        {"tokens": length, "sample": sample, **search.describe_span(samples[sample], start, end)}
        for length, sample, start, end in longest.values()
    ]


# --- passages continued from their prefixes ---------------------------------------------------------------------------


def prefix_rows(model: LanguageModel, search: TrainingSearch, max_passages: int = MAX_PASSAGES) -> list[dict[str, Any]]:
    """Return how many passages of 2 * P tokens the model completes exactly from their first P, by occurrences.

    This is the measure of Carlini et al. 2022, "Quantifying Memorization Across Neural Language Models", after Carlini
    et al. 2021, "Extracting Training Data from Large Language Models". The completion is by greedy decoding, and P is
    PREFIX_TOKENS, or half the context if it is shorter than two prefixes. The passages of a row do not overlap. The
    first row has held-out passages, which do not occur in the training data. The list is empty if no document is long
    enough.
    """
    length = 2 * max(1, min(PREFIX_TOKENS, model.model.config.block_size // 2))
    index, eot = search.index, model.tokenizer.eot
    held_out = [ids for dataset in search.datasets for ids in cut_passages(dataset.val, eot, length, drop_last=True)]
    unseen = [ids for ids in evenly_spaced(held_out, max_passages) if not index.find(ids)]
    rows = [passages_row(model, "held-out text", 0, 0, unseen)] if unseen else []
    positions, counts = index.unique_spans(length)
    for min_count, max_count in OCCURRENCES:
        in_range = (counts >= min_count) & (counts <= (max_count or len(index.codes)))
        chosen = without_overlap(positions[in_range], length)
        passages = [index.ids_at(position, length) for position in evenly_spaced(chosen, max_passages)]
        rows += [passages_row(model, "training data", min_count, max_count, passages)] if passages else []
    return rows


def passages_row(
    model: LanguageModel, source: str, min_count: int, max_count: int | None, passages: Sequence[np.ndarray]
) -> dict[str, Any]:
    """Return how much the model reproduces of passages, (2 * P,) each, with `min_count` to `max_count` occurrences."""
    reproduced = tokens_reproduced(model, np.stack(passages).astype(np.int64))
    P = len(passages[0]) // 2
    exact = (reproduced == P).astype(np.int64)
    row = share_row(source, f"next {P} tokens reproduced", "passages", exact, np.ones_like(exact))
    mean = estimate_mean(reproduced)
    low, high = (None, None) if mean.low is None else (max(0.0, mean.low), min(float(P), mean.high))
    before_error = {"value": mean.value, "low": low, "high": high}
    return {**row, "prefix": P, "occurrences": [min_count, max_count], "tokens_before_error": before_error}


def without_overlap(positions: np.ndarray, length: int) -> list[int]:
    """Select positions greedily, in ascending order, that are at least `length` apart."""
    positions, chosen = np.sort(positions), []
    i = 0
    while i < len(positions):
        chosen.append(int(positions[i]))
        i = int(np.searchsorted(positions, chosen[-1] + length))
    return chosen


@torch.inference_mode()
def tokens_reproduced(model: LanguageModel, passages: np.ndarray) -> np.ndarray:
    """Return how many tokens greedy decoding reproduces after the first P of passages (n, 2 * P): (n,).

    Greedy decoding reproduces a passage up to the first token that is not the most likely one given the tokens before
    it. So one forward pass over the passage is enough.
    """
    gpt, runtime, half = model.model, model.runtime, passages.shape[1] // 2
    rows = max(1, BATCH_TOKENS // passages.shape[1])
    reproduced = []
    for first in range(0, len(passages), rows):
        ids = torch.from_numpy(passages[first : first + rows]).to(runtime.device)  # (B, 2 * P)
        with inference_context(gpt, runtime):
            logits = gpt.logits(ids[:, :-1])  # (B, 2 * P - 1, V)
        greedy = logits[:, half - 1 :, : model.tokenizer.vocab_size].argmax(dim=-1)  # (B, P)
        correct = greedy == ids[:, half:]
        reproduced.append(correct.long().cumprod(dim=1).sum(dim=1).cpu().numpy())
    return np.concatenate(reproduced)


# --- table rows -------------------------------------------------------------------------------------------------------


def share_row(source: str, name: str, unit: str, values: np.ndarray, weights: np.ndarray) -> dict[str, Any]:
    """Return the share sum(values) / sum(weights) of n samples as a row with a 95 % interval. values, weights: (n,).

    The interval is Student's t over samples. If each sample's share is 0 or 1 (a passage is reproduced or not), the
    variance may be 0 by chance, so Wilson's interval replaces it.
    """
    row, shares = Measure(source, name, unit, values, weights).row(), values / weights
    if np.isin(shares, (0, 1)).all() and 1 in (len(np.unique(shares)), len(np.unique(weights))):
        row["low"], row["high"] = share_interval(int(shares.sum()), len(shares))
    elif row["low"] is not None:
        row["low"], row["high"] = max(0.0, row["low"]), min(1.0, row["high"])
    return row


# --- report -----------------------------------------------------------------------------------------------------------


def measure_reproduction(
    model: LanguageModel, datasets: list[Dataset], samples: int, config: GenerationConfig, span: int | None = None
) -> dict[str, Any]:
    """Measure what a model reproduces of its training data sets: spans in samples, and completions of passages.

    span: an additional length to report. Raises UserError if the model generates nothing.
    """
    texts = generate_samples(model, samples, config)
    if not any(map(len, texts)):
        raise UserError("the model generates no text: every sample is empty; use a trained model")
    search, tokens, eot = TrainingSearch(datasets, model.tokenizer), config.max_new_tokens, model.tokenizer.eot
    pieces = [ids for dataset in datasets for ids in cut_passages(dataset.val, eot, tokens)]
    chance = search.index.chance(tokens)
    lengths = span_lengths(chance, tokens, span)
    return {
        "datasets": [dataset.folder.name for dataset in datasets],
        "searched": search.index.searched,
        "complete": search.index.complete,
        "masked": any(shard.mask is not None for dataset in datasets for shard in dataset.train),
        "samples": samples,
        "empty_samples": sum(not len(ids) for ids in texts),
        "max_new_tokens": tokens,
        "temperature": config.temperature,
        "seed": config.seed,
        "chance": chance,
        "spans": [
            *span_rows(search.index, "samples", "samples", texts, lengths),
            *span_rows(search.index, "held-out text", "pieces", evenly_spaced(pieces, samples), lengths),
        ],
        "longest": longest_spans(search, texts),
        "passages": prefix_rows(model, search),
        "block_size": model.model.config.block_size,
    }


def describe_reproduction(facts: dict[str, Any]) -> str:
    """Format the results of measure_reproduction for a run."""
    data = ", ".join(facts["datasets"])
    searched = f"{facts['searched']:,} training tokens of {data}"
    if not facts["complete"]:
        searched = f"first {searched}; the rest was not searched, so more may be memorized"
    generated = {row["span"]: row for row in facts["spans"] if row["of"] == "samples"}
    held_out = {row["span"]: row for row in facts["spans"] if row["of"] == "held-out text"}
    size = facts["max_new_tokens"]
    lines = [
        summarize(facts["run"], generated, held_out, facts["passages"]),
        f"{facts['run']}: {counted(facts['samples'], 'sample')} of up to {counted(size, 'token')}, with temperature "
        f"{facts['temperature']:g} and seed {facts['seed']}. Searched: the {searched}.",
        f"Random text of {size:,} tokens is unlikely to share a span of more than {facts['chance']} tokens with them.",
    ]
    if facts["empty_samples"]:
        lines.append(f"{facts['empty_samples']:,} of the samples are empty.")
    if facts["masked"]:
        lines.append(
            "Some training tokens, such as prompts, were masked, so the model did not learn to generate them: results "
            "for samples without a prompt, and for passages that contain one, mean little."
        )
    lines += [
        "",
        f"| tokens in spans of | {facts['samples']:,} samples | held-out text, in pieces of {size:,} tokens |",
        "|---|---|---|",
        *(f"| {n} or more | {format_share(row)} | {format_share(held_out[n])} |" for n, row in generated.items()),
        "",
        "The longest spans of the samples that occur in the training data:",
        *map(describe_span, facts["longest"]),
        "",
    ]
    if not facts["passages"]:
        return "\n".join([*lines, "No document is long enough to complete it from a prefix."])
    P = facts["passages"][0]["prefix"]
    reason = f", because the context has {facts['block_size']} tokens" if P < PREFIX_TOKENS else ""
    lines += [
        f"{2 * P}-token passages, continued greedily from their first {P} tokens{reason}:",
        "",
        f"| occurrences in the training data | passages | next {P} tokens reproduced | tokens before the first error |",
        "|---|---|---|---|",
    ]
    for row in facts["passages"]:
        mean = row["tokens_before_error"]
        interval = "" if mean["low"] is None else f" ({max(mean['low'], 0):.1f} to {min(mean['high'], P):.1f})"
        times = describe_occurrences(*row["occurrences"])
        lines.append(f"| {times} | {row['n']:,} | {format_share(row)} | {mean['value']:.1f}{interval} |")
    return "\n".join(lines)


def summarize(
    run: str,
    generated: dict[int, dict[str, Any]],
    held_out: dict[int, dict[str, Any]],
    passages: Sequence[dict[str, Any]],
) -> str:
    """Summarize in one sentence how much a model copies, compared with validation text.

    generated, held_out: the rows of span_rows by length. passages: prefix_rows. Validation text shares common phrases
    with the training data, too, so the sentence is about spans of a length that is rare there.
    """
    length = next((n for n, row in held_out.items() if row["value"] < RARE), max(held_out))
    samples, validation = generated[length], held_out[length]
    verdict = "may copy more than"  # the intervals overlap, or are unknown
    if samples["value"] <= validation["value"]:
        verdict = "does not copy more than"
    elif None not in (samples["low"], validation["high"]) and samples["low"] > validation["high"]:
        verdict = "copies more than"
    sentence = (
        f"{run} {verdict} text that it was not trained on: {samples['value']:.2%} of the tokens of its samples are in "
        f"spans of {length} or more tokens of the training data, and {validation['value']:.2%} of the validation text's"
    )
    counts = [
        (round(sum(row["value"] * row["n"] for row in rows)), sum(row["n"] for row in rows))
        for rows in ([row for row in passages if row["of"] == of] for of in ("training data", "held-out text"))
    ]
    (reproduced, n), (by_chance, n_held_out) = counts
    if n:
        sentence += f"; it continues {reproduced:,} of {counted(n, 'training passage')} exactly"
        sentence += f", and {by_chance:,} of {counted(n_held_out, 'validation passage')}" if n_held_out else ""
    return f"{sentence}."


def format_share(row: dict[str, Any]) -> str:
    """Format a share and its interval in percent."""
    interval = "" if row["low"] is None else f" ({100 * row['low']:.2f} to {100 * row['high']:.2f})"
    return f"{100 * row['value']:.2f} %{interval}"


def describe_span(span: dict[str, Any]) -> str:
    """Format a span and its first occurrence."""
    times = "once" if span["count"] == 1 else f"{span['count']:,} times"
    shard = f", shard {span['shard']} of {span['shards']}" if span["shards"] > 1 else ""
    return (
        f"  {span['tokens']} tokens, in sample {span['sample']}, {times}, first in {span['dataset']}{shard} at token "
        f"{span['offset']:,}: {json.dumps(span['text'], ensure_ascii=False)}"
    )


def describe_occurrences(min_count: int, max_count: int | None) -> str:
    """Format a range of numbers of occurrences."""
    if not max_count:
        return "0, held-out text" if max_count == 0 else f"{min_count} or more"
    return str(min_count) if min_count == max_count else f"{min_count} to {max_count}"
