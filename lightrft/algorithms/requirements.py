"""Determine the models and columns that an algorithm reads."""

from __future__ import annotations

from lightrft.algorithms.advantages import ADVANTAGES
from lightrft.algorithms.importance_sampling import IS_CORRECTIONS
from lightrft.algorithms.policy_losses import POLICY_LOSSES
from lightrft.algorithms.token_masks import TOKEN_MASKS
from lightrft.config.algorithm import AlgorithmConfig
from lightrft.config.verbs import RLConfig


def needs_of(algorithm: AlgorithmConfig) -> frozenset[str]:
    """Return the union of the ``needs`` that the functions in use are registered with.

    These are e.g. ``groups``, ``critic``, ``behavior``, ``old``, ``current``, ``entropy``,
    ``energy`` and ``steps``.
    """
    loss = algorithm.loss.name
    functions = [ADVANTAGES.about(algorithm.advantage.name), POLICY_LOSSES.about(loss)]
    functions += [IS_CORRECTIONS.about(part.name) for part in algorithm.corrections]
    functions += [TOKEN_MASKS.about(part.name) for part in algorithm.gates]
    needs = set().union(*(function.needs for function in functions))
    # A user's loss is passed the old log-probs, and nothing tells whether it reads them.
    is_users_loss = loss not in POLICY_LOSSES
    if is_users_loss or algorithm.drift.coef or algorithm.kl.weighted:
        needs.add("old")
    if algorithm.entropy.target is not None:
        needs.add("entropy")
    return frozenset(needs)


def ignores_sampler_logprobs(algorithm: AlgorithmConfig) -> bool:
    """Return whether responses of any policy version count as on-policy.

    This holds if nothing reads the log-probs of the sampler.
    """
    return algorithm.proximal == "policy" and "behavior" not in needs_of(algorithm)


def needs_old_logprobs(config: RLConfig) -> bool:
    """Return whether the policy's log-probs are computed before the update.

    The KL, a sampled teacher term, or a ratio that differs from 1 may read them. A batch that gets
    exactly one on-policy update does not need them for the ratio. Its new log-probs, detached, are
    the old ones.
    """
    algorithm = config.algorithm
    if algorithm.proximal != "policy":
        return False
    if algorithm.distill.kind == "sampled":
        return True
    kl = algorithm.kl
    if kl.used and (kl.where == "reward" or kl.controller == "adaptive"):
        return True
    updates = config.train.updates * config.train.mini_batches
    return updates > 1 and "old" in needs_of(algorithm)


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    """Return whether a KL term or a process reward reads the reference model."""
    return algorithm.kl.used or "process" in needs_of(algorithm)


def needs_reward(algorithm: AlgorithmConfig) -> bool:
    """Return whether anything reads a reward; otherwise only a teacher trains the policy."""
    if "teacher" not in needs_of(algorithm):
        return True
    normalize = algorithm.normalize
    if normalize.terms != "none" or normalize.rewards != "none":
        return True
    return bool(algorithm.shaping or algorithm.filters or algorithm.positive_nll.coef)
