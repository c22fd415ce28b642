"""Load the prompts of an eval set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from lightrft.config.data import DataConfig
from lightrft.config.reward import RewardConfig
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.row_warnings import check_rows
from lightrft.datasets.sampler import EvalPrompts, report
from lightrft.rollout.row_check import check_labels
from lightrft.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrft.models.processors import Processor


def load_eval_prompts(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    limit: int | None,
    processor: Processor | None = None,
    *,
    reward: RewardConfig | None = None,
) -> Sequence[Prompt]:
    """Return every prompt of an eval set, or the first ``limit``; empty if it names no source.

    Args:
        config: The data settings of the eval set.
        tokenizer: Encodes the prompts.
        seed: Determines random choices of the data set.
        limit: Largest number of prompts. ``None`` returns all.
        processor: Prepares media. ``None`` for text.
        reward: The rewards that score the responses. ``None`` skips the check of labels.

    Raises:
        DataError: If ``reward`` cannot score a row.
    """
    if not config.sources:
        return []
    dataset = load_prompts(config, tokenizer, seed, processor, reward, "eval.data.sources")
    return EvalPrompts(dataset, range(min(len(dataset), limit or len(dataset))))


def prompt_keys(prompts: Sequence[Prompt]) -> list[bytes]:
    """Return the keys of prompts of text; see ``EncodedDataset.prompt_keys``."""
    return [np.asarray(p.token_ids, dtype=np.intc).tobytes() for p in prompts]


def load_prompts(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    processor: Processor | None,
    reward: RewardConfig | None,
    key: str,
) -> PromptDataset:
    """Return the prompts of ``config``, after checks of their texts and labels.

    Args:
        config: The data settings.
        tokenizer: Encodes the prompts.
        seed: Determines random choices of the data set.
        processor: Prepares media. ``None`` for text.
        reward: The rewards that score the responses. ``None`` skips the check of labels.
        key: The setting that names the rows, for messages.

    Raises:
        DataError: If ``reward`` cannot score a row.
    """
    dataset = PromptDataset(config, tokenizer, seed=seed, processor=processor)
    report("held out", dataset.counts, dataset.first_problem)
    check_rows(dataset, key)
    if reward is not None:
        check_labels(dataset, reward, key)
    return dataset
