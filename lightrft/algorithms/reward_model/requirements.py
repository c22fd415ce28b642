"""Determine the heads that each loss of a reward model reads, and their labels."""

from __future__ import annotations

from dataclasses import dataclass

from lightrft.algorithms.reward_model.losses import REWARD_LOSSES
from lightrft.config.base import ComponentConfig
from lightrft.config.reward_model.sections import RewardLossConfig, RewardModelConfig

MIXTURE = "mixture"
"""Name of the score that ``gate`` combines."""

RESERVED_OPTIONS = frozenset({"per"})
"""Options that the objective reads, and no loss."""


def called_loss(part: RewardLossConfig) -> ComponentConfig:
    """Return the loss with the options that its function takes."""
    options = {key: value for key, value in part.options.items() if key not in RESERVED_OPTIONS}
    return ComponentConfig(name=part.name, options=options)


@dataclass(frozen=True, slots=True)
class RewardRequirements:
    """Labels that the losses of a run read.

    A run builds it once, with ``reward_requirements``, and passes it on. No loss compares the
    batch as a whole: groups are enough.

    Attributes:
        ranks: Names of the heads whose responses are compared.
        ratings: Names of the heads whose responses are rated.
        margins: Names of the heads whose pairs have margins.
    """

    ranks: frozenset[str]
    ratings: frozenset[str]
    margins: frozenset[str]

    @property
    def heads(self) -> frozenset[str]:
        """Names of the heads that a loss reads."""
        return self.ranks | self.ratings


def reward_requirements(settings: RewardModelConfig) -> RewardRequirements:
    """Determine which labels the losses of ``settings`` read, by head.

    A user's loss has its form of the data in the attribute ``kind``, and declares ``margin`` or
    ``rating`` in its attribute ``needs``.
    """
    ranks: set[str] = set()
    ratings: set[str] = set()
    margins: set[str] = set()
    for part, head in losses_of_heads(settings):
        about = REWARD_LOSSES.about(part.name)
        is_rating = about.kind == "rating"
        if not is_rating:
            ranks.add(head)
        if is_rating or "rating" in about.needs:
            ratings.add(head)
        if reads_margin(part):
            margins.add(head)
    return RewardRequirements(frozenset(ranks), frozenset(ratings), frozenset(margins))


def losses_of_heads(settings: RewardModelConfig) -> list[tuple[RewardLossConfig, str]]:
    """Return each loss with each head that it reads, in the order of the settings.

    A loss without a head reads all heads. It does not read the ``mixture`` of a gate.
    """
    found = []
    for part in settings.losses:
        names = [head.name for head in settings.heads] if part.head is None else [part.head]
        found += [(part, name) for name in names]
    return found


def signed_score(settings: RewardModelConfig) -> tuple[str, float | None] | None:
    """Return the head of the first loss ``cost_sign`` and its ``unsafe_from``, or ``None``."""
    for part, head in losses_of_heads(settings):
        if part.name == "cost_sign":
            return head, part.options.get("unsafe_from")
    return None


def head_kind(settings: RewardModelConfig, head: str) -> str:
    """Return the kind of the head called ``head``. A ``mixture`` is like a linear head."""
    kinds: dict[str, str] = {one.name: one.kind for one in settings.heads}
    return kinds.get(head, "linear")


def reads_margin(part: RewardLossConfig) -> bool:
    """Return whether a loss reads the margins of pairs."""
    if "margin" in REWARD_LOSSES.about(part.name).needs:
        return True
    return bool(part.options.get("margin")) or part.options.get("weight") == "margin"
