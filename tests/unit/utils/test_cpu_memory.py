"""Compiled products are bounded, freed memory is kept, and both hold in a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightrft.utils import cpu
from lightrft.utils.cpu import (
    BYTES,
    CACHES,
    KEPT,
    SETTINGS,
    bound_products,
    products_bytes,
)

GROWTH = """
import json, sys, torch
from lightrft.config.strategy import StrategyConfig
from lightrft.strategy.single import SingleStrategy
torch.set_num_threads(1)
def private():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous"))
SingleStrategy(StrategyConfig(device="cpu"))
a, b = torch.randn(2, 1, 64).bfloat16(), torch.randn(2, 600, 64).bfloat16()
before = private()
for n in range(64, 400):
    a @ b[:, :n].transpose(1, 2)
print(json.dumps(private() - before))
"""


def test_the_environment_of_a_process_is_set_unless_it_says_how_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in CACHES:
        monkeypatch.setenv(name, "7")  # put back at the end
        monkeypatch.delenv(name)
    monkeypatch.setenv(CACHES[0], "5")
    bound_products()
    assert [os.environ[name] for name in CACHES] == ["5", str(KEPT)]


def test_only_kinds_of_numbers_that_are_compiled_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    for name in CACHES:
        monkeypatch.setenv(name, "3")
    assert (products_bytes(torch.bfloat16), products_bytes(torch.float32)) == (3 * BYTES, 0.0)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert products_bytes(torch.bfloat16) == 0.0


@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").is_file(),
    reason="the system does not say what memory is used for",
)
def test_336_shapes_take_no_more_than_the_products_that_are_kept() -> None:
    """Unbounded, they take 0.67 MiB each, 225 in all, where the CPU has such products; nothing where it has none."""
    kept = {name: value for name, value in os.environ.items() if name not in CACHES}
    back = {
        "MALLOC_MMAP_THRESHOLD_": "262144",
        "MALLOC_TRIM_THRESHOLD_": "262144",
        "OMP_NUM_THREADS": "1",
    }
    path = str(Path(cpu.__file__).resolve().parents[2])
    words = [sys.executable, "-c", GROWTH]
    said = subprocess.run(
        words, env={**kept, **back, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(said) < 1.5 * KEPT * BYTES


REUSE = """
import resource
from lightrft.utils.cpu import keep_freed_memory
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
rounds = []
for _ in range(4):
    before = faults()
    for _ in range(5):
        allocate()
    rounds.append(faults() - before)
# A system that reclaims idle memory adds faults to some rounds. It takes none away.
print(kept, min(rounds))
"""
PAGES = 5 * 48 * 2**20 // 4096


def outcome(keep: bool, **environment: str) -> tuple[str, int]:
    """Result of the call, and the page faults of five equal tensors after the first."""
    clean = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    done = subprocess.run(
        [sys.executable, "-c", REUSE.format(keep=keep)],
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


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have another C library")
def test_freed_memory_returns_to_the_system_on_demand() -> None:
    code = """
import ctypes, json, torch
from lightrft.utils.cpu import keep_freed_memory, return_freed_memory
def private():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous"))
keep_freed_memory()
before = private()
parts = [torch.ones(2**18) for _ in range(200)]
del parts
kept = private() - before
return_freed_memory()
print(json.dumps([kept, private() - before]))
"""
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    kept, left = json.loads(done.stdout)
    assert kept > 150 * 2**20
    assert left < 50 * 2**20
