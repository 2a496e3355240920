"""Export a trained model for another program, and verify the export.

    python tools/export.py --to=hf out-shakespeare-char exported
    python tools/export.py --to=gguf gpt2 gpt2.gguf
    python tools/export.py --to=nanogpt out-shakespeare-char exported --checkpoint=last
    python tools/export.py --to=onnx out-shakespeare-char exported                 a graph for ONNX Runtime
    python tools/export.py --to=html out-shakespeare-char model.html               generates text in a browser, offline

It is an error if the format cannot represent a parameter or a setting of the checkpoint, or if the logits differ from
those of transformers' GPT-2 with the same weights. After the export, its logits and its tokenizer are compared with
Folio's, on train.py and on a generated text. If they differ, the export is removed and the command fails. Without
transformers, only nanogpt and html files can be written, and model.py is not compared with GPT-2.

An ONNX graph is traced from model.py, so it supports every model.

An HTML file also supports other position encodings than GPT-2's. The export reads the file back and compares it, and
prints the validation loss before and after rounding. In the browser, the file compares its logits with model.py's.
docs/use/inside.md shows such a file.
"""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.base.packages import is_installed, require  # noqa: E402
from folio.base.progress import note  # noqa: E402
from folio.base.settings import Settings, run_script  # noqa: E402
from folio.base.terminal import say  # noqa: E402
from folio.checkpoints import foreign, onnx_export  # noqa: E402
from folio.checkpoints.export_formats import (  # noqa: E402
    FORMATS,
    check_fits,
    check_tokenizer,
    describe_documents,
    with_position_table,
)
from folio.checkpoints.find_runs import find_run  # noqa: E402
from folio.evaluation.export_checks import check_computes_gpt2, compare_export, logit_tolerance  # noqa: E402
from folio.web import html_export, html_file  # noqa: E402
from folio.web.viewed_model import ViewedModel  # noqa: E402

HTML, ONNX = ".html", ".onnx"


@dataclass(frozen=True)
class ExportConfig(Settings):
    # --- files ---
    paths: tuple[str, ...] = ()  # RUN OUTPUT: a run, a checkpoint, or what --init_from takes; the path to write
    to: Literal[(*FORMATS, "onnx", "html")] = "hf"  # hf for transformers, gguf for llama.cpp, nanogpt, onnx, or html
    checkpoint: Literal["best", "last"] = "best"  # which checkpoint of a run
    # --- HTML file ---
    dtype: Literal[html_file.DTYPES] = "float16"  # or int8, or float32, which generates the text of sample.py
    text: str = ""  # initial text, as in tools/view.py
    with_index: bool = False  # also store an index of the training data, for the view of memorized text
    data_dir: str | None = None  # folder of the data sets, used if the training data has moved

    def problems(self) -> list[tuple[str, str]]:
        """Require two paths, and settings of an HTML file only with --to=html."""
        problems = []
        if len(self.paths) != 2:
            output = "model.html" if self.to == "html" else "exported"
            command = f"python tools/export.py --to={self.to} out-shakespeare-char {output}"
            problems = [("paths", f"give a run and an output path: {command}")]
        html_settings = [name for name in ("dtype", "text", "with_index", "data_dir") if self.is_set(name)]
        return problems + [(name, "it needs --to=html") for name in html_settings if self.to != "html"]


def main(cfg: ExportConfig) -> None:
    output = Path(cfg.paths[1])
    check_output(output, cfg.to)
    {"onnx": export_onnx, "html": export_html}.get(cfg.to, export_gpt2)(cfg, output)


def check_output(output: Path, to: str) -> None:
    """Raise UserError if the output exists, or its suffix does not match the format."""
    if output.exists():
        raise UserError(f"{output} already exists; choose another path")
    suffixes = {name: target.suffix for name, target in FORMATS.items()} | {"onnx": "", "html": HTML}
    suffix, has_file_suffix = suffixes[to], output.suffix in {*suffixes.values(), ONNX} - {""}
    if suffix and output.suffix != suffix:
        raise UserError(f"{output}: --to={to} writes a file; choose a name that ends in {suffix}")
    if has_file_suffix and not suffix:
        raise UserError(f"{output}: --to={to} writes a folder; choose a name without {output.suffix}")


@contextmanager
def removed_on_error(output: Path) -> Iterator[None]:
    """Remove the output, a file or a folder, if the block fails. Raises UserError for an OSError."""
    try:
        yield
    except BaseException as error:
        with suppress(OSError):
            shutil.rmtree(output) if output.is_dir() else output.unlink()
        if isinstance(error, OSError):
            raise UserError(f"{output} cannot be written ({error}); choose another path") from None
        raise


# --- formats ----------------------------------------------------------------------------------------------------------


def export_gpt2(cfg: ExportConfig, output: Path) -> None:
    """Export to one of FORMATS."""
    run, target = find_run(cfg.paths[0]), FORMATS[cfg.to]
    require(f"--to={cfg.to}", *target.packages)
    loaded = foreign.load(run, cfg.checkpoint)
    gpt2 = with_position_table(loaded)
    check_fits(gpt2, cfg.to)
    if is_installed("transformers"):
        check_computes_gpt2(loaded, gpt2, cfg.to)
    else:
        note("transformers is not installed, so model.py was not compared with GPT-2")
    with removed_on_error(output):
        target.write(gpt2, output)
        checked = compare_export(loaded, target.open(output), logit_tolerance(loaded, target.activations))
        if target.card:
            (output / "README.md").write_text(target.card(loaded, output.name, checked), encoding="utf-8")
    say(f"{output}: {target.content}")
    say(f"checked: {checked}", *describe_documents(loaded))
    if target.card:
        say(f"{output / 'README.md'} describes the model and its use")


def export_onnx(cfg: ExportConfig, output: Path) -> None:
    """Export to a folder with an ONNX graph."""
    require("--to=onnx", *onnx_export.PACKAGES)
    loaded = foreign.load(find_run(cfg.paths[0]), cfg.checkpoint)
    check_tokenizer(loaded, cfg.to, FORMATS["hf"].tokenizers)
    with removed_on_error(output):
        onnx_export.write_onnx(loaded, output)
        checked = compare_export(loaded, onnx_export.open_with_onnxruntime(output))
    say(f"{output}: {onnx_export.MODEL} for ONNX Runtime, and a tokenizer for transformers' AutoTokenizer")
    say(f"checked: {checked}", *describe_documents(loaded))


def export_html(cfg: ExportConfig, output: Path) -> None:
    """Export to an HTML file."""
    viewed = ViewedModel(cfg.paths[0], cfg.checkpoint, torch.device("cpu"))
    loaded = html_export.checked_checkpoint(viewed)
    text = html_export.first_text(viewed, cfg.text, cfg.data_dir)
    weights = html_file.pack_weights(loaded.model, cfg.dtype)
    stored = replace(loaded, model=html_file.unpack_weights(weights)).build()
    try:
        index_offset = len(weights.content) if cfg.with_index else None
        facts, index = html_export.read_training_data(viewed, stored, text, cfg.data_dir, index_offset)
    except UserError as problem:
        if cfg.with_index:
            raise UserError(f"with_index: {cfg.paths[0]}: {problem}") from None
        say(f"the validation loss is not measured: {problem}")
        facts, index = {}, b""
    facts["training"] = html_export.record_training(viewed, text)
    header = html_file.make_header(viewed, stored, weights, cfg.dtype, text, facts)
    with removed_on_error(output):
        html_file.write_html(output, header, weights.content + index)
    for line in html_export.describe_file(output, header):
        say(line)


if __name__ == "__main__":
    run_script(main, ExportConfig, needs_output=False)
