# Made by docs/generate.py from the settings: `make docs` writes it.
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypeAlias

from lightrft.api.policy import Policy as Policy
from lightrft.api.run import Run as Run
from lightrft.api.shown_data import ShownData
from lightrft.rewards.program_function import here as here
from lightrft.utils.errors import ConfigError as ConfigError, UserError as UserError
from lightrft.config.algorithm import AlgorithmConfig
from lightrft.config.base import Settings
from lightrft.config.config_tools import ShowConfig
from lightrft.config.data import MediaConfig, ProcessDataConfig
from lightrft.config.engine import EngineConfig
from lightrft.config.generation.serving import BatchingConfig, HTTPConfig
from lightrft.config.launch import LaunchConfig
from lightrft.config.model import ModelConfig
from lightrft.config.preference.sections import KTOPreferenceConfig, OnlineConfig, PreferenceConfig
from lightrft.config.reward_model.judgement import JudgementConfig
from lightrft.config.reward_model.sections import ProcessModelConfig, RewardModelConfig
from lightrft.config.rollout import RolloutConfig, SelectConfig, StepLabelsConfig
from lightrft.config.run import CheckpointConfig, HubConfig, LogConfig, RunConfig
from lightrft.config.strategy import OptimizerConfig, SamplingConfig, StrategyConfig
from lightrft.config.train import CriticConfig, DistillationConfig, PRMConfig, PtxConfig, RLTrainConfig, TrainConfig, ValueModelConfig
from lightrft.config.verbs import DPOConfig, KTOConfig, SFTConfig
from lightrft.observability.events import CheckpointEvent, EndEvent, EvalEvent, RolloutsEvent, StartEvent, StepEvent

Given: TypeAlias = str | PathLike[str] | Mapping[str, Any] | Settings
Data: TypeAlias = str | PathLike[str] | Mapping[str, Any] | Settings | Iterable[Any]

__version__: str
VERBS: tuple[str, ...]

def rl(
    *configs: Given,
    run: RunConfig | Mapping[str, Any] = ...,
    model: Any = ...,
    reference: Any = ...,
    teacher: Any = ...,
    critic: CriticConfig | Mapping[str, Any] = ...,
    cost_critic: ValueModelConfig | Mapping[str, Any] = ...,
    prm: PRMConfig | Mapping[str, Any] = ...,
    ptx: PtxConfig | Mapping[str, Any] = ...,
    data: Data = ...,
    eval: Data = ...,
    rollout: RolloutConfig | Mapping[str, Any] = ...,
    sampling: SamplingConfig | Mapping[str, Any] = ...,
    engine: EngineConfig | Mapping[str, Any] | str = ...,
    reward: Any = ...,
    algorithm: AlgorithmConfig | Mapping[str, Any] | str = ...,
    train: RLTrainConfig | Mapping[str, Any] = ...,
    optimizer: OptimizerConfig | Mapping[str, Any] = ...,
    strategy: StrategyConfig | Mapping[str, Any] | str = ...,
    launch: LaunchConfig | Mapping[str, Any] = ...,
    checkpoint: CheckpointConfig | Mapping[str, Any] = ...,
    hub: HubConfig | Mapping[str, Any] = ...,
    log: LogConfig | Mapping[str, Any] = ...,
    rewards: Any = ...,
    steps: int = ...,
    epochs: int = ...,
    lr: float = ...,
    name: str = ...,
    dir: str = ...,
    on_start: Callable[[StartEvent], object] | None = ...,
    on_rollouts: Callable[[RolloutsEvent], object] | None = ...,
    on_step: Callable[[StepEvent], object] | None = ...,
    on_eval: Callable[[EvalEvent], object] | None = ...,
    on_checkpoint: Callable[[CheckpointEvent], object] | None = ...,
    on_end: Callable[[EndEvent], object] | None = ...,
    **settings: Any,
) -> Run:
    """Train a model by reinforcement learning from rewards.

    Args:
        run: Run folder and start.
        model: Policy.
        reference: Folder or name of the reference of the KL term; `null` takes the model that
            training starts from.
        teacher: Teacher of `algorithm.distill`.
        critic: Critic of advantages that need one.
        cost_critic: Second critic, which estimates the cost of `algorithm.lagrangian` for such
            advantages.
        prm: Process reward model of `prime`.
        ptx: Supervised data next to the rollouts.
        data: Prompts to learn from.
        eval: Evaluation on the eval set.
        rollout: Groups of responses of a step.
        sampling: Generation of responses.
        engine: Engine that generates responses.
        reward: Scoring of responses.
        algorithm: Advantage, loss and their terms.
        train: Optimizer steps.
        optimizer: Optimizer of the policy.
        strategy: Devices, sharding and parallelism.
        launch: Processes of the run.
        checkpoint: Checkpoints.
        hub: Hugging Face Hub.
        log: Metrics, rollouts and batches on disk.
        rewards: Short for `reward.terms`.
        steps: Short for `train.steps`.
        epochs: Short for `train.epochs`.
        lr: Short for `optimizer.lr`.
        name: Short for `run.name`.
        dir: Short for `run.dir`.
        on_start: The models are loaded, and the first step has not begun.
        on_rollouts: Responses of a step are sampled and trained on, or those to a prompt are
            generated.
        on_step: A step is done, and its checkpoint is not written yet.
        on_eval: The run is evaluated; after 0 steps if ``eval.at_start`` is set.
        on_checkpoint: A checkpoint is written.
        on_end: The run has ended, and its summary is written.
    """

def sft(
    *configs: Given,
    run: RunConfig | Mapping[str, Any] = ...,
    model: Any = ...,
    data: Data = ...,
    batch_size: int = ...,
    max_tokens: int = ...,
    train: TrainConfig | Mapping[str, Any] = ...,
    optimizer: OptimizerConfig | Mapping[str, Any] = ...,
    strategy: StrategyConfig | Mapping[str, Any] | str = ...,
    launch: LaunchConfig | Mapping[str, Any] = ...,
    checkpoint: CheckpointConfig | Mapping[str, Any] = ...,
    hub: HubConfig | Mapping[str, Any] = ...,
    log: LogConfig | Mapping[str, Any] = ...,
    eval: Data = ...,
    engine: EngineConfig | Mapping[str, Any] | str = ...,
    reward: Any = ...,
    validation: Data = ...,
    neftune_alpha: float = ...,
    rewards: Any = ...,
    steps: int = ...,
    epochs: int = ...,
    lr: float = ...,
    name: str = ...,
    dir: str = ...,
    on_start: Callable[[StartEvent], object] | None = ...,
    on_step: Callable[[StepEvent], object] | None = ...,
    on_eval: Callable[[EvalEvent], object] | None = ...,
    on_checkpoint: Callable[[CheckpointEvent], object] | None = ...,
    on_end: Callable[[EndEvent], object] | None = ...,
    **settings: Any,
) -> Run:
    """Fine-tune a model on conversations, with the loss on assistant tokens.

    Args:
        run: Run folder and start.
        model: Model to train.
        data: Conversations to learn from.
        batch_size: Number of conversations in an optimizer step.
        max_tokens: Longest conversation, in tokens. `data.overlong_prompts` says what happens to
            longer ones.
        train: Optimizer steps.
        optimizer: Optimizer of the model.
        strategy: Devices, sharding and parallelism.
        launch: Processes of the run.
        checkpoint: Checkpoints.
        hub: Hugging Face Hub.
        log: Metrics, rollouts and batches on disk.
        eval: Evaluation on the eval set.
        engine: Engine that generates responses.
        reward: Scoring of responses.
        validation: Conversations held out from training. Their loss is measured with each
            evaluation; without sources none is.
        neftune_alpha: Size of the uniform noise on the token embeddings in training (NEFTune, arXiv
            2310.05914); 0 adds none. The paper takes 5 to 15.
        rewards: Short for `reward.terms`.
        steps: Short for `train.steps`.
        epochs: Short for `train.epochs`.
        lr: Short for `optimizer.lr`.
        name: Short for `run.name`.
        dir: Short for `run.dir`.
        on_start: The models are loaded, and the first step has not begun.
        on_step: A step is done, and its checkpoint is not written yet.
        on_eval: The run is evaluated; after 0 steps if ``eval.at_start`` is set.
        on_checkpoint: A checkpoint is written.
        on_end: The run has ended, and its summary is written.
    """

def dpo(
    *configs: Given,
    run: RunConfig | Mapping[str, Any] = ...,
    model: Any = ...,
    data: Data = ...,
    batch_size: int = ...,
    max_tokens: int = ...,
    train: TrainConfig | Mapping[str, Any] = ...,
    optimizer: OptimizerConfig | Mapping[str, Any] = ...,
    strategy: StrategyConfig | Mapping[str, Any] | str = ...,
    launch: LaunchConfig | Mapping[str, Any] = ...,
    checkpoint: CheckpointConfig | Mapping[str, Any] = ...,
    hub: HubConfig | Mapping[str, Any] = ...,
    log: LogConfig | Mapping[str, Any] = ...,
    eval: Data = ...,
    engine: EngineConfig | Mapping[str, Any] | str = ...,
    reward: Any = ...,
    validation: Data = ...,
    preference: PreferenceConfig | Mapping[str, Any] | str = ...,
    reference: Any = ...,
    online: OnlineConfig | Mapping[str, Any] | str = ...,
    sampling: SamplingConfig | Mapping[str, Any] = ...,
    rewards: Any = ...,
    steps: int = ...,
    epochs: int = ...,
    lr: float = ...,
    name: str = ...,
    dir: str = ...,
    on_start: Callable[[StartEvent], object] | None = ...,
    on_rollouts: Callable[[RolloutsEvent], object] | None = ...,
    on_step: Callable[[StepEvent], object] | None = ...,
    on_eval: Callable[[EvalEvent], object] | None = ...,
    on_checkpoint: Callable[[CheckpointEvent], object] | None = ...,
    on_end: Callable[[EndEvent], object] | None = ...,
    **settings: Any,
) -> Run:
    """Train a model on preferred and rejected, or ranked, responses: DPO and its family.

    Args:
        run: Run folder and start.
        model: Model to train.
        data: Prompts with their responses.
        batch_size: Number of examples in an optimizer step: of pairs, of groups of ranked
            responses, or of labelled responses. With `online` it counts prompts.
        max_tokens: Longest prompt with one response, in tokens. `data.overlong_prompts` says what
            happens to longer ones. Sampled responses are limited by `data.max_prompt_tokens` and
            `sampling.max_new_tokens` instead.
        train: Optimizer steps.
        optimizer: Optimizer of the model.
        strategy: Devices, sharding and parallelism.
        launch: Processes of the run.
        checkpoint: Checkpoints.
        hub: Hugging Face Hub.
        log: Metrics, rollouts and batches on disk.
        eval: Evaluation on the eval set.
        engine: Engine that generates responses.
        reward: Scoring of responses.
        validation: Rows held out from training. Their loss and the accuracy of their order are
            measured with each evaluation; without sources none is.
        preference: Losses, modifiers and the reference.
        reference: Folder or name of the reference; `null` takes the model that training starts
            from.
        online: Responses that each step samples, in place of given ones. The data are then prompts.
        sampling: Generation of responses, for `online`.
        rewards: Short for `reward.terms`.
        steps: Short for `train.steps`.
        epochs: Short for `train.epochs`.
        lr: Short for `optimizer.lr`.
        name: Short for `run.name`.
        dir: Short for `run.dir`.
        on_start: The models are loaded, and the first step has not begun.
        on_rollouts: Responses of a step are sampled and trained on, or those to a prompt are
            generated.
        on_step: A step is done, and its checkpoint is not written yet.
        on_eval: The run is evaluated; after 0 steps if ``eval.at_start`` is set.
        on_checkpoint: A checkpoint is written.
        on_end: The run has ended, and its summary is written.
    """

def kto(
    *configs: Given,
    run: RunConfig | Mapping[str, Any] = ...,
    model: Any = ...,
    data: Data = ...,
    batch_size: int = ...,
    max_tokens: int = ...,
    train: TrainConfig | Mapping[str, Any] = ...,
    optimizer: OptimizerConfig | Mapping[str, Any] = ...,
    strategy: StrategyConfig | Mapping[str, Any] | str = ...,
    launch: LaunchConfig | Mapping[str, Any] = ...,
    checkpoint: CheckpointConfig | Mapping[str, Any] = ...,
    hub: HubConfig | Mapping[str, Any] = ...,
    log: LogConfig | Mapping[str, Any] = ...,
    eval: Data = ...,
    engine: EngineConfig | Mapping[str, Any] | str = ...,
    reward: Any = ...,
    validation: Data = ...,
    preference: KTOPreferenceConfig | Mapping[str, Any] | str = ...,
    reference: Any = ...,
    online: OnlineConfig | Mapping[str, Any] | str = ...,
    sampling: SamplingConfig | Mapping[str, Any] = ...,
    rewards: Any = ...,
    steps: int = ...,
    epochs: int = ...,
    lr: float = ...,
    name: str = ...,
    dir: str = ...,
    on_start: Callable[[StartEvent], object] | None = ...,
    on_rollouts: Callable[[RolloutsEvent], object] | None = ...,
    on_step: Callable[[StepEvent], object] | None = ...,
    on_eval: Callable[[EvalEvent], object] | None = ...,
    on_checkpoint: Callable[[CheckpointEvent], object] | None = ...,
    on_end: Callable[[EndEvent], object] | None = ...,
    **settings: Any,
) -> Run:
    """Train a model on responses that are labelled as desirable or not: KTO, BCO.

    Args:
        run: Run folder and start.
        model: Model to train.
        data: Prompts with their responses.
        batch_size: Number of examples in an optimizer step: of pairs, of groups of ranked
            responses, or of labelled responses. With `online` it counts prompts.
        max_tokens: Longest prompt with one response, in tokens. `data.overlong_prompts` says what
            happens to longer ones. Sampled responses are limited by `data.max_prompt_tokens` and
            `sampling.max_new_tokens` instead.
        train: Optimizer steps.
        optimizer: Optimizer of the model.
        strategy: Devices, sharding and parallelism.
        launch: Processes of the run.
        checkpoint: Checkpoints.
        hub: Hugging Face Hub.
        log: Metrics, rollouts and batches on disk.
        eval: Evaluation on the eval set.
        engine: Engine that generates responses.
        reward: Scoring of responses.
        validation: Rows held out from training. Their loss and the accuracy of their order are
            measured with each evaluation; without sources none is.
        preference: Losses, modifiers and the reference.
        reference: Folder or name of the reference; `null` takes the model that training starts
            from.
        online: Responses that each step samples, in place of given ones. The data are then prompts.
        sampling: Generation of responses, for `online`.
        rewards: Short for `reward.terms`.
        steps: Short for `train.steps`.
        epochs: Short for `train.epochs`.
        lr: Short for `optimizer.lr`.
        name: Short for `run.name`.
        dir: Short for `run.dir`.
        on_start: The models are loaded, and the first step has not begun.
        on_rollouts: Responses of a step are sampled and trained on, or those to a prompt are
            generated.
        on_step: A step is done, and its checkpoint is not written yet.
        on_eval: The run is evaluated; after 0 steps if ``eval.at_start`` is set.
        on_checkpoint: A checkpoint is written.
        on_end: The run has ended, and its summary is written.
    """

def rm(
    *configs: Given,
    run: RunConfig | Mapping[str, Any] = ...,
    model: Any = ...,
    data: Data = ...,
    batch_size: int = ...,
    max_tokens: int = ...,
    train: TrainConfig | Mapping[str, Any] = ...,
    optimizer: OptimizerConfig | Mapping[str, Any] = ...,
    strategy: StrategyConfig | Mapping[str, Any] | str = ...,
    launch: LaunchConfig | Mapping[str, Any] = ...,
    checkpoint: CheckpointConfig | Mapping[str, Any] = ...,
    hub: HubConfig | Mapping[str, Any] = ...,
    log: LogConfig | Mapping[str, Any] = ...,
    validation: Data = ...,
    reward_model: RewardModelConfig | Mapping[str, Any] = ...,
    eval: Data = ...,
    steps: int = ...,
    epochs: int = ...,
    lr: float = ...,
    name: str = ...,
    dir: str = ...,
    on_start: Callable[[StartEvent], object] | None = ...,
    on_step: Callable[[StepEvent], object] | None = ...,
    on_eval: Callable[[EvalEvent], object] | None = ...,
    on_checkpoint: Callable[[CheckpointEvent], object] | None = ...,
    on_end: Callable[[EndEvent], object] | None = ...,
    **settings: Any,
) -> Run:
    """Train a reward model on preferred and rejected, ranked or rated responses.

    Args:
        run: Run folder and start.
        model: Model to train.
        data: Prompts with their responses.
        batch_size: Number of rows in an optimizer step: of pairs, of groups of ranked responses, or
            of rated responses to a prompt.
        max_tokens: Longest prompt with one response, in tokens. `data.overlong_prompts` says what
            happens to longer ones.
        train: Optimizer steps.
        optimizer: Optimizer of the model.
        strategy: Devices, sharding and parallelism.
        launch: Processes of the run.
        checkpoint: Checkpoints.
        hub: Hugging Face Hub.
        log: Metrics, rollouts and batches on disk.
        validation: Rows held out from training. Their loss and the accuracy of their order are
            measured with each evaluation; without sources none is.
        reward_model: Heads, pooling and losses.
        eval: Times at which `validation` is measured.
        steps: Short for `train.steps`.
        epochs: Short for `train.epochs`.
        lr: Short for `optimizer.lr`.
        name: Short for `run.name`.
        dir: Short for `run.dir`.
        on_start: The models are loaded, and the first step has not begun.
        on_step: A step is done, and its checkpoint is not written yet.
        on_eval: The run is evaluated; after 0 steps if ``eval.at_start`` is set.
        on_checkpoint: A checkpoint is written.
        on_end: The run has ended, and its summary is written.
    """

def prm(
    *configs: Given,
    run: RunConfig | Mapping[str, Any] = ...,
    model: Any = ...,
    data: Data = ...,
    batch_size: int = ...,
    max_tokens: int = ...,
    train: TrainConfig | Mapping[str, Any] = ...,
    optimizer: OptimizerConfig | Mapping[str, Any] = ...,
    strategy: StrategyConfig | Mapping[str, Any] | str = ...,
    launch: LaunchConfig | Mapping[str, Any] = ...,
    checkpoint: CheckpointConfig | Mapping[str, Any] = ...,
    hub: HubConfig | Mapping[str, Any] = ...,
    log: LogConfig | Mapping[str, Any] = ...,
    validation: Data = ...,
    process_model: ProcessModelConfig | Mapping[str, Any] = ...,
    eval: Data = ...,
    steps: int = ...,
    epochs: int = ...,
    lr: float = ...,
    name: str = ...,
    dir: str = ...,
    on_start: Callable[[StartEvent], object] | None = ...,
    on_step: Callable[[StepEvent], object] | None = ...,
    on_eval: Callable[[EvalEvent], object] | None = ...,
    on_checkpoint: Callable[[CheckpointEvent], object] | None = ...,
    on_end: Callable[[EndEvent], object] | None = ...,
    **settings: Any,
) -> Run:
    """Train a process reward model on responses whose steps have labels.

    Args:
        run: Run folder and start.
        model: Model to train.
        data: Prompts with a response in steps.
        batch_size: Number of responses in an optimizer step.
        max_tokens: Longest prompt with one response, in tokens. `data.overlong_prompts` says what
            happens to longer ones.
        train: Optimizer steps.
        optimizer: Optimizer of the model.
        strategy: Devices, sharding and parallelism.
        launch: Processes of the run.
        checkpoint: Checkpoints.
        hub: Hugging Face Hub.
        log: Metrics, rollouts and batches on disk.
        validation: Rows held out from training. Their loss and the accuracy of the judgement of
            their steps are measured with each evaluation; without sources none is. It takes the
            separator of `data`.
        process_model: Head and losses.
        eval: Times at which `validation` is measured.
        steps: Short for `train.steps`.
        epochs: Short for `train.epochs`.
        lr: Short for `optimizer.lr`.
        name: Short for `run.name`.
        dir: Short for `run.dir`.
        on_start: The models are loaded, and the first step has not begun.
        on_step: A step is done, and its checkpoint is not written yet.
        on_eval: The run is evaluated; after 0 steps if ``eval.at_start`` is set.
        on_checkpoint: A checkpoint is written.
        on_end: The run has ended, and its summary is written.
    """

def grm(
    method: Literal["sft", "rl", "dpo"],
    *configs: Given,
    run: RunConfig | Mapping[str, Any] = ...,
    model: Any = ...,
    reference: Any = ...,
    teacher: Any = ...,
    critic: CriticConfig | Mapping[str, Any] = ...,
    cost_critic: ValueModelConfig | Mapping[str, Any] = ...,
    prm: PRMConfig | Mapping[str, Any] = ...,
    ptx: PtxConfig | Mapping[str, Any] = ...,
    data: Data = ...,
    eval: Data = ...,
    rollout: RolloutConfig | Mapping[str, Any] = ...,
    sampling: SamplingConfig | Mapping[str, Any] = ...,
    engine: EngineConfig | Mapping[str, Any] | str = ...,
    reward: Any = ...,
    algorithm: AlgorithmConfig | Mapping[str, Any] | str = ...,
    train: RLTrainConfig | Mapping[str, Any] = ...,
    optimizer: OptimizerConfig | Mapping[str, Any] = ...,
    strategy: StrategyConfig | Mapping[str, Any] | str = ...,
    launch: LaunchConfig | Mapping[str, Any] = ...,
    checkpoint: CheckpointConfig | Mapping[str, Any] = ...,
    hub: HubConfig | Mapping[str, Any] = ...,
    log: LogConfig | Mapping[str, Any] = ...,
    judgement: JudgementConfig | Mapping[str, Any] = ...,
    rewards: Any = ...,
    steps: int = ...,
    epochs: int = ...,
    lr: float = ...,
    name: str = ...,
    dir: str = ...,
    on_start: Callable[[StartEvent], object] | None = ...,
    on_rollouts: Callable[[RolloutsEvent], object] | None = ...,
    on_step: Callable[[StepEvent], object] | None = ...,
    on_eval: Callable[[EvalEvent], object] | None = ...,
    on_checkpoint: Callable[[CheckpointEvent], object] | None = ...,
    on_end: Callable[[EndEvent], object] | None = ...,
    **settings: Any,
) -> Run:
    """Train a judge of responses by ``method``: sft, rl or dpo.

    Args:
        run: Run folder and start.
        model: Policy.
        reference: Folder or name of the reference of the KL term; `null` takes the model that
            training starts from.
        teacher: Teacher of `algorithm.distill`.
        critic: Critic of advantages that need one.
        cost_critic: Second critic, which estimates the cost of `algorithm.lagrangian` for such
            advantages.
        prm: Process reward model of `prime`.
        ptx: Supervised data next to the rollouts.
        data: Rows of responses, with labels.
        eval: Evaluation on the eval set.
        rollout: Groups of responses of a step.
        sampling: Generation of responses.
        engine: Engine that generates responses.
        reward: Scoring of judgements: the agreement of the verdict with the label.
        algorithm: Advantage, loss and their terms.
        train: Optimizer steps.
        optimizer: Optimizer of the policy.
        strategy: Devices, sharding and parallelism.
        launch: Processes of the run.
        checkpoint: Checkpoints.
        hub: Hugging Face Hub.
        log: Metrics, rollouts and batches on disk.
        judgement: Questions to the judge, and the form of its verdicts. It holds for `data`,
            `validation` and `eval.data`, unless these have a `judgement` of their own. Held-out
            comparisons are asked in both orders.
        rewards: Short for `reward.terms`.
        steps: Short for `train.steps`.
        epochs: Short for `train.epochs`.
        lr: Short for `optimizer.lr`.
        name: Short for `run.name`.
        dir: Short for `run.dir`.
        on_start: The models are loaded, and the first step has not begun.
        on_rollouts: Responses of a step are sampled and trained on, or those to a prompt are
            generated.
        on_step: A step is done, and its checkpoint is not written yet.
        on_eval: The run is evaluated; after 0 steps if ``eval.at_start`` is set.
        on_checkpoint: A checkpoint is written.
        on_end: The run has ended, and its summary is written.
    """

def distill(
    *configs: Given,
    run: RunConfig | Mapping[str, Any] = ...,
    model: Any = ...,
    data: Data = ...,
    batch_size: int = ...,
    max_tokens: int = ...,
    train: TrainConfig | Mapping[str, Any] = ...,
    optimizer: OptimizerConfig | Mapping[str, Any] = ...,
    strategy: StrategyConfig | Mapping[str, Any] | str = ...,
    launch: LaunchConfig | Mapping[str, Any] = ...,
    checkpoint: CheckpointConfig | Mapping[str, Any] = ...,
    hub: HubConfig | Mapping[str, Any] = ...,
    log: LogConfig | Mapping[str, Any] = ...,
    eval: Data = ...,
    engine: EngineConfig | Mapping[str, Any] | str = ...,
    reward: Any = ...,
    validation: Data = ...,
    teacher: Any = ...,
    teachers: Mapping[str, Any] = ...,
    distill: DistillationConfig | Mapping[str, Any] | str = ...,
    sampling: SamplingConfig | Mapping[str, Any] = ...,
    rewards: Any = ...,
    steps: int = ...,
    epochs: int = ...,
    lr: float = ...,
    name: str = ...,
    dir: str = ...,
    on_start: Callable[[StartEvent], object] | None = ...,
    on_rollouts: Callable[[RolloutsEvent], object] | None = ...,
    on_step: Callable[[StepEvent], object] | None = ...,
    on_eval: Callable[[EvalEvent], object] | None = ...,
    on_checkpoint: Callable[[CheckpointEvent], object] | None = ...,
    on_end: Callable[[EndEvent], object] | None = ...,
    **settings: Any,
) -> Run:
    """Train a model towards a teacher's distributions, on given or on sampled responses.

    Args:
        run: Run folder and start.
        model: Model to train.
        data: Conversations, or prompts whose responses are sampled.
        batch_size: Number of conversations in an optimizer step.
        max_tokens: Longest conversation, in tokens. `data.overlong_prompts` says what happens to
            longer ones.
        train: Optimizer steps.
        optimizer: Optimizer of the model.
        strategy: Devices, sharding and parallelism.
        launch: Processes of the run.
        checkpoint: Checkpoints.
        hub: Hugging Face Hub.
        log: Metrics, rollouts and batches on disk.
        eval: Evaluation on the eval set.
        engine: Engine that generates responses.
        reward: Scoring of responses.
        validation: Conversations held out from training. Their divergence from the teacher is
            measured with each evaluation; without sources none is.
        teacher: Model to learn from. An empty path takes the model that training starts from, for
            self-distillation.
        teachers: Models to learn from on the rows of one data source each, by its name. All other
            rows have `teacher`.
        distill: Divergence from the teacher, and the responses to learn on.
        sampling: Generation of responses, for `distill.on_policy`.
        rewards: Short for `reward.terms`.
        steps: Short for `train.steps`.
        epochs: Short for `train.epochs`.
        lr: Short for `optimizer.lr`.
        name: Short for `run.name`.
        dir: Short for `run.dir`.
        on_start: The models are loaded, and the first step has not begun.
        on_rollouts: Responses of a step are sampled and trained on, or those to a prompt are
            generated.
        on_step: A step is done, and its checkpoint is not written yet.
        on_eval: The run is evaluated; after 0 steps if ``eval.at_start`` is set.
        on_checkpoint: A checkpoint is written.
        on_end: The run has ended, and its summary is written.
    """

def iterate(
    *configs: Given,
    run: RunConfig | Mapping[str, Any] = ...,
    model: Any = ...,
    generator: ModelConfig | Mapping[str, Any] | str = ...,
    rounds: int = ...,
    prompts_per_round: int | None = ...,
    rows: Literal["new", "all"] = ...,
    train_from: Literal["previous", "start"] = ...,
    reference: Any = ...,
    data: Data = ...,
    sampling: SamplingConfig | Mapping[str, Any] = ...,
    samples: int = ...,
    reward: Any = ...,
    select: SelectConfig | Mapping[str, Any] | str = ...,
    eval: Data = ...,
    engine: EngineConfig | Mapping[str, Any] | str = ...,
    strategy: StrategyConfig | Mapping[str, Any] | str = ...,
    hub: HubConfig | Mapping[str, Any] = ...,
    log: LogConfig | Mapping[str, Any] = ...,
    sft: SFTConfig | Mapping[str, Any] | None = ...,
    dpo: DPOConfig | Mapping[str, Any] | None = ...,
    kto: KTOConfig | Mapping[str, Any] | None = ...,
    rewards: Any = ...,
    name: str = ...,
    dir: str = ...,
    on_start: Callable[[StartEvent], object] | None = ...,
    on_rollouts: Callable[[RolloutsEvent], object] | None = ...,
    on_step: Callable[[StepEvent], object] | None = ...,
    on_eval: Callable[[EvalEvent], object] | None = ...,
    on_checkpoint: Callable[[CheckpointEvent], object] | None = ...,
    on_end: Callable[[EndEvent], object] | None = ...,
    **settings: Any,
) -> Run:
    """Repeat rounds: generate responses, select training rows by their rewards, and train. Rejection sampling, iterative DPO, best-of-n distillation and self-play.

    Args:
        run: Folder of all rounds and start. Round 1 takes the seed of `run`, and each later round
            has its own.
        model: Model to train. It also generates, unless `generator` is set.
        generator: Model that generates in every round, such as a larger one. An empty path takes
            the model that the round before has trained.
        rounds: Number of rounds. Raise it to continue a run that is finished.
        prompts_per_round: Number of prompts of a round. A prompt comes again only when all others
            have come. `null` takes all prompts in every round.
        rows: Rows that a round trains on: those of the round, or those of `all` rounds so far.
        train_from: Model that the training of a round starts from: the result of the `previous`
            round, or `model` itself, as in STaR.
        reference: Reference of `dpo` and `kto`: the model that the training of the round starts
            from, or `model` itself in every round.
        data: Prompts. Their order counts with `prompts_per_round`.
        sampling: Generation of responses.
        samples: Number of responses to each prompt in a round.
        reward: Scoring of responses, of the eval set too.
        select: Responses to train on, and the layout of their rows.
        eval: Evaluation on the eval set, before the first round and at the end of each.
        engine: Engine that generates responses.
        strategy: Device of the run.
        hub: Hugging Face Hub. Each round pushes its model at its end, so that the newest commit has
            the last round. `push_every` counts the steps of a round.
        log: Metrics of each training, and samples of each generation.
        sft: Training by `lightrft sft`: its settings except those above, which each round sets.
            `null` for all three takes `sft`.
        dpo: Training by `lightrft dpo`.
        kto: Training by `lightrft kto`.
        rewards: Short for `reward.terms`.
        name: Short for `run.name`.
        dir: Short for `run.dir`.
        on_start: The models are loaded, and the first step has not begun.
        on_rollouts: Responses of a step are sampled and trained on, or those to a prompt are
            generated.
        on_step: A step is done, and its checkpoint is not written yet.
        on_eval: The run is evaluated; after 0 steps if ``eval.at_start`` is set.
        on_checkpoint: A checkpoint is written.
        on_end: The run has ended, and its summary is written.
    """

def eval(
    *configs: Given,
    run: RunConfig | Mapping[str, Any] = ...,
    model: Any = ...,
    eval: Data = ...,
    engine: EngineConfig | Mapping[str, Any] | str = ...,
    reward: Any = ...,
    strategy: StrategyConfig | Mapping[str, Any] | str = ...,
    data: Data = ...,
    rewards: Any = ...,
    name: str = ...,
    dir: str = ...,
    **settings: Any,
) -> Any:
    """Generate responses to the eval set and score them.

    Args:
        run: Run folder and start.
        model: Model to evaluate.
        eval: Eval set and generation.
        engine: Engine that generates responses.
        reward: Scoring of responses.
        strategy: Devices, sharding and parallelism.
        data: Short for `eval.data.sources`.
        rewards: Short for `reward.terms`.
        name: Short for `run.name`.
        dir: Short for `run.dir`.
    """

def eval_rm(
    *configs: Given,
    run: RunConfig | Mapping[str, Any] = ...,
    model: Any = ...,
    head: str | None = ...,
    judgement: JudgementConfig | Mapping[str, Any] | None = ...,
    sampling: SamplingConfig | Mapping[str, Any] = ...,
    data: Data = ...,
    steps: ProcessDataConfig | Mapping[str, Any] | str = ...,
    threshold: float | None = ...,
    max_tokens: int = ...,
    batch_size: int = ...,
    max_tokens_per_micro_batch: Any | Literal["auto"] = ...,
    best_of: int | None = ...,
    worst: int = ...,
    strategy: StrategyConfig | Mapping[str, Any] | str = ...,
    name: str = ...,
    dir: str = ...,
    **settings: Any,
) -> Any:
    """Score given responses with a reward model, and measure how well it orders them.

    Args:
        run: Run folder and start.
        model: Reward model to evaluate: its folder, or the run folder of `lightrft rm`.
        head: Head whose scores are compared with the labels of rows; `null` takes the reward of the
            model. Other heads are compared with the columns that `data.columns.labels` gives them.
        judgement: Questions to a generative reward model, in which comparisons are asked in both
            orders. Then `model` is a language model, and its verdicts are compared with the labels.
        sampling: Generation of judgements, for `judgement`.
        data: Prompts with their responses.
        steps: Responses whose steps have labels, such as ProcessBench, for a process reward model.
            They take the place of `data`.
        threshold: Smallest score of a right step, for `steps`; `null` takes the threshold of the
            model.
        max_tokens: Longest prompt with one response, in tokens. `data.overlong_prompts` says what
            happens to longer ones.
        batch_size: Number of rows that are read and scored together. A stopped evaluation resumes
            after the last batch.
        max_tokens_per_micro_batch: Most tokens of one forward pass. `auto` is 16384 where there is
            a GPU, and 2048 on a CPU. Lower it if the device runs out of memory.
        best_of: Largest n of the best-of-n curve. Prompts with fewer rated responses are left out
            of it. `null` takes the smallest number of responses to a prompt.
        worst: Number of pairs in the report whose order is most wrong, or of responses whose steps
            are judged worst.
        strategy: Devices, sharding and parallelism.
        name: Short for `run.name`.
        dir: Short for `run.dir`.
    """

def generate(
    *configs: Given,
    run: RunConfig | Mapping[str, Any] = ...,
    model: Any = ...,
    data: Data = ...,
    sampling: SamplingConfig | Mapping[str, Any] = ...,
    samples: int = ...,
    output: str = ...,
    engine: EngineConfig | Mapping[str, Any] | str = ...,
    reward: Any = ...,
    select: SelectConfig | Mapping[str, Any] | str = ...,
    strategy: StrategyConfig | Mapping[str, Any] | str = ...,
    rewards: Any = ...,
    name: str = ...,
    dir: str = ...,
    on_rollouts: Callable[[RolloutsEvent], object] | None = ...,
    **settings: Any,
) -> Any:
    """Generate responses to a file of prompts, as JSON lines.

    Args:
        run: Run folder and start.
        model: Model that generates.
        data: Prompts.
        sampling: Generation of responses.
        samples: Number of responses to each prompt.
        output: JSON-lines file of the responses. It must not exist, unless `run.overwrite` is set.
        engine: Engine that generates responses.
        reward: Scoring of responses; without terms none is scored.
        select: Responses to write, and the layout of their rows.
        strategy: Devices, sharding and parallelism.
        rewards: Short for `reward.terms`.
        name: Short for `run.name`.
        dir: Short for `run.dir`.
        on_rollouts: Responses of a step are sampled and trained on, or those to a prompt are
            generated.
    """

def label_steps(
    *configs: Given,
    run: RunConfig | Mapping[str, Any] = ...,
    model: Any = ...,
    data: Data = ...,
    samples: int = ...,
    steps: StepLabelsConfig | Mapping[str, Any] = ...,
    sampling: SamplingConfig | Mapping[str, Any] = ...,
    output: str = ...,
    engine: EngineConfig | Mapping[str, Any] | str = ...,
    reward: Any = ...,
    strategy: StrategyConfig | Mapping[str, Any] | str = ...,
    rewards: Any = ...,
    name: str = ...,
    dir: str = ...,
    **settings: Any,
) -> Any:
    """Label the steps of solutions by the share of right responses that continue them.

    Args:
        run: Run folder and start.
        model: Model that continues the solutions.
        data: Prompts, with their solutions unless `samples` is set.
        samples: Number of solutions to generate for each prompt; 0 takes the solution of each row.
        steps: Steps of a solution, and their labels.
        sampling: Generation of continuations, and of solutions.
        output: JSON-lines file of the rows. It must not exist, unless `run.overwrite` is set.
        engine: Engine that generates responses.
        reward: Scoring of solutions and of continuations.
        strategy: Devices, sharding and parallelism.
        rewards: Short for `reward.terms`.
        name: Short for `run.name`.
        dir: Short for `run.dir`.
    """

def serve(
    *configs: Given,
    model: Any = ...,
    name: str | None = ...,
    http: HTTPConfig | Mapping[str, Any] = ...,
    engine: EngineConfig | Mapping[str, Any] | str = ...,
    device: str = ...,
    threads: int = ...,
    media: MediaConfig | Mapping[str, Any] = ...,
    sampling: SamplingConfig | Mapping[str, Any] = ...,
    weights_token_file: str | None = ...,
    max_tokens_per_micro_batch: int = ...,
    **settings: Any,
) -> Any:
    """Answer requests for text by a model, in the APIs of OpenAI and Anthropic.

    Args:
        model: Model, run folder or checkpoint.
        name: Name of the model in answers; `null` takes `model.path`.
        http: Address, tokens and limits.
        engine: Engine of the server.
        device: Device of the model, such as `cpu` or `cuda:1`; `auto` takes an accelerator where
            there is one.
        threads: Number of CPU threads; 0 leaves it to torch.
        media: Images, video and audio of requests. Without `allow.roots`, no request can name a
            file of the server.
        sampling: Generation, where a request sets nothing else.
        weights_token_file: File of bearer tokens, as `http.token_file`, of those who may replace
            the weights, such as a run with `engine.kind: http`. `null` lets nobody replace them.
        max_tokens_per_micro_batch: Largest number of tokens of a forward pass that computes
            `logprobs` of a request.
    """

def serve_rm(
    *configs: Given,
    model: Any = ...,
    name: str | None = ...,
    http: HTTPConfig | Mapping[str, Any] = ...,
    engine: EngineConfig | Mapping[str, Any] | str = ...,
    device: str = ...,
    threads: int = ...,
    batching: BatchingConfig | Mapping[str, Any] = ...,
    media: MediaConfig | Mapping[str, Any] = ...,
    sampling: SamplingConfig | Mapping[str, Any] = ...,
    **settings: Any,
) -> Any:
    """Answer requests for scores of a reward model.

    Args:
        model: Reward model with heads, or generative reward model.
        name: Name of the model in answers; `null` takes `model.path`.
        http: Address, tokens and limits.
        engine: Engine of a generative reward model.
        device: Device of the model, such as `cpu` or `cuda:1`; `auto` takes an accelerator where
            there is one.
        threads: Number of CPU threads; 0 leaves it to torch.
        batching: Batches of requests that wait for scores. A generative model generates for all
            requests at once, and takes only `max_tokens`, for log-probs.
        media: Images, video and audio of requests. Without `allow.roots`, no request can name a
            file of the server.
        sampling: Generation by a generative reward model, where a request sets nothing else.
    """

def serve_tinker(
    *configs: Given,
    model: Any = ...,
    name: str | None = ...,
    http: HTTPConfig | Mapping[str, Any] = ...,
    engine: EngineConfig | Mapping[str, Any] | str = ...,
    device: str = ...,
    threads: int = ...,
    dir: str = ...,
    lora_alpha: float = ...,
    max_tokens_per_micro_batch: int = ...,
    **settings: Any,
) -> Any:
    """Train and sample for programs that use tinker's client.

    Args:
        model: Base model, run folder or checkpoint. It stays as it is, and each training client has
            an adapter.
        name: Name of the base model that clients give; `null` takes `model.path`.
        http: Address, tokens and limits.
        engine: Engine that samples.
        device: Device of the model, such as `cpu` or `cuda:1`; `auto` takes an accelerator where
            there is one.
        threads: Number of CPU threads; 0 leaves it to torch.
        dir: Folder of the checkpoints of all clients.
        lora_alpha: Scale of the adapters: their product counts `lora_alpha / rank` times. The
            client gives the rank. Adapters of a checkpoint keep their scale.
        max_tokens_per_micro_batch: Largest number of tokens of a forward pass.
    """

def export(
    *configs: Given,
    path: str = ...,
    which: Literal["auto", "best", "last"] = ...,
    step: int | None = ...,
    output: str | None = ...,
    adapters: Literal["merge", "keep"] = ...,
    base: str | None = ...,
    overwrite: bool = ...,
    **settings: Any,
) -> Any:
    """Write the policy of a run folder or a checkpoint as a Hugging Face folder.

    Args:
        path: Run folder, or one folder of its `checkpoints/`.
        which: Checkpoint of a run: the best by its `checkpoint.best`, or the last. `auto` takes the
            best if the run names a metric.
        step: Step of the checkpoint, instead of `which`.
        output: Folder to write; `null` is `export/` of the run. It must not exist, unless
            `overwrite` is set.
        adapters: `merge` adds low-rank adapters to the weights that they were trained with. `keep`
            writes them alone, for PEFT.
        base: Folder or name of the start model. Set it when that has moved since the run.
        overwrite: Replace `output` if it is a model folder.
    """

def merge(
    *configs: Given,
    models: Sequence[Any] = ...,
    merge_method: Literal["linear", "slerp", "task_arithmetic", "ties", "dare_linear", "dare_ties"] = ...,
    base_model: str | None = ...,
    t: float = ...,
    normalize: bool | None = ...,
    scale: float = ...,
    seed: int = ...,
    tokenizer_source: str | None = ...,
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = ...,
    max_shard_size: str = ...,
    output: str = ...,
    overwrite: bool = ...,
    **settings: Any,
) -> Any:
    """Write one model folder from several models, or from adapters.

    Args:
        models: Models to merge, each a path or a branch with `model`, `weight` and `density`. One
            folder of adapters alone is merged into its base.
        merge_method: `linear` averages weights. `slerp` interpolates two models on a sphere. The
            others add task vectors, which are differences from `base_model`: `task_arithmetic` as
            they are, `ties` (arXiv 2306.01708) trimmed and with one sign for each value,
            `dare_linear` and `dare_ties` (arXiv 2311.03099) with random values dropped and the rest
            rescaled.
        base_model: Model that task vectors are differences from. For `slerp`, the model at `t = 0`,
            if it is one of the two. For adapters, also their base, in place of the one that they
            name.
        t: Position of `slerp`: 0 is the first model, 1 is the second.
        normalize: Divide by the sum of the weights. `null` does so for `linear` and `ties`.
        scale: Factor of the merged task vector, the lambda of TIES.
        seed: Seed of the values that `dare_*` drops.
        tokenizer_source: Model whose tokenizer, chat template and processor are copied. `null`
            takes `base_model`, or the first of `models`. `config.json` is always copied from there.
        dtype: Type of the written weights. The arithmetic is in float32. `auto` keeps the type of
            `base_model`, or of the first of `models`.
        max_shard_size: Largest size of a file of weights. Memory must hold one file, and one tensor
            of each model.
        output: Folder to write. It must not exist, unless `overwrite` is set.
        overwrite: Replace `output` if it is a model folder.
    """

def convert(
    *configs: Given,
    path: str = ...,
    layout: Literal["auto", "model", "deepspeed", "fsdp", "gguf"] = ...,
    base: str | None = ...,
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = ...,
    max_shard_size: str = ...,
    output: str = ...,
    overwrite: bool = ...,
    **settings: Any,
) -> Any:
    """Write a model folder with weights of another type, in files of another size, of a GGUF file, or of a checkpoint of DeepSpeed or FSDP.

    Args:
        path: Model to convert: a Hugging Face folder with safetensors or `pytorch_model.bin`, a
            name on the hub, a folder of PEFT adapters, a run folder or a checkpoint. Or a
            checkpoint of DeepSpeed or FSDP that LightRFT, OpenRLHF or another framework wrote. Or a
            GGUF file.
        layout: Layout of `path`, for which `from=deepspeed` may stand: a `model`, a checkpoint of
            `deepspeed` (ZeRO 0 to 3), one of `fsdp`, which is torch's distributed checkpoint, or a
            `gguf` file. `auto` tells it from the files.
        base: Model that the training of a checkpoint of DeepSpeed or FSDP started from. It gives
            the config, the tokenizer and the processor.
        dtype: Type of the written weights. A value that is too large for it is an error. `auto`
            keeps the type of each tensor, which is float32 for the trained weights of DeepSpeed.
        max_shard_size: Largest size of a file of weights. Memory must hold one file.
        output: Folder to write. It must not exist, unless `overwrite` is set.
        overwrite: Replace `output` if it is a model folder.
    """

def import_config(
    *configs: Given,
    path: str = ...,
    framework: Literal["auto", "trl", "verl", "openrlhf", "llamafactory", "ms-swift", "lightrft"] = ...,
    verb: Literal["auto", "rl", "sft", "dpo", "kto", "rm", "distill"] = ...,
    processes: int | None = ...,
    output: str | None = ...,
    overwrite: bool = ...,
    **settings: Any,
) -> Any:
    """Write a config of TRL, verl, OpenRLHF, LLaMA-Factory, ms-swift or LightRFT as a config of lightrft, with a comment for each difference.

    Args:
        path: YAML or JSON file of options, or a shell script with the command. Of several commands
            in a script, the one with most options is taken.
        framework: Framework that the file is for. `auto` finds it by the command, or by options
            that it alone has.
        verb: Verb of the result. `auto` finds it by the command, the stage, or options that one
            kind of training alone has.
        processes: Number of processes of the run. Set it where the file counts rows of a device,
            and another file or command has the number of devices. `null` takes the number in the
            file, or 1.
        output: YAML file to write; `null` prints the config.
        overwrite: Replace `output` if it exists.
    """

def data(
    *configs: Given,
    run: RunConfig | Mapping[str, Any] = ...,
    model: Any = ...,
    reference: Any = ...,
    teacher: Any = ...,
    critic: CriticConfig | Mapping[str, Any] = ...,
    cost_critic: ValueModelConfig | Mapping[str, Any] = ...,
    prm: PRMConfig | Mapping[str, Any] = ...,
    ptx: PtxConfig | Mapping[str, Any] = ...,
    data: Data = ...,
    eval: Data = ...,
    rollout: RolloutConfig | Mapping[str, Any] = ...,
    sampling: SamplingConfig | Mapping[str, Any] = ...,
    engine: EngineConfig | Mapping[str, Any] | str = ...,
    reward: Any = ...,
    algorithm: AlgorithmConfig | Mapping[str, Any] | str = ...,
    train: RLTrainConfig | Mapping[str, Any] = ...,
    optimizer: OptimizerConfig | Mapping[str, Any] = ...,
    strategy: StrategyConfig | Mapping[str, Any] | str = ...,
    launch: LaunchConfig | Mapping[str, Any] = ...,
    checkpoint: CheckpointConfig | Mapping[str, Any] = ...,
    hub: HubConfig | Mapping[str, Any] = ...,
    log: LogConfig | Mapping[str, Any] = ...,
    show: ShowConfig | Mapping[str, Any] = ...,
    rewards: Any = ...,
    steps: int = ...,
    epochs: int = ...,
    lr: float = ...,
    name: str = ...,
    dir: str = ...,
    **settings: Any,
) -> ShownData:
    """Show the first rows of a config as a run reads them: their tokens, media and lengths.

    Args:
        run: Run folder and start.
        model: Policy.
        reference: Folder or name of the reference of the KL term; `null` takes the model that
            training starts from.
        teacher: Teacher of `algorithm.distill`.
        critic: Critic of advantages that need one.
        cost_critic: Second critic, which estimates the cost of `algorithm.lagrangian` for such
            advantages.
        prm: Process reward model of `prime`.
        ptx: Supervised data next to the rollouts.
        data: Prompts to learn from.
        eval: Evaluation on the eval set.
        rollout: Groups of responses of a step.
        sampling: Generation of responses.
        engine: Engine that generates responses.
        reward: Scoring of responses.
        algorithm: Advantage, loss and their terms.
        train: Optimizer steps.
        optimizer: Optimizer of the policy.
        strategy: Devices, sharding and parallelism.
        launch: Processes of the run.
        checkpoint: Checkpoints.
        hub: Hugging Face Hub.
        log: Metrics, rollouts and batches on disk.
        show: The rows to show, and the page.
        rewards: Short for `reward.terms`.
        steps: Short for `train.steps`.
        epochs: Short for `train.epochs`.
        lr: Short for `optimizer.lr`.
        name: Short for `run.name`.
        dir: Short for `run.dir`.
    """
