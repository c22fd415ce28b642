"""The prompts of an eval set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightrft.config.data import DataConfig
from lightrft.config.reward import RewardConfig
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.row_warnings import check_text
from lightrft.datasets.sampler import HeldOut, report
from lightrft.rollout.row_check import check_labels
from lightrft.types import Prompt


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
