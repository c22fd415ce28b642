"""What models say of a batch, without gradient: columns of tokens, in micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from lightrft.config import RLConfig
from lightrft.trainer.batching import micro_batches, my_micro_batches
from lightrft.trainer.roles import Distant, Reference, Roles
from lightrft.types import Batch, rows_of


def by_parts(
    batch: Batch, score: Callable[[Batch, Tensor], Tensor], roles: Roles, config: RLConfig, model: object = None
) -> Tensor:
    """A token column ``[N]`` computed without gradient: ``score(part, its rows in the batch)`` for each micro-batch, in some team. Where
    it asks a ``model`` that others run, several at one time in threads, or all of them on the first rank, as that wants it."""
    at_one_time, of_all = (model.in_flight, model.of_all) if isinstance(model, Distant) else (1, False)
    ranks = roles.strategy.ranks if of_all else roles.strategy.teams
    column = torch.zeros(batch.tokens)

    @torch.no_grad()
    def one(index: Tensor) -> None:
        values = score(batch.select(index).to(roles.device), index)
        column[rows_of(batch.lengths, index)] = values.float().cpu()

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
    return ranks.sum(column)


def logprobs_by_parts(model: Reference, batch: Batch, roles: Roles, config: RLConfig) -> Tensor:
    """What ``model`` gives the response tokens ``[N]``, at the temperature at which they were drawn."""
    temperature = sampling_temperature(config)
    score = lambda part, _: model.score(part, temperature=temperature).logprobs  # noqa: E731
    return by_parts(batch, score, roles, config, model)


def sampling_temperature(config: RLConfig) -> float:
    """Log-probs are those of the distribution that was sampled from; greedy answers are scored at temperature 1."""
    return config.sampling.temperature or 1.0
