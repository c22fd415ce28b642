"""Define the roles of a run: policy, reference, critic, engine, scorer and others.

A launcher builds the roles; a training loop only calls their methods.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from lightrft.distributed.process_group import ProcessGroup
from lightrft.engines.base import Engine, Fingerprint
from lightrft.engines.sending.update_cost import UPDATE_COSTS
from lightrft.models.actor import Actor, Backbone, TokenScores
from lightrft.models.multimodal.equal_towers import has_constant_towers, has_same_towers
from lightrft.models.multimodal.merge_inputs import has_media
from lightrft.models.multimodal.towers import KeptFeatures
from lightrft.models.sampled_distribution import Distribution
from lightrft.observability.metrics import Max, Metrics, Sum
from lightrft.rewards.base import RewardScorer
from lightrft.strategy.base import Strategy, TrainState
from lightrft.types import Batch
from lightrft.utils.state_io import State

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrft.models.critic import Critic
    from lightrft.models.processors import Processor

M = TypeVar("M", bound=Backbone)

log = logging.getLogger(__name__)


class Reference(Protocol):
    """The distribution that the policy is kept close to."""

    def score(self, batch: Batch, *, temperature: Distribution) -> TokenScores:
        """Return the log-probs of the response tokens at ``temperature``."""
        ...


@dataclass(slots=True)
class AdapterFreeReference:
    """The reference of a model with adapters: the same model with its adapters disabled.

    It needs no second copy of the weights.
    """

    actor: Actor

    def score(self, batch: Batch, *, temperature: Distribution) -> TokenScores:
        """Return the log-probs of the response tokens under the model without adapters."""
        with self.actor.reference():
            return self.actor.score(batch, temperature=temperature)


@dataclass(slots=True)
class TrainableModel(Generic[M]):
    """A model that this run trains, with its optimizer state."""

    model: M
    state: TrainState
    layout_verified: bool = False

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the unsharded shapes of all parameters, by name."""
        return self.state.shapes

    def save(self, strategy: Strategy, path: Path) -> None:
        """Write weights, optimizer and schedule to the folder ``path``."""
        strategy.save(self.state, path)

    def load(self, strategy: Strategy, path: Path) -> None:
        """Restore what ``save`` wrote."""
        strategy.load(self.state, path)


@runtime_checkable
class RemoteModelInfo(Protocol):
    """A model that runs in remote workers."""

    @property
    def max_in_flight(self) -> int:
        """Return the number of micro-batches that the model accepts concurrently."""
        ...


@runtime_checkable
class Closable(Protocol):
    """A role that owns more than memory, e.g. processes."""

    def close(self) -> None:
        """Release all resources."""
        ...


@runtime_checkable
class HasEventCounts(Protocol):
    """A role that counts events such as restarts."""

    def take_counts(self) -> Mapping[str, float]:
        """Return the number of events since the last call, by name.

        The names of ``UpdateCost`` may be among them, for an engine.
        """
        ...


@dataclass(slots=True)
class FrozenModel:
    """A model that this run reads but does not train: a separate reference, or a teacher."""

    model: Actor
    layout_verified: bool = False

    def score(self, batch: Batch, *, temperature: Distribution) -> TokenScores:
        """Return the log-probs of the response tokens at ``temperature``."""
        return self.model.score(batch, temperature=temperature)


class AuxiliaryLoss(Protocol):
    """Additional data for each optimizer step of the policy."""

    def term(self, actor: Actor) -> tuple[Batch, Callable[[Batch], tuple[Tensor, Metrics]]]:
        """Return the next batch, and a function from a part of it to its loss and metrics."""
        ...

    def state_dict(self) -> State:
        """Return the position in the data."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Resume from a position that ``state_dict`` returned."""
        ...


@dataclass(slots=True)
class Roles:
    """The roles of a run. Roles that the run does not need are ``None``.

    Attributes:
        strategy: Places and updates the models.
        policy: The trained policy.
        engine: Generates responses.
        scorer: Scores responses.
        tokenizer: The tokenizer of the policy.
        processor: Prepares media. ``None`` for text.
        reference: The distribution that the policy is kept close to.
        teacher: The model that distillation trains towards.
        teachers: Such models for the rows of one data source each, by its name.
        critic: Estimates values.
        cost_critic: Estimates values of a cost.
        prm: The process reward model.
        ptx: Supervised data mixed into the policy's optimizer steps.
        async_engine: An engine with separate weights, for generation during training.
        async_process_group: Process group of the threads that generate with ``async_engine``.
        engine_fingerprint: Fingerprint of the engine's weights.
        published: Version of the engine's weights. ``None`` before the first ones were sent.
        logprobs_checked: The engine's log-probs have been compared with the trainer's.
        kept_features: Features of this step. ``None`` before the first batch with media.
    """

    strategy: Strategy
    policy: TrainableModel[Actor]
    engine: Engine
    scorer: RewardScorer
    tokenizer: PreTrainedTokenizerBase
    processor: Processor | None = None
    reference: Reference | None = None
    teacher: Reference | None = None
    teachers: dict[str, Reference] = field(default_factory=dict)
    critic: TrainableModel[Critic] | None = None
    cost_critic: TrainableModel[Critic] | None = None
    prm: TrainableModel[Actor] | None = None
    ptx: AuxiliaryLoss | None = None
    async_engine: Engine | None = None
    async_process_group: ProcessGroup | None = None
    engine_fingerprint: Fingerprint = field(default_factory=dict)
    published: int | None = None
    logprobs_checked: bool = False
    kept_features: KeptFeatures | None = None

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the policy, see ``engine_weights``."""
        return engine_weights(self.strategy, self.policy.state)

    def publish(self, version: int) -> None:
        """Load the policy's weights into the engine as ``version``."""
        self.engine_fingerprint = self.engine.load_weights(self.weights(), version)
        self.published = version

    @property
    def trained(self) -> dict[str, TrainableModel]:
        """Return the roles that a checkpoint saves, by name."""
        roles = {
            "policy": self.policy,
            "critic": self.critic,
            "cost_critic": self.cost_critic,
            "prm": self.prm,
        }
        return {name: role for name, role in roles.items() if role is not None}

    @property
    def read_only(self) -> list[Reference]:
        """Return the models that are read and not trained."""
        roles = (self.reference, self.teacher, *self.teachers.values())
        return [role for role in roles if role is not None]

    def generation_mode(self) -> AbstractContextManager[None]:
        """Return a context for generation.

        In it, state that only training needs may be offloaded.
        """
        frozen = [role.model for role in self.read_only if isinstance(role, FrozenModel)]
        states = [role.state for role in self.trained.values()]
        return self.strategy.offloaded(states, frozen)

    @contextmanager
    def keeping_features(self, batch: Batch) -> Generator[Batch]:
        """Yield ``batch``, whose media frozen towers compute once inside the context.

        The models whose towers equal the policy's share its features. Parts of the yielded batch
        read them, if they are the same micro-batches. Every rank must call it.
        """
        if not has_media(batch.prompts) or has_media(batch.responses):
            yield batch
            return
        if self.kept_features is None:
            self.kept_features = self._share_features()
        with self.kept_features.step():
            yield batch.numbered()

    def _share_features(self) -> KeptFeatures:
        """Connect the policy, and the models with its towers, to the features that are returned."""
        kept = KeptFeatures()
        # Not a reference that moves: its towers may be those of a checkpoint later.
        models = [role.model for role in self.read_only if type(role) is FrozenModel]
        models += [role.model for role in self.trained.values()]
        for model in models:
            same = has_constant_towers(self.actor) and has_constant_towers(model)
            same = same and has_same_towers(self.actor, model, self.strategy.shards)
            # Each rank has compared its shards only.
            if all(self.strategy.ranks.gather(same)):
                model.kept_features = kept
        return kept

    @property
    def actor(self) -> Actor:
        """Return the model of the policy."""
        return self.policy.model

    @property
    def device(self) -> torch.device:
        """Return the device of this rank."""
        return self.strategy.device

    def counts(self) -> Metrics:
        """Return event counts of each role since the last call, e.g. ``engine/restarts``."""
        roles = {
            "engine": self.engine,
            "async_engine": self.async_engine,
            "scorer": self.scorer,
            "reference": self.reference,
            "teacher": self.teacher,
        }
        found = Metrics()
        for name, role in roles.items():
            if isinstance(role, HasEventCounts):
                for what, count in role.take_counts().items():
                    # the engines of all ranks are updated at once
                    kind = Max if what in UPDATE_COSTS else Sum
                    found.add(f"{name}/{what}", kind(count))
        return found

    def close(self) -> None:
        """Close every role that owns more than memory."""
        for role in (self.engine, self.async_engine, self.scorer, *self.read_only):
            if isinstance(role, Closable):
                role.close()


def engine_weights(strategy: Strategy, state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter of a policy, gathered, by its name in the engine's model.

    Every rank must iterate.

    Args:
        strategy: The strategy that placed the policy.
        state: The policy.
    """
    # Without the name of the actor's attribute, since engines hold the model itself.
    for name, tensor in strategy.full_parameters(state):
        yield name.removeprefix("model."), tensor
