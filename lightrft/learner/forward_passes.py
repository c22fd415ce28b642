"""Compute token columns of a batch in micro-batches, without gradient."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from lightrft.config.strategy import SamplingConfig
from lightrft.engines.stop_strings import end_ids, model_ends
from lightrft.learner.micro_batches import MicroBatch, local_micro_batches
from lightrft.models.actor import Actor
from lightrft.models.attention.layout_check import check_layout
from lightrft.models.decoding.kv_decoder import eos_token_ids
from lightrft.models.multimodal.merge_inputs import media_token_ids
from lightrft.models.sampled_distribution import Distribution, distribution_of
from lightrft.roles import FrozenModel, Reference, RemoteModelInfo, Roles, TrainableModel
from lightrft.strategy.base import Strategy
from lightrft.types import Batch, rows_of

log = logging.getLogger(__name__)


def map_micro_batches(
    batch: Batch,
    score: Callable[[Batch, Tensor], Tensor],
    roles: Roles,
    max_tokens: int,
    model: object = None,
) -> Tensor:
    """Compute a token column ``[N]`` without gradient, one micro-batch at a time.

    Each micro-batch is computed by one data-parallel rank, and the column is summed over ranks. A
    remote model receives several micro-batches concurrently from threads.

    Args:
        batch: The batch.
        score: Called as ``score(part, index)`` with a micro-batch and its row indices in ``batch``.
            Returns one number per token of ``part``.
        roles: Gives the strategy, the device and the layout.
        max_tokens: Largest number of tokens of a micro-batch.
        model: The model that ``score`` calls, if it may be remote.
    """
    in_flight = model.max_in_flight if isinstance(model, RemoteModelInfo) else 1
    ranks = roles.strategy.data_parallel_group
    parts_of_column = MicroBatches()

    # On the function, since the gradient mode of this thread does not hold in others.
    @torch.no_grad()
    def one(part: MicroBatch) -> None:
        values = score(part.of(batch).to(roles.device), part.index)
        parts_of_column.put(rows_of(batch.lengths, part.index), values)

    parts = local_micro_batches(batch, max_tokens, roles.actor.layout, ranks)
    if in_flight == 1:
        for part in parts:
            one(part)
    else:
        with ThreadPoolExecutor(in_flight) as threads:
            # The list raises the first error of a thread.
            list(threads.map(one, parts))
    # Every token is computed by one rank and is 0 on the others, so the sum is a gather.
    return ranks.sum(parts_of_column.column(batch.tokens))


class MicroBatches:
    """Parts of a float32 column, collected on the device and copied to the host in one transfer.

    Each copy waits for the device, so that a single one is faster.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, Tensor]] = []

    def put(self, places: Tensor, values: Tensor) -> None:
        """Store ``values [n]`` for the indices ``places [n]`` of the column.

        Threads may call it concurrently.
        """
        self._parts.append((places, values.detach().float()))

    def column(self, size: int) -> Tensor:
        """Return the column ``[size]`` on the host, with 0 where no part was stored."""
        column = torch.zeros(size)
        if self._parts:
            places, values = (torch.cat(side) for side in zip(*self._parts))
            column[places] = values.cpu()
        return column


def compute_logprobs(
    model: Reference, batch: Batch, roles: Roles, max_tokens: int, temperature: Distribution
) -> Tensor:
    """Return the log-probs of ``model`` for the response tokens, ``[N]``.

    Args:
        model: A local or remote model.
        batch: The batch.
        roles: Gives the strategy, the device and the layout.
        max_tokens: Largest number of tokens of a micro-batch.
        temperature: Temperature of the log-probs, or the distribution with filters.
    """

    def score(part: Batch, _: Tensor) -> Tensor:
        return model.score(part, temperature=temperature).logprobs

    return map_micro_batches(batch, score, roles, max_tokens, model)


def sampled_distribution(roles: Roles, sampling: SamplingConfig) -> Distribution:
    """Return the distribution of log-probs: temperature, filters and banned tokens of sampling.

    Args:
        roles: The policy and its tokenizer, which tell the end tokens and the tokens of media.
        sampling: The sampling settings.
    """
    actor = roles.actor
    ends: Sequence[int] = eos_token_ids(actor.model)
    if roles.tokenizer is not None:
        ends = end_ids(roles.tokenizer, model_ends(roles.tokenizer, ends), sampling)
    banned = media_token_ids(actor.base.config, actor.family)
    return distribution_of(sampling, tuple(ends), banned)


def verify_layout(role: TrainableModel | FrozenModel, batch: Batch, strategy: Strategy) -> None:
    """Compare the layout with the model's own padded forward on the first batch of a run.

    If the two differ, fall back to a layout that agrees and log the reason.

    Args:
        role: A local model.
        batch: The first batch of the run.
        strategy: Gathers the model's weights.
    """
    actor: Actor = role.model
    # An empty batch shows nothing. A worker may get an empty part before any other.
    if role.layout_verified or not len(batch):
        return
    if actor.config.check_layout:
        with strategy.gathered(actor):
            reason = check_layout(actor, batch)
        if reason:
            log.warning("model.layout: %s", reason)
    role.layout_verified = True


def verify_layouts(roles: Roles, batch: Batch) -> None:
    """Call ``verify_layout`` for every local language model of the run."""
    for role in (roles.policy, *roles.read_only, roles.prm):
        if isinstance(role, TrainableModel | FrozenModel):
            verify_layout(role, batch, roles.strategy)
