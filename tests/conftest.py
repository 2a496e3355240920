"""What the tests share: a seed that is printed."""

import os
import random

import pytest


@pytest.fixture
def seed() -> int:
    """A new seed each time, printed by pytest where a test fails; $SEED repeats it."""
    value = int(os.environ.get("SEED") or random.randrange(2**31))
    print(f"SEED={value}")
    return value
