"""Copies to devices that do not wait for them, memory that torch caches there, and its lack."""

from __future__ import annotations

from lightrft.utils.lazy_imports import Tensor, torch


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return ``tensor`` on ``device``.

    A copy from the host does not wait for work that is queued on the device.

    A blocking copy to a GPU waits for all kernels before it. A copy to the host always waits: its
    result is read at once.
    """
    # Apple's GPUs read the host's memory later, when it may be gone; CUDA takes a copy of it before
    # the call returns.
    unsafe = torch.device(device).type == "mps"
    return tensor.to(device, non_blocking=tensor.device.type == "cpu" and not unsafe)


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
