"""Sets OpenMP's wait policy to passive on import. Import it before torch, which reads the variable once.

The threads of a matmul wait for the slowest one. By default they spin for milliseconds, which takes the core from other
processes, and even from the thread that they wait for: on two cores with another busy process, training fell to a third
of its speed. With sleeping threads it keeps more than half; without other processes it loses 3%. Sampling does not use
this, because its matmuls are so short that sleeping costs more than it saves (docs/lab/performance.md).
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
