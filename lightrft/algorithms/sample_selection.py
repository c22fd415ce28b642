"""Select the responses of a group to train on: ``SELECTIONS[name](group, **options) -> indices``.

The indices refer to the group and may be in any order. A selection sees the scored responses of a
group that passed the filters. Dropped responses are counted as ``not_selected``. Advantages are
computed over the selected responses only. Options that make no sense raise ``ConfigError``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from lightrft.config.base import ComponentConfig
from lightrft.types import Rollout
from lightrft.utils.errors import ConfigError
from lightrft.utils.registry import Registry

Group = Sequence[Rollout]
Selection = Callable[..., Sequence[int]]
SELECTIONS: Registry[Selection] = Registry("selection")


@SELECTIONS.register(
    "top_k",
    formula="keep the responses with the highest rewards",
    latex=r"\{i:\operatorname{rank}(R_i)\le k\}",
    paper="RAFT, arXiv 2304.06767, algorithm 1, with k = 1",
)
def top_k(group: Group, *, keep: int) -> list[int]:
    """Select the ``keep`` responses with the highest rewards.

    Of equal rewards the earlier sample is kept.
    """
    _at_least("top_k", keep, 1)
    return _ranked(group)[:keep]


@SELECTIONS.register(
    "balanced",
    formula="keep the best and the worst half each; with a threshold, as many right responses (R >= "
    "threshold) as wrong ones",
    latex=r"\{i:\operatorname{rank}(R_i)\le\lceil k/2\rceil\}\cup\{i:\operatorname{rank}(R_i)>G-\lfloor k/2\rfloor\}",
    paper="best and worst: max-min down-sampling, PODS, arXiv 2504.13818",
)
def balanced(group: Group, *, keep: int, threshold: float | None = None) -> list[int]:
    """Select ``keep`` responses, half from each end of the ranking.

    If ``keep`` is odd, one more comes from the best. With a threshold, one half is correct
    responses and the other wrong ones, in the order of samples. If one side is short, the other
    fills up.

    Args:
        keep: Number of responses to select, 2 or more.
        threshold: Smallest reward of a correct response. ``None`` ranks by reward.
    """
    _at_least("balanced", keep, 2)
    half = (keep + 1) // 2
    if threshold is None:
        return _both_ends(_ranked(group), keep, best=half)
    order = sorted(range(len(group)), key=lambda i: _place(group[i]))
    right = [i for i in order if _reward(group[i]) >= threshold]
    wrong = [i for i in order if _reward(group[i]) < threshold]
    # more right ones than half if there are too few wrong ones, and the other way round
    from_right = min(len(right), max(half, keep - len(wrong)))
    return right[:from_right] + wrong[: keep - from_right]


@SELECTIONS.register(
    "max_variance",
    formula="keep the subset of that size whose rewards have the largest variance",
    latex=r"\arg\max_{|S|=k}\operatorname{Var}\{R_i:i\in S\}",
    paper="PODS, arXiv 2504.13818",
)
def max_variance(group: Group, *, keep: int) -> list[int]:
    """Select the subset of ``keep`` responses with the largest reward variance.

    Such a subset consists of the best and the worst responses, so every split between the two is
    tried. Of equally good splits the most even one is chosen.
    """
    _at_least("max_variance", keep, 2)
    ranked = _ranked(group)
    if len(ranked) <= keep:
        return ranked

    def quality(best: int) -> tuple[float, int]:
        rewards = [_reward(group[i]) for i in _both_ends(ranked, keep, best)]
        # second key: decides between splits of equal variance
        evenness = -abs(2 * best - keep)
        return _spread(rewards), evenness

    return _both_ends(ranked, keep, best=max(range(keep + 1), key=quality))


@SELECTIONS.register(
    "random", formula="keep responses at random", latex=r"S\sim\operatorname{Uniform}\{S:|S|=k\}"
)
def random(group: Group, *, keep: int) -> list[int]:
    """Select ``keep`` responses by a hash of their seeds.

    This is a baseline for the other selections.
    """
    _at_least("random", keep, 1)

    # a hash, not a generator: the choice is the same after a resume and on every rank
    def order(i: int) -> tuple[bytes, tuple[int, int]]:
        seed = f"select/{group[i].seed}"
        return hashlib.blake2b(seed.encode(), digest_size=8).digest(), _place(group[i])

    return sorted(range(len(group)), key=order)[:keep]


def selected(group: Group, part: ComponentConfig | None) -> list[Rollout]:
    """Return the responses of ``group`` that ``part`` selects, in the order of the group.

    ``part`` of ``None`` selects all.

    Raises:
        ConfigError: If a selection returns indices outside the group.
    """
    if part is None:
        return list(group)
    kept = set(SELECTIONS[part.name](group, **part.options))
    if not kept <= set(range(len(group))):
        raise ConfigError(
            f"rollout.select: {part.name!r} gave {sorted(kept)} for a group of {len(group)} "
            "responses"
        )
    # in the order of the group, whatever order the selection returned
    return [rollout for i, rollout in enumerate(group) if i in kept]


def _reward(rollout: Rollout) -> float:
    return rollout.reward or 0.0


def _place(rollout: Rollout) -> tuple[int, int]:
    # identifies a response: engines return responses in any order
    return rollout.sample, rollout.seed


def _ranked(group: Group) -> list[int]:
    """Return the indices from the highest to the lowest reward."""
    return sorted(range(len(group)), key=lambda i: (-_reward(group[i]), _place(group[i])))


def _both_ends(ranked: list[int], keep: int, best: int) -> list[int]:
    """Return ``keep`` of the ranked indices: the first ``best`` and the last of the rest."""
    if len(ranked) <= keep:
        return ranked
    worst = keep - best
    return ranked[:best] + ranked[len(ranked) - worst :]


def _spread(rewards: Sequence[float]) -> float:
    # not divided by their number, which is the same for all subsets that are compared
    mean = sum(rewards) / len(rewards)
    return sum((r - mean) ** 2 for r in rewards)


def _at_least(name: str, keep: int, least: int) -> None:
    if not isinstance(keep, int) or keep < least:
        raise ConfigError(
            f"selection {name}: options.keep is {keep}; it counts responses, {least} or more"
        )
