"""Freed memory that the process keeps."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lightrft.utils.freed_memory import SETTINGS

CODE = """
import resource
from lightrft.utils.freed_memory import keep_freed_memory
import torch
kept = keep_freed_memory() if {keep} else None
torch.ones(2**20)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def allocate():
    # 48 MB, above every threshold of the C library
    return torch.ones(12 * 2**20).sum()
# An aligned tensor does not fit into the space of its equal. Two such spaces join first.
for _ in range(10):
    allocate()
before = faults()
for _ in range(5):
    allocate()
print(kept, faults() - before)
"""
PAGES = 5 * 48 * 2**20 // 4096


def outcome(keep: bool, **environment: str) -> tuple[str, int]:
    """Result of the call, and the page faults of five equal tensors after the first."""
    clean = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(keep=keep)],
        env=clean | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    kept, count = done.stdout.split()
    return kept, int(count)


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of Linux is meant")
def test_tensors_reuse_freed_memory_unless_the_environment_sets_the_allocator() -> None:
    kept, few = outcome(keep=True)
    assert kept == "True"
    _, many = outcome(keep=False)
    assert few < PAGES / 10 < many
    assert outcome(keep=True, MALLOC_TOP_PAD_="131072")[0] == "False"
