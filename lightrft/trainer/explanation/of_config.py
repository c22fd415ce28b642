"""Explain the objective of any settings that train."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from lightrft.algorithms.aggregation import AGGREGATIONS
from lightrft.algorithms.preference.losses import PREFERENCE_LOSSES
from lightrft.algorithms.preference.reference_source import Source, reference_source
from lightrft.algorithms.preference.requirements import (
    PreferenceRequirements,
    preference_requirements,
)
from lightrft.algorithms.process_reward.losses import STEP_LOSSES
from lightrft.algorithms.reward_model.losses import REWARD_LOSSES
from lightrft.algorithms.reward_model.requirements import losses_of_heads
from lightrft.algorithms.validate.component_kinds import COMPONENT_KINDS
from lightrft.config.preference.presets import (
    PREFERENCE_PAPERS,
    PREFERENCE_PRESETS,
    PREFERENCE_SOURCES,
)
from lightrft.config.preference.sections import PreferenceConfig
from lightrft.config.presets import source_of
from lightrft.config.read_by import read_by
from lightrft.config.reward_model.sections import RewardLossConfig, StepLossConfig
from lightrft.config.rollout import Keep, SelectConfig
from lightrft.config.train import DistillationConfig, DistillTeacherConfig
from lightrft.config.verbs import (
    DistillVerbConfig,
    DPOConfig,
    GivenDataConfig,
    IterateConfig,
    PRMVerbConfig,
    RLConfig,
    RMConfig,
    SupervisedConfig,
    TrainingConfig,
)
from lightrft.models.divergence.kinds import DIVERGENCES
from lightrft.models.loading.adapter_base import adds_adapters, has_adapters
from lightrft.trainer.explanation.effective_settings import (
    EffectiveSetting,
    effective,
    flat,
    set_by,
)
from lightrft.trainer.explanation.explain import Explanation, Line, symbol_of, with_router_loss
from lightrft.trainer.explanation.step_workload import Forward, Role
from lightrft.utils.registry import About

LEARNED = "the loss, forward and backward"


def explained(config: TrainingConfig | IterateConfig, sources: Mapping[str, str]) -> Explanation:
    """Explain the objective of ``config``. ``sources`` gives the file or argument of each key.

    Raises ``ConfigError`` for settings that cannot work.
    """
    # Each kind imports more than the others need.
    if isinstance(config, RLConfig):
        from lightrft.trainer.checks.check_rollout import check_algorithm
        from lightrft.trainer.explanation.explain import explain

        check_algorithm(config)
        return explain(config, sources)
    if isinstance(config, IterateConfig):
        return explain_iterate(config, sources)
    if isinstance(config, DistillVerbConfig):
        return explain_distillation(config, sources)
    if isinstance(config, RMConfig):
        from lightrft.algorithms.reward_model.compatibility import check_reward_model

        check_reward_model(config.reward_model)
        return explain_reward_model(config, sources)
    if isinstance(config, PRMVerbConfig):
        from lightrft.algorithms.process_reward.objective import check_process_model

        check_process_model(config.process_model)
        return explain_process_model(config, sources)
    if isinstance(config, DPOConfig):
        from lightrft.algorithms.preference.compatibility import check_preference

        check_preference(config.preference)
    return explain_supervised(config, sources)


# Given and sampled responses

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
        numbers=general_settings(config, sources),
        gradient=("Assistant tokens get gradient; tokens of the prompt, users and tools do not.",),
        roles=(Role("policy", trained(config)),),
        forwards=(Forward("policy", 1, True, LEARNED),),
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
    found = tuple(_preference_numbers(config, sources))
    sampled = tuple(_sampled(config, requirements, sources))
    terms = [weighted(part.weight, part.name) for part in settings.losses]
    latex = [loss_latex(part.weight, part.name) for part in settings.losses]
    unit = UNITS[requirements.kind]
    return Explanation(
        title=settings.preset or "custom",
        paper=PREFERENCE_PAPERS.get(settings.preset or "", ""),
        objective=f"minimise  mean over {unit} of {' + '.join(terms)}",
        latex=rf"\min_\theta\ \mathbb E\big[{'+'.join(latex)}\big]",
        lines=(*_preference_lines(settings, found), *sampled),
        numbers=(
            *found,
            *(n for line in sampled for n in line.numbers),
            *general_settings(config, sources),
        ),
        gradient=tuple(_preference_gradient(config, requirements, source)),
        roles=tuple(_preference_roles(config, source)),
        forwards=tuple(_preference_forwards(requirements, source)),
    )


def weighted(weight: float, name: str) -> str:
    """Return ``name`` after its weight, unless this is 1."""
    return name if weight == 1 else f"{weight:g} {name}"


def loss_latex(weight: float, name: str, head: str = "") -> str:
    """Return the symbol of a loss for LaTeX.

    Args:
        weight: Weight of the loss.
        name: Its name.
        head: Its head, if there are several.
    """
    below = rf"_{{\mathrm{{{plain(head)}}}}}" if head else ""
    return weighted(weight, rf"L^{{\mathrm{{{plain(name)}}}}}{below}")


def plain(name: str) -> str:
    """Return ``name`` for LaTeX."""
    # Outside of formulas, LaTeX takes an underscore for an error.
    return name.replace("_", r"\_")


def _preference_lines(
    settings: PreferenceConfig, found: tuple[EffectiveSetting, ...]
) -> Iterator[Line]:
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
    numbers = effective({f"online.{name}": getattr(online, name) for name in read}, sources)
    formula = f"y_1 .. y_n ~ policy(. | x), n = online.group_size; {compared}"
    yield Line("responses", "online", About(formula, "", OAIF), numbers)


def _preference_numbers(
    config: DPOConfig, sources: Mapping[str, str]
) -> Iterator[EffectiveSetting]:
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
) -> tuple[EffectiveSetting, ...]:
    """Return the settings of other sections that change the result."""
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
    given = {key: value for key, value in values.items() if value is not None}
    return effective(given, sources)


def _preference_gradient(
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


def _preference_roles(config: DPOConfig, source: Source) -> Iterator[Role]:
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


def _preference_forwards(requirements: PreferenceRequirements, source: Source) -> Iterator[Forward]:
    if source in ("step", "adapters_off"):
        yield Forward("reference", 1, False, "log-probs")
    if requirements.kl:
        yield Forward("policy", 1, False, "log-probs of mismatched pairs")
        yield Forward("reference", 1, False, "log-probs of mismatched pairs")
    if requirements.whole_batch or requirements.shift or requirements.margin_stats:
        yield Forward("policy", 1, False, "log-probs of the whole batch")
    if requirements.sequence_kl:
        yield Forward("reference", 1, False, "distributions over the vocabulary")
    yield Forward("policy", 1, True, LEARNED)


# Reward models of responses and of steps

POOLING = {
    "last": "the state of the last token",
    "mean": "the mean of all states",
    "attention": "a learned attention over all states",
    "token": "the state of a learned token after the last one",
}
"""What heads read."""


STEP_SCORES = {
    "classes": "the softmax of two classes",
    "mlp": "the softmax of two classes of two layers",
    "linear": "the sigmoid of one output",
    "regression": "one output",
    "tokens": "the softmax of the logits of two tokens",
}
"""Score of a step, by kind of head."""


def explain_reward_model(config: RMConfig, sources: Mapping[str, str]) -> Explanation:
    """Explain the losses of ``config``. ``sources`` gives the file or argument of each key."""
    settings = config.reward_model
    values: dict[str, object] = {
        "heads": ", ".join(f"{head.name} ({head.kind})" for head in settings.heads),
        "pooling": settings.pooling,
        "layer": settings.layer,
        "normalize": settings.normalize,
    }
    if settings.gate:
        values["gate"] = True
    gradient = [
        f"Heads read {POOLING[settings.pooling]}, and get gradient with the model below them.",
        "Responses to one prompt share it: the prompt and its media are computed once.",
    ]
    if settings.layer != -1:
        gradient.append(f"Layers after layer {settings.layer} are not computed, and not saved.")
    if any(head.logit_scale for head in settings.heads):
        gradient.append("The learned scale multiplies scores in training alone.")
    values = {f"reward_model.{key}": value for key, value in values.items()}
    heads = [head for _, head in losses_of_heads(settings)]
    return _scored(config, "reward model", values, heads, gradient, sources)


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
    gradient = [
        f"The score of a step is {STEP_SCORES[settings.head]} at the end of the separator.",
        "Responses to one prompt of text share it: the prompt is computed once.",
    ]
    heads = [""] * len(settings.losses)
    return _scored(config, "process reward model", values, heads, gradient, sources)


def _scored(
    config: RMConfig | PRMVerbConfig,
    title: str,
    values: dict[str, object],
    heads: Sequence[str],
    gradient: Sequence[str],
    sources: Mapping[str, str],
) -> Explanation:
    """Explain the losses of scores.

    Args:
        config: The settings.
        title: What is trained.
        values: The settings of the model, by key.
        heads: Head of each loss, "" for a model with one.
        gradient: Sentences about what gets gradient.
        sources: The file or argument of each key.
    """
    section, registry = "process_model", STEP_LOSSES
    losses: Sequence[RewardLossConfig | StepLossConfig]
    if isinstance(config, RMConfig):
        section, registry, losses = "reward_model", REWARD_LOSSES, config.reward_model.losses
    else:
        losses = config.process_model.losses
    terms, latex, lines = [], [], []
    for i, (part, head) in enumerate(zip(losses, heads, strict=True)):
        options = flat(part.options).items()
        own = {f"{section}.losses.{i}.options.{key}": value for key, value in options}
        values |= own
        terms.append(weighted(part.weight, f"{part.name}({head})" if head else part.name))
        latex.append(loss_latex(part.weight, part.name, head))
        lines.append(Line("loss", part.name, registry.about(part.name), effective(own, sources)))
    return Explanation(
        title=title,
        paper="",
        objective=f"minimise  {' + '.join(terms)},  each a mean over the batch",
        latex=rf"\min_\theta\ {'+'.join(latex)}",
        lines=tuple(lines),
        numbers=(*effective(values, sources), *general_settings(config, sources)),
        gradient=tuple(gradient),
        roles=(Role(title, trained(config)),),
        forwards=(Forward(title, 1, True, LEARNED),),
    )


# Distillation

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
    found = tuple(_distill_numbers(settings, sources))
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
        lines=tuple(_distill_lines(settings, found)),
        numbers=found,
        gradient=tuple(_distill_gradient(settings)),
        roles=tuple(_distill_roles(config)),
        forwards=(
            Forward("teacher", 1, False, "distributions over the vocabulary"),
            Forward("student", 1, True, LEARNED),
        ),
    )
    return with_router_loss(explanation, config.model, sources)


def _distill_numbers(
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


def _distill_lines(
    settings: DistillationConfig, found: tuple[EffectiveSetting, ...]
) -> Iterator[Line]:
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


def _distill_gradient(settings: DistillationConfig) -> Iterator[str]:
    """Yield sentences about the tokens that receive gradient."""
    if settings.on_policy < 1:
        yield "Assistant tokens of given responses get gradient; prompt and user tokens do not."
    if settings.on_policy:
        yield "All tokens of sampled responses get gradient. Sampling itself gets none."
    yield "The teacher gets none."


def _distill_roles(config: DistillVerbConfig) -> Iterator[Role]:
    """Yield the models that a step asks."""
    sampled = ", and sampled from" if config.distill.on_policy else ""
    yield Role("student", f"{trained(config)}{sampled}")
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


# Rounds

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
    from lightrft.trainer.pipelines.rounds import RoundPlan, check_iterate

    check_iterate(config)
    plan = RoundPlan(config, 1)
    training = plan.training()
    own = {key.removeprefix(f"{training.verb}."): value for key, value in sources.items()}
    inner = explain_supervised(training, own)
    select = config.select
    read = read_by(SelectConfig)
    limits = {f"select.{n}": getattr(select, n) for n in LIMITS if read[n].has(select.keep)}
    rows = Line("rows", select.keep, About(SELECTIONS[select.keep]), effective(limits, sources))
    values = {
        "rounds": config.rounds,
        "samples": config.samples,
        "prompts_per_round": config.prompts_per_round or "all",
        "rows": config.rows,
        "sampling.temperature": config.sampling.temperature,
    }
    return replace(
        inner,
        title=f"{training.verb} on selected responses, rounds: {config.rounds}",
        objective=f"in each round, {inner.objective}",
        lines=(rows, *inner.lines),
        numbers=(*effective(values, sources), *inner.numbers),
        gradient=(*_iterate_gradient(config), *inner.gradient),
    )


def _iterate_gradient(config: IterateConfig) -> Iterator[str]:
    generator = config.generator.path
    if generator:
        yield f"{generator} generates in every round."
    else:
        yield "The model that the round before has trained generates, in round 1 the start model."
    start = "the start model" if config.train_from == "start" else "the model of the round before"
    yield f"The training of a round starts from {start}, with a new optimizer."
