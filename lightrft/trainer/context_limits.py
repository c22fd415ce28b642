"""Whether prompts and answers fit into what a model was made for."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedConfig

from lightrft.config.strategy import SamplingConfig
from lightrft.models.actor import Actor
from lightrft.models.decoding.kinds import length_bound
from lightrft.models.families import context_length
from lightrft.types import Prompt
from lightrft.utils.errors import ConfigError


def check_lengths(actor: Actor, longest: int, sampling: SamplingConfig, key: str, data: str) -> None:
    """Raises ``ConfigError`` when an answer to a prompt of ``longest`` tokens could outgrow the model.

    ``key`` and ``data`` are the settings that ``sampling`` and the prompts come from.
    """
    check_bound(actor.base.config, longest, sampling, key, data)
    context = context_length(actor.base.config)
    actor.longest_row = max(actor.longest_row or 0, longest + sampling.max_new_tokens)
    if context is None or longest + sampling.max_new_tokens <= context:
        return
    room = context - longest
    way = f"lower {key}.max_new_tokens to {room} or less" if room > 0 else f"lower {data}.max_prompt_tokens"
    raise ConfigError(
        f"{key}.max_new_tokens = {sampling.max_new_tokens}: after a prompt of {longest} tokens, the longest there is, an answer could "
        f"go on to token {longest + sampling.max_new_tokens}, beyond the model's max_position_embeddings = {context}; {way}"
    )


def check_bound(config: PreTrainedConfig, longest: int, sampling: SamplingConfig, key: str, data: str) -> None:
    """Raise ``ConfigError`` when a response could outgrow ``length_bound``: it would not be trained as it is sampled.

    Args are those of ``check_lengths``, and the model's ``config``.
    """
    bound, end = length_bound(config), longest + sampling.max_new_tokens
    if bound is None or end <= bound.tokens:
        return
    room = bound.tokens - longest
    way = f"lower {key}.max_new_tokens to {room} or less" if room > 0 else f"lower {data}.max_prompt_tokens"
    raise ConfigError(
        f"{key}.max_new_tokens = {sampling.max_new_tokens}: a row could have {end} tokens. Beyond {bound.tokens} the "
        f"log-probs of model type {config.model_type!r} depend on other rows or on chance ({bound.reason}), so what is "
        f"sampled would not be what is trained; {way}"
    )


def longest(prompts: Sequence[Prompt]) -> int:
    """Tokens of the longest of ``prompts``."""
    return max((len(prompt.token_ids) for prompt in prompts), default=0)


def check_examples(actor: Actor, longest: int, max_tokens: int, key: str = "max_tokens") -> None:
    """Raises ``ConfigError`` when an example of ``longest`` tokens is more than the model was made for. ``key`` is the setting of
    ``max_tokens``."""
    context = context_length(actor.base.config)
    actor.longest_row = max(actor.longest_row or 0, longest)
    if context is not None and longest > context:
        raise ConfigError(
            f"{key} = {max_tokens}: there is an example of {longest} tokens, and the model's max_position_embeddings = {context}; "
            f"lower {key} to {context} or less"
        )
