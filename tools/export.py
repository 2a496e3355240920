"""Export a trained model for another program, and check that it still computes the same.

    python tools/export.py --to=hf out-shakespeare-char exported
    python tools/export.py --to=gguf gpt2 gpt2.gguf
    python tools/export.py --to=nanogpt out-shakespeare-char exported --checkpoint=last
    python tools/export.py --to=onnx out-shakespeare-char exported                 a graph for ONNX Runtime
    python tools/export.py --to=html out-shakespeare-char model.html               generates text in a browser, offline

A checkpoint with a parameter or a setting that the format cannot hold is refused, and so is one whose logits are not
those of transformers' GPT-2 with the same weights. The export is then checked: its logits and its tokenizer are
compared with Folio's, on train.py and on a text that the model generates. If they differ, the export is removed and the
command fails.

An ONNX graph is traced from model.py, and holds whatever model.py computes.

An HTML file also holds models with other positions than GPT-2's. Its weights are read back and compared, the loss on
the validation set is printed before and after they were rounded, and in the browser the file compares its logits with
those of model.py. docs/inside.md shows such a file.
"""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.base.progress import progress_bar  # noqa: E402
from folio.base.settings import Settings, run_script  # noqa: E402
from folio.checkpoints import foreign, onnx_export  # noqa: E402
from folio.checkpoints.checkpoint import Checkpoint  # noqa: E402
from folio.checkpoints.export_formats import (  # noqa: E402
    FORMATS,
    ExportedModel,
    check_fits,
    check_tokenizer,
    transformers_model,
    with_position_table,
)
from folio.checkpoints.find_runs import resolve  # noqa: E402
from folio.data.shards import Dataset  # noqa: E402
from folio.data.sources.pairs import Pair, validation_pairs  # noqa: E402
from folio.decoding.decoders import make_decoder  # noqa: E402
from folio.decoding.prompt_files import read_prompt  # noqa: E402
from folio.decoding.prompts import default_prompt, encode_prompt  # noqa: E402
from folio.decoding.scheduler import generate  # noqa: E402
from folio.evaluation.overlap import open_training_data  # noqa: E402
from folio.evaluation.scores import LOSS  # noqa: E402
from folio.evaluation.text_loss import Stream, measure_text, shard_streams  # noqa: E402
from folio.machine.runtime import resolve_runtime  # noqa: E402
from folio.web import html_file  # noqa: E402
from folio.web.html_file import Weights  # noqa: E402
from folio.web.questions import MOST_CHARACTERS  # noqa: E402
from folio.web.viewed_model import ViewedModel, choose_text  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402

TOLERANCE = 1e-4  # largest difference of the logits in float32, relative to the largest logit
OTHER_GELU_TOLERANCE = 1e-2  # the same where one computes exact GELU and the other one GPT-2's approximation
HTML, ONNX = ".html", ".onnx"
LOSS_TOKENS = 100_000  # for validation, the first ones, on which the loss of an HTML file's weights is measured
LOSS_WORK = 2e11  # parameters times tokens: fewer tokens of a large model, but at least LEAST_LOSS_TOKENS
LEAST_LOSS_TOKENS = 10_000


@dataclass(frozen=True)
class ExportConfig(Settings):
    # --- files ---
    paths: tuple[str, ...] = ()  # RUN OUTPUT: a run, a checkpoint, or what --init_from takes; the path to write
    # a folder for transformers; gguf: a llama.cpp file; nanogpt: a folder; onnx: a folder for ONNX Runtime; html
    to: Literal[(*FORMATS, "onnx", "html")] = "hf"
    checkpoint: Literal["best", "last"] = "best"  # of a run
    # --- an HTML file ---
    dtype: Literal[html_file.DTYPES] = "float16"  # of its weights; with float32, it generates what sample.py does
    text: str = ""  # to show first, as in tools/view.py
    with_index: bool = False  # also store an index of the training data, for the view of what was memorized
    data_dir: str | None = None  # folder of data sets to look in if the training data is not where it was

    def problems(self) -> list[tuple[str, str]]:
        """There are two paths, and the settings of an HTML file are for one."""
        problems = []
        if len(self.paths) != 2:
            output = "model.html" if self.to == "html" else "exported"
            command = f"python tools/export.py --to={self.to} out-shakespeare-char {output}"
            problems = [("paths", f"give two, the run and the path to write: {command}")]
        of_html = [name for name in ("dtype", "text", "with_index", "data_dir") if self.is_set(name)]
        return problems + [(name, "it needs --to=html") for name in of_html if self.to != "html"]


def main(cfg: ExportConfig) -> None:
    output = Path(cfg.paths[1])
    check_output(output, cfg.to)
    {"onnx": export_onnx, "html": export_html}.get(cfg.to, export_gpt2)(cfg, output)


def check_output(output: Path, to: str) -> None:
    """Raise UserError if the output exists, or is a folder where the format is a file or the other way around."""
    if output.exists():
        raise UserError(f"{output} already exists; choose another path")
    suffixes = {name: target.suffix for name, target in FORMATS.items()} | {"onnx": "", "html": HTML}
    suffix, is_file = suffixes[to], output.suffix in {*suffixes.values(), ONNX} - {""}
    if suffix and output.suffix != suffix:
        raise UserError(f"{output}: --to={to} writes a file; choose a name that ends in {suffix}")
    if is_file and not suffix:
        raise UserError(f"{output}: --to={to} writes a folder; choose a name without {output.suffix}")


@contextmanager
def removed_on_error(output: Path) -> Iterator[None]:
    """Remove the output, a file or a folder, if the block fails. Raises UserError if it cannot be written."""
    try:
        yield
    except BaseException as error:
        with suppress(OSError):
            shutil.rmtree(output) if output.is_dir() else output.unlink()
        if isinstance(error, OSError):
            raise UserError(f"{output} cannot be written ({error}); choose another path") from None
        raise


# --- formats of GPT-2 -------------------------------------------------------------------------------------------------


def export_gpt2(cfg: ExportConfig, output: Path) -> None:
    """Export to one of FORMATS."""
    run, target = resolve(cfg.paths[0]), FORMATS[cfg.to]
    loaded = foreign.load(run, cfg.checkpoint)
    gpt2 = with_position_table(loaded)
    check_fits(gpt2, cfg.to)
    check_computes_gpt2(loaded, gpt2, cfg.to)
    same_activation = loaded.state["model"].get("activation", GPTConfig.activation) in target.activations
    tolerance = TOLERANCE if same_activation else OTHER_GELU_TOLERANCE
    with removed_on_error(output):
        target.write(gpt2, output)
        checked = compare(loaded, target.open(output), tolerance)
        if target.card:
            (output / "README.md").write_text(target.card(loaded, output.name, checked), encoding="utf-8")
    print(f"{output}: {target.content}")
    print(f"checked: {checked}")
    if target.card:
        print(f"{output / 'README.md'} says how to use it, and what the model is")


def check_computes_gpt2(loaded: Checkpoint, gpt2: Checkpoint, to: str) -> None:
    """Raise UserError unless model.py computes from the checkpoint what transformers' GPT-2 does from `gpt2`, which is
    the checkpoint with a table of position embeddings.

    A changed model.py may have the same parameters and compute something else. The check of the export would not notice
    that if Folio itself reads the format.
    """
    shape = gpt2.state["model"]
    ids = torch.arange(shape["block_size"])[None] % shape["vocab_size"]  # (1, T)
    with torch.inference_mode():
        logits = loaded.build().eval().logits(ids)  # (1, T, V)
        difference = relative_difference(logits, transformers_model(shape, gpt2.model)(ids).logits)
    if not difference < TOLERANCE:  # also if it is NaN
        raise UserError(
            f"model.py does not compute GPT-2: with these weights its logits differ by {difference:.1e} of the largest "
            f"from transformers' GPT-2, and --to={to} holds only GPT-2"
        )


def relative_difference(logits: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected logit."""
    return float((logits - expected).abs().max() / expected.abs().max())


def compare(loaded: Checkpoint, exported: ExportedModel, tolerance: float = TOLERANCE) -> str:
    """Compare an export with the checkpoint. Raises UserError if it tokenizes or computes something else."""
    model, tokenizer = loaded.build().eval(), loaded.tokenizer
    tokenizer.on_unknown = "skip"
    n_tokens, differences = 0, []
    for text in ((ROOT / "train.py").read_text(encoding="utf-8"), generate_text(model, loaded)):
        ids = tokenizer.encode(text).tolist()
        known_text = tokenizer.decode(ids)  # without the characters that this tokenizer lacks
        if exported.encode(known_text) != ids or exported.decode(ids) != known_text:
            raise UserError(f"the exported tokenizer encodes {known_text[:40]!r}... differently")
        context = torch.tensor([ids[: model.config.block_size]])  # (1, T)
        with torch.inference_mode():
            expected = model.logits(context)  # (1, T, V)
            difference = relative_difference(exported.logits(context), expected)
        if not difference < tolerance:  # also if it is NaN
            raise UserError(f"the exported model's logits differ by {difference:.1e} of the largest")
        n_tokens += len(ids)
        differences.append(difference)
    return f"{n_tokens:,} tokens are identical; the largest relative difference of logits is {max(differences):.0e}"


def generate_text(model: GPT, loaded: Checkpoint) -> str:
    """200 tokens of the model's text."""
    tokenizer = loaded.tokenizer
    runtime = resolve_runtime("cpu", "float32", False)
    decoder = make_decoder(model, runtime)
    steps = generate(decoder, [default_prompt(tokenizer)], max_new_tokens=200, vocab_size=tokenizer.vocab_size)
    return tokenizer.decode([step.tokens[0] for step in steps if step.tokens[0] != tokenizer.eot])


# --- ONNX -------------------------------------------------------------------------------------------------------------


def export_onnx(cfg: ExportConfig, output: Path) -> None:
    """Export to a folder with an ONNX graph."""
    onnx_export.check_packages()
    loaded = foreign.load(resolve(cfg.paths[0]), cfg.checkpoint)
    check_tokenizer(loaded, cfg.to, FORMATS["hf"].tokenizers)
    with removed_on_error(output):
        onnx_export.write_onnx(loaded, output)
        checked = compare(loaded, onnx_export.open_with_onnxruntime(output))
    print(f"{output}: {onnx_export.MODEL} for ONNX Runtime, and a tokenizer that transformers' AutoTokenizer opens")
    print(f"checked: {checked}")


# --- an HTML file -----------------------------------------------------------------------------------------------------


def export_html(cfg: ExportConfig, output: Path) -> None:
    """Export to an HTML file."""
    viewed = ViewedModel(cfg.paths[0], cfg.checkpoint, torch.device("cpu"))
    loaded = replace(viewed.saved, model=dict(viewed.opened.named_parameters()))
    html_file.check_fits(loaded)
    gpt2 = with_position_table(loaded)
    if gpt2.config().position == "learned":
        check_computes_gpt2(loaded, gpt2, cfg.to)
    text = read_prompt("text", cfg.text, viewed.tokenizer) or choose_text(viewed, cfg.data_dir)
    if len(text) > MOST_CHARACTERS:
        raise UserError(f"text: it has {len(text):,} characters; the limit is {MOST_CHARACTERS:,}")
    encode_prompt(viewed.tokenizer, text, "skip")  # raises UserError if it is not music, but should be
    weights = html_file.pack_weights(loaded.model, cfg.dtype)
    stored = replace(loaded, model=html_file.unpack_weights(weights)).build()
    losses, languages, index, content = [], None, None, weights.content
    try:
        datasets = open_training_data(viewed.saved, cfg.data_dir)
        print("measuring the loss of the stored weights, and writing the file", flush=True)
        losses = [measure_losses(dataset, viewed.opened, stored) for dataset in progress_bar(iterable=datasets)]
        languages = html_file.find_languages(held_out_pairs(datasets))
        if cfg.with_index:
            print("making the index of the training data", flush=True)
            search = html_file.index_training_data(datasets, viewed.tokenizer)
            index, of_index = html_file.pack_index(search, len(content))
            content += of_index
    except UserError as problem:
        if cfg.with_index:
            raise UserError(f"with_index: {cfg.paths[0]}: {problem}") from None
        print(f"the validation loss is not measured: {problem}")
    header = html_file.make_header(viewed, stored, weights, cfg.dtype, text, losses, languages, index)
    with removed_on_error(output):
        html_file.write_html(output, header, content)
        check_weights(loaded.model, html_file.read_html(output).weights)
    whole, stored_bytes = output.stat().st_size, len(weights.content)
    print(f"{output}: {whole / 1e6:.1f} MB, {stored_bytes / 1e6:.1f} MB of weights in {cfg.dtype}")
    if index:
        print(f"the index of the training data has {(len(content) - stored_bytes) / 1e6:.1f} MB")
    for loss in losses:
        print(describe_losses(loss, cfg.dtype))
    if languages:
        codes = sorted({code for pair in languages["pairs"] for code in pair})
        print(f"it translates between {', '.join(codes)}")
    if not header["traced"]:
        print(f"it only generates: views of what is inside are for at most {html_file.MOST_TRACED:,} parameters")
    print(f"open it in a browser: {output.resolve().as_uri()}")


def held_out_pairs(datasets: list[Dataset]) -> list[Pair]:
    """The pairs for validation of the first data set that has some."""
    for dataset in datasets:
        with suppress(UserError):  # a data set of text
            return validation_pairs(dataset)
    return []


def measure_losses(dataset: Dataset, model: GPT, stored: GPT) -> dict[str, Any]:
    """The loss on the first tokens for validation, before and after the weights were rounded.

    of: the data set. tokens: that count.
    """
    runtime, tokenizer = resolve_runtime("cpu", "float32", False), dataset.load_tokenizer()
    most = int(max(LEAST_LOSS_TOKENS, min(LOSS_TOKENS, LOSS_WORK // model.num_params()["total"])))
    streams = []
    for stream in shard_streams(dataset.val, tokenizer):
        streams.append(Stream(*(column[:most] for column in stream)))
        most -= len(streams[-1].ids)
        if most < 2:
            break
    counted = sum(int(np.count_nonzero(stream.counted[1:])) for stream in streams)
    if not counted:
        raise UserError(f"{dataset.folder} has no tokens for validation")
    losses = {}
    for name, measured in (("before", model), ("after", stored)):
        name_of_set = f"{dataset.folder.name}, validation"
        measures = measure_text(measured.eval(), tokenizer, runtime, name_of_set, streams, measured.config.block_size)
        (loss,) = (measure for measure in measures if measure.name == LOSS)
        losses[name] = loss.ratio
    return {"of": dataset.folder.name, "tokens": counted, **losses}


def describe_losses(loss: dict[str, Any], dtype: str) -> str:
    """A line about what measure_losses returned."""
    line = f"loss on {loss['tokens']:,} validation tokens of {loss['of']}: {loss['before']:.4f} nats per token"
    if dtype == "float32":
        return line
    change = round(loss["after"] - loss["before"], 4) + 0.0  # never -0.0000
    return f"{line}, {loss['after']:.4f} as stored in {dtype} ({change:+.4f})"


def check_weights(tensors: dict[str, Tensor], weights: Weights) -> None:
    """Raise UserError unless weights that were read from a file are the tensors, rounded to their dtypes."""
    stored = html_file.unpack_weights(weights)
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


if __name__ == "__main__":
    run_script(main, ExportConfig)
