"""Explain the objective of ``lightrft distill`` as formulas with values and papers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lightrft.algorithms.aggregation import AGGREGATIONS
from lightrft.config.train import DistillationConfig
from lightrft.config.verbs import DistillVerbConfig
from lightrft.diagnostics.effective_settings import EffectiveSetting
from lightrft.diagnostics.explain import Explanation, Line, symbol_of
from lightrft.diagnostics.step_workload import Forward, Role
from lightrft.models.divergence_kinds import DIVERGENCES
from lightrft.utils.registry import About

GKD = "GKD, arXiv 2306.13649, algorithm 1"
TAILS = {
    "bucket": About(
        "pi and pi_teacher over the teacher's top_k tokens, and all other tokens as one outcome"
    ),
    "renormalised": About(
        "pi and pi_teacher given that the token is among the teacher's top_k tokens"
    ),
}
GIVEN = About(
    "NLL_t = -logp, at the tokens of given responses", r"\mathrm{NLL}_{i,t}=-\log\pi_\theta"
)


def explain_distillation(config: DistillVerbConfig, sources: Mapping[str, str]) -> Explanation:
    """Explain the loss of ``config``. ``sources`` gives the file or argument of each key."""
    settings = config.distill
    found = tuple(_numbers(settings, sources))
    inner, latex = "D_t", "D_{i,t}"
    if settings.nll_coef:
        inner = f"(D_t + {settings.nll_coef:g} NLL_t)"
        latex = rf"\big(D_{{i,t}}+{settings.nll_coef:g}\,\mathrm{{NLL}}_{{i,t}}\big)"
    aggregation = AGGREGATIONS.about(settings.aggregation)
    return Explanation(
        title="distill",
        paper=GKD if settings.on_policy else "Hinton et al., arXiv 1503.02531",
        objective=f"minimise  {aggregation.formula.replace('L_it', inner)}",
        latex=rf"\min_\theta\ {aggregation.latex.replace('L_{i,t}', latex)}",
        lines=tuple(_lines(settings, found)),
        numbers=found,
        gradient=tuple(_gradient(settings)),
        roles=tuple(_roles(config)),
        forwards=(
            Forward("teacher", 1, False, "distributions over the vocabulary"),
            Forward("student", 1, True, "the loss, forward and backward"),
        ),
    )


def _numbers(
    settings: DistillationConfig, sources: Mapping[str, str]
) -> Iterator[EffectiveSetting]:
    """Yield the settings that the loss reads."""
    idle = set()
    if settings.kind != "jsd":
        idle.add("beta")
    if settings.top_k is None:
        idle |= {"top_k", "tail"}
    for name, value in settings.model_dump().items():
        if name not in idle:
            key = f"distill.{name}"
            yield EffectiveSetting(key, value, sources.get(key, "default"))


def _lines(settings: DistillationConfig, found: tuple[EffectiveSetting, ...]) -> Iterator[Line]:
    def only(*names: str) -> tuple[EffectiveSetting, ...]:
        return tuple(n for n in found if symbol_of(n) in names and n.value is not None)

    divergence = DIVERGENCES.about(settings.kind)
    yield Line("teacher", settings.kind, divergence, only("beta", "temperature"))
    if settings.top_k is not None:
        yield Line("vocabulary", settings.tail, TAILS[settings.tail], only("top_k"))
    sampling = "with probability on_policy a step samples its responses, else it takes given ones"
    yield Line("responses", "mixture", About(sampling, "", GKD), only("on_policy"))
    if settings.nll_coef:
        yield Line("given responses", "nll", GIVEN, only("nll_coef"))
    aggregation = settings.aggregation
    yield Line("aggregation", aggregation, AGGREGATIONS.about(aggregation))


def _gradient(settings: DistillationConfig) -> Iterator[str]:
    """Yield sentences about the tokens that receive gradient."""
    if settings.on_policy < 1:
        yield "Assistant tokens of given responses get gradient; prompt and user tokens do not."
    if settings.on_policy:
        yield "All tokens of sampled responses get gradient. Sampling itself gets none."
    yield "The teacher gets none."


def _roles(config: DistillVerbConfig) -> Iterator[Role]:
    """Yield the models that are loaded."""
    trained = "its adapters are trained" if config.model.lora is not None else "trained"
    sampled = ", and sampled from" if config.distill.on_policy else ""
    yield Role("student", f"{trained}{sampled}")
    yield Role("teacher", "frozen; gives the distributions to learn")
