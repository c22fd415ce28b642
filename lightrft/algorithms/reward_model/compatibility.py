"""Reject combinations of heads and losses of reward models that make no sense.

Each message gives the reason and a way out. Only built-in losses are judged in full, since the
reads of a user's loss are unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lightrft.algorithms.reward_model.losses import REWARD_LOSSES
from lightrft.algorithms.reward_model.registry import KINDS
from lightrft.algorithms.reward_model.requirements import (
    MIXTURE,
    called_loss,
    head_kind,
    losses_of_heads,
)
from lightrft.algorithms.validate.component_kinds import COMPONENT_KINDS, signature_problems
from lightrft.config.reward_model.sections import RewardModelConfig
from lightrft.utils.errors import ConfigError

Range = tuple[Callable[[float], bool], str]

SMOOTHING: Range = (lambda e: 0 <= e < 0.5, "at least 0 and less than 0.5")
OPTION_RANGES: dict[str, dict[str, Range]] = {
    "bradley_terry": {"label_smoothing": SMOOTHING},
    "hps": {"label_smoothing": SMOOTHING},
    "rao_kupper": {"theta": (lambda theta: theta > 1, "above 1: ties are impossible at 1")},
    "davidson": {"nu": (lambda nu: nu > 0, "above 0: ties are impossible at 0")},
}
"""The allowed numbers of options, by loss."""


def check_reward_model(settings: RewardModelConfig) -> None:
    """Raise ``ConfigError`` with every unknown name, misfit option and nonsense combination."""
    row = COMPONENT_KINDS["reward_model"]
    problems = []
    for i, part in enumerate(settings.losses):
        named, key = called_loss(part), f"{row.key}.{i}"
        problems += signature_problems(key, row.registry, named, len(row.arguments), *row.given)
    if not problems:
        problems = list(incompatible_reward_settings(settings))
    if problems:
        raise ConfigError("\n".join(problems))


def incompatible_reward_settings(settings: RewardModelConfig) -> Iterator[str]:
    """Yield one line for each combination that cannot be intended.

    Every loss must exist; ``check_reward_model`` verifies that first.
    """
    # every problem is reported at once, so none of these raises
    yield from _kinds(settings)
    yield from _repeated(settings)
    yield from _options(settings)
    yield from _unfit_heads(settings)
    yield from _untrained(settings)
    yield from _mixture(settings)
    yield from _logit_scale(settings)
    yield from _moved_signs(settings)


def _kinds(settings: RewardModelConfig) -> Iterator[str]:
    for part in settings.losses:
        kind = REWARD_LOSSES.about(part.name).kind
        if kind not in KINDS:
            yield (
                f"reward_model.losses: the kind of {part.name!r} is {kind!r}; set the attribute "
                f"kind of the function to one of {', '.join(KINDS)}"
            )


def _repeated(settings: RewardModelConfig) -> Iterator[str]:
    seen: list[tuple[str, str, object]] = []
    for part, head in losses_of_heads(settings):
        if (part.name, head, part.options) in seen:
            yield (
                f"reward_model.losses names {part.name!r} of head {head!r} twice with the same "
                "options; name it once with the sum of the weights"
            )
        seen.append((part.name, head, part.options))


def _options(settings: RewardModelConfig) -> Iterator[str]:
    """Yield options that are out of range, or that change nothing."""
    for part in settings.losses:
        key = f"reward_model.losses: {part.name!r}"
        for option, (holds, allowed) in OPTION_RANGES.get(part.name, {}).items():
            value = part.options.get(option)
            if value is None:
                continue
            if not isinstance(value, int | float) or not holds(value):
                yield f"{key}: options.{option} is {value!r}; it must be {allowed}"
        if "per" not in part.options:
            continue
        per = part.options["per"]
        kind = REWARD_LOSSES.about(part.name).kind
        if per not in ("group", "pair"):
            yield f"{key}: options.per = {per!r} is none of group, pair"
        elif kind not in ("pair", "tie"):
            yield (
                f"{key}: options.per = {per!r} changes nothing: the loss is of kind {kind}, and "
                "has no pairs to average; leave it out"
            )


def _unfit_heads(settings: RewardModelConfig) -> Iterator[str]:
    for part, head in losses_of_heads(settings):
        fitting = REWARD_LOSSES.about(part.name).heads
        kind = head_kind(settings, head)
        if fitting is not None and kind not in fitting:
            yield (
                f"reward_model.losses: {part.name!r} does not fit head {head!r} of kind {kind}; "
                f"it fits {', '.join(sorted(fitting))}. Set head of the loss, or kind of the head"
            )


def _untrained(settings: RewardModelConfig) -> Iterator[str]:
    """Yield heads, or outputs of heads, that no loss reads."""
    trained: dict[str, list[str]] = {}
    for part, head in losses_of_heads(settings):
        trained.setdefault(head, []).append(part.name)
    for head in settings.heads:
        names = trained.get(head.name, [])
        # the mixture trains the heads that it combines
        if not names and not settings.gate:
            yield (
                f"reward_model.heads: no loss reads head {head.name!r}, so that its score would "
                f"stay random; add a loss with head: {head.name}, or leave the head out"
            )
        if head.kind == "gaussian" and names and not any(map(_may_read_outputs, names)):
            yield (
                f"reward_model.heads: no loss reads the variance of head {head.name!r}; add "
                "gaussian_nll or thurstone, or take kind: linear"
            )


def _mixture(settings: RewardModelConfig) -> Iterator[str]:
    readers = [part.name for part in settings.losses if part.head == MIXTURE]
    named = any(head.name == MIXTURE for head in settings.heads)
    if settings.gate and named:
        yield (
            f"reward_model.heads: {MIXTURE!r} is the name of the combined score of gate; call the "
            "head something else"
        )
    elif settings.gate and not readers:
        yield (
            "reward_model.gate = True: no loss reads the combined score, so that the gate would "
            f"stay random; add a loss with head: {MIXTURE}, e.g. bradley_terry"
        )
    elif readers and not settings.gate and not named:
        yield (
            f"reward_model.losses: {readers[0]!r} reads head {MIXTURE!r}, which is the combined "
            "score of gate; set gate: true, or name a head"
        )


def _logit_scale(settings: RewardModelConfig) -> Iterator[str]:
    """Yield learned scales of scores that no loss reads."""
    for head in settings.heads:
        if not head.logit_scale:
            continue
        if head.kind == "ensemble":
            yield (
                f"reward_model.heads: logit_scale of {head.name!r} changes nothing: losses train "
                "each member of an ensemble, and not their mean; leave it out"
            )
            continue
        names = [part.name for part, name in losses_of_heads(settings) if name == head.name]
        if names and all(_reads_outputs(name) for name in names):
            yield (
                f"reward_model.heads: logit_scale of {head.name!r} changes nothing: "
                f"{', '.join(names)} reads the outputs of the head, and not its score; leave it out"
            )


def _moved_signs(settings: RewardModelConfig) -> Iterator[str]:
    """Yield a problem if the saved scores have another sign than the trained ones."""
    if settings.normalize != "none" and any(part.name == "cost_sign" for part in settings.losses):
        yield (
            f"reward_model.normalize = {settings.normalize!r} shifts the scores of the saved model, "
            "and the loss 'cost_sign' trains their sign: a score above 0 would no longer mean "
            "unsafe; set reward_model.normalize=none, or leave cost_sign out of "
            "reward_model.losses"
        )


def _reads_outputs(name: str) -> bool:
    """Return whether a built-in loss reads the outputs of a head, and not its score."""
    return name in REWARD_LOSSES and "outputs" in REWARD_LOSSES.about(name).needs


def _may_read_outputs(name: str) -> bool:
    """Return whether a loss reads the outputs of a head, or may do so."""
    return name not in REWARD_LOSSES or _reads_outputs(name)
