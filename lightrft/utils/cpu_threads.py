"""The number of CPU threads that PyTorch uses for small operations."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

WORTH_SHARING = 1e9
"""Smallest number of floating-point operations between two synchronizations for several threads.

Below it, a second thread costs more time than it saves.
"""


@contextmanager
def threads_for(operations: float, device: torch.device) -> Generator[None]:
    """Use a single CPU thread inside the body if its steps are small.

    Applies if ``device`` is a CPU and a step takes fewer than ``WORTH_SHARING`` operations. The
    previous number of threads is restored at the end.

    Args:
        operations: floating-point operations of one step.
        device: the device that computes the steps.
    """
    before = torch.get_num_threads()
    if device.type != "cpu" or before == 1 or operations >= WORTH_SHARING:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
