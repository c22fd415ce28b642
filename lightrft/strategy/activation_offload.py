"""What a forward pass keeps for the backward pass, in the host's memory until then."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

SMALL = 1024
"""Elements up to which a tensor stays where it is."""


def keep_on_host(model: nn.Module) -> None:
    """From now on, have what calls of ``model`` save for their backward pass lie in the host's memory until that needs it. Weights are
    not copied: whoever holds them brings them back himself. With layers that are recomputed it is their inputs that are kept."""
    calls: list[saved_tensors_hooks] = []

    def begin(*_: Any) -> None:
        calls.append(saved_tensors_hooks(to_host, from_host))
        calls[-1].__enter__()

    def end(*_: Any) -> None:
        calls.pop().__exit__()

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end, always_call=True)


def stays(tensor: Tensor) -> bool:
    """Whether ``tensor`` is small, or a weight."""
    return tensor.numel() <= SMALL or isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def to_host(tensor: Tensor) -> Any:
    """A copy in the host's memory and the device to bring it back to; the tensor itself where it ``stays``."""
    if stays(tensor):
        return tensor
    pinned = tensor.device.type != "cpu"
    host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
    # Into pinned memory without waiting: only the device reads it again, after this copy, since both are in one stream.
    return tensor.device, host.copy_(tensor, non_blocking=pinned)


def from_host(kept: Any) -> Tensor:
    """What ``to_host`` was given."""
    if isinstance(kept, Tensor):
        return kept
    device, host = kept
    return host.to(device, non_blocking=True)
