"""The order in which several sources are mixed into one dataset.

It depends only on the arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from lightrft.utils.lazy_imports import np
from lightrft.utils.seeding import RandomStream, numpy_generator

Blend = Literal["concat", "sample", "sample_all"]
Order: TypeAlias = "np.ndarray"
"""Positions of rows, ``[N]`` int64."""


def blend(
    lengths: Sequence[int], weights: Sequence[float], mode: Blend, *, shuffle: bool, seed: int
) -> Order:
    """Return the order of the mixed dataset, as positions in the concatenation of all sources.

    Args:
        lengths: number of rows of each source.
        weights: sampling weight of each source. Ignored by ``concat``.
        mode: ``concat`` takes every row once. ``sample`` samples the source of each row by weight
            until the first source is used up. ``sample_all`` continues until every source is used
            up, and repeats sources that end earlier.
        shuffle: if True, each pass over a sampled source is in random order. A source that is not
            used up then gives a random subset of its rows.
        seed: seed of the sampling and the shuffling.
    """
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    if mode == "concat" or len(lengths) == 1:
        return np.arange(starts[-1], dtype=np.int64)
    picks = _picks(lengths, weights, mode, seed)
    order = np.empty(len(picks), dtype=np.int64)
    for source, length in enumerate(lengths):
        where = np.flatnonzero(picks == source)
        passes = -(-len(where) // length)
        rows = [np.empty(0, dtype=np.int64)]
        for k in range(passes):
            # Each pass has a generator, so that it does not depend on the passes before it.
            chance = numpy_generator(seed, RandomStream.MIX_ROWS, source, k)
            rows.append(chance.permutation(length) if shuffle else np.arange(length))
        order[where] = starts[source] + np.concatenate(rows)[: len(where)]
    return order


def _picks(lengths: Sequence[int], weights: Sequence[float], mode: Blend, seed: int) -> np.ndarray:
    """Return the source of each row, ``[N]``, ending with the row that ends the mix."""
    share = np.asarray(weights, dtype=np.float64)
    share = share / share.sum()
    chance = numpy_generator(seed, RandomStream.MIX_SOURCES)
    picks = np.empty(0, dtype=np.int64)
    while True:
        # samples in blocks, because the end of the mix is known only afterwards
        block = chance.choice(len(lengths), size=2 * max(lengths) + 64, p=share)
        picks = np.concatenate([picks, block])
        # number of picks after which each source is used up
        used_up = []
        for source, length in enumerate(lengths):
            places = np.flatnonzero(picks == source)
            if len(places) >= length:
                used_up.append(int(places[length - 1]) + 1)
        if mode == "sample" and used_up:
            return picks[: min(used_up)]
        if len(used_up) == len(lengths):
            return picks[: max(used_up)]
