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
    mesh = tensor.device_mesh
    for mesh_dim, placement in enumerate(tensor.placements):
        dim = getattr(placement, "dim", None)
        if dim is None:  # replicated over this mesh dimension
            continue
        # _StridedShard splits into ``split_factor`` groups first, then shards each group.
        groups = getattr(placement, "split_factor", 1)
        splits[dim].append((groups, mesh.get_local_rank(mesh_dim), mesh.size(mesh_dim)))
    if not shape:
        return LocalShard(shape, [((), local)])
    runs = [_runs(size, of_dim) for size, of_dim in zip(shape, splits, strict=True)]
    blocks: list[Block] = []
    for stretches in product(*runs):
        in_full, in_local = zip(*stretches, strict=True)
        blocks.append((in_full, local[in_local]))
    return LocalShard(shape, blocks)


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
    # Splits of several mesh dimensions nest, so they are applied to the indices one by one. After
    # a strided split the rest may consist of several stretches.
    here = torch.arange(size)
    for groups, rank, count in splits:
        kept = []
        for part in here.split(max(1, -(-len(here) // groups))):
            # As ``torch.chunk``: sizes are rounded up, so the last ranks may get less, or nothing.
            rows = -(-len(part) // count)
            kept.append(part[rank * rows : (rank + 1) * rows])
        here = torch.cat(kept)
    if not len(here):
        return []
    jumps = (here.diff() != 1).nonzero().flatten() + 1
    ends = [0, *jumps.tolist(), len(here)]
    return [(slice(int(here[a]), int(here[b - 1]) + 1), slice(a, b)) for a, b in pairwise(ends)]


def _cut(index: Index, values: Tensor, size: int) -> Iterator[Block]:
    total = values.numel() * values.element_size()
    if values.numel() <= 1 or total <= size:
        yield index, values
        return
    # The outermost dimension that can be split keeps the pieces contiguous in memory.
    dim = next(d for d, length in enumerate(values.shape) if length > 1)
    rows = max(1, values.shape[dim] * size // total)
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
    # A stretch is the rest of a row, then full rows, then the start of a row.
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row

    def within(at: int, start: int, stop: int) -> Iterator[Index]:
        return ((slice(at, at + 1), *rest) for rest in _stretch(shape[1:], start, stop))

    if first > last:  # both ends are inside one row
        yield from within(last, start - last * row, stop - last * row)
        return
    yield from within(first - 1, start - (first - 1) * row, row if start < first * row else 0)
    if first < last:
        yield (slice(first, last), *(slice(0, size) for size in shape[1:]))
    yield from within(last, 0, stop - last * row)
