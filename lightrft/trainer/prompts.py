"""Prompts in an order that depends on nothing but the seed, and a position in it that is saved with the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightrft.config import DataConfig
from lightrft.datasets.prompts import PromptDataset, PromptSampler
from lightrft.types import Prompt


@dataclass(slots=True)
class PromptStream:
    """An endless stream over a data set, epoch after epoch."""

    dataset: PromptDataset
    sampler: PromptSampler

    @staticmethod
    def of(config: DataConfig, tokenizer: Any, seed: int) -> PromptStream:
        dataset = PromptDataset(config, tokenizer, seed=seed)
        return PromptStream(dataset, PromptSampler(len(dataset), seed, config.shuffle))

    def draw(self, count: int) -> list[Prompt]:
        return [self.dataset[i] for i in self.sampler.next(count)]


def held_out(config: DataConfig, tokenizer: Any, seed: int, limit: int | None) -> Sequence[Prompt]:
    """Every prompt of ``config``, or the first ``limit``; empty when it names no source."""
    if not config.sources:
        return []
    dataset = PromptDataset(config, tokenizer, seed=seed)
    return [dataset[i] for i in range(min(len(dataset), limit or len(dataset)))]
