"""Export a trained model for another program, and check that it still computes the same.

    python tools/export.py --to=hf out-shakespeare-char exported
    python tools/export.py --to=gguf gpt2 gpt2.gguf
    python tools/export.py --to=nanogpt out-shakespeare-char exported --checkpoint=last

A checkpoint with a parameter or a setting that the format cannot hold is refused, and so is one whose logits are not
those of transformers' GPT-2 with the same weights. The export is then checked: its logits and its tokenizer are
compared with Folio's, on train.py and on a text that the model generates. If they differ, the export is removed and the
command fails.
"""

import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError, convert  # noqa: E402
from folio.checkpoint import Checkpoint  # noqa: E402
from folio.configurator import Settings, run_script  # noqa: E402
from folio.export_formats import (  # noqa: E402
    FORMATS,
    ExportedModel,
    check_fits,
    transformers_model,
    with_position_table,
)
from folio.generate import default_prompt, generate  # noqa: E402
from folio.runs import resolve  # noqa: E402
from folio.runtime import resolve_runtime  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402

TOLERANCE = 1e-4  # largest difference of the logits in float32, relative to the largest logit
OTHER_GELU_TOLERANCE = 1e-2  # the same where one computes exact GELU and the other one GPT-2's approximation


@dataclass(frozen=True)
class ExportConfig(Settings):
    # --- files ---
    paths: tuple[str, ...] = ()  # RUN OUTPUT: a run, a checkpoint, or what --init_from takes; the path to write
    to: Literal[tuple(FORMATS)] = "hf"  # a folder for transformers; gguf: a llama.cpp file; nanogpt: a folder, ckpt.pt
    checkpoint: Literal["best", "last"] = "best"  # of a run

    def problems(self) -> list[tuple[str, str]]:
        """There are two paths."""
        if len(self.paths) != 2:
            return [("paths", "give two, RUN OUTPUT: python tools/export.py --to=hf out-shakespeare-char exported")]
        return []


def main(cfg: ExportConfig) -> None:
    run, output, target = resolve(cfg.paths[0]), Path(cfg.paths[1]), FORMATS[cfg.to]
    check_output(output, cfg.to)
    loaded = convert.load(run, cfg.checkpoint)
    gpt2 = with_position_table(loaded)
    check_fits(gpt2, cfg.to)
    check_computes_gpt2(loaded, gpt2, cfg.to)
    same_activation = loaded.state["model"].get("activation", GPTConfig.activation) in target.activations
    tolerance = TOLERANCE if same_activation else OTHER_GELU_TOLERANCE
    try:
        target.write(gpt2, output)
        checked = compare(loaded, target.open(output), tolerance)
        if target.card:
            (output / "README.md").write_text(target.card(loaded, output.name, checked), encoding="utf-8")
    except BaseException as error:
        with suppress(OSError):
            shutil.rmtree(output) if output.is_dir() else output.unlink()
        if isinstance(error, OSError):
            raise UserError(f"{output} cannot be written ({error}); choose another path") from None
        raise
    print(f"{output}: {target.content}")
    print(f"checked: {checked}")
    if target.card:
        print(f"{output / 'README.md'} says how to use it, and what the model is")


def check_output(output: Path, to: str) -> None:
    """Raise UserError if the output exists, or is a folder where the format is a file or the other way around."""
    if output.exists():
        raise UserError(f"{output} already exists; choose another path")
    suffix = FORMATS[to].suffix
    is_file = output.suffix in {target.suffix for target in FORMATS.values()} - {""}
    if suffix and output.suffix != suffix:
        raise UserError(f"{output}: --to={to} writes a file; choose a name that ends in {suffix}")
    if is_file and not suffix:
        raise UserError(f"{output}: --to={to} writes a folder; choose a name without {output.suffix}")


def check_computes_gpt2(loaded: Checkpoint, gpt2: Checkpoint, to: str) -> None:
    """Raise UserError unless model.py computes from the checkpoint what transformers' GPT-2 does from `gpt2`, which is
    the checkpoint with a table of position embeddings.

    A changed model.py may have the same parameters and compute something else. The check of the export would not notice
    that if Folio itself reads the format.
    """
    shape = gpt2.state["model"]
    ids = torch.arange(shape["block_size"])[None] % shape["vocab_size"]  # (1, T)
    with torch.inference_mode():
        logits = loaded.build().eval()(ids, ids)[0]  # (1, T, V)
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
            expected = model(context, context)[0]  # (1, T, V)
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
    steps = generate(model, [default_prompt(tokenizer)], runtime, max_new_tokens=200, vocab_size=tokenizer.vocab_size)
    return tokenizer.decode([step.tokens[0] for step in steps if step.tokens[0] != tokenizer.eot])


if __name__ == "__main__":
    run_script(main, ExportConfig)
