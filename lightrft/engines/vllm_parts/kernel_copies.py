"""Copies of matrices that vLLM's kernels on a CPU keep in a layout of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

COLUMNS = 512
"""Columns of a matrix that are read back at once."""


def repack_tied_layers(model: nn.Module) -> None:
    """Renew the copies that layers of vLLM's ``model`` have of weights of another layer.

    On a CPU, an output layer that is tied to the embeddings packs them into a copy at the start. An
    update loads the embeddings alone.
    """
    found: set[int] = set()
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is None or weight.device.type != "cpu":
            continue
        if id(weight) in found:
            method: Any = layer.quant_method
            method.process_weights_after_loading(layer)
        found.add(id(weight))


class PackedExperts:
    """Prepares the experts of a layer for their kernel as at the start, also in an update.

    vLLM 0.32 packs experts on a CPU where a layer has no kernel yet, and leaves them as they were
    sent in an update.

    Args:
        method: The ``quant_method`` of the layer.
    """

    def __init__(self, method: Any) -> None:
        self._method, self._process = method, method.process_weights_after_loading

    def __call__(self, layer: nn.Module) -> None:
        """Prepare ``layer``."""
        self._method.moe_kernel = None
        self._process(layer)


def pack_experts(model: nn.Module) -> None:
    """Let updates of vLLM's ``model`` pack experts on a CPU. Called before an update."""
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        weight = layer._parameters.get("w13_weight")
        if weight is None or weight.device.type != "cpu" or not hasattr(method, "moe_kernel"):
            continue
        if not isinstance(method.process_weights_after_loading, PackedExperts):
            method.process_weights_after_loading = PackedExperts(method)


def has_copy(layer: nn.Module) -> bool:
    """Return True if the kernel of ``layer`` multiplies by a copy of its weight."""
    return hasattr(layer, "cpu_linear")


def read_copy(layer: Any, columns: int) -> Tensor:
    """Return the matrix ``[rows, columns]`` that the kernel of ``layer`` multiplies by.

    The product with rows of the identity matrix gives it back. Nothing is rounded, but -0.0 becomes
    0.0, and kernels may drop denormal values.
    """
    weight: Tensor = layer.weight
    found = [layer.cpu_linear(rows, weight, None).T for rows in identity_rows(columns, weight)]
    return torch.cat(found, dim=1)


def identity_rows(columns: int, like: Tensor, value: float = 1.0) -> Iterator[Tensor]:
    """Yield the rows of ``value`` times the identity matrix, in parts ``[n, columns]``.

    Args:
        columns: Number of its columns.
        like: Gives the type and the device.
        value: The value on the diagonal.
    """
    for start in range(0, columns, COLUMNS):
        count = min(COLUMNS, columns - start)
        rows = torch.zeros(count, columns, dtype=like.dtype, device=like.device)
        rows[torch.arange(count), torch.arange(start, start + count)] = value
        yield rows
