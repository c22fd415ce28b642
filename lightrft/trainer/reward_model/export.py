"""Write the scalar or process reward model of a run as a folder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from lightrft.distributed.process_group import run_on_all_ranks, run_with_keepalive
from lightrft.models.lora import can_merge
from lightrft.models.processors import Processor
from lightrft.models.reward.process import ProcessRewardModel
from lightrft.models.reward.reward_model import RewardModel
from lightrft.roles import TrainableModel
from lightrft.trainer.training_loop import TrainingRun, best_checkpoint
from lightrft.utils.atomic_files import whole_folder

log = logging.getLogger(__name__)

AnyRewardModel = RewardModel | ProcessRewardModel
"""A model that ``export`` writes."""
Normalize = Callable[[TrainableModel[RewardModel]], None]
"""Sets the mean and the deviation of the scores. All ranks must call it."""


@dataclass(frozen=True, slots=True)
class SavedParts:
    """The tokenizer and processor in the folder of a reward model.

    Attributes:
        tokenizer: The tokenizer.
        processor: Prepares media, or None for a text-only model.
    """

    tokenizer: PreTrainedTokenizerBase
    processor: Processor | None


def export(
    run: TrainingRun,
    trained: TrainableModel,
    parts: SavedParts,
    copied: Callable[[], AnyRewardModel],
    normalize: Normalize | None = None,
) -> int:
    """Write the reward model as a folder ``model/`` and return its step.

    It is the best checkpoint if the run names a metric, else the current model. Sharded weights are
    gathered into a copy on rank 0.

    Args:
        run: The run.
        trained: Its model.
        parts: The tokenizer and processor to save.
        copied: Loads the model that training started from, whose weights are replaced.
        normalize: Sets the mean and the deviation of the scores. ``None`` for scores without.
    """
    session, strategy = run.session, run.strategy
    ranks = session.ranks
    # Rank 0 reads every byte of the checkpoints, which may take longer than the timeout.
    best, step = run_with_keepalive(
        ranks, lambda sign: (None, run.step) if ranks.rank else best_checkpoint(run, sign)
    )[0]
    best = ranks.gather(best)[0]
    if best is not None:
        trained.load(strategy, best / "reward_model")
    if normalize is not None:
        normalize(trained)
    write_current(run, trained, parts, copied, session.path / "model")
    return step


def write_current(
    run: TrainingRun,
    trained: TrainableModel,
    parts: SavedParts,
    copied: Callable[[], AnyRewardModel],
    path: Path,
) -> None:
    """Write the current reward model as a folder.

    Args:
        run: The run.
        trained: Its model.
        parts: The tokenizer and processor to save.
        copied: Loads the model that training started from, whose weights are replaced.
        path: The folder.
    """
    ranks = run.session.ranks
    if ranks.size == 1:
        write(trained.model, parts, path)
        return
    copy = copied() if ranks.rank == 0 else None
    parameters = {} if copy is None else dict(copy.named_parameters())
    # Every rank iterates, since gathering a parameter is a collective call.
    for name, tensor in run.strategy.full_parameters(trained.state):
        if copy is not None:
            parameters[name].data.copy_(tensor)

    def write_copy() -> None:
        if copy is not None:
            write(copy, parts, path)

    # On all ranks, so that a full disk on rank 0 ends the run everywhere.
    run_on_all_ranks(ranks, write_copy)


def write(model: AnyRewardModel, parts: SavedParts, path: Path) -> None:
    """Write ``model`` to the folder ``path``, atomically.

    Adapters are added into the weights. On quantised weights, the folder holds the adapters alone.

    Args:
        model: The reward model.
        parts: The tokenizer and processor to save.
        path: The folder.
    """
    merge = can_merge(model)
    if not merge:
        log.warning(
            "the weights are quantised, so %s holds the heads and the adapters alone; they are "
            "read together with the model that training started from",
            path,
        )
    with whole_folder(path) as temporary:
        model.save(parts.tokenizer, temporary, parts.processor, merge=merge)
