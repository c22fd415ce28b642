"""Find the parts of a sharded tensor that are stored on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Index = tuple[slice, ...]
Block = tuple[Index, Tensor]
"""The pair ``(index, values)``: ``values`` is the local memory of ``full[index]``, in its shape."""


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A tensor of ``shape`` and the ``blocks`` of it that are stored on this rank."""

    shape: tuple[int, ...]
    blocks: Iterable[Block]

    def pieces(self, size: int) -> Iterator[Block]:
        """Yield the blocks, where blocks of more than ``size`` bytes are split."""
        for index, values in self.blocks:
            yield from _cut(index, values, size)


ShardLayout = Callable[[Tensor], LocalShard]
"""A function that returns the local blocks of a parameter or buffer."""


def local_shard_of(tensor: Tensor) -> LocalShard:
    """Return the local blocks of ``tensor``: all of it, or the shards of a ``DTensor``."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return LocalShard(shape, [(tuple(slice(0, size) for size in shape), tensor)])
    local = tensor.to_local()
    splits: list[list[tuple[int, int, int]]] = [[] for _ in shape]
    for mesh_dim, placement in enumerate(tensor.placements):
        if (dim := getattr(placement, "dim", None)) is not None:
            mesh = tensor.device_mesh
            # _StridedShard splits into ``split_factor`` groups first, then shards each group.
            splits[dim].append(
                (
                    getattr(placement, "split_factor", 1),
                    mesh.get_local_rank(mesh_dim),
                    mesh.size(mesh_dim),
                )
            )
    runs = [_runs(size, of_dim) for size, of_dim in zip(shape, splits, strict=True)]
    return LocalShard(
        shape,
        [(tuple(w for w, _ in run), local[tuple(h for _, h in run)]) for run in product(*runs)]
        if shape
        else [((), local)],
    )


def flat_blocks(shape: tuple[int, ...], start: int, values: Tensor) -> Iterator[Block]:
    """Yield the blocks of a tensor of ``shape`` that a slice of its flattened form consists of.

    Args:
        shape: shape of the full tensor.
        start: offset of ``values`` in the flattened tensor, in elements.
        values: 1-D slice. Elements beyond the end of the tensor (padding) belong to no block.
    """
    at = 0
    for index in _stretch(shape, start, min(start + values.numel(), prod(shape))):
        sizes = [part.stop - part.start for part in index]
        yield index, values[at : at + prod(sizes)].view(sizes)
        at += prod(sizes)


def _runs(size: int, splits: list[tuple[int, int, int]]) -> list[tuple[slice, slice]]:
    """Return the local stretches of a dimension, as slices of the full and of the local tensor."""
    here = torch.arange(size)
    for groups, rank, count in splits:
        parts = here.split(max(1, -(-len(here) // groups)))
        here = torch.cat([_chunk(part, rank, count) for part in parts])
    ends = (
        [0, *((here.diff() != 1).nonzero().flatten() + 1).tolist(), len(here)] if len(here) else []
    )
    return [(slice(int(here[a]), int(here[b - 1]) + 1), slice(a, b)) for a, b in pairwise(ends)]


def _chunk(part: Tensor, rank: int, count: int) -> Tensor:
    size = -(-len(part) // count)
    return part[rank * size : (rank + 1) * size]


def _cut(index: Index, values: Tensor, size: int) -> Iterator[Block]:
    if values.numel() <= 1 or values.numel() * values.element_size() <= size:
        yield index, values
        return
    dim = next(d for d, length in enumerate(values.shape) if length > 1)
    rows = max(1, values.shape[dim] * size // (values.numel() * values.element_size()))
    start = index[dim].start
    for part in values.split(rows, dim):
        stop = start + part.shape[dim]
        yield from _cut((*index[:dim], slice(start, stop), *index[dim + 1 :]), part, size)
        start = stop


def _stretch(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Index]:
    """Yield, in order, the blocks that make up elements ``start`` to ``stop`` of a flattened
    tensor.
    """
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row

    def within(at: int, start: int, stop: int) -> Iterator[Index]:
        return ((slice(at, at + 1), *rest) for rest in _stretch(shape[1:], start, stop))

    if first > last:
        yield from within(last, start - last * row, stop - last * row)
        return
    yield from within(first - 1, start - (first - 1) * row, row if start < first * row else 0)
    if first < last:
        yield (slice(first, last), *(slice(0, size) for size in shape[1:]))
    yield from within(last, 0, stop - last * row)
