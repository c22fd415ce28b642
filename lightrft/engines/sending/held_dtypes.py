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


def matrix_in_dtype(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a matrix of floats in ``dtype``, and any other tensor as it is.

    Vectors cost nothing, and a server may hold some with more bits than its matrices.

    Args:
        tensor: The tensor.
        dtype: The dtype of the server. ``None`` if it is not known.
    """
    if dtype is None or tensor.ndim < 2 or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)
