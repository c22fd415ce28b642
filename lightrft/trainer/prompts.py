"""Prompts in an order that depends on nothing but the seed, and on pass rates where asked for, saved with the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO, WARNING, getLogger
from typing import Any

from lightrft.config import CurriculumConfig, DataConfig
from lightrft.datasets.prompts import PromptDataset, PromptSampler
from lightrft.trainer.curriculum import Curriculum
from lightrft.types import Prompt, Rollout
from lightrft.utils.errors import CheckpointError
from lightrft.utils.metrics import Metrics

log = getLogger(__name__)


@dataclass(slots=True)
class PromptStream:
    """An endless stream over a data set: epoch after epoch, or as a curriculum draws."""

    dataset: PromptDataset
    sampler: PromptSampler | Curriculum

    @staticmethod
    def of(config: DataConfig, tokenizer: Any, seed: int, curriculum: CurriculumConfig | None = None) -> PromptStream:
        dataset = PromptDataset(config, tokenizer, seed=seed)
        report("data", dataset.counts, dataset.first_problem)
        if curriculum is None:
            return PromptStream(dataset, PromptSampler(len(dataset), seed, config.shuffle))
        return PromptStream(dataset, Curriculum(curriculum, dataset.ids, seed))

    def prompts(self) -> Iterator[Prompt]:
        """Each prompt once, in the order of the data set."""
        return (self.dataset[i] for i in range(len(self.dataset)))

    def draw(self, count: int) -> list[Prompt]:
        return [self.dataset[i] for i in self.sampler.next(count)]

    def named(self, name: str) -> Prompt:
        """The prompt with this id. Raises ``CheckpointError`` when there is none."""
        try:
            return self.dataset[self.dataset.ids.index(name)]
        except ValueError:
            raise CheckpointError(f"the checkpoint has answers to prompt {name!r}, which the data has no longer") from None

    def observe(self, groups: Sequence[Sequence[Rollout]]) -> Metrics:
        """Scored answers that a step drew, for a curriculum to learn from; its metrics."""
        return self.sampler.observe(groups) if isinstance(self.sampler, Curriculum) else Metrics()


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
