"""The arguments of the compiled step of decoding: cpu_decoder.py fills these structs, decode_step.py reads them.

What is not a number is an address, 0 if it is not used. Strides are in bytes.
"""

import numpy as np


def _struct(*names: str, **others: str) -> np.dtype:
    return np.dtype([*((name, "i8") for name in names), *others.items()])


STRUCTS = {
    "matrix": _struct("weight", "stride", "scale", "bias", "inputs", "outputs"),
    "norm": _struct("gain", "bias"),
    "token": _struct("id", "row", "position"),
    "row": _struct(
        *("token", "length", "vocab_size", "top_k", "seed", "sample", "drawn", "occurred", "counts", "logit_bias"),
        **dict.fromkeys(("temperature", "top_p", "min_p"), "f8"),
        **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), "f8"),
    ),
    "state": _struct(
        *("n_layer", "n_head", "n_embd", "head_size", "head_width", "block_size", "vocab_size", "gelu_new"),
        *("matrices", "norms", "positions", "rotation", "rotation_first", "bias"),  # parameters
        *("rows", "cache", "logits", "row_table"),  # of each row
        *("appends", "tokens", "count", "predicted", "predicted_count", "sampled", "sampled_count"),  # what to compute
        *("stream", "normed", "attended", "x_stride", "expanded", "expanded_stride"),  # activations
        *("qkv", "scores", "output", "filtered"),
        *("sync", "threads", "phase", "x_bytes", "cache_bytes"),
        *("linear", "widen", "score", "mix", "run_part"),  # compiled functions
        **dict.fromkeys(("now", "single_until", "next_backoff"), "f8"),  # seconds
    ),
}
