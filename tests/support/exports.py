"""Checkpoints to export, and the export command."""

import base64
import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace

import torch

from folio.base import settings
from folio.checkpoints.checkpoint import Checkpoint
from folio.checkpoints.export_formats import FORMATS
from folio.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from folio.web.html_file import Weights
from model import GPT, GPTConfig
from tests.support.tiny_tokenizers import TEXT, bpe, trained
from tools import export

KINDS = {
    "char": lambda: CharTokenizer.of(TEXT),
    "char with eot": lambda: CharTokenizer.of(TEXT, eot=True),
    "byte": ByteTokenizer,
    "gpt2": bpe,
    "bpe": trained,
}


def checkpoint_of(
    tokenizer: Tokenizer, bias: bool, padding: int = 0, activation: str = "gelu_new", **settings
) -> Checkpoint:
    """A model with random weights and biases."""
    shape = dict(block_size=64, vocab_size=tokenizer.vocab_size + padding, n_layer=2, n_head=2, n_embd=16, bias=bias)
    shape |= dict(activation=activation, **settings)
    torch.manual_seed(3)
    model = GPT(GPTConfig(**shape))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return Checkpoint(Path("random"), {n: p.detach() for n, p in model.named_parameters()}, tokenizer, {"model": shape})


def output_path(folder: Path, to: str) -> Path:
    """A path for an export in this format."""
    return folder / f"exported{FORMATS[to].suffix}"


def run_export(*arguments: object) -> None:
    """Run the export command in this process."""
    export.main(settings.load(export.ExportConfig, [str(argument) for argument in arguments]))


def read_html(path: Path) -> SimpleNamespace:
    """The code, header, and weights of an HTML file, read without a browser."""
    contents: dict[str, list[bytes]] = {}
    pattern = re.compile(r'<script type="text/plain" data-kind="(\w+)"[^>]*>([\w+/=]*)</script>', re.ASCII)
    for kind, text in pattern.findall(path.read_text(encoding="utf-8")):
        contents.setdefault(kind, []).append(base64.b64decode(text))
    code, header = (json.loads(gzip.decompress(contents[kind][0])) for kind in ("code", "header"))
    weights = Weights(header["parameters"], b"".join(contents["weights"]))
    return SimpleNamespace(code=code, header=header, weights=weights)
