"""The protocol of strategies.

It has the calls that a training loop makes on weights, gradients and optimizer state.

Learning-rate schedules, as functions of the step, are shared by the strategies.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightrft.config.strategy import OptimizerConfig
from lightrft.distributed.collectives import EqualCalls
from lightrft.distributed.process_group import SINGLE_PROCESS, ModelParallelGroup, ProcessGroup
from lightrft.distributed.shards import ShardLayout, local_shard_of


@dataclass(slots=True)
class StepInfo:
    """The result of one optimizer step.

    Attributes:
        grad_norm: Global norm of the gradient before clipping.
        lr: Learning rate of the step.
        skipped: The reason why no step was taken, such as a gradient that is not finite. Empty
            after a step.
    """

    grad_norm: float
    lr: float
    skipped: str = ""


@runtime_checkable
class TrainableModule(Protocol):
    """The interface of lightrft's own models to a strategy. Other modules have none of it.

    Attributes:
        run_towers: Parts for media run for batches without media, too.
        equal_calls: Its ranks make the same calls of the module, since they shard its weights.
        model_parallel_group: A sequence-parallel group, whose ranks shard the tokens of each call.
            Setting it raises ``ModelError`` for a group that the model cannot serve.
    """

    run_towers: bool
    equal_calls: EqualCalls
    model_parallel_group: ModelParallelGroup

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the names of the parts that have a learning rate of their own."""
        ...

    def part_of(self, name: str) -> str:
        """Return the part that the parameter ``name`` belongs to."""
        ...

    def check_trained(self, names: Iterable[str]) -> None:
        """Raise ``ModelError`` if the parameters ``names`` change weights that are frozen."""
        ...

    def read_weights(self, held: ShardLayout = local_shard_of) -> None:
        """Fill parameters that were built on the meta device and have memory by now.

        ``held`` selects the part of each parameter that this rank stores.
        """
        ...


@dataclass(slots=True)
class TrainState:
    """One trained model with its optimizer and schedule.

    Only the strategy that built it reads ``inner``. ``shapes`` are the full shapes of all
    parameters by name, since a strategy may leave only shards in the model.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    config: OptimizerConfig
    inner: Any = None
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


class Strategy(Protocol):
    """A training backend: single, fsdp2 or deepspeed.

    ``ranks`` are all processes. Batches are split over ``data_parallel_group``.
    """

    device: torch.device
    ranks: ProcessGroup

    @property
    def data_parallel_group(self) -> ProcessGroup: ...

    def loading(self) -> AbstractContextManager[torch.device]:
        """Return a context manager in which to build a model. It yields the device to build it on.

        On the meta device the model has no weights until ``place`` reads them.
        """
        ...

    def place(self, model: nn.Module) -> None:
        """Move a model that is not trained to its device, in place."""
        ...

    def prepare(self, model: nn.Module, optimizer: OptimizerConfig, total_steps: int) -> TrainState:
        """Place ``model``. Build its optimizer and learning-rate schedule.

        Args:
            model: The model to train, changed in place.
            optimizer: Learning rates, AdamW and clipping.
            total_steps: Optimizer steps of the schedule.

        Raises:
            ConfigError: No parameter is trained, or a learning rate names a part that the model
                lacks or does not train.
        """
        ...

    def backward(self, state: TrainState, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of ``loss``.

        Args:
            state: The model.
            loss: This micro-batch's part of the global loss.
            last: ``True`` for the last micro-batch before ``step``.
        """
        ...

    def step(self, state: TrainState) -> StepInfo:
        """Clip, step, schedule and clear gradients.

        A gradient that is not finite skips the step, on every rank alike.
        """
        ...

    def advance(self, state: TrainState, steps: int) -> None:
        """Advance the learning-rate schedule by ``steps`` that trained nothing."""
        ...

    def offloaded(
        self, states: Iterable[TrainState], frozen: Iterable[nn.Module]
    ) -> AbstractContextManager[None]:
        """Return a context manager that may offload optimizers and frozen models.

        They are unused inside.

        Args:
            states: Models whose optimizer state is unused.
            frozen: Models that are unused.
        """
        ...

    def gathered(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context manager that gathers all shards of ``model`` on every rank.

        It serves code that does not call the model through the strategy, such as generation.
        """
        ...

    def local_parameters(self, module: nn.Module) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Return a context manager that yields this rank's tensors of ``module``.

        They are its parameters by name, to read or change in place. ``module`` must belong to a
        model placed by this strategy.
        """
        ...

    def shards(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of every parameter of ``module``, by name, without gathering."""
        ...

    def gather(self, tensor: Tensor) -> Tensor:
        """Gather ``tensor``, laid out as one of ``local_parameters``, to its full value.

        Every rank must call it.
        """
        ...

    def shard_like(self, whole: Tensor, tensor: Tensor) -> Tensor:
        """Return the full tensor ``whole``, laid out as ``tensor`` is."""
        ...

    def full_parameters(self, state: TrainState) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter in full, by name."""
        ...

    def save(self, state: TrainState, path: Path) -> None:
        """Write weights, optimizer and schedule to the folder ``path``."""
        ...

    def load(self, state: TrainState, path: Path) -> None:
        """Restore the state that ``save`` wrote.

        Raises ``CheckpointError`` if it belongs to another model.
        """
        ...


@contextmanager
def separate_calls(model: nn.Module) -> Generator[None]:
    """Let ranks make different calls of ``model``, whose weights are whole inside the context."""
    if not isinstance(model, TrainableModule):
        yield
        return
    ranks, model.equal_calls.ranks = model.equal_calls.ranks, SINGLE_PROCESS
    try:
        yield
    finally:
        model.equal_calls.ranks = ranks


def on_host(strategy: Strategy, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Gather ``tensors`` in CPU memory on rank 0, by name.

    Other ranks get an empty dictionary. Every rank must call it.

    ``tensors`` are laid out as in ``Strategy.local_parameters``. They are gathered one by one, so a
    device holds at most one in full.
    """

    found: dict[str, Tensor] = {}
    for name, tensor in tensors:
        # Before the rank is looked at, since gathering is collective.
        whole = strategy.gather(tensor.detach())
        if strategy.ranks.rank == 0:
            # A gathered tensor may be a view of a larger buffer, so copy it.
            found[name] = whole.to("cpu", copy=isinstance(tensor, DTensor)).contiguous()
        # Without this, the next tensor would be gathered while this one is still in memory.
        del whole
    return found


def lr_factor(step: int, total: int, config: OptimizerConfig) -> float:
    """Return the factor of ``config.lr`` at optimizer step ``step`` (from 0) of ``total``.

    Linear warm-up reaches 1 at the step after the last warm-up step. The schedules cosine and
    linear then fall to ``min_lr_ratio`` at ``total``.

    Args:
        step: Optimizer step, from 0.
        total: Optimizer steps of the run.
        config: Schedule and warm-up.
    """
    # Use the decimal as written: in binary, 0.07 * 100 is 7.000000000000001, which rounds up to 8.
    warmup = config.warmup_steps or math.ceil(Fraction(str(config.warmup_ratio)) * total)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    fall = (1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else 1 - done
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * fall
