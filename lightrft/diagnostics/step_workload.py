"""Describe the workload of a step: models, passes over the batch, and sources of gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightrft.algorithms.requirements import Requirements
from lightrft.config.verbs import RLConfig


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


def roles(config: RLConfig) -> Iterator[Role]:
    """Yield the models that are loaded."""
    algorithm = config.algorithm
    requirements = Requirements.of(algorithm)
    adapters = "its adapters are trained" if config.model.lora is not None else "trained"
    yield Role("policy", f"{adapters}, and sampled from")
    if requirements.reference:
        yield Role("reference", _reference(config))
    if requirements.critic:
        yield Role("critic", "trained on the returns; a value for each token")
    if algorithm.distill.kind != "none":
        yield Role("teacher", "frozen; scores the responses of the policy")
    if requirements.prm:
        yield Role("process model", "trained on outcomes; a reward for each token")


def forward_passes(config: RLConfig) -> Iterator[Forward]:
    """Yield all passes over the batch of a step, in order, after generation."""
    algorithm = config.algorithm
    requirements = Requirements.of(algorithm)
    updates = config.train.ppo_epochs
    old = requirements.old_logprobs(updates * config.train.num_mini_batches)
    computed = {"log-probs": old, "entropy": requirements.entropy, "energy": requirements.energy}
    wanted = [word for word, applies in computed.items() if applies]
    if wanted:
        yield Forward("policy", 1, False, f"{' and '.join(wanted)} before the update")
    if requirements.reference:
        yield Forward("reference", 1, False, "log-probs")
    if algorithm.distill.kind == "sampled":
        yield Forward("teacher", 1, False, "log-probs of the sampled tokens")
    if requirements.critic:
        yield Forward("critic", 1, False, "values before the update")
    if requirements.prm:
        yield Forward("process model", 1, True, "the outcome loss, forward and backward")
        if config.prm.forward == "double":
            yield Forward("process model", 1, False, "log-probs after that")
    if requirements.current:
        readers = "token_masks" if algorithm.token_masks else "importance_sampling"
        what = f"log-probs before each optimizer step, for the {readers}"
        yield Forward("policy", updates, False, what)
    if algorithm.distill.whole:
        yield Forward("teacher", updates, False, "distributions over the vocabulary")
    yield Forward("policy", updates, True, "the loss, forward and backward")
    if requirements.critic:
        yield Forward("critic", updates, True, "the value loss, forward and backward")


def gradient(config: RLConfig) -> Iterator[str]:
    """Yield sentences about the parts of the batch that receive gradient."""
    algorithm = config.algorithm
    yield "Tokens that the policy sampled get gradient; prompt, tool and environment tokens do not."
    yield from _updates(config)
    if algorithm.token_masks:
        yield "Tokens that a token mask leaves out get none from the policy loss."
    # Terms of the loss that no advantage multiplies.
    terms = {
        "the KL term": algorithm.kl.used and algorithm.kl.where == "loss",
        "the entropy term": algorithm.entropy.used,
        "the drift term": algorithm.policy_drift.coef,
        "the teacher's divergence": algorithm.distill.whole,
        "the likelihood of correct responses": algorithm.positive_nll.coef,
    }
    reached = [name for name, applies in terms.items() if applies]
    if reached:
        yield f"Rows with advantage 0 still get gradient from {' and '.join(reached)}."
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
    if config.model.lora is not None and config.reference is None:
        return "the policy itself with its adapters off; nothing is loaded"
    what = f"frozen; {config.reference or 'the model that training starts from'}"
    if not kl.refresh_every:
        return what
    mixed = f"{kl.refresh_decay:g} ref + {1 - kl.refresh_decay:g} policy"
    return f"{what}; every {kl.refresh_every} steps ref <- {mixed}"
