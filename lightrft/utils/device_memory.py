"""Memory of the devices of this process: what torch caches, and errors of a full device."""

from __future__ import annotations

import torch


def release_cached_memory() -> None:
    """Return the free blocks of torch's allocator to the device.

    An allocator that is not torch's, such as vLLM's or that of another process, cannot take these
    blocks: after a training step they may be most of the device.
    """
    # Without an accelerator nothing is cached, and torch raises an error.
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if a full device began the chain of errors that ends with ``error``."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
