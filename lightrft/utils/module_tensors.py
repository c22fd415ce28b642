"""Tensors of a module, exchanged for others."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


def exchange(model: nn.Module, new: Callable[[Tensor], Tensor | None], *, buffers: bool = False) -> None:
    """Give every parameter of ``model``, and with ``buffers`` every buffer, the place of what ``new`` makes of it, unless that is
    ``None``. What several modules share they still share afterwards."""
    made: dict[int, tuple[Tensor, Tensor | None]] = {}  # the old one too: its id must not be given to another meanwhile
    for module in model.modules():
        for held in (module._parameters, module._buffers) if buffers else (module._parameters,):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = tensor, _like(tensor, new(tensor))
                if (other := made[id(tensor)][1]) is not None:
                    held[name] = other  # ty: ignore[invalid-assignment]


def _like(tensor: Tensor, other: Tensor | None) -> Tensor | None:
    if other is None or not isinstance(tensor, nn.Parameter):
        return other
    return nn.Parameter(other, requires_grad=tensor.requires_grad)
