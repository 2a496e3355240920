"""Running sample.py."""

import io
from contextlib import redirect_stdout

from sample import SampleConfig, main


def sample_text(out_dir: str, **settings) -> str:
    """The output of sample.py."""
    out = io.StringIO()
    with redirect_stdout(out):
        main(SampleConfig(out_dir=out_dir, **{"max_new_tokens": 40, "dtype": "float32", **settings}))
    return out.getvalue()
