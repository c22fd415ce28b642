"""Prompts in an order that depends on nothing but the seed, and a position in it that is saved with the run."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from logging import INFO, WARNING, getLogger
from typing import Any

from lightrft.config import DataConfig
from lightrft.datasets.prompts import PromptDataset, PromptSampler
from lightrft.types import Prompt

log = getLogger(__name__)


@dataclass(slots=True)
class PromptStream:
    """An endless stream over a data set, epoch after epoch."""

    dataset: PromptDataset
    sampler: PromptSampler

    @staticmethod
    def of(config: DataConfig, tokenizer: Any, seed: int) -> PromptStream:
        dataset = PromptDataset(config, tokenizer, seed=seed)
        report("data", dataset.counts, dataset.first_problem)
        return PromptStream(dataset, PromptSampler(len(dataset), seed, config.shuffle))

    def prompts(self) -> Iterator[Prompt]:
        """Each prompt once, in the order of the data set."""
        return (self.dataset[i] for i in range(len(self.dataset)))

    def draw(self, count: int) -> list[Prompt]:
        return [self.dataset[i] for i in self.sampler.next(count)]

    def named(self, ids: Sequence[str]) -> list[Prompt]:
        """The prompts called ``ids``. Raises ``CheckpointError`` when the data does not hold one."""
        return [self.dataset[i] for i in self.dataset.places(ids)]

    @contextmanager
    def as_before_on_error(self) -> Generator[None]:
        """When the body raises, what it drew has not been drawn."""
        before = self.sampler.state_dict()
        try:
            yield
        except BaseException:
            self.sampler.load_state_dict(before)
            raise


def held_out(config: DataConfig, tokenizer: Any, seed: int, limit: int | None) -> Sequence[Prompt]:
    """Every prompt of ``config``, or the first ``limit``; empty when it names no source."""
    if not config.sources:
        return []
    dataset = PromptDataset(config, tokenizer, seed=seed)
    report("held out", dataset.counts, dataset.first_problem)
    return [dataset[i] for i in range(min(len(dataset), limit or len(dataset)))]


def report(what: str, counts: Mapping[str, int], first: str = "") -> None:
    """Log what was read of a data set; that rows were left out, or cut, is a warning."""
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    lost = sum(counts.get(name, 0) for name in ("malformed", "overlong", "truncated"))
    log.log(WARNING if lost else INFO, "%s: %s%s", what, said, f"; the first left out: {first}" if first else "")
