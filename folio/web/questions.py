"""Answers the viewer's questions about models: what a text makes a model compute, in numbers that a page can draw.

A question is JSON; an answer is facts (JSON) and tensors by name. The page (page/) knows nothing else about where
the numbers come from.

Dimensions: T time, C channels, H heads, D head size, V vocabulary, L layers.
"""

import json
import math
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from folio import UserError
from folio.base import settings
from folio.base.settings import NonNegativeInt, Settings
from folio.data.sources.music import pitch_name, place_notes
from folio.decoding.language_model import LanguageModel
from folio.decoding.prompts import encode_prompt
from folio.evaluation.memorization import TrainingSearch, covering_lengths
from folio.evaluation.overlap import open_training_data
from folio.web.engine import Engine
from folio.web.playground import MOST_SAMPLES, GenerationQuestion, SampleLines
from folio.web.trace import HEAD_SCORES, Heads, Switches, Trace, head_scores, repeated_random_ids
from folio.web.viewed_model import Cache, ViewedModel
from model import GPT, angles, sinusoids

MOST_CHARACTERS = 100_000  # of a text in a question
THUMBNAIL = 32  # queries and keys of a head's small picture
LENS = 5  # tokens that the logit lens shows for each state
LENS_TOKENS = 12  # tokens of the text whose lens is shown together
PUSHED = 5  # tokens whose logits a vector raises or lowers most
NEURONS = 16  # of an MLP, the strongest ones
MAP_TOKENS = 1000  # of a vocabulary, the first ones, on the map
NEIGHBORS = 12  # of a token
PROBE_TOKENS = 128  # random tokens on which prefix matching is measured
LARGEST_PICTURE = 256  # rows and columns of a parameter's heat map; larger ones are averaged
HISTOGRAM_BINS = 64
TRACES = 4  # to keep
ROWS = 4 * MOST_SAMPLES  # of samples that are generated at a time

Q = TypeVar("Q", bound="Question | GenerationQuestion")


class Answer(NamedTuple):
    """The answer to a question."""

    facts: dict[str, Any]  # JSON
    tensors: Mapping[str, Tensor] = MappingProxyType({})

    def to_bytes(self) -> bytes:
        """The length of the header (uint32), the header as JSON, and the tensors as float32, int32 or uint8.

        Everything is little-endian, and aligned to 4 bytes. JSON has no NaN and no infinity: facts are then null.
        """
        arrays = {name: _array(tensor) for name, tensor in self.tensors.items()}
        kinds = {name: {"dtype": array.dtype.name, "shape": array.shape} for name, array in arrays.items()}
        header = json.dumps(_finite({**self.facts, "tensors": kinds}), allow_nan=False).encode()
        parts = [header, *(array.tobytes() for array in arrays.values())]
        padded = [part + b" " * (-len(part) % 4) for part in parts]
        return len(padded[0]).to_bytes(4, "little") + b"".join(padded)


def _finite(value: Any) -> Any:
    """JSON in which numbers that are NaN or infinite are None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _array(tensor: Tensor) -> np.ndarray:
    """A tensor on the CPU in one of the three types of an answer."""
    if tensor.dtype == torch.uint8:
        return tensor.numpy()
    return (tensor.float() if tensor.is_floating_point() else tensor.int()).numpy()


@dataclass(frozen=True)
class Question(Settings):
    """What a page asks. Most fields matter to some kinds of questions only."""

    kind: str = ""  # one of TraceProvider.questions
    model: NonNegativeInt = 0  # which of the models
    step: NonNegativeInt | None = None  # which checkpoint of its run; None: the one that was opened
    layer: NonNegativeInt = 0
    head: NonNegativeInt = 0
    token: NonNegativeInt = 0  # a position in the text
    source: NonNegativeInt = 0  # how many tokens the source of an answer has, from the beginning of the text
    name: str = ""  # of a parameter
    row: NonNegativeInt | None = None  # of the parameter, None: all of them; or a token id, for its nearest ones
    since: NonNegativeInt = 0  # a step of the run, after which to answer; 0: from the beginning
    text: str = ""
    # as in Switches
    mask: Literal["before", "after", "off"] = "before"
    scale: bool = True
    heads_off: str = ""  # LAYER.HEAD, separated by commas
    mlps_off: str = ""  # layers, separated by commas
    # a list of token ids, checked by TraceProvider
    ids: tuple[int, ...] = ()
    whole: bool = False  # True: all ids of a text that is longer than the context


class TraceProvider:
    """Answers questions about one or two models. It may be asked by many threads, and answers one at a time."""

    def __init__(self, models: list[ViewedModel], text: str, data_dir: str | None = None):
        """text: to show first. data_dir: where to look for the training data if it is not where it was."""
        self.models, self.text, self.data_dir = models, text, data_dir
        self.lock = threading.Lock()
        self.traces = Cache(TRACES)
        self.probes = Cache(1000)  # prefix-matching scores (L, H) by _version
        self.engines = Cache(2)  # by _version
        self.searches = Cache(2)  # TrainingSearch by the hash of the training data
        self.maps = Cache(8)  # of vocabularies, by _version
        self.questions: dict[str, Callable[[Question], Answer]] = {
            "models": self.describe,
            "tokens": self.tokens,
            "overview": self.overview,
            "head": self.head,
            "layer": self.layer,
            "alignment": self.alignment,
            "notes": self.notes,
            "token": self.token,
            "lens": self.lens,
            "logits": self.logits,
            "parameter": self.parameter,
            "vocabulary": self.vocabulary,
            "positions": self.positions,
            "memorized": self.memorized,
            "run": self.run,
        }

    def answer(self, asked: Any) -> Answer:
        """The answer to a question that was read from JSON. Raises UserError if it makes no sense."""
        question = self._read(Question, asked)
        if question.kind not in self.questions:
            raise UserError(f"kind={question.kind!r}: it is none of {', '.join(self.questions)}")
        if len(question.ids) > self._viewed(question).limit:
            raise UserError(f"ids: {len(question.ids):,} tokens are more than {self._viewed(question).limit:,}")
        with self.lock, torch.no_grad():  # not in inference mode, whose tensors a sampler cannot use
            torch.set_float32_matmul_precision("highest")  # a sampler on a GPU sets another one
            facts, tensors = self.questions[question.kind](question)
            return Answer(facts, {name: tensor.cpu() for name, tensor in tensors.items()})  # before others use the GPU

    def sampler(self, asked: Any) -> tuple[Engine, SampleLines]:
        """What generates samples that continue the token ids of a question, and how they are sent. Raises UserError.

        First comes {"begun": [text, ...]}, the text that each of the last `begun` ids completes; then
        {"samples": [[id, text, probability, [[id, probability], ...]], ...]}, the next token of each sample: the token,
        the text that it completes, and the most likely of the other tokens. Probabilities are the model's own, before
        temperature and filters. A sample without a new token is null. When it has ended, it is once [null, the rest of
        its text, why it ended].
        """
        question = self._read(GenerationQuestion, asked)
        viewed = self._viewed(question)
        require_ids(question)
        with self.lock:
            engine = self.engines.get(
                self._version(question),
                lambda: Engine(LanguageModel(viewed.at(question.step), viewed.tokenizer, str(viewed.device)), ROWS),
            )
        return engine, SampleLines(viewed.tokenizer, question)

    def close(self) -> None:
        """End what generates samples."""
        for engine in self.engines.values.values():
            engine.close()

    # --- what is asked about ------------------------------------------------------------------------------------------

    def _read(self, kind: type[Q], asked: Any) -> Q:
        """A question that was read from JSON. Raises UserError."""
        if not isinstance(asked, dict):
            raise UserError("a question is a JSON object")
        fields = dict(asked)
        ids = fields.pop("ids", [])
        question = settings.from_json(kind, fields)
        if question.model >= len(self.models):
            raise UserError(f"model={question.model}: there are {len(self.models)}")
        size = self._viewed(question).tokenizer.vocab_size  # the model's may be padded
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < size for i in ids):
            raise UserError(f"ids: it takes a list of token ids from 0 to {size - 1:,}")
        return replace(question, ids=tuple(ids))

    def _viewed(self, question: Question | GenerationQuestion) -> ViewedModel:
        return self.models[question.model]

    def _version(self, question: Question | GenerationQuestion) -> Hashable:
        """What identifies a checkpoint in the caches. Raises UserError."""
        return question.model, self._viewed(question).version(question.step)

    def _switches(self, question: Question) -> Switches:
        """The switches of a question. Raises UserError."""
        config = self._viewed(question).opened.config
        try:
            pairs = [pair.split(".") for pair in filter(None, question.heads_off.split(","))]
            heads = sorted({(int(layer), int(head)) for layer, head in pairs})
            mlps = sorted({int(layer) for layer in filter(None, question.mlps_off.split(","))})
        except ValueError:
            raise UserError("heads_off takes LAYER.HEAD, and mlps_off layers, separated by commas") from None
        layers, every_head = range(config.n_layer), range(config.n_head)
        if not all(layer in layers and head in every_head for layer, head in heads) or not {*mlps} <= {*layers}:
            raise UserError(f"the model has {config.n_layer} layers of {config.n_head} heads")
        return Switches(question.mask, question.scale, tuple(heads), tuple(mlps))

    def _trace(self, question: Question) -> "ViewedTrace":
        """The trace that a question is about. Raises UserError."""
        viewed = self._viewed(question)
        config, ids, switches = viewed.opened.config, question.ids, self._switches(question)
        require_ids(question)
        if question.layer >= config.n_layer or question.head >= config.n_head or question.token >= len(ids):
            raise UserError(f"there are {config.n_layer} layers, {config.n_head} heads, and {len(ids):,} tokens")
        key = (self._version(question), ids, switches)
        return self.traces.get(key, lambda: ViewedTrace(viewed.at(question.step), ids, switches))

    # --- questions ----------------------------------------------------------------------------------------------------

    def describe(self, question: Question) -> Answer:
        """The models, the texts of their tokens, and the bytes (hexadecimal, by id) of tokens that are not text."""
        first, size = self.models[0], max(viewed.opened.config.vocab_size for viewed in self.models)
        pieces = [first.piece(token) for token in range(size)]
        not_text = [token for token, piece in enumerate(pieces) if not piece or first.content(token) != piece.encode()]
        facts = {
            "models": [viewed.describe() for viewed in self.models],
            "pieces": pieces,
            "bytes": {token: first.content(token).hex(" ") for token in not_text},
            "text": self.text,
        }
        return Answer(facts)

    def tokens(self, question: Question) -> Answer:
        """The ids of a text, as in sample.py; at most as many as the context holds, if `whole` is False."""
        viewed = self._viewed(question)
        if len(question.text) > MOST_CHARACTERS:
            raise UserError(f"text: it has {len(question.text):,} characters; the limit is {MOST_CHARACTERS:,}")
        ids, _, unknown = encode_prompt(viewed.tokenizer, question.text, "skip")
        return Answer({"ids": ids if question.whole else ids[: viewed.limit], "tokens": len(ids), "unknown": unknown})

    def overview(self, question: Question) -> Answer:
        """Every token's loss, and every head in small."""
        trace = self._trace(question)
        predictions = trace.trace.predictions
        scores = {**trace.scores, "prefix": self._prefix_scores(question)}
        tensors = {
            **predictions._asdict(),
            "norms": trace.trace.stream.norm(dim=-1),  # (2L + 1, T)
            "thumbnails": trace.thumbnails,  # (L, H, n, n) of uint8
            **{f"score_{name}": scores[name] for name in HEAD_SCORES},  # (L, H) each
        }
        return Answer({"mean_loss": predictions.loss.mean().item()}, tensors)

    def _prefix_scores(self, question: Question) -> Tensor:
        """The prefix-matching scores of all heads on random tokens that repeat: (L, H)."""
        viewed = self._viewed(question)

        def measure() -> Tensor:
            ids = tuple(probe_ids(viewed.tokenizer.vocab_size, viewed.limit))
            return ViewedTrace(viewed.at(question.step), ids, Switches()).scores["prefix"]

        return self.probes.get(self._version(question), measure)

    def head(self, question: Question) -> Answer:
        """Everything that a head computed."""
        heads = self._trace(question).trace.layer(question.layer).heads
        tensors = {name: t[question.head] for name, t in heads._asdict().items() if t is not None}
        return Answer({}, tensors)

    def layer(self, question: Question) -> Answer:
        """What a layer computed for a token, and what that changes in the prediction."""
        trace, token = self._trace(question).trace, question.token
        layer, block = trace.layer(question.layer), trace.model.transformer.h[question.layer]
        by_head = trace.head_outputs(question.layer, token)  # (H, C)
        written = block.mlp.c_proj.weight * layer.hidden[token]  # (C, 4C)
        strongest = written.norm(dim=0).topk(min(NEURONS, written.shape[1])).indices
        added = torch.cat([by_head, written.T[strongest]])
        pushed = pushed_tokens(trace, added, token)
        H = len(by_head)
        facts = {
            "heads": pushed[:H],
            "neurons": [
                {"index": index, **pushes} for index, pushes in zip(strongest.tolist(), pushed[H:], strict=True)
            ],
        }
        names = ("ln_1", "qkv", "attention", "ln_2", "preactivation", "hidden", "mlp")
        tensors = {
            **{name: getattr(layer, name)[token] for name in names},
            **{name: getattr(layer.heads, name)[:, token] for name in ("q", "k", "v", "z")},  # (H, D) each
            "weights": layer.heads.weights[:, token],  # (H, T)
            "head_outputs": by_head,
            "separate_heads": trace.separate_heads(question.layer, token),  # (3, H, D)
            "column_norms": block.mlp.c_proj.weight.norm(dim=0),  # of what a neuron of 1 writes (4C)
            "written": written.sum(1),  # by all neurons, without c_proj's bias and even if the MLP is off (C)
            "before": trace.stream[2 * question.layer, token],
            "between": trace.stream[2 * question.layer + 1, token],
            "after": trace.stream[2 * question.layer + 2, token],
        }
        return Answer(facts, tensors)

    def alignment(self, question: Question) -> Answer:
        """What the tokens from `token` on look at in the source, the first S tokens: a head's weights (N, S).

        heads: [layer, head, coverage] of all heads, those with the largest coverage first. It is the largest weight of
        each source token, averaged over the source.
        """
        trace, weights, heads = self._trace(question).trace, torch.empty(0), []
        for layer in range(trace.model.config.n_layer):
            of_layer = trace.layer(layer).heads.weights[:, question.token :, : question.source]
            coverage = of_layer.amax(1).mean(-1).tolist()
            heads += [[layer, head, score] for head, score in enumerate(coverage)]
            if layer == question.layer:
                weights = of_layer[question.head]
        return Answer({"heads": sorted(heads, key=lambda row: -row[2])}, {"weights": weights})

    def notes(self, question: Question) -> Answer:
        """The notes of a piece, and how much each head of a layer looks at them from a token.

        weights (H, N + 1): a note's is the sum of the weights of its events, and the last one the sum of those that
        belong to no note. on, off: the places of a note's note-on and note-off, off is None if it is still sounding at
        the end. note: the one that the token belongs to, -1 for none. Times are in beats or seconds (`unit`); seconds:
        of a unit; before, time, end: before and after the token, and of the text.
        """
        viewed, trace, token = self._viewed(question), self._trace(question).trace, question.token
        if not viewed.music:
            raise UserError("the model's tokens are not events of music")
        placed, times = place_notes([viewed.piece(id).strip() for id in question.ids], viewed.music)
        steps, owner = viewed.music.steps, torch.full((len(times),), len(placed))
        for number, note in enumerate(placed):
            owner[[place for place in (note.on, note.velocity, note.off) if place is not None]] = number
        notes = [
            {
                "name": pitch_name(note.pitch),
                "start": note.start / steps,
                "end": note.end / steps,
                "pitch": note.pitch,
                "velocity": note.velocity,
                "on": on,
                "off": off,
            }
            for note, on, _, off in placed
        ]
        weights = trace.layer(question.layer).heads.weights[:, token]  # (H, T)
        by_note = weights.new_zeros(len(weights), len(placed) + 1).index_add(1, owner.to(weights.device), weights)
        facts = {
            "notes": notes,
            "unit": viewed.music.time,
            "seconds": viewed.music.seconds_per_step * steps,
            "note": owner[token].item() if owner[token] < len(placed) else -1,
            "before": times[token - 1] / steps if token else 0,
            "time": times[token] / steps,
            "end": times[-1] / steps,
        }
        return Answer(facts, {"weights": by_note})

    def token(self, question: Question) -> Answer:
        """A token's embedding, and its way through the residual stream."""
        trace, token = self._trace(question).trace, question.token
        model, states = trace.model, trace.stream[:, token]  # (2L + 1, C)
        following = trace.ids[token + 1].item() if token + 1 < len(trace.ids) else None
        lens = trace.lens(states, LENS, following)
        position = torch.tensor(token, device=states.device)
        embedding = model.transformer.wte.weight[trace.ids[token]]
        tensors = {
            "states": states,
            "lens_ids": lens.ids,  # (2L + 1, k)
            "lens_probabilities": lens.probabilities,
            "embedding": embedding,
            "position": model.embed(trace.ids[token], position) - embedding,
        }
        if following is not None:
            tensors |= {"next_probability": lens.target_probability, "next_rank": lens.target_rank}  # (2L + 1) each
        return Answer({}, tensors)

    def lens(self, question: Question) -> Answer:
        """The most likely next token of each state of the residual stream, for the tokens around one: (2L + 1, N)."""
        trace = self._trace(question).trace
        first = max(0, min(question.token - LENS_TOKENS // 2, len(trace.ids) - LENS_TOKENS))
        shown = range(first, min(first + LENS_TOKENS, len(trace.ids)))
        lenses = [trace.lens(trace.stream[:, token], 1) for token in shown]  # one by one, because V is large
        tensors = {
            "ids": torch.cat([lens.ids for lens in lenses], dim=1),
            "probabilities": torch.cat([lens.probabilities for lens in lenses], dim=1),
        }
        return Answer({"first": first}, tensors)

    def logits(self, question: Question) -> Answer:
        """The logits after a token, before any filter."""
        trace = self._trace(question).trace
        return Answer({}, {"logits": trace.logits(trace.stream[-1, question.token])})

    def parameter(self, question: Question) -> Answer:
        """A parameter, averaged over blocks if it is large, and the distribution of its finite values; or one row."""
        parameters = dict(self._viewed(question).at(question.step).named_parameters())
        if question.name not in parameters:
            raise UserError(f"name={question.name!r}: it is not a parameter of the model")
        rows = torch.atleast_2d(parameters[question.name].detach())
        if question.row is not None:
            if question.row >= len(rows):
                raise UserError(f"row={question.row}: {question.name} has {len(rows):,}")
            return Answer({}, {"row": rows[question.row]})
        rows = rows.cpu()
        picture = F.adaptive_avg_pool2d(rows[None], [min(n, LARGEST_PICTURE) for n in rows.shape])[0]
        finite = rows[rows.isfinite()].double()  # in float32, values near 1 may be too close for so many bins
        counts, edges = np.histogram(finite.numpy(), HISTOGRAM_BINS)
        mean, deviation = (finite.mean().item(), finite.std(unbiased=False).item()) if len(finite) else (None, None)
        facts = {"mean": mean, "deviation": deviation, "edges": edges.tolist(), "counts": counts.tolist()}
        return Answer(facts, {"picture": picture})

    def vocabulary(self, question: Question) -> Answer:
        """The nearest tokens of a token id (`row`) by the cosine of their embeddings, and a map of the vocabulary.

        The map shows the first MAP_TOKENS tokens in the plane of the two largest principal components of all of them.
        place, nearest_places: where the token and the nearest ones are on it.
        """
        viewed = self._viewed(question)
        table = viewed.at(question.step).transformer.wte.weight[: viewed.tokenizer.vocab_size]  # (V, C)
        token = question.row or 0
        if token >= len(table):
            raise UserError(f"row={token}: there are {len(table):,} tokens")
        if not table.isfinite().all():
            raise UserError("the token embeddings contain NaN or infinity")
        mean, plane, share = self.maps.get(self._version(question), lambda: principal_plane(table))
        similarity = F.cosine_similarity(table, table[token][None], dim=-1)
        nearest = similarity.topk(min(NEIGHBORS + 1, len(table)))
        tensors = {
            "map": (table[:MAP_TOKENS] - mean) @ plane,
            "share": share,
            "nearest": nearest.indices,
            "similarity": nearest.values,
            "place": (table[token] - mean) @ plane,  # (2,)
            "nearest_places": (table[nearest.indices] - mean) @ plane,  # (N, 2)
        }
        return Answer({}, tensors)

    def positions(self, question: Question) -> Answer:
        """What the position method adds, rotates by, or subtracts.

        table, sinusoids (T, C): the vectors added, and those of Vaswani et al.; similarity (T, T): the cosines of the
        table's rows. angles (T, D / 2): of rotary, in radians. bias (H, T): added to a score at each distance.
        """
        viewed = self._viewed(question)
        model, config = viewed.at(question.step), viewed.opened.config
        positions = torch.arange(viewed.limit, device=viewed.device)
        tensors = {}
        if config.position in ("learned", "sinusoidal"):
            nothing = torch.zeros(1, 1, dtype=torch.long, device=viewed.device).expand(1, viewed.limit)
            table = (model.embed(nothing, positions) - model.transformer.wte(nothing))[0]
            normed = F.normalize(table, dim=-1)
            tensors = {
                "table": table,
                "similarity": normed @ normed.T,
                "sinusoids": sinusoids(positions, config.n_embd),
            }
        elif config.position == "rotary":
            tensors = {"angles": angles(positions, config.n_embd // config.n_head)}
        elif config.biases_scores:
            bias = model.attention_mask(positions[-1:], positions)  # (1, H, 1, T)
            tensors = {"bias": bias[0, :, 0].flip(-1)}
        return Answer({"method": config.position}, tensors)

    def run(self, question: Question) -> Answer:
        """ViewedModel.progress: facts, and a tensor for each metric. Nothing for a model without a run."""
        facts, columns = self._viewed(question).progress(question.since)
        return Answer(facts, {name: torch.tensor(column) for name, column in columns.items()})

    def memorized(self, question: Question) -> Answer:
        """The spans of the text that occur in the training data and are longer than chance gives, and where they occur.

        longest, covering (T,): the lengths of the longest spans that occur, from each token and covering it. If the
        data cannot be searched, the only fact is the reason.
        """
        viewed = self._viewed(question)
        require_ids(question)

        def index() -> TrainingSearch:
            return TrainingSearch(open_training_data(viewed.saved, self.data_dir), viewed.tokenizer)

        data_hash = viewed.saved.state.get("dataset", {}).get("hash")
        try:
            training = self.searches.get(data_hash, index)
        except UserError as problem:  # not cached: the data may come back
            return Answer({"reason": str(problem)})
        facts, longest = training.search(np.array(question.ids))
        tensors = {"longest": torch.from_numpy(longest), "covering": torch.from_numpy(covering_lengths(longest))}
        return Answer({"reason": None, **facts, "init_from": viewed.settings.get("init_from")}, tensors)


def probe_ids(vocab_size: int, limit: int) -> list[int]:
    """Random tokens that repeat, at most `limit`, on which prefix matching is measured."""
    return repeated_random_ids(vocab_size, min(PROBE_TOKENS, limit)).tolist() or [0]


def require_ids(question: Question | GenerationQuestion) -> None:
    if not question.ids:
        raise UserError("ids: there must be at least one token")


class ViewedTrace:
    """A trace, and what is kept of its heads: small pictures and scores."""

    def __init__(self, model: GPT, ids: tuple[int, ...], switches: Switches):
        tensor = torch.tensor(ids, device=model.transformer.wte.weight.device)
        thumbnails: list[Tensor] = []
        scores: list[dict[str, Tensor]] = []

        def summarize(layer: int, heads: Heads) -> None:
            # The largest weight of each block: a thin diagonal remains. On Apple's GPUs it is wrong (pytorch#190064).
            small = F.adaptive_max_pool2d(heads.weights[None].cpu(), min(THUMBNAIL, len(ids)))[0]
            thumbnails.append((small.clamp(0, 1).sqrt() * 255).round().byte())
            scores.append(head_scores(heads.weights, tensor))

        self.trace = Trace(model, tensor, switches, summarize)
        self.thumbnails = torch.stack(thumbnails)  # (L, H, n, n): square roots of the largest weights
        self.scores = {name: torch.stack([layer[name] for layer in scores]) for name in HEAD_SCORES}  # (L, H) each


def pushed_tokens(trace: Trace, added: Tensor, token: int) -> list[dict[str, Any]]:
    """The tokens whose logits each of the vectors (N, C) raises and lowers most."""
    effect = trace.effect(added, token)  # (N, V)
    k = min(PUSHED, effect.shape[-1])
    up, down = effect.topk(k), effect.topk(k, largest=False)
    return [
        {
            "up": list(zip(up.indices[n].tolist(), up.values[n].tolist(), strict=True)),
            "down": list(zip(down.indices[n].tolist(), down.values[n].tolist(), strict=True)),
        }
        for n in range(len(added))
    ]


def principal_plane(table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean of the rows of a table (V, C), their two largest principal components (C, 2), and the components' shares
    of the variance (2,)."""
    mean = table.mean(0)
    centered = table - mean
    variances, directions = torch.linalg.eigh((centered.T @ centered).cpu().double())  # ascending
    plane = directions[:, -2:].flip(-1)
    plane = torch.where(plane.sum(0) < 0, -plane, plane)  # the sign of an eigenvector is arbitrary
    share = variances.flip(0)[:2] / variances.sum().clamp(min=1e-30)
    return mean, plane.to(table), share
