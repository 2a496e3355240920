"""Answers the viewer's questions about models: what a text makes a model compute, in numbers that a page can draw.

A question is JSON; an answer is facts (JSON) and tensors by name. The page (folio/page) knows nothing else about where
the numbers come from.

Dimensions: T time, C channels, H heads, D head size, V vocabulary, L layers.
"""

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from safetensors.torch import load_file
from torch import Tensor

from folio import UserError, checkpoint, configurator, convert
from folio.configurator import NonNegativeInt, Settings
from folio.generate import TextStream, default_prompt
from folio.language_model import GenerationConfig, LanguageModel
from folio.snapshots import find_snapshots
from folio.tokenizer import EOT_TEXT
from folio.trace import HEAD_SCORES, Heads, Switches, Trace, head_scores, repeated_random_ids
from model import GPT, angles, sinusoids

MOST_TOKENS = 2048  # of a text, if the context is longer
MOST_CHARACTERS = 100_000  # of a text in a question
THUMBNAIL = 32  # queries and keys of a head's small picture
LENS = 5  # tokens that the logit lens shows for each state
PUSHED = 5  # tokens whose logits a vector raises or lowers most
NEURONS = 16  # of an MLP, the strongest ones
MAP_TOKENS = 1000  # of a vocabulary, the first ones, on the map
NEIGHBORS = 12  # of a token
PROBE_TOKENS = 128  # random tokens on which prefix matching is measured
LARGEST_PICTURE = 256  # rows and columns of a parameter's heat map; larger ones are averaged
HISTOGRAM_BINS = 64
MODEL_BYTES = 2**30  # weights of other checkpoints to keep in memory
TRACES = 4  # to keep
MOST_SAMPLES = 16  # at a time
MOST_NEW_TOKENS = 4096
RUNNERS_UP = 10  # tokens that could have been sampled instead

T = TypeVar("T")
Q = TypeVar("Q", bound="Question | GenerationQuestion")


class Answer(NamedTuple):
    """The answer to a question."""

    facts: dict[str, Any]  # JSON
    tensors: Mapping[str, Tensor] = MappingProxyType({})

    def to_bytes(self) -> bytes:
        """The length of the header (uint32), the header as JSON, and the tensors as float32, int32 or uint8.

        Everything is little-endian, and aligned to 4 bytes.
        """
        arrays = {name: _array(tensor) for name, tensor in self.tensors.items()}
        kinds = {name: {"dtype": array.dtype.name, "shape": array.shape} for name, array in arrays.items()}
        header = json.dumps({**self.facts, "tensors": kinds}, allow_nan=False).encode()
        parts = [header, *(array.tobytes() for array in arrays.values())]
        padded = [part + b" " * (-len(part) % 4) for part in parts]
        return len(padded[0]).to_bytes(4, "little") + b"".join(padded)


def _array(tensor: Tensor) -> np.ndarray:
    """A tensor in one of the three types of an answer."""
    if tensor.dtype == torch.uint8:
        return tensor.cpu().numpy()
    return (tensor.float() if tensor.is_floating_point() else tensor.int()).cpu().numpy()


def _finite(x: float) -> float | None:
    """A number as JSON can hold it."""
    return x if math.isfinite(x) else None


@dataclass(frozen=True)
class Question(Settings):
    """What a page asks. Most fields matter to some kinds of questions only."""

    kind: str = ""  # one of TraceProvider.questions
    model: NonNegativeInt = 0  # which of the models
    step: NonNegativeInt | None = None  # which checkpoint of its run; None: the one that was opened
    layer: NonNegativeInt = 0
    head: NonNegativeInt = 0
    token: NonNegativeInt = 0  # a position in the text
    name: str = ""  # of a parameter
    row: NonNegativeInt | None = None  # of the parameter; None: all of them
    text: str = ""
    # as in Switches
    mask: Literal["before", "after", "off"] = "before"
    scale: bool = True
    heads_off: str = ""  # LAYER.HEAD, separated by commas
    mlps_off: str = ""  # layers, separated by commas
    # a list of token ids, checked by TraceProvider
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class GenerationQuestion(GenerationConfig):
    """What a page asks to be sampled."""

    num_samples: Annotated[int, Ge(1), Le(MOST_SAMPLES)] = 1
    max_new_tokens: Annotated[int, Ge(1), Le(MOST_NEW_TOKENS)] = 200
    model: NonNegativeInt = 0
    step: NonNegativeInt | None = None
    ids: tuple[int, ...] = ()


class Cache:
    """The newest values by their keys, as long as their sizes sum to at most `most`; always the newest one."""

    def __init__(self, most: int, size: Callable[[Any], int] = lambda value: 1):
        self.most, self.size = most, size
        self.values: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, compute: Callable[[], T]) -> T:
        if key not in self.values:
            self.values[key] = compute()
        self.values.move_to_end(key)
        while len(self.values) > 1 and sum(map(self.size, self.values.values())) > self.most:
            self.values.popitem(last=False)
        return self.values[key]


class ViewedModel:
    """A model, its tokenizer, and the other checkpoints of its run."""

    def __init__(self, init_from: str, which: str, device: torch.device):
        """Load whatever convert.load does. Raises UserError."""
        loaded = convert.load(init_from, which)
        self.name, self.device = init_from, device
        self.tokenizer = loaded.tokenizer
        self.opened = self._ready(loaded.build())
        self.step: int | None = loaded.state.get("step")
        self.run = loaded.path.parent if self.step is not None else None  # the folder
        self.settings = loaded.settings()
        self.others = Cache(MODEL_BYTES, lambda model: sum(p.nbytes for p in model.parameters()))
        self.limit = min(self.opened.config.block_size, MOST_TOKENS)  # tokens of a text

    def checkpoints(self) -> dict[int, Path]:
        """The checkpoints and snapshots of the run by their steps, in order, as they are now."""
        if self.run is None:
            return {}
        complete = {int(path.name.removeprefix("step-")): path for path in checkpoint.directories(self.run)}
        return dict(sorted({**complete, **find_snapshots(self.run)}.items()))

    def at(self, step: int | None) -> GPT:
        """The model after so many steps. Raises UserError if there is no such checkpoint."""
        if step is None or step == self.step:
            return self.opened
        return self.others.get(step, partial(self._load, step))

    def _ready(self, model: GPT) -> GPT:
        """The model as a trace needs it."""
        return model.to(self.device, torch.float32).requires_grad_(False).eval()

    def _load(self, step: int) -> GPT:
        path = self.checkpoints().get(step)
        if path is None:
            raise UserError(f"{self.name} has no checkpoint of step {step:,}")
        weights = load_file(path if path.is_file() else path / "model.safetensors")
        return self._ready(GPT.from_tensors(self.opened.config, weights))

    def piece(self, token: int) -> str:
        """A token as text. Bytes that are only a part of a character look like \\xe2."""
        return EOT_TEXT if token == self.tokenizer.eot else self.content(token).decode("utf-8", "backslashreplace")

    def content(self, token: int) -> bytes:
        """The bytes of a token; none of the end-of-text token, and of ids that the tokenizer does not have."""
        return self.tokenizer.token_bytes(token) if token < self.tokenizer.vocab_size else b""

    def describe(self) -> dict[str, Any]:
        """The facts about the model that never change, and its checkpoints."""
        model = self.opened
        return {
            "name": self.name,
            "config": asdict(model.config),
            "tokenizer": self.tokenizer.kind,
            "vocab_size": self.tokenizer.vocab_size,
            "step": self.step,
            "checkpoints": list(self.checkpoints()),
            "max_iters": self.settings.get("max_iters"),
            "limit": self.limit,
            "can_slide": model.config.can_slide,
            "num_params": model.num_params(),
            "parameters": [{"name": name, "shape": list(p.shape)} for name, p in model.named_parameters()],
        }


class TraceProvider:
    """Answers questions about one or two models. It may be asked by many threads, and answers one at a time."""

    def __init__(self, models: list[ViewedModel], text: str):
        """text: to show first."""
        self.models, self.text = models, text
        self.lock = threading.Lock()
        self.traces = Cache(TRACES)
        self.probes = Cache(1000)  # prefix-matching scores (L, H) by model and step
        self.samplers = Cache(2)
        self.questions: dict[str, Callable[[Question], Answer]] = {
            "models": self.describe,
            "tokens": self.tokens,
            "overview": self.overview,
            "head": self.head,
            "layer": self.layer,
            "token": self.token,
            "logits": self.logits,
            "parameter": self.parameter,
            "vocabulary": self.vocabulary,
            "positions": self.positions,
        }

    def answer(self, asked: Any) -> Answer:
        """The answer to a question that was read from JSON. Raises UserError if it makes no sense."""
        question = self._read(Question, asked)
        if question.kind not in self.questions:
            raise UserError(f"kind={question.kind!r}: it is none of {', '.join(self.questions)}")
        if len(question.ids) > self._viewed(question).limit:
            raise UserError(f"ids: {len(question.ids):,} tokens are more than {self._viewed(question).limit:,}")
        with self.lock, torch.inference_mode():
            return self.questions[question.kind](question)

    def generate(self, asked: Any) -> Iterator[dict[str, Any]]:
        """Samples that continue the token ids of a question, while they are generated. Raises UserError.

        First yields {}. For each step: {"samples": [[id, text, probability, [[id, probability], ...]], ...]}, with null
        for a sample that has ended: the token, the text that it completes, and the most likely tokens. At the end,
        {"samples": [null, ...], "rest": [text, ...]} if a sample has text that was held back: half a character, or
        what could have begun `stop`.
        """
        question = self._read(GenerationQuestion, asked)
        if not question.ids:
            raise UserError("ids: there must be at least one token")
        viewed = self._viewed(question)
        with self.lock:
            gpt = self.samplers.get(
                (question.model, question.step),
                lambda: LanguageModel(viewed.at(question.step), viewed.tokenizer, viewed.device.type),
            )
        count = question.num_samples
        ended, texts = [False] * count, [TextStream(viewed.tokenizer, question.stop) for _ in range(count)]
        steps = gpt.steps([list(question.ids)] * count, range(count), question, ended)
        yield {}
        while True:
            with self.lock:  # questions are answered between two steps
                step = next(steps, None)
            if step is None:
                break
            probabilities = step.logits.softmax(dim=-1)
            top = probabilities.topk(min(RUNNERS_UP, probabilities.shape[-1]))
            samples: list[list[Any] | None] = []
            for row, token in enumerate(step.tokens):
                if token is None:
                    samples.append(None)
                    continue
                runners_up = list(zip(top.indices[row].tolist(), top.values[row].tolist(), strict=True))
                samples.append([token, texts[row].push(token), probabilities[row, token].item(), runners_up])
                ended[row] = ended[row] or texts[row].ended
            yield {"samples": samples}
        rest = [text.push(None) for text in texts]
        if any(rest):
            yield {"samples": [None] * count, "rest": rest}

    # --- what is asked about ------------------------------------------------------------------------------------------

    def _read(self, kind: type[Q], asked: Any) -> Q:
        """A question that was read from JSON. Raises UserError."""
        if not isinstance(asked, dict):
            raise UserError("a question is a JSON object")
        ids = asked.pop("ids", [])
        question = configurator.from_json(kind, asked)
        if question.model >= len(self.models):
            raise UserError(f"model={question.model}: there are {len(self.models)}")
        size = self._viewed(question).opened.config.vocab_size
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < size for i in ids):
            raise UserError(f"ids: it takes a list of token ids from 0 to {size - 1:,}")
        return replace(question, ids=tuple(ids))

    def _viewed(self, question: Question | GenerationQuestion) -> ViewedModel:
        return self.models[question.model]

    def _switches(self, question: Question) -> Switches:
        """The switches of a question. Raises UserError."""
        config = self._viewed(question).opened.config
        try:
            pairs = [pair.split(".") for pair in filter(None, question.heads_off.split(","))]
            heads = sorted((int(layer), int(head)) for layer, head in pairs)
            mlps = sorted(int(layer) for layer in filter(None, question.mlps_off.split(",")))
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
        if not ids:
            raise UserError("ids: there must be at least one token")
        if question.layer >= config.n_layer or question.head >= config.n_head or question.token >= len(ids):
            raise UserError(f"there are {config.n_layer} layers, {config.n_head} heads, and {len(ids):,} tokens")
        key = (question.model, question.step, ids, switches)
        return self.traces.get(key, lambda: ViewedTrace(viewed.at(question.step), ids, switches))

    def _pushed(self, trace: Trace, added: Tensor, token: int) -> list[dict[str, Any]]:
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

    # --- questions ----------------------------------------------------------------------------------------------------

    def describe(self, question: Question) -> Answer:
        """The models, the texts of their tokens, and the bytes (hexadecimal, by id) of tokens that are not text."""
        first = self.models[0]
        pieces = [first.piece(token) for token in range(first.opened.config.vocab_size)]
        not_text = [token for token, piece in enumerate(pieces) if not piece or first.content(token) != piece.encode()]
        facts = {
            "models": [viewed.describe() for viewed in self.models],
            "pieces": pieces,
            "bytes": {token: first.content(token).hex(" ") for token in not_text},
            "text": self.text,
        }
        return Answer(facts)

    def tokens(self, question: Question) -> Answer:
        """The ids of a text, at most as many as the context holds."""
        viewed = self._viewed(question)
        if len(question.text) > MOST_CHARACTERS:
            raise UserError(f"text: it has {len(question.text):,} characters; the limit is {MOST_CHARACTERS:,}")
        viewed.tokenizer.on_unknown = "skip"
        ids = viewed.tokenizer.encode(question.text).tolist() or default_prompt(viewed.tokenizer)
        unknown = viewed.tokenizer.count_unknown(question.text)
        return Answer({"ids": ids[: viewed.limit], "tokens": len(ids), "unknown": unknown})

    def overview(self, question: Question) -> Answer:
        """Every token's loss, and every head in small."""
        viewed, trace = self._viewed(question), self._trace(question)
        predictions = trace.trace.predictions
        scores = {**trace.scores, "prefix": self._prefix_scores(viewed, question)}
        tensors = {
            **predictions._asdict(),
            "norms": trace.trace.stream.norm(dim=-1),  # (2L + 1, T)
            "thumbnails": trace.thumbnails,  # (L, H, n, n) of uint8
            **{f"score_{name}": scores[name] for name in HEAD_SCORES},  # (L, H) each
        }
        return Answer({"mean_loss": _finite(predictions.loss.mean().item())}, tensors)

    def _prefix_scores(self, viewed: ViewedModel, question: Question) -> Tensor:
        """The prefix-matching scores of all heads on random tokens that repeat: (L, H)."""

        def measure() -> Tensor:
            model = viewed.at(question.step)
            ids = repeated_random_ids(viewed.tokenizer.vocab_size, min(PROBE_TOKENS, viewed.limit)).tolist() or [0]
            return ViewedTrace(model, tuple(ids), Switches()).scores["prefix"]

        return self.probes.get((question.model, question.step), measure)

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
        added = torch.cat([by_head, layer.attention[token][None], layer.mlp[token][None], written.T[strongest]])
        pushed = self._pushed(trace, added, token)
        H = len(by_head)
        facts = {
            "heads": pushed[:H],
            "attention_pushes": pushed[H],
            "mlp_pushes": pushed[H + 1],
            "neurons": [
                {"index": index, **pushes} for index, pushes in zip(strongest.tolist(), pushed[H + 2 :], strict=True)
            ],
        }
        names = ("ln_1", "qkv", "attention", "ln_2", "preactivation", "hidden", "mlp")
        tensors = {
            **{name: getattr(layer, name)[token] for name in names},
            **{name: getattr(layer.heads, name)[:, token] for name in ("q", "k", "v", "z")},  # (H, D) each
            "weights": layer.heads.weights[:, token],  # (H, T)
            "head_outputs": by_head,
            "before": trace.stream[2 * question.layer, token],
            "between": trace.stream[2 * question.layer + 1, token],
            "after": trace.stream[2 * question.layer + 2, token],
        }
        return Answer(facts, tensors)

    def token(self, question: Question) -> Answer:
        """A token's embedding, and its way through the residual stream."""
        trace, token = self._trace(question).trace, question.token
        model, states = trace.model, trace.stream[:, token]  # (2L + 1, C)
        lens = trace.lens(states, LENS)
        position = torch.tensor(token, device=states.device)
        embedding = model.transformer.wte.weight[trace.ids[token]]
        tensors = {
            "states": states,
            "lens_ids": lens.ids,  # (2L + 1, k)
            "lens_probabilities": lens.probabilities,
            "lens_entropy": lens.entropy,
            "embedding": embedding,
            "position": model.embed(trace.ids[token], position) - embedding,
        }
        return Answer({}, tensors)

    def logits(self, question: Question) -> Answer:
        """The logits after a token, before any filter."""
        trace = self._trace(question).trace
        return Answer({}, {"logits": trace.logits(trace.stream[-1, question.token])})

    def parameter(self, question: Question) -> Answer:
        """A parameter, averaged over blocks if it is large, and the distribution of its finite values; or one row."""
        parameters = dict(self._viewed(question).at(question.step).named_parameters())
        if question.name not in parameters:
            raise UserError(f"name={question.name!r}: it is not a parameter of the model")
        p = parameters[question.name].detach()
        rows = torch.atleast_2d(p)
        if question.row is not None:
            if question.row >= len(rows):
                raise UserError(f"row={question.row}: {question.name} has {len(rows):,}")
            return Answer({}, {"row": rows[question.row]})
        size = [min(n, LARGEST_PICTURE) for n in rows.shape]
        picture = F.adaptive_avg_pool2d(rows[None], size)[0]
        values = p[p.isfinite()]
        counts, edges = np.histogram(values.cpu().numpy(), HISTOGRAM_BINS)
        facts = {
            "mean": _finite(values.mean().item()),
            "deviation": _finite(values.std(unbiased=False).item()),
            "edges": edges.tolist(),
            "counts": counts.tolist(),
        }
        return Answer(facts, {"picture": picture})

    def vocabulary(self, question: Question) -> Answer:
        """The nearest tokens of a token id (`row`) by the cosine of their embeddings, and a map of the vocabulary.

        The map shows the first MAP_TOKENS tokens in the plane of the two largest principal components of all of them.
        """
        viewed = self._viewed(question)
        table = viewed.at(question.step).transformer.wte.weight[: viewed.tokenizer.vocab_size]  # (V, C)
        token = question.row or 0
        if token >= len(table):
            raise UserError(f"row={token}: there are {len(table):,} tokens")
        centered = table - table.mean(0)
        variances, directions = torch.linalg.eigh(centered.T @ centered)  # ascending
        plane = directions[:, -2:].flip(-1)  # (C, 2)
        plane = plane * plane.sum(0).sign()  # the sign of an eigenvector is arbitrary
        similarity = F.cosine_similarity(table, table[token][None], dim=-1)
        nearest = similarity.topk(min(NEIGHBORS + 1, len(table)))
        share = variances.flip(0)[:2] / variances.sum().clamp(min=1e-30)
        tensors = {
            "map": centered[:MAP_TOKENS] @ plane,
            "share": share,
            "nearest": nearest.indices,
            "similarity": nearest.values,
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


class ViewedTrace:
    """A trace, and what is kept of its heads: small pictures and scores."""

    def __init__(self, model: GPT, ids: tuple[int, ...], switches: Switches):
        tensor = torch.tensor(ids, device=model.transformer.wte.weight.device)
        thumbnails: list[Tensor] = []
        scores: list[dict[str, Tensor]] = []

        def summarize(layer: int, heads: Heads) -> None:
            small = F.adaptive_max_pool2d(heads.weights[None], min(THUMBNAIL, len(ids)))[0]  # a thin diagonal remains
            thumbnails.append((small.clamp(0, 1).sqrt() * 255).round().byte())
            scores.append(head_scores(heads.weights, tensor))

        self.trace = Trace(model, tensor, switches, summarize)
        self.thumbnails = torch.stack(thumbnails)  # (L, H, n, n): square roots of the largest weights
        self.scores = {name: torch.stack([layer[name] for layer in scores]) for name in HEAD_SCORES}  # (L, H) each
