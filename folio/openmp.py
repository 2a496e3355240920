"""A default for OpenMP, set when this module is imported. Import it before torch, which reads the variable once.

It is for work in batches. The threads of a matmul wait for the slowest one. By default they spin for milliseconds,
which takes the core away from whatever else runs there, also from the thread that they wait for: beside a busy process
on two cores, training fell to a third of its speed. Threads that sleep instead keep more than half of it, and cost 3 %
alone. A sampler's matmuls are so short that sleeping costs more than it saves (docs/performance.md).
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
