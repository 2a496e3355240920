"""A default for OpenMP, set when this module is imported. Import it before torch, which reads the variable once.

It is for batched work. The threads of a matmul wait for the slowest one. By default they spin for milliseconds, which
takes the core away from other processes, and even from the thread they wait for: beside a busy process on two cores,
training fell to a third of its speed. With threads that sleep instead it keeps more than half, and alone it loses 3%.
A sampler's matmuls are so short that sleeping costs more than it saves (docs/performance.md).
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
