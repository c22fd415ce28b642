"""Add the load-balancing loss of experts to the micro-batches of an optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightrft.models.actor import Backbone
from lightrft.models.router_loss import RouterLoss
from lightrft.observability.metrics import Mean, Metrics
from lightrft.strategy.base import Strategy
from lightrft.types import Batch
from lightrft.utils.seeding import capture_rng, restore_rng


@dataclass(slots=True)
class RouterTerms:
    """The load-balancing loss of one optimizer step, which ``added`` collects.

    Attributes:
        loss: The loss of the model. ``None`` adds nothing.
        values: The part of each micro-batch, 0-d.
    """

    loss: RouterLoss | None
    values: list[Tensor] = field(default_factory=list)

    def added(self, loss: Tensor) -> Tensor:
        """Return ``loss`` of a micro-batch, plus its part of the load-balancing loss."""
        if self.loss is None:
            return loss
        term = self.loss.term()
        self.values.append(term.detach())
        return loss + self.loss.coef * term

    def metrics(self, who: str, strategy: Strategy) -> Metrics:
        """Return the load-balancing loss of the step, over all ranks.

        Args:
            who: Name of the model.
            strategy: Gives the ranks.
        """
        if not self.values:
            return Metrics()
        whole = strategy.data_parallel_group.sum(torch.stack(self.values).sum())
        return Metrics({f"{who}/router_aux_loss": Mean(whole)})


@contextmanager
def router_terms(
    model: Backbone, batches: Sequence[Callable[[], Batch]], strategy: Strategy
) -> Generator[RouterTerms]:
    """Count the experts of an optimizer step, then add the loss inside the context.

    The pass that counts has the dropout of the step: the random generators restart after it.

    Args:
        model: The model, in training mode.
        batches: Return the micro-batches of this rank, in the order of the step.
        strategy: Gives the ranks and the device.
    """
    loss = model.router_loss
    if loss is None or not batches:
        yield RouterTerms(None)
        return
    state = capture_rng(strategy.device)
    with torch.no_grad(), loss.counting(strategy.data_parallel_group):
        for batch in batches:
            # through the module's call, whose hooks gather shards; the head does not run
            model(batch(), states_alone=True)
    restore_rng(state, strategy.device)
    with loss.adding():
        yield RouterTerms(loss)
