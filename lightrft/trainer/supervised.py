"""Check and prepare what all verbs share that train on given responses."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from lightrft.config.base import changed_fields
from lightrft.config.reward import RewardConfig
from lightrft.config.verbs import GivenDataConfig, SupervisedConfig
from lightrft.datasets.encoded_dataset import EncodedDataset
from lightrft.datasets.row_warnings import check_held_out
from lightrft.distributed.process_group import ProcessGroup, run_on_all_ranks
from lightrft.rewards.startup_check import check_rewards
from lightrft.rollout.evaluation import load_eval_prompts, prompt_keys
from lightrft.trainer.checks.preflight import (
    check_evaluation,
    check_trained_weights,
    check_whole_rewards,
)
from lightrft.trainer.run_session import RunSession
from lightrft.trainer.training_loop import SAMPLED_BY
from lightrft.types import Prompt
from lightrft.utils.errors import ConfigError
from lightrft.workers.engine_kinds import kinds_to_check
from lightrft.workers.local import local_policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrft.engines.base import Engine
    from lightrft.models.actor import Actor
    from lightrft.models.processors import Processor
    from lightrft.strategy.base import Strategy


def check_supervised(config: SupervisedConfig, reads: Collection[str] = ()) -> None:
    """Raise ``ConfigError`` for problems that can be found without a model or data.

    Args:
        config: Settings of the run.
        reads: Settings of ``UNREAD`` that this run reads after all. ``reward``: it scores more
            than responses to the eval set.
    """
    check_sources(config)
    check_trained_weights(config.model)
    check_evaluation(config)
    check_whole_rewards(config.reward, config.verb)
    has_reward = config.reward.scores
    if config.eval.data.sources and not has_reward:
        raise ConfigError(
            "eval.data has sources but reward.terms is empty; name what scores a response, e.g. "
            "reward.terms=[math]"
        )
    if has_reward and not config.eval.data.sources and "reward" not in reads:
        raise ConfigError(
            "reward changes nothing: it scores responses to the eval set, and eval.data.sources "
            "is empty; name the eval set, or leave reward out"
        )
    check_unread(config, reads)


def check_sources(config: GivenDataConfig) -> None:
    """Raise ``ConfigError`` if no data is named."""
    if not config.data.sources:
        raise ConfigError(
            "data.sources is empty; name what to train on, e.g. data.sources=[{path: train.jsonl}]"
        )


def check_unread(config: GivenDataConfig, reads: Collection[str] = ()) -> None:
    """Raise ``ConfigError`` if a setting is given that the run does not read.

    Args:
        config: Settings of the run.
        reads: Settings of ``UNREAD`` that this run reads after all.
    """
    for key in UNREAD:
        section, _, name = key.partition(".")
        if key not in reads and name in changed_fields(getattr(config, section)):
            sampling = SAMPLED_BY.get(config.verb) if key in READ_SAMPLED else None
            raise ConfigError(
                f"{key} changes nothing in lightrft {config.verb}: it is of rollouts "
                "and prompts, and this run trains on given responses; leave it out"
                + (f", or set {sampling} to sample them" if sampling else "")
            )


READ_SAMPLED = ("log.rollouts_every", "log.samples")
"""Settings that every run reads which samples its responses."""
UNREAD = (
    *READ_SAMPLED,
    "log.batches_every",
    "log.entropy",
    "log.repetition",
    "data.max_prompt_tokens",
)
"""Settings of sampled responses and prompts."""


def loaded_eval_prompts(
    config: SupervisedConfig,
    tokenizer: PreTrainedTokenizerBase,
    processor: Processor | None,
    session: RunSession,
    learned: EncodedDataset[Any],
) -> Sequence[Prompt]:
    """Load the eval set, and try its rewards.

    Args:
        config: Settings of the run.
        tokenizer: Tokenizer of the model.
        processor: Processor of the model, or None for a text-only model.
        session: Gives the ranks.
        learned: The rows to learn from.
    """
    prompts = load_eval_prompts(
        config.eval.data,
        tokenizer,
        config.run.seed,
        config.eval.limit,
        processor,
        reward=config.reward,
    )
    check_held_out(learned.prompt_keys(), prompt_keys(prompts), "eval.data.sources")
    try_rewards(config.reward, prompts, tokenizer, session.ranks)
    return prompts


def supervised_policy(
    config: SupervisedConfig,
    session: RunSession,
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[object],
) -> tuple[Strategy, Actor, Engine]:
    """Load the policy of a run that trains on given responses, and its engine.

    Args:
        config: Settings of the run.
        session: Gives the ranks.
        tokenizer: Tokenizer of the model.
        asked: Rows that the policy responds to, such as the eval set.

    Raises:
        ConfigError: The engine cannot generate for media of these rows.
    """
    media = kinds_to_check(config.engine, *asked)
    return local_policy(
        config.model, config.strategy, config.engine, tokenizer, session.ranks, media=media
    )


def try_rewards(
    reward: RewardConfig,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    ranks: ProcessGroup,
) -> None:
    """Score made-up responses to some of ``prompts``. All ranks must call it.

    Args:
        reward: Settings of the rewards.
        prompts: The prompts; none are no error.
        tokenizer: Encodes the responses.
        ranks: All ranks of the run.

    Raises:
        RewardError: A reward cannot score them.
    """

    # Reward functions may be slow or call a service, so one rank tries them for all.
    def on_first_rank() -> None:
        if prompts and ranks.rank == 0:
            check_rewards(reward, prompts, tokenizer)

    run_on_all_ranks(ranks, on_first_rank)
