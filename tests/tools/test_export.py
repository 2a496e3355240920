import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import model as model_py
from folio import UserError
from folio.checkpoints import export_formats, foreign
from folio.checkpoints.export_formats import FORMATS
from folio.checkpoints.tensor_files import write_tensors
from tests.support.exports import checkpoint_of, output_path, read_html, run_export
from tests.support.tiny_tokenizers import bpe
from tests.support.viewed_models import TOKENIZERS, save_random_run
from train import train

pytestmark = pytest.mark.architecture("folio/checkpoints/export_formats.py, which writes GPT-2's weights only")


def test_wrong_paths_are_an_error_with_an_example(tmp_path):
    for paths in ([], ["run"], ["run", "output", "more"]):
        with pytest.raises(UserError, match=r"python tools/export\.py --to=hf"):
            run_export(*paths)
    with pytest.raises(UserError, match=r"--to=gguf .*ends in \.gguf"):
        run_export("random", tmp_path / "exported", "--to=gguf")
    with pytest.raises(UserError, match=r"--to=nanogpt .*without \.gguf"):
        run_export("random", tmp_path / "exported.gguf", "--to=nanogpt")


@pytest.mark.needs("transformers")
def test_an_export_is_verified_and_removed_on_a_difference(run, tmp_path, capsys, monkeypatch):
    run_export(run, tmp_path / "hf")
    assert "tokens are identical; the largest relative difference of logits is" in capsys.readouterr().out
    with pytest.raises(UserError, match="already exists"):
        run_export(run, tmp_path / "hf")

    def write_other_weights(path, tensors, metadata):
        write_tensors(path, {name: 1.1 * tensor for name, tensor in tensors.items()}, metadata)

    monkeypatch.setattr(export_formats, "write_tensors", write_other_weights)
    with pytest.raises(UserError, match="logits differ by"):
        run_export(run, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no umask for groups and others")
@pytest.mark.parametrize("to", FORMATS)
def test_the_umask_decides_who_can_read_an_export(to, tmp_path):
    """model.safetensors of a folder for transformers was readable by its owner only."""
    for package in FORMATS[to].packages:
        pytest.importorskip(package)
    previous = os.umask(0o027)
    try:
        FORMATS[to].write(checkpoint_of(bpe(), bias=True), output_path(tmp_path / "new", to))
    finally:
        os.umask(previous)
    modes = {(path.is_dir(), path.stat().st_mode & 0o777) for path in (tmp_path / "new").rglob("*")}
    assert modes <= {(True, 0o750), (False, 0o640)} and (False, 0o640) in modes


class RMSNormAsLayerNorm(torch.nn.RMSNorm):
    """RMSNorm, which has the same parameters as nn.LayerNorm without a bias."""

    def __init__(self, size: int, bias: bool):
        super().__init__(size, eps=1e-5)


@pytest.mark.needs("transformers")
@pytest.mark.parametrize("to", FORMATS)
def test_an_edited_model_py_with_gpt2s_parameters_is_an_error(to, tmp_path, monkeypatch):
    """Folio's own reader computed the same as the edited model.py, so the export passed the check."""
    loaded = checkpoint_of(bpe(), False)
    monkeypatch.setattr(foreign, "load", lambda *_: loaded)
    path = output_path(tmp_path, to)
    monkeypatch.setattr(model_py, "LayerNorm", RMSNormAsLayerNorm)
    with pytest.raises(UserError, match=rf"^model\.py does not compute GPT-2.* \d\.\de-0\d .*--to={to}"):
        run_export("random", path, f"--to={to}")
    assert not path.exists()


def test_an_unwritable_output_is_an_error(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/exported cannot be written .*; choose another path"):
        run_export(run, tmp_path / "file" / "exported", "--to=nanogpt")


def test_an_export_to_nanogpt_can_be_loaded(tiny, tmp_path):
    train(cfg := tiny(max_iters=2, position="sinusoidal"))
    run_export(cfg.out_dir, tmp_path / "exported", "--to=nanogpt")
    loaded = foreign.load(str(tmp_path / "exported"))
    assert loaded.tokenizer.kind == "char" and loaded.build().num_params()["positions"] == 32 * 32


# --- HTML file --------------------------------------------------------------------------------------------------------


@pytest.fixture
def random_run(tmp_path) -> Path:
    """A run of random weights, without its training data."""
    sizes = dict(block_size=48, n_layer=2, n_head=2, n_embd=32)
    save_random_run(tmp_path / "run", TOKENIZERS["char"], 3, **sizes)
    return tmp_path / "run"


def assert_html_error(message: str, *arguments: object) -> None:
    """Assert that the export fails with an error in one line."""
    with pytest.raises(UserError, match=rf"^[^\n]*{message}[^\n]*$"):
        run_export(*arguments, "--to=html")


def test_bad_html_outputs_are_an_error(random_run, tmp_path):
    (tmp_path / "model.html").write_text("mine")
    assert_html_error("choose a name that ends in .html", random_run, tmp_path / "model.txt")
    assert_html_error("already exists", random_run, tmp_path / "model.html")
    assert_html_error("cannot be written", random_run, tmp_path / "model.html" / "model.html")
    assert_html_error(rf"with_index: {re.escape(str(random_run))}: ", random_run, tmp_path / "a.html", "--with_index")
    with pytest.raises(UserError, match=r"--to=hf .*without \.html"):
        run_export(random_run, tmp_path / "other.html", "--to=hf")
    with pytest.raises(UserError, match=r"dtype=int8.*--to=html"):
        run_export(random_run, tmp_path / "other", "--dtype=int8")
    assert (tmp_path / "model.html").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"run", "model.html"}


@pytest.mark.needs("transformers")
def test_an_edited_model_is_an_error_for_html(random_run, tmp_path, monkeypatch):
    """The JavaScript model would compute something else."""
    monkeypatch.setattr(model_py, "ACTIVATIONS", {**model_py.ACTIVATIONS, "gelu_new": F.relu})
    assert_html_error("model.py does not compute GPT-2", random_run, tmp_path / "model.html")
    assert not (tmp_path / "model.html").exists()


def test_an_html_file_without_its_training_data(random_run, tmp_path, capsys):
    """The loss is unknown, and the file does not contain the path of the run."""
    run_export(random_run, tmp_path / "model.html", "--to=html", "--text=To be", "--dtype=int8")
    printed = capsys.readouterr().out
    assert re.search(r"^the validation loss is not measured: .*the training data$", printed, re.MULTILINE)
    assert re.search(r"^\S+model\.html: 0\.\d MB, 0\.0 MB of weights in int8$", printed, re.MULTILINE)
    read = read_html(tmp_path / "model.html")
    assert read.header["losses"] == [] and read.header["text"] == "To be" and read.header["name"] == "run"
    assert str(tmp_path) not in json.dumps(read.header)


def test_an_html_file_with_its_training_data(run, tmp_path, capsys):
    run_export(run, tmp_path / "model.html", "--to=html", "--dtype=float32", "--with_index")
    printed = capsys.readouterr().out
    for line in (
        r"measuring the loss of the stored weights and writing the file",
        r"indexing the training data",
        r"\S+model\.html: 0\.\d MB, 0\.1 MB of weights in float32",
        r"the index of the training data takes 0\.1 MB",
        r"loss on [\d,]+ validation tokens of verse: \d\.\d{4} nats per token",
    ):
        assert re.search(f"^{line}$", printed, re.MULTILINE), line
    header = read_html(tmp_path / "model.html").header
    (losses,) = header["losses"]
    assert losses["of"] == "verse" and losses["before"] == losses["after"] and header["languages"] is None
    assert header["index"]["codes"]["offset"] == header["storage"]["bytes"]


@pytest.mark.parametrize("words", [[], ["--with_index"]])
def test_an_html_file_knows_how_much_of_its_text_occurs_in_the_training_data(words, run, text, tmp_path):
    """The first text was training text, and the file showed its loss as if it were new."""
    quote = text[5000:5032]
    for shown, expected in ((quote, 32), (quote[::-1], 0)):
        output = tmp_path / f"{expected}.html"
        run_export(run, output, "--to=html", f"--text={shown}", *words)
        overlap = read_html(output).header["initial_overlap"]
        facts = {"characters": 32, "in_training": expected, "searched": 18_581, "complete": True}
        assert overlap["facts"] == {"reason": None, "init_from": "scratch", **facts} and len(overlap["ids"]) == 32


@pytest.mark.needs("transformers")
def test_without_transformers_only_html_and_nanogpt_exports_work(run, tmp_path, monkeypatch, capsys):
    """--to=html needed transformers, which requirements.txt does not have."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    run_export(run, tmp_path / "model.html", "--to=html")
    assert (tmp_path / "model.html").exists()
    run_export(run, tmp_path / "nanogpt", "--to=nanogpt")
    assert "model.py was not compared with GPT-2" in capsys.readouterr().err
    for to, name in ("hf", "a"), ("gguf", "a.gguf"), ("onnx", "a"):
        missing = rf"^--to={to}: the package transformers is not installed: pip install -r .*requirements-export.txt$"
        with pytest.raises(UserError, match=missing):
            run_export(run, tmp_path / name, f"--to={to}")
