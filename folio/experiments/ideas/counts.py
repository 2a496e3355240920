"""Count the parameters and FLOPs of a model with the code of one arm.

    python folio/experiments/ideas/counts.py FOLDER STATE

FOLDER holds the arm's model.py. STATE is the state.json of one of its checkpoints. The result is a line of JSON.
"""

import json
import sys


def main(folder: str, state: str) -> None:
    sys.path[0] = folder  # before any other model.py
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from model import GPT, GPTConfig

    with open(state, encoding="utf-8") as file:
        config = GPTConfig(**json.load(file)["model"])
    with torch.device("meta"):
        model = GPT(config)
        idx = torch.zeros((1, config.block_size), dtype=torch.long)
    counter = FlopCounterMode(display=False)
    with counter:
        model(idx, idx)[1].backward()
    parameters = sum(p.numel() for p in model.parameters())
    print(json.dumps({"parameters": parameters, "flops_per_token": counter.get_total_flops() / config.block_size}))


if __name__ == "__main__":
    main(*sys.argv[1:])
