"""Load the prompts of an eval set, and evaluate the policy on it with the rewards of training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lightrft.config.data import DataConfig
from lightrft.config.reward import RewardConfig
from lightrft.config.rollout import EvalConfig
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.row_warnings import check_rows
from lightrft.datasets.sampler import EvalPrompts, in_parts, report
from lightrft.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from lightrft.engines.base import Engine
from lightrft.observability.metrics import Last, Mean, Metrics, Sum
from lightrft.observability.timers import Timers
from lightrft.rewards.base import RewardScorer
from lightrft.rewards.success import GIVEN, Success
from lightrft.rollout.collect import generate_on_ranks
from lightrft.rollout.eval_results.judgements import judgement_scores
from lightrft.rollout.eval_results.prompt_scores import (
    Groups,
    by_prefix,
    error_metrics,
    estimates,
    pass_scores,
    term_metrics,
)
from lightrft.rollout.generation import requests_for
from lightrft.rollout.row_check import check_labels
from lightrft.types import Prompt, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrft.models.processors import Processor


@dataclass(slots=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        groups: Every response, by prompt.
        metrics: ``eval/...`` metrics.
    """

    groups: list[list[Rollout]]
    metrics: Metrics

    @property
    def rollouts(self) -> list[Rollout]:
        """Return every response, group after group."""
        return [r for group in self.groups for r in group]


def evaluate(
    engine: Engine,
    scorer: RewardScorer,
    prompts: Sequence[Prompt],
    config: EvalConfig,
    seed: int,
    stopped: Callable[[], bool] = lambda: False,
    ranks: ProcessGroup = SINGLE_PROCESS,
    reward: RewardConfig = GIVEN,
    costs: frozenset[str] = frozenset(),
) -> Evaluation:
    """Generate and score responses to every prompt.

    ``eval/accuracy`` is the mean over prompts of the fraction of right responses. ``eval/pass`` is
    the fraction of prompts with at least one right response, reported if there are several samples.
    ``eval/pass@k`` and ``eval/pass^k`` are the probabilities that any or all of k samples are
    right. ``eval/accuracy_low`` and ``_high`` are the ends of the 95 % interval over prompts. Data
    sources without an outcome term (see ``Success``) are part of none of these. A failed response
    counts as wrong and in ``eval/failed``. A prompt that is no longer readable is skipped and
    counted in ``eval/media_errors``.

    Args:
        engine: Generates the responses.
        scorer: Scores the responses.
        prompts: The eval set.
        config: The settings ``eval``.
        seed: Determines the samples.
        stopped: Returns true when the run must stop.
        ranks: The process group that shares the work.
        reward: The settings ``reward``, which say which term makes a response right.
        costs: Names of the terms that are costs, which never make a response right.
    """
    success = Success(reward, config.threshold, costs)
    groups: list[list[Rollout]] = []
    # In parts, so that the media of only one part are in memory at a time.
    for first, part in in_parts(prompts, ranks):
        requests = requests_for(part, config.samples, seed, "eval", first=first)
        groups += generate_on_ranks(
            ranks, engine, scorer, requests, config.sampling, Timers(), stopped
        )
    metrics = Metrics()
    for group in groups:
        for rollout in group:
            success.check(rollout)
    for prefix, members in by_prefix(groups).items():
        _count(metrics, prefix, members, config.samples, success)
    outcomes = [
        (rollout.prompt.data_source, value)
        for group in groups
        for rollout in group
        if not rollout.failed and (value := success.outcome_of(rollout)) is not None
    ]
    if values := success.outcome_values(outcomes):
        metrics.add("eval/outcome_values", Last(values))
    metrics.add("eval/media_errors", Sum(len(prompts) - len(groups)))
    return Evaluation(groups, metrics)


def _count(metrics: Metrics, prefix: str, groups: Groups, samples: int, success: Success) -> None:
    for group in groups:
        if success.judges(group[0].prompt.data_source):
            right = [success.is_right(r) for r in group]
            metrics.add(f"{prefix}/accuracy", Mean(sum(right) / len(right)))
            if samples > 1:
                metrics.add(f"{prefix}/pass", Mean(float(any(right))))
        for rollout in group:
            metrics.add(f"{prefix}/failed", Sum(int(bool(rollout.failed))))
            metrics.add(f"{prefix}/length", Mean(len(rollout)))
            metrics.add(f"{prefix}/truncated", Mean(float(rollout.finish_reason == "length")))
            if not rollout.failed:
                metrics.add(f"{prefix}/reward", Mean(rollout.reward or 0.0))
    scores = {
        **pass_scores(groups, success),
        **judgement_scores(groups, success),
    }
    found = estimates(prefix, scores)
    for name, value in {**error_metrics(found), **term_metrics(prefix, groups)}.items():
        metrics.add(name, Last(value))


def reached(config: EvalConfig, values: Mapping[str, float]) -> bool:
    """Return whether the accuracy on the eval set has reached ``eval.stop_at``."""
    return config.stop_at is not None and values.get("eval/accuracy", 0.0) >= config.stop_at


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
