"""The CPU threads that PyTorch uses for small operations, and how they wait for work."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

# importing torch here would start its threads before they have a policy
from lightrft.utils.lazy_imports import torch

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
