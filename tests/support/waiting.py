"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    """Fail if the condition does not become true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def in_thread(function: Callable, *arguments: Any) -> Any:
    """Call it in another thread. asyncio.run needs one: the fixture `browser` has a running event loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *arguments).result()
