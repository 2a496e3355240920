"""Recording the operators that torch runs."""

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

MATMULS = ("mm", "addmm", "bmm", "baddbmm")


class OperatorRecorder(TorchDispatchMode):
    """Calls `record(name, arguments, result)` after each operator, also of the backward pass."""

    supports_higher_order_operators = True  # such as recomputed attention

    def __init__(self, record: Callable[[str, tuple, Any], None]):
        super().__init__()
        self.record = record

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        self.record(getattr(operator, "overloadpacket", operator).__name__, args, result)
        return result
