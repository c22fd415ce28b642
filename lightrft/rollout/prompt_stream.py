"""Stream prompts in an order that depends on the seed alone, or on pass rates with a curriculum.

The position is saved with the run.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import getLogger
from typing import TYPE_CHECKING, TypeVar

from lightrft.config.data import DataConfig
from lightrft.config.rollout import CurriculumConfig
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.row_warnings import check_rows
from lightrft.datasets.sampler import PromptSampler, WithoutMedia, draw, report
from lightrft.rollout.accounting import CollectedRollouts
from lightrft.rollout.curriculum import Curriculum
from lightrft.rollout.serialization import pack_rollout, unpack_rollouts
from lightrft.types import Prompt, Rollout
from lightrft.utils.state_io import State

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrft.models.processors import Processor

log = getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class PromptStream:
    """An endless stream over a data set, epoch after epoch or by a curriculum.

    Attributes:
        dataset: The prompts.
        sampler: The order of the prompts.
        carried: Complete groups of the step before, which the next step trains on.
        partial: Unfinished groups of the step before, which the next step continues first.
        unreadable_rows: Number of unreadable prompts in this step.
    """

    dataset: PromptDataset
    sampler: PromptSampler | Curriculum
    carried: list[list[Rollout]] = field(default_factory=list)
    partial: list[list[Rollout]] = field(default_factory=list)
    unreadable_rows: int = 0

    @staticmethod
    def of(
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        curriculum: CurriculumConfig | None = None,
        processor: Processor | None = None,
    ) -> PromptStream:
        """Build a stream over the data set of ``config``.

        Args:
            config: The settings ``data``.
            tokenizer: Encodes the prompts.
            seed: Determines the order.
            curriculum: The settings ``rollout.curriculum``. ``None`` goes through the data epoch by
                epoch.
            processor: Prepares media. ``None`` for text.
        """
        dataset = PromptDataset(config, tokenizer, seed=seed, processor=processor)
        report("data", dataset.counts, dataset.first_problem)
        check_rows(dataset, "data.sources")
        if curriculum is None:
            return PromptStream(dataset, PromptSampler(len(dataset), seed, config.shuffle))
        return PromptStream(dataset, Curriculum(curriculum, dataset.ids, seed))

    @property
    def without_media(self) -> Sequence[Prompt]:
        """Return the prompts in the order of the data set, without their media."""
        return WithoutMedia(self.dataset)

    def draw(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts and add the unreadable ones to ``unreadable_rows``."""
        before = self.dataset.counts["unreadable"]
        drawn = draw(self.dataset, self.sampler, count)
        self.unreadable_rows += self.dataset.counts["unreadable"] - before
        return drawn

    def named(self, ids: Sequence[str]) -> list[Prompt]:
        """Return the prompts with the given ``ids``.

        Raises:
            CheckpointError: If the data set has no such prompt.
        """
        return [self.dataset[i] for i in self.dataset.places(ids)]

    @contextmanager
    def restore_on_error(self) -> Generator[None]:
        """Rewind the stream to the start of the body if the body raises."""
        before = self.sampler.state_dict()
        carried, begun, lost = self.carried, self.partial, self.unreadable_rows
        try:
            yield
        except BaseException:
            self.sampler.load_state_dict(before)
            self.carried, self.partial, self.unreadable_rows = carried, begun, lost
            raise

    def record_results(self, collected: CollectedRollouts) -> None:
        """Update the stream from the groups that a step has collected.

        The lists of ``collected`` that only the stream reads are emptied.
        """
        self.carried, self.partial = collected.carried, collected.partial
        if isinstance(self.sampler, Curriculum):
            collected.curriculum = self.sampler.observe(collected.finished)
        collected.settle(self.unreadable_rows)
        self.unreadable_rows = 0

    def close(self) -> None:
        """Cancel the prefetch of prompts that will not be sampled."""
        self.dataset.prefetch(())

    def state_dict(self) -> State:
        """Return the position in the data set and the groups for the next step, as plain data."""
        waiting = {"carried": self.carried, "begun": self.partial}
        packed = {
            name: [[pack_rollout(r) for r in group] for group in groups]
            for name, groups in waiting.items()
        }
        return {"sampler": self.sampler.state_dict(), **packed}

    def load_state_dict(self, state: State) -> None:
        """Resume from ``state``.

        Raises:
            CheckpointError: If it belongs to another data set.
        """
        self.sampler.load_state_dict(state["sampler"])
        self.carried = [unpack_rollouts(group, self.named) for group in state["carried"]]
        self.partial = [unpack_rollouts(group, self.named) for group in state["begun"]]
