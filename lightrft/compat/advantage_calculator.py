"""LightRFT's calculators of advantages, over ``algorithms``.

A calculator is called twice. ``preprocess_rewards`` subtracts the baseline of a group, whose
responses follow each other in the concatenated rewards ``[responses]``. ``compute`` returns
advantages and returns ``[B, A]`` of one experience. Masked actions get 0 and take no time, since
the policy has not sampled them; LightRFT discounts over them. Equal rewards of a group give
exactly 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lightrft.algorithms.advantages import ADVANTAGES, returns_of
from lightrft.algorithms.group_ops import GroupStats
from lightrft.algorithms.token_ops import whiten
from lightrft.compat.options import options_of
from lightrft.config.algorithm import AdvantageConfig
from lightrft.types import Batch, Segments
from lightrft.utils.errors import ConfigError

GROUP_EPS = 1e-9
"""Added to the deviation of a group, as in LightRFT."""
WHITENED_EPS = {"gae": 1e-9}
"""Added to the deviation of advantages, by estimator; else 1e-8."""
WHITENED = ("gae", "reinforce", "reinforce_baseline")
"""Estimators that ``normalize_advantages_cross_batch`` changes."""


class CalculatorConfig(Protocol):
    """The options that calculators read.

    Attributes:
        n_samples_per_prompt: Responses of a group.
        advantages_norm: Standardize the advantages of each experience.
        advantage_clip: Bound of the size of an advantage. 0 sets none.
        dynamic_sampling: Mask groups whose rewards are all 0 or all 1.
    """

    n_samples_per_prompt: int
    advantages_norm: bool
    advantage_clip: float
    dynamic_sampling: bool


Result = tuple[Any, Any, dict[str, Any]]
"""Advantages, returns, and further values by name."""


class AdvantageCalculator:
    """The advantage of one estimator. ``REINFORCE`` is the base: discounted sums of rewards.

    Args:
        config: Options.
    """

    name = "reinforce"

    def __init__(self, config: CalculatorConfig) -> None:
        self.config = config

    def get_cumulative_returns(
        self, rewards: Tensor | list[Tensor], action_mask: Tensor | None, gamma: float
    ) -> Tensor | list[Tensor]:
        """Return the discounted sum of rewards from each action on.

        Args:
            rewards: ``[B, A]`` token rewards, or a list of rows.
            action_mask: ``[B, A]``, 1 for actions. ``None`` means all.
            gamma: Discount factor per action.
        """
        if isinstance(rewards, list):
            return [
                self._rectangle(self.get_cumulative_returns(row[None], action_mask, gamma))[0]
                for row in rewards
            ]
        return returns_of(*_tokens(rewards, action_mask), gamma).view_as(rewards)

    def preprocess_rewards(
        self, rewards: Tensor, experiences: Sequence[Any], max_new_tokens: int
    ) -> tuple[Sequence[Any], list[Tensor]]:
        """Return the experiences, and the outcome rewards of each after its baseline.

        Args:
            rewards: Outcome rewards of all responses, experience by experience.
            experiences: The experiences.
            max_new_tokens: Not read by any estimator.

        Raises:
            ConfigError: Groups of ``n_samples_per_prompt`` do not fit, or have no baseline.
        """
        return experiences, list(self.baselined(rewards, experiences).chunk(len(experiences)))

    def baselined(self, rewards: Tensor, experiences: Sequence[Any]) -> Tensor:
        """Return ``rewards [responses]`` less their baseline.

        Args:
            rewards: Outcome rewards of all responses.
            experiences: The experiences.
        """
        return rewards

    def compute(
        self,
        experience: Any,
        final_reward: Tensor | list[Tensor],
        gamma: float | None,
        generate_kwargs: Mapping[str, Any],
    ) -> Result:
        """Return advantages, returns and the share of clipped advantages.

        Args:
            experience: Has ``action_mask``, and ``values`` or ``info`` where they are read.
            final_reward: ``[B, A]`` token rewards, or a list of rows.
            gamma: Discount factor per action. ``None`` takes ``generate_kwargs["gamma"]``, or 1.
            generate_kwargs: Options of generation.
        """
        gamma = generate_kwargs.get("gamma", 1.0) if gamma is None else gamma
        returns = self.get_cumulative_returns(final_reward, experience.action_mask, gamma)
        return self._finish(returns, returns, experience.action_mask)

    @staticmethod
    def _rectangle(value: Tensor | list[Tensor]) -> Tensor:
        assert isinstance(value, Tensor)
        return value

    def _groups(self, rewards: Tensor) -> GroupStats:
        """Return the rewards with their groups of neighbours."""
        size = self.config.n_samples_per_prompt
        if size < 2 or len(rewards) % size:
            raise ConfigError(
                f"n_samples_per_prompt = {size} with {len(rewards)} rewards: {self.name} compares "
                "the responses to one prompt; set at least 2, and pass whole groups"
            )
        index = torch.arange(len(rewards), device=rewards.device) // size
        return GroupStats(rewards, index, len(rewards) // size)

    def _finish(
        self, advantages: Any, returns: Any, mask: Tensor | None, *, standardize: bool = True
    ) -> Result:
        """Standardize and clip the advantages of one experience, as the options say."""
        if isinstance(advantages, list):
            lengths = [len(row) for row in advantages]
            flat, _, info = self._finish(
                torch.cat(advantages)[None], None, None, standardize=standardize
            )
            return list(flat[0].split(lengths)), returns, info
        kept = torch.ones_like(advantages).bool() if mask is None else mask.bool()
        advantages = advantages.clone()
        if standardize and self.config.advantages_norm:
            eps = WHITENED_EPS.get(self.name, 1e-8)
            advantages[kept] = GroupStats.whole(advantages[kept]).standardised(eps)
        info: dict[str, Any] = {}
        limit = self.config.advantage_clip
        if limit > 0:
            # Before the clip, and of actions alone.
            beyond = (advantages.abs() > limit) & kept
            share = beyond.sum() / kept.sum().clamp(min=1)
            info["advantage_clip_frac"] = share.float().expand(len(advantages))
            advantages = advantages.clamp(-limit, limit)
        return advantages, returns, info


class BaseREINFORCECalculator(AdvantageCalculator):
    """Returns as advantages (REINFORCE++, arXiv 2501.03262)."""


class RLOOCalculator(BaseREINFORCECalculator):
    """The mean of the other responses of the group as baseline (arXiv 2402.14740)."""

    name = "rloo"

    def baselined(self, rewards: Tensor, experiences: Sequence[Any]) -> Tensor:
        size = self.config.n_samples_per_prompt
        return self._groups(rewards).centred() * size / (size - 1)


class REINFORCEBaselineCalculator(BaseREINFORCECalculator):
    """The mean of the group as baseline, without a discount (REINFORCE++ with baseline)."""

    name = "reinforce_baseline"

    def baselined(self, rewards: Tensor, experiences: Sequence[Any]) -> Tensor:
        return self._groups(rewards).centred()

    def compute(
        self,
        experience: Any,
        final_reward: Tensor | list[Tensor],
        gamma: float | None,
        generate_kwargs: Mapping[str, Any],
    ) -> Result:
        gamma = generate_kwargs.get("gamma", 1.0) if gamma is None else gamma
        if gamma != 1.0:
            warnings.warn(
                f"gamma = {gamma} changes nothing: reinforce_baseline takes 1; set it to 1",
                stacklevel=2,
            )
        return super().compute(experience, final_reward, 1.0, generate_kwargs)


class GroupNormCalculator(BaseREINFORCECalculator):
    """Rewards standardized within the group (GRPO, arXiv 2402.03300).

    ``advantages_norm`` is not applied on top.
    """

    name = "group_norm"

    def baselined(self, rewards: Tensor, experiences: Sequence[Any]) -> Tensor:
        groups = self._groups(rewards)
        if self.config.dynamic_sampling:
            solved = ~groups.uneven() & ((rewards == 0) | (rewards == 1))
            sizes = [len(experience.action_mask) for experience in experiences]
            for experience, own in zip(experiences, solved.split(sizes), strict=True):
                mask = experience.action_mask
                experience.action_mask = mask.bool() & ~own[:, None].to(mask.device)
        return groups.standardised(GROUP_EPS)

    def _finish(
        self, advantages: Any, returns: Any, mask: Tensor | None, *, standardize: bool = True
    ) -> Result:
        return super()._finish(advantages, returns, mask, standardize=False)


class GAECalculator(AdvantageCalculator):
    """Generalized advantage estimation (arXiv 1506.02438), with the critic's values."""

    name = "gae"

    def get_advantages_and_returns(
        self,
        values: Any,
        rewards: Any,
        action_mask: Tensor | None,
        gamma: float,
        lambd: float,
    ) -> tuple[Any, Any, Any]:
        """Return advantages, returns and the share of clipped advantages.

        Args:
            values: ``[B, A]``, or a list of rows.
            rewards: Token rewards in the same shape.
            action_mask: ``[B, A]``, 1 for actions. ``None`` means all.
            gamma: Discount factor per action.
            lambd: Trace decay.
        """
        if isinstance(values, list):
            parts = [_gae(v[None], r[None], None, gamma, lambd) for v, r in zip(values, rewards)]
            advantages, returns = [a[0] for a, _ in parts], [r[0] for _, r in parts]
        else:
            advantages, returns = _gae(values, rewards, action_mask, gamma, lambd)
        advantages, returns, info = self._finish(advantages, returns, action_mask)
        return advantages, returns, info.get("advantage_clip_frac", 0.0)

    def compute(
        self,
        experience: Any,
        final_reward: Tensor | list[Tensor],
        gamma: float | None,
        generate_kwargs: Mapping[str, Any],
    ) -> Result:
        if "lambd" not in generate_kwargs:
            raise ConfigError("generate_kwargs has no lambd: gae needs its trace decay")
        gamma = generate_kwargs.get("gamma", 1.0) if gamma is None else gamma
        advantages, returns, share = self.get_advantages_and_returns(
            experience.values,
            final_reward,
            experience.action_mask,
            gamma,
            generate_kwargs["lambd"],
        )
        return advantages, returns, {"advantage_clip_frac": share}


class CPGDCalculator(AdvantageCalculator):
    """Outcome rewards standardized over the experience, at each action (CPGD, arXiv 2505.12504).

    The rewards are ``experience.info["reward"]``, without a KL penalty: one number per response,
    or one per token. LightRFT's advantages are 0 for one number per response.
    """

    name = "cpgd"

    def compute(
        self,
        experience: Any,
        final_reward: Tensor | list[Tensor],
        gamma: float | None,
        generate_kwargs: Mapping[str, Any],
    ) -> Result:
        mask = experience.action_mask
        rewards = torch.as_tensor(experience.info["reward"]).to(mask.device)
        scores = GroupStats.whole(rewards.reshape(len(mask), -1).sum(1).double())
        # The deviation over the number of responses, as in LightRFT.
        deviation = scores.centred().square().mean().sqrt()
        tokens = (scores.centred() / (deviation + 1e-6)).float()[:, None] * mask
        return tokens, tokens.clone(), {}


CALCULATORS: dict[str, type[AdvantageCalculator]] = {
    "reinforce": BaseREINFORCECalculator,
    "gae": GAECalculator,
    "group_norm": GroupNormCalculator,
    "rloo": RLOOCalculator,
    "reinforce_baseline": REINFORCEBaselineCalculator,
    "cpgd": CPGDCalculator,
    "grpo": GroupNormCalculator,
}
"""Calculators by name of the estimator."""


def get_advantage_calculator(estimator_name: str, config: CalculatorConfig) -> AdvantageCalculator:
    """Return the calculator of an estimator.

    Args:
        estimator_name: A key of ``CALCULATORS``.
        config: Options.

    Raises:
        ConfigError: The name is unknown.
    """
    if estimator_name not in CALCULATORS:
        known = ", ".join(CALCULATORS)
        raise ConfigError(f"advantage_estimator = {estimator_name!r}: must be one of {known}")
    return CALCULATORS[estimator_name](config)


@torch.no_grad()
def normalize_advantages_cross_batch(
    experiences: Sequence[Any], advantage_estimator: str, args: Any
) -> Sequence[Any]:
    """Whiten the advantages of all experiences of this rank, in place. Return ``experiences``.

    Args:
        experiences: Have ``advantages`` and ``action_mask``, ``[B, A]`` each.
        advantage_estimator: Only ``gae``, ``reinforce`` and ``reinforce_baseline`` are whitened.
        args: With ``no_advantage_std_norm``, advantages are centered alone.
    """
    if advantage_estimator not in WHITENED:
        return experiences
    masks = [experience.action_mask.bool().flatten() for experience in experiences]
    every = torch.cat([experience.advantages.flatten() for experience in experiences]).float()
    kept = torch.cat(masks)
    if options_of(args).get("no_advantage_std_norm"):
        centred = torch.zeros_like(every)
        centred[kept] = GroupStats.whole(every[kept]).centred()
    else:
        centred = whiten(every, kept, 0.0)
    parts = centred.split([len(mask) for mask in masks])
    for experience, part in zip(experiences, parts, strict=True):
        experience.advantages = part.view_as(experience.advantages)
    return experiences


def _tokens(rewards: Tensor, mask: Tensor | None, **columns: Tensor) -> tuple[Batch, Tensor]:
    """Return a batch whose responses are the rows of ``rewards [B, A]``, and the flat rewards."""
    rows, width = rewards.shape
    mask = torch.ones_like(rewards).bool() if mask is None else mask.bool()
    place = torch.zeros(rows * width, dtype=torch.long, device=rewards.device)
    lengths = torch.full((rows,), width, device=rewards.device)
    one = torch.ones_like(lengths)
    batch = Batch(
        Segments(place[:rows], one),
        Segments(place, lengths),
        torch.arange(rows, device=rewards.device),
        sampled=mask.flatten(),
        **columns,
    )
    return batch, rewards.flatten()


def _gae(
    values: Tensor, rewards: Tensor, mask: Tensor | None, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    batch, token_rewards = _tokens(rewards, mask, values=values.flatten())
    settings = AdvantageConfig(name="gae", gamma=gamma, gae_lambda=lambd)
    advantages, returns = ADVANTAGES["gae"](batch, token_rewards, settings)
    return advantages.view_as(rewards).detach(), returns.view_as(rewards)
