"""Answers the viewer's questions about models: the values of a forward pass over a text, as data for charts.

A question is JSON. An answer consists of facts (JSON) and named tensors. The page (page/) gets all numbers this way.

Dimensions: T time, C channels, H heads, D head size, V vocabulary, L layers.
"""

import json
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from folio import UserError
from folio.base import settings
from folio.base.files import finite
from folio.base.settings import NonNegativeInt, Settings
from folio.checkpoints.training_data import open_training_data
from folio.data.sources.music import pitch_name, place_notes
from folio.decoding.language_model import LanguageModel
from folio.decoding.prompts import encode_prompt
from folio.decoding.trace import HEAD_SCORES, Heads, Switches, Trace, head_scores, repeated_random_ids
from folio.evaluation.memorization import (
    OVERLAP_TOKENS,
    TrainingIndex,
    TrainingSearch,
    covering_lengths,
    find_overlap,
)
from folio.web.engine import Engine
from folio.web.playground import MAX_SAMPLES, GenerationQuestion, SampleLines
from folio.web.viewed_model import LRUCache, ViewedModel
from model import GPT, GPTConfig, angles, score_biases, sinusoids

KINDS = (  # of questions, each answered by a method of TraceProvider with this name
    *("models", "tokens", "overview", "head", "layer", "machine", "alignment", "notes", "token", "lens", "logits"),
    *("parameter", "vocabulary", "positions", "memorized", "overlap", "run"),
)
MAX_CHARACTERS = 100_000  # per text
THUMBNAIL_SIZE = 64  # rows and columns of a head's thumbnail
LENS_TOP_K = 5  # tokens per state of the logit lens
LENS_POSITIONS = 12  # tokens of the text shown in one logit lens
TOP_EFFECTS = 5  # tokens with the largest positive and negative logit effects
TOP_NEURONS = 16  # strongest neurons of an MLP
MAP_TOKENS = 1000  # first tokens of the vocabulary, shown on its map
NEIGHBORS = 12  # nearest neighbors of a token
PROBE_TOKENS = 128  # repeated random tokens for the prefix-matching score
MAX_HEATMAP_SIZE = 256  # rows and columns of a parameter's heat map; larger parameters are averaged
HISTOGRAM_BINS = 64
MAX_TRACES = 4  # cached traces
ROWS = 4 * MAX_SAMPLES  # samples generated at a time

Q = TypeVar("Q", bound="Question | GenerationQuestion")


class Answer(NamedTuple):
    """The answer to a question."""

    facts: dict[str, Any]  # JSON values
    tensors: Mapping[str, Tensor] = MappingProxyType({})

    def to_bytes(self) -> bytes:
        """Serialize: length of the header (uint32), header (JSON), and tensors as float32, int32 or uint8.

        Little-endian, aligned to 4 bytes. NaN and infinity in facts become null.
        """
        arrays = {name: _array(tensor) for name, tensor in self.tensors.items()}
        kinds = {name: {"dtype": array.dtype.name, "shape": array.shape} for name, array in arrays.items()}
        header = json.dumps(finite({**self.facts, "tensors": kinds}), allow_nan=False).encode()
        parts = [header, *(array.tobytes() for array in arrays.values())]
        padded = [part + b" " * (-len(part) % 4) for part in parts]
        return len(padded[0]).to_bytes(4, "little") + b"".join(padded)


def _array(tensor: Tensor) -> np.ndarray:
    """Convert a CPU tensor to one of the three dtypes of an answer."""
    if tensor.dtype == torch.uint8:
        return tensor.numpy()
    return (tensor.float() if tensor.is_floating_point() else tensor.int()).numpy()


@dataclass(frozen=True)
class Question(Settings):
    """A question of the page. Each kind of question uses some of the fields."""

    kind: str = ""  # one of KINDS
    model: NonNegativeInt = 0  # index of the model
    step: NonNegativeInt | None = None  # checkpoint of its run; None: the opened one
    layer: NonNegativeInt = 0
    head: NonNegativeInt = 0
    token: NonNegativeInt = 0  # position in the text
    first: NonNegativeInt = 0  # first position of the window that ends with `token`
    source: NonNegativeInt = 0  # number of source tokens, from the beginning of the text
    name: str = ""  # of a parameter
    row: NonNegativeInt | None = None  # of the parameter, None: all; in "vocabulary", a token id
    since: NonNegativeInt = 0  # return metrics after this step
    text: str = ""
    # see Switches
    mask: Literal["before", "after", "off"] = "before"
    scale: bool = True
    heads_off: str = ""  # comma-separated LAYER.HEAD
    mlps_off: str = ""  # comma-separated layers
    # token ids, checked by TraceProvider
    ids: tuple[int, ...] = ()
    whole: bool = False  # True: return all ids, even beyond the context


class TraceProvider:
    """Answers questions about one or two models. Thread-safe; answers one question at a time."""

    def __init__(self, models: list[ViewedModel], text: str, data_dir: str | None = None):
        """text: shown first. data_dir: where to look for training data that has moved."""
        self.viewed, self.text, self.data_dir = models, text, data_dir
        self.lock = threading.Lock()
        self.traces = LRUCache(MAX_TRACES)
        self.probes = LRUCache(1000)  # prefix-matching scores (L, H) by _version
        self.engines = LRUCache(2)  # Engine by _version
        self.searches = LRUCache(2)  # TrainingSearch by the hash of the training data
        self.indexes = LRUCache(2)  # the same of TrainingIndex, which is smaller
        self.maps = LRUCache(8)  # principal planes by _version

    def answer(self, body: Any) -> Answer:
        """Answer a question given as JSON. Raises UserError if it is invalid."""
        question = self._parse(Question, body)
        if question.kind not in KINDS:
            raise UserError(f"kind={question.kind!r}: it must be one of {', '.join(KINDS)}")
        limit = self._viewed(question).limit
        if len(question.ids) > limit:
            raise UserError(f"ids has {len(question.ids):,} tokens; the limit is {limit:,}")
        with self.lock, torch.no_grad():  # not inference_mode: a sampler cannot use its tensors
            torch.set_float32_matmul_precision("highest")  # a sampler on a GPU changes it
            facts, tensors = getattr(self, question.kind)(question)
            return Answer(
                facts, {name: tensor.cpu() for name, tensor in tensors.items()}
            )  # before the lock is released

    def sampler(self, body: Any) -> tuple[Engine, SampleLines]:
        """Return an engine and a response format for samples that continue the ids of a question. Raises UserError.

        The first line is {"begun": [text, ...]}: the text completed by each of the last `begun` ids. The others are
        {"samples": [[id, text, probability, [[id, probability], ...]], ...]}, with one entry per sample: its next
        token, the text completed by it, its probability, and the most likely other tokens. Probabilities are the
        model's own, before temperature and filters. The entry is null if the sample has no new token, and
        [null, remaining text, reason] once at its end.
        """
        question = self._parse(GenerationQuestion, body)
        viewed = self._viewed(question)
        require_ids(question)
        with self.lock:
            engine = self.engines.get(
                self._version(question),
                lambda: Engine(
                    LanguageModel(viewed.model_at(question.step), viewed.tokenizer, str(viewed.device)), ROWS
                ),
            )
        return engine, SampleLines(viewed.tokenizer, question)

    def close(self) -> None:
        """Stop all engines."""
        for engine in self.engines.values.values():
            engine.close()

    # --- parsing ------------------------------------------------------------------------------------------------------

    def _parse(self, kind: type[Q], body: Any) -> Q:
        """Parse a question. Raises UserError."""
        if not isinstance(body, dict):
            raise UserError("a question must be a JSON object")
        fields = dict(body)
        ids = fields.pop("ids", [])
        question = settings.from_json(kind, fields)
        if question.model >= len(self.viewed):
            raise UserError(f"model={question.model}: it must be less than {len(self.viewed)}")
        size = self._viewed(question).tokenizer.vocab_size  # without the model's padding
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < size for i in ids):
            raise UserError(f"ids must be a list of token ids from 0 to {size - 1:,}")
        return replace(question, ids=tuple(ids))

    def _viewed(self, question: Question | GenerationQuestion) -> ViewedModel:
        return self.viewed[question.model]

    def _version(self, question: Question | GenerationQuestion) -> Hashable:
        """Return the cache key of a checkpoint. Raises UserError."""
        return question.model, self._viewed(question).version(question.step)

    def _switches(self, question: Question) -> Switches:
        """Parse the switches of a question. Raises UserError."""
        config = self._viewed(question).model.config
        try:
            pairs = [pair.split(".") for pair in filter(None, question.heads_off.split(","))]
            heads = sorted({(int(layer), int(head)) for layer, head in pairs})
            mlps = sorted({int(layer) for layer in filter(None, question.mlps_off.split(","))})
        except ValueError:
            raise UserError(
                "heads_off must be comma-separated LAYER.HEAD, and mlps_off comma-separated layers"
            ) from None
        layers, head_range = range(config.n_layer), range(config.n_head)
        if not all(layer in layers and head in head_range for layer, head in heads) or not {*mlps} <= {*layers}:
            raise UserError(f"the model has {config.n_layer} layers of {config.n_head} heads")
        return Switches(question.mask, question.scale, tuple(heads), tuple(mlps))

    def _trace(self, question: Question) -> "ViewedTrace":
        """Return the trace for a question. Raises UserError."""
        viewed = self._viewed(question)
        config, ids, switches = viewed.model.config, question.ids, self._switches(question)
        require_ids(question)
        if question.layer >= config.n_layer or question.head >= config.n_head or question.token >= len(ids):
            limits = f"{config.n_layer}, {config.n_head}, and {len(ids):,}"
            raise UserError(f"layer, head, and token must be less than {limits}")
        key = (self._version(question), ids, switches)
        return self.traces.get(key, lambda: ViewedTrace(viewed.model_at(question.step), ids, switches))

    # --- questions ----------------------------------------------------------------------------------------------------

    def models(self, question: Question) -> Answer:
        """Describe the models, the text of all tokens, and the bytes (hexadecimal, by id) of tokens without text."""
        tokenizer, size = self.viewed[0].tokenizer, max(viewed.model.config.vocab_size for viewed in self.viewed)
        pieces = [tokenizer.piece(token) for token in range(size)]
        contents = [tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b"" for token in range(size)]
        not_text = [token for token, piece in enumerate(pieces) if not piece or contents[token] != piece.encode()]
        facts = {
            "models": [viewed.describe() for viewed in self.viewed],
            "pieces": pieces,
            "bytes": {token: contents[token].hex(" ") for token in not_text},
            "text": self.text,
        }
        return Answer(facts)

    def tokens(self, question: Question) -> Answer:
        """Encode a text as in sample.py. Unless `whole`, the ids are cut at the context length."""
        viewed = self._viewed(question)
        if len(question.text) > MAX_CHARACTERS:
            raise UserError(f"text: it has {len(question.text):,} characters; the limit is {MAX_CHARACTERS:,}")
        ids, _, unknown = encode_prompt(viewed.tokenizer, question.text, "skip")
        return Answer({"ids": ids if question.whole else ids[: viewed.limit], "tokens": len(ids), "unknown": unknown})

    def overview(self, question: Question) -> Answer:
        """Return the loss of every token, and a thumbnail and scores of every head."""
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
        """Return the prefix-matching scores of all heads on repeated random tokens: (L, H)."""
        viewed = self._viewed(question)

        def measure() -> Tensor:
            ids = tuple(probe_ids(viewed.model.config, viewed.tokenizer.vocab_size, viewed.limit))
            return ViewedTrace(viewed.model_at(question.step), ids, Switches()).scores["prefix"]

        return self.probes.get(self._version(question), measure)

    def head(self, question: Question) -> Answer:
        """Return all intermediate values of a head."""
        heads = self._trace(question).trace.layer(question.layer).heads
        tensors = {name: t[question.head] for name, t in heads._asdict().items() if t is not None}
        return Answer({}, tensors)

    def layer(self, question: Question) -> Answer:
        """Return the values of a layer for a token, and their effects on the prediction."""
        trace, token = self._trace(question).trace, question.token
        layer, block = trace.layer(question.layer), trace.model.transformer.h[question.layer]
        by_head = trace.head_outputs(question.layer, token)  # (H, C)
        by_neuron = block.mlp.c_proj.weight * layer.hidden[token]  # (C, 4C)
        strongest = by_neuron.norm(dim=0).topk(min(TOP_NEURONS, by_neuron.shape[1])).indices
        effects = logit_effects(trace, torch.cat([by_head, by_neuron.T[strongest]]), token)
        H = len(by_head)
        neurons = [{"index": index, **effect} for index, effect in zip(strongest.tolist(), effects[H:], strict=True)]
        facts = {"heads": effects[:H], "neurons": neurons}
        names = ("ln_1", "qkv", "attention", "ln_2", "preactivation", "hidden", "mlp")
        tensors = {
            **{name: getattr(layer, name)[token] for name in names},
            **{name: getattr(layer.heads, name)[:, token] for name in ("q", "k", "v", "z")},  # (H, D) each
            "weights": layer.heads.weights[:, token],  # (H, T)
            "head_outputs": by_head,
            "separate_heads": trace.separate_heads(question.layer, token),  # (3, H, D)
            "column_norms": block.mlp.c_proj.weight.norm(dim=0),  # of the columns, one per neuron (4C)
            "neuron_activations": layer.hidden[:, strongest].T,  # of the strongest neurons for all tokens (N, T)
            "neuron_outputs": by_neuron.T[strongest],  # what they add to the token (N, C)
            "written": by_neuron.sum(1),  # sum over all neurons, without c_proj's bias, even if the MLP is off (C)
            "before": trace.stream[2 * question.layer, token],
            "between": trace.stream[2 * question.layer + 1, token],
            "after": trace.stream[2 * question.layer + 2, token],
        }
        return Answer(facts, tensors)

    def machine(self, question: Question) -> Answer:
        """Return the values of all layers for a window of n tokens, from `first` to `token`.

        states (2L + 1, n, C): of the residual stream. q, k, v (L, H, n, D): as used in the scores. attention, mlp (L,
        n, C): what is added to the stream. hidden (L, n, 4C): the MLP's neurons.

        For the query of `token` only: scores (L, H, n), the arguments of the softmax, -inf for a hidden key; weights
        (L, H, n); earlier (L, H), the sum of the weights of keys before the window; z (L, H, D), of all keys.
        """
        first, token = question.first, question.token
        if first > token:
            raise UserError(f"first={first}: it must be at most token={token}")
        trace, window = self._trace(question).trace, slice(first, token + 1)
        layers: list[dict[str, Tensor]] = []
        for index in range(trace.model.config.n_layer):
            layer = trace.layer(index)
            weights = layer.heads.weights[:, token]  # (H, T)
            views = {
                **{name: getattr(layer.heads, name)[:, window] for name in ("q", "k", "v")},
                "scores": trace.masked_scores(index, token)[:, window],
                "weights": weights[:, window],
                "earlier": weights[:, :first].sum(-1),
                "z": layer.heads.z[:, token],
                **{name: getattr(layer, name)[window] for name in ("attention", "hidden", "mlp")},
            }
            layers.append({name: view.clone() for name, view in views.items()})  # frees the layer's weights (H, T, T)
        tensors = {name: torch.stack([layer[name] for layer in layers]) for name in layers[0]}
        return Answer({}, {"states": trace.stream[:, window], **tensors})

    def alignment(self, question: Question) -> Answer:
        """Return a head's attention weights (N, S) from the tokens from `token` on to the first S = `source` tokens.

        heads: [layer, head, coverage] of all heads, by decreasing coverage. Coverage is the largest weight of each
        source token, averaged over the source.
        """
        trace, weights, heads = self._trace(question).trace, torch.empty(0), []
        for layer in range(trace.model.config.n_layer):
            layer_weights = trace.layer(layer).heads.weights[:, question.token :, : question.source]
            coverage = layer_weights.amax(1).mean(-1).tolist()
            heads += [[layer, head, score] for head, score in enumerate(coverage)]
            if layer == question.layer:
                weights = layer_weights[question.head]
        return Answer({"heads": sorted(heads, key=lambda row: -row[2])}, {"weights": weights})

    def notes(self, question: Question) -> Answer:
        """Return the notes of a piece, and each head's attention from a token to them.

        weights (H, N + 1): summed over the events of each note; the last column sums all other events. on, off:
        positions of a note's note-on and note-off; off is None if the note is still sounding at the end. note: index of
        the token's own note, or -1. Times are in beats or seconds (`unit`); seconds: length of a unit; before, time:
        times before and after the token; end: time at the end of the text.
        """
        viewed, trace, token = self._viewed(question), self._trace(question).trace, question.token
        if not viewed.music:
            raise UserError("this is not a model of music")
        placed, times = place_notes([viewed.tokenizer.piece(id).strip() for id in question.ids], viewed.music)
        steps, owner = viewed.music.steps, torch.full((len(times),), len(placed))
        for number, note in enumerate(placed):
            owner[[position for position in (note.on, note.velocity, note.off) if position is not None]] = number
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
        """Return a token's embedding and its states in the residual stream, with the logit lens."""
        trace, token = self._trace(question).trace, question.token
        model, states = trace.model, trace.stream[:, token]  # (2L + 1, C)
        target = trace.ids[token + 1].item() if token + 1 < len(trace.ids) else None
        lens = trace.lens(states, LENS_TOP_K, target)
        embedding = model.transformer.wte.weight[trace.ids[token]]
        tensors = {
            "states": states,
            "lens_ids": lens.ids,  # (2L + 1, k)
            "lens_probabilities": lens.probabilities,
            "embedding": embedding,
            "position": model.embed(trace.ids[token], trace.positions[token]) - embedding,
        }
        if target is not None:
            tensors |= {"next_probability": lens.target_probability, "next_rank": lens.target_rank}  # (2L + 1) each
        return Answer({}, tensors)

    def lens(self, question: Question) -> Answer:
        """Return the most likely next token of each state, (2L + 1, N), for the N tokens around `token`."""
        trace = self._trace(question).trace
        first = max(0, min(question.token - LENS_POSITIONS // 2, len(trace.ids) - LENS_POSITIONS))
        positions = range(first, min(first + LENS_POSITIONS, len(trace.ids)))
        lenses = [trace.lens(trace.stream[:, token], 1) for token in positions]  # one by one, because V is large
        tensors = {
            "ids": torch.cat([lens.ids for lens in lenses], dim=1),
            "probabilities": torch.cat([lens.probabilities for lens in lenses], dim=1),
        }
        return Answer({"first": first}, tensors)

    def logits(self, question: Question) -> Answer:
        """Return the logits after a token, before any filter."""
        trace = self._trace(question).trace
        return Answer({}, {"logits": trace.logits(trace.stream[-1, question.token])})

    def parameter(self, question: Question) -> Answer:
        """Return a parameter, downsampled if it is large, with a histogram of its finite values; or one row of it."""
        parameters = dict(self._viewed(question).model_at(question.step).named_parameters())
        if question.name not in parameters:
            raise UserError(f"name={question.name!r}: it is not a parameter of the model")
        rows = torch.atleast_2d(parameters[question.name].detach())
        if question.row is not None:
            if question.row >= len(rows):
                raise UserError(f"row={question.row}: {question.name} has {len(rows):,} rows")
            return Answer({}, {"row": rows[question.row]})
        rows = rows.cpu()
        picture = F.adaptive_avg_pool2d(rows[None], [min(n, MAX_HEATMAP_SIZE) for n in rows.shape])[0]
        numbers = rows[rows.isfinite()].double()  # float32 is too coarse for narrow bins near 1
        counts, edges = np.histogram(numbers.numpy(), HISTOGRAM_BINS)
        mean, deviation = (numbers.mean().item(), numbers.std(unbiased=False).item()) if len(numbers) else (None, None)
        facts = {"mean": mean, "deviation": deviation, "edges": edges.tolist(), "counts": counts.tolist()}
        return Answer(facts, {"picture": picture})

    def vocabulary(self, question: Question) -> Answer:
        """Return the nearest neighbors of a token id (`row`) by cosine similarity, and a map of the vocabulary.

        The map projects the first MAP_TOKENS embeddings onto the two largest principal components of all embeddings.
        place, nearest_places: coordinates of the token and its neighbors.
        """
        viewed = self._viewed(question)
        table = viewed.model_at(question.step).transformer.wte.weight[: viewed.tokenizer.vocab_size]  # (V, C)
        token = question.row or 0
        if token >= len(table):
            raise UserError(f"row={token}: the vocabulary has {len(table):,} tokens")
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
        """Return the position embeddings, rotation angles, or score biases of the position method.

        table, sinusoids (T, C): position embeddings of the model and of Vaswani et al.; similarity (T, T): cosine
        similarity of the table's rows. angles (T, D / 2): of rotary, in radians. bias (H, T): added to scores, by
        distance.
        """
        viewed = self._viewed(question)
        model, config = viewed.model_at(question.step), viewed.model.config
        positions = torch.arange(viewed.limit, device=viewed.device)
        tensors = {}
        if config.position in ("learned", "sinusoidal"):
            zeros = torch.zeros(1, 1, dtype=torch.long, device=viewed.device).expand(1, viewed.limit)
            table = (model.embed(zeros, positions) - model.transformer.wte(zeros))[0]
            normed = F.normalize(table, dim=-1)
            tensors = {
                "table": table,
                "similarity": normed @ normed.T,
                "sinusoids": sinusoids(positions, config.n_embd),
            }
        elif config.position == "rotary":
            tensors = {"angles": angles(positions, config.n_embd // config.n_head)}
        elif model.position_encoding.biases_scores:
            bias = score_biases(model, positions[-1:], positions)  # (1, H, 1, T)
            tensors = {"bias": bias[0, :, 0].flip(-1)}
        return Answer({"method": config.position}, tensors)

    def run(self, question: Question) -> Answer:
        """Return ViewedModel.progress: facts, and one tensor per metric."""
        facts, columns = self._viewed(question).progress(question.since)
        return Answer(facts, {name: torch.tensor(column) for name, column in columns.items()})

    def memorized(self, question: Question) -> Answer:
        """Return the spans of the text that occur in the training data and are longer than expected by chance.

        longest, covering (T,): length of the longest occurring span that begins at, or covers, each token. If the data
        cannot be searched, the only fact is the reason.
        """
        viewed = self._viewed(question)
        require_ids(question)

        def index() -> TrainingSearch:
            return TrainingSearch(open_training_data(viewed.checkpoint, self.data_dir), viewed.tokenizer)

        data_hash = viewed.checkpoint.state.get("dataset", {}).get("hash")
        try:
            training = self.searches.get(data_hash, index)
        except UserError as problem:  # not cached, because the data may become available
            return Answer({"reason": str(problem)})
        facts, longest = training.search(np.array(question.ids))
        tensors = {"longest": torch.from_numpy(longest), "covering": torch.from_numpy(covering_lengths(longest))}
        return Answer({"reason": None, **facts, "init_from": viewed.settings.get("init_from")}, tensors)

    def overlap(self, question: Question) -> Answer:
        """Return how much of the text occurs in the training data, because its loss is then not that of new text.

        The facts are those of Overlap, and init_from, what the run started from. If the data cannot be searched, the
        only fact is the reason. The page asks this for every text, so that only OVERLAP_TOKENS are searched.
        """
        viewed = self._viewed(question)
        require_ids(question)

        def index() -> TrainingIndex:
            datasets = open_training_data(viewed.checkpoint, self.data_dir)
            return TrainingIndex(datasets, viewed.tokenizer.eot, OVERLAP_TOKENS)

        try:
            training = self.indexes.get(viewed.checkpoint.state.get("dataset", {}).get("hash"), index)
        except UserError as problem:
            return Answer({"reason": str(problem)})
        overlap = find_overlap(training, viewed.tokenizer, np.array(question.ids))
        return Answer({"reason": None, **overlap._asdict(), "init_from": viewed.settings.get("init_from")})


def probe_ids(config: GPTConfig, vocab_size: int, limit: int) -> list[int]:
    """Return repeated random ids for the prefix-matching score, at most `limit`, in one document."""
    ids = repeated_random_ids(vocab_size, min(PROBE_TOKENS, limit)).tolist() or [0]
    return [(token + 1) % vocab_size if token == config.document_token else token for token in ids]


def require_ids(question: Question | GenerationQuestion) -> None:
    if not question.ids:
        raise UserError("ids must contain at least one token")


class ViewedTrace:
    """A trace with thumbnails and scores of its heads."""

    def __init__(self, model: GPT, ids: tuple[int, ...], switches: Switches):
        tensor = torch.tensor(ids, device=model.transformer.wte.weight.device)
        thumbnails: list[Tensor] = []
        scores: list[dict[str, Tensor]] = []

        def summarize(layer: int, heads: Heads) -> None:
            # Maximum pooling keeps a thin diagonal. On the CPU, because it is wrong on Apple GPUs (pytorch#190064).
            small = F.adaptive_max_pool2d(heads.weights[None].cpu(), min(THUMBNAIL_SIZE, len(ids)))[0]
            thumbnails.append((small.clamp(0, 1).sqrt() * 255).round().byte())
            scores.append(head_scores(heads.weights, tensor))

        self.trace = Trace(model, tensor, switches, summarize)
        self.thumbnails = torch.stack(thumbnails)  # (L, H, n, n): square roots of the pooled weights
        self.scores = {name: torch.stack([layer[name] for layer in scores]) for name in HEAD_SCORES}  # (L, H) each


def logit_effects(trace: Trace, added: Tensor, token: int) -> list[dict[str, Any]]:
    """Return the tokens whose logits each of the vectors (N, C) raises and lowers most."""
    effect = trace.logit_effect(added, token)  # (N, V)
    k = min(TOP_EFFECTS, effect.shape[-1])
    up, down = effect.topk(k), effect.topk(k, largest=False)
    return [
        {
            "up": list(zip(up.indices[n].tolist(), up.values[n].tolist(), strict=True)),
            "down": list(zip(down.indices[n].tolist(), down.values[n].tolist(), strict=True)),
        }
        for n in range(len(added))
    ]


def principal_plane(table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Principal component analysis of a table (V, C).

    Returns the mean row (C,), the two largest components (C, 2), and their shares of the variance (2,).
    """
    mean = table.mean(0)
    centered = table - mean
    variances, directions = torch.linalg.eigh((centered.T @ centered).cpu().double())  # ascending
    plane = directions[:, -2:].flip(-1)
    plane = torch.where(plane.sum(0) < 0, -plane, plane)  # the sign of an eigenvector is arbitrary
    share = variances.flip(0)[:2] / variances.sum().clamp(min=1e-30)
    return mean, plane.to(table), share
