"""Score the rows of a data set by a reward model, whatever its unit: a response or a step."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from lightrft.algorithms.reward_model.objective import RewardModelTerm
from lightrft.datasets.sampler import Drawable, in_order
from lightrft.models.actor import Backbone
from lightrft.models.training_mode import evaluation_mode
from lightrft.observability.metrics import Mean, Metrics
from lightrft.strategy.base import Strategy
from lightrft.types import Batch

log = logging.getLogger(__name__)

LAYOUT_BOUNDS = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Largest difference of a score between two layouts, relative to the largest score, by dtype."""
HALF_BOUND = 0.05
"""The same for dtypes of 16 bits."""

ExampleT = TypeVar("ExampleT")
OutputsT = TypeVar("OutputsT")
ModelT = TypeVar("ModelT", bound=Backbone)
ModelT_co = TypeVar("ModelT_co", bound=Backbone, covariant=True)


class LayoutChecked(Protocol[ModelT_co]):
    """A model, and whether its layout was compared with padded rows."""

    layout_verified: bool

    @property
    def model(self) -> ModelT_co:
        """The model."""
        ...


@dataclass(slots=True)
class EvaluatedModel(Generic[ModelT]):
    """A reward model that is not trained. See ``LayoutChecked``."""

    model: ModelT
    layout_verified: bool = False


class ScoringSettings(ABC, Generic[ModelT, ExampleT, OutputsT]):
    """The settings of a step, and how a model scores the units of a batch.

    Attributes:
        max_tokens: The setting ``train.max_tokens_per_micro_batch``.
        sources: Names of the data sources, for metrics.
    """

    __slots__ = ()
    max_tokens: int
    sources: Sequence[str]

    @abstractmethod
    def batch(self, examples: Sequence[ExampleT]) -> Batch:
        """Collate ``examples``."""

    @abstractmethod
    def numbers(self, model: ModelT, batch: Batch) -> Tensor:
        """Return the numbers of ``batch`` that must not depend on the layout."""

    @abstractmethod
    def compute(self, model: ModelT, batch: Batch, strategy: Strategy) -> OutputsT:
        """Return the outputs of all rows, in float64 on the host. All ranks must call it.

        Args:
            model: The reward model.
            batch: A batch with rows, identical on all ranks. Each rank computes some
                micro-batches.
            strategy: Gives the ranks and the device.
        """


def scored(
    strategy: Strategy,
    trained: LayoutChecked[ModelT],
    dataset: Drawable[ExampleT],
    settings: ScoringSettings[ModelT, ExampleT, OutputsT],
    batch_size: int,
    begin: int = 0,
) -> Iterator[tuple[list[ExampleT], Batch, OutputsT]]:
    """Yield the examples of ``dataset`` with the outputs of the model, equal on all ranks.

    Args:
        strategy: Gives the ranks and the device.
        trained: The reward model.
        dataset: The examples.
        settings: The settings of the run.
        batch_size: Number of examples of a part.
        begin: Number of examples to leave out, from the first.
    """
    for examples in in_order(dataset, batch_size, strategy.ranks, begin):
        if examples:
            batch = settings.batch(examples)
            verify_layout(trained, batch, strategy, settings.numbers)
            yield examples, batch, settings.compute(trained.model, batch, strategy)


def term_means(terms: Iterable[RewardModelTerm]) -> Metrics:
    """Return the weighted mean of each term, by its number."""
    metrics = Metrics()
    for i, term in enumerate(terms):
        metrics.add(f"{i}", Mean(term.weight * term.losses.sum(), term.units.sum()))
    return metrics


def loss_metric(means: Metrics) -> Metrics:
    """Return the sum of ``term_means`` of a data set as ``eval/loss``; empty without units."""
    values = means.compute()
    return Metrics({"eval/loss": Mean(sum(values.values()))}) if values else Metrics()


@torch.no_grad()
def verify_layout(
    trained: LayoutChecked[ModelT],
    batch: Batch,
    strategy: Strategy,
    numbers: Callable[[ModelT, Batch], Tensor],
) -> None:
    """Compare the scores of the layout with those of padded rows, on the first batch of a run.

    If the two differ, padded rows are used from then on, and the reason is logged.

    Args:
        trained: The reward model.
        batch: The first batch of the run.
        strategy: Gathers the model's weights.
        numbers: See ``ScoringSettings.numbers``.
    """
    model = trained.model
    if trained.layout_verified or not len(batch):
        return
    trained.layout_verified = True
    layout = model.layout
    if not model.config.check_layout or layout == "padded" or model.model_parallel_group.size > 1:
        return
    # one group is enough, and the shortest costs least
    costs = batch.lengths + batch.prompts.lengths[batch.prompt_of]
    group = batch.prompt_of[costs.argmin()]
    some = batch.select((batch.prompt_of == group).nonzero()[:, 0]).to(strategy.device)
    with strategy.gathered(model), evaluation_mode(model):
        found = numbers(model, some)
        model.layout = "padded"
        expected = numbers(model, some)
    bound = LAYOUT_BOUNDS.get(model.base.dtype, HALF_BOUND)
    gap = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    if gap > bound:
        log.warning(
            "model.layout: scores of layout %s differ from those of padded rows by %.2g of the "
            "largest; padded is used, which computes each prompt once per response",
            layout,
            gap,
        )
        return
    model.layout = layout
