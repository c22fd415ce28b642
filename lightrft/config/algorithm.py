"""Settings of the algorithm: advantage, loss, KL, distillation, entropy, constraints."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from lightrft.config.base import (
    Components,
    NamedFunction,
    Settings,
    deep_merge,
    is_branch,
    strings_as,
)
from lightrft.config.presets import PRESETS, other_verb
from lightrft.config.read_by import ReadBy
from lightrft.utils.errors import did_you_mean


class AdvantageConfig(NamedFunction):
    """The function that turns token rewards into advantages, and its numbers."""

    name: str = "grpo"
    """Advantage function. A registered name, ``package.module:function`` or
    ``file.py:function``."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of rewards per token, in [0, 1]. 1 gives every token of a response the undiscounted
    return."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """Trace of GAE (arXiv 1506.02438), in [0, 1]. Lower it to trust the critic more: less variance,
    more bias."""
    bootstrap_truncated: bool = False
    """Add the critic's value of the state after the last token of a response that was cut at the
    length limit, as if it went on. The critic learns this value from the reward of the response.
    Otherwise the value after the end of every response is 0. Advantages with a critic read it."""
    eps: float = Field(1e-6, ge=0)
    """Added to a standard deviation, or another denominator of the advantage, so that no division
    is by 0."""
    normalize: Literal["none", "group", "batch"] = "none"
    """Standardise advantages over the trained tokens of the global ``batch`` or of each ``group``.
    ``none`` leaves them as they are."""
    clip: float | None = Field(None, gt=0)
    """Clip advantages to ``[-clip, clip]``, after ``normalize`` and a teacher's part. ``null``
    clips nothing."""
    options: dict[str, object] = Field(default_factory=dict)
    """Further keyword arguments of the advantage function."""


class LossConfig(NamedFunction):
    """The policy loss of a token, and its clipping."""

    name: str = "ppo_clip"
    """Policy loss. A registered name, ``package.module:function`` or ``file.py:function``."""
    ratio: Literal["token", "sequence", "sequence_token"] = "token"
    """Level of the importance ratio: of a ``token``, or of the whole ``sequence`` (arXiv
    2507.18071, eq. 7). ``sequence_token`` has the value of the sequence's ratio and the gradient of
    the token's (eq. 14)."""
    clip_low: float = Field(0.2, ge=0)
    """Clip the ratio from below at ``1 - clip_low``. Raise it to let probabilities fall further in
    one step."""
    clip_high: float = Field(0.2, ge=0)
    """Clip the ratio from above at ``1 + clip_high``. Raise it above ``clip_low`` to let unlikely
    tokens grow more."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound the loss of a negative advantage at this multiple of its size (arXiv 1912.09729). Above
    1; ``null`` sets no bound."""
    ratio_cap: float | None = Field(None, gt=1)
    """Cap the ratio of tokens with a negative advantage at this value (arXiv 2505.07291). Above ``1
    + clip_high``; ``null`` sets no cap."""
    options: dict[str, object] = Field(default_factory=dict)
    """Further keyword arguments of the policy loss."""


class KLConfig(Settings):
    """The distance of the policy to the reference: where it acts, its coefficient, and when the
    reference moves."""

    section: ClassVar[str] = "algorithm.kl"
    """Key of the section, for messages."""
    shorthand: ClassVar[str | None] = "coef"
    """The setting that a bare string or number stands for."""
    functions: ClassVar[tuple[str, ...]] = ("estimator",)
    """The settings of this section that name functions."""
    where: Literal["none", "reward", "loss"] = "none"
    """Take the KL off the ``reward`` of each token, add it to the ``loss``, or leave it out
    (``none``)."""
    estimator: str = "k3"
    """Estimator of the KL from log-probs. A registered name, ``package.module:function`` or
    ``file.py:function``. ``k1`` in the loss needs ``weighted``."""
    weighted: bool = False
    """Multiply the estimate in the loss by the ratio of the token, with gradient. The expected
    gradient is then that of KL(policy, reference) off policy too (arXiv 2512.02556, section
    3.1)."""
    coef: float = Field(0.0, ge=0)
    """Coefficient of the KL, 0 or more. ``fixed`` keeps it; the other controllers start from it."""
    controller: Literal["fixed", "adaptive", "linear", "cosine"] = "fixed"
    """Schedule of the coefficient. ``adaptive`` moves it so that the KL nears ``target`` (arXiv
    1909.08593, section 2.2). ``linear`` and ``cosine`` take it from ``coef`` to ``final`` in
    ``steps`` steps."""
    target: float = Field(6.0, gt=0)
    """KL that ``adaptive`` steers to, in nats per response: the sum over its tokens."""
    horizon: int = Field(10_000, ge=1)
    """Number of responses over which ``adaptive`` corrects the coefficient. Raise it for larger
    batches, or the coefficient swings."""
    final: float = Field(0.0, ge=0)
    """Coefficient at the end of a ``linear`` or ``cosine`` schedule."""
    steps: int | None = Field(None, ge=1)
    """Rollout steps from ``coef`` to ``final``. ``linear`` and ``cosine`` need it."""
    refresh_every: int = Field(0, ge=0)
    """Update the reference from the policy after every so many steps; 0 never does. Not with
    ``model.lora``, where the reference is the model without its adapters."""
    refresh_decay: float = Field(0.0, ge=0, lt=1)
    """Weight of the old reference in a refresh, in [0, 1). The policy has the rest; 0 copies the
    policy."""

    @property
    def used(self) -> bool:
        """True if any KL term exists, so that a reference is needed."""
        # A ``linear`` or ``cosine`` schedule may start from 0 and end above it.
        return self.where != "none" and max(self.coef, self.final) > 0

    @model_validator(mode="after")
    def _means_something(self) -> KLConfig:
        if self.where == "none" and self.coef > 0:
            raise ValueError(
                f"kl.coef is {self.coef} but kl.where is 'none'; set kl.where to 'reward' or 'loss'"
            )
        # The gradient of an unweighted k1 is that of a log-prob, whose mean is 0 on policy.
        is_plain_k1 = (self.where, self.estimator, self.weighted) == ("loss", "k1", False)
        if is_plain_k1 and self.used:
            raise ValueError(
                "kl.estimator k1 in the loss has zero expected gradient; take k2 or k3, or "
                "kl.weighted: true, or kl.where: reward"
            )
        if self.refresh_decay and not self.refresh_every:
            raise ValueError(
                f"kl.refresh_decay = {self.refresh_decay} changes nothing without "
                "kl.refresh_every; set that, e.g. to 1"
            )
        return self


_WHOLE = ("reverse_kl", "forward_kl", "jsd")
"""Kinds of distillation that compare the whole vocabulary."""


class DistillConfig(Settings):
    """On-policy distillation: the policy learns from ``teacher`` on its own responses (arXiv
    2306.13649)."""

    section: ClassVar[str] = "distill"
    """Key of the section, for messages."""
    shorthand: ClassVar[str | None] = "kind"
    """The setting that a bare string or number stands for."""

    kind: Literal["none", "sampled", "reverse_kl", "forward_kl", "jsd"] = "none"
    """Signal of the teacher. ``sampled`` takes the log-ratio of policy to teacher at each sampled
    token off its advantage (the reverse KL, by sampling). ``reverse_kl``, ``forward_kl`` and
    ``jsd`` are losses over the whole vocabulary."""
    coef: Annotated[float, ReadBy(*_WHOLE, "sampled")] = Field(1.0, gt=0)
    """Factor of the log-ratio or the loss. Positive."""
    beta: Annotated[float, ReadBy("jsd")] = Field(0.5, gt=0, lt=1)
    """The teacher's share in the mixture of ``jsd``, between 0 and 1."""
    temperature: Annotated[float | None, ReadBy(*_WHOLE)] = Field(None, gt=0)
    """Temperature of both distributions in a loss over the whole vocabulary; ``null`` takes the
    sampling temperature."""

    @property
    def whole(self) -> bool:
        """True if the whole vocabulary is compared, not the sampled token alone."""
        return self.kind in _WHOLE


class EntropyConfig(Settings):
    """The entropy bonus: the policy's entropy times a coefficient is taken off the loss."""

    coef: float = 0.0
    """Coefficient of the bonus. With a ``target``, its start value, which must then be 0 or
    more."""
    target: float | None = Field(None, ge=0)
    """Entropy in nats per token below which the bonus acts (arXiv 2505.22312). Each step moves the
    coefficient up below the target and down above it. ``null`` keeps the coefficient fixed."""
    rate: float = Field(0.005, gt=0)
    """Change of the coefficient in one step. Only ``target`` reads it."""

    @property
    def used(self) -> bool:
        """True if the loss may have an entropy term."""
        # With a target, a coefficient of 0 may rise in any step.
        return self.coef != 0 or self.target is not None


class PolicyDriftConfig(Settings):
    """The distance of the policy from the old policy, estimated on tokens of the old one (CPGD,
    arXiv 2505.12504)."""

    functions: ClassVar[tuple[str, ...]] = ("estimator",)
    """The settings of this section that name functions."""
    coef: float = Field(0.0, ge=0)
    """Coefficient of the distance in the loss; 0 leaves it out."""
    estimator: str = "k3"
    """Estimator of the distance from log-probs. A registered name, ``package.module:function`` or
    ``file.py:function``."""
    cap: float | None = Field(None, gt=0)
    """Upper bound of the gradient of ``k3``, which is the ratio less 1. ``null`` sets no bound;
    other estimators have none."""
    level: Literal["token", "response"] = "token"
    """Measure the distance at each ``token``, or from the log-probs of the whole ``response``,
    shared out over its tokens. ``response`` with the estimator ``k2`` is the square of Kimi k1.5
    (arXiv 2501.12599)."""


class PositiveNLLConfig(Settings):
    """The negative log-likelihood of good responses as a further loss (VAPO, arXiv 2504.05118,
    section 4.4)."""

    coef: float = Field(0.0, ge=0)
    """Factor of the mean negative log-likelihood over the tokens of these responses; 0 leaves it
    out."""
    threshold: float = 1.0
    """Reward, before shaping, that a response must reach to count."""


class NormalizeConfig(Settings):
    """Rewards and values with mean 0 and standard deviation 1."""

    terms: Literal["none", "group", "batch", "running"] = "none"
    """Standardise each term of the reward over the responses of its ``group`` or of the ``batch``,
    or over all that the run has seen, the current batch included (``running``), before the weighted
    sum. Not together with ``rewards``."""
    rewards: Literal["none", "standard", "scale"] = "none"
    """Scale rewards by all that the run has seen, the current batch included, before any shaping.
    ``standard`` shifts and divides; ``scale`` divides by the deviation and keeps the sign."""
    values: bool = False
    """Let the critic predict returns standardised over all that the run has seen (arXiv 1602.07714,
    arXiv 2103.01955). Only advantages with a critic read it."""
    eps: float = Field(1e-6, ge=0)
    """Added to a standard deviation before it divides."""

    @model_validator(mode="after")
    def _one_scale(self) -> NormalizeConfig:
        if "none" not in (self.terms, self.rewards):
            raise ValueError(
                f"normalize.terms is {self.terms!r} and normalize.rewards {self.rewards!r}: "
                "terms with separate scales need none for their sum; leave one of "
                "them out"
            )
        return self


class ValueConfig(Settings):
    """The critic loss: half the squared error."""

    clip: float | None = Field(0.2, gt=0)
    """Take the larger of the plain error and the error clipped to this distance from the old value.
    In units of the critic: of rewards or, with ``normalize.values``, deviations of returns.
    ``null`` clips nothing."""


class CostConfig(Settings):
    """One cost, and the limit of its mean."""

    shorthand: ClassVar[str | None] = "name"
    """The setting that a bare string or number stands for."""

    name: str
    """Name of a term of ``reward.terms`` or of a model of ``reward.models``, whose ``weight`` must
    be 0. Lower costs are better."""
    threshold: float = 0.0
    """Limit of the mean cost of responses. For a cost model with sign terms, 0 divides safe from
    unsafe responses."""


class LagrangianConfig(Settings):
    """Limits of the mean costs of responses, each enforced by a multiplier (Safe RLHF, arXiv
    2310.12773). A multiplier rises while the mean cost is above its threshold, and falls below
    it."""

    shorthand: ClassVar[str | None] = "costs"
    """The setting that a bare string or number stands for."""

    costs: Annotated[tuple[CostConfig, ...], strings_as("name")] = ()
    """Costs to limit: names, or tables; see ``CostConfig``. Without costs nothing is limited."""
    init: float = Field(1.0, gt=0)
    """Multiplier of each cost at the start. Positive."""
    lr: float = Field(0.1, ge=0)
    """Learning rate of the logarithm of a multiplier. 0 keeps the multipliers fixed."""
    max: float = Field(5.0, gt=0)
    """Upper bound of a multiplier. Its logarithm grows ever faster, so that a bound is needed."""
    delay_steps: int = Field(0, ge=0)
    """Steps of the policy before multipliers begin to move."""
    window: int = Field(128, ge=1)
    """Number of latest responses over which the mean cost is taken. A larger batch counts as a
    whole."""

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the costs."""
        return frozenset(cost.name for cost in self.costs)

    @model_validator(mode="after")
    def _means_something(self) -> LagrangianConfig:
        names = [cost.name for cost in self.costs]
        if len(set(names)) < len(names):
            raise ValueError(
                f"lagrangian.costs has a name twice: {', '.join(names)}; give each cost once"
            )
        if self.init > self.max:
            raise ValueError(
                f"lagrangian.init = {self.init} is above lagrangian.max = {self.max}; lower init, "
                "or raise max"
            )
        return self


PARTS = ("shaping", "filters", "importance_sampling", "token_masks")
"""Fields of ``AlgorithmConfig`` that are lists of functions."""


class AlgorithmConfig(Settings):
    """An algorithm as a row of settings over shared functions. A ``preset`` fills in a published
    row; what stands next to it wins."""

    functions: ClassVar[tuple[str, ...]] = ("aggregation",)
    """The settings of this section that name functions."""
    shorthand: ClassVar[str | None] = "preset"
    """The setting that a bare string or number stands for."""

    preset: str | None = "grpo"
    """Published row of settings to start from; see ``docs/algorithms.md``. ``null`` starts from the
    parts' own defaults."""
    advantage: AdvantageConfig = AdvantageConfig()
    """Rewards to advantages."""
    loss: LossConfig = LossConfig()
    """Policy loss."""
    old_logprobs: Literal["policy", "rollout", "interpolated"] = "policy"
    """Source of the old log-probs in the ratio. ``policy``: the policy before the update.
    ``rollout``: the sampler that generated the tokens. ``interpolated``: between the sampler and
    the current policy, by the version that generated each token, without a forward pass (AReaL)."""
    importance_sampling: Components = ()
    """Weights on token losses, by the distance of sampler and old policy. Functions by name,
    multiplied. Set it when responses come from other weights."""
    token_masks: Components = ()
    """Functions that leave tokens of a mini-batch out of the loss."""
    aggregation: str = "token"
    """Token losses to the loss of the global batch. A registered name, ``package.module:function``
    or ``file.py:function``."""
    constant_length: int | None = Field(None, ge=1)
    """Divisor of the aggregation ``constant``, in tokens; ``null`` takes
    ``sampling.max_new_tokens``."""
    kl: KLConfig = KLConfig()
    """Distance to the reference."""
    distill: DistillConfig = DistillConfig()
    """Distillation from ``teacher``."""
    entropy: EntropyConfig = EntropyConfig()
    """Entropy bonus."""
    policy_drift: PolicyDriftConfig = PolicyDriftConfig()
    """Distance to the old policy."""
    positive_nll: PositiveNLLConfig = PositiveNLLConfig()
    """Likelihood of good responses as a further loss."""
    value: ValueConfig = ValueConfig()
    """Critic loss."""
    lagrangian: LagrangianConfig = LagrangianConfig()
    """Limits of costs."""
    normalize: NormalizeConfig = NormalizeConfig()
    """Scales of rewards and values."""
    shaping: Components = ()
    """Functions that change the rewards of a batch, in order, before advantages."""
    filters: Components = ()
    """Functions that drop groups. Another prompt is sampled for each dropped group, within
    ``rollout.max_rounds``."""

    # Pydantic runs "before" validators in reverse order: this one, then the merge of ``Settings``.
    # So a branch gets the defaults of its field only where neither preset nor user set it.
    @model_validator(mode="before")
    @classmethod
    def _preset_first(cls, tree: object) -> object:
        """Put the settings that are given over the row of the preset."""
        tree = {"preset": tree} if isinstance(tree, str) else tree
        if not is_branch(tree):
            return tree
        given = {"preset": "grpo", **tree}
        name = given["preset"]
        if name is None:
            return given
        row = PRESETS.get(str(name))
        if row is None:
            hint = other_verb(str(name), PRESETS)
            hint = hint or did_you_mean(str(name), PRESETS) or "."
            raise ValueError(f"unknown preset {name!r}{hint} Known: {', '.join(sorted(PRESETS))}")
        kept = {key: part for key, part in row.items() if not _renamed(part, given.get(key))}
        return deep_merge(kept, given)


def _renamed(preset: object, given: object) -> bool:
    """Return True if ``given`` names another function than ``preset``.

    The numbers of the preset are not meant for that function.
    """
    name = given.get("name") if is_branch(given) else given
    return is_branch(preset) and isinstance(name, str) and name != preset.get("name", name)
