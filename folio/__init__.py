"""The library behind Folio's scripts. Its public API is `load` and `UserError`."""

from pathlib import Path


class UserError(Exception):
    """A mistake that the user can fix. The message says what is wrong, where, and how to fix it."""

    exit_code = 2


def load(init_from: str | Path, which: str = "best", device: str = "auto", dtype: str = "auto") -> "LanguageModel":  # noqa: F821
    """Load a model to generate text: `load("out").generate("ROMEO:")`. See folio/decoding/language_model.py.

    init_from: a run, a checkpoint, "gpt2", a Hugging Face folder, nanoGPT's ckpt.pt, or a GGUF file. which: a run's
    checkpoint, "best" or "last". device, dtype: as in sample.py. Raises UserError.
    """
    from folio.decoding.language_model import LanguageModel  # imports torch, which the prepare scripts do not need

    return LanguageModel.load(init_from, which, device, dtype)
