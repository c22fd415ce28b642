"""Buckets of weights as bytes: the number of bytes of a JSON header, the header, and the values.

The header lists the slices of tensors in the bucket, as ``TensorSlice`` has them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from lightrft.engines.sending.tensor_slices import (
    ALIGNED,
    Layout,
    TensorSlice,
    fill,
    slice_from_json,
    slice_to_json,
    used,
)
from lightrft.utils.errors import DataError

SIZE = 8
"""Bytes of the number that a bucket begins with."""
HEADER_SHARE = 4
"""The header of a bucket takes at most one such part of it."""


def weight_buckets(weights: Iterable[tuple[str, Tensor]], most: int) -> Iterator[bytes]:
    """Yield ``weights`` in buckets of at most ``most`` bytes.

    A bucket with very many small tensors may exceed ``most`` by its header.

    Args:
        weights: Tensors by name.
        most: Bytes of a bucket.
    """
    room = max(ALIGNED, most * (HEADER_SHARE - 1) // HEADER_SHARE // ALIGNED * ALIGNED)
    slots = [torch.empty(room, dtype=torch.uint8)]
    for slot, layout in fill(weights, slots):
        header = json.dumps([slice_to_json(piece) for piece in layout]).encode()
        # values start at a multiple, so that they can be viewed as their type
        header += b" " * (-(SIZE + len(header)) % ALIGNED)
        values = slots[slot][: used(layout)].numpy()
        yield b"".join([len(header).to_bytes(SIZE, "little"), header, values.data])


def read_bucket(bucket: bytes, shapes: Mapping[str, tuple[int, ...]]) -> tuple[np.ndarray, Layout]:
    """Return the values of a bucket and the slices in them.

    Args:
        bucket: The bytes.
        shapes: Shape of each tensor that may be sent.

    Raises:
        DataError: The bucket is malformed, or has a tensor of another name or shape.
    """
    start = SIZE + int.from_bytes(bucket[:SIZE], "little")
    try:
        entries = json.loads(bucket[SIZE:start])
        layout = tuple(slice_from_json(entry) for entry in entries)
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"the header of a bucket cannot be read: {error!r}") from error
    values = np.frombuffer(bucket, dtype=np.uint8, offset=start)
    for piece in layout:
        _check(piece, shapes, len(values))
    return values, layout


def _check(piece: TensorSlice, shapes: Mapping[str, tuple[int, ...]], size: int) -> None:
    name, shape = piece.name, list(piece.shape)
    if name not in shapes or tuple(shapes[name]) != piece.shape:
        held = list(shapes[name]) if name in shapes else "no such tensor"
        raise DataError(f"weights {name!r} of shape {shape} do not fit the model: it has {held}")
    whole = piece.dtype.itemsize * math.prod(piece.shape)
    if piece.first + piece.count > whole or piece.at + piece.count > size:
        raise DataError(f"a slice of {name!r} exceeds its tensor of {whole} bytes, or its bucket")
