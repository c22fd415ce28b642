"""The training seam: what a loop may ask of whatever holds weights, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightrft.config.strategy import OptimizerConfig
from lightrft.distributed.process_group import Ranks, Team
from lightrft.distributed.shards import Holding, held_of


@dataclass(slots=True)
class StepInfo:
    """What one optimizer step did. ``skipped`` is empty, or why no step was taken (e.g. a gradient that is not finite)."""

    grad_norm: float
    lr: float
    skipped: str = ""


@runtime_checkable
class Parted(Protocol):
    """A model that says which part of it a parameter belongs to, for learning rates by part."""

    @property
    def parts(self) -> tuple[str, ...]: ...

    def part_of(self, name: str) -> str: ...


@runtime_checkable
class Towered(Protocol):
    """A model with parts that run for some batches only, unless ``run_towers`` is set."""

    run_towers: bool


@runtime_checkable
class Shared(Protocol):
    """A model that can share the tokens of one call out to a ``team``, whose ranks all make that call. Raises ``ModelError`` when it
    is given one that it cannot serve."""

    team: Team


@runtime_checkable
class Readable(Protocol):
    """A model that may have been made without its weights: ``read_weights`` fills what has memory by now, each whole or what is
    ``held`` of it."""

    def read_weights(self, held: Holding = held_of) -> None: ...


@dataclass(slots=True)
class TrainState:
    """One trained model with what its steps need. Only the strategy that made it looks inside ``inner``. ``shapes`` are those of all
    parameters, whole, by name: a strategy may leave a model with less of them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    config: OptimizerConfig
    inner: Any = None
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


class Strategy(Protocol):
    """Training only: single, fsdp2, deepspeed. ``ranks`` are all processes; rows are shared out to ``teams``, of one or more ranks each."""

    device: torch.device
    ranks: Ranks

    @property
    def teams(self) -> Ranks: ...

    def loading(self) -> AbstractContextManager[torch.device]:
        """Context in which a model is made, and the device to make it on. On the meta device it is made without weights: ``place`` reads
        them then."""
        ...

    def place(self, model: nn.Module) -> None:
        """Bring a model that is not trained to where its calls run, in place."""
        ...

    def prepare(self, model: nn.Module, optimizer: OptimizerConfig, total_steps: int) -> TrainState:
        """Place ``model`` and make its optimizer and learning-rate schedule over ``total_steps`` steps.

        Raises ``ConfigError`` when nothing of it is trained, and for a rate of a part that it lacks or does not train.
        """
        ...

    def backward(self, state: TrainState, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of ``loss``; ``last`` marks the micro-batch before ``step``."""
        ...

    def step(self, state: TrainState) -> StepInfo:
        """Clip, step, schedule and clear gradients. A gradient that is not finite skips the step, on every rank alike."""
        ...

    def resting(self, states: Iterable[TrainState], frozen: Iterable[nn.Module]) -> AbstractContextManager[None]:
        """Context in which the optimizers of ``states`` and the models ``frozen`` are not used, and may lie elsewhere."""
        ...

    def whole(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context in which ``model``, placed by this strategy, holds every weight whole: for whoever calls it in a way of his own."""
        ...

    def tensors(self, module: nn.Module) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Context in which the parameters of ``module``, of a model placed by this strategy, can be read and changed in place: by name,
        as they lie on this rank."""
        ...

    def full(self, tensor: Tensor) -> Tensor:
        """``tensor``, which lies as one of ``tensors`` does, whole. A call of all ranks."""
        ...

    def like(self, whole: Tensor, tensor: Tensor) -> Tensor:
        """``whole``, laid out as ``tensor`` is."""
        ...

    def full_parameters(self, state: TrainState) -> Iterator[tuple[str, Tensor]]:
        """Every parameter, whole, by name."""
        ...

    def save(self, state: TrainState, path: Path) -> None:
        """Write weights, optimizer and schedule under the folder ``path``."""
        ...

    def load(self, state: TrainState, path: Path) -> None:
        """Restore what ``save`` wrote. Raises ``CheckpointError`` when it is not of this model."""
        ...


def on_host(strategy: Strategy, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Named ``tensors``, which lie as those of ``Strategy.tensors`` do, in the host's memory, whole: by name on the first rank, and none of
    them on the others. One after another, so that a device has never to hold more than one of them. A call of all ranks."""

    def whole(tensor: Tensor) -> Tensor | None:
        found = strategy.full(tensor.detach())
        # What was put together may lie in memory that is larger than it.
        return found.to("cpu", copy=isinstance(tensor, DTensor)).contiguous() if strategy.ranks.rank == 0 else None

    found = ((name, whole(tensor)) for name, tensor in tensors)
    return {name: tensor for name, tensor in found if tensor is not None}
