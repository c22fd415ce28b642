"""A reference that follows the policy: a copy every so many steps, or a moving average."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightrft.config.algorithm import KLConfig
from lightrft.models.actor import Actor
from lightrft.roles import Frozen, Roles
from lightrft.strategy.base import Strategy, on_host
from lightrft.utils.errors import CheckpointError, ConfigError


@runtime_checkable
class Moving(Protocol):
    """A reference that can go after the policy. To move it, and to take up its state, are calls of all ranks."""

    def follow(self, parameters: Iterable[tuple[str, Tensor]], decay: float) -> None: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


@dataclass(slots=True, kw_only=True)
class Follower(Frozen):
    """A reference of the policy's shape, placed by ``strategy``. ``averages`` hold half-precision weights in float32 for a moving average,
    which would otherwise stand still: what it takes in at a time is less than they can tell apart."""

    strategy: Strategy
    averages: dict[str, Tensor] = field(default_factory=dict)
    moved: bool = False

    @staticmethod
    def of(model: Actor, shapes: Mapping[str, tuple[int, ...]], strategy: Strategy, kl: KLConfig) -> Follower:
        """``model``, to follow a policy whose parameters have ``shapes``. Raises ``ConfigError`` when it cannot become that."""
        with strategy.tensors(model) as own:
            here = {name: tuple(parameter.shape) for name, parameter in own.items()}
        if here != shapes:
            odd = sorted(set(here.items()) ^ set(shapes.items()))[0]
            raise ConfigError(
                f"algorithm.kl.refresh_every = {kl.refresh_every}: the reference is not of the policy's shape (e.g. {odd[0]}), so it "
                "cannot be refreshed from it; leave reference unset, or set algorithm.kl.refresh_every=0"
            )
        with strategy.tensors(model) as own:
            half = {n: p for n, p in own.items() if p.dtype in (torch.bfloat16, torch.float16)}
            averages = {n: p.detach().float() for n, p in half.items()} if kl.refresh_decay else {}
        return Follower(model, strategy=strategy, averages=averages)

    @torch.no_grad()
    def follow(self, parameters: Iterable[tuple[str, Tensor]], decay: float) -> None:
        """Become ``decay`` times itself plus the rest of ``parameters``, given whole."""
        with self._changed() as held:
            for name, value in parameters:
                held[name].lerp_(self.strategy.like(value.to(held[name].dtype), held[name]), 1 - decay)

    def state_dict(self) -> dict[str, Tensor]:
        """The weights, whole, once they are no longer those that the run started from. Ranks but the first keep none of them."""
        if not self.moved:
            return {}
        with self._held() as held:
            return on_host(self.strategy, held.items())

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises ``CheckpointError`` for weights of another model."""
        with self._changed() as held:
            if held.keys() != state.keys():
                raise CheckpointError(
                    "the checkpoint holds another reference's weights; set reference to what it was in that run"
                )
            for name, tensor in held.items():
                tensor.copy_(self.strategy.like(state[name].to(tensor.dtype), tensor))

    @contextmanager
    def _held(self) -> Generator[dict[str, Tensor]]:
        """The weights as they lie on this rank, the averages where there are some."""
        with self.strategy.tensors(self.model) as own:
            yield {**own, **self.averages}

    @contextmanager
    def _changed(self) -> Generator[dict[str, Tensor]]:
        """Weights that the body changes; the model then has them."""
        with self.strategy.tensors(self.model) as own:
            yield {**own, **self.averages}
            for name, average in self.averages.items():
                own[name].copy_(average)
        self.moved = True


def refresh(roles: Roles, kl: KLConfig, done: int) -> None:
    """Between steps, ``done`` of them over: move the reference towards the policy if it is time."""
    if kl.refresh_every and done and done % kl.refresh_every == 0:
        if not isinstance(roles.reference, Moving):
            raise ConfigError(
                f"algorithm.kl.refresh_every = {kl.refresh_every}: this run's reference cannot move; set "
                "algorithm.kl.refresh_every=0"
            )
        roles.reference.follow(roles.strategy.full_parameters(roles.policy.state), kl.refresh_decay)


def refreshed_state(roles: Roles) -> dict[str, Any]:
    """What a checkpoint must hold of the reference: nothing, unless it has moved."""
    state = roles.reference.state_dict() if isinstance(roles.reference, Moving) else {}
    return {"reference": state} if state else {}


def load_refreshed(roles: Roles, state: Mapping[str, Any]) -> None:
    """Take up what ``refreshed_state`` gave."""
    if "reference" in state and isinstance(roles.reference, Moving):
        roles.reference.load_state_dict(state["reference"])
