"""Update the reference from the policy: a copy every few steps, or a moving average."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightrft.config.algorithm import KLConfig
from lightrft.config.preference.sections import PreferenceReferenceConfig
from lightrft.config.train import DistillationConfig
from lightrft.models.actor import Actor
from lightrft.roles import FrozenModel, Roles
from lightrft.strategy.base import Strategy, on_host
from lightrft.utils.errors import CheckpointError, ConfigError

RefreshConfig = KLConfig | PreferenceReferenceConfig | DistillationConfig
"""A section of settings that says when and how far a reference moves."""


@dataclass(slots=True, kw_only=True)
class MovingReference(FrozenModel):
    """A reference of the policy's shape that moves towards the policy.

    Attributes:
        strategy: Places the reference.
        averages: Float32 copies of half-precision weights, for a moving average. In half precision
            each update would be smaller than the rounding error and be lost.
        moved: The weights differ from the initial ones.
    """

    strategy: Strategy
    averages: dict[str, Tensor] = field(default_factory=dict)
    moved: bool = False

    @staticmethod
    def of(
        model: Actor,
        shapes: Mapping[str, tuple[int, ...]],
        strategy: Strategy,
        settings: RefreshConfig,
    ) -> MovingReference:
        """Build a reference that follows a policy.

        Args:
            model: The reference model.
            shapes: Shapes of the policy's parameters, by name.
            strategy: Places the reference.
            settings: Say when and how far it moves.

        Raises:
            ConfigError: If ``model`` does not have the policy's shape.
        """
        with strategy.local_parameters(model) as own:
            here = {name: tuple(parameter.shape) for name, parameter in own.items()}
        if here != shapes:
            odd = sorted(set(here.items()) ^ set(shapes.items()))[0]
            raise ConfigError(
                f"{settings.section}.refresh_every = {settings.refresh_every}: the reference is "
                f"not of the policy's shape (e.g. {odd[0]}), so it cannot be refreshed from it; "
                f"leave reference unset, or set {settings.section}.refresh_every=0"
            )
        averages: dict[str, Tensor] = {}
        # A plain copy (decay 0) adds nothing up, so rounding loses nothing.
        if settings.refresh_decay:
            with strategy.local_parameters(model) as own:
                for name, p in own.items():
                    if p.dtype in (torch.bfloat16, torch.float16):
                        averages[name] = p.detach().float()
        return MovingReference(model, strategy=strategy, averages=averages)

    @torch.no_grad()
    def update_from(self, parameters: Iterable[tuple[str, Tensor]], decay: float) -> None:
        """Update the weights to ``decay * weights + (1 - decay) * parameters``.

        ``parameters`` are gathered, not sharded.
        """
        with self._changed() as held:
            # Lazily, so that a device has one full parameter at a time.
            for name, value in parameters:
                own = held[name]
                own.lerp_(self.strategy.shard_like(value.to(own.dtype), own), 1 - decay)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the gathered weights on the first rank, and nothing on other ranks.

        While the weights are the initial ones, return nothing at all.
        """
        if not self.moved:
            return {}
        with self.strategy.local_parameters(self.model) as own:
            # The averages in place of their rounded copies: a resumed run continues from them.
            return on_host(self.strategy, {**own, **self.averages}.items())

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load weights that ``state_dict`` returned.

        Raises:
            CheckpointError: If they belong to another model.
        """
        with self._changed() as held:
            if held.keys() != state.keys():
                raise CheckpointError(
                    "the checkpoint holds another reference's weights; set reference to what it "
                    "was in that run"
                )
            for name, tensor in held.items():
                tensor.copy_(self.strategy.shard_like(state[name].to(tensor.dtype), tensor))

    @contextmanager
    def _changed(self) -> Generator[dict[str, Tensor]]:
        """Yield weights for the body to modify, then copy the averages into the model."""
        with self.strategy.local_parameters(self.model) as own:
            yield {**own, **self.averages}
            for name, average in self.averages.items():
                own[name].copy_(average)
        self.moved = True


def update_reference(roles: Roles, settings: RefreshConfig, done: int) -> None:
    """Move the reference towards the policy, if this is due after ``done`` steps.

    Args:
        roles: The models and the strategy.
        settings: Say when and how far the reference moves.
        done: Number of completed steps.

    Raises:
        ConfigError: If the reference cannot move.
    """
    if not settings.refresh_every or not done:
        return
    if done % settings.refresh_every:
        return
    if not isinstance(roles.reference, MovingReference):
        raise ConfigError(
            f"{settings.section}.refresh_every = {settings.refresh_every}: this run's reference "
            f"cannot move; set {settings.section}.refresh_every=0"
        )
    parameters = roles.strategy.full_parameters(roles.policy.state)
    roles.reference.update_from(parameters, settings.refresh_decay)


def reference_state(roles: Roles) -> dict[str, Any]:
    """Return the checkpoint state of the reference; empty while it has not moved."""
    state = roles.reference.state_dict() if isinstance(roles.reference, MovingReference) else {}
    return {"reference": state} if state else {}


def load_reference_state(roles: Roles, state: Mapping[str, Any]) -> None:
    """Restore the state that ``reference_state`` returned.

    Raises:
        CheckpointError: If the state has a reference that moved, and this run's cannot move.
    """
    if "reference" not in state:
        return
    if not isinstance(roles.reference, MovingReference):
        raise CheckpointError(
            "the checkpoint holds a reference that followed the policy, and the reference of this "
            "run cannot move; set refresh_every to what it was in that run"
        )
    roles.reference.load_state_dict(state["reference"])
