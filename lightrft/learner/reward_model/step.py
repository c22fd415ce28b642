"""Take a step of a reward model on compared, ranked or rated responses.

The losses are functions of the outputs of heads, one row per response. If each group fits in a
micro-batch, one pass computes loss and gradient. Otherwise a first pass computes the outputs
without gradient, and the derivative of the loss in each output weights the outputs of a second
pass. Loss and gradient are the same in both forms.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrft.algorithms.reward_model.inputs import ScoredResponses
from lightrft.algorithms.reward_model.objective import (
    RewardModelTerm,
    reward_loss,
    reward_terms,
    totals_of,
)
from lightrft.algorithms.token_ops import require_column
from lightrft.config.reward_model.sections import RewardModelConfig
from lightrft.datasets.preference.preference_dataset import PreferenceExample
from lightrft.learner.micro_batches import largest_group
from lightrft.learner.policy_update import LossOf, optimizer_step
from lightrft.learner.preference_batch import preference_to_batch
from lightrft.learner.reward_model.outputs import (
    Outputs,
    compute_outputs,
    joined,
    responses_of,
    separated,
)
from lightrft.learner.reward_model.scoring import ScoringSettings, verify_layout
from lightrft.learner.sft_step import with_sources
from lightrft.models.reward.reward_model import HeadOutputs, RewardModel
from lightrft.observability.metrics import Mean, Metrics, Sum
from lightrft.roles import TrainableModel
from lightrft.strategy.base import Strategy
from lightrft.types import Batch


@dataclass(frozen=True, slots=True)
class RewardModelSettings(ScoringSettings[RewardModel, PreferenceExample, Outputs]):
    """The settings of a step.

    Attributes:
        reward_model: The settings ``reward_model``.
        max_tokens: The setting ``train.max_tokens_per_micro_batch``.
        heads: Names of the columns of ``Batch.labels``, the heads that a loss reads.
        sources: Names of the data sources, for metrics.
    """

    reward_model: RewardModelConfig
    max_tokens: int
    heads: Sequence[str]
    sources: Sequence[str] = ()

    def batch(self, examples: Sequence[PreferenceExample]) -> Batch:
        """See ``ScoringSettings.batch``."""
        return with_sources(preference_to_batch(examples, self.heads), examples, self.sources)

    def numbers(self, model: RewardModel, batch: Batch) -> Tensor:
        """See ``ScoringSettings.numbers``."""
        return joined(model.score(batch))

    def compute(self, model: RewardModel, batch: Batch, strategy: Strategy) -> Outputs:
        """See ``ScoringSettings.compute``.

        Args:
            model: The reward model.
            batch: Prompts and responses.
            strategy: Places tensors.
        """
        return compute_outputs(model, batch, strategy, self.max_tokens)


def reward_model_step(
    strategy: Strategy,
    trained: TrainableModel[RewardModel],
    batch: Batch,
    settings: RewardModelSettings,
) -> Metrics:
    """Take one optimizer step on the losses of the global batch.

    Args:
        strategy: Runs the backward pass and the step.
        trained: The reward model with its optimizer.
        batch: The global batch, identical on all ranks.
        settings: The settings of the step.
    """
    verify_layout(trained, batch, strategy, settings.numbers)
    objective = RewardObjective(trained.model, settings, divisors(batch, settings))
    metrics = Metrics({"reward_model/responses": Sum(len(batch))})
    metrics.add("reward_model/tokens", Sum(batch.tokens))
    metrics.merge(count_unlabelled(batch, settings.heads))

    def step(loss_of: LossOf, *, cut: bool) -> tuple[Tensor, Metrics]:
        budget = settings.max_tokens
        return optimizer_step("reward_model", strategy, trained, batch, budget, loss_of, cut=cut)

    if largest_group(batch, trained.model.layout) > settings.max_tokens:
        batch, loss, found = objective.linearised(batch, strategy)
        _, more = step(objective.linear_loss, cut=True)
        metrics.merge(found)
    else:
        # The responses of a group meet in one micro-batch.
        loss, more = step(objective.loss, cut=False)
    metrics.merge(more)
    metrics.add("loss", Mean(loss))
    return metrics


def count_unlabelled(batch: Batch, heads: Sequence[str]) -> Metrics:
    """Count the responses of ``batch`` without a label of each head, if there are several heads."""
    metrics = Metrics()
    if len(heads) > 1:
        missing = require_column(batch.labels).isnan().sum(0).tolist()
        for name, count in zip(heads, missing, strict=True):
            metrics.add(f"reward_model/{name}/unlabelled", Sum(count))
    return metrics


def divisors(batch: Batch, settings: RewardModelSettings) -> tuple[float, ...]:
    """Return the divisor of each term over the global ``batch``, from its labels alone."""
    nothing = HeadOutputs(torch.zeros(len(batch), 1), torch.zeros(len(batch)))
    data = responses_of(batch, dict.fromkeys(settings.heads, nothing), settings.heads)
    return totals_of(data, settings.reward_model)


@dataclass(frozen=True, slots=True)
class RewardObjective:
    """The loss of one step.

    Attributes:
        model: The reward model.
        settings: The settings of the step.
        totals: The divisor of each term.
    """

    model: RewardModel
    settings: RewardModelSettings
    totals: Sequence[float]

    def loss(self, part: Batch) -> tuple[Tensor, Metrics]:
        """Return the contribution of ``part`` to the loss, and its metrics."""
        return self._loss_of(part, self.model.score(part))

    def linear_loss(self, part: Batch) -> tuple[Tensor, Metrics]:
        """Return a sum with the gradient of the loss. ``part`` has the weights of its outputs."""
        assert part.output_weights is not None
        return (joined(self.model.score(part)) * part.output_weights).sum(), Metrics()

    def linearised(self, batch: Batch, strategy: Strategy) -> tuple[Batch, Tensor, Metrics]:
        """Compute the loss of the global batch, and its derivative in each output.

        Args:
            batch: The global batch.
            strategy: Gives the ranks and the device.

        Returns:
            ``batch`` with the derivatives as weights, the loss, and its metrics.
        """
        with scaled(self.model):
            outputs = compute_outputs(self.model, batch, strategy, self.settings.max_tokens)
        leaves = joined(outputs).requires_grad_()
        loss, metrics = self._loss_of(batch, separated(leaves, outputs))
        loss.backward()
        return batch.replace(output_weights=leaves.grad), loss.detach(), metrics

    def _loss_of(self, part: Batch, outputs: Outputs) -> tuple[Tensor, Metrics]:
        data_of_head = responses_of(part, outputs, self.settings.heads)
        terms = reward_terms(data_of_head, self.settings.reward_model)
        loss = reward_loss(terms, self.totals)
        finite = torch.isfinite(joined(outputs).detach())
        metrics = reward_metrics(part, data_of_head, terms, self.settings)
        metrics.add("reward_model/nonfinite_scores", Sum((~finite.all(1)).sum()))
        # Every output takes part, so that all ranks reduce the gradients of the same parameters.
        # Infinite outputs are replaced, since infinity times 0 is NaN.
        return loss + joined(outputs).masked_fill(~finite, 0.0).sum() * 0, metrics


@contextmanager
def scaled(model: RewardModel) -> Generator[None]:
    """Score as in training inside the context, but without dropout: by learned scales."""
    modules = [model, *model.heads.modules()]
    modes = [module.training for module in modules]
    for module in modules:
        module.training = True
    try:
        yield
    finally:
        for module, training in zip(modules, modes, strict=True):
            module.training = training


def reward_metrics(
    batch: Batch,
    data_of_head: Mapping[str, ScoredResponses],
    terms: Sequence[RewardModelTerm],
    settings: RewardModelSettings,
) -> Metrics:
    """Return the mean of each loss, and the accuracy and the margin of pairs, by head.

    Args:
        batch: A batch of whole groups.
        data_of_head: The labelled responses of each head.
        terms: The losses.
        settings: The settings of the step.
    """
    metrics = Metrics()
    for term in terms:
        mean = Mean(term.losses.detach().sum(), term.units.sum())
        metrics.add(f"reward_model/{term.head}/loss/{term.name}", mean)
    for name, data in data_of_head.items():
        scores = data.scores.detach()
        metrics.add(f"reward_model/{name}/score", Mean.of(scores))
        better, worse = data.pairs()
        margins = scores[better] - scores[worse]
        # equal scores are right half of the time
        right = torch.where(margins == 0, 0.5, (margins > 0).double())
        metrics.add(f"reward_model/{name}/accuracy", Mean.of(right))
        metrics.add(f"reward_model/{name}/margin", Mean.of(margins))
        if batch.data_source is None:
            continue
        source_of = batch.data_source[better]
        for number, source in enumerate(settings.sources):
            metrics.add(f"reward_model/{source}/accuracy", Mean.of(right, source_of == number))
    return metrics
