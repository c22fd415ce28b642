"""What models say of a batch, without gradient: columns of tokens, in micro-batches."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from lightrft.config.verbs import RLConfig
from lightrft.learner.micro_batches import micro_batches, my_micro_batches
from lightrft.models.actor import Actor
from lightrft.roles import Distant, Frozen, Reference, Roles, Trained
from lightrft.strategy.base import Strategy
from lightrft.types import Batch, rows_of

log = logging.getLogger(__name__)


def by_parts(
    batch: Batch, score: Callable[[Batch, Tensor], Tensor], roles: Roles, config: RLConfig, model: object = None
) -> Tensor:
    """A token column ``[N]`` computed without gradient: ``score(part, its rows in the batch)`` for each micro-batch, in some team. Where
    it asks a ``model`` that others run, several at one time in threads, or all of them on the first rank, as that wants it."""
    at_one_time, of_all = (model.in_flight, model.of_all) if isinstance(model, Distant) else (1, False)
    ranks = roles.strategy.ranks if of_all else roles.strategy.teams
    parts_of_column = Parts()

    @torch.no_grad()
    def one(index: Tensor) -> None:
        values = score(batch.select(index).to(roles.device), index)
        parts_of_column.put(rows_of(batch.lengths, index), values)

    budget, layout = config.train.micro_batch_tokens, roles.actor.layout
    if of_all:
        parts = micro_batches(batch, budget, layout) if ranks.rank == 0 else []
    else:
        parts = my_micro_batches(batch, budget, layout, ranks)
    if at_one_time == 1:
        for index in parts:
            one(index)
    else:
        with ThreadPoolExecutor(at_one_time) as threads:
            list(threads.map(one, parts))
    return ranks.sum(parts_of_column.column(batch.tokens))


class Parts:
    """Parts of a float32 column, kept where they were computed and copied to the host together: a copy waits for the device."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, Tensor]] = []

    def put(self, places: Tensor, values: Tensor) -> None:
        """Keep ``values [n]`` for the ``places [n]`` of the column. Threads may put parts at one time."""
        self._parts.append((places, values.detach().float()))

    def column(self, size: int) -> Tensor:
        """Return the column ``[size]`` on the host, 0 where no part was put."""
        column = torch.zeros(size)
        if self._parts:
            places, values = (torch.cat(side) for side in zip(*self._parts))
            column[places] = values.cpu()
        return column


def logprobs_by_parts(model: Reference, batch: Batch, roles: Roles, config: RLConfig) -> Tensor:
    """What ``model`` gives the response tokens ``[N]``, at the temperature at which they were drawn."""
    temperature = sampling_temperature(config)
    score = lambda part, _: model.score(part, temperature=temperature).logprobs  # noqa: E731
    return by_parts(batch, score, roles, config, model)


def sampling_temperature(config: RLConfig) -> float:
    """Log-probs are those of the distribution that was sampled from; greedy answers are scored at temperature 1."""
    return config.sampling.temperature or 1.0


def settle_layout(role: Trained | Frozen, batch: Batch, strategy: Strategy) -> None:
    """On a run's first batch, compare the layout with the model's own padded forward; where they differ, fall back and say why."""
    actor: Actor = role.model
    if actor.config.check_layout and not role.layout_settled and len(batch):
        with strategy.whole(actor):
            reason = actor.check_layout(batch)
        if reason:
            log.warning("model.layout: %s", reason)
    role.layout_settled = True


def settle_layouts(roles: Roles, batch: Batch) -> None:
    """``settle_layout`` for every language model that takes part."""
    for role in (roles.policy, roles.reference, roles.teacher, roles.process):
        if isinstance(role, Trained | Frozen):
            settle_layout(role, batch, roles.strategy)
