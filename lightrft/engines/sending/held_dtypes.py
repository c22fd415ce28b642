"""Weights in the dtypes that an engine holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor


def in_held_dtypes(
    weights: Iterable[tuple[str, Tensor]], dtypes: Mapping[str, torch.dtype]
) -> Iterator[tuple[str, Tensor]]:
    """Yield ``weights`` in the dtypes that the engine holds, so that no byte too many is sent.

    Integers stay as they are.

    Args:
        weights: Tensors by name.
        dtypes: The dtypes that the engine holds, by name.
    """
    for name, tensor in weights:
        held = dtypes.get(name, tensor.dtype)
        if held.is_floating_point and tensor.is_floating_point():
            tensor = tensor.to(held)
        yield name, tensor
