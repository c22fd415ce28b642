"""The roles of a run of which some have workers of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from lightrft.algorithms.requirements import needs_of, needs_reference
from lightrft.config.strategy import StrategyConfig, in_worker
from lightrft.config.verbs import RLConfig
from lightrft.distributed.process_group import ALONE, Ranks, together
from lightrft.distributed.worker_api import Maker, Worker
from lightrft.learner.reference_update import Follower
from lightrft.models.actor import Actor
from lightrft.models.processors import Processor
from lightrft.roles import Roles, Trained
from lightrft.strategy.base import Strategy
from lightrft.strategy.single import SingleStrategy
from lightrft.utils.errors import ConfigError
from lightrft.workers.engine_workers import RemoteEngines, engine_host
from lightrft.workers.local import local_frozen, local_roles, reference_model, teacher_model
from lightrft.workers.model_workers import RemoteFollower, RemoteModel, RemoteTeacher, follower_host, model_host
from lightrft.workers.reward_workers import RemoteScorer, scorer_host
from lightrft.workers.trainable_workers import RemoteCritic, RemoteProcess, critic_host, process_host
from lightrft.workers.weight_sync import Hand
from lightrft.workers.worker_group import Limits

Hire = Callable[[str, Maker], Sequence[Worker]]
"""All workers of a kind, each of which holds what the maker makes."""


def remote_roles(
    config: RLConfig,
    tokenizer: Any,
    steps: int,
    processor: Processor | None = None,
    ranks: Ranks = ALONE,
    *,
    hire: Hire,
    host: str,
) -> Roles:
    """As ``local_roles``, with stand-ins for those that ``launch.ray`` gives workers. ``host`` is how workers find this process.

    Answers that are drawn while the policy is trained come from the engines; what is held out is then answered by the policy itself.
    """
    apart = Apart(config, ranks, hire, host)
    engine = ("ahead", apart.ahead) if config.rollout.staleness else ("engine", apart.engine)
    staffed = [kind for kind, (count, _) in config.launch.ray.workers.items() if count]
    makers = dict(engine if kind == "engine" else (kind, getattr(apart, kind)) for kind in staffed)
    return local_roles(config, tokenizer, steps, processor, ranks, makers)


class Apart:
    """Makes the stand-ins of a run, from what their counterparts of one process are made of."""

    def __init__(self, config: RLConfig, ranks: Ranks, hire: Hire, host: str) -> None:
        self.config, self.ranks, self.hire, self.host = config, ranks, hire, host
        self.limits = Limits.of(config)
        self.strategy = in_worker(config.strategy)
        self.threads = config.run.threads or max(1, int(config.launch.ray.worker_cpus))

    def engine(self, actor: Actor, strategy: Strategy) -> RemoteEngines:
        return self._engines(actor, strategy, self.ranks)

    def ahead(self, actor: Actor, strategy: Strategy) -> RemoteEngines:
        return self._engines(actor, strategy, self.ranks.apart())

    def _engines(self, actor: Actor, strategy: Strategy, ranks: Ranks) -> RemoteEngines:
        config = self.config
        hand = self._hand(strategy, actor.model)
        make = partial(engine_host, config.model, config.engine, self.strategy, self.threads)
        workers = self.hire("engine", make) if ranks.rank == 0 else ()
        return RemoteEngines(workers, config.engine, self.limits, hand, ranks)

    def scorer(self) -> RemoteScorer:
        return RemoteScorer(self.hire("scorer", partial(scorer_host, self.config.reward)), self.limits)

    def reference(self, policy: Trained, strategy: Strategy) -> RemoteModel:
        model, kl = reference_model(self.config), self.config.algorithm.kl
        if kl.refresh_every:
            return self._follower(policy, strategy)
        return RemoteModel(self.hire("reference", partial(model_host, model, self.strategy, self.threads)), self.limits)

    def _follower(self, policy: Trained, strategy: Strategy) -> RemoteFollower:
        """On the first rank with workers, and with a reference in the memory of its machine."""
        model, first, kept = reference_model(self.config), self.ranks.rank == 0, []
        workers = self.hire("reference", partial(follower_host, model, self.strategy, self.threads)) if first else ()

        def own() -> None:
            if first:
                home = SingleStrategy(StrategyConfig(device="cpu"))
                kept.append(Follower.of(local_frozen(model, home), policy.shapes, home, self.config.algorithm.kl))

        together(self.ranks, own)
        hand = self._hand(strategy, None if self.config.reference else policy.model)
        return RemoteFollower(workers, self.limits, hand, kept[0] if first else None, self.ranks)

    def teacher(self, tokenizer: Any, strategy: Strategy) -> RemoteTeacher:
        model = teacher_model(self.config, tokenizer)
        workers = self.hire("teacher", partial(model_host, model, self.strategy, self.threads))
        return RemoteTeacher(workers, self.limits, strategy.device)

    def critic(self, strategy: Strategy, steps: int) -> RemoteCritic:
        (worker,) = self.hire("critic", partial(critic_host, self.config, self.strategy, steps, self.threads))
        return RemoteCritic(worker, self.limits, self.ranks)

    def process(self, strategy: Strategy, steps: int) -> RemoteProcess:
        (worker,) = self.hire("process", partial(process_host, self.config, self.strategy, steps, self.threads))
        return RemoteProcess(worker, self.limits, self.ranks)

    def _hand(self, strategy: Strategy, like: nn.Module | None) -> Hand:
        """How weights are handed over: of a model that differs from ``like`` in nothing but what that trains, if one is given."""
        asked = self.config.launch.ray
        trained = None if like is None else frozenset(name for name, p in like.named_parameters() if p.requires_grad)
        return Hand(asked.weights, asked.bucket_mb * 2**20, strategy.device, self.host, trained)


def check_workers(config: RLConfig) -> None:
    """Raises ``ConfigError`` for workers of a role that the run does not have, or that it can only have itself."""
    staff, algorithm = config.launch.ray.staff, config.algorithm
    nothing = {
        "scorers": ("reward.terms is empty", not config.reward.terms and not config.reward.per_source),
        "references": ("no part in force reads a reference; set algorithm.kl", not needs_reference(algorithm)),
        "teachers": ("algorithm.distill is none", algorithm.distill.kind == "none"),
        "critic": (f"advantage {algorithm.advantage.name!r} has no critic", "critic" not in needs_of(algorithm)),
        "process": (f"advantage {algorithm.advantage.name!r} has no process reward", "process" not in needs_of(algorithm)),
    }
    for name, count in staff.items():
        why, unused = nothing.get(name, ("", False))
        if count and unused:
            raise ConfigError(f"launch.ray.{name} = {count} changes nothing: {why}; leave it out")
    if staff["references"] and config.model.lora is not None and not config.reference:
        raise ConfigError(
            f"launch.ray.references = {staff['references']}: model.lora has the policy without its adapters for a reference, which the "
            "ranks do themselves; leave it out"
        )
    for name in ("weights", "bucket_mb"):
        value, fields = getattr(config.launch.ray, name), type(config.launch.ray).model_fields
        if value != fields[name].default and not staff["engines"] and not algorithm.kl.refresh_every:
            raise ConfigError(
                f"launch.ray.{name} = {value} changes nothing: there are no launch.ray.engines, and no reference that "
                "algorithm.kl.refresh_every moves; leave it out"
            )
