"""Sample the rows of a dataset in a reproducible order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO, WARNING, getLogger
from typing import Protocol, TypeVar, overload

import numpy as np

from lightrft.datasets.mixing import generator
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.row_tables import BadRow
from lightrft.datasets.row_warnings import is_plain
from lightrft.distributed.process_group import ALONE, Ranks
from lightrft.types import Prompt
from lightrft.utils.errors import CheckpointError, DataError

log = getLogger(__name__)
T = TypeVar("T")


class PromptSampler:
    """An endless order over ``length`` prompts: epoch after epoch, each a permutation that depends on (seed, epoch) only."""

    def __init__(self, length: int, seed: int, shuffle: bool) -> None:
        if length < 1:
            raise ValueError("there are no prompts to sample from")
        self.length = length
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.position = 0
        self._known: tuple[int, np.ndarray] | None = None

    def order(self, epoch: int) -> np.ndarray:
        """``[length]`` the order of one epoch."""
        if self._known is None or self._known[0] != epoch:
            order = generator(self.seed, 2, epoch).permutation(self.length) if self.shuffle else np.arange(self.length)
            self._known = (epoch, order)
        return self._known[1]

    def next(self, count: int) -> list[int]:
        """The next ``count`` positions, across the end of an epoch where need be."""
        taken: list[int] = []
        while len(taken) < count:
            part = self.order(self.epoch)[self.position : self.position + count - len(taken)]
            taken += part.tolist()
            self.position += len(part)
            if self.position == self.length:
                self.epoch, self.position = self.epoch + 1, 0
        return taken

    def peek(self, count: int) -> list[int]:
        """What ``next`` would give."""
        before = self.state_dict()
        ahead = self.next(count)
        self.load_state_dict(before)
        return ahead

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from ``state``. Raises ``CheckpointError`` when it cannot be of this data set."""
        epoch, position = state["epoch"], state["position"]
        if epoch < 0 or not 0 <= position < self.length:
            raise CheckpointError(
                f"the checkpoint is at prompt {position} of epoch {epoch}, but the data has {self.length} prompts"
            )
        self.epoch, self.position = epoch, position


PART = 128
"""Held-out prompts whose media are decoded at one time."""


@dataclass(frozen=True, slots=True)
class Bare(Sequence[Prompt]):
    """The prompts of ``dataset`` without their media, each read when it is asked for."""

    dataset: PromptDataset

    def __len__(self) -> int:
        return len(self.dataset)

    @overload
    def __getitem__(self, i: int) -> Prompt: ...

    @overload
    def __getitem__(self, i: slice) -> Sequence[Prompt]: ...

    def __getitem__(self, i: int | slice) -> Prompt | Sequence[Prompt]:
        if isinstance(i, slice):
            return [self.dataset.prompt(k, media=False) for k in range(*i.indices(len(self)))]
        return self.dataset.prompt(i, media=False)


class HeldOut(Sequence[Prompt]):
    """The first ``count`` prompts of ``dataset``, kept without their media: those are there only while they are asked."""

    def __init__(self, dataset: PromptDataset, count: int) -> None:
        self._dataset = dataset
        self._bare = [dataset.prompt(i, media=False) for i in range(count)]

    def __len__(self) -> int:
        return len(self._bare)

    @overload
    def __getitem__(self, i: int) -> Prompt: ...

    @overload
    def __getitem__(self, i: slice) -> Sequence[Prompt]: ...

    def __getitem__(self, i: int | slice) -> Prompt | Sequence[Prompt]:
        return self._bare[i]

    def parts(self, ranks: Ranks = ALONE) -> Iterator[tuple[int, Sequence[Prompt]]]:
        """All prompts, with the place of the first: at once where they are text, some at a time where media must be decoded. The
        next are decoded while the caller is busy, and it lets go of the media of the last. What one of ``ranks`` cannot
        read, none of them asks."""
        if not self._dataset.reads_media:
            yield 0, self._bare
            return
        starts = range(0, len(self), PART)
        for start in starts:
            fetched = _agreed(self._dataset.fetch(range(start, min(start + PART, len(self)))), ranks)
            part = _kept(self._dataset, fetched)
            self._dataset.prefetch(range(start + PART, min(start + 2 * PART, len(self))))
            yield start, part
            for prompt in part:
                prompt.media = {}


def in_parts(prompts: Sequence[Prompt], ranks: Ranks = ALONE) -> Iterator[tuple[int, Sequence[Prompt]]]:
    """``prompts`` to be asked together by all ``ranks``, with the place of the first of them."""
    return prompts.parts(ranks) if isinstance(prompts, HeldOut) else iter([(0, prompts)])


class Drawable(Protocol[T]):
    """A data set whose entries are read side by side, and may turn out not to be readable."""

    counts: Counter[str]

    def __len__(self) -> int: ...
    def fetch(self, indices: Sequence[int], /) -> list[T | BadRow]: ...
    def prefetch(self, indices: Sequence[int], /) -> None: ...
    def lose(self, error: BadRow, /) -> None: ...


class Sampler(Protocol):
    """Chooses the rows to read next."""

    def next(self, count: int) -> list[int]:
        """Return the indices of the next ``count`` rows."""
        ...


def draw(dataset: Drawable[T], sampler: Sampler, count: int) -> list[T]:
    """The next ``count`` entries that can be read; those that cannot are errors or counted, as set.

    While the caller goes on, the entries of the next draw are begun. Raises ``DataError`` when a whole epoch cannot be read.
    """
    drawn: list[T] = []
    lost = 0
    while len(drawn) < count:
        fetched = dataset.fetch(sampler.next(count - len(drawn)))
        kept = _kept(dataset, fetched)
        lost = 0 if kept else lost + len(fetched)
        if lost >= len(dataset):
            raise DataError(f"data.sources: {lost} rows in a row cannot be read any more; the last: {fetched[-1]}")
        drawn += kept
    if isinstance(sampler, PromptSampler):  # a curriculum draws by what comes of this step
        dataset.prefetch(sampler.peek(count))
    return drawn


def _agreed(fetched: Sequence[T | BadRow], ranks: Ranks) -> list[T | BadRow]:
    """``fetched`` without what another rank could not read: ranks that share out prompts must have the same."""
    own = {k: str(entry) for k, entry in enumerate(fetched) if isinstance(entry, BadRow)}
    lost = {k: why for found in ranks.gather(own) for k, why in found.items()}
    return [BadRow(lost[k]) if k in lost else entry for k, entry in enumerate(fetched)]


def _kept(dataset: Drawable[T], fetched: Sequence[T | BadRow]) -> list[T]:
    kept: list[T] = []
    for entry in fetched:
        if isinstance(entry, BadRow):
            dataset.lose(entry)
            log.warning("passed over, the %d. so far: %s", dataset.counts["unreadable"], entry)
        else:
            kept.append(entry)
    return kept


def report(what: str, counts: Mapping[str, int], first: str = "") -> None:
    """Log what was read of a data set; that rows were left out, or cut, is a warning."""
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count and is_plain(name))
    lost = sum(counts.get(name, 0) for name in ("malformed", "overlong", "truncated"))
    log.log(WARNING if lost else INFO, "%s: %s%s", what, said, f"; the first left out: {first}" if first else "")
