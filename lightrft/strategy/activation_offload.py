"""Offload of activations to CPU memory.

Tensors saved for the backward pass are kept there until it needs them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

SMALL = 1024
"""Elements up to which a tensor stays on the device."""
Kept = Tensor | tuple[torch.device, Tensor]
"""A tensor that stays, or the device of an offloaded one and its copy in CPU memory."""


def keep_on_host(model: nn.Module) -> None:
    """Offload the activations of all later calls of ``model`` to CPU memory.

    The backward pass restores them. Weights are not copied, since their owner restores them. With
    recomputed layers, only the layers' inputs are kept.
    """
    calls: list[saved_tensors_hooks] = []

    def begin(*_: object) -> None:
        calls.append(saved_tensors_hooks(to_host, from_host))
        calls[-1].__enter__()

    def end(*_: object) -> None:
        calls.pop().__exit__()

    model.register_forward_pre_hook(begin)
    # always_call: an error in the forward must not leave the hooks of saved tensors in place.
    model.register_forward_hook(end, always_call=True)


def stays(tensor: Tensor) -> bool:
    """Return ``True`` if ``tensor`` is small, or a weight."""
    if tensor.numel() <= SMALL:
        return True
    # A transposed weight, as a linear layer saves it, is a view of the parameter.
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def to_host(tensor: Tensor) -> Kept:
    """Return a copy in CPU memory and the device to restore it to.

    If the tensor ``stays``, return it.
    """
    if stays(tensor):
        return tensor
    pinned = tensor.device.type != "cpu"
    host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
    # Copy to pinned memory without waiting: only the device reads it, later in the same stream.
    return tensor.device, host.copy_(tensor, non_blocking=pinned)


def from_host(kept: Kept) -> Tensor:
    """Return the tensor that ``to_host`` was given."""
    if isinstance(kept, Tensor):
        return kept
    device, host = kept
    return host.to(device, non_blocking=True)
