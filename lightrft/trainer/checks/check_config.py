"""Reject RL settings that cannot work, before models are loaded."""

from __future__ import annotations

import logging

from lightrft.algorithms.contracts.run_checks import check_own_parts
from lightrft.algorithms.requirements import Requirements
from lightrft.algorithms.validate.check_parts import named_parts
from lightrft.config.base import changed_fields
from lightrft.config.reward import RewardTerm, ScoringModelConfig
from lightrft.config.verbs import RLConfig
from lightrft.engines.native_parts.compiled_steps import SHARDED
from lightrft.models.loading.adapter_base import adds_adapters
from lightrft.trainer.checks.check_rollout import check_algorithm
from lightrft.trainer.checks.preflight import check_learning, check_trained_weights
from lightrft.utils.errors import ConfigError
from lightrft.workers.build_remote import check_workers
from lightrft.workers.engine_kinds import kind_of
from lightrft.workers.local_vllm import check_replica

log = logging.getLogger(__name__)


def check(config: RLConfig) -> Requirements:
    """Return what the algorithm reads.

    Raises ``ConfigError`` for problems that can be found without a model or data.
    """
    requirements = check_algorithm(config)
    check_own_parts(named_parts(config.algorithm))
    check_reward(config, requirements)
    if not config.data.sources:
        raise ConfigError(
            "data.sources is empty; name what prompts come from, e.g. data.sources=[{path: "
            "train.jsonl}]"
        )
    kl = config.algorithm.kl
    answers = config.rollout.prompts_per_step * config.rollout.group_size
    # The coefficient is multiplied by 1 + error * answers / horizon, with error >= -0.2.
    if kl.used and kl.controller == "adaptive" and answers >= 5 * kl.horizon:
        raise ConfigError(
            f"algorithm.kl.horizon = {kl.horizon}: with {answers} responses per step "
            "(rollout.prompts_per_step x rollout.group_size) the adaptive coefficient could "
            f"turn negative; raise it above {answers // 5}"
        )
    if config.train.num_mini_batches > answers:
        raise ConfigError(
            f"train.num_mini_batches = {config.train.num_mini_batches}: it counts optimizer steps, "
            f"and a step has {answers} responses (rollout.prompts_per_step x rollout.group_size); "
            f"lower it to {answers} or less"
        )
    check_trained_weights(config.model)
    check_learning(config, requirements)
    check_roles(config, requirements)
    check_costs(config)
    check_workers(config, requirements)
    check_engine(config)
    warn_of_staleness(config, requirements)
    if requirements.groups and config.rollout.group_size < 2:
        name = config.algorithm.advantage.name
        raise ConfigError(
            f"rollout.group_size = {config.rollout.group_size}: advantage {name!r} compares the "
            "responses of a group; set it to 2 or more"
        )
    return requirements


def check_reward(config: RLConfig, requirements: Requirements) -> None:
    """Raise ``ConfigError`` if something reads a reward and no reward is configured."""
    if config.reward.scores:
        return
    if requirements.reward:
        raise ConfigError(
            "reward.terms is empty; name what scores a response, e.g. reward.terms=[math] or "
            "reward.terms=[file.py:function]"
        )
    if config.eval.data.sources:
        raise ConfigError(
            "eval.data has sources but reward.terms is empty; name what scores a response, e.g. "
            "reward.terms=[math]"
        )


def check_roles(config: RLConfig, requirements: Requirements) -> None:
    """Raise ``ConfigError`` if a setting contradicts the set of models that the algorithm needs."""
    algorithm, kl = config.algorithm, config.algorithm.kl
    advantage = algorithm.advantage.name
    distills = algorithm.distill.kind != "none"
    if distills and not config.teacher.path:
        raise ConfigError(
            f"algorithm.distill.kind = {algorithm.distill.kind} needs a teacher; set "
            "teacher.path to its folder or name"
        )
    if not distills and changed_fields(config.teacher):
        raise ConfigError(
            f"teacher.path = {config.teacher.path!r} changes nothing: set algorithm.distill, "
            "e.g. to sampled"
        )
    if not distills and requirements.teacher:
        raise ConfigError(
            f"algorithm.advantage = {advantage} learns from a teacher alone; set "
            "algorithm.distill, e.g. to sampled"
        )
    if not requirements.critic and changed_fields(config.critic):
        raise ConfigError(
            f"critic changes nothing: advantage {advantage!r} has no critic; take gae or vapo"
        )
    if not requirements.cost_critic and changed_fields(config.cost_critic):
        raise ConfigError(
            "cost_critic changes nothing: it estimates the cost of algorithm.lagrangian for an "
            "advantage with a critic; take algorithm=ppo_lag, or leave it out"
        )
    if config.reference is not None and not requirements.reference:
        raise ConfigError(
            f"reference = {config.reference!r} changes nothing: no part in force reads it; set "
            "algorithm.kl, or leave it out"
        )
    if not requirements.prm and changed_fields(config.prm):
        raise ConfigError(
            f"prm changes nothing: advantage {advantage!r} has no process reward; take prime"
        )
    if config.ptx.coef and not config.ptx.data.sources:
        raise ConfigError(
            f"ptx.coef = {config.ptx.coef} needs ptx.data.sources; name what to learn from, e.g. "
            f"[{{path: sft.jsonl}}]"
        )
    if not config.ptx.coef and changed_fields(config.ptx):
        raise ConfigError(
            "ptx changes nothing: ptx.coef is 0; give it a share in the loss, e.g. ptx.coef=0.1"
        )
    if kl.refresh_every and not requirements.reference:
        raise ConfigError(
            f"algorithm.kl.refresh_every = {kl.refresh_every} changes nothing: no part in force "
            "reads the reference"
        )
    if kl.refresh_every and adds_adapters(config.model):
        raise ConfigError(
            f"algorithm.kl.refresh_every = {kl.refresh_every}: with model.lora the reference is "
            "the model without its adapters, which cannot move; set "
            "algorithm.kl.refresh_every=0, or train all weights (model.lora=null)"
        )


def check_costs(config: RLConfig) -> None:
    """Raise ``ConfigError`` if a cost of ``algorithm.lagrangian`` is not scored, or is a reward."""
    reward = config.reward
    models = {f"reward.models.{i}": model for i, model in enumerate(reward.models)}
    lists = {f"reward.per_source.{name}": terms for name, terms in reward.per_source.items()}
    if reward.terms or not lists:
        lists["reward.terms"] = reward.terms
    for i, cost in enumerate(config.algorithm.lagrangian.costs):
        named = f"algorithm.lagrangian.costs.{i}.name = {cost.name!r}"
        found: dict[str, RewardTerm | ScoringModelConfig] = {
            key: model for key, model in models.items() if model.label == cost.name
        }
        if not found:
            for key, terms in lists.items():
                own = {f"{key}.{j}": term for j, term in enumerate(terms)}
                own = {place: term for place, term in own.items() if term.label == cost.name}
                if not own:
                    raise ConfigError(
                        f"{named}: {key} has no term of that name, nor has reward.models; add "
                        f"one with name: {cost.name} and weight: 0"
                    )
                found |= own
        for key, scored in found.items():
            if scored.weight:
                raise ConfigError(
                    f"{key}.weight = {scored.weight}: {cost.name!r} is a cost of "
                    f"algorithm.lagrangian and no part of the reward; set {key}.weight=0"
                )


def warn_of_staleness(config: RLConfig, requirements: Requirements) -> None:
    """Log a warning when responses come from older weights and nothing corrects for it."""
    rollout = config.rollout
    if (rollout.staleness or rollout.partial) and requirements.ignores_sampler_logprobs:
        setting = f"staleness = {rollout.staleness}" if rollout.staleness else "partial = True"
        log.warning(
            "rollout.%s: tokens come from an older policy, and nothing corrects for it; set "
            "algorithm.importance_sampling=[tis], or algorithm.old_logprobs=rollout with a loss "
            "that clips the ratio",
            setting,
        )


def check_engine(config: RLConfig) -> None:
    """Raise ``ConfigError`` for an engine that cannot generate as the config asks."""
    engine, workers = config.engine, config.launch.ray.engines
    kind = kind_of(engine)
    if workers and kind.build_worker is None:
        raise ConfigError(
            f"launch.ray.engines = {workers}: engine.kind = {engine.kind} runs in no worker; leave "
            "out launch.ray.engines, or set engine.kind to native or vllm"
        )
    if config.rollout.staleness and kind.build_async is None:
        raise ConfigError(
            f"rollout.staleness = {config.rollout.staleness}: engine.kind = {engine.kind} "
            "generates between steps alone; leave out rollout.staleness, or set engine.kind=native"
        )
    if workers and not kind.shares_weights and config.model.load_in_4bit:
        raise ConfigError(
            f"launch.ray.engines = {workers}: workers of engine.kind = {engine.kind} hold whole "
            "weights, and are sent those of model.load_in_4bit = true in 4 bits; leave out "
            "launch.ray.engines, or set engine.kind=native"
        )
    alone = {"launch.ray.engines": workers, "rollout.staleness": config.rollout.staleness}
    for name, value in alone.items():
        if value and engine.tensor_parallel > 1:
            raise ConfigError(
                f"engine.tensor_parallel = {engine.tensor_parallel} with {name} = {value}: the "
                "processes that share a copy of the model generate in step with each other, between "
                f"updates alone; leave out {name}, or set engine.tensor_parallel=1"
            )
    # a worker loads the whole model by itself
    if kind.copies_weights and not workers:
        check_replica(engine.kind, config.strategy.tensor_parallel)
    # Other engines have weights of their own.
    samples_itself = kind.shares_weights and not workers and not config.rollout.staleness
    if engine.compile and samples_itself and config.launch.processes > 1:
        raise ConfigError(SHARDED)
