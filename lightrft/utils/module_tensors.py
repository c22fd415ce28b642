"""Names of the parameters of a module, and replacement of its parameters and buffers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

Factor = Literal["base", "a", "b", "magnitude"]
"""A tensor that the weight of an adapted layer is computed from."""

_PREFIX = "base_model.model."
_FACTORS: dict[str, Factor] = {
    "base_layer": "base",
    "lora_A": "a",
    "lora_B": "b",
    "lora_magnitude_vector": "magnitude",
}
ORIGINAL = ".original_module."
"""Part of a name of a module's weights, where a copy of the module is trained whole."""
_SAVED = re.compile(r"(.*)\.modules_to_save\.\w+\.(.*)")
_WRAPPED = re.compile(r"(\.base_layer|\.original_module)+\.")
_FACTOR = re.compile(r"(.*)\.(base_layer|lora_A|lora_B|lora_magnitude_vector)(\.\w+)?\.weight")


def plain_name(name: str) -> str | None:
    """Return a parameter's name in the model without adapters.

    It is ``None`` for a parameter of an adapter.
    """
    name = name.removeprefix(_PREFIX)
    if any(part in name for part in (".lora_", ".modules_to_save.")):
        return None
    # peft nests a layer for each adapted weight of stacked experts
    return _WRAPPED.sub(".", name)


def saved_name(name: str) -> str | None:
    """Return the name in the model without adapters of a parameter of a module that is trained
    whole.

    It is ``None`` for another parameter.
    """
    found = _SAVED.fullmatch(name.removeprefix(_PREFIX))
    return None if found is None else f"{found[1]}.{found[2]}"


def changed_name(name: str) -> str:
    """Return the name in the model without adapters of the weight that a parameter changes."""
    name = name.removeprefix(_PREFIX)
    layer, adapter, _ = name.partition(".lora_")
    return saved_name(name) or _WRAPPED.sub(".", f"{layer}.weight" if adapter else name)


def factor_of(name: str) -> tuple[str, Factor] | None:
    """Return the adapted layer of a parameter, and the parameter's use there.

    The layer has its name in the model without adapters. The result is ``None`` for a parameter
    that no adapter changes.
    """
    found = _FACTOR.fullmatch(name.removeprefix(_PREFIX))
    return None if found is None else (found[1], _FACTORS[found[2]])


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
