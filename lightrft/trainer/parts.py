"""Every function that a config names is found, and its options fit its signature, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightrft.config import AdvantageConfig, AlgorithmConfig, LossConfig, NormalizeConfig, Part, RLConfig, ValueConfig
from lightrft.trainer.advantages import ADVANTAGES
from lightrft.trainer.combinations import nonsense
from lightrft.trainer.corrections import CORRECTIONS
from lightrft.trainer.curriculum import CURRICULA
from lightrft.trainer.filters import FILTERS
from lightrft.trainer.gates import GATES
from lightrft.trainer.kinds import KINDS, misfit
from lightrft.trainer.policy_loss import POLICY_LOSSES
from lightrft.trainer.selection import SELECTIONS
from lightrft.types import Prompt, Rollout
from lightrft.utils.errors import ConfigError
from lightrft.utils.lazy import np
from lightrft.utils.registry import Registry


def needs_of(algorithm: AlgorithmConfig) -> frozenset[str]:
    """What the parts in force need, by the names that they are registered with: ``groups``, ``critic``, ``behavior``, ``old``,
    ``current``, ``entropy``, ``energy``, ``steps``."""
    loss = algorithm.loss.name
    named = [ADVANTAGES.about(algorithm.advantage.name), POLICY_LOSSES.about(loss)]
    named += [CORRECTIONS.about(part.name) for part in algorithm.corrections]
    named += [GATES.about(part.name) for part in algorithm.gates]
    needs = frozenset().union(*(about.needs for about in named))
    if loss not in POLICY_LOSSES or algorithm.drift.coef or algorithm.kl.weighted:
        needs |= {"old"}  # a loss of the user's own is given the old log-probs, so it is taken to read them
    return needs | {"entropy"} if algorithm.entropy.target is not None else needs


def trusts_sampler(algorithm: AlgorithmConfig) -> bool:
    """Whether answers count as the policy's own, whichever version of it drew them: nothing reads what the sampler said of them."""
    return algorithm.proximal == "policy" and "behavior" not in needs_of(algorithm)


def needs_old_logprobs(config: RLConfig) -> bool:
    """Whether the policy's log-probs are read before the update: by the KL, or by a ratio that leaves 1. A batch that gets exactly
    one update, on policy, needs none for the ratio: there the new ones, detached, are the old ones."""
    kl = config.algorithm.kl
    read_by_kl = kl.used and (kl.where == "reward" or kl.controller == "adaptive")
    several = config.train.updates * config.train.mini_batches > 1
    by_teacher = config.algorithm.distill.kind == "sampled"
    by_ratio = several and "old" in needs_of(config.algorithm)
    return config.algorithm.proximal == "policy" and (read_by_kl or by_ratio or by_teacher)


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    """Whether anything reads the reference: a KL term, or a process reward."""
    return algorithm.kl.used or "process" in needs_of(algorithm)


def needs_reward(algorithm: AlgorithmConfig) -> bool:
    """Whether anything reads a reward; without it all that is learned comes from a teacher."""
    scaled = algorithm.normalize.terms != "none" or algorithm.normalize.rewards != "none"
    reading = algorithm.shaping or algorithm.filters or algorithm.positive_nll.coef or scaled
    return "teacher" not in needs_of(algorithm) or bool(reading)


def check_parts(algorithm: AlgorithmConfig) -> None:
    """Raises ``ConfigError`` with every name that is not known, every option that does not fit, and every nonsense combination."""
    problems = [*_problems(algorithm), *nonsense(algorithm)]
    if problems:
        raise ConfigError("\n".join(problems))


def check_rollout(config: RLConfig) -> None:
    """Raises ``ConfigError`` with every setting of ``rollout``, and of filters, that cannot be followed."""
    problems = list(_rollout_problems(config))
    if problems:
        raise ConfigError("\n".join(problems))


def _rollout_problems(config: RLConfig) -> Iterator[str]:
    rollout, algorithm = config.rollout, config.algorithm
    if "steps" in needs_of(algorithm):
        name = algorithm.advantage.name
        yield (
            f"algorithm.advantage.name = {name}: it compares the steps of responses by the states that they were taken in, and no "
            "environment of this version names states; take grpo, which compares whole responses"
        )
    for i, part in enumerate(algorithm.filters):
        yield from _refused(f"algorithm.filters.{i}", FILTERS, part, _example())
    if rollout.select is not None:
        wrong = list(misfit("rollout.select", SELECTIONS, rollout.select, 1))
        yield from wrong or _refused("rollout.select", SELECTIONS, rollout.select, _example())
        yield from _kept(config, rollout.select)
    if rollout.curriculum is not None:
        part = Part(name=rollout.curriculum.name, options=rollout.curriculum.options)
        wrong = list(misfit("rollout.curriculum", CURRICULA, part, 2))
        yield from wrong or _refused("rollout.curriculum", CURRICULA, part, np.array([np.nan, 0.5]), 0.0)
        if not config.data.shuffle:
            yield "data.shuffle = False: rollout.curriculum draws prompts by weight, in no order; leave one of the two out"
    if not needs_reward(algorithm) and (rollout.select is not None or rollout.curriculum is not None):
        what = "select" if rollout.select is not None else "curriculum"
        yield f"rollout.{what} reads rewards, and this algorithm has none: all that it learns comes from a teacher; leave it out"
    if rollout.carry_over and rollout.oversample == 1:
        yield "rollout.carry_over = True changes nothing: without rollout.oversample above 1 no group is left over"
    if rollout.partial and rollout.oversample == 1 and rollout.step_tokens is None:
        yield (
            "rollout.partial = True changes nothing: no answer is left unfinished; set rollout.step_tokens, or rollout.oversample above 1"
        )
    if rollout.step_tokens is not None and not rollout.partial:
        yield f"rollout.step_tokens = {rollout.step_tokens} needs rollout.partial=true, so that what it leaves unfinished goes on"
    if rollout.step_tokens is not None and rollout.step_tokens >= config.sampling.max_new_tokens:
        yield (
            f"rollout.step_tokens = {rollout.step_tokens} changes nothing: answers have at most sampling.max_new_tokens = "
            f"{config.sampling.max_new_tokens} tokens"
        )
    if rollout.carry_over and rollout.staleness:
        yield (
            f"rollout.carry_over = True would take answers further back than rollout.staleness = {rollout.staleness}; leave one of "
            "the two out"
        )
    if rollout.carry_over and trusts_sampler(algorithm):
        yield (
            "rollout.carry_over = True trains on answers of an older policy, which nothing corrects: set "
            "algorithm.corrections=[tis], or algorithm.proximal=behavior with a loss that clips the ratio"
        )


def _kept(config: RLConfig, part: Part) -> Iterator[str]:
    keep, samples = part.options.get("keep"), config.rollout.samples
    if part.name not in SELECTIONS or not isinstance(keep, int):
        return
    if keep >= samples:
        yield f"rollout.select.options.keep = {keep} leaves out none of rollout.samples = {samples} answers; lower it, or draw more"
    if keep < 2 and "groups" in needs_of(config.algorithm):
        name = config.algorithm.advantage.name
        yield f"rollout.select.options.keep = {keep}: advantage {name!r} compares answers of a group; set it to 2 or more"


def _refused(key: str, registry: Registry[Any], part: Part, *example: Any) -> Iterator[str]:
    """What a built-in function says of its own options, shown an example."""
    if part.name not in registry:
        return
    try:
        registry[part.name](*example, **part.options)
    except ConfigError as error:
        yield f"{key}: {error}"
    except TypeError as error:  # a word where a number belongs
        yield f"{key}: {part.name!r} cannot use its options {part.options}: {error}"


def _example() -> list[Rollout]:
    return [Rollout(Prompt("", [0]), [0], [True], [-1.0], [0], "stop", i, i, reward=float(i)) for i in range(2)]


def _problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    advantage, loss = algorithm.advantage, algorithm.loss
    for kind, key, part in _named(algorithm):
        row = KINDS[kind]
        yield from misfit(key, row.registry, part, len(row.arguments), *row.given)
    yield from _unread("algorithm.advantage", ADVANTAGES, advantage, {"eps"} if advantage.whiten != "none" else set())
    gates = [GATES.about(part.name).reads for part in algorithm.gates if part.name in GATES]
    yield from _unread("algorithm.loss", POLICY_LOSSES, loss, set().union(*gates))
    yield from _unfit_scales(algorithm)


def _named(algorithm: AlgorithmConfig) -> Iterator[tuple[str, str, Part]]:
    """The functions that the settings name: kind, setting, and name with options."""
    advantage, loss = algorithm.advantage, algorithm.loss
    yield "advantage", "algorithm.advantage", Part(name=advantage.name, options=advantage.options)
    yield "loss", "algorithm.loss", Part(name=loss.name, options=loss.options)
    yield "aggregation", "algorithm.aggregation", Part(name=algorithm.aggregation)
    yield "kl", "algorithm.kl.estimator", Part(name=algorithm.kl.estimator)
    yield "kl", "algorithm.drift.estimator", Part(name=algorithm.drift.estimator)
    lists = {
        "correction": algorithm.corrections,
        "gate": algorithm.gates,
        "shaping": algorithm.shaping,
        "filter": algorithm.filters,
    }
    for kind, parts in lists.items():
        yield from ((kind, f"{KINDS[kind].key}.{i}", part) for i, part in enumerate(parts))


def _unfit_scales(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Scales of rewards and values that the advantage in force has no use for."""
    name, settings = algorithm.advantage.name, algorithm.normalize
    try:
        needs = ADVANTAGES.about(name).needs
    except ConfigError:
        return  # told where the name is looked up
    if settings.values and "critic" not in needs:
        yield f"algorithm.normalize.values = True changes nothing: advantage {name!r} has no critic"
    if algorithm.value != ValueConfig() and "critic" not in needs:
        yield f"algorithm.value.clip = {algorithm.value.clip} changes nothing: advantage {name!r} has no critic"
    if settings == NormalizeConfig(eps=settings.eps) != NormalizeConfig():
        yield f"algorithm.normalize.eps = {settings.eps} changes nothing: no terms, rewards or values are normalised"
    given = [f"normalize.{k}" for k in ("terms", "rewards") if getattr(settings, k) != "none"]
    given += ["shaping"] if algorithm.shaping else []
    if "greedy" in needs and given:
        yield (
            f"algorithm.{given[0]} changes the rewards of answers and not that of the greedy answer, which advantage {name!r} takes "
            "off them; leave it out"
        )


def _unread(key: str, registry: Registry[Any], settings: AdvantageConfig | LossConfig, also: set[str]) -> Iterator[str]:
    """Settings that were changed and that the built-in function in force does not read."""
    if settings.name not in registry:
        return
    read = registry.about(settings.name).reads | also | {"name", "options", "whiten"}
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if name not in read and value != field.default:
            known = ", ".join(sorted(registry.about(settings.name).reads)) or "none of them"
            yield f"{key}.{name} = {value} changes nothing: {settings.name!r} reads {known}"
