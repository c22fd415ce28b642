"""The settings tree of each verb."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from lightrft.config.algorithm import AlgorithmConfig
from lightrft.config.base import Settings, build, deep_merge, is_branch
from lightrft.config.data import (
    ENCODING,
    DataConfig,
    HeldOutSettings,
    MediaConfig,
    PreferenceDataConfig,
    ProcessDataConfig,
    RewardDataConfig,
    SFTDataConfig,
    given_settings,
)
from lightrft.config.engine import EngineConfig
from lightrft.config.launch import LaunchConfig
from lightrft.config.model import (
    ModelConfig,
    PolicyModelConfig,
    SupervisedModelConfig,
    TrainedModelConfig,
)
from lightrft.config.preference.sections import KTOPreferenceConfig, OnlineConfig, PreferenceConfig
from lightrft.config.reward import RewardConfig, RewardTerm
from lightrft.config.reward_model.judgement import COMPARED, JudgementConfig
from lightrft.config.reward_model.sections import (
    ProcessModelConfig,
    RewardModelConfig,
    ValidationTimesConfig,
)
from lightrft.config.rollout import EvalConfig, RolloutConfig, SelectConfig, StepLabelsConfig
from lightrft.config.run import CheckpointConfig, HubConfig, LogConfig, RunConfig
from lightrft.config.strategy import OptimizerConfig, SamplingConfig, StrategyConfig
from lightrft.config.train import (
    CriticConfig,
    DistillationConfig,
    DistillTeacherConfig,
    MicroBatchTokens,
    PRMConfig,
    PtxConfig,
    RLTrainConfig,
    TeacherConfig,
    TrainConfig,
    ValueModelConfig,
)


class RLConfig(HeldOutSettings):
    """The settings of ``lightrft rl``: reinforcement learning from rewards or from a teacher."""

    verb: ClassVar[str] = "rl"
    """The verb that reads these settings."""
    paths: ClassVar[tuple[str, ...]] = ("reference",)
    """The settings of this section that are paths."""
    run: RunConfig = RunConfig()
    """Run folder and start."""
    model: PolicyModelConfig = PolicyModelConfig()
    """Policy."""
    reference: str | None = None
    """Folder or name of the reference of the KL term; ``null`` takes the model that training starts
    from."""
    teacher: TeacherConfig = TeacherConfig()
    """Teacher of ``algorithm.distill``."""
    critic: CriticConfig = CriticConfig()
    """Critic of advantages that need one."""
    cost_critic: ValueModelConfig = ValueModelConfig()
    """Second critic, which estimates the cost of ``algorithm.lagrangian`` for such advantages."""
    prm: PRMConfig = PRMConfig()
    """Process reward model of ``prime``."""
    ptx: PtxConfig = PtxConfig()
    """Supervised data next to the rollouts."""
    data: DataConfig = DataConfig()
    """Prompts to learn from."""
    eval: EvalConfig = EvalConfig()
    """Evaluation on the eval set."""
    rollout: RolloutConfig = RolloutConfig()
    """Groups of responses of a step."""
    sampling: SamplingConfig = SamplingConfig()
    """Generation of responses."""
    engine: EngineConfig = EngineConfig()
    """Engine that generates responses."""
    reward: RewardConfig = RewardConfig()
    """Scoring of responses."""
    # A factory: an instance has the row of ``grpo`` set, and ``Settings`` would merge that row
    # under a config with another preset.
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    """Advantage, loss and their terms."""
    train: RLTrainConfig = RLTrainConfig()
    """Optimizer steps."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer of the policy."""
    strategy: StrategyConfig = StrategyConfig()
    """Devices, sharding and parallelism."""
    launch: LaunchConfig = LaunchConfig()
    """Processes of the run."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    hub: HubConfig = HubConfig()
    """Hugging Face Hub."""
    log: LogConfig = LogConfig()
    """Metrics, rollouts and batches on disk."""


class GivenDataConfig(HeldOutSettings):
    """The settings that all verbs share which train on given rows."""

    verb: ClassVar[str]
    """Name of the verb."""
    run: RunConfig = RunConfig()
    """Run folder and start."""
    model: ModelConfig = ModelConfig()
    """Model to train."""
    data: DataConfig = DataConfig()
    """Rows to learn from."""
    batch_size: int = Field(32, ge=1)
    """Number of rows in an optimizer step."""
    max_tokens: int = Field(2048, ge=2)
    """Longest prompt with one response, in tokens. ``data.overlong_prompts`` says what happens to
    longer ones."""
    train: TrainConfig = TrainConfig()
    """Optimizer steps."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    """Optimizer of the model."""
    strategy: StrategyConfig = StrategyConfig()
    """Devices, sharding and parallelism."""
    launch: LaunchConfig = LaunchConfig()
    """Processes of the run."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    hub: HubConfig = HubConfig()
    """Hugging Face Hub."""
    log: LogConfig = LogConfig()
    """Metrics, rollouts and batches on disk."""


class SupervisedConfig(GivenDataConfig):
    """The settings that all verbs share which train a policy on given responses."""

    model: TrainedModelConfig = TrainedModelConfig()
    """Model to train."""
    data: DataConfig = DataConfig()
    """Conversations to learn from."""
    eval: EvalConfig = EvalConfig()
    """Evaluation on the eval set."""
    engine: EngineConfig = EngineConfig()
    """Engine that generates responses."""
    reward: RewardConfig = RewardConfig()
    """Scoring of responses."""
    batch_size: int = Field(32, ge=1)
    """Number of conversations in an optimizer step."""
    max_tokens: int = Field(2048, ge=2)
    """Longest conversation, in tokens. ``data.overlong_prompts`` says what happens to longer
    ones."""


class SFTConfig(SupervisedConfig):
    """The settings of ``lightrft sft``: supervised training on conversations."""

    verb: ClassVar[str] = "sft"
    """Name of the verb."""
    model: SupervisedModelConfig = SupervisedModelConfig()
    """Model to train."""
    data: SFTDataConfig = SFTDataConfig()
    """Conversations to learn from."""
    validation: SFTDataConfig = SFTDataConfig(shuffle=False)
    """Conversations held out from training. Their loss is measured with each evaluation; without
    sources none is."""
    neftune_alpha: float = Field(0.0, ge=0)
    """Size of the uniform noise on the token embeddings in training (NEFTune, arXiv 2310.05914); 0
    adds none. The paper takes 5 to 15."""


class DPOConfig(SupervisedConfig):
    """The settings of ``lightrft dpo``: training on pairs or rankings of responses, by any weighted
    sum of preference losses."""

    verb: ClassVar[str] = "dpo"
    """Name of the verb."""
    paths: ClassVar[tuple[str, ...]] = ("reference",)
    """The settings of this section that are paths."""
    data: PreferenceDataConfig = PreferenceDataConfig()
    """Prompts with their responses."""
    validation: PreferenceDataConfig = PreferenceDataConfig(shuffle=False)
    """Rows held out from training. Their loss and the accuracy of their order are measured with
    each evaluation; without sources none is."""
    preference: PreferenceConfig = PreferenceConfig()
    """Losses, modifiers and the reference."""
    reference: str | None = None
    """Folder or name of the reference; ``null`` takes the model that training starts from."""
    online: OnlineConfig = OnlineConfig()
    """Responses that each step samples, in place of given ones. The data are then prompts."""
    sampling: SamplingConfig = SamplingConfig()
    """Generation of responses, for ``online``."""
    batch_size: int = Field(64, ge=1)
    """Number of examples in an optimizer step: of pairs, of groups of ranked responses, or of
    labelled responses. With ``online`` it counts prompts."""
    max_tokens: int = Field(2048, ge=2)
    """Longest prompt with one response, in tokens. ``data.overlong_prompts`` says what happens to
    longer ones. Sampled responses are limited by ``data.max_prompt_tokens`` and
    ``sampling.max_new_tokens`` instead."""
    # The numbers of DPO's appendix B.
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-6)
    """Optimizer of the model."""


class KTOConfig(DPOConfig):
    """The settings of ``lightrft kto``: training on responses that are labelled as desirable or
    not."""

    verb: ClassVar[str] = "kto"
    """Name of the verb."""
    # A factory, as for ``algorithm``: an instance has the row of its preset set.
    preference: KTOPreferenceConfig = Field(default_factory=KTOPreferenceConfig)
    """Losses, modifiers and the reference."""


class DistillVerbConfig(SupervisedConfig):
    """The settings of ``lightrft distill``: training towards the distributions of a teacher, on
    given or on sampled responses."""

    verb: ClassVar[str] = "distill"
    """Name of the verb."""
    data: SFTDataConfig = SFTDataConfig()
    """Conversations, or prompts whose responses are sampled."""
    validation: SFTDataConfig = SFTDataConfig(shuffle=False)
    """Conversations held out from training. Their divergence from the teacher is measured with each
    evaluation; without sources none is."""
    teacher: DistillTeacherConfig = DistillTeacherConfig()
    """Model to learn from. An empty path takes the model that training starts from, for
    self-distillation."""
    teachers: dict[str, DistillTeacherConfig] = Field(default_factory=dict)
    """Models to learn from on the rows of one data source each, by its name. All other rows have
    ``teacher``."""
    distill: DistillationConfig = DistillationConfig()
    """Divergence from the teacher, and the responses to learn on."""
    sampling: SamplingConfig = SamplingConfig()
    """Generation of responses, for ``distill.on_policy``."""


class RMConfig(GivenDataConfig):
    """The settings of ``lightrft rm``: training of a reward model on pairs, rankings or ratings of
    responses."""

    verb: ClassVar[str] = "rm"
    """Name of the verb."""
    data: RewardDataConfig = RewardDataConfig()
    """Prompts with their responses."""
    validation: RewardDataConfig = RewardDataConfig(shuffle=False)
    """Rows held out from training. Their loss and the accuracy of their order are measured with
    each evaluation; without sources none is."""
    reward_model: RewardModelConfig = RewardModelConfig()
    """Heads, pooling and losses."""
    eval: ValidationTimesConfig = ValidationTimesConfig()
    """Times at which ``validation`` is measured."""
    batch_size: int = Field(64, ge=1)
    """Number of rows in an optimizer step: of pairs, of groups of ranked responses, or of rated
    responses to a prompt."""
    # The number of InstructGPT's appendix C.2.
    optimizer: OptimizerConfig = OptimizerConfig(lr=9e-6)
    """Optimizer of the model."""


class PRMVerbConfig(GivenDataConfig):
    """The settings of ``lightrft prm``: training of a process reward model on steps with labels."""

    verb: ClassVar[str] = "prm"
    """Name of the verb."""
    data: ProcessDataConfig = ProcessDataConfig()
    """Prompts with a response in steps."""
    validation: ProcessDataConfig = ProcessDataConfig(shuffle=False)
    """Rows held out from training. Their loss and the accuracy of the judgement of their steps are
    measured with each evaluation; without sources none is. It takes the separator of ``data``."""
    process_model: ProcessModelConfig = ProcessModelConfig()
    """Head and losses."""
    eval: ValidationTimesConfig = ValidationTimesConfig()
    """Times at which ``validation`` is measured."""
    batch_size: int = Field(64, ge=1)
    """Number of responses in an optimizer step."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=9e-6)
    """Optimizer of the model."""


AGREEMENT = RewardConfig(terms=(RewardTerm(function="judgement"),))
"""Reward of a judgement: the agreement of the verdict with the label."""


class JudgeTrainingConfig(Settings):
    """The settings of ``lightrft grm`` that its methods share."""

    judgement: JudgementConfig = JudgementConfig()
    """Questions to the judge, and the form of its verdicts. It holds for ``data``, ``validation``
    and ``eval.data``, unless these have a ``judgement`` of their own. Held-out comparisons are
    asked in both orders."""
    reward: RewardConfig = AGREEMENT
    """Scoring of judgements: the agreement of the verdict with the label."""

    @property
    def held_out(self) -> JudgementConfig:
        """The questions of held-out rows: comparisons in both orders."""
        if self.judgement.form not in COMPARED or self.judgement.order != "hashed":
            return self.judgement
        return self.judgement.model_copy(update={"order": "both"})


class JudgedConfig(Settings):
    """Settings of another verb that ``lightrft grm`` trains by."""

    is_judge: ClassVar[bool] = True
    """See ``HeldOutSettings``."""


class JudgedSFTConfig(JudgedConfig, SFTConfig):
    """A run of ``lightrft grm sft`` as settings of ``lightrft sft``."""


class JudgeSFTConfig(JudgeTrainingConfig, SFTConfig):
    """The settings of ``lightrft grm sft``: supervised training on judgements."""

    data: SFTDataConfig = SFTDataConfig()
    """Rows of responses, with a judgement or with labels."""

    def plain(self) -> JudgedSFTConfig:
        """Return the settings of ``lightrft sft`` that train the same."""
        return JudgedSFTConfig.model_validate(judged_tree(self))


class JudgedRLConfig(JudgedConfig, RLConfig):
    """A run of ``lightrft grm rl`` as settings of ``lightrft rl``."""


class JudgeRLConfig(JudgeTrainingConfig, RLConfig):
    """The settings of ``lightrft grm rl``: reinforcement learning on judgements."""

    data: DataConfig = DataConfig()
    """Rows of responses, with labels."""

    def plain(self) -> JudgedRLConfig:
        """Return the settings of ``lightrft rl`` that train the same."""
        return JudgedRLConfig.model_validate(judged_tree(self))


class JudgedDPOConfig(JudgedConfig, DPOConfig):
    """A run of ``lightrft grm dpo`` as settings of ``lightrft dpo``."""


class JudgeDPOConfig(JudgeTrainingConfig, DPOConfig):
    """The settings of ``lightrft grm dpo``: preference learning on judgements."""

    data: PreferenceDataConfig = PreferenceDataConfig()
    """Rows of responses, with preferred and rejected judgements or with labels."""

    def plain(self) -> JudgedDPOConfig:
        """Return the settings of ``lightrft dpo`` that train the same."""
        return JudgedDPOConfig.model_validate(judged_tree(self))


def judged_tree(config: JudgeTrainingConfig) -> dict[str, Any]:
    """Return the tree of ``config`` with ``judgement`` at each branch of data that has sources."""
    tree = config.model_dump(exclude={"judgement"})
    places = {"data": tree["data"], "eval.data": tree["eval"]["data"]}
    places |= {"validation": tree["validation"]} if "validation" in tree else {}
    for name, data in places.items():
        if data["judgement"] is None and data["sources"]:
            held_out = config.judgement if name == "data" else config.held_out
            data["judgement"] = held_out.model_dump()
    online = tree.get("online", {}).get("group_size")
    scores_nothing = not (isinstance(config, RLConfig) or tree["eval"]["data"]["sources"] or online)
    # the reward of the judge is given by its verb, so nobody has to leave it out
    if scores_nothing and config.reward == AGREEMENT:
        tree["reward"] = RewardConfig().model_dump()
    return tree


PolicyConfig: TypeAlias = RLConfig | SupervisedConfig
"""The settings of a verb that trains a policy."""
ScoringConfig: TypeAlias = RMConfig | PRMVerbConfig
"""The settings of a verb that trains a model with a head for scores."""
TrainingConfig: TypeAlias = PolicyConfig | ScoringConfig
"""The settings of a verb that trains."""


class EvaluateConfig(Settings):
    """The settings of ``lightrft eval``: responses to the prompts of the eval set, and their
    scores."""

    run: RunConfig = RunConfig(name="eval")
    """Run folder and start."""
    model: ModelConfig = ModelConfig()
    """Model to evaluate."""
    eval: EvalConfig = EvalConfig()
    """Eval set and generation."""
    engine: EngineConfig = EngineConfig()
    """Engine that generates responses."""
    reward: RewardConfig = RewardConfig()
    """Scoring of responses."""
    strategy: StrategyConfig = StrategyConfig()
    """Devices, sharding and parallelism."""


class EvalRMConfig(Settings):
    """The settings of ``lightrft eval-rm``: the scores of a reward model for given responses, and
    how well they order them."""

    run: RunConfig = RunConfig(name="eval-rm")
    """Run folder and start."""
    model: ModelConfig = ModelConfig()
    """Reward model to evaluate: its folder, or the run folder of ``lightrft rm``."""
    head: str | None = None
    """Head whose scores are compared with the labels of rows; ``null`` takes the reward of the
    model. Other heads are compared with the columns that ``data.columns.labels`` gives them."""
    judgement: JudgementConfig | None = None
    """Questions to a generative reward model, in which comparisons are asked in both orders. Then
    ``model`` is a language model, and its verdicts are compared with the labels."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.0, max_new_tokens=512)
    """Generation of judgements, for ``judgement``."""
    data: RewardDataConfig = RewardDataConfig(shuffle=False)
    """Prompts with their responses."""
    steps: ProcessDataConfig = ProcessDataConfig(shuffle=False)
    """Responses whose steps have labels, such as ProcessBench, for a process reward model. They
    take the place of ``data``."""
    threshold: float | None = Field(None, gt=0, lt=1)
    """Smallest score of a right step, for ``steps``; ``null`` takes the threshold of the model."""
    max_tokens: int = Field(4096, ge=2)
    """Longest prompt with one response, in tokens. ``data.overlong_prompts`` says what happens to
    longer ones."""
    batch_size: int = Field(64, ge=1)
    """Number of rows that are read and scored together. A stopped evaluation resumes after the
    last batch."""
    max_tokens_per_micro_batch: MicroBatchTokens = "auto"
    """Most tokens of one forward pass. ``auto`` is 16384 where there is a GPU, and 2048 on a CPU.
    Lower it if the device runs out of memory."""
    best_of: int | None = Field(None, ge=2)
    """Largest n of the best-of-n curve. Prompts with fewer rated responses are left out of it.
    ``null`` takes the smallest number of responses to a prompt."""
    worst: int = Field(20, ge=0)
    """Number of pairs in the report whose order is most wrong, or of responses whose steps are
    judged worst."""
    strategy: StrategyConfig = StrategyConfig()
    """Devices, sharding and parallelism."""


class GenerateConfig(Settings):
    """The settings of ``lightrft generate``: responses to every prompt, in the file
    ``output``."""

    run: RunConfig = RunConfig(name="generate")
    """Run folder and start."""
    model: ModelConfig = ModelConfig()
    """Model that generates."""
    # Responses are in the order of the file, so that a reader can put both side by side.
    data: DataConfig = DataConfig(shuffle=False)
    """Prompts."""
    sampling: SamplingConfig = SamplingConfig()
    """Generation of responses."""
    samples: int = Field(1, ge=1)
    """Number of responses to each prompt."""
    output: str = "answers.jsonl"
    """JSON-lines file of the responses. It must not exist, unless ``run.overwrite`` is set."""
    engine: EngineConfig = EngineConfig()
    """Engine that generates responses."""
    reward: RewardConfig = RewardConfig()
    """Scoring of responses; without terms none is scored."""
    select: SelectConfig = SelectConfig()
    """Responses to write, and the layout of their rows."""
    strategy: StrategyConfig = StrategyConfig()
    """Devices, sharding and parallelism."""


class LabelStepsConfig(Settings):
    """The settings of ``lightrft label-steps``: labels of the steps of solutions, in the file
    ``output``."""

    run: RunConfig = RunConfig(name="label-steps")
    """Run folder and start."""
    model: ModelConfig = ModelConfig()
    """Model that continues the solutions."""
    data: DataConfig = DataConfig(shuffle=False)
    """Prompts, with their solutions unless ``samples`` is set."""
    samples: int = Field(0, ge=0)
    """Number of solutions to generate for each prompt; 0 takes the solution of each row."""
    steps: StepLabelsConfig = StepLabelsConfig()
    """Steps of a solution, and their labels."""
    sampling: SamplingConfig = SamplingConfig()
    """Generation of continuations, and of solutions."""
    output: str = "step_labels.jsonl"
    """JSON-lines file of the rows. It must not exist, unless ``run.overwrite`` is set."""
    engine: EngineConfig = EngineConfig()
    """Engine that generates responses."""
    reward: RewardConfig = RewardConfig()
    """Scoring of solutions and of continuations."""
    strategy: StrategyConfig = StrategyConfig()
    """Devices, sharding and parallelism."""


class IterateConfig(HeldOutSettings):
    """The settings of ``lightrft iterate``: rounds that generate responses, select training rows
    among them, and train on these rows. Give one of ``sft``, ``dpo`` and ``kto``."""

    run: RunConfig = RunConfig(name="iterate")
    """Folder of all rounds and start. Round 1 takes the seed of ``run``, and each later round has
    its own."""
    model: TrainedModelConfig = TrainedModelConfig()
    """Model to train. It also generates, unless ``generator`` is set."""
    generator: ModelConfig = ModelConfig()
    """Model that generates in every round, such as a larger one. An empty path takes the model that
    the round before has trained."""
    rounds: int = Field(3, ge=1)
    """Number of rounds. Raise it to continue a run that is finished."""
    prompts_per_round: int | None = Field(None, ge=1)
    """Number of prompts of a round. A prompt comes again only when all others have come. ``null``
    takes all prompts in every round."""
    rows: Literal["new", "all"] = "new"
    """Rows that a round trains on: those of the round, or those of ``all`` rounds so far."""
    train_from: Literal["previous", "start"] = "previous"
    """Model that the training of a round starts from: the result of the ``previous`` round, or
    ``model`` itself, as in STaR."""
    reference: Literal["previous", "start"] = "previous"
    """Reference of ``dpo`` and ``kto``: the model that the training of the round starts from, or
    ``model`` itself in every round."""
    data: DataConfig = DataConfig()
    """Prompts. Their order counts with ``prompts_per_round``."""
    sampling: SamplingConfig = SamplingConfig()
    """Generation of responses."""
    samples: int = Field(8, ge=1)
    """Number of responses to each prompt in a round."""
    reward: RewardConfig = RewardConfig()
    """Scoring of responses, of the eval set too."""
    select: SelectConfig = SelectConfig(keep="best")
    """Responses to train on, and the layout of their rows."""
    eval: EvalConfig = EvalConfig()
    """Evaluation on the eval set, before the first round and at the end of each."""
    engine: EngineConfig = EngineConfig()
    """Engine that generates responses."""
    strategy: StrategyConfig = StrategyConfig()
    """Device of the run."""
    hub: HubConfig = HubConfig()
    """Hugging Face Hub. Each round pushes its model at its end, so that the newest commit has the
    last round. ``push_every`` counts the steps of a round."""
    log: LogConfig = LogConfig()
    """Metrics of each training, and samples of each generation."""
    sft: SFTConfig | None = None
    """Training by ``lightrft sft``: its settings except those above, which each round sets.
    ``null`` for all three takes ``sft``."""
    dpo: DPOConfig | None = None
    """Training by ``lightrft dpo``."""
    kto: KTOConfig | None = None
    """Training by ``lightrft kto``."""

    @property
    def training(self) -> SFTConfig | DPOConfig:
        """The settings of training."""
        given = [section for section in (self.sft, self.dpo, self.kto) if section is not None]
        if given:
            return given[0]
        data = self.data.model_dump(exclude_unset=True)
        return build(SFTConfig, {"data": _encoding(data, self.select.keep)})

    @model_validator(mode="before")
    @classmethod
    def _encode_alike(cls, tree: object) -> object:
        """Put the settings of ``data`` that decide which tokens a prompt has below those of the
        given training. A file of all settings is then read back as it was."""
        if not is_branch(tree):
            return tree
        keep = given_settings(tree.get("select")).get("keep")
        shared = {"data": _encoding(given_settings(tree.get("data")), keep)}
        sections = {name: tree.get(name) for name in ("sft", "dpo", "kto")}
        merged = {
            name: deep_merge(shared, given_settings(own))
            for name, own in sections.items()
            if is_branch(own) or isinstance(own, Settings)
        }
        return {**tree, **merged}

    @model_validator(mode="after")
    def _one_training(self) -> IterateConfig:
        names = ("sft", "dpo", "kto")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(
                f"{' and '.join(given)} are given; a round trains by one, leave one out"
            )
        return self


def _encoding(data: Mapping[str, object], keep: object) -> dict[str, object]:
    """Return the settings of ``data`` by which the rows of a round are encoded as its prompts."""
    shared = {name: data[name] for name in ENCODING if name in data}
    if data.get("special_tokens", "text") == "text" and keep != "self_play":
        # A response is trained by the tokens that were sampled. Self-play also trains on the data's
        # own answers, whose special tokens are text.
        shared["special_tokens"] = "responses"
    return shared


class ChatConfig(Settings):
    """The settings of ``lightrft chat``: a conversation with a model in the terminal."""

    paths: ClassVar[tuple[str, ...]] = ("attach",)
    """The settings of this section that are paths."""
    texts: ClassVar[tuple[str, ...]] = ("system",)
    """The settings of this section that may be empty."""
    run: RunConfig = RunConfig(name="chat")
    """Run folder and start."""
    model: ModelConfig = ModelConfig()
    """Model to talk to."""
    system: str | None = None
    """System message; ``null`` sends none."""
    attach: tuple[str, ...] = ()
    """Files that go with the first message."""
    media: MediaConfig = MediaConfig()
    """Images, video and audio of messages."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.7, top_p=0.95, max_new_tokens=512)
    """Generation of responses."""
    engine: EngineConfig = EngineConfig()
    """Engine that generates responses."""
    strategy: StrategyConfig = StrategyConfig()
    """Devices, sharding and parallelism."""


class ExportConfig(Settings):
    """The settings of ``lightrft export``: the policy of a run as a Hugging Face folder. ``path``
    may stand without its key."""

    paths: ClassVar[tuple[str, ...]] = ("path", "base")
    """The settings of this section that are paths."""
    path: str = ""
    """Run folder, or one folder of its ``checkpoints/``."""
    which: Literal["auto", "best", "last"] = "auto"
    """Checkpoint of a run: the best by its ``checkpoint.best``, or the last. ``auto`` takes the
    best if the run names a metric."""
    step: int | None = Field(None, ge=0)
    """Step of the checkpoint, instead of ``which``."""
    output: str | None = None
    """Folder to write; ``null`` is ``export/`` of the run. It must not exist, unless ``overwrite``
    is set."""
    adapters: Literal["merge", "keep"] = "merge"
    """``merge`` adds low-rank adapters to the weights that they were trained with. ``keep`` writes
    them alone, for PEFT."""
    base: str | None = None
    """Folder or name of the start model. Set it when that has moved since the run."""
    overwrite: bool = False
    """Replace ``output`` if it is a model folder."""


class DoctorConfig(Settings):
    """The settings of ``lightrft doctor`` itself, written as ``doctor.rows=20``. All others are of
    the config that it examines."""

    verb: Literal[
        "auto", "rl", "sft", "dpo", "kto", "rm", "prm", "distill", "grm-sft", "grm-rl", "grm-dpo"
    ] = "auto"
    """Verb whose config this is. ``auto`` takes the verb whose settings fit: ``rl`` where rewards
    or a teacher are named, else ``sft`` where it is possible."""
    device_memory: str = "auto"
    """Memory of each device, such as 80GiB, of a machine that is not here. ``auto``: what is free
    on this one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Kind of the devices of a machine that is not here. ``auto``: the kind of
    ``strategy.device``."""
    rows: int = Field(10, ge=0)
    """Number of prompts to score, with their own response and with an empty one; 0 scores none."""
    probe: bool = False
    """Load the policy, measure, and compare the engine's log-probs with the policy's."""
    output: str | None = None
    """JSON file for the findings; ``null`` writes none."""
