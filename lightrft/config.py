"""The trees that a user's YAML fills, one per verb. Settings of lower layers live beside what reads them."""

from __future__ import annotations

import difflib
from pathlib import PurePath
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from lightrft.datasets.settings import DataConfig, MediaConfig
from lightrft.models.settings import DType, ModelConfig
from lightrft.presets import PRESETS
from lightrft.strategy.settings import EngineConfig, OptimizerConfig, SamplingConfig, StrategyConfig
from lightrft.utils.settings import NamedFunction, Settings, deep_merge


class RewardTerm(Settings):
    """One term of a reward. ``function``: a registered name, ``package.module:function`` or ``file.py:function``;
    ``options`` are passed to it as keywords. The reward of an answer is the weighted sum of its terms, each logged by ``name``."""

    functions: ClassVar[tuple[str, ...]] = ("function",)
    shorthand: ClassVar[str | None] = "function"

    function: str
    weight: float = 1.0
    name: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)


class RewardConfig(Settings):
    """How answers are scored. ``per_source`` gives rows of one data source terms of their own.

    Functions run in ``workers`` processes, each call under ``deadline`` seconds and ``memory_mb`` MiB on top of what a
    worker needs to start. A call that fails in any way fails its samples only: they are counted and never trained on.
    """

    terms: tuple[RewardTerm, ...] = ()
    per_source: dict[str, tuple[RewardTerm, ...]] = Field(default_factory=dict)
    workers: int = Field(1, ge=1)
    deadline: float = Field(10.0, gt=0)
    memory_mb: int = Field(2048, ge=64)

    @model_validator(mode="before")
    @classmethod
    def _bare_names(cls, tree: Any) -> Any:
        """``terms: [math]`` stands for ``terms: [{function: math}]``."""

        if isinstance(tree, dict):
            tree = dict(tree)
            if "terms" in tree:
                tree["terms"] = _full_parts(tree["terms"], "function")
            if isinstance(tree.get("per_source"), dict):
                tree["per_source"] = {k: _full_parts(v, "function") for k, v in tree["per_source"].items()}
        return tree


class RunConfig(Settings):
    """The run folder, ``dir``/``name``, and how a run starts.

    ``resume``: ``auto`` goes on from the newest checkpoint of a folder whose config is equal, ``never`` refuses a folder that
    exists, a path goes on from that checkpoint. ``overwrite`` starts anew in a folder that exists. ``threads`` 0 leaves the
    number of CPU threads to the program.
    """

    paths: ClassVar[tuple[str, ...]] = ("resume",)
    name: str = "run"
    dir: str = "runs"
    seed: int = Field(0, ge=0)
    resume: str = "auto"
    overwrite: bool = False
    threads: int = Field(0, ge=0)
    progress: bool = True

    @field_validator("name")
    @classmethod
    def _below_dir(cls, name: str) -> str:
        path = PurePath(name)
        if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
            raise ValueError(
                f"{name!r} is no folder below run.dir; give a name such as 'first' or 'trials/first', and set run.dir"
            )
        return name


WORKERS = {
    "engines": "engine",
    "scorers": "scorer",
    "references": "reference",
    "teachers": "teacher",
    "critic": "critic",
    "process": "process",
}
"""Settings of ``RayConfig`` that give a role workers, and what one of those is called."""


class RayConfig(Settings):
    """How ``launch.kind: ray`` uses a cluster.

    ``address``: ``null`` starts one of this machine alone, for the time of the run; ``auto`` or ``host:port`` joins one that is there.
    Each rank asks for ``cpus`` processors and for ``devices`` of an accelerator (``null``: a whole one, where ranks compute on them; ranks
    never share one). ``placement`` is Ray's strategy for the bundles of these. What is asked for has ``wait`` minutes to be free.
    A rank that is lost, or its node, has all ranks start again from the last checkpoint, at most ``restarts`` times.
    ``environment`` is set in every process of the run.

    Roles may have workers of their own, apart from the ranks: ``engines`` that draw, ``scorers`` that call reward functions,
    ``references``, ``teachers``, the ``critic`` and the ``process`` reward model. Each asks for ``worker_cpus``, and engines for
    ``engine_devices``, models for ``model_devices`` of an accelerator (``null``: a whole one); what ranks leave of theirs is taken first.
    ``weights`` is how engines, and references that move, get them, in buckets of ``bucket_mb``: ``broadcast`` in a process group,
    ``shared`` in memory that both sides see, ``message`` through Ray. A worker that is lost, or silent for ``silence`` minutes
    (``null``: half of ``strategy.timeout``, which must be more: ranks wait for it), is started anew, ``restarts`` times in a row.
    """

    address: str | None = None
    cpus: float = Field(1.0, ge=0)
    devices: float | None = Field(None, gt=0, le=1)
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    wait: float = Field(5.0, gt=0)
    restarts: int = Field(3, ge=0)
    environment: dict[str, str] = Field(default_factory=dict)
    engines: int = Field(0, ge=0)
    scorers: int = Field(0, ge=0)
    references: int = Field(0, ge=0)
    teachers: int = Field(0, ge=0)
    critic: bool = False
    process: bool = False
    worker_cpus: float = Field(1.0, ge=0)
    engine_devices: float | None = Field(None, gt=0, le=1)
    model_devices: float | None = Field(None, gt=0, le=1)
    weights: Literal["broadcast", "shared", "message"] = "broadcast"
    bucket_mb: int = Field(256, ge=1)
    silence: float | None = Field(None, gt=0)

    @property
    def staff(self) -> dict[str, int]:
        """How many workers each setting asks for."""
        trained = {"critic": int(self.critic), "process": int(self.process)}
        models = {"references": self.references, "teachers": self.teachers, **trained}
        return {"engines": self.engines, "scorers": self.scorers, **models}

    @property
    def workers(self) -> dict[str, tuple[int, float | None]]:
        """How many workers of each kind, and the share of a device that one asks for, if they compute on such."""
        shares = {"engines": self.engine_devices, "scorers": 0.0}
        return {WORKERS[name]: (count, shares.get(name, self.model_devices)) for name, count in self.staff.items()}

    @model_validator(mode="after")
    def _of_workers(self) -> RayConfig:
        models, moving = ("references", "teachers", "critic", "process"), ("engines", "references")
        needed = {"engine_devices": ("engines",), "weights": moving, "bucket_mb": moving, "model_devices": models}
        for name, kinds in {**needed, "worker_cpus": tuple(self.staff), "silence": tuple(self.staff)}.items():
            value = getattr(self, name)
            if value != type(self).model_fields[name].default and not any(self.staff[kind] for kind in kinds):
                raise ValueError(f"launch.ray.{name} = {value!r} changes nothing without launch.ray.{' or '.join(kinds)}")
        return self


class LaunchConfig(Settings):
    """Where the processes of a run are started. ``kind`` ``local``: ``processes`` above 1 starts so many of them on this machine, by
    torchrun; one that torchrun has started itself counts as it is. ``ray``: on a Ray cluster, as ``ray`` says."""

    kind: Literal["local", "ray"] = "local"
    processes: int = Field(1, ge=1)
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def _of_kind(self) -> LaunchConfig:
        if self.kind != "ray" and (given := [k for k, f in RayConfig.model_fields.items() if self._differs(k, f)]):
            raise ValueError(
                f"launch.ray.{given[0]} = {getattr(self.ray, given[0])!r} changes nothing with kind {self.kind}; set launch.kind=ray"
            )
        return self

    def _differs(self, name: str, field: Any) -> bool:
        return getattr(self.ray, name) != field.get_default(call_default_factory=True)


class CheckpointConfig(Settings):
    """When a run saves a checkpoint, and which ones stay. It also saves at its end and when it is stopped."""

    every: int = Field(0, ge=0)
    """Save after every so many steps; 0 leaves it to ``every_minutes``. Set it to resume from, or export, certain steps."""
    every_minutes: float = Field(10.0, ge=0)
    """Save after the first step that ends so many minutes after the last save; 0 turns it off. A kill loses at most this time
    and one step. Raise it where a save takes minutes itself."""
    keep: int = Field(2, ge=1)
    """Number of newest checkpoints that stay on disk. Raise it to export earlier steps."""
    best: str | None = None
    """Metric whose best checkpoint stays too and is the one in ``model/``, e.g. ``eval/accuracy``; with a minus in front, less
    is better. A step that improves on all checkpoints is saved. Without it ``model/`` holds the last step."""


class LogConfig(Settings):
    """Where metrics and rollouts go. ``wandb`` names a project; ``rollouts_every`` counts steps, 0 writes none; ``batches_every`` too,
    for batches with all columns that were computed of them, which ``lightrft.trainer.replay`` puts through any phase again.

    ``entropy`` measures the policy's entropy also where no loss term needs it.
    """

    tensorboard: bool = True
    wandb: str | None = None
    rollouts_every: int = Field(1, ge=0)
    batches_every: int = Field(0, ge=0)
    entropy: bool = True


class Part(NamedFunction):
    """A registered function (or ``package.module:function``) with keywords of its own."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)


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


def _full_parts(parts: Any, key: str = "name") -> Any:
    """``[a, {name: b}]`` or a bare ``a`` with every bare name written out as ``{key: name}``."""
    parts = [parts] if isinstance(parts, str | dict) else parts
    return [{key: p} if isinstance(p, str) else p for p in parts] if isinstance(parts, list | tuple) else parts


class TeacherConfig(Settings):
    """The frozen model of ``algorithm.distill``, with the tokenizer of the policy; all else is as in ``model``."""

    paths: ClassVar[tuple[str, ...]] = ("path",)
    shorthand: ClassVar[str | None] = "path"

    path: str = ""
    revision: str | None = None
    dtype: DType = "auto"
    load_in_4bit: bool = False
    trust_remote_code: bool = False


class CriticConfig(Settings):
    """The value model of ``gae``: starts from ``model`` unless it has a ``path``. The first ``warmup_steps`` steps train it alone, on
    answers of the frozen policy."""

    paths: ClassVar[tuple[str, ...]] = ("path",)
    path: str = ""
    optimizer: OptimizerConfig = OptimizerConfig(lr=9e-6)
    warmup_steps: int = Field(0, ge=0)


class ProcessConfig(Settings):
    """The process reward model of ``prime`` (arXiv 2502.01456): starts from ``model`` unless it has a ``path``.

    It learns whether the reward of an answer reaches ``threshold``; its log-ratio to the reference, times ``beta``, is the reward of
    a token. ``forward``: ``single`` takes token rewards from the forward that it is trained by, ``double`` from one after that.
    """

    paths: ClassVar[tuple[str, ...]] = ("path",)
    path: str = ""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-6)
    beta: float = Field(0.05, gt=0)
    threshold: float = 1.0
    forward: Literal["single", "double"] = "single"


class PtxConfig(Settings):
    """Supervised data beside the rollouts (PPO-ptx, arXiv 2203.02155): ``coef`` times the mean of -logp over the tokens of
    ``batch_size`` conversations of ``data`` is added to the loss of each optimizer step of the policy. Longer conversations than
    ``max_tokens`` are left out."""

    coef: float = Field(0.0, ge=0)
    data: DataConfig = DataConfig()
    batch_size: int = Field(8, ge=1)
    max_tokens: int = Field(2048, ge=2)


class CurriculumConfig(NamedFunction):
    """Prompts are drawn by weights that the function ``name`` makes of their pass rates, instead of each once an epoch.

    An answer passes when its reward reaches ``threshold``. The running pass rate of a prompt is its first one, then ``momentum``
    times itself plus the rest of the newest.
    """

    name: str
    threshold: float = 1.0
    momentum: float = Field(0.5, ge=0, lt=1)
    options: dict[str, Any] = Field(default_factory=dict)


class RolloutConfig(Settings):
    """``prompts`` groups of ``samples`` answers a step.

    Groups that filters drop are replaced, in at most ``max_rounds`` rounds of generation a step. Each round draws ``oversample``
    times as many groups as are missing and ends as soon as enough have passed; groups that are then too many are dropped or, with
    ``carry_over``, trained on in the next step. ``select`` keeps some of the answers of each group.
    With ``staleness`` above 0, answers are drawn while the policy is trained, by a copy of the weights that it had exactly that
    many steps before (in the first steps: at the start). The algorithm then wants a correction for it.
    With ``partial``, answers that are not finished when a step has enough are not dropped: they go on in the next step, by its
    weights. ``step_tokens`` bounds what an answer grows by in one step, so that no step waits for the longest; a step then trains on
    the groups that it finishes (Kimi k1.5, arXiv 2501.12599, section 2.6.2).
    """

    prompts: int = Field(32, ge=1)
    samples: int = Field(8, ge=1)
    max_rounds: int = Field(8, ge=1)
    oversample: float = Field(1.0, ge=1)
    carry_over: bool = False
    select: Part | None = None
    curriculum: CurriculumConfig | None = None
    staleness: int = Field(0, ge=0)
    partial: bool = False
    step_tokens: int | None = Field(None, ge=1)


class TrainConfig(Settings):
    """How a batch becomes optimizer steps. ``steps`` counts rollout steps (or, for supervised verbs, optimizer steps); without it
    ``epochs`` passes over the data decide. Each rollout batch is passed over ``updates`` times, in ``mini_batches`` optimizer
    steps a pass. ``micro_batch_tokens`` bounds the tokens that one forward sees."""

    steps: int | None = Field(None, ge=1)
    epochs: float = Field(1.0, gt=0)
    updates: int = Field(1, ge=1)
    mini_batches: int = Field(1, ge=1)
    micro_batch_tokens: int = Field(16_384, ge=1)


class EvalConfig(Settings):
    """Held-out evaluation: every ``every`` steps (0: never), and before the first one if ``at_start``.

    The accuracy of a prompt is the share of its ``samples`` answers whose reward reaches ``threshold``. Training ends once the
    accuracy over all prompts reaches ``stop_at``.
    """

    data: DataConfig = DataConfig(shuffle=False)
    every: int = Field(0, ge=0)
    at_start: bool = True
    limit: int | None = Field(None, ge=1)
    samples: int = Field(1, ge=1)
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)
    threshold: float = 1.0
    stop_at: float | None = None


class RLConfig(Settings):
    """Everything that ``lightrft rl`` reads. ``reference`` is the model of the KL term, where that is not the start of training."""

    paths: ClassVar[tuple[str, ...]] = ("reference",)
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    reference: str | None = None
    teacher: TeacherConfig = TeacherConfig()
    critic: CriticConfig = CriticConfig()
    process: ProcessConfig = ProcessConfig()
    ptx: PtxConfig = PtxConfig()
    data: DataConfig = DataConfig()
    eval: EvalConfig = EvalConfig()
    rollout: RolloutConfig = RolloutConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    strategy: StrategyConfig = StrategyConfig()
    launch: LaunchConfig = LaunchConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()


class SFTConfig(Settings):
    """Everything that ``lightrft sft`` reads; ``batch_size`` counts conversations."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    eval: EvalConfig = EvalConfig()
    engine: EngineConfig = EngineConfig()
    reward: RewardConfig = RewardConfig()
    batch_size: int = Field(32, ge=1)
    max_tokens: int = Field(2048, ge=2)
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    strategy: StrategyConfig = StrategyConfig()
    launch: LaunchConfig = LaunchConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()


class EvaluateConfig(Settings):
    """Everything that ``lightrft eval`` reads."""

    run: RunConfig = RunConfig(name="eval")
    model: ModelConfig = ModelConfig()
    eval: EvalConfig = EvalConfig()
    engine: EngineConfig = EngineConfig()
    reward: RewardConfig = RewardConfig()
    strategy: StrategyConfig = StrategyConfig()


class GenerateConfig(Settings):
    """Everything that ``lightrft generate`` reads: ``samples`` answers to every prompt, to the JSON-lines file ``output``."""

    run: RunConfig = RunConfig(name="generate")
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig(shuffle=False)
    sampling: SamplingConfig = SamplingConfig()
    samples: int = Field(1, ge=1)
    output: str = "answers.jsonl"
    engine: EngineConfig = EngineConfig()
    reward: RewardConfig = RewardConfig()
    strategy: StrategyConfig = StrategyConfig()


class ChatConfig(Settings):
    """Everything that ``lightrft chat`` reads. The files that ``attach`` names go with the first message."""

    paths: ClassVar[tuple[str, ...]] = ("attach",)
    run: RunConfig = RunConfig(name="chat")
    model: ModelConfig = ModelConfig()
    system: str | None = None
    attach: tuple[str, ...] = ()
    media: MediaConfig = MediaConfig()
    sampling: SamplingConfig = SamplingConfig(temperature=0.7, top_p=0.95, max_new_tokens=512)
    engine: EngineConfig = EngineConfig()
    strategy: StrategyConfig = StrategyConfig()


class ExportConfig(Settings):
    """Everything that ``lightrft export`` reads. ``path`` may stand without its key."""

    paths: ClassVar[tuple[str, ...]] = ("path", "base")
    path: str = ""
    """Run folder, or one folder of its ``checkpoints/``."""
    which: Literal["auto", "best", "last"] = "auto"
    """Checkpoint of a run: the best by its ``checkpoint.best``, or the last. ``auto`` takes the best if the run names a metric."""
    step: int | None = Field(None, ge=0)
    """Step of the checkpoint, instead of ``which``."""
    output: str | None = None
    """Folder to write; ``null`` is ``export/`` of the run. It must not exist, unless ``overwrite`` is set."""
    adapters: Literal["merge", "keep"] = "merge"
    """``keep`` writes low-rank adapters alone, for PEFT. Set it to share them, or where the model is quantised."""
    base: str | None = None
    """Folder or name of the start model. Set it when that has moved since the run."""
    overwrite: bool = False
    """Replace ``output`` if it is a model folder."""


class DoctorConfig(Settings):
    """What ``lightrft doctor`` reads beside the config that it looks at, as ``doctor.rows=20``.

    ``verb`` says whose config it is (``auto``: ``sft`` where it can be nothing else or names no reward, else ``rl``).
    ``device_memory``, such as 80GiB, is that of each device of a machine that is not here (``auto``: what this one has free), which
    are of ``device``. ``rows`` prompts are scored, with their own answer and with an empty one. ``probe`` loads the policy,
    measures, and compares the engine's log-probs with the policy's. ``output`` names a JSON file for the findings.
    """

    verb: Literal["auto", "rl", "sft"] = "auto"
    device_memory: str = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    rows: int = Field(10, ge=0)
    probe: bool = False
    output: str | None = None


class DemoConfig(Settings):
    """Everything that ``lightrft demo`` reads: a start model of ``family`` with ``model`` sizes, then ``sft``, then ``rl``.

    A family that reads more than text has ``tower`` sizes too, and ``processor`` settings that fit them.
    Both phases run in folders below ``run.dir``/``run.name`` and take their seed from ``run``.
    """

    run: RunConfig = RunConfig(name="demo")
    family: str = "qwen2"
    model: dict[str, Any] = Field(default_factory=dict)
    tower: dict[str, Any] = Field(default_factory=dict)
    processor: dict[str, Any] = Field(default_factory=dict)
    sft: SFTConfig = SFTConfig()
    rl: RLConfig = RLConfig()
