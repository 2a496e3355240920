"""Write a trained model in the format of others, and check that it still computes the same.

    python tools/export.py out-shakespeare-char exported
    python tools/export.py out-shakespeare-char exported --checkpoint=last

The folder opens with transformers' AutoModelForCausalLM and AutoTokenizer. At the end its logits and its tokenizer are
held against Folio's on a text that the model writes; where they differ, the folder is removed and the command fails.
"""

import argparse
import shutil
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError, convert  # noqa: E402
from folio.checkpoint import Checkpoint  # noqa: E402
from folio.configurator import run_script  # noqa: E402
from folio.generate import generate, opening  # noqa: E402
from folio.runtime import decide  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402

TOLERANCE = 1e-4  # of the logits, in float32, relative to the largest


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="tools/export.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="a run's folder, a checkpoint, or whatever --init_from takes")
    parser.add_argument("folder", type=Path, help="to be made")
    parser.add_argument("--to", choices=["hf"], default="hf", help="the format (%(default)s)")
    parser.add_argument("--checkpoint", choices=["best", "last"], default="best", help="of a run (%(default)s)")
    args = parser.parse_args(words)
    if args.folder.exists():
        raise UserError(f"{args.folder} is there already; name another folder")
    loaded = convert.load(args.run, args.checkpoint)
    try:
        convert.to_hugging_face(loaded, args.folder)
        print(f"{args.folder}: {parity(loaded, args.folder)}")
    except BaseException:
        shutil.rmtree(args.folder, ignore_errors=True)
        raise


def parity(loaded: Checkpoint, folder: Path) -> str:
    """Hold the folder against the checkpoint. Raises UserError if it computes or tokenizes anything else."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours = loaded.build(GPT, GPTConfig).eval()
    runtime = decide("cpu", "float32", False)
    made_with = loaded.tokenizer
    steps = generate(ours, [opening(made_with)], runtime, max_new_tokens=200, vocab_size=made_with.vocab_size)
    text = made_with.decode([step.tokens[0] for step in steps if step.tokens[0] != made_with.eot])
    ids = loaded.tokenizer.encode(text).tolist()
    theirs = AutoTokenizer.from_pretrained(folder)
    if theirs(text, add_special_tokens=False)["input_ids"] != ids or theirs.decode(ids) != text:
        raise UserError(f"{folder}: the exported tokenizer reads {text[:40]!r}... as other ids")
    window = torch.tensor([ids[: ours.config.block_size]])
    with torch.inference_mode():
        expected, _ = ours(window, window)
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(window).logits
    off = float((found - expected).abs().max() / expected.abs().max())
    if not off < TOLERANCE:
        raise UserError(f"{folder}: the exported model's logits are off by {off:.1e} of the largest")
    return f"{len(ids)} tokens read alike, logits within {off:.0e} of the largest"


if __name__ == "__main__":
    run_script(main)
