"""Writes a model as one HTML file that generates text and shows the model's internals in a browser.

The file is the viewer's page (page/) with an engine (browser/) in place of the server. It needs no network: its
content security policy forbids all requests. The parts of the file, in order:

    policy, title, style sheet    as text
    folio/web/page/file_start.js      as text: reads the following blocks while the browser parses them
    code                          scripts of the page and the engine, their shared script, and the engine's kernel:
                                  gzipped JSON
    header                        everything about the model except its weights: gzipped JSON
    weights                       all parameters and the index, in blocks of BLOCK_BYTES bytes

The last three are base64, so that no name or vocabulary can contain markup.

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
from folio.checkpoints.export_formats import GELUS, check_parameters, check_settings, gpt2_parameters
from folio.data.sources.pairs import Pair, translation
from folio.decoding import trace
from folio.evaluation import memorization
from folio.evaluation.memorization import TrainingSearch
from folio.experiments.static_page import hash_source
from folio.web import playground, questions
from folio.web.questions import probe_ids
from folio.web.viewed_model import ViewedModel
from folio.web.viewer import PAGE, read_scripts, read_style
from model import GPT, POSITIONS

ENGINE = Path(__file__).resolve().parent / "browser"
SHARED_SCRIPT = "sampling.js"  # script of the engine that the page uses, too
ENGINE_SCRIPTS = (
    SHARED_SCRIPT,
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
CONSTANTS = {  # constants of the server that the engine uses, too
    questions: (
        "KINDS",
        "MAX_CHARACTERS",
        "THUMBNAIL_SIZE",
        "LENS_TOP_K",
        "LENS_POSITIONS",
        "TOP_EFFECTS",
        "TOP_NEURONS",
        "MAP_TOKENS",
        "NEIGHBORS",
        "MAX_HEATMAP_SIZE",
        "HISTOGRAM_BINS",
    ),
    playground: ("MAX_SAMPLES", "MAX_NEW_TOKENS", "RUNNERS_UP"),
    memorization: ("CHANCE", "CONTEXT_TOKENS", "MIN_QUOTE"),
    trace: ("HEAD_SCORES",),
}
KERNEL_FILE = "kernels.wasm"
START_SCRIPT = "file_start.js"  # script of the page that is stored as text
DTYPES = ("float32", "float16", "int8")
BLOCK_BYTES = 3 * 2**18  # 2**20 characters of base64, which a browser handles in a few milliseconds
MAX_PARAMETERS = 2**29  # 2 GiB in float32, which all browsers can allocate
MAX_EXAMPLES = 4  # of translations
MAX_TRACED_PARAMETERS = 20_000_000  # larger models only generate; a trace would take seconds
SIZES = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")
DROPOUT = ("dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop")  # no effect after training
SETTINGS = (
    *SIZES,
    "bias",
    "activation",
    "position",
    "document_token",
    *DROPOUT,
)  # fields of GPTConfig that the engine implements
KNOWN_POSITIONS = ("learned", "sinusoidal", "rotary", "relative", "alibi", "none")  # implemented by the engine
FACTS = {  # fields of the header from the run and its training data, as they are if these are unknown
    "losses": [],  # of each data set; see measure_losses in html_export.py
    "languages": None,  # see find_languages
    "initial_overlap": None,  # the ids of the initial text, and the answer to the question "overlap" about them
    "index": None,  # see pack_index
    "training": None,  # see record_training in html_export.py
}
CHECKED_TOKENS, CHECKED_LOGITS = 8, 32  # of the comparison with model.py when the file is opened


# --- limits -----------------------------------------------------------------------------------------------------------


def check_fits(loaded: Checkpoint) -> None:
    """Raise UserError if the model is too large or the engine does not implement one of its settings.

    A change of model.py that keeps its settings and parameters is detected when the file is opened, by comparing
    logits with expected_logits.
    """
    shape, source = loaded.state["model"], f"{loaded.path}: --to=html"
    check_settings(shape, SETTINGS, source)
    config = loaded.config()
    for name, known in (("position", KNOWN_POSITIONS), ("activation", GELUS)):
        if getattr(config, name) not in known:
            raise UserError(f"{source} does not support {name}={getattr(config, name)!r}, only {', '.join(known)}")
    expected = gpt2_parameters(asdict(config), len(loaded.model), config.bias)
    if config.position != "learned":
        del expected["transformer.wpe.weight"]
    method = POSITIONS[config.position](config)
    if method.table_name:
        expected[f"transformer.{method.table_name}.weight"] = method.table_shape()
    check_parameters(loaded, expected, expected, source)
    total = sum(tensor.numel() for tensor in loaded.model.values())
    if total > MAX_PARAMETERS:
        raise UserError(
            f"{source} supports at most {MAX_PARAMETERS:,} parameters (2 GiB in a browser's memory); the model has "
            f"{total:,}"
        )
    for name, tensor in loaded.model.items():
        if not tensor.isfinite().all():
            raise UserError(f"{loaded.path}: {name} contains NaN or infinity; use another checkpoint")


# --- weights ----------------------------------------------------------------------------------------------------------


class Weights(NamedTuple):
    """Parameters in the format of a file."""

    # name, shape, dtype, and offset in `content` of each parameter; int8 also has the offset of its scales
    parameters: list[dict[str, Any]]
    content: bytes


def pack_weights(tensors: dict[str, Tensor], dtype: str) -> Weights:
    """Convert parameters to a dtype of DTYPES. Raises UserError if a weight overflows float16."""
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
                raise UserError(f"{name} has weights that overflow float16; use --dtype=float32")
            parameter["offset"] = add(rows.astype(parameter["dtype"]))
        parameters.append(parameter)
    return Weights(parameters, b"".join(parts))


def unpack_weights(weights: Weights) -> dict[str, Tensor]:
    """Return the parameters in float32, as the engine uses them."""
    tensors = {}
    for parameter in weights.parameters:
        shape, kind = parameter["shape"], np.dtype(parameter["dtype"]).newbyteorder("<")
        values = np.frombuffer(weights.content, kind, int(np.prod(shape)), parameter["offset"]).reshape(shape)
        values = values.astype(np.float32)
        if "scales" in parameter:
            values *= np.frombuffer(weights.content, "<f4", shape[0], parameter["scales"])[:, None]
        tensors[parameter["name"]] = torch.from_numpy(values)
    return tensors


# --- the index of the training data -----------------------------------------------------------------------------------


def pack_index(search: TrainingSearch, offset: int) -> tuple[dict[str, Any], bytes]:
    """Return the header and the content of an index, which a file stores after the weights.

    It has 5 or 6 bytes per token. codes: dtype, offset, and number. suffixes: offset of the same number of int32. end:
    offset of the end.
    """
    codes, suffixes = search.index.codes, np.asarray(search.index.suffixes).astype("<i4")
    parts = [codes.astype(codes.dtype.newbyteorder("<")).tobytes(), suffixes.tobytes()]
    parts[0] += bytes(-len(parts[0]) % 4)
    layout = {
        "codes": {"dtype": codes.dtype.name, "offset": offset, "size": len(codes)},
        "suffixes": offset + len(parts[0]),
        "end": offset + sum(map(len, parts)),
    }
    return search.to_json() | layout, b"".join(parts)


# --- the header -------------------------------------------------------------------------------------------------------


def make_header(
    viewed: ViewedModel, stored: GPT, weights: Weights, dtype: str, text: str, facts: dict[str, Any]
) -> dict[str, Any]:
    """Return everything about a model except its weights, as JSON.

    stored: the model with its weights as rounded in the file. text: shown first. facts: of FACTS, those that are known.
    """
    tokenizer = viewed.tokenizer
    name = viewed.run.resolve().name if viewed.run else Path(viewed.name).resolve().name
    info = viewed.describe()
    return info | {
        "name": name,  # without the path, which is private
        "checkpoints": [] if viewed.step is None else [viewed.step],
        "tokenizer": tokenizer.to_json() | {"kind": tokenizer.kind},
        "parameters": weights.parameters,
        "text": text,
        "music": viewed.music and asdict(viewed.music),
        "probe_ids": probe_ids(viewed.model.config, tokenizer.vocab_size, viewed.limit),
        **FACTS,
        **facts,
        "storage": {"dtype": dtype, "bytes": len(weights.content)},
        "traced": info["num_params"]["total"] <= MAX_TRACED_PARAMETERS,
        "check": expected_logits(stored, tokenizer.vocab_size),
    }


@torch.inference_mode()
def expected_logits(model: GPT, vocab_size: int) -> dict[str, list]:
    """Return some logits of model.py, with which the file compares the engine's logits.

    Raises UserError if they are not finite.
    """
    config = model.config
    ids = [7 * i % vocab_size for i in range(1, 1 + min(CHECKED_TOKENS, config.block_size))]
    logits = model.eval()(torch.tensor([ids]))[0][0, -1]  # (V,)
    if not logits.isfinite().all():
        raise UserError("the model computes NaN or infinity: use another checkpoint")
    selected = np.unique(np.linspace(0, config.vocab_size - 1, CHECKED_LOGITS).astype(int)).tolist()
    return {"ids": ids, "logits": [[token, logits[token].item()] for token in selected]}


def find_languages(pairs: Sequence[Pair]) -> dict[str, Any] | None:
    """Find the language pairs of a translation model in held-out pairs. Returns None for other pairs.

    pairs: [source, target] languages; template: a prompt with placeholders {source}, {target}, and {text}; examples:
    values of the placeholders in the first prompt and in up to three others.
    """
    translations = [pair for pair in pairs if {"source", "target"} <= pair.fields.keys()]
    counts = Counter((pair.fields["source"], pair.fields["target"]) for pair in translations)
    if not translations or len(translations) < len(pairs):
        return None
    examples = []
    for pair in translations[:: max(1, len(translations) // MAX_EXAMPLES)][:MAX_EXAMPLES]:
        source, target = pair.fields["source"], pair.fields["target"]
        before, after = translation("\0", "", source, target)["prompt"].split("\0")
        text = pair.prompt.removeprefix(before).removesuffix(after)
        examples.append({"source": source, "target": target, "text": text})
    return {
        "pairs": [list(pair) for pair in sorted(counts)],
        "template": translation("{text}", "", "{source}", "{target}")["prompt"],
        "examples": examples,
    }


# --- the file ---------------------------------------------------------------------------------------------------------


def write_html(path: Path, header: dict[str, Any], content: bytes) -> None:
    """Write the file, and compare it when it is read back. Raises OSError.

    content: weights, followed by the index if there is one.
    """
    with atomic_write(path) as temporary:
        with open(temporary, "wb") as file:
            for part in html_parts(header, content):
                file.write(part)
        with open(temporary, "rb") as file:
            if not all(file.read(len(part)) == part for part in html_parts(header, content)):
                raise OSError("its content is not what was written")


def html_parts(header: dict[str, Any], content: bytes) -> Iterator[bytes]:
    """Yield the parts of the file."""
    page = (PAGE / "page.html").read_text(encoding="utf-8")
    style, start_script = read_style(), f"\n{read_scripts([PAGE / START_SCRIPT])}\n"
    shared = f'"use strict";\n{read_scripts([ENGINE / SHARED_SCRIPT])}\n'
    scripts = {"shared": shared, "page": page_scripts(page), "engine": join_engine()}
    read_block = "readBlock()"
    code = scripts | {"kernel": base64.b64encode((ENGINE / KERNEL_FILE).read_bytes()).decode()}
    hashes = " ".join(map(hash_source, (start_script, read_block, *scripts.values())))
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
    head = re.sub("<link rel.*>", lambda _: f"<style>{style}</style>\n<script>{start_script}</script>", head)
    loading = '<main id="view" tabindex="-1">Loading the model. <noscript>This page needs JavaScript.</noscript>'
    start = head + "</head>" + body.replace('<main id="view" tabindex="-1">', loading)
    yield start.encode("utf-8", "replace")

    def block(kind: str, content: bytes, attributes: str = "") -> bytes:
        begin, end = f'<script type="text/plain" data-kind="{kind}"{attributes}>', f"<script>{read_block}</script>\n"
        return begin.encode() + base64.b64encode(content) + b"</script>" + end.encode()

    offsets = range(0, len(content), BLOCK_BYTES)
    yield block("code", compress(code))
    yield block("header", compress(header), f' data-blocks="{len(offsets)}"')
    yield from (block("weights", content[offset : offset + BLOCK_BYTES]) for offset in offsets)
    yield b"</body>\n</html>\n"


def page_scripts(page: str) -> str:
    """Join the scripts in page.html and those for a file. The last script starts the page."""
    scripts = re.findall(r'<script src="([\w./-]+)">', page)
    *names, last = [script for script in scripts if Path(script).name != SHARED_SCRIPT]
    file_scripts = sorted(path.name for path in PAGE.glob("file*.js") if path.name != START_SCRIPT)
    return f"\n{read_scripts(PAGE / name for name in (*names, *file_scripts, last))}\n"


def join_engine() -> str:
    """Join the engine's constants and scripts into one script, which runs after the shared one.

    The block scope hides its names from the page when it runs there instead of in a worker.
    """
    own = (ENGINE / name for name in ENGINE_SCRIPTS if name != SHARED_SCRIPT)
    return f'"use strict";\n{{\n{engine_constants()}{read_scripts(own)}\n}}\n'


def engine_constants() -> str:
    """Return CONSTANTS as JavaScript."""
    values = {name: getattr(module, name) for module, names in CONSTANTS.items() for name in names}
    return "".join(f"const {name} = {json.dumps(value)};\n" for name, value in values.items())


def compress(value: Any) -> bytes:
    """Serialize a value as gzipped JSON."""
    return gzip.compress(json.dumps(value, allow_nan=False, separators=(",", ":")).encode(), mtime=0)
