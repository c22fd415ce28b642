"""Which parts of a tensor that is spread over ranks lie on this one."""

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
"""``whole[index]`` of a whole tensor, and the memory here that is for it, of the same shape."""


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of ``shape``, of which ``blocks`` lie here."""

    shape: tuple[int, ...]
    blocks: Iterable[Block]

    def pieces(self, size: int) -> Iterator[Block]:
        """The blocks, those of more than ``size`` bytes in several."""
        for index, values in self.blocks:
            yield from _cut(index, values, size)


Holding = Callable[[Tensor], Held]
"""What of a parameter or buffer lies here."""


def held_of(tensor: Tensor) -> Held:
    """All of ``tensor``; of a ``DTensor``, what its placements say."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Held(shape, [(tuple(slice(0, size) for size in shape), tensor)])
    local = tensor.to_local()
    splits: list[list[tuple[int, int, int]]] = [[] for _ in shape]
    for mesh_dim, placement in enumerate(tensor.placements):
        if (dim := getattr(placement, "dim", None)) is not None:
            mesh = tensor.device_mesh
            # Strided: first into as many groups, each of which is then split.
            splits[dim].append((getattr(placement, "split_factor", 1), mesh.get_local_rank(mesh_dim), mesh.size(mesh_dim)))
    runs = [_runs(size, of_dim) for size, of_dim in zip(shape, splits, strict=True)]
    return Held(
        shape, [(tuple(w for w, _ in run), local[tuple(h for _, h in run)]) for run in product(*runs)] if shape else [((), local)]
    )


def flat_blocks(shape: tuple[int, ...], start: int, values: Tensor) -> Iterator[Block]:
    """The blocks that ``values``, flat, is made of: what a flattened tensor of ``shape`` has from ``start`` on. What lies beyond its end
    is in none."""
    at = 0
    for index in _stretch(shape, start, min(start + values.numel(), prod(shape))):
        sizes = [part.stop - part.start for part in index]
        yield index, values[at : at + prod(sizes)].view(sizes)
        at += prod(sizes)


def _runs(size: int, splits: list[tuple[int, int, int]]) -> list[tuple[slice, slice]]:
    """Of a dimension that is split so, the stretches that lie here: in the whole, and in what lies here."""
    here = torch.arange(size)
    for groups, rank, count in splits:
        parts = here.split(max(1, -(-len(here) // groups)))
        here = torch.cat([_chunk(part, rank, count) for part in parts])
    ends = [0, *((here.diff() != 1).nonzero().flatten() + 1).tolist(), len(here)] if len(here) else []
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
    """The blocks, in order, that make up elements ``start`` to ``stop`` of a flattened tensor of ``shape``."""
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
