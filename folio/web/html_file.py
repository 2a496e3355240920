"""Writes a model as one HTML file that generates text and explains itself in a browser, and reads such a file back.

The file is the viewer's page (page/) with an engine (browser/) that computes what the server does otherwise.
It needs no network: its content security policy forbids every request. In the order of the file:

    policy, title, style sheet    as text
    folio/web/page/file_start.js      as text: it takes the following blocks while the browser reads them
    code                          the scripts of the page and of the engine, the one that both use, and the bytes of the
                                  engine's kernel: gzipped JSON
    header                        everything about the model except its weights: gzipped JSON
    weights                       the bytes of all parameters and of the index, in blocks of BLOCK bytes

The three are in base64, so that whatever a name or a vocabulary contains stays text.

Weights are little-endian, and each parameter is aligned to 4 bytes. Matrices are stored in the file's dtype, (out, in)
as in torch; vectors are always float32. "int8" stores a float32 scale per row: a weight is its integer times the scale.
"""

import base64
import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from folio import UserError
from folio.base.files import atomic_write
from folio.checkpoints.checkpoint import Checkpoint
from folio.checkpoints.export_formats import GELUS, check_parameters, gpt2_parameters
from folio.data.shards import Dataset
from folio.data.sources.pairs import Pair, translation
from folio.data.tokenizer import Tokenizer
from folio.evaluation import memorization
from folio.evaluation.memorization import TrainingSearch
from folio.experiments.static_page import hash_source
from folio.web import playground, questions, trace
from folio.web.questions import probe_ids
from folio.web.viewed_model import ViewedModel
from folio.web.viewer import PAGE, read_scripts, read_style
from model import GPT, POSITIONS

ENGINE = Path(__file__).resolve().parent / "browser"
SHARED = "sampling.js"  # of the engine's scripts, the one that the page uses, too
ENGINE_SCRIPTS = (
    SHARED,
    "gpt.js",
    "tokenizers.js",
    "questions.js",
    "playground.js",
    "music.js",
    "trace.js",
    "memorized.js",
    "answers.js",
    "host.js",
)
CONSTANTS = {  # of the server, which are also the engine's: its answers are the same
    questions: (
        "MOST_CHARACTERS",
        "THUMBNAIL",
        "LENS",
        "LENS_TOKENS",
        "PUSHED",
        "NEURONS",
        "MAP_TOKENS",
        "NEIGHBORS",
        "LARGEST_PICTURE",
        "HISTOGRAM_BINS",
    ),
    playground: ("MOST_SAMPLES", "MOST_NEW_TOKENS", "RUNNERS_UP"),
    memorization: ("CHANCE", "CONTEXT_TOKENS"),
    trace: ("HEAD_SCORES",),
}
KERNEL = "matmul.wasm"
START = "file_start.js"  # of the page's scripts for a file, the one that is stored as text
DTYPES = ("float32", "float16", "int8")
BLOCK = 3 * 2**18  # bytes of weights, 2**20 characters: a browser handles a block in a few milliseconds
MOST_PARAMETERS = 2**29  # 2 GiB in float32, the largest memory that all browsers give a page
MOST_INDEXED = 5_000_000  # training tokens; the index has 5 bytes for each of a small vocabulary, 6 of others
MOST_TRACED = 20_000_000  # parameters; a larger model only generates, because a trace of it would take seconds
SIZES = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")
DROPOUT = ("dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop")  # does nothing after training
SETTINGS = (*SIZES, "bias", "activation", "position", *DROPOUT)  # of GPTConfig, which the engine computes
KNOWN_POSITIONS = ("learned", "sinusoidal", "rotary", "relative", "alibi", "none")  # which the engine computes
CHECKED_TOKENS, CHECKED_LOGITS = 8, 32  # of the comparison with model.py that the file makes in the browser


# --- what fits --------------------------------------------------------------------------------------------------------


def check_fits(loaded: Checkpoint) -> None:
    """Raise UserError if a file cannot hold the model, or the engine does not know one of its settings.

    The engine computes what model.py did when the engine was written. If model.py was changed since then and keeps its
    settings and parameters, the file notices: it compares its logits with expected_logits when it is opened.
    """
    shape, source = loaded.state["model"], f"{loaded.path}: --to=html"
    for name, value in shape.items():
        if value and name not in SETTINGS:  # None, False, 0: off
            raise UserError(f"{source} has no place for the model's setting {name}={value!r}")
    config = loaded.config()
    for name, known in (("position", KNOWN_POSITIONS), ("activation", GELUS)):
        if getattr(config, name) not in known:
            raise UserError(f"{source} has no place for {name}={getattr(config, name)!r}, only for {', '.join(known)}")
    expected = gpt2_parameters(asdict(config), len(loaded.model), config.bias)
    if config.position != "learned":
        del expected["transformer.wpe.weight"]
    method = POSITIONS[config.position](config)
    if method.table_name:
        expected[f"transformer.{method.table_name}.weight"] = method.table_shape()
    check_parameters(loaded, expected, expected, source)
    total = sum(tensor.numel() for tensor in loaded.model.values())
    if total > MOST_PARAMETERS:
        raise UserError(
            f"{source} holds at most {MOST_PARAMETERS:,} parameters, which need 2 GiB of memory in a browser, and the "
            f"model has {total:,}"
        )
    for name, tensor in loaded.model.items():
        if not tensor.isfinite().all():
            raise UserError(f"{loaded.path}: {name} contains NaN or infinity; use another checkpoint")


# --- weights ----------------------------------------------------------------------------------------------------------


class Weights(NamedTuple):
    """Parameters as a file stores them."""

    # of each its name, shape, dtype, and where it begins in `content`: offset, and scales for int8
    parameters: list[dict[str, Any]]
    content: bytes


def pack_weights(tensors: dict[str, Tensor], dtype: str) -> Weights:
    """The parameters in a dtype of DTYPES. Raises UserError if float16 cannot hold one."""
    parameters, parts, size = [], [], 0

    def add(array: np.ndarray) -> int:
        nonlocal size
        part = array.astype(array.dtype.newbyteorder("<")).tobytes()
        parts.append(part + bytes(-len(part) % 4))
        size += len(parts[-1])
        return size - len(parts[-1])

    for name, tensor in tensors.items():
        rows = tensor.detach().float().cpu().numpy()
        parameter = {"name": name, "shape": list(rows.shape), "dtype": dtype if rows.ndim > 1 else "float32"}
        if parameter["dtype"] == "int8":
            scales = np.abs(rows).max(axis=1) / np.float32(127)  # (rows,)
            divisors = np.where(scales == 0, 1, scales)[:, None]
            parameter["offset"] = add(np.rint(rows / divisors).clip(-127, 127).astype(np.int8))
            parameter["scales"] = add(scales)
        else:
            if np.abs(rows).max() > np.finfo(parameter["dtype"]).max:
                raise UserError(f"{name} has weights that float16 cannot hold; use --dtype=float32")
            parameter["offset"] = add(rows.astype(parameter["dtype"]))
        parameters.append(parameter)
    return Weights(parameters, b"".join(parts))


def unpack_weights(weights: Weights) -> dict[str, Tensor]:
    """The parameters in float32, as the engine computes with them."""
    tensors = {}
    for parameter in weights.parameters:
        shape, kind = parameter["shape"], np.dtype(parameter["dtype"]).newbyteorder("<")
        values = np.frombuffer(weights.content, kind, int(np.prod(shape)), parameter["offset"]).reshape(shape)
        values = values.astype(np.float32)
        if "scales" in parameter:
            values *= np.frombuffer(weights.content, "<f4", shape[0], parameter["scales"])[:, None]
        tensors[parameter["name"]] = torch.from_numpy(values)
    return tensors


def check_weights(tensors: dict[str, Tensor], weights: Weights) -> None:
    """Raise UserError unless weights that were read from a file are the tensors, rounded to their dtypes."""
    stored = unpack_weights(weights)
    for parameter in weights.parameters:
        name, dtype = parameter["name"], parameter["dtype"]
        expected = tensors[name].detach()
        limit = torch.zeros_like(expected)
        if dtype == "float16":  # half the distance of two numbers that it has
            limit = expected.abs() * 2.0**-11 + 2.0**-25
        elif dtype == "int8":  # half a step, of which a row has 127 up to its largest weight
            limit = expected.abs().amax(dim=1, keepdim=True).expand_as(expected) / 127 * 0.5001
        if not ((stored[name] - expected).abs() <= limit).all():
            raise UserError(f"{name} was written wrongly, and the file was removed; please report this")
    if stored.keys() != tensors.keys():
        raise UserError("parameters are missing in the file, which was removed; please report this")


# --- the index of the training data -----------------------------------------------------------------------------------


def index_training_data(datasets: list[Dataset], tokenizer: Tokenizer) -> TrainingSearch:
    """The search in the training data that a file can hold. Raises UserError if there is too much."""
    tokens = sum(len(shard) for dataset in datasets for shard in dataset.train)
    if tokens > MOST_INDEXED:
        raise UserError(f"the training data has {tokens:,} tokens, and a file holds the index of {MOST_INDEXED:,}")
    return TrainingSearch(datasets, tokenizer)


def pack_index(search: TrainingSearch, offset: int) -> tuple[dict[str, Any], bytes]:
    """The index as a file stores it after the weights: what the header says about it, and its content.

    codes: their dtype, their place among the bytes of the file, and their number. suffixes: the place of as many int32.
    """
    codes, suffixes = search.index.codes, np.asarray(search.index.suffixes).astype("<i4")
    parts = [codes.astype(codes.dtype.newbyteorder("<")).tobytes(), suffixes.tobytes()]
    parts[0] += bytes(-len(parts[0]) % 4)
    places = {
        "codes": {"dtype": codes.dtype.name, "offset": offset, "size": len(codes)},
        "suffixes": offset + len(parts[0]),
        "end": offset + sum(map(len, parts)),
    }
    return search.to_json() | places, b"".join(parts)


# --- the header -------------------------------------------------------------------------------------------------------


def make_header(
    viewed: ViewedModel,
    stored: GPT,
    weights: Weights,
    dtype: str,
    text: str,
    losses: list[dict[str, Any]],
    languages: dict[str, Any] | None,
    index: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything about a model except its weights, in JSON.

    stored: the model with the weights as the file stores them. text: to show first. losses: of measure_losses in
    html_export.py. languages: of find_languages. index: of pack_index.
    """
    tokenizer = viewed.tokenizer
    name = viewed.run.resolve().name if viewed.run else Path(viewed.name).resolve().name
    described = viewed.describe()
    return described | {
        "name": name,  # without the path, which would tell strangers about this computer
        "checkpoints": [] if viewed.step is None else [viewed.step],
        "tokenizer": tokenizer.to_json() | {"kind": tokenizer.kind},
        "parameters": weights.parameters,
        "text": text,
        "music": viewed.music and asdict(viewed.music),
        "probe_ids": probe_ids(tokenizer.vocab_size, viewed.limit),
        "languages": languages,
        "losses": losses,
        "index": index and index | {"init_from": Path(str(viewed.settings.get("init_from"))).name},
        "storage": {"dtype": dtype, "bytes": len(weights.content)},
        "traced": described["num_params"]["total"] <= MOST_TRACED,
        "check": expected_logits(stored, tokenizer.vocab_size),
    }


@torch.inference_mode()
def expected_logits(model: GPT, vocab_size: int) -> dict[str, list]:
    """Some of the logits that model.py computes after some tokens, which the engine must compute, too.

    Raises UserError if they are not finite.
    """
    config = model.config
    ids = [7 * i % vocab_size for i in range(1, 1 + min(CHECKED_TOKENS, config.block_size))]
    logits = model.eval()(torch.tensor([ids]))[0][0, -1]  # (V,)
    if not logits.isfinite().all():
        raise UserError("the model computes NaN or infinity: use another checkpoint")
    chosen = np.unique(np.linspace(0, config.vocab_size - 1, CHECKED_LOGITS).astype(int)).tolist()
    return {"ids": ids, "logits": [[token, logits[token].item()] for token in chosen]}


def find_languages(pairs: Sequence[Pair]) -> dict[str, Any] | None:
    """Between which languages a model translates, by held-out pairs; None if they are not translations.

    pairs: [from, to] of each; template: a prompt with {source}, {target}, and {text} in it; example: a prompt's values
    of these.
    """
    known = [pair for pair in pairs if {"source", "target"} <= pair.fields.keys()]
    counts = Counter((pair.fields["source"], pair.fields["target"]) for pair in known)
    if not known or len(known) < len(pairs):
        return None
    first = known[0]
    source, target = first.fields["source"], first.fields["target"]
    before, after = translation("\0", "", source, target)["prompt"].split("\0")
    return {
        "pairs": [list(pair) for pair in sorted(counts)],
        "template": translation("{text}", "", "{source}", "{target}")["prompt"],
        "example": {"source": source, "target": target, "text": first.prompt.removeprefix(before).removesuffix(after)},
    }


# --- the file ---------------------------------------------------------------------------------------------------------


def write_html(path: Path, header: dict[str, Any], content: bytes) -> None:
    """Write the file. content: the bytes of the weights, and of the index if there is one. Raises OSError."""
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        for part in html_parts(header, content):
            file.write(part.encode("utf-8", "replace"))


def html_parts(header: dict[str, Any], content: bytes) -> Iterator[str]:
    """The parts of the file, in order."""
    page = (PAGE / "page.html").read_text(encoding="utf-8")
    style, start = read_style(), f"\n{read_scripts([PAGE / START])}\n"
    shared = f'"use strict";\n{read_scripts([ENGINE / SHARED])}\n'
    scripts = {"shared": shared, "page": page_scripts(page), "engine": join_engine()}
    take = "takeBlock()"
    code = scripts | {"kernel": base64.b64encode((ENGINE / KERNEL).read_bytes()).decode()}
    hashes = " ".join(map(hash_source, (start, take, *scripts.values())))
    policy = (
        f"default-src 'none'; script-src {hashes} 'wasm-unsafe-eval'; worker-src blob:; "
        f"style-src {hash_source(style)}; img-src data: blob:; connect-src 'none'; base-uri 'none'; form-action 'none'"
    )
    name = escape(header["name"])
    head, body = page.split("<script src", 1)[0].split("</head>")
    head = head.replace(
        '<meta charset="utf-8">',
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{escape(policy, quote=False)}">',
    )
    head = re.sub("<title>.*</title>", lambda _: f"<title>{name}</title>", head)
    head = re.sub("<link rel.*>", lambda _: f"<style>{style}</style>\n<script>{start}</script>", head)
    loading = '<main id="view" tabindex="-1">Loading the model. <noscript>It needs JavaScript.</noscript>'
    yield head + "</head>" + body.replace('<main id="view" tabindex="-1">', loading)

    def block(kind: str, content: bytes, attributes: str = "") -> str:
        text = base64.b64encode(content).decode()
        return f'<script type="text/plain" data-kind="{kind}"{attributes}>{text}</script><script>{take}</script>\n'

    starts = range(0, len(content), BLOCK)
    yield block("code", compress(code))
    yield block("header", compress(header), f' data-blocks="{len(starts)}"')
    yield from (block("weights", content[at : at + BLOCK]) for at in starts)
    yield "</body>\n</html>\n"


def page_scripts(page: str) -> str:
    """The page's own scripts that page.html names and those of a file, as one. The last one starts the page."""
    *names, last = re.findall(r'<script src="([\w.-]+)">', page)  # without the shared one, which is in a folder
    of_file = sorted(path.name for path in PAGE.glob("file*.js") if path.name != START)
    return f"\n{read_scripts(PAGE / name for name in (*names, *of_file, last))}\n"


def join_engine() -> str:
    """The engine's constants and own scripts as one script, which runs after the shared one.

    It runs in a worker, or in the page, where its names must not become the page's.
    """
    own = (ENGINE / name for name in ENGINE_SCRIPTS if name != SHARED)
    return f'"use strict";\n{{\n{engine_constants()}{read_scripts(own)}\n}}\n'


def engine_constants() -> str:
    """CONSTANTS in JavaScript."""
    values = {name: getattr(module, name) for module, names in CONSTANTS.items() for name in names}
    return "".join(f"const {name} = {json.dumps(value)};\n" for name, value in values.items())


def compress(value: Any) -> bytes:
    """A value as JSON, gzipped."""
    return gzip.compress(json.dumps(value, allow_nan=False, separators=(",", ":")).encode(), mtime=0)


class HtmlFile(NamedTuple):
    """What is in a file."""

    code: dict[str, str]
    header: dict[str, Any]
    weights: Weights


def read_html(path: Path) -> HtmlFile:
    """Read a file that write_html wrote. Raises UserError for another one."""
    contents: dict[str, list[bytes]] = {}
    pattern = re.compile(r'<script type="text/plain" data-kind="(\w+)"[^>]*>([\w+/=]*)</script>', re.ASCII)
    with open(path, encoding="utf-8") as file:
        for line in file:
            if match := pattern.match(line):
                contents.setdefault(match[1], []).append(base64.b64decode(match[2]))
    try:
        code, header = (json.loads(gzip.decompress(contents[kind][0])) for kind in ("code", "header"))
        return HtmlFile(code, header, Weights(header["parameters"], b"".join(contents["weights"])))
    except (LookupError, ValueError, OSError) as error:
        raise UserError(f"{path} is not a model in an HTML file: {error}") from None
