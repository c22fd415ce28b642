"""Explain the effective objective as formulas with values and papers, read from the registries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from lightrft.algorithms.constrained.lagrangian import CONSTRAINED, MULTIPLIER
from lightrft.algorithms.requirements import Requirements
from lightrft.algorithms.sample_selection import SELECTIONS
from lightrft.algorithms.validate.component_kinds import COMPONENT_KINDS
from lightrft.config.algorithm import AlgorithmConfig, LossConfig, NormalizeConfig
from lightrft.config.model import TrainedModelConfig
from lightrft.config.presets import PAPERS
from lightrft.config.verbs import RLConfig
from lightrft.models.divergence.kinds import DIVERGENCES
from lightrft.rollout.curriculum import CURRICULA
from lightrft.trainer.explanation.effective_settings import EffectiveSetting, effective, numbers
from lightrft.trainer.explanation.step_workload import (
    Forward,
    Role,
    forward_passes,
    gradient,
    roles,
)
from lightrft.utils.registry import About

TERMS_SCALED = r"R=\sum_k w_k\frac{x_k-\operatorname{mean}x_k}{\operatorname{std}x_k+\epsilon}"
WHITENED = (
    r"\hat A\leftarrow\frac{\hat A-\operatorname{mean}\hat A}{\operatorname{std}\hat A+\epsilon}"
)
OF_TOKEN = ("rho_t = exp(logp - logp_old)", r"\rho_t=\pi_\theta/\pi_{old}")
RATIOS = {
    "sequence": (
        "rho_t = exp( mean_t (logp - logp_old) ), one for the response",
        r"\rho_t=\exp\!\Big(\frac1{l_i}\sum_t\log\frac{\pi_\theta}{\pi_{old}}\Big)",
    ),
    "sequence_token": (
        "rho_t = sg( exp( mean_t (logp - logp_old) ) ) exp(logp - sg(logp))",
        r"\rho_t=\operatorname{sg}\!\Big[\exp\!\Big(\frac1{l_i}\sum_t\log\frac{\pi_\theta}{\pi_{old}}\Big)\Big]"
        r"\frac{\pi_\theta}{\operatorname{sg}[\pi_\theta]}",
    ),
}
"""Forms of ``loss.ratio`` that replace the token ratio in the formula of a loss."""
CLIPPED_VALUE = (
    r"\max\!\big((V_t-\hat R_t)^2,\ (\operatorname{clip}(V_t,V_{old}-c,V_{old}+c)-\hat R_t)^2\big)"
)
SAMPLED = About(
    "A_t <- A_t - coef (logp_old - logp_teacher)",
    r"\hat A_t\leftarrow\hat A_t-\lambda\,(\log\pi_{old}-\log\pi_T)",
    "Thinking Machines, On-Policy Distillation, 2025; GKD, arXiv 2306.13649",
)
"""The form ``sampled`` of distillation.

The log-ratio is the reward of its own token only. No discount propagates it to earlier tokens.
"""
IMPLICIT = About(
    "p_t = beta (logp_process - logp_ref)",
    r"p_t=\beta\,(\log\pi_\phi-\log\pi_{ref})",
    "PRIME, arXiv 2502.01456; Free Process Rewards, arXiv 2412.01981",
)
OUTCOME_LOSS = About(
    "-o log sigma(sum_t p_t) - (1 - o) log sigma(-sum_t p_t), mean over responses,  o = 1[R >= "
    "threshold]",
    r"-o\log\sigma\big(\textstyle\sum_tp_t\big)-(1-o)\log\sigma\big(-\sum_tp_t\big),\quad o=\mathbb 1[R\ge\tau]",
    "PRIME, arXiv 2502.01456",
)
ROUTER = About(
    "L_router = E sum_e f_e P_e,  f_e = choices of expert e / tokens,  P_e = mean probability of "
    "expert e, over the tokens of all routers in the optimizer step; f_e has no gradient",
    r"L_{\mathrm{router}}=E\sum_ef_eP_e,\quad f_e=\operatorname{mean}_t\mathbb 1[e\in\mathcal T_t],"
    r"\quad P_e=\operatorname{mean}_tp_t(e)",
    "Switch Transformers, arXiv 2101.03961, eq. 4 to 6",
)
PTX = About(
    "coef * mean over the tokens of a separate batch of -logp",
    r"\gamma\,\operatorname{mean}_{(x,t)\sim\mathcal D}\big[-\log\pi_\theta(x_t)\big]",
    "PPO-ptx: InstructGPT, arXiv 2203.02155, eq. 2, there summed over the tokens of a text",
)
SYMBOLS = {
    "clip_low": r"\epsilon_l",
    "clip_high": r"\epsilon_h",
    "gamma": r"\gamma",
    "gae_lambda": r"\lambda",
    "eps": r"\epsilon",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One part of the objective: its kind, name, formulas, and the values in them."""

    part: str
    name: str
    about: About
    numbers: tuple[EffectiveSetting, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """The result of ``lightrft explain``."""

    title: str
    paper: str
    objective: str
    latex: str
    lines: tuple[Line, ...]
    numbers: tuple[EffectiveSetting, ...]
    gradient: tuple[str, ...]
    roles: tuple[Role, ...]
    forwards: tuple[Forward, ...]
    prompts: tuple[tuple[str, str], ...] = ()


def explain(config: RLConfig, sources: Mapping[str, str]) -> Explanation:
    """Explain the algorithm of ``config``. ``sources`` gives the file or argument of each key."""
    algorithm = config.algorithm
    terms = list(_terms(algorithm))
    aggregation = COMPONENT_KINDS["aggregation"].registry.about(algorithm.aggregation)
    inner = " ".join(text for text, _ in terms)
    inner_latex = "".join(latex for _, latex in terms)
    # The aggregation applies to the whole sum.
    if len(terms) > 1:
        inner = f"({inner})"
        inner_latex = rf"\big({inner_latex}\big)"
    objective = aggregation.formula.replace("L_it", inner)
    full = aggregation.latex.replace("L_{i,t}", inner_latex)
    if algorithm.positive_nll.coef:
        objective += f" + {algorithm.positive_nll.coef:g} NLL"
        full += rf"+{algorithm.positive_nll.coef:g}\,\mathrm{{NLL}}"
    found = numbers(config, sources)
    explanation = Explanation(
        title=algorithm.preset or "custom",
        paper=PAPERS.get(algorithm.preset or "", ""),
        objective=f"minimise  {objective}",
        latex=rf"\min_\theta\ {full}",
        lines=tuple(_lines(config, found)),
        numbers=found,
        gradient=tuple(gradient(config)),
        roles=tuple(roles(config)),
        forwards=tuple(forward_passes(config)),
    )
    return with_router_loss(explanation, config.model, sources)


def with_router_loss(
    explanation: Explanation, model: TrainedModelConfig, sources: Mapping[str, str]
) -> Explanation:
    """Add the load-balancing loss of experts to an explanation, if its coefficient is set.

    Args:
        explanation: The explanation of the other terms.
        model: Settings of the trained model.
        sources: The file or argument of each key.
    """
    coef, key = model.router_aux_loss_coef, "model.router_aux_loss_coef"
    if not coef:
        return explanation
    number = effective({key: coef}, sources)[0]
    forwards: list[Forward] = []
    for forward in explanation.forwards:
        if forward.gradient and forward.model in ("policy", "student"):
            counts = "counts of chosen experts, before each optimizer step"
            forwards.append(replace(forward, gradient=False, what=counts))
        forwards.append(forward)
    return replace(
        explanation,
        objective=f"{explanation.objective} + {coef:g} L_router",
        latex=rf"{explanation.latex}+{coef:g}\,L_{{\mathrm{{router}}}}",
        lines=(*explanation.lines, Line("experts", "load balance", ROUTER, (number,))),
        numbers=(*explanation.numbers, number),
        forwards=tuple(forwards),
    )


def _terms(algorithm: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    """Yield the terms that are aggregated, as text and as LaTeX."""
    yield "L_it", "L_{i,t}"
    kl = algorithm.kl
    if kl.used and kl.where == "loss":
        ratio, latex = ("rho_t ", r"\rho_t") if kl.weighted else ("", "")
        yield f"+ {kl.coef:g} {ratio}kl_t", rf"+{kl.coef:g}\,{latex}k_{{i,t}}"
    if algorithm.policy_drift.coef:
        yield (
            f"+ {algorithm.policy_drift.coef:g} drift_t",
            rf"+{algorithm.policy_drift.coef:g}\,\delta_{{i,t}}",
        )
    if algorithm.distill.whole:
        yield f"+ {algorithm.distill.coef:g} D_t", rf"+{algorithm.distill.coef:g}\,D_{{i,t}}"
    entropy = algorithm.entropy
    if entropy.target is not None:
        yield "- alpha H_t", r"-\alpha\,H_{i,t}"
    elif entropy.coef:
        sign, size = ("-", entropy.coef) if entropy.coef > 0 else ("+", -entropy.coef)
        yield f"{sign} {size:g} H_t", rf"{sign}{size:g}\,H_{{i,t}}"


def _lines(config: RLConfig, found: tuple[EffectiveSetting, ...]) -> Iterator[Line]:
    algorithm = config.algorithm
    yield from _scales(algorithm.normalize, _below("algorithm.normalize", found))
    yield from _listed("shaping", "shaping", algorithm, found)
    yield from _token_rewards(algorithm, found)
    yield from _advantage(algorithm, found)
    by_teacher = _below("algorithm.distill", found)
    if algorithm.distill.kind == "sampled":
        yield Line("teacher", "sampled", SAMPLED, by_teacher)
    if algorithm.distill.whole:
        kind = algorithm.distill.kind
        yield Line("teacher", kind, DIVERGENCES.about(kind), by_teacher)
    yield from _policy_loss(algorithm.loss, _below("algorithm.loss", found))
    kl = algorithm.kl
    if kl.used:
        own = _below("algorithm.kl", found)
        symbol = ("kl_t", "k_{i,t}")
        yield _distance(f"kl in the {kl.where}", kl.estimator, symbol, TO_REFERENCE, own)
    if algorithm.policy_drift.coef:
        yield _drift(algorithm, _below("algorithm.policy_drift", found))
    yield from _other_terms(algorithm, found)
    yield from _listed("correction of L", "correction", algorithm, found)
    yield from _listed("token mask of L", "token_mask", algorithm, found)
    aggregation = algorithm.aggregation
    yield Line(
        "aggregation", aggregation, COMPONENT_KINDS["aggregation"].registry.about(aggregation)
    )
    if config.ptx.coef:
        yield Line("next to the objective", "ptx", PTX, _only("coef", _below("ptx", found)))
    yield from _listed("filter", "filter", algorithm, found)
    select = config.rollout.select
    if select is not None:
        own = _below("rollout.select", found)
        yield Line("selection", select.name, SELECTIONS.about(select.name), own)
    curriculum = config.rollout.curriculum
    if curriculum is not None:
        own = _below("rollout.curriculum", found)
        yield Line("prompts", curriculum.name, CURRICULA.about(curriculum.name), own)


def _token_rewards(
    algorithm: AlgorithmConfig, found: tuple[EffectiveSetting, ...]
) -> Iterator[Line]:
    """Yield the rewards of tokens: the outcome with its KL penalty, and process rewards."""
    formula = "r_t = 1[t is the last sampled token] R"
    latex = r"r_t=\mathbb 1[t=T]\,R"
    kl = algorithm.kl
    if kl.used and kl.where == "reward":
        formula += f" - {kl.coef:g} kl_t"
        latex += rf"-{kl.coef:g}\,k_{{i,t}}"
    yield Line("token reward", "outcome", About(formula, latex))
    if Requirements.of(algorithm).prm:
        own = _below("prm", found)
        yield Line("token reward", "prm", IMPLICIT, _only("beta", own))
        threshold = _only("threshold", own)
        yield Line("loss of the process model", "outcome", OUTCOME_LOSS, threshold)


def _constraints(algorithm: AlgorithmConfig, found: tuple[EffectiveSetting, ...]) -> Iterator[Line]:
    """Yield the advantages of costs, their combination with the reward's, and the multipliers."""
    settings, kl = algorithm.lagrangian, algorithm.kl
    if not settings.costs:
        return
    formula = "c_k,t = 1[t is the last sampled token] C_k"
    latex = r"c_{k,t}=\mathbb 1[t=T]\,C_k"
    if kl.used and kl.where == "reward":
        formula += f" + {kl.coef:g} kl_t"
        latex += rf"+{kl.coef:g}\,k_{{i,t}}"
    formula += ";  A_C,k as A, from c_k"
    latex += r",\quad \hat A_{C,k}=\hat A(c_k)"
    names = ", ".join(cost.name for cost in settings.costs)
    own = _below("algorithm.lagrangian", found)
    yield Line("costs", names, About(formula, latex, CONSTRAINED.paper))
    yield Line("advantage", "constrained", CONSTRAINED)
    fixed = About("lambda_k = init in every step", r"\lambda_k=\lambda_0")
    yield Line("multiplier", "lambda", MULTIPLIER if settings.lr else fixed, own)


def _advantage(algorithm: AlgorithmConfig, found: tuple[EffectiveSetting, ...]) -> Iterator[Line]:
    """Yield the advantage, its costs and its whitening. ``eps`` is a setting of both."""
    settings = algorithm.advantage
    about = COMPONENT_KINDS["advantage"].registry.about(settings.name)
    own = _below("algorithm.advantage", found)
    own = tuple(number for number in own if symbol_of(number) != "clip")
    # Then only the whitening below divides by it.
    if "eps" not in about.reads:
        own = tuple(number for number in own if symbol_of(number) != "eps")
    yield Line("advantage", settings.name, about, own)
    yield from _constraints(algorithm, found)
    if settings.normalize != "none":
        over = f"over all trained tokens of the {settings.normalize}"
        eps = tuple(number for number in found if number.key == "algorithm.advantage.eps")
        whitening = About(f"A <- (A - mean A) / (std A + eps), {over}", WHITENED)
        yield Line("advantage", "whiten", whitening, eps)
    if settings.clip is not None:
        bound = tuple(number for number in found if number.key == "algorithm.advantage.clip")
        yield Line("advantage", "clip", About("A <- clip(A, -clip, clip)", ""), bound)


def _only(symbol: str, found: tuple[EffectiveSetting, ...]) -> tuple[EffectiveSetting, ...]:
    """Return the numbers with this symbol."""
    return tuple(number for number in found if symbol_of(number) == symbol)


def _scales(settings: NormalizeConfig, own: tuple[EffectiveSetting, ...]) -> Iterator[Line]:
    """Yield the normalization of rewards, before shaping, and of values."""
    if settings.terms != "none":
        formula = (
            f"R = sum_k w_k (x_k - mean_{settings.terms} x_k) / (std_{settings.terms} x_k + "
            "eps), over the terms of the reward"
        )
        about = About(formula, TERMS_SCALED, "GDPO, arXiv 2601.05242")
        yield Line("reward terms", settings.terms, about, own)
    if settings.rewards != "none":
        text, symbols = ("R", "R")
        if settings.rewards == "standard":
            text, symbols = ("(R - mean)", "R - mean")
        formula = f"R <- {text} / (std + eps), mean and std of all rewards that the run has seen"
        latex = rf"R\leftarrow\frac{{{symbols}}}{{\operatorname{{std}}+\epsilon}}"
        yield Line("reward scale", settings.rewards, About(formula, latex), own)
    if settings.values:
        formula = (
            "the critic says (return - mean) / (std + eps), mean and std of all returns that the "
            "run has seen"
        )
        about = About(formula, "", "arXiv 1602.07714, arXiv 2103.01955")
        yield Line("values", "normalised", about, own)


def _policy_loss(loss: LossConfig, own: tuple[EffectiveSetting, ...]) -> Iterator[Line]:
    """Yield the policy loss with the selected ratio, without bounds that are not set."""
    about = COMPONENT_KINDS["loss"].registry.about(loss.name)
    formula = about.formula
    latex = about.latex
    if loss.ratio_cap is None:
        formula = formula.replace("min(rho_t, ratio_cap)", "rho_t")
    # The registry has the formula of the token ratio. One ratio of a response replaces it.
    if loss.ratio in RATIOS and "ratio" in about.reads:
        text, symbols = RATIOS[loss.ratio]
        formula = formula.replace(OF_TOKEN[0], text)
        latex = latex.replace(OF_TOKEN[1], symbols)
    in_force = About(formula, latex, about.paper, about.needs, about.reads)
    yield Line("policy loss", loss.name, in_force, own)
    if loss.dual_clip is not None and "dual_clip" in about.reads:
        bound = About(
            "L_t <- min(L_t, -dual_clip A_t) where A_t < 0",
            r"L_{i,t}\leftarrow\min(L_{i,t},-c\hat A_t)\ \text{where}\ \hat A_t<0",
        )
        yield Line("policy loss", "dual clip", bound)


TO_REFERENCE = ("logp - logp_ref", r"\log\pi_\theta-\log\pi_{ref}")
FROM_OLD = ("logp_old - logp", r"\log\pi_{old}-\log\pi_\theta")


def _distance(
    part: str,
    estimator: str,
    symbol: tuple[str, str],
    d: tuple[str, str],
    own: tuple[EffectiveSetting, ...],
    bound: str = "",
) -> Line:
    """Return the KL estimate ``symbol`` of the log-ratio ``d``, each as text and as LaTeX.

    Args:
        part: Name of the line.
        estimator: Name of the KL estimator.
        symbol: Symbol of the estimate.
        d: The log-ratio.
        own: Values in the formula.
        bound: Text that follows the formula.
    """
    about = COMPONENT_KINDS["kl"].registry.about(estimator)
    formula = f"{symbol[0]} = {about.formula},  d = {d[0]}{bound}"
    latex = rf"{symbol[1]}={about.latex},\quad d={d[1]}"
    return Line(part, estimator, About(formula, latex, about.paper), own)


def _drift(algorithm: AlgorithmConfig, own: tuple[EffectiveSetting, ...]) -> Line:
    """Return the KL from the old to the new policy. Its tokens were sampled by the old policy."""
    drift = algorithm.policy_drift
    bound = "" if drift.cap is None else ";  its gradient, exp(-d) - 1, is at most cap"
    if drift.level == "token":
        symbol = ("drift_t", r"\delta_{i,t}")
        return _distance("drift", drift.estimator, symbol, FROM_OLD, own, bound)
    symbol = ("l_i drift_t", r"l_i\,\delta_{i,t}")
    d = (
        "sum_t (logp_old - logp)",
        r"\textstyle\sum_t(\log\pi_{old}-\log\pi_\theta)",
    )
    return _distance("drift", drift.estimator, symbol, d, own, bound)


def _other_terms(algorithm: AlgorithmConfig, found: tuple[EffectiveSetting, ...]) -> Iterator[Line]:
    if Requirements.of(algorithm).critic:
        formula = "(V_t - return_t)^2"
        latex = r"(V_t-\hat R_t)^2"
        if algorithm.value.clip is not None:
            clipped = "(clip(V_t, V_old - clip, V_old + clip) - return_t)^2"
            formula = f"max( {formula}, {clipped} )"
            latex = CLIPPED_VALUE
        about = About(
            f"of the critic: {formula} / 2",
            rf"L^V_{{i,t}}=\tfrac12{latex}",
            "PPO, arXiv 1707.06347, and its authors' code",
        )
        yield Line("value loss", "squared error", about, _below("algorithm.value", found))
    if algorithm.entropy.target is not None:
        steered = About(
            "alpha <- max(0, alpha + rate sign(target - H)) after each step; 0 while H > target",
            r"\alpha\leftarrow\max\big(0,\ \alpha+\eta\operatorname{sign}(H^*-H)\big)",
            "Skywork-OR1, arXiv 2505.22312, section 4.2",
        )
        yield Line("entropy", "target", steered, _below("algorithm.entropy", found))
    if algorithm.positive_nll.coef:
        likelihood = About(
            "NLL = mean of -logp over the tokens of responses with R >= threshold",
            r"\mathrm{NLL}=-\frac{\sum_{i\in\mathcal T,t}\log\pi_\theta}{\sum_{i\in\mathcal "
            r"T}l_i},\quad\mathcal T=\{i:R_i\ge\mathrm{threshold}\}",
            "VAPO, arXiv 2504.05118, section 4.4",
        )
        yield Line("correct responses", "nll", likelihood, _below("algorithm.positive_nll", found))


def _listed(
    part: str,
    kind: str,
    algorithm: AlgorithmConfig,
    found: tuple[EffectiveSetting, ...],
) -> Iterator[Line]:
    """Yield one line for each function of a list.

    Args:
        part: Name of the lines.
        kind: Kind of the functions.
        algorithm: Names them.
        found: All settings that the algorithm reads.
    """
    row = COMPONENT_KINDS[kind]
    chosen = getattr(algorithm, row.key.removeprefix("algorithm."))
    for i, function in enumerate(chosen):
        own = _below(f"{row.key}.{i}", found)
        yield Line(part, function.name, row.registry.about(function.name), own)


def _below(branch: str, found: tuple[EffectiveSetting, ...]) -> tuple[EffectiveSetting, ...]:
    """Return the numbers of one branch, without names of functions."""
    below = []
    for number in found:
        if number.key.startswith(f"{branch}.") and symbol_of(number) not in NAMES:
            below.append(number)
    return tuple(below)


NAMES = (
    *("name", "normalize", "where", "estimator", "kind", "weighted"),
    *("terms", "rewards", "values"),
)
"""Last words of the keys that choose a function or a form, which are no numbers of a formula."""


def formula_rows(explanation: Explanation) -> list[str]:
    """Return the objective and its parts as lines of text, each with its numbers and its paper."""
    rows = [explanation.objective, ""]
    names = [f"{line.part}: {line.name}" for line in explanation.lines]
    width = max(len(name) for name in names)
    for name, line in zip(names, explanation.lines, strict=True):
        rows.append(f"{name:<{width}}  {line.about.formula}")
        values = ", ".join(f"{symbol_of(number)} = {number.value}" for number in line.numbers)
        if values:
            rows.append(f"{'':<{width}}    with {values}")
        if line.about.paper:
            rows.append(f"{'':<{width}}    {line.about.paper}")
    return rows


def to_text(explanation: Explanation) -> str:
    """Format an explanation for a terminal."""
    e = explanation
    rows = [e.title]
    if e.paper:
        rows.append(f"  {e.paper}")
    rows += ["", *(f"  {row}" if row else "" for row in formula_rows(e))]
    key = max(len(number.key) for number in e.numbers)
    rows += ["", "numbers in force"]
    rows += [f"  {n.key:<{key}}  {n.value!s:<12}  {n.source}" for n in e.numbers]
    rows += ["", "gradient"]
    rows += [f"  {sentence}" for sentence in e.gradient]
    rows += ["", "models"]
    rows += [f"  {role.name:<13}  {role.what}" for role in e.roles]
    rows += ["", "passes over the batch in a step"]
    rows += [f"  {f.model:<13}  {f.passes}  {f.what}" for f in e.forwards]
    if e.prompts:
        rows += ["", "prompts"]
        rows += [f"  {key:<13}  {text}" for key, text in e.prompts]
    return "\n".join(rows)


def symbol_of(number: EffectiveSetting) -> str:
    """Return the symbol of a number in a formula: the last word of its key."""
    return number.key.rpartition(".")[2]


def to_latex(explanation: Explanation, environment: str = "align*") -> str:
    """Format the objective and its parts as an ``align*`` environment.

    The aggregation is part of the objective and gets no row.
    """
    formulas = [explanation.latex]
    for line in explanation.lines:
        if not line.about.latex or line.part == "aggregation":
            continue
        values = r",\ ".join(_latex(number) for number in line.numbers)
        formulas.append(line.about.latex + (rf"\qquad({values})" if values else ""))
    rows = " \\\\\n".join(f"&{formula}" for formula in formulas)
    return f"\\begin{{{environment}}}\n{rows}\n\\end{{{environment}}}"


def _latex(number: EffectiveSetting) -> str:
    name = symbol_of(number)
    # Outside of formulas, LaTeX takes an underscore for an error.
    plain_name = name.replace("_", r"\_")
    symbol = SYMBOLS.get(name) or rf"\mathrm{{{plain_name}}}"
    value = number.value
    if not isinstance(value, int | float):
        plain_value = str(value).replace("_", r"\_")
        value = rf"\text{{{plain_value}}}"
    return f"{symbol}={value}"
