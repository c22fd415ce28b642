"""Explain the effective objective as formulas with values and papers, read from the registries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lightrft.algorithms.requirements import needs_of
from lightrft.algorithms.sample_selection import SELECTIONS
from lightrft.algorithms.validate.component_kinds import COMPONENT_KINDS
from lightrft.config.algorithm import AlgorithmConfig, LossConfig, NormalizeConfig
from lightrft.config.presets import PAPERS
from lightrft.config.verbs import RLConfig
from lightrft.diagnostics.effective_settings import EffectiveSetting, numbers
from lightrft.diagnostics.formula_texts import IMPLICIT, OUTCOME_LOSS, PTX, SAMPLED
from lightrft.diagnostics.step_workload import Forward, Role, forward_passes, gradient, roles
from lightrft.models.divergence_kinds import DIVERGENCES
from lightrft.rollout.curriculum import CURRICULA
from lightrft.utils.registry import About

TERMS_SCALED = r"R=\sum_k w_k\frac{x_k-\operatorname{mean}x_k}{\operatorname{std}x_k+\epsilon}"
WHITENED = r"\hat A\leftarrow\frac{\hat A-\operatorname{mean}\hat A}{\operatorname{std}\hat A+\epsilon}"
OF_TOKEN = ("rho_t = exp(logp - logp_old)", r"\rho_t=\pi_\theta/\pi_{old}")
RATIOS = {
    "sequence": (
        "rho_t = exp( mean_t (logp - logp_old) ), one for the answer",
        r"\rho_t=\exp\!\Big(\frac1{l_i}\sum_t\log\frac{\pi_\theta}{\pi_{old}}\Big)",
    ),
    "sequence_token": (
        "rho_t = sg( exp( mean_t (logp - logp_old) ) ) exp(logp - sg(logp))",
        r"\rho_t=\operatorname{sg}\!\Big[\exp\!\Big(\frac1{l_i}\sum_t\log\frac{\pi_\theta}{\pi_{old}}\Big)\Big]"
        r"\frac{\pi_\theta}{\operatorname{sg}[\pi_\theta]}",
    ),
}
"""Forms of ``loss.ratio`` that replace the token ratio in the formula of a loss."""
CLIPPED_VALUE = r"\max\!\big((V_t-\hat R_t)^2,\ (\operatorname{clip}(V_t,V_{old}-c,V_{old}+c)-\hat R_t)^2\big)"
SYMBOLS = {
    "clip_low": r"\epsilon_l",
    "clip_high": r"\epsilon_h",
    "gamma": r"\gamma",
    "lam": r"\lambda",
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


def explain(config: RLConfig, sources: Mapping[str, str]) -> Explanation:
    """Explain the algorithm of ``config``. ``sources`` gives the file or argument of each key."""
    algorithm = config.algorithm
    terms = list(_terms(algorithm))
    aggregation = COMPONENT_KINDS["aggregation"].registry.about(algorithm.aggregation)
    inner, latex = " ".join(text for text, _ in terms), "".join(text for _, text in terms)
    several = len(terms) > 1
    objective = aggregation.formula.replace("L_it", f"({inner})" if several else inner)
    full = aggregation.latex.replace("L_{i,t}", rf"\big({latex}\big)" if several else latex)
    if algorithm.positive_nll.coef:
        objective += f" + {algorithm.positive_nll.coef:g} NLL"
        full += rf"+{algorithm.positive_nll.coef:g}\,\mathrm{{NLL}}"
    found = numbers(config, sources)
    return Explanation(
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


def _terms(algorithm: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    """Yield the terms that are aggregated, as text and as LaTeX."""
    yield "L_it", "L_{i,t}"
    kl, entropy = algorithm.kl, algorithm.entropy
    if kl.used and kl.where == "loss":
        ratio, latex = ("rho_t ", r"\rho_t") if kl.weighted else ("", "")
        yield f"+ {kl.coef:g} {ratio}kl_t", rf"+{kl.coef:g}\,{latex}k_{{i,t}}"
    if algorithm.drift.coef:
        yield f"+ {algorithm.drift.coef:g} drift_t", rf"+{algorithm.drift.coef:g}\,\delta_{{i,t}}"
    if algorithm.distill.whole:
        yield f"+ {algorithm.distill.coef:g} D_t", rf"+{algorithm.distill.coef:g}\,D_{{i,t}}"
    if entropy.target is not None:
        yield "- alpha H_t", r"-\alpha\,H_{i,t}"
    elif entropy.coef:
        sign, size = ("-", entropy.coef) if entropy.coef > 0 else ("+", -entropy.coef)
        yield f"{sign} {size:g} H_t", rf"{sign}{size:g}\,H_{{i,t}}"


def _lines(config: RLConfig, found: tuple[EffectiveSetting, ...]) -> Iterator[Line]:
    algorithm, kl = config.algorithm, config.algorithm.kl
    yield from _scales(algorithm.normalize, _below("algorithm.normalize", found))
    yield from _listed("shaping", "shaping", algorithm, found)
    reward = About("r_t = 1[t is the last sampled token] R", r"r_t=\mathbb 1[t=T]\,R")
    if kl.used and kl.where == "reward":
        reward = About(f"{reward.formula} - {kl.coef:g} kl_t", rf"{reward.latex}-{kl.coef:g}\,k_{{i,t}}")
    yield Line("token reward", "outcome", reward)
    if "process" in needs_of(algorithm):
        own = _below("process", found)
        yield Line("token reward", "process", IMPLICIT, tuple(n for n in own if symbol_of(n) == "beta"))
        yield Line(
            "loss of the process model",
            "outcome",
            OUTCOME_LOSS,
            tuple(n for n in own if symbol_of(n) == "threshold"),
        )
    advantage = algorithm.advantage
    about = COMPONENT_KINDS["advantage"].registry.about(advantage.name)
    own = tuple(n for n in _below("algorithm.advantage", found) if symbol_of(n) != "eps" or "eps" in about.reads)
    yield Line("advantage", advantage.name, about, own)
    if advantage.whiten != "none":
        over = f"over all trained tokens of the {advantage.whiten}"
        eps = tuple(n for n in found if n.key == "algorithm.advantage.eps")
        yield Line(
            "advantage",
            "whiten",
            About(f"A <- (A - mean A) / (std A + eps), {over}", WHITENED),
            eps,
        )
    if algorithm.distill.kind == "sampled":
        yield Line("teacher", "sampled", SAMPLED, _below("algorithm.distill", found))
    if algorithm.distill.whole:
        about = DIVERGENCES.about(algorithm.distill.kind)
        yield Line("teacher", algorithm.distill.kind, about, _below("algorithm.distill", found))
    yield from _policy_loss(algorithm.loss, _below("algorithm.loss", found))
    if kl.used:
        yield _distance(
            f"kl in the {kl.where}",
            kl.estimator,
            ("kl_t", "k_{i,t}"),
            TO_REFERENCE,
            _below("algorithm.kl", found),
        )
    if algorithm.drift.coef:
        yield _drift(algorithm, _below("algorithm.drift", found))
    yield from _other_terms(algorithm, found)
    yield from _listed("correction of L", "correction", algorithm, found)
    yield from _listed("gate of L", "gate", algorithm, found)
    yield Line(
        "aggregation",
        algorithm.aggregation,
        COMPONENT_KINDS["aggregation"].registry.about(algorithm.aggregation),
    )
    if config.ptx.coef:
        yield Line(
            "beside the objective",
            "ptx",
            PTX,
            tuple(n for n in _below("ptx", found) if symbol_of(n) == "coef"),
        )
    yield from _listed("filter", "filter", algorithm, found)
    if config.rollout.select is not None:
        name = config.rollout.select.name
        yield Line("selection", name, SELECTIONS.about(name), _below("rollout.select", found))
    if config.rollout.curriculum is not None:
        name = config.rollout.curriculum.name
        yield Line("prompts", name, CURRICULA.about(name), _below("rollout.curriculum", found))


def _scales(settings: NormalizeConfig, own: tuple[EffectiveSetting, ...]) -> Iterator[Line]:
    """Yield the normalization of rewards, before shaping, and of values."""
    if settings.terms != "none":
        formula = (
            f"R = sum_k w_k (x_k - mean_{settings.terms} x_k) / (std_{settings.terms} x_k + eps), over the terms of the reward"
        )
        yield Line(
            "reward terms",
            settings.terms,
            About(formula, TERMS_SCALED, "GDPO, arXiv 2601.05242"),
            own,
        )
    if settings.rewards != "none":
        shift = "R - mean" if settings.rewards == "standard" else "R"
        over = f"({shift})" if " " in shift else shift
        formula = f"R <- {over} / (std + eps), mean and std of all rewards that the run has seen"
        latex = rf"R\leftarrow\frac{{{shift}}}{{\operatorname{{std}}+\epsilon}}"
        yield Line("reward scale", settings.rewards, About(formula, latex), own)
    if settings.values:
        formula = "the critic says (return - mean) / (std + eps), mean and std of all returns that the run has seen"
        yield Line("values", "normalised", About(formula, "", "arXiv 1602.07714, arXiv 2103.01955"), own)


def _policy_loss(loss: LossConfig, own: tuple[EffectiveSetting, ...]) -> Iterator[Line]:
    """Yield the policy loss with the selected ratio, without bounds that are not set."""
    about = COMPONENT_KINDS["loss"].registry.about(loss.name)
    formula, latex = about.formula, about.latex
    if loss.ratio_cap is None:
        formula = formula.replace("min(rho_t, ratio_cap)", "rho_t")
    if loss.ratio in RATIOS and "ratio" in about.reads:
        text, symbols = RATIOS[loss.ratio]
        formula, latex = formula.replace(OF_TOKEN[0], text), latex.replace(OF_TOKEN[1], symbols)
    yield Line("policy loss", loss.name, About(formula, latex, about.paper, about.needs, about.reads), own)
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
    """Return the KL estimate ``symbol`` of the log-ratio ``d``, each as text and as LaTeX."""
    about = COMPONENT_KINDS["kl"].registry.about(estimator)
    formula = f"{symbol[0]} = {about.formula},  d = {d[0]}{bound}"
    return Line(
        part,
        estimator,
        About(formula, rf"{symbol[1]}={about.latex},\quad d={d[1]}", about.paper),
        own,
    )


def _drift(algorithm: AlgorithmConfig, own: tuple[EffectiveSetting, ...]) -> Line:
    """Return the KL from the old to the new policy. Its tokens were sampled by the old policy."""
    bound = "" if algorithm.drift.cap is None else ";  its gradient, exp(-d) - 1, is at most cap"
    if algorithm.drift.level == "token":
        return _distance("drift", algorithm.drift.estimator, ("drift_t", r"\delta_{i,t}"), FROM_OLD, own, bound)
    symbol, d = (
        ("l_i drift_t", r"l_i\,\delta_{i,t}"),
        ("sum_t (logp_old - logp)", r"\textstyle\sum_t(\log\pi_{old}-\log\pi_\theta)"),
    )
    return _distance("drift", algorithm.drift.estimator, symbol, d, own, bound)


def _other_terms(algorithm: AlgorithmConfig, found: tuple[EffectiveSetting, ...]) -> Iterator[Line]:
    if "critic" in needs_of(algorithm):
        plain, clipped = (
            "(V_t - return_t)^2",
            "(clip(V_t, V_old - clip, V_old + clip) - return_t)^2",
        )
        formula = f"{plain} / 2" if algorithm.value.clip is None else f"max( {plain}, {clipped} ) / 2"
        latex = r"(V_t-\hat R_t)^2" if algorithm.value.clip is None else CLIPPED_VALUE
        about = About(
            f"of the critic: {formula}",
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
            "NLL = mean of -logp over the tokens of answers with R >= threshold",
            r"\mathrm{NLL}=-\frac{\sum_{i\in\mathcal T,t}\log\pi_\theta}{\sum_{i\in\mathcal "
            r"T}l_i},\quad\mathcal T=\{i:R_i\ge\mathrm{threshold}\}",
            "VAPO, arXiv 2504.05118, section 4.4",
        )
        yield Line("right answers", "nll", likelihood, _below("algorithm.positive_nll", found))


def _listed(part: str, kind: str, algorithm: AlgorithmConfig, found: tuple[EffectiveSetting, ...]) -> Iterator[Line]:
    row = COMPONENT_KINDS[kind]
    for i, chosen in enumerate(getattr(algorithm, row.key.removeprefix("algorithm."))):
        yield Line(part, chosen.name, row.registry.about(chosen.name), _below(f"{row.key}.{i}", found))


def _below(branch: str, found: tuple[EffectiveSetting, ...]) -> tuple[EffectiveSetting, ...]:
    """Return the numbers of one branch, without names of functions."""
    return tuple(n for n in found if n.key.startswith(f"{branch}.") and n.key.rpartition(".")[2] not in NAMES)


NAMES = ("name", "whiten", "where", "estimator", "kind", "weighted", "terms", "rewards", "values")


def to_text(explanation: Explanation) -> str:
    """Format an explanation for a terminal."""
    e = explanation
    width = max(len(f"{line.part}: {line.name}") for line in e.lines)
    parts = [e.title, *([f"  {e.paper}"] if e.paper else []), "", f"  {e.objective}", ""]
    for line in e.lines:
        parts.append(f"  {f'{line.part}: {line.name}':<{width}}  {line.about.formula}")
        with_numbers = ", ".join(f"{symbol_of(n)} = {n.value}" for n in line.numbers)
        parts += [
            f"  {'':<{width}}    {text}" for text in (f"with {with_numbers}" if with_numbers else "", line.about.paper) if text
        ]
    key = max(len(n.key) for n in e.numbers)
    parts += ["", "numbers in force"]
    parts += [f"  {n.key:<{key}}  {n.value!s:<12}  {n.source}" for n in e.numbers]
    parts += ["", "gradient", *(f"  {g}" for g in e.gradient)]
    parts += ["", "models", *(f"  {role.name:<13}  {role.what}" for role in e.roles)]
    parts += ["", "passes over the batch in a step"]
    parts += [f"  {f.model:<13}  {f.passes}  {f.what}" for f in e.forwards]
    return "\n".join(parts)


def symbol_of(number: EffectiveSetting) -> str:
    """Return the symbol of a number in a formula: the last word of its key."""
    return number.key.rpartition(".")[2]


def to_latex(explanation: Explanation, environment: str = "align*") -> str:
    """Format the objective and its parts as an ``align*`` environment.

    The aggregation is part of the objective and gets no row.
    """
    parts = []
    for line in explanation.lines:
        if line.about.latex and line.part != "aggregation":
            with_numbers = r",\ ".join(f"{_latex(n)}" for n in line.numbers)
            parts.append(f"{line.about.latex}" + (rf"\qquad({with_numbers})" if with_numbers else ""))
    rows = " \\\\\n".join(f"&{row}" for row in [explanation.latex, *parts])
    return f"\\begin{{{environment}}}\n{rows}\n\\end{{{environment}}}"


def _latex(number: EffectiveSetting) -> str:
    name = symbol_of(number)
    symbol = SYMBOLS.get(name) or rf"\mathrm{{{_plain(name)}}}"
    value = number.value if isinstance(number.value, int | float) else rf"\text{{{_plain(str(number.value))}}}"
    return f"{symbol}={value}"


def _plain(text: str) -> str:
    return text.replace("_", r"\_")
