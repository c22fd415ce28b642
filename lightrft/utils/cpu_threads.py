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
def threads_for(
    operations: float, device: torch.device, most: int | None = None
) -> Generator[None]:
    """Use a single CPU thread inside the body if its steps are small, and ``most`` otherwise.

    Applies if ``device`` is a CPU. Steps of fewer than ``WORTH_SHARING`` operations are small. The
    previous number of threads is restored at the end.

    Args:
        operations: floating-point operations of one step.
        device: the device that computes the steps.
        most: number of threads of larger steps. ``None`` for the number in use.
    """
    before = torch.get_num_threads()
    wanted = 1 if operations < WORTH_SHARING else most or before
    if device.type != "cpu" or wanted == before:
        yield
        return
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)
