"""Requests of every engine: their limits, and the rollouts that answer them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.types import FinishReason, Request, Rollout
from lightrft.utils.errors import ConfigError, ResourceError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NATIVE_SETTINGS = ("first_token_temperature", "constraint")
"""Settings ``sampling`` that only the native engine applies. ``None`` is their default."""

FILTERS = ("top_p", "top_k", "min_p", "repetition_penalty")
"""Settings whose effect is missing in SGLang's log-probs, or differs from ours. Of these, a greedy
response depends on the last alone."""


BAN = -1e9
"""Bias of a banned token. JSON has no infinity, and this one leaves a probability of 0."""


def check_requests(
    requests: Iterable[Request],
    sampling: SamplingConfig,
    config: EngineConfig,
) -> None:
    """Check that every request asks for tokens and fits the cache.

    Args:
        requests: The requests to check.
        sampling: Holds ``max_new_tokens`` for requests without a limit.
        config: Holds ``max_cache_tokens``, in tokens of one prompt with its response.

    Raises:
        ResourceError: A request exceeds ``max_cache_tokens``.
        ValueError: A request has no tokens left to generate.
    """
    for request in requests:
        limit = response_limit(request, sampling)
        if limit < 1:
            given = f"max_new_tokens {request.max_new_tokens} of a request"
            raise ValueError(f"{given} must be at least 1")
        prompt = f"{request.prompt.id!r}"
        end = response_end(request, sampling)
        if request.num_generated >= end:
            held = f"{request.num_generated} tokens of a response to {prompt} are there"
            raise ValueError(f"{held}; it ends at {end}")
        prompt_tokens = len(request.prompt.token_ids)
        tokens = prompt_tokens + limit
        if tokens > config.max_cache_tokens:
            needed = f"{prompt_tokens} prompt tokens + max_new_tokens {limit} = {tokens}"
            raise ResourceError(
                f"engine.max_cache_tokens = {config.max_cache_tokens} cannot hold prompt "
                f"{prompt}: {needed}; raise engine.max_cache_tokens to at least {tokens}, or "
                "lower max_new_tokens or the prompt length"
            )


def check_longest(
    longest: int, sampling: SamplingConfig, most: int, where: str, key: str, data: str
) -> None:
    """Raise ``ConfigError`` if the longest prompt and its response exceed ``most`` tokens.

    Args:
        longest: Length of the longest prompt, in tokens.
        sampling: Settings with the maximum length of a response.
        most: Most tokens of a prompt with its response.
        where: What holds no more, for the message.
        key: Name of the setting that holds ``sampling``.
        data: Name of the setting that holds the prompts.
    """
    limit = sampling.max_new_tokens
    if longest + limit > most:
        raise ConfigError(
            f"{key}.max_new_tokens = {limit}: after the longest prompt, {longest} tokens, a "
            f"response could reach token {longest + limit}, and {where} holds {most}; "
            f"{way_to_shorten(most - longest, key, data)}"
        )


def way_to_shorten(room: int, key: str, data: str) -> str:
    """Return the advice to shorten the rows of a run.

    Args:
        room: Tokens that the longest prompt leaves for a response.
        key: Name of the setting that holds the sampling settings.
        data: Name of the setting that holds the prompts.
    """
    if room > 0:
        return f"lower {key}.max_new_tokens to {room} or less"
    return f"lower {data}.max_prompt_tokens"


def unsupported_settings(sampling: SamplingConfig) -> list[str]:
    """Return the settings in use that only the native engine applies."""
    return [name for name in NATIVE_SETTINGS if getattr(sampling, name) is not None]


def ban_of(banned: Sequence[int], bias: float = BAN) -> dict[int, float] | None:
    """Return the ``logit_bias`` that bans tokens, or ``None`` without any.

    Args:
        banned: Token ids.
        bias: The bias of each of them.
    """
    return dict.fromkeys(banned, bias) if banned else None


def refuse_filters(sampling: SamplingConfig, section: str = "sampling") -> None:
    """Raise ``ConfigError`` for settings that SGLang's log-probs leave out.

    Args:
        sampling: The settings.
        section: Name of their section, for the message.
    """
    for name in FILTERS:
        value, default = getattr(sampling, name), SamplingConfig.model_fields[name].default
        acts = sampling.temperature != 0 or name == FILTERS[-1]
        if value != default and acts:
            raise ConfigError(
                f"{section}.{name} = {value:g}: the log-probs of SGLang are not those of the "
                f"filtered distribution; leave out {section}.{name}, or set engine.kind=vllm or "
                "engine.kind=native"
            )


def refuse_native_settings(sampling: SamplingConfig, kind: str) -> None:
    """Raise ``ConfigError`` for settings that only the native engine applies.

    Args:
        sampling: The sampling settings.
        kind: The setting ``engine.kind`` of another engine.
    """
    for name in unsupported_settings(sampling):
        raise ConfigError(
            f"{name} = {getattr(sampling, name)}: engine.kind = {kind} cannot apply it; set "
            f"engine.kind=native, or leave out {name}"
        )


def response_limit(request: Request, sampling: SamplingConfig) -> int:
    """Return the number of tokens at which a response has finish reason ``length``."""
    return sampling.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens


def response_end(request: Request, sampling: SamplingConfig) -> int:
    """Return the response length at which a response is returned, finished or not."""
    limit = response_limit(request, sampling)
    return limit if request.pause_after_tokens is None else min(limit, request.pause_after_tokens)


def response_room(request: Request, sampling: SamplingConfig) -> int:
    """Return the number of tokens that the response may grow by in this call."""
    return response_end(request, sampling) - request.num_generated


def rollout_of(
    request: Request,
    token_ids: list[int],
    logprobs: list[float],
    versions: list[int],
    reason: FinishReason,
    text: str | None,
    tokenizer: PreTrainedTokenizerBase,
) -> Rollout:
    """Return the rollout of a response. Lists have one entry per token, resumed tokens included.

    Args:
        request: The request.
        token_ids: The response tokens.
        logprobs: Their log-probs.
        versions: Versions of the policy that sampled them.
        reason: Why the response ended.
        text: The response before its stop string, without special tokens. ``None`` is all of it.
        tokenizer: Decodes the tokens.
    """
    whole = str(tokenizer.decode(token_ids, skip_special_tokens=True)) if token_ids else ""
    plain = whole if text is None else text
    ended = reason == "stop" and plain == whole
    special = special_text(tokenizer, token_ids[:-1] if ended else token_ids, plain)
    # a partial response may hold tokens of an environment, which the policy did not sample
    resumed = [] if request.partial is None else request.partial.sampled
    return Rollout(
        prompt=request.prompt,
        token_ids=token_ids,
        sampled=resumed + [True] * (len(token_ids) - request.num_generated),
        logprobs=logprobs,
        versions=versions,
        finish_reason=reason,
        seed=request.seed,
        sample=request.sample,
        text=special or plain,
        plain=plain if special else None,
    )


@lru_cache(maxsize=8)
def _special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    return frozenset(tokenizer.all_special_ids)


def special_text(tokenizer: PreTrainedTokenizerBase, token_ids: list[int], text: str) -> str:
    """Return the text of a response with its special tokens, or "" if it has none.

    Args:
        tokenizer: Decodes the tokens.
        token_ids: The tokens of the response, without an end token.
        text: The text without special tokens. It may end before a stop string, and then so does
            the result.
    """
    special = [token for token in token_ids if token in _special_ids(tokenizer)]
    if not special:
        return ""
    found = str(tokenizer.decode(token_ids))
    # The end of ``text`` in ``found``: special tokens before it do not count.
    position = seen = 0
    for token in special:
        name = str(tokenizer.decode([token]))
        start = found.find(name, position)
        if start < 0 or seen + start - position > len(text):
            break
        seen += start - position
        position = start + len(name)
    return found[: position + len(text) - seen]
