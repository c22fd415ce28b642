"""Mix supervised data into policy steps against forgetting (PPO-ptx, arXiv 2203.02155, eq. 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightrft.config.train import PtxConfig
from lightrft.datasets.row_warnings import check_rows
from lightrft.datasets.sampler import PromptSampler, draw, report
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.learner.policy_update import LossOf
from lightrft.learner.sft_step import examples_to_batch, mean_nll, with_mean_weights
from lightrft.models.actor import Actor
from lightrft.observability.metrics import Metrics
from lightrft.types import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrft.models.processors.base import Processor


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
