"""Split a batch into mini-batches (optimizer steps) and micro-batches (forward passes).

Batches of any size can be split; no size has to divide another.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from lightrft.distributed.process_group import ProcessGroup
from lightrft.types import Batch

SLACK = 1.05
"""Largest load of a rank relative to an equal share of the work."""
EXCESS = 1 / 32
"""Fraction of the budget by which a group that shares its prompt may exceed it."""


class _Piece(NamedTuple):
    """Rows of one prompt that stay together.

    Attributes:
        cost: Tokens that a model computes for them.
        prompt: Index of the prompt.
        rows: Indices of the responses.
    """

    cost: int
    prompt: int
    rows: list[int]


def mini_batches(batch: Batch, count: int, generator: torch.Generator) -> list[Tensor]:
    """Split a batch into ``count`` random parts of nearly equal size and return their row indices.

    Groups stay whole, so that each prompt is computed once, unless there are fewer groups than
    parts.

    Args:
        batch: The batch of the step.
        count: Number of parts.
        generator: Determines the random order.
    """
    if count == 1:
        return [torch.arange(len(batch))]
    if len(batch.prompts) < count:
        parts = torch.randperm(len(batch), generator=generator).tensor_split(count)
        # Sorted, so that the rows of a prompt are neighbours.
        return [part.sort().values for part in parts if len(part)]
    parts = torch.randperm(len(batch.prompts), generator=generator).tensor_split(count)
    of = batch.prompt_of.cpu()
    indices = [torch.isin(of, part).nonzero()[:, 0] for part in parts]
    # A prompt may have no rows.
    return [index for index in indices if len(index)]


class MicroBatch(NamedTuple):
    """Rows of a batch that a rank computes in one call.

    Attributes:
        index: ``[K]``. The rows.
        media_key: See ``Segments.media_key``.
    """

    index: Tensor
    media_key: Hashable

    def of(self, batch: Batch) -> Batch:
        """Return these rows of ``batch``, which the micro-batch was made of."""
        part = batch.select(self.index)
        part.prompts.media_key = self.media_key
        return part


def local_micro_batches(
    batch: Batch, budget: int, layout: str, ranks: ProcessGroup, *, cut: bool = True
) -> list[MicroBatch]:
    """Return this rank's part of ``micro_batches``; over all ranks every row occurs once.

    Every rank gets the same number of micro-batches, since a call of a sharded model is collective.
    The last ones may be empty.

    Args:
        batch: The batch, identical on all ranks.
        budget: Largest number of tokens of a micro-batch.
        layout: Layout of the model's inputs.
        ranks: The data-parallel group.
        cut: If False, no group is cut to balance the ranks. A group above ``budget`` is still cut.
    """
    of_ranks = _of_ranks(batch, budget, layout, ranks.size, cut=cut)
    found: list[MicroBatch] = []
    # Column i holds the micro-batches that all ranks compute at the same time.
    for indices in zip(*of_ranks):
        key = None
        if batch.prompts.numbers is not None:
            key = tuple(_numbers(batch, index) for index in indices)
        found.append(MicroBatch(indices[ranks.rank], key))
    return found


def _of_ranks(
    batch: Batch, budget: int, layout: str, count: int, *, cut: bool
) -> list[list[Tensor]]:
    """Return the micro-batches of each of ``count`` ranks, as many for each."""
    if count == 1:
        return [micro_batches(batch, budget, layout)]
    parts: list[list[Tensor]] = []
    # For all ranks, on each rank: it tells the largest number without communication.
    for rows in balance_across_ranks(batch, layout, count, cut=cut):
        indices = micro_batches(batch.select(rows), budget, layout)
        parts.append([rows[index] for index in indices])
    most = max(map(len, parts))
    empty = torch.zeros(0, dtype=torch.long)
    return [indices + [empty] * (most - len(indices)) for indices in parts]


def _numbers(batch: Batch, index: Tensor) -> tuple[int, ...]:
    """Return the numbers of the prompts of the rows ``index``, in the order of ``select``."""
    numbers = batch.prompts.numbers
    assert numbers is not None
    return tuple(numbers[torch.unique(batch.prompt_of[index])].tolist())


def balance_across_ranks(
    batch: Batch, layout: str, count: int, *, cut: bool = True
) -> list[Tensor]:
    """Split the rows of ``batch`` into ``count`` parts of nearly equal work.

    Groups stay whole unless a part then exceeds ``SLACK`` times its equal share. In that case the
    largest group of the fullest part is cut. If that part has no group to cut, the largest group of
    all is cut.

    Args:
        batch: The batch.
        layout: Layout of the model's inputs.
        count: Number of parts.
        cut: If False, groups stay whole whatever the work of a part is.
    """
    cost = _cost(batch, layout)
    pieces = [_Piece(cost(prompt, rows), prompt, rows) for prompt, rows in _members(batch).items()]
    # It ends: each round cuts a piece of two or more rows, until the work is even or none is left.
    while True:
        bins = _spread(pieces, count)
        loads = [_work(part, cost) for part in bins]
        fullest = bins[loads.index(max(loads))]
        divisible = [piece for piece in fullest if len(piece.rows) > 1]
        if not divisible:
            divisible = [piece for piece in chain.from_iterable(bins) if len(piece.rows) > 1]
        if not cut or max(loads) <= SLACK * sum(loads) / count or not divisible:
            break
        largest = max(divisible, key=lambda piece: piece.cost)
        # Every other row by length, so that both halves have about the same work.
        order = sorted(largest.rows, key=lambda r: (-int(batch.lengths[r]), r))
        at = pieces.index(largest)
        prompt = largest.prompt
        halves = order[::2], order[1::2]
        pieces[at : at + 1] = [_Piece(cost(prompt, half), prompt, half) for half in halves]
    rows_of_part = []
    for part in bins:
        rows = sorted(chain.from_iterable(piece.rows for piece in part))
        rows_of_part.append(torch.tensor(rows, dtype=torch.long))
    return rows_of_part


def _work(part: list[_Piece], cost: Callable[[int, list[int]], int]) -> int:
    """Return the cost of ``part``; pieces of one group in the same part count as one group."""
    members: dict[int, list[int]] = {}
    for piece in part:
        members.setdefault(piece.prompt, []).extend(piece.rows)
    return sum(cost(prompt, rows) for prompt, rows in members.items())


def _spread(pieces: list[_Piece], count: int) -> list[list[_Piece]]:
    """Assign the most expensive pieces first, each to the part with the least work."""
    bins: list[list[_Piece]] = [[] for _ in range(count)]
    loads = [0] * count
    # Ties are broken by the first row, so that all ranks find the same parts.
    for piece in sorted(pieces, key=lambda p: (-p.cost, p.rows[0])):
        least = loads.index(min(loads))
        bins[least].append(piece)
        loads[least] += piece.cost
    return bins


def _members(batch: Batch) -> dict[int, list[int]]:
    """Return the rows of each prompt."""
    members: dict[int, list[int]] = {}
    for row, prompt in enumerate(batch.prompt_of.tolist()):
        members.setdefault(prompt, []).append(row)
    return members


def _cost(batch: Batch, layout: str) -> Callable[[int, list[int]], int]:
    """Return a function that counts the tokens of some rows of a prompt under ``layout``."""
    prompt_length = batch.prompts.lengths.tolist()
    answer_length = batch.lengths.tolist()

    def cost(prompt: int, rows: list[int]) -> int:
        answers = [answer_length[i] for i in rows]
        # The prompt is computed once for all of its responses.
        if layout == "prefix_shared":
            return prompt_length[prompt] + sum(answers)
        if layout == "padded":
            return len(rows) * (prompt_length[prompt] + max(answers))
        return len(rows) * prompt_length[prompt] + sum(answers)

    return cost


def largest_group(batch: Batch, layout: str) -> int:
    """Return the number of tokens of the largest group, as ``layout`` computes them."""
    cost = _cost(batch, layout)
    return max((cost(prompt, rows) for prompt, rows in _members(batch).items()), default=0)


def micro_batches(batch: Batch, budget: int, layout: str) -> list[Tensor]:
    """Split a batch into micro-batches of at most ``budget`` tokens and return their row indices.

    A single longer response is a micro-batch on its own. The longest groups are placed first, each
    into the first part with room (first fit decreasing). A group that does not fit is cut. A group
    that shares its prompt may exceed the budget by 1/32, since each cut computes the prompt again.

    Args:
        batch: The batch.
        budget: Largest number of tokens of a micro-batch, as ``layout`` computes them.
        layout: Layout of the model's inputs.
    """
    prompt_length = batch.prompts.lengths.tolist()
    answer_length = batch.lengths.tolist()
    cost = _cost(batch, layout)
    limit = budget + int(EXCESS * budget) if layout == "prefix_shared" else budget
    pieces: list[tuple[int, int, list[int]]] = []  # cost, longest row, rows
    for prompt, rows in _members(batch).items():
        # The first row of a piece is its longest. Ties by index: all ranks find the same pieces.
        left = sorted(rows, key=lambda i: (-answer_length[i], i))
        while left:
            count = 1
            while count < len(left) and cost(prompt, left[: count + 1]) <= budget:
                count += 1
            if cost(prompt, left) <= limit:
                count = len(left)
            longest = prompt_length[prompt] + answer_length[left[0]]
            pieces.append((cost(prompt, left[:count]), longest, left[:count]))
            left = left[count:]

    bins: list[tuple[int, int, list[int]]] = []
    for tokens, longest, rows in sorted(pieces, key=lambda p: (-p[1], -p[0], p[2][0])):
        for b, (used, widest, inside) in enumerate(bins):
            wide = max(widest, longest)
            total = wide * (len(inside) + len(rows)) if layout == "padded" else used + tokens
            if total <= budget:
                bins[b] = (used + tokens, wide, inside + rows)
                break
        else:
            bins.append((tokens, longest, rows))
    return [torch.tensor(rows, dtype=torch.long) for _, _, rows in bins]
