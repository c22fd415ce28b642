"""Replacement of the parameters and buffers of a module."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


def exchange(model: nn.Module, new: Callable[[Tensor], Tensor | None], *, buffers: bool = False) -> None:
    """Replace every parameter of ``model`` by ``new(parameter)``.

    A tensor that several modules share is passed to ``new`` once and stays shared.
    ``requires_grad`` is preserved.

    Args:
        model: the module to change in place.
        new: function from the old tensor to the new tensor. None keeps the old tensor.
        buffers: if True, replace buffers too.
    """
    made: dict[int, tuple[Tensor, Tensor | None]] = {}  # keeps the old tensor alive too, so that Python cannot reuse its id
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
