"""What models say of a batch, without gradient: columns of tokens, in micro-batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightrft.config import RLConfig
from lightrft.trainer.batching import my_micro_batches
from lightrft.trainer.roles import Reference, Roles
from lightrft.types import Batch, rows_of


def by_parts(batch: Batch, score: Callable[[Batch, Tensor], Tensor], roles: Roles, config: RLConfig) -> Tensor:
    """A token column ``[N]`` computed without gradient: ``score(part, its rows in the batch)`` for each micro-batch, on some rank."""
    column, ranks = torch.zeros(batch.tokens), roles.strategy.ranks
    with torch.no_grad():
        for index in my_micro_batches(batch, config.train.micro_batch_tokens, roles.actor.layout, ranks):
            values = score(batch.select(index).to(roles.device), index)
            column[rows_of(batch.lengths, index)] = values.float().cpu()
    return ranks.sum(column)


def logprobs_by_parts(model: Reference, batch: Batch, roles: Roles, config: RLConfig) -> Tensor:
    """What ``model`` gives the response tokens ``[N]``, at the temperature at which they were drawn."""
    temperature = sampling_temperature(config)
    return by_parts(batch, lambda part, _: model.score(part, temperature=temperature).logprobs, roles, config)


def sampling_temperature(config: RLConfig) -> float:
    """Log-probs are those of the distribution that was sampled from; greedy answers are scored at temperature 1."""
    return config.sampling.temperature or 1.0
