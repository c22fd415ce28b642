"""How many CPU threads a stretch of work gets."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

WORTH_SHARING = 1e9
"""Floating-point operations between two synchronisations below which a second thread costs more than it brings."""


@contextmanager
def threads_for(operations: float, device: torch.device) -> Generator[None]:
    """One thread on a CPU while steps of ``operations`` each are taken, if they are small; the number before is put back."""
    before = torch.get_num_threads()
    if device.type != "cpu" or before == 1 or operations >= WORTH_SHARING:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
