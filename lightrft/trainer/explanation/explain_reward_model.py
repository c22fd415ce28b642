"""Explain the objectives of ``lightrft rm`` and ``lightrft prm``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lightrft.algorithms.process_reward.losses import STEP_LOSSES
from lightrft.algorithms.reward_model.losses import REWARD_LOSSES
from lightrft.algorithms.reward_model.requirements import losses_of_heads
from lightrft.config.reward_model.sections import RewardModelConfig
from lightrft.config.verbs import PRMVerbConfig, RMConfig
from lightrft.trainer.explanation.effective_settings import EffectiveSetting, flat, set_by
from lightrft.trainer.explanation.explain import Explanation, Line
from lightrft.trainer.explanation.explain_supervised import general_settings, plain, trained
from lightrft.trainer.explanation.step_workload import Forward, Role

POOLING = {
    "last": "the state of the last token",
    "mean": "the mean of all states",
    "attention": "a learned attention over all states",
    "token": "the state of a learned token after the last one",
}
"""What heads read."""


def explain_reward_model(config: RMConfig, sources: Mapping[str, str]) -> Explanation:
    """Explain the losses of ``config``. ``sources`` gives the file or argument of each key."""
    settings = config.reward_model
    found = tuple(_numbers(settings, sources))
    terms, latex = [], []
    for part, head in losses_of_heads(settings):
        factor = "" if part.weight == 1 else f"{part.weight:g} "
        terms.append(f"{factor}{part.name}({head})")
        latex.append(rf"{factor}L^{{\mathrm{{{plain(part.name)}}}}}_{{\mathrm{{{plain(head)}}}}}")
    return Explanation(
        title="reward model",
        paper="",
        objective=f"minimise  {' + '.join(terms)},  each a mean over the batch",
        latex=rf"\min_\theta\ {'+'.join(latex)}",
        lines=tuple(_lines(settings, found)),
        numbers=(*found, *general_settings(config, sources)),
        gradient=tuple(_gradient(settings)),
        roles=(Role("reward model", trained(config)),),
        forwards=(Forward("reward model", 1, True, "the loss, forward and backward"),),
    )


def _lines(settings: RewardModelConfig, found: tuple[EffectiveSetting, ...]) -> Iterator[Line]:
    for i, part in enumerate(settings.losses):
        prefix = f"reward_model.losses.{i}.options."
        own = tuple(number for number in found if number.key.startswith(prefix))
        yield Line("loss", part.name, REWARD_LOSSES.about(part.name), own)


def _numbers(settings: RewardModelConfig, sources: Mapping[str, str]) -> Iterator[EffectiveSetting]:
    """Yield the settings of the heads and losses that are in force."""
    values: dict[str, object] = {
        "heads": ", ".join(f"{head.name} ({head.kind})" for head in settings.heads),
        "pooling": settings.pooling,
        "layer": settings.layer,
        "normalize": settings.normalize,
    }
    if settings.gate:
        values["gate"] = True
    for i, part in enumerate(settings.losses):
        for key, value in flat(part.options).items():
            values[f"losses.{i}.options.{key}"] = value
    yield from _effective({f"reward_model.{key}": v for key, v in values.items()}, sources)


def _gradient(settings: RewardModelConfig) -> Iterator[str]:
    yield f"Heads read {POOLING[settings.pooling]}, and get gradient with the model below them."
    yield "Responses to one prompt share it: the prompt and its media are computed once."
    if settings.layer != -1:
        yield f"Layers after layer {settings.layer} are not computed, and not saved."
    if any(head.logit_scale for head in settings.heads):
        yield "The learned scale multiplies scores in training alone."


STEP_SCORES = {
    "classes": "the softmax of two classes",
    "mlp": "the softmax of two classes of two layers",
    "linear": "the sigmoid of one output",
    "regression": "one output",
    "tokens": "the softmax of the logits of two tokens",
}
"""Score of a step, by kind of head."""


def explain_process_model(config: PRMVerbConfig, sources: Mapping[str, str]) -> Explanation:
    """Explain the losses of ``config``. ``sources`` gives the file or argument of each key."""
    settings = config.process_model
    values: dict[str, object] = {
        "process_model.head": settings.head,
        "process_model.threshold": settings.threshold,
        "process_model.last_step_only": settings.last_step_only,
        "data.separator": repr(config.data.separator),
    }
    if settings.head == "tokens":
        values |= {"process_model.right": settings.right, "process_model.wrong": settings.wrong}
    terms, latex, lines = [], [], []
    for i, part in enumerate(settings.losses):
        prefix = f"process_model.losses.{i}.options."
        own = {prefix + key: value for key, value in flat(part.options).items()}
        values |= own
        factor = "" if part.weight == 1 else f"{part.weight:g} "
        terms.append(f"{factor}{part.name}")
        latex.append(rf"{factor}L^{{\mathrm{{{plain(part.name)}}}}}")
        numbers = tuple(_effective(own, sources))
        lines.append(Line("loss", part.name, STEP_LOSSES.about(part.name), numbers))
    return Explanation(
        title="process reward model",
        paper="",
        objective=f"minimise  {' + '.join(terms)},  each a mean over the batch",
        latex=rf"\min_\theta\ {'+'.join(latex)}",
        lines=tuple(lines),
        numbers=(*_effective(values, sources), *general_settings(config, sources)),
        gradient=(
            f"The score of a step is {STEP_SCORES[settings.head]} at the end of the separator.",
            "Responses to one prompt of text share it: the prompt is computed once.",
        ),
        roles=(Role("process reward model", trained(config)),),
        forwards=(Forward("process reward model", 1, True, "the loss, forward and backward"),),
    )


def _effective(
    values: Mapping[str, object], sources: Mapping[str, str]
) -> Iterator[EffectiveSetting]:
    for key, value in values.items():
        yield EffectiveSetting(key, value, set_by(key, sources) or "default")
