"""The settings tree of each verb."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from lightrft.config.algorithm import AlgorithmConfig
from lightrft.config.base import Settings
from lightrft.config.data import DataConfig, MediaConfig
from lightrft.config.launch import LaunchConfig
from lightrft.config.model import ModelConfig
from lightrft.config.reward import RewardConfig
from lightrft.config.rollout import EvalConfig, RolloutConfig
from lightrft.config.run import CheckpointConfig, LogConfig, RunConfig
from lightrft.config.strategy import EngineConfig, OptimizerConfig, SamplingConfig, StrategyConfig
from lightrft.config.train import CriticConfig, ProcessConfig, PtxConfig, TeacherConfig, TrainConfig


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
