"""Samplers of dataset rows with a reproducible order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO, WARNING, getLogger
from typing import Protocol, TypeVar, overload

import numpy as np

from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.row_tables import MalformedRow
from lightrft.datasets.row_warnings import is_plain
from lightrft.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from lightrft.types import Prompt
from lightrft.utils.errors import CheckpointError, DataError
from lightrft.utils.seeding import RandomStream, numpy_generator

log = getLogger(__name__)
T = TypeVar("T")


class PromptSampler:
    """An endless sequence of indices below ``length``, epoch after epoch.

    The permutation of an epoch depends only on ``seed`` and the number of the epoch.

    Args:
        length: number of prompts.
        seed: seed of the permutations.
        shuffle: if False, every epoch is in the order of the dataset.
    """

    def __init__(self, length: int, seed: int, shuffle: bool) -> None:
        if length < 1:
            raise ValueError("there are no prompts to sample from")
        self.length = length
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.position = 0
        # the epoch whose order was asked for last, and its order
        self._known = (-1, np.empty(0, np.int64))

    def order(self, epoch: int) -> np.ndarray:
        """Return the order of one epoch, ``[length]``."""
        if self._known[0] != epoch:
            order = np.arange(self.length)
            if self.shuffle:
                chance = numpy_generator(self.seed, RandomStream.EPOCH_ORDER, epoch)
                order = chance.permutation(self.length)
            self._known = (epoch, order)
        return self._known[1]

    def next(self, count: int) -> list[int]:
        """Return the next ``count`` indices. They may cross the end of an epoch."""
        taken: list[int] = []
        while len(taken) < count:
            part = self.order(self.epoch)[self.position : self.position + count - len(taken)]
            taken += part.tolist()
            self.position += len(part)
            if self.position == self.length:
                self.epoch, self.position = self.epoch + 1, 0
        return taken

    def peek(self, count: int) -> list[int]:
        """Return the next ``count`` indices without advancing."""
        before = self.state_dict()
        ahead = self.next(count)
        self.load_state_dict(before)
        return ahead

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume from ``state``.

        Raises ``CheckpointError`` if its position is outside the dataset.
        """
        epoch = state["epoch"]
        position = state["position"]
        if epoch < 0 or not 0 <= position < self.length:
            problem = f"the checkpoint is at prompt {position} of epoch {epoch}"
            raise CheckpointError(f"{problem}, but the data has {self.length} prompts")
        self.epoch = epoch
        self.position = position


PART = 128
"""Number of eval prompts whose media are decoded together."""


@dataclass(frozen=True, slots=True)
class WithoutMedia(Sequence[Prompt]):
    """The prompts of ``dataset`` without their media, each read on access."""

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


class EvalPrompts(list[Prompt]):
    """The prompts of ``dataset`` at the indices ``chosen``, such as an eval set.

    Prompts are kept without their media. Media are loaded only while ``parts`` yields them.
    """

    def __init__(self, dataset: PromptDataset, chosen: Sequence[int]) -> None:
        super().__init__(dataset.prompt(i, media=False) for i in chosen)
        self._dataset = dataset
        self._chosen = chosen

    @property
    def media_kinds(self) -> set[str]:
        """The kinds of media whose placeholders some prompt of the dataset has."""
        return self._dataset.media_kinds

    def parts(
        self, ranks: ProcessGroup = SINGLE_PROCESS, begin: int = 0
    ) -> Iterator[tuple[int, Sequence[Prompt]]]:
        """Yield all prompts in parts, each with the index of its first prompt.

        Text prompts come as one part. Prompts with media come in parts of ``PART``. The next part
        is decoded while the caller works, and the media of the previous part are released. A prompt
        that one of ``ranks`` cannot read is dropped on all of them.

        Parts that end before prompt ``begin`` are left out.
        """
        if not self._dataset.reads_media:
            yield 0, self
            return
        numbers = self._chosen
        for start in range(begin // PART * PART, len(self), PART):
            fetched = self._dataset.fetch(numbers[start : start + PART])
            part = readable(self._dataset, agreed(fetched, ranks))
            self._dataset.prefetch(numbers[start + PART : start + 2 * PART])
            yield start, part
            for prompt in part:
                prompt.media = {}


def in_parts(
    prompts: Sequence[Prompt], ranks: ProcessGroup = SINGLE_PROCESS
) -> Iterator[tuple[int, Sequence[Prompt]]]:
    """Yield ``prompts`` in parts, each with the index of its first prompt.

    See ``EvalPrompts.parts``.
    """
    return prompts.parts(ranks) if isinstance(prompts, EvalPrompts) else iter([(0, prompts)])


class Drawable(Protocol[T]):
    """A dataset whose entries are read concurrently and may be unreadable."""

    counts: Counter[str]

    def __len__(self) -> int: ...
    def fetch(self, indices: Sequence[int], /) -> list[T | MalformedRow]: ...
    def prefetch(self, indices: Sequence[int], /) -> None: ...
    def lose(self, error: MalformedRow, /) -> None: ...


class Sampler(Protocol):
    """Selects the rows to read next."""

    def next(self, count: int) -> list[int]:
        """Return the indices of the next ``count`` rows."""
        ...


def draw(dataset: Drawable[T], sampler: Sampler, count: int) -> list[T]:
    """Return the next ``count`` readable entries of ``dataset``.

    An unreadable entry is an error or is counted and skipped, depending on ``data.bad_rows``.
    Reading the entries of the next call starts in the background.

    Args:
        dataset: the dataset to read from.
        sampler: selects the indices.
        count: number of entries.

    Raises:
        DataError: as many entries in a row as the dataset has are unreadable.
    """
    drawn: list[T] = []
    # unreadable entries since the last readable one: without this count, the loop might not end
    lost = 0
    while len(drawn) < count:
        fetched = dataset.fetch(sampler.next(count - len(drawn)))
        kept = readable(dataset, fetched)
        lost = 0 if kept else lost + len(fetched)
        if lost >= len(dataset):
            problem = f"{lost} rows in a row cannot be read any more"
            raise DataError(f"data.sources: {problem}; the last: {fetched[-1]}")
        drawn += kept
    # a curriculum has no peek(): its next indices depend on the results of this step
    if isinstance(sampler, PromptSampler):
        dataset.prefetch(sampler.peek(count))
    return drawn


def agreed(fetched: Sequence[T | MalformedRow], ranks: ProcessGroup) -> list[T | MalformedRow]:
    """Replace the entries that any rank could not read by ``MalformedRow``.

    All ranks then have the same prompts.
    """
    own = {k: str(entry) for k, entry in enumerate(fetched) if isinstance(entry, MalformedRow)}
    # By rank in order, so that all ranks keep the same reason of an entry.
    lost: dict[int, str] = {}
    for found in ranks.gather(own):
        lost |= found
    return [MalformedRow(lost[k]) if k in lost else entry for k, entry in enumerate(fetched)]


def readable(dataset: Drawable[T], fetched: Sequence[T | MalformedRow]) -> list[T]:
    """Return the readable entries of ``fetched``.

    An unreadable one is an error or is counted, depending on ``data.bad_rows``.
    """
    kept: list[T] = []
    for entry in fetched:
        if isinstance(entry, MalformedRow):
            dataset.lose(entry)
            log.warning("passed over, the %d. so far: %s", dataset.counts["unreadable"], entry)
        else:
            kept.append(entry)
    return kept


def in_order(
    dataset: Drawable[T], count: int, ranks: ProcessGroup, begin: int = 0
) -> Iterator[list[T]]:
    """Yield the readable entries of each ``count`` entries of ``dataset``, equal on all ranks.

    A part may be empty. The next part is read while the caller works.

    Args:
        dataset: the dataset to read from.
        count: number of entries of a part, readable or not.
        ranks: the process group.
        begin: number of entries to leave out, from the first.
    """
    for start in range(begin, len(dataset), count):
        stop = min(start + count, len(dataset))
        fetched = agreed(dataset.fetch(range(start, stop)), ranks)
        dataset.prefetch(range(stop, min(stop + count, len(dataset))))
        yield readable(dataset, fetched)


def report(what: str, counts: Mapping[str, int], first: str = "") -> None:
    """Log the counts of a dataset. Rows that were left out or truncated make it a warning.

    Args:
        what: name of the dataset.
        counts: number of rows by outcome.
        first: reason why the first row was left out. Empty if none was.
    """
    said = []
    for name, count in counts.items():
        if count and is_plain(name):
            said.append(f"{count} {name}")
    lost = sum(counts.get(name, 0) for name in ("malformed", "overlong", "truncated"))
    level = WARNING if lost else INFO
    example = f"; the first left out: {first}" if first else ""
    log.log(level, "%s: %s%s", what, ", ".join(said), example)
    if words := counts.get("media_words", 0):
        log.warning(
            "%s: rows that spell a marker such as <image> without media for it: %d. It is text there",
            what,
            words,
        )
