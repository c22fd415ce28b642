"""Explain the rounds of ``lightrft iterate``, and the objective that each round trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from lightrft.config.read_by import read_by
from lightrft.config.rollout import Keep, SelectConfig
from lightrft.config.verbs import IterateConfig
from lightrft.trainer.explanation.effective_settings import EffectiveSetting, set_by
from lightrft.trainer.explanation.explain import Explanation, Line
from lightrft.trainer.explanation.explain_supervised import explain_supervised
from lightrft.trainer.pipelines.rounds import RoundPlan, check_iterate
from lightrft.utils.registry import About

SELECTIONS: dict[Keep, str] = {
    "all": "every response",
    "best": "y* = argmax_j r(x, y_j)",
    "correct": "{y_j : r(x, y_j) >= threshold}",
    "conditioned": "every (x with the statement of r(x, y_j), y_j)",
    "pairs": "(y_w, y_l) with r(x, y_w) - r(x, y_l) > margin",
    "ranked": "y_1, ..., y_n, ordered by r(x, y_j)",
    "self_play": "(y of the data, y of the model)",
    "labelled": "every (y_j, r(x, y_j) >= threshold)",
}
"""Rows of each value of ``select.keep``, of the responses y_1, ..., y_n to a prompt x."""

LIMITS = ("threshold", "margin")
"""Settings of the selection that its formula names."""


def explain_iterate(config: IterateConfig, sources: Mapping[str, str]) -> Explanation:
    """Explain the rounds of ``config``. ``sources`` gives the file or argument of each key.

    Raises ``ConfigError`` for settings with which some round could not work.
    """
    check_iterate(config)
    plan = RoundPlan(config, 1)
    training = plan.training()
    own = {key.removeprefix(f"{training.verb}."): value for key, value in sources.items()}
    inner = explain_supervised(training, own)
    return replace(
        inner,
        title=f"{training.verb} on selected responses, rounds: {config.rounds}",
        objective=f"in each round, {inner.objective}",
        lines=(*_lines(config, sources), *inner.lines),
        numbers=(*_numbers(config, sources), *inner.numbers),
        gradient=(*_gradient(config), *inner.gradient),
    )


def _lines(config: IterateConfig, sources: Mapping[str, str]) -> Iterator[Line]:
    """Yield the rows of a round, and the limits that they keep."""
    select = config.select
    limits = []
    for name in LIMITS:
        if read_by(SelectConfig)[name].has(select.keep):
            key = f"select.{name}"
            limits.append(
                EffectiveSetting(key, getattr(select, name), set_by(key, sources) or "default")
            )
    yield Line("rows", select.keep, About(SELECTIONS[select.keep], "", ""), tuple(limits))


def _numbers(config: IterateConfig, sources: Mapping[str, str]) -> Iterator[EffectiveSetting]:
    values = {
        "rounds": config.rounds,
        "samples": config.samples,
        "prompts_per_round": config.prompts_per_round or "all",
        "rows": config.rows,
        "sampling.temperature": config.sampling.temperature,
    }
    for key, value in values.items():
        yield EffectiveSetting(key, value, set_by(key, sources) or "default")


def _gradient(config: IterateConfig) -> Iterator[str]:
    generator = config.generator.path
    if generator:
        yield f"{generator} generates in every round."
    else:
        yield "The model that the round before has trained generates, in round 1 the start model."
    start = "the start model" if config.train_from == "start" else "the model of the round before"
    yield f"The training of a round starts from {start}, with a new optimizer."
