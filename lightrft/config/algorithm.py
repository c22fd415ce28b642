"""Settings of the algorithm: advantage, loss, KL, distillation, entropy."""

from __future__ import annotations

import difflib
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lightrft.config.base import NamedFunction, Part, Settings, _full_parts, deep_merge
from lightrft.config.presets import PRESETS


class AdvantageConfig(NamedFunction):
    """Rewards to advantages. ``whiten`` standardises over the trained tokens of the global ``batch`` or of each ``group``; ``eps``
    guards a division by a standard deviation; ``gamma`` and ``lam`` are the discount and the trace of GAE (arXiv 1506.02438)."""

    name: str = "grpo"
    gamma: float = Field(1.0, ge=0, le=1)
    lam: float = Field(0.95, ge=0, le=1)
    eps: float = Field(1e-6, ge=0)
    whiten: Literal["none", "group", "batch"] = "none"
    options: dict[str, Any] = Field(default_factory=dict)


class LossConfig(NamedFunction):
    """The policy loss of a token. The ratio, of a ``token``, of the whole ``sequence`` (arXiv 2507.18071, eq. 7) or of the sequence
    with the gradient of the token (``sequence_token``, eq. 14), is clipped to ``[1 - clip_low, 1 + clip_high]``; ``dual_clip`` bounds
    the loss of negative advantages at that multiple (arXiv 1912.09729), ``ratio_cap`` their ratio (arXiv 2505.07291)."""

    name: str = "ppo_clip"
    ratio: Literal["token", "sequence", "sequence_token"] = "token"
    clip_low: float = Field(0.2, ge=0)
    clip_high: float = Field(0.2, ge=0)
    dual_clip: float | None = Field(None, gt=1)
    ratio_cap: float | None = Field(None, gt=1)
    options: dict[str, Any] = Field(default_factory=dict)


class KLConfig(Settings):
    """Distance to the reference. ``weighted`` multiplies its estimate in the loss by the ratio of the token, with gradient, so that the
    expected gradient is that of KL(policy, reference) off policy too (arXiv 2512.02556, section 3.1).

    ``adaptive`` moves the coefficient so that the KL nears ``target``, over ``horizon`` samples (arXiv 1909.08593, section 2.2);
    ``linear`` and ``cosine`` take it from ``coef`` to ``final`` in ``steps`` steps.
    Every ``refresh_every`` steps (0: never) the reference becomes ``refresh_decay`` times itself plus the rest of the policy.
    """

    functions: ClassVar[tuple[str, ...]] = ("estimator",)
    where: Literal["none", "reward", "loss"] = "none"
    estimator: str = "k3"
    weighted: bool = False
    coef: float = Field(0.0, ge=0)
    controller: Literal["fixed", "adaptive", "linear", "cosine"] = "fixed"
    target: float = Field(6.0, gt=0)
    horizon: int = Field(10_000, ge=1)
    final: float = Field(0.0, ge=0)
    steps: int | None = Field(None, ge=1)
    refresh_every: int = Field(0, ge=0)
    refresh_decay: float = Field(0.0, ge=0, lt=1)

    @property
    def used(self) -> bool:
        """Whether any KL term exists, so that a reference is needed."""
        return self.where != "none" and (self.coef > 0 or self.final > 0)

    @model_validator(mode="after")
    def _means_something(self) -> KLConfig:
        if self.where == "none" and self.coef > 0:
            raise ValueError(f"kl.coef is {self.coef} but kl.where is 'none'; set kl.where to 'reward' or 'loss'")
        if self.where == "loss" and self.estimator == "k1" and self.used and not self.weighted:
            raise ValueError(
                "kl.estimator k1 in the loss has zero expected gradient; take k2 or k3, or kl.weighted: true, or kl.where: reward"
            )
        if self.refresh_decay and not self.refresh_every:
            raise ValueError(
                f"kl.refresh_decay = {self.refresh_decay} changes nothing without kl.refresh_every; set that, e.g. to 1"
            )
        return self


class DistillConfig(Settings):
    """What the policy learns from ``teacher`` on its own answers, times ``coef``.

    ``sampled`` takes the log-ratio of policy to teacher at each sampled token off its advantage (the reverse KL, by sampling).
    ``reverse_kl``, ``forward_kl`` and ``jsd`` are losses over the whole vocabulary (arXiv 2306.13649), both distributions at
    ``temperature``, which is that of sampling unless given; ``beta`` is the teacher's share in the mixture of ``jsd``.
    """

    shorthand: ClassVar[str | None] = "kind"

    kind: Literal["none", "sampled", "reverse_kl", "forward_kl", "jsd"] = "none"
    coef: float = Field(1.0, gt=0)
    beta: float = Field(0.5, gt=0, lt=1)
    temperature: float | None = Field(None, gt=0)

    @property
    def whole(self) -> bool:
        """Whether the whole vocabulary is compared, and not the sampled token alone."""
        return self.kind not in ("none", "sampled")

    @model_validator(mode="after")
    def _means_something(self) -> DistillConfig:
        if self.kind != "jsd" and self.beta != 0.5:
            raise ValueError(f"distill.beta = {self.beta} changes nothing: only kind jsd reads it")
        if not self.whole and self.temperature is not None:
            raise ValueError(
                f"distill.temperature = {self.temperature} changes nothing with kind {self.kind}; sampling.temperature holds there"
            )
        if self.kind == "none" and self.coef != 1.0:
            raise ValueError(f"distill.coef = {self.coef} changes nothing: set distill.kind, e.g. to sampled")
        return self


class EntropyConfig(Settings):
    """``coef`` times the policy's entropy is taken off the loss. With a ``target`` (nats a token) that is where the coefficient starts:
    each step moves it by ``rate``, up below the target and down above, and above the target it does not act (arXiv 2505.22312)."""

    coef: float = 0.0
    target: float | None = Field(None, ge=0)
    rate: float = Field(0.005, gt=0)

    @property
    def used(self) -> bool:
        """Whether the loss may have an entropy term."""
        return self.coef != 0 or self.target is not None


class DriftConfig(Settings):
    """``coef`` times the distance of the policy from the old one, estimated from tokens of the old one (CPGD, arXiv 2505.12504). ``cap``
    bounds the pull of ``k3``, whose gradient is the ratio less 1, from above."""

    functions: ClassVar[tuple[str, ...]] = ("estimator",)
    coef: float = Field(0.0, ge=0)
    estimator: str = "k3"
    cap: float | None = Field(None, gt=0)
    level: Literal["token", "response"] = "token"
    """Where the distance is measured: at each token, or from the log-probs of the whole response, shared out over its tokens. ``response``
    with the estimator ``k2`` is the square of Kimi k1.5 (arXiv 2501.12599)."""


class PositiveConfig(Settings):
    """``coef`` times the mean negative log-likelihood of the tokens of answers whose reward, before shaping, reaches ``threshold``
    (VAPO, arXiv 2504.05118, section 4.4)."""

    coef: float = Field(0.0, ge=0)
    threshold: float = 1.0


class NormalizeConfig(Settings):
    """Rewards and values on a scale of their own, with mean 0 and deviation 1 up to ``eps``.

    ``terms``: each term of the reward over the answers of its ``group`` or of the ``batch``, before the weighted sum. ``rewards``:
    over all that the run has seen, the batch's included, before any shaping; ``scale`` divides by the deviation and does not
    shift. ``values``: the critic speaks of returns so, over all that the run has seen (arXiv 1602.07714, arXiv 2103.01955).
    """

    terms: Literal["none", "group", "batch"] = "none"
    rewards: Literal["none", "standard", "scale"] = "none"
    values: bool = False
    eps: float = Field(1e-6, ge=0)

    @model_validator(mode="after")
    def _one_scale(self) -> NormalizeConfig:
        if self.terms != "none" and self.rewards != "none":
            raise ValueError(
                f"normalize.terms is {self.terms!r} and normalize.rewards {self.rewards!r}: terms that have a scale of their own need no "
                "other for their sum; leave one of them out"
            )
        return self


class ValueConfig(Settings):
    """Critic loss: half the squared error; the larger of plain and clipped to ``clip`` around the old value, in the unit in which
    the critic speaks: that of rewards or, with ``normalize.values``, deviations of returns."""

    clip: float | None = Field(0.2, gt=0)


class AlgorithmConfig(Settings):
    """An algorithm as a row of settings over shared functions.

    A ``preset`` fills in a published row; what stands beside it wins. ``preset: null`` starts from the parts' own defaults.
    ``proximal`` is where the ratio's old log-probs come from: the policy before the update, the sampler that drew the tokens, or
    ``interpolated`` between the sampler and the policy now, by the version that drew each token, without a forward (AReaL).
    ``corrections`` weight token losses by how far the two are apart, ``gates`` leave tokens of a mini-batch out.
    ``aggregation`` turns token losses into the loss of the global batch; ``constant_length`` is the divisor of ``constant``
    (its default is the longest answer that sampling allows).
    """

    functions: ClassVar[tuple[str, ...]] = ("aggregation",)
    shorthand: ClassVar[str | None] = "preset"

    preset: str | None = "grpo"
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    proximal: Literal["policy", "behavior", "interpolated"] = "policy"
    corrections: tuple[Part, ...] = ()
    gates: tuple[Part, ...] = ()
    aggregation: str = "token"
    constant_length: int | None = Field(None, ge=1)
    kl: KLConfig = KLConfig()
    distill: DistillConfig = DistillConfig()
    entropy: EntropyConfig = EntropyConfig()
    drift: DriftConfig = DriftConfig()
    positive_nll: PositiveConfig = PositiveConfig()
    value: ValueConfig = ValueConfig()
    normalize: NormalizeConfig = NormalizeConfig()
    shaping: tuple[Part, ...] = ()
    filters: tuple[Part, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _preset_first(cls, tree: Any) -> Any:
        tree = {"preset": tree} if isinstance(tree, str) else tree
        if not isinstance(tree, dict):
            return tree
        tree = {k: _full_parts(v) if k in PARTS else v for k, v in tree.items()}
        name = tree.setdefault("preset", "grpo")
        if name is None:
            return tree
        if name not in PRESETS:
            near = difflib.get_close_matches(str(name), PRESETS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ValueError(f"unknown preset {name!r}{hint} Known: {', '.join(sorted(PRESETS))}")
        row = {k: v for k, v in PRESETS[name].items() if not _renamed(v, tree.get(k))}
        return deep_merge(row, tree)


PARTS = ("shaping", "filters", "corrections", "gates")


def _renamed(preset: Any, given: Any) -> bool:
    """Whether ``given`` takes another function than ``preset`` does: that one's numbers are not for it."""
    name = given.get("name") if isinstance(given, dict) else given if isinstance(given, str) else None
    return isinstance(preset, dict) and name is not None and preset.get("name") not in (None, name)
