"""Prompts in an order that depends on nothing but the seed, and on pass rates where asked for, saved with the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import INFO, WARNING, getLogger
from typing import Any, Protocol, TypeVar, overload

from lightrft.config import CurriculumConfig, DataConfig, RewardConfig
from lightrft.datasets.doubts import is_plain
from lightrft.datasets.prompts import PromptDataset, PromptSampler
from lightrft.datasets.rows import BadRow
from lightrft.trainer.account import Collected
from lightrft.trainer.curriculum import Curriculum
from lightrft.trainer.replay_buffer import pack_rollout, unpack_rollouts
from lightrft.trainer.row_check import check_labels, check_text
from lightrft.types import Prompt, Rollout
from lightrft.utils.errors import DataError
from lightrft.utils.ranks import ALONE, Ranks

log = getLogger(__name__)
PART = 128
"""Held-out prompts whose media are decoded at one time."""
T = TypeVar("T")


@dataclass(slots=True)
class PromptStream:
    """An endless stream over a data set: epoch after epoch, or as a curriculum draws. ``carried`` are groups of the step before
    that the next one trains on, ``begun`` those that it draws on first. ``lost`` prompts of the step could not be read."""

    dataset: PromptDataset
    sampler: PromptSampler | Curriculum
    carried: list[list[Rollout]] = field(default_factory=list)
    begun: list[list[Rollout]] = field(default_factory=list)
    lost: int = 0

    @staticmethod
    def of(
        config: DataConfig, tokenizer: Any, seed: int, curriculum: CurriculumConfig | None = None, processor: Any = None
    ) -> PromptStream:
        dataset = PromptDataset(config, tokenizer, seed=seed, processor=processor)
        report("data", dataset.counts, dataset.first_problem)
        check_text(dataset, "data.sources")
        if curriculum is None:
            return PromptStream(dataset, PromptSampler(len(dataset), seed, config.shuffle))
        return PromptStream(dataset, Curriculum(curriculum, dataset.ids, seed))

    @property
    def bare(self) -> Sequence[Prompt]:
        """The prompts in the order of the data set, without their media."""
        return Bare(self.dataset)

    def draw(self, count: int) -> list[Prompt]:
        before = self.dataset.counts["unreadable"]
        drawn = draw(self.dataset, self.sampler, count)
        self.lost += self.dataset.counts["unreadable"] - before
        return drawn

    def named(self, ids: Sequence[str]) -> list[Prompt]:
        """The prompts called ``ids``. Raises ``CheckpointError`` when the data does not hold one."""
        return [self.dataset[i] for i in self.dataset.places(ids)]

    @contextmanager
    def as_before_on_error(self) -> Generator[None]:
        """When the body raises, what it drew has not been drawn."""
        before, carried, begun, lost = self.sampler.state_dict(), self.carried, self.begun, self.lost
        try:
            yield
        except BaseException:
            self.sampler.load_state_dict(before)
            self.carried, self.begun, self.lost = carried, begun, lost
            raise

    def settle(self, collected: Collected) -> None:
        """Learn from what a step has collected, for those after it; what was only kept for that is let go."""
        self.carried, self.begun = collected.carried, collected.begun
        if self.lost:
            collected.dropped["unreadable"] += self.lost
            self.lost = 0
        if isinstance(self.sampler, Curriculum):
            collected.curriculum = self.sampler.observe(collected.finished)
        collected.finished, collected.carried, collected.begun = [], [], []

    def close(self) -> None:
        """Let go of what was begun for a draw that will not come."""
        self.dataset.prefetch(())

    def state_dict(self) -> dict[str, Any]:
        waiting = {"carried": self.carried, "begun": self.begun}
        packed = {name: [[pack_rollout(r) for r in group] for group in groups] for name, groups in waiting.items()}
        return {"sampler": self.sampler.state_dict(), **packed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``. Raises ``CheckpointError`` when it cannot be of this data set."""
        self.sampler.load_state_dict(state["sampler"])
        self.carried, self.begun = (
            [unpack_rollouts(group, self.named) for group in state[name]] for name in ("carried", "begun")
        )


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


def held_out(
    config: DataConfig,
    tokenizer: Any,
    seed: int,
    limit: int | None,
    processor: Any = None,
    *,
    reward: RewardConfig | None = None,
    key: str = "eval.data.sources",
) -> Sequence[Prompt]:
    """Return every prompt of ``config``, or the first ``limit``; none when it names no source.

    Raises ``DataError`` for rows that ``reward`` could not score. ``key`` is the setting that names the rows.
    """
    if not config.sources:
        return []
    dataset = PromptDataset(config, tokenizer, seed=seed, processor=processor)
    report("held out", dataset.counts, dataset.first_problem)
    check_text(dataset, key)
    if reward is not None:
        check_labels(dataset, reward, key)
    return HeldOut(dataset, min(len(dataset), limit or len(dataset)))


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


def draw(dataset: Drawable[T], sampler: PromptSampler | Curriculum, count: int) -> list[T]:
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
