"""Check the settings of a reward model before anything is loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from lightrft.algorithms.contracts.run_checks import check_own_parts
from lightrft.algorithms.reward_model.compatibility import check_reward_model
from lightrft.algorithms.reward_model.inputs import rated_responses
from lightrft.algorithms.reward_model.losses import REWARD_LOSSES
from lightrft.algorithms.reward_model.rating_losses import sign_problem
from lightrft.algorithms.reward_model.requirements import (
    MIXTURE,
    RewardRequirements,
    called_loss,
    losses_of_heads,
    reward_requirements,
    signed_score,
)
from lightrft.config.base import changed_fields
from lightrft.config.reward_model.sections import RewardModelConfig
from lightrft.config.verbs import PRMVerbConfig, RMConfig
from lightrft.datasets.preference.preference_dataset import PreferenceDataset
from lightrft.models.reward.reward_model import RewardModel
from lightrft.trainer.checks.preflight import check_trained_weights
from lightrft.trainer.supervised import check_sources, check_unread
from lightrft.utils.errors import ConfigError, DataError
from lightrft.utils.lazy_imports import torch

METRICS = (
    *("loss", "pair_accuracy", "pair_accuracy_low", "pair_accuracy_high"),
    *("margin", "calibration_error", "length_bias"),
)
"""Metrics of held-out rows, under ``eval/`` or ``eval/<head>/``."""
LESS_IS_BETTER = ("loss", "calibration_error")
"""Those of them that fall while a model learns."""


def check(config: RMConfig) -> RewardRequirements:
    """Return what the losses read.

    Raises ``ConfigError`` for problems that can be found without a model or data.
    """
    check_sources(config)
    check_trained_weights(config.model)
    check_unread(config)
    check_reward_model(config.reward_model)
    losses = enumerate(map(called_loss, config.reward_model.losses))
    check_own_parts(("reward_model", f"reward_model.losses.{i}", part) for i, part in losses)
    requirements = reward_requirements(config.reward_model)
    signed = signed_score(config.reward_model) is not None
    measured = (*METRICS, "sign_accuracy") if signed else METRICS
    problems = [
        *unread_evaluation(config),
        *unmeasured_best(config, measured, LESS_IS_BETTER),
        *_quantised(config),
    ]
    problems += _margins(labelled_heads(config.reward_model, requirements), requirements)
    if problems:
        raise ConfigError("\n".join(problems))
    return requirements


def labelled_heads(settings: RewardModelConfig, requirements: RewardRequirements) -> list[str]:
    """Return the names of the scores that a loss reads, in the order of the settings.

    A mixture is the first: it is the reward, so that the preference of a row is its label.
    """
    names = [MIXTURE, *(head.name for head in settings.heads)]
    return [name for name in names if name in requirements.heads]


def _margins(heads: list[str], requirements: RewardRequirements) -> Iterator[str]:
    """Yield a problem for each of ``heads`` whose margins a loss reads and no row has."""
    for name in heads[1:]:
        if name in requirements.margins:
            yield (
                f"reward_model.losses: a loss reads the margins of head {name!r}, and rows have "
                f"margins for the first head, {heads[0]!r}, alone; give the loss head: {heads[0]}, "
                "or its options without margin"
            )


def check_signs(dataset: PreferenceDataset, settings: RewardModelConfig, key: str) -> None:
    """Check that the rows of a loss ``cost_sign`` have safe and unsafe responses.

    Args:
        dataset: The rows.
        settings: The heads and the losses.
        key: Key of the settings of the rows, for messages.

    Raises:
        DataError: If all responses are safe, or all are unsafe, or a rating is out of range.
    """
    for part, head in losses_of_heads(settings):
        if part.name != "cost_sign":
            continue
        rating = torch.as_tensor(dataset.labels_of(head))
        responses = rated_responses(torch.zeros_like(rating), rating)
        problem = sign_problem(responses, part.options.get("unsafe_from"))
        if problem:
            raise DataError(
                f"{key}.sources, head {head!r}: {problem}; set unsafe_from between the ratings of "
                f"safe and unsafe responses, or add rows to {key}.sources"
            )


def check_start(model: RewardModel, config: RMConfig) -> None:
    """Check that the scores that a run starts from have the sign that ``cost_sign`` trains.

    Raises ``ConfigError`` if they are normalised.
    """
    is_plain = not bool(model.score_mean.any()) and bool((model.score_std == 1).all())
    if not is_plain and any(part.name == "cost_sign" for part in config.reward_model.losses):
        raise ConfigError(
            f"model.path = {config.model.path!r} normalises its scores, and the loss 'cost_sign' "
            "of reward_model.losses trains their sign; start from a reward model that was trained "
            "with reward_model.normalize=none, or leave cost_sign out"
        )


def _quantised(config: RMConfig) -> Iterator[str]:
    """Yield a problem if the trained model could not be written."""
    layer = config.reward_model.layer
    if config.model.load_in_4bit and layer != -1:
        yield (
            f"model.load_in_4bit = true with reward_model.layer = {layer}: adapters cannot be added "
            "to weights in 4 bits, and adapters alone fit no model with all layers; set one of the "
            "two only"
        )


def unread_evaluation(config: RMConfig | PRMVerbConfig) -> Iterator[str]:
    """Yield settings of evaluations that nothing reads."""
    if config.validation.sources:
        return
    for name in changed_fields(config.eval):
        yield (
            f"eval.{name} = {getattr(config.eval, name)} changes nothing: validation.sources is "
            "empty; name held-out rows, or leave it out"
        )


def unmeasured_best(
    config: RMConfig | PRMVerbConfig, metrics: Collection[str], less_is_better: Collection[str]
) -> Iterator[str]:
    """Yield a problem if no evaluation reports ``checkpoint.best``.

    Args:
        config: Settings of the run.
        metrics: Metrics of held-out rows, under ``eval/`` or ``eval/<name>/``.
        less_is_better: Metrics that fall while a model learns.
    """
    best = config.checkpoint.best
    name = (best or "").lstrip("-")
    if not name or not name.startswith("eval/"):
        # The metrics of a step are known after the first one, and are checked then.
        return
    leaf = name.rpartition("/")[2]
    problem = ""
    if leaf not in metrics:
        problem = f"is not a metric; held-out rows have {', '.join(metrics)}"
    elif leaf in less_is_better and best == name:
        problem = f"keeps the checkpoint where it is highest, and less is better; take -{name}"
    elif not config.validation.sources:
        problem = "is never measured: it needs validation.sources"
    elif not config.eval.every:
        problem = (
            "needs eval.every, which is 0: only the last checkpoint would have it; set "
            "eval.every, e.g. to 10"
        )
    if problem:
        yield f"checkpoint.best = {best!r} {problem}"


def reads_ties(settings: RewardModelConfig) -> bool:
    """Return whether a loss reads pairs without a better response."""
    return any(REWARD_LOSSES.about(part.name).kind == "tie" for part in settings.losses)


def rating_ranges(settings: RewardModelConfig) -> dict[str, int]:
    """Return the number of ratings of each head that knows only these."""
    rated = ("classes", "ordinal")
    return {head.name: head.size for head in settings.heads if head.kind in rated}
