"""Waiting for other threads and processes."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    """Wait until the condition is true; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def in_thread(function: Callable, *arguments: Any) -> Any:
    """Call a function in another thread. asyncio.run needs one, because the fixture `browser` runs an event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *arguments).result()
