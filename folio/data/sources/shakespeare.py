"""Tiny Shakespeare, an example text."""

from pathlib import Path

from folio.base.download import Url, Wheel, fetch


def tiny_shakespeare() -> Path:
    """Return the path of Tiny Shakespeare (1,115,394 bytes, Karpathy 2015), downloading it on first use.

    Raises UserError if the download fails.
    """
    parts = tuple(f"sonnet/examples/data/ts.{part}.txt" for part in ("train", "valid", "test"))
    sources = [
        Url("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"),
        Wheel("dm-sonnet==1.36", "afe292a5f2eaed5c3e2be4b30f2a14b67425422457b9a51579d616af6f075dac", parts),
    ]
    return fetch("Tiny Shakespeare", "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed", sources)
