"""Copies from host to device that do not wait for the device."""

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
