"""Check that every function that an algorithm names exists and fits, and that they go together.

Each message gives the reason and a way out. Only built-in parts are judged, since the reads of a
user's function are unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightrft.algorithms.advantages import ADVANTAGES
from lightrft.algorithms.constrained.lagrangian import UNEVEN_ADVANTAGES
from lightrft.algorithms.importance_sampling import IS_CORRECTIONS
from lightrft.algorithms.kl import SCHEDULES
from lightrft.algorithms.policy_losses import POLICY_LOSSES
from lightrft.algorithms.token_masks import TOKEN_MASKS
from lightrft.algorithms.validate.component_kinds import COMPONENT_KINDS, signature_problems
from lightrft.config.algorithm import (
    AdvantageConfig,
    AlgorithmConfig,
    KLConfig,
    LossConfig,
    NormalizeConfig,
    ValueConfig,
)
from lightrft.config.base import ComponentConfig, Settings
from lightrft.utils.errors import ConfigError
from lightrft.utils.registry import Registry


def check_parts(algorithm: AlgorithmConfig) -> None:
    """Raise ``ConfigError`` with every unknown name, misfit option and nonsense combination."""
    problems = [*_problems(algorithm), *incompatible_settings(algorithm)]
    if problems:
        raise ConfigError("\n".join(problems))


def _problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    for kind, key, part in named_parts(algorithm):
        row = COMPONENT_KINDS[kind]
        yield from signature_problems(key, row.registry, part, len(row.arguments), *row.given)
    advantage = algorithm.advantage
    # whitening reads eps too, even if the advantage's function does not
    read_by_whitening = {"eps"} if advantage.normalize != "none" else set()
    yield from _unread("algorithm.advantage", ADVANTAGES, advantage, read_by_whitening)
    read_by_masks: set[str] = set()
    for mask in algorithm.token_masks:
        if mask.name in TOKEN_MASKS:
            # token masks share the bounds of ``algorithm.loss``
            read_by_masks |= TOKEN_MASKS.about(mask.name).reads
    yield from _unread("algorithm.loss", POLICY_LOSSES, algorithm.loss, read_by_masks)
    yield from _unfit_scales(algorithm)


def named_parts(algorithm: AlgorithmConfig) -> Iterator[tuple[str, str, ComponentConfig]]:
    """Yield the functions that the settings name: kind, setting, and name with options."""
    advantage = ComponentConfig(
        name=algorithm.advantage.name,
        options=algorithm.advantage.options,
    )
    loss = ComponentConfig(name=algorithm.loss.name, options=algorithm.loss.options)
    yield "advantage", "algorithm.advantage", advantage
    yield "loss", "algorithm.loss", loss
    yield "aggregation", "algorithm.aggregation", ComponentConfig(name=algorithm.aggregation)
    yield "kl", "algorithm.kl.estimator", ComponentConfig(name=algorithm.kl.estimator)
    yield (
        "kl",
        "algorithm.policy_drift.estimator",
        ComponentConfig(name=algorithm.policy_drift.estimator),
    )
    lists = {
        "correction": algorithm.importance_sampling,
        "token_mask": algorithm.token_masks,
        "shaping": algorithm.shaping,
        "filter": algorithm.filters,
    }
    for kind, parts in lists.items():
        for i, part in enumerate(parts):
            yield kind, f"{COMPONENT_KINDS[kind].key}.{i}", part


def _unfit_scales(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield reward and value scales that the configured advantage does not use."""
    name = algorithm.advantage.name
    normalize = algorithm.normalize
    try:
        needs = ADVANTAGES.about(name).needs
    except ConfigError:
        return  # reported where the name is looked up
    if "critic" not in needs:
        no_critic = f"changes nothing: advantage {name!r} has no critic"
        if normalize.values:
            yield f"algorithm.normalize.values = True {no_critic}"
        if algorithm.value != ValueConfig():
            yield f"algorithm.value.clip = {algorithm.value.clip} {no_critic}"
    only_eps_is_set = normalize == NormalizeConfig(eps=normalize.eps)
    if only_eps_is_set and normalize != NormalizeConfig():
        yield (
            f"algorithm.normalize.eps = {normalize.eps} changes nothing: no terms, rewards or "
            "values are normalised"
        )
    changes = []
    if normalize.terms != "none":
        changes.append("normalize.terms")
    if normalize.rewards != "none":
        changes.append("normalize.rewards")
    if algorithm.shaping:
        changes.append("shaping")
    if "greedy" in needs and changes:
        yield (
            f"algorithm.{changes[0]} changes the rewards of responses but not of the greedy "
            f"response, which advantage {name!r} subtracts from them; leave it out"
        )


def _unread(
    key: str,
    registry: Registry[Any],
    settings: AdvantageConfig | LossConfig,
    also: set[str],
) -> Iterator[str]:
    """Yield changed settings that the configured built-in function does not read.

    Args:
        key: The section, for messages.
        registry: Where the function is looked up. A user's function may read every setting.
        settings: The section that names the function.
        also: Fields that something else reads.
    """
    if settings.name not in registry:
        return
    reads = registry.about(settings.name).reads
    known = ", ".join(sorted(reads)) or "none of them"
    # name and options select the function; normalize and clip apply to the result of any
    read = reads | also | {"name", "options", "normalize", "clip"}
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if name not in read and value != field.default:
            yield f"{key}.{name} = {value} changes nothing: {settings.name!r} reads {known}"


def incompatible_settings(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield one line for each combination that cannot be intended."""
    # every problem is reported at once, so none of these raises
    yield from _ratio(algorithm)
    yield from _old_logprobs(algorithm)
    yield from _kl(algorithm)
    yield from _rewards(algorithm)
    yield from _other_terms(algorithm)
    yield from _lagrangian(algorithm)
    if algorithm.constant_length is not None and algorithm.aggregation != "constant":
        yield (
            f"algorithm.constant_length = {algorithm.constant_length} changes nothing: "
            f"aggregation {algorithm.aggregation!r} has no constant divisor; take aggregation: "
            "constant, or leave it out"
        )


def _ratio(algorithm: AlgorithmConfig) -> Iterator[str]:
    loss = algorithm.loss
    if loss.ratio_cap is not None and loss.ratio_cap <= 1 + loss.clip_high:
        yield (
            f"algorithm.loss.ratio_cap = {loss.ratio_cap} is not above 1 + clip_high = "
            f"{1 + loss.clip_high:g}: it would take the place of the clip for positive "
            "advantages and the gradient of negative ones; raise it or leave it out"
        )
    if loss.ratio_cap is not None and loss.dual_clip is not None:
        idle = "dual_clip" if loss.dual_clip >= loss.ratio_cap else "ratio_cap"
        yield (
            f"algorithm.loss: dual_clip = {loss.dual_clip} and ratio_cap = {loss.ratio_cap} both "
            f"bound the loss of negative advantages, and {idle} never acts; leave one out"
        )
    varies = _varies(algorithm)
    if loss.ratio == "sequence" and varies:
        yield (
            "algorithm.loss.ratio = sequence gives every token of a response the same gradient, "
            f"so only the mean of its advantages would count, and {varies}; take ratio: "
            "sequence_token, which has the same ratio and the gradient of each token"
        )
    if loss.ratio == "sequence" and algorithm.token_masks:
        yield (
            f"algorithm.token_masks: {algorithm.token_masks[0].name!r} leaves tokens out, and with "
            "loss.ratio: sequence every token of a response has the gradient of all, so that "
            "those left out would still get it; take ratio: sequence_token"
        )


def _varies(algorithm: AlgorithmConfig) -> str:
    """Return why advantages differ within a response; empty if they do not, or if unknown."""
    name, gamma = algorithm.advantage.name, algorithm.advantage.gamma
    if name in ADVANTAGES and {"critic", "prm"} & ADVANTAGES.about(name).needs:
        return f"advantage {name!r} has one for each token"
    if algorithm.distill.kind == "sampled":
        return "distill.kind: sampled adds to each token's advantage"
    if name in ("reinforce", "remax") and gamma < 1:
        return f"advantage {name!r} discounts with gamma = {gamma}"
    if name == "reinforce" and algorithm.kl.used and algorithm.kl.where == "reward":
        return "advantage 'reinforce' holds the KL penalty of each token (kl.where: reward)"
    return ""


def _old_logprobs(algorithm: AlgorithmConfig) -> Iterator[str]:
    source = algorithm.old_logprobs
    if source == "policy":
        return
    weighing = [
        part.name
        for part in algorithm.importance_sampling
        if part.name in IS_CORRECTIONS and "old" in IS_CORRECTIONS.about(part.name).needs
    ]
    if source == "rollout":
        for name in weighing:
            yield (
                f"algorithm.importance_sampling: {name!r} weighs the old policy against the "
                "sampler, and with old_logprobs: rollout they are one: the ratio already holds "
                "the difference, which must not count twice. Leave it out, or take "
                "old_logprobs: policy"
            )
    reader = _reader_of_old_logprobs(algorithm)
    if source == "interpolated" and reader:
        yield (
            "algorithm.old_logprobs = interpolated computes no log-probs before the update, which "
            f"{reader} reads; take old_logprobs: policy"
        )
    # corrections and token masks compare with the old policy, whatever the loss reads
    has_ratio = _objective_reads_old(algorithm) or weighing or algorithm.token_masks
    if not has_ratio and not reader:
        loss = algorithm.loss.name
        yield f"algorithm.old_logprobs = {source} changes nothing: loss {loss!r} has no ratio"


def _reader_of_old_logprobs(algorithm: AlgorithmConfig) -> str:
    """Return the setting that needs the policy's log-probs before the update; empty if none."""
    if algorithm.distill.kind == "sampled":
        return "distill.kind: sampled"
    kl = algorithm.kl
    if kl.used and kl.where == "reward":
        return "kl.where: reward"
    if kl.used and kl.controller == "adaptive":
        return "kl.controller: adaptive"
    return ""


def _objective_reads_old(algorithm: AlgorithmConfig) -> bool:
    """Return whether a term of the loss reads the old log-probs; a user's loss may."""
    loss = algorithm.loss.name
    if loss not in POLICY_LOSSES or "old" in POLICY_LOSSES.about(loss).needs:
        return True
    return algorithm.policy_drift.coef > 0 or algorithm.kl.weighted


def _kl(algorithm: AlgorithmConfig) -> Iterator[str]:
    kl = algorithm.kl
    if kl.where == "none" and kl.final > 0:
        yield (
            f"algorithm.kl.final = {kl.final} but kl.where is 'none'; set kl.where to 'reward' "
            "or 'loss'"
        )
    if kl.weighted and kl.where != "loss":
        yield (
            "algorithm.kl.weighted weighs the KL term of the loss by the ratio, and kl.where is "
            f"{kl.where!r}: a KL in the reward is a number without gradient, weighed with the "
            "rest by the policy loss; set kl.where: loss, or leave kl.weighted out"
        )
    if kl.weighted and kl.estimator == "k2":
        yield (
            "algorithm.kl.weighted with estimator k2: the ratio times k2 is an estimate of no "
            "KL, and its expected gradient is not that of KL(policy, reference); take k3 or k1"
        )
    yield from _kl_controller(kl)


def _kl_controller(kl: KLConfig) -> Iterator[str]:
    # fixed reads none of them
    read = {
        "adaptive": {"target", "horizon"},
        "linear": {"final", "steps"},
        "cosine": {"final", "steps"},
    }
    unread = {"target", "horizon", "final", "steps"} - read.get(kl.controller, set())
    yield from _changes_nothing("algorithm.kl", kl, unread, f"kl.controller is {kl.controller!r}")
    if kl.controller in SCHEDULES and kl.steps is None:
        yield (
            f"algorithm.kl.steps is missing: controller {kl.controller!r} goes from kl.coef to "
            "kl.final in so many steps"
        )
    if kl.controller == "adaptive" and kl.where != "none" and kl.coef == 0:
        yield (
            "algorithm.kl.coef = 0 stays 0 under kl.controller: adaptive, which multiplies it; "
            "start above 0"
        )


def _rewards(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield reward changes that the advantage does not read, or that invalidate its threshold."""
    normalize = algorithm.normalize
    changes: dict[str, str] = {}
    if normalize.terms != "none":
        changes["normalize.terms"] = normalize.terms
    if normalize.rewards != "none":
        changes["normalize.rewards"] = normalize.rewards
    if algorithm.kl.used and algorithm.kl.where == "reward":
        changes["kl.where"] = "reward"
    if algorithm.advantage.name == "rft":
        for key, value in changes.items():
            yield (
                f"algorithm.{key} = {value} moves rewards, and advantage 'rft' compares them "
                "with options.threshold, which is for rewards as they were scored; leave it out "
                "(a KL may stand in the loss)"
            )
    centred = [key for key, value in changes.items() if value not in ("scale", "reward")]
    if algorithm.advantage.name == "maxrl" and centred:
        yield (
            f"algorithm.{centred[0]} = {changes[centred[0]]} centres rewards, and advantage 'maxrl' "
            "divides by their mean in a group, of rewards that are 0 or positive; leave it out, or "
            "set normalize.rewards to scale"
        )
    if algorithm.advantage.name == "teacher":
        if algorithm.shaping:
            changes["shaping"] = algorithm.shaping[0].name
        if algorithm.advantage.normalize != "none":
            changes["advantage.normalize"] = algorithm.advantage.normalize
        for key, value in changes.items():
            yield (
                f"algorithm.{key} = {value} changes nothing: advantage 'teacher' takes no "
                "reward; leave it out"
            )


def _other_terms(algorithm: AlgorithmConfig) -> Iterator[str]:
    entropy = algorithm.entropy
    if entropy.target is None:
        why = "entropy.target is not set"
        yield from _changes_nothing("algorithm.entropy", entropy, {"rate"}, why)
    elif entropy.coef < 0:
        yield (
            f"algorithm.entropy.coef = {entropy.coef}: with entropy.target it is where the bonus "
            "starts, and is never below 0"
        )
    drift = algorithm.policy_drift
    if not drift.coef:
        unread = {"estimator", "cap", "level"}
        yield from _changes_nothing(
            "algorithm.policy_drift", drift, unread, "policy_drift.coef is 0"
        )
    elif drift.cap is not None and drift.estimator != "k3":
        yield (
            "algorithm.policy_drift.cap bounds the gradient of k3 alone, and "
            f"policy_drift.estimator is {drift.estimator!r}; leave one out"
        )
    positive = algorithm.positive_nll
    if not positive.coef:
        why = "positive_nll.coef is 0"
        yield from _changes_nothing("algorithm.positive_nll", positive, {"threshold"}, why)


def _lagrangian(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield constraints without effect, and parts that leave no meaning to a cost."""
    settings, advantage = algorithm.lagrangian, algorithm.advantage.name
    key = "algorithm.lagrangian"
    if not settings.costs:
        unread = {"init", "lr", "max", "delay_steps", "window"}
        why = "lagrangian.costs is empty; name a term of the reward, e.g. [cost]"
        yield from _changes_nothing(key, settings, unread, why)
        return
    if not settings.lr:
        why = "lagrangian.lr is 0, so that multipliers stay at lagrangian.init"
        yield from _changes_nothing(key, settings, {"max", "delay_steps", "window"}, why)
        for i, cost in enumerate(settings.costs):
            yield from _changes_nothing(f"{key}.costs.{i}", cost, {"threshold"}, why)
    needs = ADVANTAGES.about(advantage).needs if advantage in ADVANTAGES else frozenset()
    if advantage in UNEVEN_ADVANTAGES or needs & {"greedy", "prm", "teacher"}:
        yield (
            f"{key}.costs: advantage {advantage!r} is for rewards alone, and a cost would get no "
            "meaningful advantage; take grpo, rloo, reinforce or gae"
        )
    if "critic" in needs and len(settings.costs) > 1:
        yield (
            f"{key}.costs names {len(settings.costs)} costs, and advantage {advantage!r} has one "
            "cost critic; name one cost, or take an advantage without critic, e.g. grpo"
        )
    if algorithm.normalize.values:
        yield (
            f"algorithm.normalize.values = True with {key}.costs: the critics of reward and cost "
            "must keep the units that the multiplier compares; leave normalize.values out"
        )
    if any(part.name == "zero_variance" for part in algorithm.filters):
        yield (
            "algorithm.filters: 'zero_variance' drops groups of equal rewards, whose costs may "
            f"differ and which {key} then never limits; leave the filter out"
        )


def _changes_nothing(key: str, settings: Settings, names: set[str], why: str) -> Iterator[str]:
    fields = type(settings).model_fields
    for name in sorted(names):
        value = getattr(settings, name)
        if value != fields[name].default:
            yield f"{key}.{name} = {value} changes nothing: {why}"
