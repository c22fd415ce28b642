"""The objective in force, as formulas with their numbers and papers: read from the registries that the loop itself calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lightrft.config import PRESETS, NormalizeConfig, RLConfig
from lightrft.models.divergence import DIVERGENCES
from lightrft.trainer.advantages import ADVANTAGES
from lightrft.trainer.aggregation import AGGREGATIONS
from lightrft.trainer.corrections import CORRECTIONS
from lightrft.trainer.distill import SAMPLED
from lightrft.trainer.filters import FILTERS
from lightrft.trainer.gates import GATES
from lightrft.trainer.kl import KL_ESTIMATORS
from lightrft.trainer.parts import needs_of, needs_old_logprobs, needs_reference
from lightrft.trainer.policy_loss import POLICY_LOSSES
from lightrft.trainer.shaping import SHAPINGS
from lightrft.utils.registry import About
from lightrft.utils.settings import deep_merge, dotted

TERMS_SCALED = r"R=\sum_k w_k\frac{x_k-\operatorname{mean}x_k}{\operatorname{std}x_k+\epsilon}"
WHITENED = r"\hat A\leftarrow\frac{\hat A-\operatorname{mean}\hat A}{\operatorname{std}\hat A+\epsilon}"


@dataclass(frozen=True, slots=True)
class Line:
    """One part of the objective: what it is, its name, and its formulas."""

    part: str
    name: str
    about: About


@dataclass(frozen=True, slots=True)
class Number:
    """One number in force and where it came from."""

    key: str
    value: object
    source: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """What ``lightrft explain`` shows."""

    title: str
    objective: str
    latex: str
    lines: tuple[Line, ...]
    numbers: tuple[Number, ...]
    gradient: tuple[str, ...]


def explain(config: RLConfig, sources: Mapping[str, str]) -> Explanation:
    """The algorithm of ``config``; ``sources`` says which file or argument gave a key."""
    algorithm = config.algorithm
    terms, latex = ["L_it"], ["L_{i,t}"]
    if algorithm.kl.used and algorithm.kl.where == "loss":
        terms.append(f"+ {algorithm.kl.coef:g} kl_t")
        latex.append(rf"+{algorithm.kl.coef:g}\,k_{{i,t}}")
    if algorithm.distill.whole:
        terms.append(f"+ {algorithm.distill.coef:g} D_t")
        latex.append(rf"+{algorithm.distill.coef:g}\,D_{{i,t}}")
    if algorithm.entropy.coef:
        terms.append(f"- {algorithm.entropy.coef:g} H_t")
        latex.append(rf"-{algorithm.entropy.coef:g}\,H_{{i,t}}")
    aggregation = AGGREGATIONS.about(algorithm.aggregation)
    inner, inner_latex = " ".join(terms), "".join(latex)
    wrap = f"({inner})" if len(terms) > 1 else inner
    objective = aggregation.formula.replace("L_it", wrap)
    full = aggregation.latex.replace("L_{i,t}", rf"\big({inner_latex}\big)" if len(latex) > 1 else inner_latex)
    return Explanation(
        title=algorithm.preset or "custom",
        objective=f"minimise  {objective}",
        latex=rf"\min_\theta\ {full}",
        lines=tuple(_lines(config)),
        numbers=tuple(_numbers(config, sources)),
        gradient=tuple(_gradient(config)),
    )


def _lines(config: RLConfig) -> Iterator[Line]:
    algorithm = config.algorithm
    yield from _scales(algorithm.normalize)
    for part in algorithm.shaping:
        yield Line("shaping", part.name, SHAPINGS.about(part.name))
    reward = About("r_t = 1[t is the last sampled token] R", r"r_t=\mathbb 1[t=T]\,R")
    if algorithm.kl.used and algorithm.kl.where == "reward":
        reward = About(f"{reward.formula} - {algorithm.kl.coef:g} kl_t", rf"{reward.latex}-{algorithm.kl.coef:g}\,k_{{i,t}}")
    yield Line("token reward", "outcome", reward)
    yield Line("advantage", algorithm.advantage.name, ADVANTAGES.about(algorithm.advantage.name))
    if algorithm.advantage.whiten != "none":
        over = f"over all trained tokens of the {algorithm.advantage.whiten}"
        yield Line("advantage", "whiten", About(f"A <- (A - mean A) / (std A + eps), {over}", WHITENED))
    if algorithm.distill.kind == "sampled":
        yield Line("teacher", "sampled", SAMPLED)
    if algorithm.distill.whole:
        yield Line("teacher", algorithm.distill.kind, DIVERGENCES.about(algorithm.distill.kind))
    yield Line("policy loss", algorithm.loss.name, POLICY_LOSSES.about(algorithm.loss.name))
    if algorithm.kl.used:
        about = KL_ESTIMATORS.about(algorithm.kl.estimator)
        yield Line(
            f"kl in the {algorithm.kl.where}",
            algorithm.kl.estimator,
            About(
                f"kl_t = {about.formula},  d = logp - logp_ref",
                rf"k_{{i,t}}={about.latex},\quad d=\log\pi_\theta-\log\pi_{{ref}}",
                about.paper,
            ),
        )
    for part in algorithm.corrections:
        yield Line("correction of L", part.name, CORRECTIONS.about(part.name))
    for part in algorithm.gates:
        yield Line("gate of L", part.name, GATES.about(part.name))
    yield Line("aggregation", algorithm.aggregation, AGGREGATIONS.about(algorithm.aggregation))
    for part in algorithm.filters:
        yield Line("filter", part.name, FILTERS.about(part.name))


def _scales(settings: NormalizeConfig) -> Iterator[Line]:
    """What is done to rewards before shaping, and to values."""
    if settings.terms != "none":
        formula = (
            f"R = sum_k w_k (x_k - mean_{settings.terms} x_k) / (std_{settings.terms} x_k + eps), over the terms of the reward"
        )
        yield Line("reward terms", settings.terms, About(formula, TERMS_SCALED, "GDPO, arXiv 2601.05242"))
    if settings.rewards != "none":
        shift = "R - mean" if settings.rewards == "standard" else "R"
        over = f"({shift})" if " " in shift else shift
        formula = f"R <- {over} / (std + eps), mean and std of all rewards that the run has seen"
        yield Line(
            "reward scale", settings.rewards, About(formula, rf"R\leftarrow\frac{{{shift}}}{{\operatorname{{std}}+\epsilon}}")
        )
    if settings.values:
        formula = "the critic says (return - mean) / (std + eps), mean and std of all returns that the run has seen"
        yield Line("values", "normalised", About(formula, "", "arXiv 1602.07714, arXiv 2103.01955"))


def _numbers(config: RLConfig, sources: Mapping[str, str]) -> Iterator[Number]:
    preset = dict(dotted(PRESETS.get(config.algorithm.preset or "", {})))
    tree = config.algorithm.model_dump(mode="json")
    for key, value in dotted(deep_merge(tree, {})):
        full = f"algorithm.{key}"
        given = sources.get(full) or next((s for k, s in sources.items() if k.startswith(f"{full}.")), None)
        origin = given or (f"preset {config.algorithm.preset}" if key in preset else "default")
        if value not in (None, {}, [], ""):
            yield Number(full, value, origin)
    critic = (("critic.warmup_steps", config.critic.warmup_steps), ("critic.optimizer.lr", config.critic.optimizer.lr))
    for full, value in (
        *(critic if "critic" in needs_of(config.algorithm) else ()),
        ("rollout.samples", config.rollout.samples),
        ("train.updates", config.train.updates),
        ("train.mini_batches", config.train.mini_batches),
        ("sampling.temperature", config.sampling.temperature),
        ("sampling.max_new_tokens", config.sampling.max_new_tokens),
    ):
        yield Number(full, value, sources.get(full, "default"))


def _gradient(config: RLConfig) -> Iterator[str]:
    algorithm, train = config.algorithm, config.train
    yield "Tokens that the policy sampled get gradient; prompt, tool and environment tokens do not."
    if train.updates * train.mini_batches == 1:
        yield "Each batch gets one update, on policy: the ratio is 1 and clipping never acts."
    else:
        steps = train.updates * train.mini_batches
        yield f"Each batch gets {steps} optimizer steps: the ratio leaves 1 after the first, and clipping acts."
    if not needs_old_logprobs(config):
        yield "Old log-probs are not computed: the new ones, detached, are the old ones."
    if (algorithm.kl.where == "loss" and algorithm.kl.used) or algorithm.entropy.coef or algorithm.distill.whole:
        yield "Rows with advantage 0 still get gradient from the KL, entropy or teacher term."
    else:
        yield "Rows whose advantages are all 0 get no gradient and are not run through the model."
    if "critic" in needs_of(algorithm):
        yield "The critic is trained on the returns beside the policy."
        if config.critic.warmup_steps:
            yield f"In the first {config.critic.warmup_steps} steps it is trained alone: the policy that answers stays as it is."
    if not needs_reference(algorithm):
        yield "No KL term: no reference model is loaded or run."
    if algorithm.distill.kind != "none":
        yield "The teacher is frozen; it is asked about the policy's own answers, and gets no gradient."
    if algorithm.kl.refresh_every:
        moved = f"ref <- {algorithm.kl.refresh_decay:g} ref + {1 - algorithm.kl.refresh_decay:g} policy"
        yield f"Every {algorithm.kl.refresh_every} steps the reference moves: {moved}."


def to_text(explanation: Explanation) -> str:
    """For a terminal."""
    e = explanation
    width = max(len(f"{line.part}: {line.name}") for line in e.lines)
    parts = [f"{e.title}", "", f"  {e.objective}", ""]
    for line in e.lines:
        parts.append(f"  {f'{line.part}: {line.name}':<{width}}  {line.about.formula}")
        if line.about.paper:
            parts.append(f"  {'':<{width}}    {line.about.paper}")
    key = max(len(n.key) for n in e.numbers)
    parts += ["", "numbers in force"]
    parts += [f"  {n.key:<{key}}  {n.value!s:<12}  {n.source}" for n in e.numbers]
    parts += ["", "gradient", *(f"  {g}" for g in e.gradient)]
    return "\n".join(parts)


def to_latex(explanation: Explanation, environment: str = "align*") -> str:
    """An ``align*`` environment with the objective and its parts; the aggregation is part of the objective."""
    parts = [line.about.latex for line in explanation.lines if line.about.latex and line.part != "aggregation"]
    rows = " \\\\\n".join(f"&{row}" for row in [explanation.latex, *parts])
    return f"\\begin{{{environment}}}\n{rows}\n\\end{{{environment}}}"
