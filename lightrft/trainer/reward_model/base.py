"""A run whose model learns from labelled rows, and is measured on held-out ones."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from lightrft.config.reward_model.sections import ValidationTimesConfig
from lightrft.config.verbs import PRMVerbConfig, RMConfig
from lightrft.datasets.prompt_dataset import EncodedDataset
from lightrft.datasets.sampler import PromptSampler
from lightrft.distributed.process_group import run_on_all_ranks
from lightrft.models.reward.process import ProcessRewardModel
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.training_mode import evaluation_mode
from lightrft.roles import TrainableModel
from lightrft.strategy.base import Strategy
from lightrft.trainer.checks.context_limits import check_examples
from lightrft.trainer.reward_model.export import SavedParts, write_current
from lightrft.trainer.training_loop import TrainingRun
from lightrft.utils.state_io import State

WORST = 20
"""Number of held-out pairs or responses in the report that are judged worst."""

Config = TypeVar("Config", bound=RMConfig | PRMVerbConfig)
Rows = TypeVar("Rows", bound=EncodedDataset)
Model = TypeVar("Model", bound=RewardModel | ProcessRewardModel)


@dataclass(slots=True, kw_only=True)
class ScoringModelRun(TrainingRun, Generic[Config, Rows, Model]):
    """A run whose steps take examples of ``dataset`` in the order of ``sampler``.

    Attributes:
        config: Settings of the run.
        placed: Places and updates the model.
        model: The model with its optimizer.
        parts: The settings, tokenizer and processor to save.
        dataset: The examples.
        validation: The held-out examples, if there are any.
        sampler: Gives the order of the examples.
    """

    config: Config
    placed: Strategy
    model: TrainableModel[Model]
    parts: SavedParts
    dataset: Rows
    validation: Rows | None
    sampler: PromptSampler

    @abstractmethod
    def copied(self) -> Model:
        """Load the model that training started from, whose weights are replaced."""

    def write_model(self, path: Path) -> None:
        """See ``TrainingRun.write_model``. Scores are as in training, without normalization."""
        write_current(self, self.model, self.parts, self.copied, path)

    @property
    def strategy(self) -> Strategy:
        """See ``TrainingRun.strategy``."""
        return self.placed

    @property
    def trained(self) -> dict[str, TrainableModel]:
        """See ``TrainingRun.trained``."""
        return {"reward_model": self.model}

    @property
    def times(self) -> ValidationTimesConfig:
        """See ``TrainingRun.times``."""
        return self.config.eval

    @property
    def validates(self) -> bool:
        """There are held-out examples."""
        return self.validation is not None

    def begin(self) -> None:
        """Raise ``ConfigError`` if an example exceeds the model's context length."""
        for dataset in (self.dataset, self.validation):
            if dataset is not None:
                check_examples(self.model.model, dataset.longest, self.config.max_tokens)

    def state(self) -> State:
        """Return the state of the sampler."""
        return {"sampler": self.sampler.state_dict()}

    def load_state(self, state: State) -> None:
        """Restore the result of ``state``."""
        self.sampler.load_state_dict(state["sampler"])

    def write_scores(self, is_evaluated: bool, write: Callable[[], None]) -> None:
        """Write the scores of the last evaluation for the report.

        Args:
            is_evaluated: False if there was no evaluation, as in a run that resumes at its end.
                One is made then.
            write: Writes the scores; called on the first rank.
        """
        if not is_evaluated:
            with evaluation_mode(self.model.model):
                self.validate()
        ranks = self.session.ranks
        run_on_all_ranks(ranks, lambda: write() if ranks.rank == 0 else None)

    def close(self) -> None:
        """Cancel reads of media that have not started."""
        for dataset in (self.dataset, self.validation):
            if dataset is not None:
                dataset.prefetch(())
