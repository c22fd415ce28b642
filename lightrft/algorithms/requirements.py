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
    named = [ADVANTAGES.about(algorithm.advantage.name), POLICY_LOSSES.about(loss)]
    named += [IS_CORRECTIONS.about(part.name) for part in algorithm.corrections]
    named += [TOKEN_MASKS.about(part.name) for part in algorithm.gates]
    needs = frozenset().union(*(about.needs for about in named))
    if loss not in POLICY_LOSSES or algorithm.drift.coef or algorithm.kl.weighted:
        needs |= {"old"}  # a loss of the user's own is given the old log-probs, so it is taken to read them
    return needs | {"entropy"} if algorithm.entropy.target is not None else needs


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
    kl = config.algorithm.kl
    read_by_kl = kl.used and (kl.where == "reward" or kl.controller == "adaptive")
    several = config.train.updates * config.train.mini_batches > 1
    by_teacher = config.algorithm.distill.kind == "sampled"
    by_ratio = several and "old" in needs_of(config.algorithm)
    return config.algorithm.proximal == "policy" and (read_by_kl or by_ratio or by_teacher)


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    """Return whether a KL term or a process reward reads the reference model."""
    return algorithm.kl.used or "process" in needs_of(algorithm)


def needs_reward(algorithm: AlgorithmConfig) -> bool:
    """Return whether anything reads a reward; otherwise only a teacher trains the policy."""
    scaled = algorithm.normalize.terms != "none" or algorithm.normalize.rewards != "none"
    reading = algorithm.shaping or algorithm.filters or algorithm.positive_nll.coef or scaled
    return "teacher" not in needs_of(algorithm) or bool(reading)
