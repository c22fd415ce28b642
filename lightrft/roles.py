"""Who takes part in a run. A launcher builds them; a loop only calls their methods."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, overload, runtime_checkable

import torch
from torch import Tensor

from lightrft.distributed.process_group import Ranks
from lightrft.engines.base import Engine, Fingerprint
from lightrft.models.actor import Actor, Scores
from lightrft.observability.metrics import Metrics, Sum
from lightrft.rewards.base import Scoring
from lightrft.strategy.base import Strategy, TrainState
from lightrft.types import Batch

log = logging.getLogger(__name__)


class Reference(Protocol):
    """The distribution that the policy is kept near."""

    def score(self, batch: Batch, *, temperature: float) -> Scores: ...


@dataclass(slots=True)
class AdaptersOff:
    """The reference of a model with adapters: the same weights without them, and no second copy."""

    actor: Actor

    def score(self, batch: Batch, *, temperature: float) -> Scores:
        with self.actor.reference():
            return self.actor.score(batch, temperature=temperature)


@dataclass(slots=True)
class Trained:
    """A model that this run trains, and its optimizer state."""

    model: Any
    state: TrainState
    layout_settled: bool = False

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all parameters, whole, by name."""
        return self.state.shapes

    def save(self, strategy: Strategy, path: Path) -> None:
        strategy.save(self.state, path)

    def load(self, strategy: Strategy, path: Path) -> None:
        strategy.load(self.state, path)


class ValueModel(Protocol):
    """What says what a state is worth. See ``Critic.values``."""

    @overload
    def values(self, batch: Batch, final: Literal[True]) -> tuple[Tensor, Tensor]: ...

    @overload
    def values(self, batch: Batch, final: Literal[False] = False) -> tuple[Tensor, None]: ...

    def values(self, batch: Batch, final: bool = False) -> tuple[Tensor, Tensor | None]: ...


class Kept(Protocol):
    """What a checkpoint must hold. ``shapes`` are those of all parameters, whole, by name."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def save(self, strategy: Strategy, path: Path) -> None:
        """Write weights, optimizer and schedule under the folder ``path``."""
        ...

    def load(self, strategy: Strategy, path: Path) -> None:
        """Restore what ``save`` wrote. Raises ``CheckpointError`` when it is not of this model."""
        ...


class ValueLearner(ValueModel, Kept, Protocol):
    """A critic that trains itself."""

    def learn(self, mini: Batch) -> Metrics:
        """One optimizer step on ``mini``, which has returns and the shares of its tokens in the loss."""
        ...


class ProcessLearner(Reference, Kept, Protocol):
    """A process reward model that trains itself."""

    def learn(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """One optimizer step on ``batch``, which has rewards and log-probs of the reference: its own ``[N]`` before it, and metrics."""
        ...


@runtime_checkable
class Distant(Protocol):
    """A model that others run: up to ``in_flight`` parts of a batch may be asked of it at one time. ``of_all``: by the first rank, on
    behalf of all; else each rank asks about its own."""

    of_all: bool

    @property
    def in_flight(self) -> int: ...


@runtime_checkable
class Closing(Protocol):
    """A role that holds more than memory."""

    def close(self) -> None: ...


@runtime_checkable
class Counting(Protocol):
    """A role that counts what it has borne."""

    def take_counts(self) -> dict[str, int]:
        """How often each thing happened since this was last asked, by name."""
        ...


@dataclass(slots=True)
class Frozen:
    """A model that this run reads and does not train: a reference of its own, a teacher."""

    model: Actor
    layout_settled: bool = False

    def score(self, batch: Batch, *, temperature: float) -> Scores:
        return self.model.score(batch, temperature=temperature)


class Beside(Protocol):
    """Data of its own that each optimizer step of the policy learns from too."""

    def term(self, actor: Actor) -> tuple[Batch, Callable[[Batch], tuple[Tensor, Metrics]]]:
        """The next batch, and the share of a part of it in the loss, with metrics."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(slots=True)
class Roles:
    """Roles that a run does not need are ``None``. ``ahead`` is an engine with weights of its own, for generation while the policy
    is trained; those who draw by it talk to other ranks through ``ahead_ranks``. ``held`` is the fingerprint of the engine's weights."""

    strategy: Strategy
    policy: Trained
    engine: Engine
    scorer: Scoring
    tokenizer: Any
    processor: Any = None
    reference: Reference | None = None
    teacher: Reference | None = None
    critic: Trained | ValueLearner | None = None
    process: Trained | ProcessLearner | None = None
    ptx: Beside | None = None
    ahead: Engine | None = None
    ahead_ranks: Ranks | None = None
    held: Fingerprint = field(default_factory=dict)
    logprobs_checked: bool = False

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of the policy, whole, by its name in the model that engines hold."""
        return ((name.removeprefix("model."), t) for name, t in self.strategy.full_parameters(self.policy.state))

    def publish(self, version: int) -> None:
        """Hand the policy's weights to the engine, as ``version``."""
        self.held = self.engine.load_weights(self.weights(), version)

    @property
    def trained(self) -> dict[str, Kept]:
        """What a checkpoint must hold, by name."""
        roles: dict[str, Kept | None] = {"policy": self.policy, "critic": self.critic, "process": self.process}
        return {name: role for name, role in roles.items() if role is not None}

    def drawing(self) -> AbstractContextManager[None]:
        """Context in which answers are drawn, and what only training needs may rest."""
        frozen = [role.model for role in (self.reference, self.teacher) if isinstance(role, Frozen)]
        states = [role.state for role in self.trained.values() if isinstance(role, Trained)]
        return self.strategy.resting(states, frozen)

    @property
    def actor(self) -> Actor:
        return self.policy.model

    @property
    def value_model(self) -> ValueModel | None:
        return self.critic.model if isinstance(self.critic, Trained) else self.critic

    @property
    def device(self) -> torch.device:
        return self.strategy.device

    def counts(self) -> Metrics:
        """What roles have borne since this was last asked, e.g. ``engine/restarts``."""
        names = ("engine", "ahead", "scorer", "reference", "teacher", "critic")
        roles = {name: role for name in names if isinstance(role := getattr(self, name), Counting)}
        return Metrics({f"{name}/{what}": Sum(n) for name, role in roles.items() for what, n in role.take_counts().items()})

    def close(self) -> None:
        for role in (self.engine, self.ahead, self.scorer, self.reference, self.teacher, self.critic, self.process):
            if isinstance(role, Closing):
                role.close()
