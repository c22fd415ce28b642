"""Replacement of the parameters and buffers of a module."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


def exchange(
    model: nn.Module, new: Callable[[Tensor], Tensor | None], *, buffers: bool = False
) -> None:
    """Replace every parameter of ``model`` by ``new(parameter)``.

    A tensor that several modules share is passed to ``new`` once and stays shared.
    ``requires_grad`` is preserved.

    Args:
        model: the module to change in place.
        new: function from the old tensor to the new tensor. None keeps the old tensor.
        buffers: if True, replace buffers too.
    """
    # Holds the old tensor too: it stays alive, so that Python cannot reuse its id.
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        tables = (module._parameters, module._buffers) if buffers else (module._parameters,)
        for table in tables:
            for name, tensor in table.items():
                # A module registers an absent bias as None.
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = tensor, _replacement(tensor, new(tensor))
                _, table[name] = made[id(tensor)]  # ty: ignore[invalid-assignment]


def _replacement(old: Tensor, new: Tensor | None) -> Tensor:
    if new is None:
        return old
    if isinstance(old, nn.Parameter):
        return nn.Parameter(new, requires_grad=old.requires_grad)
    return new
