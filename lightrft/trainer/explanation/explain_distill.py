"""Explain the objective of ``lightrft distill`` as formulas with values and papers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lightrft.algorithms.aggregation import AGGREGATIONS
from lightrft.config.train import DistillationConfig, DistillTeacherConfig
from lightrft.config.verbs import DistillVerbConfig
from lightrft.models.divergence.kinds import DIVERGENCES
from lightrft.models.loading.adapter_base import adds_adapters, has_adapters
from lightrft.trainer.explanation.effective_settings import EffectiveSetting
from lightrft.trainer.explanation.explain import Explanation, Line, symbol_of, with_router_loss
from lightrft.trainer.explanation.step_workload import Forward, Role
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
ALIGNED = About(
    "a teacher with another tokenizer: D_t at the ends of spans of text where a token of both ends, "
    "with pi and pi_teacher times the probability of the earlier tokens of the span",
    "",
    "GOLD, the merge by the chain rule",
)
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
    explanation = Explanation(
        title="distill",
        paper=GKD if settings.on_policy else "",
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
    return with_router_loss(explanation, config.model, sources)


def _numbers(
    settings: DistillationConfig, sources: Mapping[str, str]
) -> Iterator[EffectiveSetting]:
    """Yield the settings that the loss reads."""
    reads = {
        "beta": settings.kind == "jsd",
        "tail": settings.top_k is not None,
        "nll_coef": settings.on_policy < 1,
        "refresh_decay": settings.refresh_every > 0,
    }
    for name, value in settings.model_dump().items():
        if value is not None and reads.get(name, True):
            key = f"distill.{name}"
            yield EffectiveSetting(key, value, sources.get(key, "default"))


def _lines(settings: DistillationConfig, found: tuple[EffectiveSetting, ...]) -> Iterator[Line]:
    def only(*names: str) -> tuple[EffectiveSetting, ...]:
        return tuple(number for number in found if symbol_of(number) in names)

    divergence = DIVERGENCES.about(settings.kind)
    yield Line("teacher", settings.kind, divergence, only("beta", "temperature"))
    if settings.kind == "uld":
        yield Line("tokens", "alignment", ALIGNED)
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
    """Yield the models that a step asks."""
    trained = "its adapters are trained" if has_adapters(config.model) else "trained"
    sampled = ", and sampled from" if config.distill.on_policy else ""
    yield Role("student", f"{trained}{sampled}")
    shown = "; sees other prompts than the student" if config.distill.teacher_sees_more else ""
    if config.teacher.path:
        yield Role("teacher", f"{_place(config.teacher)}{shown}")
    elif not config.teachers:
        yield Role("teacher", f"{_start_model(config)}{shown}")
    for source, teacher in config.teachers.items():
        yield Role("teacher", f"{_place(teacher)}, for rows of {source!r}{shown}")


def _place(teacher: DistillTeacherConfig) -> str:
    if teacher.url is not None:
        return f"served at {teacher.url}; gives its top k tokens"
    return f"frozen; {teacher.path}"


def _start_model(config: DistillVerbConfig) -> str:
    """Describe the teacher of self-distillation."""
    settings = config.distill
    if adds_adapters(config.model):
        return "the student itself with its adapters off; nothing is loaded"
    if not settings.refresh_every:
        return "frozen; the model that training starts from"
    decay = settings.refresh_decay
    mixed = f"{decay:g} teacher + {1 - decay:g} student"
    return f"starts as the student; every {settings.refresh_every} steps teacher <- {mixed}"
