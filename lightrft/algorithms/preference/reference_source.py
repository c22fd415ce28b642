"""Choose where the reference's log-probs come from."""

from __future__ import annotations

from typing import Literal

from lightrft.algorithms.preference.requirements import PreferenceRequirements
from lightrft.config.preference.sections import PreferenceConfig
from lightrft.utils.errors import ConfigError

Source = Literal["none", "cached", "step", "adapters_off"]
"""A mode of ``preference.reference.source`` other than ``auto``."""


def reference_source(
    settings: PreferenceConfig,
    requirements: PreferenceRequirements,
    *,
    adapters: bool,
    path: str | None,
    sees_all: bool,
    sampled: bool = False,
) -> Source:
    """Return where the reference's log-probs come from.

    Args:
        settings: The settings ``preference``.
        requirements: What the losses read.
        adapters: The policy has adapters.
        path: The setting ``reference``.
        sees_all: The run takes every row at least once.
        sampled: The policy samples the responses.

    Raises:
        ConfigError: The source that is set cannot give what the losses read.
    """
    source = settings.reference.source
    if not (requirements.reference or requirements.sequence_kl):
        if path is not None:
            raise ConfigError(
                f"reference = {path!r} changes nothing: no loss reads a reference; leave it out"
            )
        return "none"
    why = _why_not_cached(requirements, sampled)
    if source == "cached" and why:
        raise ConfigError(f"preference.reference.source = cached: {why}; take auto or step")
    is_own = adapters and path is None
    if source == "adapters_off" and not is_own:
        problem = (
            "the policy has no adapters of model.lora" if path is None else f"reference is {path!r}"
        )
        raise ConfigError(f"preference.reference.source = adapters_off: {problem}; take auto")
    if source in ("cached", "step", "adapters_off"):
        return source
    if settings.reference.refresh_every:
        return "step"
    if is_own:
        return "adapters_off"
    return "cached" if sees_all and not why else "step"


def _why_not_cached(requirements: PreferenceRequirements, sampled: bool) -> str:
    """Return why log-probs that are computed once do not suffice, or an empty text."""
    if sampled:
        return "with online.group_size each step samples new responses"
    if requirements.kl:
        return "the loss reads log-probs of mismatched pairs, which differ in each step"
    if requirements.sequence_kl:
        return "the loss reads the reference's distribution over the vocabulary"
    return ""
