"""Take a step of supervised fine-tuning, and measure held-out conversations.

It uses the same batch, actor and strategy as reinforcement learning, with the loss -logp.

Supervised data can be mixed into policy steps against forgetting (PPO-ptx, arXiv 2203.02155,
equation 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from lightrft.algorithms.nonfinite_tokens import without_tokens
from lightrft.algorithms.token_ops import TokenRows, weighted_sum
from lightrft.config.train import PtxConfig
from lightrft.datasets.row_warnings import check_rows
from lightrft.datasets.sampler import PromptSampler, draw, in_order, report
from lightrft.datasets.sft_dataset import Example, SFTDataset
from lightrft.learner.forward_passes import compute_logprobs, verify_layout, verify_layouts
from lightrft.learner.policy_update import LossOf, optimizer_step
from lightrft.models.actor import Actor
from lightrft.observability.metrics import Mean, Metrics, Sum
from lightrft.roles import Roles, TrainableModel
from lightrft.strategy.base import Strategy
from lightrft.types import Batch, Segments
from lightrft.utils.seeding import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrft.models.processors.base import Processor


MOST_SOURCES = 32
"""Largest number of data sources that get metrics of their own."""


def examples_to_batch(examples: Sequence[Example]) -> Batch:
    """Collate conversations to one ``Batch``; ``sampled`` marks the trained tokens.

    ``token_weights`` and ``example_weights`` are None if all trained tokens or all examples have
    weight 1.
    """
    flat: list[float] = []
    for example in examples:
        flat += example.weights
    token_weights = torch.tensor(flat, dtype=torch.float64)
    example_weights = torch.tensor([e.weight for e in examples], dtype=torch.float64)
    trained = token_weights != 0
    return Batch(
        Segments.cat([Segments.of([e.prompt_ids], e.prompt_media) for e in examples]),
        Segments.cat([Segments.of([e.response_ids], e.response_media) for e in examples]),
        torch.arange(len(examples)),
        sampled=trained,
        token_weights=token_weights if bool((token_weights[trained] != 1).any()) else None,
        example_weights=example_weights if bool((example_weights != 1).any()) else None,
    )


def with_mean_weights(batch: Batch) -> Batch:
    """Add the loss weights of a mean over the trained tokens of ``batch``, a whole batch.

    The weight of a token is that of its turn times that of its example. The weights of a batch sum
    to 1, so that any split of the batch gives the same loss.
    """
    weights = token_weights_of(batch)
    # Without trained tokens every weight is 0, whatever the divisor.
    total = float(weights.sum()) or 1.0
    return batch.replace(loss_weights=weights / total)


def token_weights_of(batch: Batch) -> Tensor:
    """Return the weight of each token in a weighted mean, ``[N]``; 0 if it is not trained."""
    rows = TokenRows.of(batch)
    # float64, so that splitting the batch into parts adds no rounding of float32
    weights = rows.mask.double()
    if batch.token_weights is not None:
        weights = weights * batch.token_weights
    if batch.example_weights is not None:
        weights = weights * rows.spread(batch.example_weights)
    return weights


def with_noise(batch: Batch, alpha: float, seed: int, step: int) -> Batch:
    """Add noise on the token embeddings (NEFTune) to ``batch``, a whole batch.

    The noise of a row depends on the seed, the step and its place in the batch.

    Args:
        batch: The global batch.
        alpha: The setting ``neftune_alpha``. 0 adds no noise.
        seed: The setting ``run.seed``.
        step: Number of completed steps.
    """
    if not alpha:
        return batch
    seeds = [derive_seed(seed, "neftune", step, row) for row in range(len(batch))]
    return batch.replace(
        noise_seeds=torch.tensor(seeds, dtype=torch.long),
        noise_alpha=torch.full((len(batch),), alpha),
    )


def mean_nll(logprobs: Tensor, part: Batch) -> tuple[Tensor, Mean, Sum]:
    """Compute the supervised loss of a micro-batch.

    A token with an infinite or NaN log-prob is left out. It may be masked in the model's
    vocabulary, and would make the loss of the whole batch infinite.

    Returns:
        The contribution of ``part`` to the loss, the mean of -logp over its trained tokens, and the
        number of omitted tokens.
    """
    lost = part.mask & ~torch.isfinite(logprobs.detach())
    kept = without_tokens(part, lost)
    # Filled, not multiplied by 0: the gradient of a NaN times 0 is NaN.
    losses = -logprobs.masked_fill(~kept.mask, 0.0)
    return weighted_sum(losses, kept), Mean.of(losses.detach(), kept.mask), Sum(lost.sum())


class Sourced(Protocol):
    """An example that has a data source."""

    data_source: str


def with_sources(batch: Batch, examples: Sequence[Sourced], sources: Sequence[str]) -> Batch:
    """Add the number of the data source of each of ``examples`` to ``batch``.

    Args:
        batch: Has a response for each of ``examples``, or the example of each response in
            ``example``.
        examples: The examples of ``batch``.
        sources: Names of the data sources. One source, or more than ``MOST_SOURCES``, add nothing.
    """
    if not 1 < len(sources) <= MOST_SOURCES:
        return batch
    number = {name: k for k, name in enumerate(sources)}
    numbers = torch.tensor([number[e.data_source] for e in examples])
    return batch.replace(data_source=numbers if batch.example is None else numbers[batch.example])


def nll_by_source(logprobs: Tensor, part: Batch, sources: Sequence[str]) -> Metrics:
    """Return the mean of -logp over the trained tokens of each data source.

    Args:
        logprobs: ``[N]``. Infinite and NaN ones are left out.
        part: A micro-batch. Without data sources, there are no metrics.
        sources: Names of the data sources.
    """
    metrics = Metrics()
    if part.data_source is None:
        return metrics
    counted = part.mask & torch.isfinite(logprobs)
    source_of = part.data_source[part.row_of]
    for number, name in enumerate(sources):
        metrics.add(f"sft/{name}/nll", Mean.of(-logprobs, counted & (source_of == number)))
    return metrics


def sft_step(
    strategy: Strategy,
    policy: TrainableModel,
    batch: Batch,
    micro_batch_tokens: int,
    noise: Callable[[Batch], Batch] | None = None,
    sources: Sequence[str] = (),
) -> Metrics:
    """Take one optimizer step on the weighted mean of -logp over the tokens of the global batch.

    Args:
        strategy: Runs the backward pass and the step.
        policy: The model with its optimizer.
        batch: The global batch, identical on all ranks.
        micro_batch_tokens: Largest number of tokens of a micro-batch.
        noise: Adds noise to the batch, such as ``with_noise``. ``None`` adds none.
        sources: Names of the data sources, for metrics.
    """
    # Before the noise: the model's own forward, which the layout is compared with, has none.
    verify_layout(policy, batch, strategy)
    batch = with_mean_weights(batch if noise is None else noise(batch))
    metrics = Metrics(
        {"sft/tokens": Sum(int(batch.mask.sum())), "sft/conversations": Sum(len(batch))}
    )

    def loss_of(part: Batch) -> tuple[Tensor, Metrics]:
        logprobs = policy.model.score(part, temperature=1.0).logprobs
        loss, _, lost = mean_nll(logprobs, part)
        found = nll_by_source(logprobs.detach(), part, sources)
        found.add("sft/nonfinite_tokens", lost)
        return loss, found

    loss, found = optimizer_step("policy", strategy, policy, batch, micro_batch_tokens, loss_of)
    metrics.add("loss", Mean(loss))
    metrics.merge(found)
    return metrics


def evaluate_supervised(
    roles: Roles, dataset: SFTDataset, batch_size: int, max_tokens: int
) -> Metrics:
    """Return the mean of -logp over the trained tokens of ``dataset``. All ranks must call it.

    ``eval/loss`` is weighted as the loss of training, and ``eval/perplexity`` is its exponential.
    With several data sources there is ``eval/<data source>/loss`` for each.

    Args:
        roles: The policy and the strategy.
        dataset: The held-out examples.
        batch_size: Number of examples that are in memory together.
        max_tokens: Largest number of tokens of a micro-batch.
    """
    metrics, sources = Metrics(), dataset.data_sources
    for examples in in_order(dataset, batch_size, roles.strategy.ranks):
        if not examples:
            continue
        batch = with_sources(examples_to_batch(examples), examples, sources)
        verify_layouts(roles, batch)
        logprobs = compute_logprobs(roles.actor, batch, roles, max_tokens, 1.0)
        metrics.merge(_losses(logprobs.double(), batch, sources))
    means = metrics.compute()
    if "eval/loss" in means:
        # A larger loss has no perplexity that a float could hold.
        metrics.add("eval/perplexity", Mean(math.exp(min(means["eval/loss"], 700.0))))
    return metrics


def _losses(logprobs: Tensor, batch: Batch, sources: Sequence[str]) -> Metrics:
    """Return the weighted means of -logp over all trained tokens, and of each data source.

    A token with an infinite or NaN log-prob is left out, and counted.

    Args:
        logprobs: ``[N]``.
        batch: Some held-out examples.
        sources: Names of the data sources.
    """
    finite = torch.isfinite(logprobs)
    weights = token_weights_of(batch).masked_fill(~finite, 0.0)
    losses = -logprobs.masked_fill(~finite, 0.0) * weights
    metrics = Metrics({"eval/loss": Mean(losses.sum(), weights.sum())})
    metrics.add("eval/nonfinite_tokens", Sum((batch.mask & ~finite).sum()))
    if batch.data_source is None or len(sources) > MOST_SOURCES:
        return metrics
    source_of = batch.data_source[batch.row_of]
    for number, name in enumerate(sources):
        own = source_of == number
        metrics.add(f"eval/{name}/loss", Mean(losses[own].sum(), weights[own].sum()))
    return metrics


@dataclass(slots=True)
class PretrainingLoss:
    """A supervised loss on the next conversations of a data set.

    Attributes:
        config: The settings ``ptx``.
        dataset: The conversations.
        sampler: The order of the conversations.
    """

    config: PtxConfig
    dataset: SFTDataset
    sampler: PromptSampler

    @staticmethod
    def of(
        config: PtxConfig,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        processor: Processor | None = None,
    ) -> PretrainingLoss | None:
        """Build the loss from settings; ``None`` if its coefficient is 0.

        Args:
            config: The settings ``ptx``.
            tokenizer: Encodes the conversations.
            seed: Determines the order.
            processor: Prepares media. ``None`` for text.
        """
        if not config.coef:
            return None
        dataset = SFTDataset(
            config.data, tokenizer, max_tokens=config.max_tokens, seed=seed, processor=processor
        )
        report("ptx", dataset.counts, dataset.first_problem)
        check_rows(dataset, "ptx.data.sources")
        return PretrainingLoss(
            config, dataset, PromptSampler(len(dataset), seed, config.data.shuffle)
        )

    def term(self, actor: Actor) -> tuple[Batch, LossOf]:
        """Return the next batch and its loss.

        The loss is ``coef`` times the mean of -logp over the trained tokens.
        """
        batch = examples_to_batch(draw(self.dataset, self.sampler, self.config.batch_size))
        # Before the batch is split into micro-batches: the weights hold its token count.
        batch = with_mean_weights(batch)

        def loss_of(part: Batch) -> tuple[Tensor, Metrics]:
            loss, nll, lost = mean_nll(actor.score(part).logprobs, part)
            return self.config.coef * loss, Metrics({"ptx/nll": nll, "ptx/nonfinite_tokens": lost})

        return batch, loss_of

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data set."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a position that ``state_dict`` returned."""
        self.sampler.load_state_dict(state)
