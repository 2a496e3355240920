import re
import shutil
import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.onnx._internal.exporter import _onnx_program

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
transformers = pytest.importorskip("transformers")

import model as model_py
from folio import UserError
from folio.checkpoints import foreign, onnx_export
from folio.checkpoints.checkpoint import Checkpoint
from folio.data.tokenizer import ByteTokenizer, CharTokenizer, MidiTokenizer
from folio.evaluation.export_checks import relative_difference
from model import GPT, POSITIONS
from tests.support.decoding import assert_same_tokens
from tests.support.exports import checkpoint_of, run_export
from tests.support.processes import ROOT
from tests.support.tiny_tokenizers import TEXT, bpe, trained
from tests.support.tolerances import logits_error, within


class NoMean(torch.nn.RMSNorm):
    """RMSNorm with the constructor of LayerNorm."""

    def __init__(self, size: int, bias: bool):
        super().__init__(size, eps=1e-5)


CASES = {  # position method -> tokenizer, and whether the model has biases
    "learned": (trained, True),
    "sinusoidal": (ByteTokenizer, False),
    "rotary": (lambda: CharTokenizer.of(TEXT), False),
    "relative": (bpe, True),
    "alibi": (lambda: CharTokenizer.of(TEXT, eot=True), True),
    "none": (ByteTokenizer, False),
}
SLOW = {"sinusoidal", "none"}  # like "learned", but without a table; each layer of an export takes a second or two


def export_to(output: Path, loaded: Checkpoint, *arguments: str) -> None:
    """Run the export command in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foreign, "load", lambda *_: loaded)
        run_export("random", output, "--to=onnx", *arguments)


class Exported(NamedTuple):
    """An exported model: its checkpoint and its folder."""

    loaded: Checkpoint
    folder: Path

    @property
    def model(self) -> GPT:
        return self.loaded.build().eval()


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES],
)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Exported]:
    """A model of each position method, exported and checked by the command. One has the format of large models, one has
    two layers, and one is computed by a modified model.py.
    """
    make_tokenizer, bias = CASES[request.param]
    activation, n_layer = "gelu_new" if bias else "gelu", 2 if request.param == "learned" else 1
    loaded = checkpoint_of(make_tokenizer(), bias, 5, activation, position=request.param, n_layer=n_layer)
    folder = tmp_path_factory.mktemp(request.param) / "exported"
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "alibi":
            patch.setattr(_onnx_program, "_LARGE_MODEL_THRESHOLD", 0)  # bytes
        if request.param == "rotary":
            ids = torch.arange(20)[None]
            original = loaded.build().logits(ids).detach()
            patch.setattr(model_py, "LayerNorm", NoMean)
            error = logits_error(loaded.config(), 20)
            assert relative_difference(loaded.build().logits(ids).detach(), original) > error
        export_to(folder, loaded)
        yield Exported(loaded, folder)


class Decoder:
    """Decodes with onnxruntime, using only the names of the graph's inputs and outputs."""

    def __init__(self, folder: Path, rows: int):
        self.session = onnxruntime.InferenceSession(folder / "model.onnx")
        self.past = {
            value.name: np.zeros((rows, value.shape[1], 0, value.shape[3]), dtype=np.float32)
            for value in self.session.get_inputs()
            if value.name.startswith("past_key_values.")
        }
        self.mask = np.zeros((rows, 0), dtype=np.int64)

    def step(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The logits (B, T, V) of new tokens (B, T). mask (B, T): 0 for padding."""
        self.mask = np.concatenate([self.mask, mask.numpy()], axis=1)
        positions = (self.mask.cumsum(axis=1) - 1).clip(min=0)[:, -ids.shape[1] :]
        new = {"input_ids": ids.numpy(), "attention_mask": self.mask, "position_ids": positions}
        outputs = dict(
            zip([o.name for o in self.session.get_outputs()], self.session.run(None, {**new, **self.past}), strict=True)
        )
        self.past = {name: outputs[name.replace("past_key_values", "present")] for name in self.past}
        return torch.from_numpy(outputs["logits"])


def test_every_position_method_is_tested():
    assert tuple(CASES) == tuple(POSITIONS)


def test_a_batch_decoded_in_parts_has_the_logits_of_model_py(exported, seed):
    """A prompt, several tokens, then one token at a time."""
    torch.manual_seed(seed)
    model = exported.model
    ids = torch.randint(exported.loaded.tokenizer.vocab_size, (3, 20))
    decoder = Decoder(exported.folder, rows=3)
    with torch.inference_mode():
        expected = model.logits(ids)
    for start, end in [(0, 7), (7, 12), *((i, i + 1) for i in range(12, 20))]:
        logits = decoder.step(ids[:, start:end], torch.ones(3, end - start, dtype=torch.long))
        torch.testing.assert_close(logits, expected[:, start:end], **within(expected, logits_error(model.config, 20)))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_generate_the_tokens_of_single_rows(exported, side, seed):
    """Greedy decoding, compared with model.generate."""
    torch.manual_seed(seed)
    model, new = exported.model, 12
    prompts = [torch.randint(exported.loaded.tokenizer.vocab_size, (length,)) for length in (1, 9, 4)]
    ids, mask = torch.zeros(3, 9, dtype=torch.long), torch.zeros(3, 9, dtype=torch.long)
    last = []
    for row, prompt in enumerate(prompts):
        columns = slice(0, len(prompt)) if side == "right" else slice(9 - len(prompt), 9)
        ids[row, columns], mask[row, columns] = prompt, 1
        last.append(columns.stop - 1)
    decoder, one = Decoder(exported.folder, rows=3), torch.ones(3, 1, dtype=torch.long)
    logits = decoder.step(ids, mask)[torch.arange(3), last]  # (B, V)
    generated = [logits.argmax(dim=-1, keepdim=True)]
    for _ in range(new - 1):
        logits = decoder.step(generated[-1], one)[:, -1]
        generated.append(logits.argmax(dim=-1, keepdim=True))
    for tokens, prompt in zip(torch.cat(generated, dim=1).tolist(), prompts, strict=True):
        expected = model.generate(prompt[None], new, top_k=1)[0, len(prompt) :]
        assert_same_tokens(tokens, expected.tolist(), model, prompt.tolist())


def test_the_folder_has_the_files_and_names_that_other_programs_expect(exported):
    names = {path.name for path in exported.folder.iterdir()}
    large = {"model.onnx.data"} if exported.loaded.config().position == "alibi" else set()
    assert names == {"model.onnx", "config.json", "tokenizer.json", "tokenizer_config.json"} | large
    hf_tokenizer, text = transformers.AutoTokenizer.from_pretrained(exported.folder), TEXT.replace("<|endoftext|>", "")
    ids = hf_tokenizer(text).input_ids
    assert ids == exported.loaded.tokenizer.encode(text).tolist() and hf_tokenizer.decode(ids) == text
    graph = onnx.load(exported.folder / "model.onnx").graph
    shapes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    past, present = "past_sequence_length", "past_sequence_length + sequence_length"
    parts = [f"{layer}.{part}" for layer in range(exported.loaded.config().n_layer) for part in ("key", "value")]
    assert shapes == {
        "input_ids": ["batch_size", "sequence_length"],
        "attention_mask": ["batch_size", "total_sequence_length"],
        "position_ids": ["batch_size", "sequence_length"],
        **{f"past_key_values.{part}": ["batch_size", 2, past, 8] for part in parts},
        "logits": ["batch_size", "sequence_length", exported.loaded.config().vocab_size],
        **{f"present.{part}": ["batch_size", 2, present, 8] for part in parts},
    }
    assert str(ROOT).encode() not in (exported.folder / "model.onnx").read_bytes()  # torch adds stack traces


def test_the_code_in_the_docs_generates_the_same_text_as_the_model(exported, monkeypatch, capsys):
    tokenizer = exported.loaded.tokenizer
    page = (ROOT / "docs" / "use" / "exchange.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(import numpy.*?)```", page, re.DOTALL)[1].replace('"ROMEO:"', '"hello"')
    monkeypatch.chdir(exported.folder.parent)
    exec(code, {})
    prompt = torch.from_numpy(tokenizer.encode("hello").astype(np.int64))[None]
    n_new = int(re.search(r"range\((\d+)\)", code)[1])
    text = exported.model.generate(prompt, n_new, top_k=1)[0]
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(exported.folder)
    # the model also generates ids that pad its vocabulary
    assert capsys.readouterr().out == hf_tokenizer.decode(text) + "\n"


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_model_that_cannot_be_traced_is_a_one_line_error(tmp_path, monkeypatch, capfd):
    """torch printed the whole graph several times."""
    embed = GPT.embed
    monkeypatch.setattr(GPT, "embed", lambda self, *args: embed(self, *args) * (2 if args[0].sum() > 0 else 1))
    with pytest.raises(UserError, match=r"^--to=onnx: .*model\.py \(Could not guard .*\)$"):
        export_to(tmp_path / "exported", checkpoint_of(ByteTokenizer(), True, n_layer=1))
    assert not (tmp_path / "exported").exists()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("exported", ["learned"], indirect=True)
def test_an_export_with_different_logits_is_removed(exported, tmp_path, monkeypatch):
    other = {name: 1.1 * tensor for name, tensor in exported.loaded.model.items()}
    monkeypatch.setattr(onnx_export, "write_onnx", lambda _, folder: shutil.copytree(exported.folder, folder))
    export_to(tmp_path / "exported", exported.loaded)
    with pytest.raises(UserError, match="logits differ by"):
        export_to(tmp_path / "other", replace(exported.loaded, model=other))
    assert (tmp_path / "exported").exists() and not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", onnx_export.PACKAGES)
def test_a_missing_package_is_named(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    missing = f"^--to=onnx: .*{name} .*pip install -r .*requirements-export.txt$"
    with pytest.raises(UserError, match=missing):
        export_to(tmp_path / "exported", checkpoint_of(ByteTokenizer(), True))
    assert not (tmp_path / "exported").exists()


def test_a_music_tokenizer_is_an_error(tmp_path):
    loaded = checkpoint_of(MidiTokenizer(["NoteOn_60", "TimeShift_1.0.4"], {}), True)
    with pytest.raises(UserError, match=r"^random: --to=onnx .*'midi', .*; use --to=html$"):
        export_to(tmp_path / "exported", loaded)


def test_bad_paths_and_settings_are_one_line_errors(tmp_path):
    for name, arguments, message in (
        ("exported.onnx", (), r"--to=onnx .*folder; .*without \.onnx"),
        ("exported", ("--dtype=float16",), r"dtype=float16.*--to=html"),
    ):
        with pytest.raises(UserError, match=message):
            export_to(tmp_path / name, checkpoint_of(ByteTokenizer(), True), *arguments)
