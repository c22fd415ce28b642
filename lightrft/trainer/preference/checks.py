"""Reject settings of preference learning that cannot work, or with which nothing is learned."""

from __future__ import annotations

from collections.abc import Iterator

from lightrft.algorithms.contracts.run_checks import check_own_parts
from lightrft.algorithms.preference.compatibility import check_preference
from lightrft.algorithms.preference.reference_source import Source, reference_source
from lightrft.algorithms.preference.requirements import (
    PreferenceRequirements,
    preference_requirements,
)
from lightrft.config.base import changed_fields
from lightrft.config.verbs import DPOConfig
from lightrft.models.loading.adapter_base import adds_adapters
from lightrft.trainer.checks.preflight import greedy_setting, weightless_rewards
from lightrft.trainer.supervised import READ_SAMPLED, check_supervised
from lightrft.utils.errors import ConfigError

READ_ONLINE = ("reward", *READ_SAMPLED, "data.max_prompt_tokens")
"""Settings that a run reads if it samples its responses."""


def check(config: DPOConfig) -> PreferenceRequirements:
    """Return what the losses read.

    Raises ``ConfigError`` for problems that can be found without a model or data.
    """
    is_online = bool(config.online.group_size)
    check_supervised(config, READ_ONLINE if is_online else ())
    check_preference(config.preference)
    losses = enumerate(config.preference.losses)
    check_own_parts(("preference", f"preference.losses.{i}", part) for i, part in losses)
    requirements = preference_requirements(config.preference)
    wanted = ("labelled",) if config.verb == "kto" else ("pair", "ranked")
    if requirements.kind not in wanted:
        other = "dpo" if config.verb == "kto" else "kto"
        raise ConfigError(
            f"preference.losses = {config.preference.losses[0].name}: its data are of kind "
            f"{requirements.kind}, which lightrft {other} reads; run lightrft {other}, or take "
            f"another loss"
        )
    if requirements.kl and config.batch_size < 2:
        raise ConfigError(
            f"batch_size = {config.batch_size}: the loss pairs each prompt with the response to "
            "another one; set it to 2 or more"
        )
    problems = _online(config, requirements) if is_online else _offline(config)
    if found := list(problems):
        raise ConfigError("\n".join(found))
    if is_online:
        online_source(config, requirements)
    return requirements


def online_source(config: DPOConfig, requirements: PreferenceRequirements) -> Source:
    """Return where the reference's log-probs of sampled responses come from.

    Raises ``ConfigError`` if ``preference.reference.source`` cannot give them.
    """
    return reference_source(
        config.preference,
        requirements,
        adapters=adds_adapters(config.model),
        path=config.reference,
        sees_all=False,
        sampled=True,
    )


def _offline(config: DPOConfig) -> Iterator[str]:
    """Yield settings of sampled responses, which a run on given ones does not read."""
    for name in changed_fields(config.sampling):
        yield (
            f"sampling.{name} = {getattr(config.sampling, name)} changes nothing: "
            "online.group_size is 0, so no response is sampled; set it, e.g. online.group_size=2"
        )


def _online(config: DPOConfig, requirements: PreferenceRequirements) -> Iterator[str]:
    """Yield settings with which sampled responses cannot be compared."""
    if not config.reward.scores:
        yield (
            "reward.terms is empty, and with online.group_size it decides which response is "
            "better; name a reward, e.g. reward.terms=[math]"
        )
    yield from weightless_rewards(config.reward)
    yield from _unread(config, requirements)
    size, online = config.online.group_size, config.online
    compares = requirements.kind != "labelled" or online.threshold is None
    if compares and (why := greedy_setting(config.sampling)):
        yield (
            f"{why}: all responses of a group are the same, so no two of them can be compared; "
            "sample, e.g. with sampling.temperature=1"
        )
    if compares and size == 1:
        yield (
            "online.group_size = 1: a response is compared with the others of its group; set "
            "online.group_size to 2 or more, or in lightrft kto online.threshold"
        )
    if requirements.gold or requirements.corrupted:
        what = "a gold response" if requirements.gold else "corrupted media"
        yield (
            f"preference.losses: a loss reads {what}, which sampled responses do not have; take "
            "another loss, or leave online out"
        )
    if online.pairs == "all" and size > 2:
        yield from _several_pairs(requirements)


def _several_pairs(requirements: PreferenceRequirements) -> Iterator[str]:
    """Yield why a response cannot be part of several pairs."""
    ways = "set online.pairs=best_worst, or leave one of them out"
    if requirements.partner:
        yield (
            "online.pairs = all: preference.sampo and preference.ld_alpha compare the lengths of "
            f"two responses, and here a response is part of several pairs; {ways}"
        )
    if requirements.margin:
        yield (
            "online.pairs = all: a loss reads one margin for each better response, and here it "
            f"has several, one for each response that it is better than; {ways}"
        )


def _unread(config: DPOConfig, requirements: PreferenceRequirements) -> Iterator[str]:
    """Yield settings that the run does not read."""
    online = config.online
    if online.pairs != "best_worst" and requirements.kind != "pair":
        yield (
            f"online.pairs = {online.pairs} changes nothing: the losses are of kind "
            f"{requirements.kind}, which read all responses of a group; leave it out"
        )
    if online.threshold is not None and requirements.kind != "labelled":
        yield (
            f"online.threshold = {online.threshold} changes nothing: the losses are of kind "
            f"{requirements.kind}, which compare rewards; leave it out, or run lightrft kto"
        )
    given = {
        "data.turns": "turns" in changed_fields(config.data),
        **{f"data.columns.{name}": True for name in _response_columns(config)},
        # Held-out rows have given responses, which it limits.
        "max_tokens": "max_tokens" in changed_fields(config) and not config.validation.sources,
    }
    for key, is_set in given.items():
        if is_set:
            yield (
                f"{key} changes nothing with online.group_size = {online.group_size}: it is of "
                "given responses; leave it out"
            )


def _response_columns(config: DPOConfig) -> list[str]:
    """Return the columns of given responses that are named."""
    names = ("chosen", "rejected", "layout", "weight")
    return [name for name in changed_fields(config.data.columns) if name in names]
