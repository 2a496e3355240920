"""Defaults for OpenMP's variables, set when this module is imported. Import it before torch, which reads them once.

The threads of a matmul wait for the slowest one. By default they spin for milliseconds, which takes the core away from
whatever else runs there, also from the thread that they wait for: beside one busy process on two cores, training fell
to a quarter of its speed. Threads that sleep instead keep half of it, and cost next to nothing alone
(docs/performance.md).
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
