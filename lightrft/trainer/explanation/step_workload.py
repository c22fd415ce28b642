"""Describe the workload of a step: models, passes over the batch, and sources of gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from lightrft.algorithms.requirements import Requirements
from lightrft.config.verbs import RLConfig
from lightrft.models.loading.adapter_base import adds_adapters, has_adapters

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Role:
    """A model of a run and its purpose."""

    name: str
    what: str


@dataclass(frozen=True, slots=True)
class Forward:
    """A pass: ``model`` processes the whole batch ``passes`` times a step, in micro-batches."""

    model: str
    passes: int
    gradient: bool
    what: str


def _applying(rows: Iterable[tuple[object, T]]) -> list[T]:
    """Return the second item of each row whose first item is true."""
    return [row for applies, row in rows if applies]


def roles(config: RLConfig) -> list[Role]:
    """Return the models that are loaded."""
    needs = Requirements.of(config.algorithm)
    adapters = "its adapters are trained" if has_adapters(config.model) else "trained"
    distills = config.algorithm.distill.kind != "none"
    starts_server = config.engine.starts_server
    server = (
        "a copy of the policy in an SGLang server that each process starts, and sampled from; "
        "lightrft doctor prints its command"
    )
    rows = (
        (True, Role("policy", adapters if starts_server else f"{adapters}, and sampled from")),
        (starts_server, Role("engine", server)),
        (needs.reference, Role("reference", _reference(config))),
        (needs.critic, Role("critic", "trained on the returns; a value for each token")),
        (needs.cost_critic, Role("cost critic", "trained on the returns of the cost")),
        (distills, Role("teacher", "frozen; scores the responses of the policy")),
        (needs.prm, Role("process model", "trained on outcomes; a reward for each token")),
    )
    return _applying(rows)


def forward_passes(config: RLConfig) -> list[Forward]:
    """Return all passes over the batch of a step, in order, after generation."""
    algorithm = config.algorithm
    needs = Requirements.of(algorithm)
    updates = config.train.ppo_epochs
    old = needs.old_logprobs(updates * config.train.num_mini_batches)
    words = ((old, "log-probs"), (needs.entropy, "entropy"), (needs.energy, "energy"))
    wanted = " and ".join(_applying(words))
    sampled = algorithm.distill.kind == "sampled"
    separate = needs.prm and config.prm.forward == "double"
    readers = "token_masks" if algorithm.token_masks else "importance_sampling"
    before = f"log-probs before each optimizer step, for the {readers}"
    outcome = "the outcome loss, forward and backward"
    whole = "distributions over the vocabulary"
    # In the order in which a step runs them.
    rows = (
        (wanted, Forward("policy", 1, False, f"{wanted} before the update")),
        (needs.reference, Forward("reference", 1, False, "log-probs")),
        (sampled, Forward("teacher", 1, False, "log-probs of the sampled tokens")),
        (needs.critic, Forward("critic", 1, False, "values before the update")),
        (needs.cost_critic, Forward("cost critic", 1, False, "values of the cost")),
        (needs.prm, Forward("process model", 1, True, outcome)),
        (separate, Forward("process model", 1, False, "log-probs after that")),
        (needs.current, Forward("policy", updates, False, before)),
        (algorithm.distill.whole, Forward("teacher", updates, False, whole)),
        (True, Forward("policy", updates, True, "the loss, forward and backward")),
        (needs.critic, Forward("critic", updates, True, "the value loss, forward and backward")),
        (needs.cost_critic, Forward("cost critic", updates, True, "the value loss of the cost")),
    )
    return _applying(rows)


def gradient(config: RLConfig) -> Iterator[str]:
    """Yield sentences about the parts of the batch that receive gradient."""
    algorithm = config.algorithm
    yield "Tokens that the policy sampled get gradient; prompt, tool and environment tokens do not."
    yield from _updates(config)
    if algorithm.token_masks:
        yield "Tokens that a token mask leaves out get none from the policy loss."
    # Terms of the loss that no advantage multiplies.
    terms = (
        (algorithm.kl.used and algorithm.kl.where == "loss", "the KL term"),
        (algorithm.entropy.used, "the entropy term"),
        (algorithm.policy_drift.coef, "the drift term"),
        (algorithm.distill.whole, "the teacher's divergence"),
        (algorithm.positive_nll.coef, "the likelihood of correct responses"),
        (config.model.router_aux_loss_coef, "the load-balancing loss of experts"),
    )
    reached = " and ".join(_applying(terms))
    if reached:
        yield f"Rows with advantage 0 still get gradient from {reached}."
    else:
        yield "Rows whose advantages are all 0 get no gradient and are not run through the model."
    yield from _other_models(config)
    if not Requirements.of(algorithm).reference:
        yield "No KL term: no reference model is loaded or run."
    if algorithm.filters:
        yield "Groups that a filter drops are not trained on; other prompts are sampled instead."


def _updates(config: RLConfig) -> Iterator[str]:
    steps = config.train.ppo_epochs * config.train.num_mini_batches
    on_policy = config.algorithm.old_logprobs == "policy"
    if steps > 1:
        yield (
            f"Each batch gets {steps} optimizer steps: the ratio leaves 1 after the first, and "
            "clipping acts."
        )
        return
    if not on_policy:
        yield (
            "Each batch gets one update; its ratio is to the sampler, not to the policy before "
            "the update."
        )
        return
    yield "Each batch gets one update, on policy: the ratio is 1 and clipping never acts."
    if not Requirements.of(config.algorithm).old_logprobs(steps):
        yield "Old log-probs are not computed: the new ones, detached, are the old ones."


def _other_models(config: RLConfig) -> Iterator[str]:
    requirements = Requirements.of(config.algorithm)
    if requirements.critic:
        yield "The critic is trained on the returns, together with the policy."
        if config.critic.warmup_steps:
            yield (
                f"In the first {config.critic.warmup_steps} steps it is trained alone: the "
                "policy does not change."
            )
    if requirements.cost_critic:
        yield "The cost critic is trained on the returns of the cost in the same way."
    if requirements.prm:
        yield (
            "The process model is trained on the outcomes of each batch before the advantages "
            "are taken."
        )
    if config.ptx.coef:
        yield (
            f"Each optimizer step of the policy also learns {config.ptx.batch_size} "
            "conversations of ptx.data."
        )


def _reference(config: RLConfig) -> str:
    kl = config.algorithm.kl
    if adds_adapters(config.model) and config.reference is None:
        return "the policy itself with its adapters off; nothing is loaded"
    what = f"frozen; {config.reference or 'the model that training starts from'}"
    if not kl.refresh_every:
        return what
    mixed = f"{kl.refresh_decay:g} ref + {1 - kl.refresh_decay:g} policy"
    return f"{what}; every {kl.refresh_every} steps ref <- {mixed}"
