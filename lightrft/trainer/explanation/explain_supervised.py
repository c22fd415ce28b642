"""Explain the objective of the verbs that train on given responses."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

from lightrft.algorithms.preference.losses import PREFERENCE_LOSSES
from lightrft.algorithms.preference.reference_source import Source, reference_source
from lightrft.algorithms.preference.requirements import (
    PreferenceRequirements,
    preference_requirements,
)
from lightrft.algorithms.validate.component_kinds import COMPONENT_KINDS
from lightrft.config.preference.presets import (
    PREFERENCE_PAPERS,
    PREFERENCE_PRESETS,
    PREFERENCE_SOURCES,
)
from lightrft.config.preference.sections import PreferenceConfig
from lightrft.config.presets import source_of
from lightrft.config.verbs import DPOConfig, GivenDataConfig, SupervisedConfig
from lightrft.models.loading.adapter_base import adds_adapters, has_adapters
from lightrft.trainer.explanation.effective_settings import EffectiveSetting, flat, set_by
from lightrft.trainer.explanation.explain import Explanation, Line, with_router_loss
from lightrft.trainer.explanation.step_workload import Forward, Role
from lightrft.utils.registry import About

SFT_LOSS = About(
    "L = -sum_t logp_t / N,  over the N trained tokens of the batch",
    r"L=-\frac1N\sum_{i,t}\log\pi_\theta(y_{i,t}\mid x_i,y_{i,<t})",
    "maximum likelihood",
)
OAIF = "OAIF, arXiv 2402.04792"
UNITS = {"pair": "pairs", "labelled": "responses", "ranked": "groups"}
"""What the losses of each kind of data are averaged over."""


def explain_supervised(config: SupervisedConfig, sources: Mapping[str, str]) -> Explanation:
    """Explain the loss of ``config``. ``sources`` gives the file or argument of each key."""
    if isinstance(config, DPOConfig):
        return with_router_loss(explain_preference(config, sources), config.model, sources)
    explanation = Explanation(
        title=config.verb,
        paper="",
        objective="minimise  L",
        latex=r"\min_\theta\ L",
        lines=(Line("loss", "sft", SFT_LOSS),),
        numbers=tuple(general_settings(config, sources)),
        gradient=("Assistant tokens get gradient; tokens of the prompt, users and tools do not.",),
        roles=(Role("policy", trained(config)),),
        forwards=(Forward("policy", 1, True, "the loss, forward and backward"),),
    )
    return with_router_loss(explanation, config.model, sources)


def explain_preference(config: DPOConfig, sources: Mapping[str, str]) -> Explanation:
    """Explain the preference losses of ``config``, their modifiers and the reference."""
    settings = config.preference
    requirements = preference_requirements(settings)
    source = reference_source(
        settings,
        requirements,
        adapters=adds_adapters(config.model),
        path=config.reference,
        sees_all=config.train.steps is None and config.train.epochs >= 1,
        sampled=bool(config.online.group_size),
    )
    found = tuple(_numbers(config, sources))
    sampled = tuple(_sampled(config, requirements, sources))
    terms = [_term(part.weight, part.name) for part in settings.losses]
    latex = [
        _term(part.weight, rf"L^{{\mathrm{{{plain(part.name)}}}}}") for part in settings.losses
    ]
    unit = UNITS[requirements.kind]
    return Explanation(
        title=settings.preset or "custom",
        paper=PREFERENCE_PAPERS.get(settings.preset or "", ""),
        objective=f"minimise  mean over {unit} of {' + '.join(terms)}",
        latex=rf"\min_\theta\ \mathbb E\big[{'+'.join(latex)}\big]",
        lines=(*_lines(settings, found), *sampled),
        numbers=(
            *found,
            *(n for line in sampled for n in line.numbers),
            *general_settings(config, sources),
        ),
        gradient=tuple(_gradient(config, requirements, source)),
        roles=tuple(_roles(config, source)),
        forwards=tuple(_forwards(requirements, source)),
    )


def _term(weight: float, name: str) -> str:
    return name if weight == 1 else f"{weight:g} {name}"


def plain(name: str) -> str:
    """Return ``name`` for LaTeX."""
    # Outside of formulas, LaTeX takes an underscore for an error.
    return name.replace("_", r"\_")


def _lines(settings: PreferenceConfig, found: tuple[EffectiveSetting, ...]) -> Iterator[Line]:
    shared = {number.key.removeprefix("preference."): number for number in found}
    for i, part in enumerate(settings.losses):
        about = PREFERENCE_LOSSES.about(part.name)
        own = [shared[name] for name in ("beta", "label_smoothing") if name in about.reads]
        own += [n for key, n in shared.items() if key.startswith(f"losses.{i}.options.")]
        yield Line("loss", part.name, about, tuple(own))
    divergence = settings.f_divergence
    if divergence.kind != "reverse_kl":
        formula = {
            "forward_kl": "f(d) = -exp(-d)",
            "js": "f(d) = log s(d)",
            "alpha": "f(d) = exp((alpha - 1) d) / (alpha - 1)",
        }[divergence.kind]
        yield Line("divergence", divergence.kind, About(formula, "", "f-DPO, arXiv 2309.16240"))
    if settings.ld_alpha != 1:
        formula = "tokens past the length of the shorter response count ld_alpha"
        yield Line("tokens", "LD-DPO", About(formula, "", "LD-DPO, arXiv 2409.06411"))
    if settings.sampo:
        formula = "as many random tokens of the longer response count as the shorter one has"
        yield Line("tokens", "SamPO", About(formula, "", "SamPO, arXiv 2406.10957"))
    if settings.wpo:
        formula = "L <- L min(wpo_cap, w_w w_l),  w = exp(mean_t (logp_t - log sum_v p_tv^2))"
        yield Line("weights", "WPO", About(formula, "", "WPO, arXiv 2406.11827, eq. 2"))
    reference = settings.reference
    if reference.refresh_every:
        decay = reference.refresh_decay
        formula = (
            f"every {reference.refresh_every} steps ref <- {decay:g} ref + {1 - decay:g} policy"
        )
        yield Line("reference", "moving", About(formula, "", "TR-DPO, arXiv 2404.09656"))


def _sampled(
    config: DPOConfig, requirements: PreferenceRequirements, sources: Mapping[str, str]
) -> Iterator[Line]:
    """Yield how responses are sampled and compared; nothing for given responses."""
    online = config.online
    if not online.group_size:
        return
    compared = {
        "pair": "pair all responses with different rewards",
        "ranked": "rank them by reward",
        "labelled": "a response is desirable if its reward is above the mean of its group",
    }[requirements.kind]
    read = ["group_size", "max_rounds", "missing_eos_penalty"]
    if requirements.kind == "pair":
        read.append("pairs")
        if online.pairs == "best_worst":
            compared = "pair the response of the highest reward with that of the lowest"
    elif requirements.kind == "labelled" and online.threshold is not None:
        read.append("threshold")
        compared = "a response is desirable if its reward reaches online.threshold"
    numbers: list[EffectiveSetting] = []
    for name in read:
        key = f"online.{name}"
        numbers.append(
            EffectiveSetting(key, getattr(online, name), set_by(key, sources) or "default")
        )
    formula = f"y_1 .. y_n ~ policy(. | x), n = online.group_size; {compared}"
    yield Line("responses", "online", About(formula, "", OAIF), tuple(numbers))


def _numbers(config: DPOConfig, sources: Mapping[str, str]) -> Iterator[EffectiveSetting]:
    """Yield the settings of ``preference`` that the losses read, with their origin."""
    settings = config.preference
    preset = settings.preset or ""
    in_preset = flat(PREFERENCE_PRESETS.get(preset, {}))
    for key, value in _in_force(settings).items():
        given = set_by(f"preference.{key}", sources)
        if given:
            origin = given
        elif key in in_preset:
            is_number = isinstance(value, int | float)
            cited = source_of(preset, key, PREFERENCE_SOURCES) if is_number else None
            origin = f"preset {preset}: {cited}" if cited else f"preset {preset}"
        else:
            origin = "default"
        yield EffectiveSetting(f"preference.{key}", value, origin)


def _in_force(settings: PreferenceConfig) -> dict[str, object]:
    """Return the settings that act, by key below ``preference``."""
    row = COMPONENT_KINDS["preference"]
    reads: set[str] = set()
    found: dict[str, object] = {}
    for i, part in enumerate(settings.losses):
        reads |= PREFERENCE_LOSSES.about(part.name).reads
        if len(settings.losses) > 1:
            found[f"losses.{i}.weight"] = part.weight
        defaults = row.options(PREFERENCE_LOSSES[part.name])
        for name, default in {**defaults, **part.options}.items():
            if default is not inspect.Parameter.empty and default is not None:
                found[f"losses.{i}.options.{name}"] = default
    for name in ("beta", "label_smoothing"):
        if name in reads:
            found[name] = getattr(settings, name)
    divergence = settings.f_divergence
    if divergence.kind != "reverse_kl":
        found["f_divergence.kind"] = divergence.kind
    if divergence.kind == "alpha":
        found["f_divergence.alpha"] = divergence.alpha
    if settings.ld_alpha != 1:
        found["ld_alpha"] = settings.ld_alpha
    if settings.wpo:
        found["wpo_cap"] = settings.wpo_cap
    return found


def general_settings(
    config: GivenDataConfig, sources: Mapping[str, str]
) -> Iterator[EffectiveSetting]:
    """Yield the settings of other sections that change the result."""
    values = {
        "batch_size": config.batch_size,
        "max_tokens": config.max_tokens,
        "optimizer.lr": config.optimizer.lr,
        "train.epochs": config.train.epochs,
        "train.steps": config.train.steps,
    }
    if isinstance(config, DPOConfig) and config.online.group_size:
        # It limits given responses.
        del values["max_tokens"]
        values["sampling.temperature"] = config.sampling.temperature
        values["sampling.max_new_tokens"] = config.sampling.max_new_tokens
    for key, value in values.items():
        if value is not None:
            yield EffectiveSetting(key, value, set_by(key, sources) or "default")


def _gradient(
    config: DPOConfig, requirements: PreferenceRequirements, source: Source
) -> Iterator[str]:
    if config.online.group_size:
        yield "All tokens of the compared responses get gradient. Sampling itself gets none."
        yield "A group without different rewards gives no example; other prompts replace it."
    else:
        yield "Assistant tokens of the responses get gradient; prompt, user and tool tokens do not."
    yield "Responses to one prompt share it: the prompt and its media are computed once."
    if requirements.whole_batch or requirements.shift or requirements.margin_stats:
        yield (
            "The loss compares the whole batch: a pass without gradient computes all log-probs, "
            "and the derivative in each of them weights the tokens of a second pass."
        )
    if requirements.kl:
        yield "Mismatched pairs of prompt and response are computed without gradient."
    if source == "none":
        yield "No loss reads a reference: none is loaded or run."
    if config.preference.wpo:
        yield "The weights of WPO carry no gradient."


def trained(config: GivenDataConfig) -> str:
    """Return what of the model is trained."""
    return "its adapters are trained" if has_adapters(config.model) else "trained"


def _roles(config: DPOConfig, source: Source) -> Iterator[Role]:
    sampled = ", and sampled from" if config.online.group_size else ""
    yield Role("policy", f"{trained(config)}{sampled}")
    name = config.reference or "the model that training starts from"
    what = {
        "cached": f"{name}; its log-probs are computed once and kept, then it is dropped",
        "step": f"frozen; {name}",
        "adapters_off": "the policy itself with its adapters off; nothing is loaded",
    }
    if source != "none":
        yield Role("reference", what[source])


def _forwards(requirements: PreferenceRequirements, source: Source) -> Iterator[Forward]:
    if source in ("step", "adapters_off"):
        yield Forward("reference", 1, False, "log-probs")
    if requirements.kl:
        yield Forward("policy", 1, False, "log-probs of mismatched pairs")
        yield Forward("reference", 1, False, "log-probs of mismatched pairs")
    if requirements.whole_batch or requirements.shift or requirements.margin_stats:
        yield Forward("policy", 1, False, "log-probs of the whole batch")
    if requirements.sequence_kl:
        yield Forward("reference", 1, False, "distributions over the vocabulary")
    yield Forward("policy", 1, True, "the loss, forward and backward")
