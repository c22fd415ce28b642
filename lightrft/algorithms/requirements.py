"""Determine the models and columns that an algorithm reads."""

from __future__ import annotations

from dataclasses import dataclass

from lightrft.algorithms.advantages import ADVANTAGES
from lightrft.algorithms.importance_sampling import IS_CORRECTIONS
from lightrft.algorithms.policy_losses import POLICY_LOSSES
from lightrft.algorithms.token_masks import TOKEN_MASKS
from lightrft.config.algorithm import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class Requirements:
    """Models and columns that an algorithm reads.

    A run builds it once, with ``Requirements.of``, and passes it on.

    Attributes:
        needs: The union of the ``needs`` that the functions in use are registered with.
        groups: The advantage compares the responses of a group.
        greedy: The advantage reads the reward of a greedy response.
        steps: The advantage compares steps by the states that they were taken in.
        critic: The advantage reads values.
        cost_critic: The advantage of a cost reads values of that cost.
        prm: The advantage reads process rewards.
        teacher: The advantage learns from a teacher.
        reference: A KL term or a process reward reads the reference model.
        reward: Something reads a reward; otherwise only a teacher trains the policy.
        old: The loss reads old log-probs.
        old_always: A KL term or the teacher reads old log-probs, whatever the number of updates.
        current: A token mask or a correction reads the log-probs before each optimizer step.
        entropy: Something reads the policy's entropy before the update.
        energy: Something reads the policy's energy before the update.
        sampler: Something reads the log-probs of the sampler.
        ignores_sampler_logprobs: Responses of any policy version count as on-policy, because
            nothing compares them with the log-probs of the sampler.
    """

    needs: frozenset[str]
    groups: bool
    greedy: bool
    steps: bool
    critic: bool
    cost_critic: bool
    prm: bool
    teacher: bool
    reference: bool
    reward: bool
    old: bool
    old_always: bool
    current: bool
    entropy: bool
    energy: bool
    sampler: bool
    ignores_sampler_logprobs: bool

    @staticmethod
    def of(algorithm: AlgorithmConfig) -> Requirements:
        """Determine what ``algorithm`` reads."""
        needs = _needs(algorithm)
        kl = algorithm.kl
        # otherwise the sampler's log-probs stand in, or are interpolated
        from_policy = algorithm.old_logprobs == "policy"
        read_by_kl = kl.used and (kl.where == "reward" or kl.controller == "adaptive")
        read_by_teacher = algorithm.distill.kind == "sampled"
        interpolated = algorithm.old_logprobs == "interpolated"
        return Requirements(
            needs=needs,
            groups="groups" in needs,
            greedy="greedy" in needs,
            steps="steps" in needs,
            critic="critic" in needs,
            cost_critic="critic" in needs and bool(algorithm.lagrangian.costs),
            prm="prm" in needs,
            teacher="teacher" in needs,
            # process rewards are log-ratios to the reference
            reference=kl.used or "prm" in needs,
            reward="teacher" not in needs or _reads_reward(algorithm),
            old=from_policy and "old" in needs,
            old_always=from_policy and (read_by_kl or read_by_teacher),
            current="current" in needs,
            entropy="entropy" in needs,
            energy="energy" in needs,
            sampler=bool(algorithm.importance_sampling) or interpolated or "behavior" in needs,
            ignores_sampler_logprobs=from_policy and "behavior" not in needs,
        )

    def old_logprobs(self, optimizer_steps: int) -> bool:
        """Return whether the policy's log-probs are computed before the update.

        A batch that gets exactly one on-policy update does not need them for the ratio. Its new
        log-probs, detached, are the old ones.

        Args:
            optimizer_steps: Number of optimizer steps on each batch.
        """
        return self.old_always or (self.old and optimizer_steps > 1)


def _needs(algorithm: AlgorithmConfig) -> frozenset[str]:
    """Return the union of the ``needs`` that the functions in use are registered with."""
    loss = algorithm.loss.name
    functions = [ADVANTAGES.about(algorithm.advantage.name), POLICY_LOSSES.about(loss)]
    functions += [IS_CORRECTIONS.about(part.name) for part in algorithm.importance_sampling]
    functions += [TOKEN_MASKS.about(part.name) for part in algorithm.token_masks]
    needs = set().union(*(function.needs for function in functions))
    # A user's loss is passed the old log-probs, and nothing tells whether it reads them.
    is_users_loss = loss not in POLICY_LOSSES
    if is_users_loss or algorithm.policy_drift.coef or algorithm.kl.weighted:
        needs.add("old")
    if algorithm.entropy.target is not None:
        needs.add("entropy")
    return frozenset(needs)


def _reads_reward(algorithm: AlgorithmConfig) -> bool:
    """Return whether a part other than the advantage reads a reward."""
    normalize = algorithm.normalize
    if normalize.terms != "none" or normalize.rewards != "none":
        return True
    return bool(algorithm.shaping or algorithm.filters or algorithm.positive_nll.coef)
