"""What holds for all tests: two spinning OpenMP threads, which make tiny models far slower on a small machine, must be ruled out before
torch is imported; and what takes longest begins first."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

LONGEST = ("test_ray.py", "test_faults.py", "test_zero.py")
"""Their tests mostly wait for other processes. At the end of all tests one worker would be left alone with them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)
