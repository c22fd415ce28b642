"""Check that prompts and responses fit into the model and its engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from transformers import PreTrainedConfig

from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.config.train import TrainConfig
from lightrft.engines.base import Engine
from lightrft.engines.requests import way_to_shorten
from lightrft.models.actor import Actor, Backbone
from lightrft.models.decoding.kinds import length_bound
from lightrft.models.families import context_length
from lightrft.types import Prompt
from lightrft.utils.errors import ConfigError

log = logging.getLogger(__name__)


def check_lengths(
    actor: Actor,
    engine: Engine,
    settings: EngineConfig,
    longest: int,
    sampling: SamplingConfig,
    key: str,
    data: str,
) -> None:
    """Raise ``ConfigError`` if a response could exceed what the model or its engine holds.

    Every rank must call it, once the engine has started.

    Args:
        actor: the model.
        engine: generates the responses.
        settings: settings of the engine.
        longest: length of the longest prompt, in tokens.
        sampling: settings with the maximum length of a response.
        key: name of the setting that holds ``sampling``, for the message.
        data: name of the setting that holds the prompts, for the message.
    """
    # The largest of several calls, e.g. for training prompts and for the eval set.
    actor.longest_row = max(actor.longest_row or 0, longest + sampling.max_new_tokens)
    check_context(actor.base.config, longest, sampling, key, data)
    check_cache(settings, longest, sampling, key, data)
    engine.check_limits(longest, sampling, key, data)


def check_context(
    config: PreTrainedConfig, longest: int, sampling: SamplingConfig, key: str, data: str
) -> None:
    """Raise ``ConfigError`` if a response could exceed ``length_bound`` or the context length.

    A stop token beyond the vocabulary is refused too, since it would end no response.

    Args:
        config: settings of the model.
        longest: length of the longest prompt, in tokens.
        sampling: settings with the maximum length and the stop tokens of a response.
        key: name of the setting that holds ``sampling``, for the message.
        data: name of the setting that holds the prompts, for the message.
    """
    for token in sampling.stop_token_ids:
        if token >= (rows := config.get_text_config(decoder=True).vocab_size):
            raise ConfigError(
                f"{key}.stop_token_ids has {token}, and the largest token id of the model is "
                f"{rows - 1}, so it would end no response; leave it out"
            )
    check_bound(config, longest, sampling, key, data)
    context, end = context_length(config), longest + sampling.max_new_tokens
    if context is not None and end > context:
        raise ConfigError(
            f"{key}.max_new_tokens = {sampling.max_new_tokens}: after the longest prompt, "
            f"{longest} tokens, a response could reach token {end}, beyond the model's "
            f"max_position_embeddings = {context}; "
            f"{way_to_shorten(context - longest, key, data)}"
        )


def check_cache(
    settings: EngineConfig, longest: int, sampling: SamplingConfig, key: str, data: str
) -> None:
    """Raise ``ConfigError`` if ``engine.max_cache_tokens`` cannot hold a prompt and its response.

    Args:
        settings: settings of the engine.
        longest: length of the longest prompt, in tokens.
        sampling: settings with the maximum length of a response.
        key: name of the setting that holds ``sampling``, for the message.
        data: name of the setting that holds the prompts, for the message.
    """
    most, end = settings.max_cache_tokens, longest + sampling.max_new_tokens
    if end > most:
        raise ConfigError(
            f"engine.max_cache_tokens = {most}: the longest prompt has {longest} tokens, and with "
            f"{key}.max_new_tokens = {sampling.max_new_tokens} a row could have {end}; raise "
            f"engine.max_cache_tokens to at least {end}, or "
            f"{way_to_shorten(most - longest, key, data)}"
        )


def check_bound(
    config: PreTrainedConfig, longest: int, sampling: SamplingConfig, key: str, data: str
) -> None:
    """Raise ``ConfigError`` if a response could exceed ``length_bound``.

    Beyond that bound, training and sampling disagree on log-probs.

    Args:
        config: settings of the model.
        longest: length of the longest prompt, in tokens.
        sampling: settings with the maximum length of a response.
        key: name of the setting that holds ``sampling``, for the message.
        data: name of the setting that holds the prompts, for the message.
    """
    bound, end = length_bound(config), longest + sampling.max_new_tokens
    if bound is None or end <= bound.tokens:
        return
    raise ConfigError(
        f"{key}.max_new_tokens = {sampling.max_new_tokens}: a row could have {end} tokens. "
        f"Beyond {bound.tokens} the log-probs of model type {config.model_type!r} depend on "
        f"other rows or on chance ({bound.reason}), so what is sampled would not be what is "
        f"trained; "
        f"{way_to_shorten(bound.tokens - longest, key, data)}"
    )


def warn_of_micro_batches(train: TrainConfig, longest: int) -> None:
    """Warn if a micro-batch cannot hold the longest prompt, of ``longest`` tokens."""
    if train.micro_batch_tokens < longest:
        log.warning(
            "train.max_tokens_per_micro_batch = %d is a number of tokens, and the longest prompt "
            "has %d: longer rows are computed one by one, which is slow; raise it",
            train.micro_batch_tokens,
            longest,
        )


def longest(prompts: Sequence[Prompt]) -> int:
    """Return the length of the longest of ``prompts``, in tokens."""
    return max((len(prompt.token_ids) for prompt in prompts), default=0)


def check_examples(actor: Backbone, longest: int, max_tokens: int, key: str = "max_tokens") -> None:
    """Raise ``ConfigError`` if an example exceeds the context length of the model.

    Args:
        actor: the model.
        longest: length of the longest example, in tokens.
        max_tokens: value of the setting ``key``.
        key: name of the setting that bounds examples, for the message.
    """
    context = context_length(actor.base.config)
    actor.longest_row = max(actor.longest_row or 0, longest)
    if context is not None and longest > context:
        raise ConfigError(
            f"{key} = {max_tokens}: there is an example of {longest} tokens, and the model's "
            f"max_position_embeddings = {context}; lower {key} to {context} or less"
        )
