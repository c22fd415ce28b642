"""What models say of a batch, without gradient: columns of tokens, in micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from lightrft.config import RLConfig
from lightrft.trainer.batching import my_micro_batches
from lightrft.trainer.roles import Distant, Reference, Roles
from lightrft.types import Batch, rows_of


def by_parts(
    batch: Batch, score: Callable[[Batch, Tensor], Tensor], roles: Roles, config: RLConfig, at_one_time: int = 1
) -> Tensor:
    """A token column ``[N]`` computed without gradient: ``score(part, its rows in the batch)`` for each micro-batch, in some team, of
    several ``at_one_time`` in threads."""
    column, teams = torch.zeros(batch.tokens), roles.strategy.teams

    @torch.no_grad()
    def one(index: Tensor) -> None:
        values = score(batch.select(index).to(roles.device), index)
        column[rows_of(batch.lengths, index)] = values.float().cpu()

    parts = my_micro_batches(batch, config.train.micro_batch_tokens, roles.actor.layout, teams)
    if at_one_time == 1:
        for index in parts:
            one(index)
    else:
        with ThreadPoolExecutor(at_one_time) as threads:
            list(threads.map(one, parts))
    return teams.sum(column)


def parts_at_one_time(model: object) -> int:
    """How many parts of a batch to ask of ``model`` at once."""
    return model.in_flight if isinstance(model, Distant) else 1


def logprobs_by_parts(model: Reference, batch: Batch, roles: Roles, config: RLConfig) -> Tensor:
    """What ``model`` gives the response tokens ``[N]``, at the temperature at which they were drawn."""
    temperature = sampling_temperature(config)
    score = lambda part, _: model.score(part, temperature=temperature).logprobs  # noqa: E731
    return by_parts(batch, score, roles, config, parts_at_one_time(model))


def sampling_temperature(config: RLConfig) -> float:
    """Log-probs are those of the distribution that was sampled from; greedy answers are scored at temperature 1."""
    return config.sampling.temperature or 1.0
