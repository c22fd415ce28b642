"""Layout of tensors in buckets: slices of tensors as bytes, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ALIGNED = 16
"""Pieces start at multiples of this many bytes, so that each can be viewed as its dtype."""
FIELDS = ("first", "count", "at")
"""Attributes of a slice that are numbers."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A part of a tensor inside a bucket.

    ``count`` bytes of tensor ``name``, from byte ``first`` of the tensor, start at byte ``at`` of
    the bucket.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    count: int
    at: int


Layout = tuple[TensorSlice, ...]


def used(layout: Layout) -> int:
    """Return the number of bytes of a bucket that ``layout`` fills."""
    return layout[-1].at + layout[-1].count


def fill(
    weights: Iterable[tuple[str, Tensor] | None],
    slots: Sequence[Tensor],
) -> Iterator[tuple[int, Layout]]:
    """Copy ``weights`` into ``slots`` in turn. Yield the index of each full slot with its layout.

    ``slots`` are uint8 buffers ``[bytes]`` of equal size. The next slot is overwritten as soon as
    the iterator resumes. ``None`` among the ``weights`` yields what the slot holds so far.
    """
    slot, at, layout = 0, 0, []
    size = slots[0].numel()
    for weight in weights:
        if weight is None:
            if layout:
                yield slot, tuple(layout)
                slot, at, layout = (slot + 1) % len(slots), 0, []
            continue
        name, tensor = weight
        # as bytes, since one bucket holds tensors of several dtypes
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        first, ended = 0, False
        # an empty tensor makes one empty piece, so that the receiver learns of it
        while not ended:
            count = min(size - at, data.numel() - first)
            slots[slot][at : at + count].copy_(data[first : first + count])
            layout.append(TensorSlice(name, tensor.dtype, tuple(tensor.shape), first, count, at))
            first += count
            # ``at`` may pass the end of the slot, which then is full too
            at += -(-count // ALIGNED) * ALIGNED
            ended = first == data.numel()
            if at >= size:
                yield slot, tuple(layout)
                slot, at, layout = (slot + 1) % len(slots), 0, []
    if layout:
        yield slot, tuple(layout)


def slice_to_json(piece: TensorSlice) -> dict[str, Any]:
    """Return ``piece`` as a JSON object."""
    numbers = {name: getattr(piece, name) for name in FIELDS}
    dtype = str(piece.dtype).removeprefix("torch.")
    return {"name": piece.name, "dtype": dtype, "shape": list(piece.shape), **numbers}


def slice_from_json(entry: Mapping[str, Any]) -> TensorSlice:
    """Return the slice of an object that ``slice_to_json`` has made.

    Raises:
        ValueError: It is malformed.
        KeyError: An entry is missing.
        TypeError: An entry is no number or list.
        AttributeError: There is no such type of tensors.
    """
    dtype = getattr(torch, str(entry["dtype"]))
    shape, numbers = tuple(entry["shape"]), [entry[name] for name in FIELDS]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype} is no type of tensors")
    if not all(type(n) is int and n >= 0 for n in (*shape, *numbers)):
        raise ValueError(f"{shape} and {numbers} must be whole numbers from 0")
    return TensorSlice(str(entry["name"]), dtype, shape, *numbers)
