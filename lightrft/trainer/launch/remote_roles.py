"""The roles of a run of which some have workers of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightrft.config import RLConfig
from lightrft.models.actor import Actor
from lightrft.models.processing import Processor
from lightrft.strategy.base import Strategy
from lightrft.strategy.settings import StrategyConfig
from lightrft.trainer.launch.local import local_roles, reference_model, teacher_model
from lightrft.trainer.launch.remote import Limits
from lightrft.trainer.launch.remote_engines import Hand, RemoteEngines, engine_host
from lightrft.trainer.launch.remote_models import RemoteCritic, RemoteModel, critic_host, model_host
from lightrft.trainer.launch.remote_scorer import RemoteScorer, scorer_host
from lightrft.trainer.parts import needs_of, needs_reference
from lightrft.trainer.roles import Roles
from lightrft.utils.errors import ConfigError
from lightrft.utils.ranks import ALONE, Ranks
from lightrft.utils.workers import Maker, Worker

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
    makers = {"engine": engine, **{name: (name, getattr(apart, name)) for name in ("scorer", "reference", "teacher", "critic")}}
    staffed = {name.removesuffix("s") for name, count in config.launch.ray.staff.items() if count}
    return local_roles(config, tokenizer, steps, processor, ranks, dict(makers[name] for name in sorted(staffed)))


class Apart:
    """Makes the stand-ins of a run, from what their counterparts of one process are made of."""

    def __init__(self, config: RLConfig, ranks: Ranks, hire: Hire, host: str) -> None:
        self.config, self.ranks, self.hire, self.host = config, ranks, hire, host
        self.limits = Limits.of(config)
        self.strategy = StrategyConfig(device=config.strategy.device)
        self.threads = config.run.threads or max(1, int(config.launch.ray.worker_cpus))

    def engine(self, actor: Actor, strategy: Strategy) -> RemoteEngines:
        return self._engines(actor, strategy, self.ranks)

    def ahead(self, actor: Actor, strategy: Strategy) -> RemoteEngines:
        return self._engines(actor, strategy, self.ranks.apart())

    def _engines(self, actor: Actor, strategy: Strategy, ranks: Ranks) -> RemoteEngines:
        config, asked = self.config, self.config.launch.ray
        trained = frozenset(name for name, p in actor.model.named_parameters() if p.requires_grad)
        hand = Hand(asked.weights, asked.bucket_mb * 2**20, strategy.device, self.host, trained)
        make = partial(engine_host, config.model, config.engine, self.strategy, self.threads)
        workers = self.hire("engine", make) if ranks.rank == 0 else ()
        return RemoteEngines(workers, config.engine, self.limits, hand, ranks)

    def scorer(self) -> RemoteScorer:
        return RemoteScorer(self.hire("scorer", partial(scorer_host, self.config.reward)), self.limits)

    def reference(self, actor: Actor, strategy: Strategy) -> RemoteModel:
        model = reference_model(self.config)
        return RemoteModel(self.hire("reference", partial(model_host, model, self.strategy, self.threads)), self.limits)

    def teacher(self, tokenizer: Any, strategy: Strategy) -> RemoteModel:
        model = teacher_model(self.config, tokenizer)
        return RemoteModel(self.hire("teacher", partial(model_host, model, self.strategy, self.threads)), self.limits)

    def critic(self, strategy: Strategy, steps: int) -> RemoteCritic:
        (worker,) = self.hire("critic", partial(critic_host, self.config, self.strategy, steps, self.threads))
        return RemoteCritic(worker, self.limits, self.ranks)


def check_workers(config: RLConfig) -> None:
    """Raises ``ConfigError`` for workers of a role that the run does not have, or that it can only have itself."""
    staff, algorithm = config.launch.ray.staff, config.algorithm
    nothing = {
        "scorers": ("reward.terms is empty", not config.reward.terms and not config.reward.per_source),
        "references": ("no part in force reads a reference; set algorithm.kl", not needs_reference(algorithm)),
        "teachers": ("algorithm.distill is none", algorithm.distill.kind == "none"),
        "critic": (f"advantage {algorithm.advantage.name!r} has no critic", "critic" not in needs_of(algorithm)),
    }
    own = {
        "references": (
            (
                "model.lora has the policy without its adapters for a reference",
                config.model.lora is not None and not config.reference,
            ),
            (
                f"algorithm.kl.refresh_every = {algorithm.kl.refresh_every} moves it with the policy",
                bool(algorithm.kl.refresh_every),
            ),
        ),
        "teachers": ((f"algorithm.distill.kind = {algorithm.distill.kind} reads all of its logits", algorithm.distill.whole),),
    }
    for name, count in staff.items():
        why, unused = nothing.get(name, ("", False))
        if count and unused:
            raise ConfigError(f"launch.ray.{name} = {count} changes nothing: {why}; leave it out")
        for reason, needed in own.get(name, ()):
            if count and needed:
                raise ConfigError(f"launch.ray.{name} = {count}: {reason}, which the ranks do themselves; leave it out")
