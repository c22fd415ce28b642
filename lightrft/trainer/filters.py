"""Which groups are worth training on. ``FILTERS[name](group, **options) -> reason``: empty keeps the group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightrft.config import Part
from lightrft.types import Rollout
from lightrft.utils.registry import Registry

Group = Sequence[Rollout]
Filter = Callable[..., str]
FILTERS: Registry[Filter] = Registry("filter")


@FILTERS.register(
    "zero_variance",
    formula="drop groups whose rewards are all equal",
    latex=r"\operatorname{std}(R)>0",
    paper="DAPO, arXiv 2503.14476, eq. 11",
)
def zero_variance(group: Group) -> str:
    """Equal rewards carry no group-relative gradient."""
    rewards = {r.reward for r in group}
    return "zero_variance" if len(rewards) <= 1 else ""


@FILTERS.register("reward_bounds", formula="keep groups with low <= mean R <= high", latex=r"a\le\bar R\le b", paper="")
def reward_bounds(group: Group, *, low: float = float("-inf"), high: float = float("inf")) -> str:
    """Groups that are too hard or too easy."""
    mean = sum(r.reward or 0.0 for r in group) / max(1, len(group))
    return "" if low <= mean <= high else "reward_bounds"


def drop_reason(group: Group, parts: Sequence[Part], least: int) -> str:
    """Why a group is not trained on; empty when it is. A group left with fewer than ``least`` scored answers is ``too_few_scored``."""
    if len(group) < least:
        return "too_few_scored"
    return next((reason for part in parts if (reason := FILTERS[part.name](group, **part.options))), "")
