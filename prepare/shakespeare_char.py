"""Tiny Shakespeare, or any text of yours, as character tokens: the first 90 % for training, the rest for validation.

    python prepare/shakespeare_char.py
    python prepare/shakespeare_char.py --input=novel.txt --name=novel

Tiny Shakespeare comes out as 1,003,854 training and 111,540 validation tokens of 65 characters.
"""

import hashlib
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError, configurator  # noqa: E402
from folio.dataset import write_meta, write_shard  # noqa: E402
from folio.fetch import Url, Wheel, fetch  # noqa: E402
from folio.tokenizer import CharTokenizer  # noqa: E402

SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SOURCES = [
    Url("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"),
    Wheel(
        "dm-sonnet==1.36",
        "afe292a5f2eaed5c3e2be4b30f2a14b67425422457b9a51579d616af6f075dac",
        tuple(f"sonnet/examples/data/ts.{part}.txt" for part in ("train", "valid", "test")),
    ),
]


@dataclass(frozen=True)
class PrepareConfig:
    input: str | None = None  # a UTF-8 text file; None: Tiny Shakespeare
    name: str | None = None  # folder under data_dir; None: shakespeare_char, or the input file's name
    data_dir: str | None = None  # folder of the data sets; None: data/ beside train.py
    val_fraction: float = 0.1  # of the text, from its end, for validation

    def problems(self) -> list[tuple[str, str]]:
        """(setting, what is wrong with it and how to mend it) for all that cannot work."""
        return [] if 0 < self.val_fraction < 1 else [("val_fraction", "it must be above 0 and below 1, such as 0.1")]


def main(cfg: PrepareConfig) -> None:
    path = Path(cfg.input) if cfg.input else fetch("Tiny Shakespeare", SHA256, SOURCES)
    if not path.is_file():
        raise UserError(f"input={path}: there is no such file")
    content = path.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 at byte {error.start:,}; save it as UTF-8") from None
    if len(text) < 2:
        raise UserError(f"{path} is empty; there is nothing to learn from")

    tokenizer = CharTokenizer.of(text)
    ids = tokenizer.encode(text)
    split = int(len(ids) * (1 - cfg.val_fraction))
    name = cfg.name or (path.stem if cfg.input else "shakespeare_char")
    folder = (Path(cfg.data_dir) if cfg.data_dir else ROOT / "data") / name
    (folder / "meta.json").unlink(missing_ok=True)  # until both shards are there, it is no data set
    train = write_shard(folder / "train.bin", [ids[:split]], tokenizer.vocab_size)
    val = write_shard(folder / "val.bin", [ids[split:]], tokenizer.vocab_size)
    source = {
        "name": path.name if cfg.input else "Tiny Shakespeare",
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    write_meta(folder, tokenizer, [train], [val], source, made_by=shlex.join(["python", *sys.argv]))
    print(
        f"{folder}: {train['tokens']:,} training and {val['tokens']:,} validation tokens, "
        f"{tokenizer.vocab_size} characters"
    )
    if name != "shakespeare_char":
        settings = [
            f"--dataset={name}",
            f"--out_dir=out-{name}",
            *([f"--data_dir={cfg.data_dir}"] if cfg.data_dir else []),
        ]
        print(f"train on it: {shlex.join(['python', 'train.py', 'config/shakespeare_char.py', *settings])}")


if __name__ == "__main__":
    configurator.run_script(main, PrepareConfig)
