"""The arguments of the functions of causal_attention.py."""

import numpy as np

BLOCK = 16  # queries, or keys, that are computed together; T and D are multiples
# Sizes, addresses, and strides in bytes. Gradients, weights and mask are contiguous.
ARGUMENTS = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("B", "H", "T", "D"),
            *(f"{x}{stride}" for x in ("q", "k", "v", "y") for stride in ("", "_batch", "_head", "_row")),
            "weights",  # bfloat16 (B, H, T, T), the result of the softmax; negative where dropout removed them
            "mask",  # float32 (H, T, T), or 0; in the backward pass its gradient, to which is added
            "first_keys",  # int64 (B, T), or 0; not in the backward pass, where weights of 0 hide earlier keys
            *("grad_q", "grad_k", "grad_v"),  # bfloat16 (B, H, T, D)
            "dropped",  # dropout's probability times 2^32
            "seed",  # of dropout
            "scratch",  # scratch_bytes of memory
        )
    ]
)


def scratch_bytes(T: int, D: int) -> int:
    """Bytes of scratch memory, enough for both functions, which divide it: packed matrices, and a block of queries."""
    return 2 * (4 * T * D + 2 * T * T + 2 * BLOCK * T) + 4 * BLOCK * (max(T, D) + 1)
