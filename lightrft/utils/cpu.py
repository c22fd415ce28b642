"""Memory and threads of a process that computes on CPU.

oneDNN compiles a half-precision matrix product once per shape. oneDNN and PyTorch each cache up to
1024 compiled products by default. This takes up to 0.6 GiB when response lengths vary. One pass
uses a few dozen shapes, the same in every layer, so both caches are limited to 64.

The C library of Linux returns a freed tensor above its threshold to the system at once. The next
tensor of this size then waits for the system to clear every page. A training step allocates and
frees the same tensors in each layer. On two cores, steps took 1.3 to 1.8 times as long.

The number of threads for small operations, and how they wait for work, are set here. This file is
imported before PyTorch, which reads the environment once.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from lightrft.utils.lazy_imports import torch

CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
KEPT = 64
BYTES = 0.92 * 2**20
"""Memory of one product in both caches, in bytes, including fragmentation.

Measured over caches of 8 to 128 with 936 shapes.
"""


def bound_products() -> None:
    """Limit both caches of this process to ``KEPT`` products, unless the environment sets a limit.

    Has no effect after the first product.
    """
    for name in CACHES:
        os.environ.setdefault(name, str(KEPT))


def products_bytes(dtype: torch.dtype) -> float:
    """Return an upper bound of the memory of both caches in bytes, for weights of ``dtype``.

    Returns 0 if this CPU does not compile products of ``dtype``.
    """
    compiled = {
        torch.bfloat16: "_is_mkldnn_bf16_supported",
        torch.float16: "_is_mkldnn_fp16_supported",
    }.get(dtype)
    if compiled is None or not getattr(torch.ops.mkldnn, compiled)():
        return 0.0
    # ``BYTES`` covers both caches, so the larger limit gives an upper bound.
    return max(int(os.environ.get(name, KEPT)) for name in CACHES) * BYTES


SETTINGS = (
    "GLIBC_TUNABLES",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
)
"""Environment variables by which a user sets the allocator."""
# Parameters of ``mallopt`` in malloc.h, which are part of the library's binary interface.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
OPTIONS = {TRIM_THRESHOLD: 2**31 - 1, MMAP_THRESHOLD: 2**30, TOP_PAD: 2**26}
"""Sizes in bytes. Tensors up to 1 GiB are reused; the heap grows by 64 MiB at a time."""


def keep_freed_memory() -> bool:
    """Keep freed memory in this process, unless the environment sets the allocator.

    Returns:
        ``True`` if the allocator was changed. Only the C library of Linux is changed.
    """
    if sys.platform != "linux" or any(name in os.environ for name in SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return min(mallopt(name, size) for name, size in OPTIONS.items()) == 1


def return_freed_memory() -> None:
    """Return the memory that this process has freed to the system, where its C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def free_memory() -> int:
    """Return the available bytes of CPU memory, or 0 if the system does not report them."""
    file = Path("/proc/meminfo")
    if not file.is_file():
        return 0
    for line in file.read_text(encoding="utf-8").splitlines():
        # Not MemFree, which leaves out caches that the kernel gives up on demand.
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return 0


WORTH_A_THREAD = 5e7
"""Number of floating-point operations of a step for each of its threads.

With fewer, waiting for one another takes the threads more time than they save.
"""
SPINS = 4000
"""How often an idle thread looks for work before it sleeps: about 40 microseconds.

To wake a thread takes about twice as long, so that one which sleeps at once costs more than a small
product. One that never sleeps takes the core from other programs.
"""
POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def set_thread_policy() -> None:
    """Make idle OpenMP threads look for work ``SPINS`` times, unless the environment has a policy.

    Must run before torch is imported.
    """
    if not any(name in os.environ for name in POLICIES):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
        # the OpenMP of Intel and LLVM counts in milliseconds
        os.environ["KMP_BLOCKTIME"] = "0"


@contextmanager
def threads_for(
    operations: float, device: torch.device, most: int | None = None
) -> Generator[None]:
    """Use as many CPU threads inside the body as its steps are worth.

    Applies if ``device`` is a CPU. The previous number of threads is restored at the end.

    Args:
        operations: floating-point operations of one step.
        device: the device that computes the steps.
        most: largest number of threads. ``None`` for the number in use.
    """
    before = torch.get_num_threads()
    wanted = max(1, min(most or before, int(operations / WORTH_A_THREAD)))
    if device.type != "cpu" or wanted == before:
        yield
        return
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)
