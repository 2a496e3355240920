"""Write a trained model in the format of others, and check that it still computes the same.

    python tools/export.py --to=hf out-shakespeare-char exported
    python tools/export.py --to=gguf gpt2 gpt2.gguf
    python tools/export.py --to=nanogpt out-shakespeare-char exported --checkpoint=last

hf: a folder that transformers' AutoModelForCausalLM and AutoTokenizer open. gguf: a file for llama.cpp, in float32, of
a model with GPT-2's or a BPE of one's own. nanogpt: a folder with ckpt.pt, and for characters the data set's meta.pkl.
At the end the logits and the tokenizer of what was written are held against Folio's, on train.py and on a text that
the model writes; where they differ, it is removed and the command fails.
"""

import argparse
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError, convert  # noqa: E402
from folio.checkpoint import Checkpoint  # noqa: E402
from folio.configurator import run_script  # noqa: E402
from folio.generate import default_prompt, generate  # noqa: E402
from folio.runtime import resolve_runtime  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402

TOLERANCE = 1e-4  # of the logits, in float32, relative to the largest
OTHER_GELU = 1e-2  # the same, where exact GELU takes the place of GPT-2's approximation, or the other way round
WRITERS = {"hf": convert.to_hugging_face, "gguf": convert.to_gguf, "nanogpt": convert.to_nanogpt}
Encode, Decode, Logits = Callable[[str], list[int]], Callable[[list[int]], str], Callable[[torch.Tensor], torch.Tensor]


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="tools/export.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="a run's folder, a checkpoint, or whatever --init_from takes")
    parser.add_argument("made", type=Path, help="the folder, or the .gguf file, to be made")
    parser.add_argument("--to", choices=WRITERS, default="hf", help="the format (%(default)s)")
    parser.add_argument("--checkpoint", choices=["best", "last"], default="best", help="of a run (%(default)s)")
    args = parser.parse_args(words)
    if args.made.exists():
        raise UserError(f"{args.made} is there already; name another one")
    if (args.to == "gguf") != (args.made.suffix == ".gguf"):
        raise UserError(f"{args.made}: with --to=gguf it is a file, NAME.gguf; otherwise a folder")
    loaded = convert.load(args.run, args.checkpoint)
    try:
        WRITERS[args.to](loaded, args.made)
        theirs = {"gguf": "gelu_new", "nanogpt": "gelu"}
        same = theirs.get(args.to) in (None, loaded.state["model"].get("activation", "gelu_new"))
        tolerance = TOLERANCE if same else OTHER_GELU
        print(f"{args.made}: {parity(loaded, *opened(args.to, args.made), tolerance)}")
    except BaseException as error:
        with suppress(OSError):
            shutil.rmtree(args.made) if args.made.is_dir() else args.made.unlink()
        if isinstance(error, OSError):
            raise UserError(f"{args.made} cannot be written ({error}); name another place") from None
        raise


def opened(to: str, made: Path) -> tuple[Encode, Decode, Logits]:
    """What was written, as others read it: text to ids, ids to text, and ids (1, T) to logits (1, T, V)."""
    if to == "hf":
        from transformers import AutoModelForCausalLM, AutoTokenizer

        theirs, model = AutoTokenizer.from_pretrained(made), AutoModelForCausalLM.from_pretrained(made).float()
        return (
            lambda text: theirs(text, add_special_tokens=False).input_ids,
            theirs.decode,
            lambda ids: model(ids).logits,
        )
    again = convert.load(str(made / "ckpt.pt" if to == "nanogpt" else made))
    network = again.build(GPT, GPTConfig).eval()
    return lambda text: again.tokenizer.encode(text).tolist(), again.tokenizer.decode, lambda ids: network(ids, ids)[0]


def parity(loaded: Checkpoint, encode: Encode, decode: Decode, logits: Logits, tolerance: float = TOLERANCE) -> str:
    """Hold what was written against the checkpoint. Raises UserError if it computes or tokenizes anything else."""
    ours, tokenizer = loaded.build(GPT, GPTConfig).eval(), loaded.tokenizer
    tokenizer.on_unknown = "skip"
    runtime = resolve_runtime("cpu", "float32", False)
    steps = generate(ours, [default_prompt(tokenizer)], runtime, max_new_tokens=200, vocab_size=tokenizer.vocab_size)
    written = tokenizer.decode([step.tokens[0] for step in steps if step.tokens[0] != tokenizer.eot])
    read, off = 0, 0.0
    for text in ((ROOT / "train.py").read_text(encoding="utf-8"), written):
        ids = tokenizer.encode(text).tolist()
        text = tokenizer.decode(ids)  # without the characters that this tokenizer lacks
        if encode(text) != ids or decode(ids) != text:
            raise UserError(f"the exported tokenizer reads {text[:40]!r}... as other ids")
        window = torch.tensor([ids[: ours.config.block_size]])
        with torch.inference_mode():
            expected = ours(window, window)[0]
            off = max(off, float((logits(window) - expected).abs().max() / expected.abs().max()))
        read += len(ids)
    if not off < tolerance:
        raise UserError(f"the exported model's logits are off by {off:.1e} of the largest")
    return f"{read:,} tokens read alike, logits within {off:.0e} of the largest"


if __name__ == "__main__":
    run_script(main)
