"""LightRFT's training strategy in one process, over ``SingleStrategy``.

It trains on the accelerator or the CPU. Several processes train by the verbs of the command line,
and are refused here.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler
from transformers import PreTrainedTokenizerBase

from lightrft.compat.one_process import OneProcess
from lightrft.compat.options import options_of
from lightrft.config.strategy import OptimizerConfig
from lightrft.config.strategy import StrategyConfig as PlacementConfig
from lightrft.models.loading.save_model import save_model
from lightrft.strategy.base import StepInfo, TrainState
from lightrft.utils.atomic_files import whole_folder, write_json
from lightrft.utils.device_transfer import release_cached_memory
from lightrft.utils.errors import CheckpointError, ConfigError
from lightrft.utils.seeding import seed_everything
from lightrft.workers.local import strategy_of

_log = logging.getLogger(__name__)
CLIENT_STATE, LATEST = "client_state.json", "latest"
GIB = 2**30


@dataclass
class StrategyOptions:
    """LightRFT's options of a strategy. The names are those of its command line.

    Attributes:
        seed: Seed of all generators.
        max_norm: Largest norm of a gradient.
        micro_train_batch_size: Samples of a micro-batch.
        train_batch_size: Samples of an optimizer step.
        actor_learning_rate: Peak learning rate of the actor.
        critic_learning_rate: Peak learning rate of the critic.
        adam_betas: Decay rates of the moments.
        l2: Weight decay of matrices.
        lr_warmup_ratio: Share of the steps that is warm-up.
        critic_pretrain: A path, or True: the critic is trained.
        extra_args: Options without a field here.
    """

    seed: int = 42
    max_norm: float = 1.0
    micro_train_batch_size: int = 1
    train_batch_size: int = 128
    bf16: bool = True
    zero_stage: int = 2
    fsdp: bool = False
    fsdp_cpu_offload: bool = False
    adam_offload: bool = False
    zpg: int = 1
    grad_accum_dtype: str | None = None
    overlap_comm: bool = False
    engine_type: str = "vllm"
    engine_tp_size: int = 1
    enable_engine_sleep: bool = False
    local_rank: int = -1
    sp_size: int = 1
    actor_learning_rate: float = 1e-5
    critic_learning_rate: float = 1e-5
    adam_betas: tuple[float, float] = (0.9, 0.95)
    l2: float = 0.0
    lr_warmup_ratio: float = 0.03
    critic_pretrain: bool | str | None = False
    remote_rm_url: str | None = None
    pretrain_data: str | None = None
    fused_linear_logprob: bool = False
    reward_running_norm: bool = False
    reward_running_norm_minus_mean: bool = False
    advantages_norm: bool = False
    advantage_clip: float = 0.0
    reward_clip: float = 0.0
    micro_rollout_batch_size: int = 2
    n_samples_per_prompt: int = 8
    overlong_buffer: bool = False
    overlong_buffer_len: int = 1024
    overlong_buffer_penalty_factor: float = 1.0
    dynamic_sampling: bool = False
    advantage_estimator: str = "group_norm"
    use_kl_loss: bool = False
    kl_estimator: str = "k3"
    mixed_mm_data: bool = False
    use_mp_opt: bool = False
    plot_every: int = -1
    use_tensorboard: Any = False
    extra_args: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_args(cls, args_dict: Any) -> StrategyOptions:
        """Return the options of a namespace, a mapping, or an object with attributes."""
        given = options_of(args_dict)
        given = {**given.pop("extra_args", {}), **given}
        known = {own.name for own in fields(cls)} - {"extra_args"}
        extra = {name: value for name, value in given.items() if name not in known}
        return cls(**{name: given[name] for name in known & set(given)}, extra_args=extra)

    def print_config_summary(self) -> None:
        """Print each option, and whether it is the default."""
        for own in fields(self):
            value, default = getattr(self, own.name), getattr(StrategyOptions(), own.name)
            status = "Default" if value == default else "Overridden"
            sys.stdout.write(f"{own.name}: {value} ({status})\n")


StrategyConfig = StrategyOptions
"""The name in LightRFT."""

REFUSED = {
    "zpg": "it shards over several processes",
    "sp_size": "it splits tokens over several processes",
    "engine_tp_size": "an engine of several processes belongs to `lightrft rl`",
    "grad_accum_dtype": "gradients add up in float32",
    "use_mp_opt": "the optimizer has float32 masters in any case",
    "fused_linear_logprob": "log-probs are computed in chunks in any case",
}
"""Options that would change nothing, with the reason."""
OF_ENGINES = (
    "setup_inference_engine",
    "engine_generate_local",
    "gather_and_generate",
    "update_engine_weights",
    "maybe_sleep_inference_engine",
    "wakeup_inference_engine",
)
"""LightRFT's methods that a strategy of one process does not have."""


class StrategyOptimizer(torch.optim.Optimizer):
    """AdamW with float32 masters, whose learning rate a scheduler of torch may set.

    It trains once ``TrainingStrategy.prepare`` has had it with its model.

    Args:
        model: Gives the trained parameters.
        config: Learning rate, moments, weight decay and clipping.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        self.config = config
        self.state_of_model: TrainState | None = None
        self.info: StepInfo | None = None
        self.take_step: Callable[[TrainState], StepInfo] | None = None
        trained = [p for p in model.parameters() if p.requires_grad]
        super().__init__(trained, {"lr": config.lr})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # ty: ignore[incompatible-method-override]
        """Clip the gradient and update the weights, at the learning rate of ``param_groups``.

        Raises ``ConfigError`` before ``prepare``, or for a closure.
        """
        if self.state_of_model is None or self.take_step is None:
            raise ConfigError("the optimizer is not prepared: call the strategy's prepare() first")
        if closure is not None:
            raise ConfigError("closure is not None: AdamW evaluates the loss once; leave it out")
        for group in self.state_of_model.optimizer.param_groups:
            group["lr"] = self.param_groups[0]["lr"]
        self.info = self.take_step(self.state_of_model)


class ResumedSampler(DistributedSampler):
    """A shuffle by seed and epoch, of which the first samples may be done.

    Args:
        dataset: Gives the number of samples.
        shuffle: Shuffle the samples.
        seed: Seed of the shuffle.
        drop_last: Not of effect in one process.
        consumed: Samples of the first epoch that are left out.
    """

    def __init__(
        self, dataset: Dataset[Any], shuffle: bool, seed: int, drop_last: bool, consumed: int
    ) -> None:
        super().__init__(dataset, 1, 0, shuffle=shuffle, seed=seed, drop_last=drop_last)
        self.consumed = consumed

    def set_epoch(self, epoch: int, consumed_samples: int = 0) -> None:
        """Select the shuffle of an epoch.

        Args:
            epoch: Number of the epoch.
            consumed_samples: Samples that are left out.
        """
        super().set_epoch(epoch)
        self.consumed = consumed_samples

    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__())[self.consumed :])

    def __len__(self) -> int:
        return max(0, super().__len__() - self.consumed)


class TrainingStrategy(OneProcess):
    """LightRFT's calls on models, optimizers and checkpoints.

    Losses of micro-batches are averaged: ``backward`` divides by ``accumulated_gradient``. LightRFT
    divides with DeepSpeed alone.

    Args:
        seed: Seed of all generators.
        max_norm: Largest norm of a gradient. 0 or less does not clip.
        micro_train_batch_size: Samples of a micro-batch.
        train_batch_size: Samples of an optimizer step.
        args: LightRFT's options, or ``None``.

    Raises:
        ConfigError: There are several processes, an option would change nothing, or the batch
            sizes do not divide.
    """

    def __init__(
        self,
        seed: int = 42,
        max_norm: float = 1.0,
        micro_train_batch_size: int = 1,
        train_batch_size: int = 128,
        args: Any = None,
    ) -> None:
        self.config = StrategyOptions() if args is None else StrategyOptions.from_args(args)
        check_options(self.config)
        if micro_train_batch_size < 1 or train_batch_size % micro_train_batch_size:
            raise ConfigError(
                f"train_batch_size = {train_batch_size} is no multiple of micro_train_batch_size = "
                f"{micro_train_batch_size}; change one of them"
            )
        self.args = args
        self.seed = seed
        self.max_norm = max_norm
        self.micro_train_batch_size = micro_train_batch_size
        self.train_batch_size = train_batch_size
        self.world_size = 1
        self.accumulated_gradient = train_batch_size // micro_train_batch_size
        self.inner = _placed(self.config)
        self.steps: dict[str, int] = {}
        self._states: dict[int, TrainState] = {}
        self.setup_distributed()

    def __getattr__(self, name: str) -> Any:
        if name in OF_ENGINES:
            raise AttributeError(
                f"{name}: get_strategy has no engine; call generate of the actor, or train by "
                "`lightrft rl` with engine.kind"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def set_seed(self, seed: int) -> None:
        """Seed all generators."""
        seed_everything(seed)

    def setup_distributed(self, timeout: Any = None, num_gpu_per_node: int = 8) -> None:
        """Seed all generators. One process needs no more.

        Args:
            timeout: Of other processes; not read.
            num_gpu_per_node: Of other processes; not read.
        """
        self.set_seed(self.seed)

    def init_model_context(self) -> AbstractContextManager[Any]:
        """Return a context manager in which to build models."""
        return self.inner.loading()

    def create_optimizer(
        self,
        model: nn.Module,
        lr: float = 1e-5,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        eps: float = 1e-8,
    ) -> StrategyOptimizer:
        """Return AdamW for the trained parameters of ``model``.

        Args:
            model: The model.
            lr: Learning rate, which a scheduler may change.
            betas: Decay rates of the moments.
            weight_decay: Weight decay of matrices.
            eps: Added to the denominator of an update.
        """
        limit = self.max_norm if self.max_norm > 0 else None
        first, second = betas
        config = OptimizerConfig(
            lr=lr,
            betas=(first, second),
            weight_decay=weight_decay,
            eps=eps,
            max_grad_norm=limit,
        )
        return StrategyOptimizer(model, config)

    def prepare(self, *models_or_model_optim_pairs: Any, is_rlhf: bool = False) -> Any:
        """Move models to their device, and connect optimizers with them.

        Args:
            *models_or_model_optim_pairs: Models, or tuples of model, optimizer and scheduler.
                ``None`` stays.
            is_rlhf: Not read.

        Returns:
            The arguments, as a list unless there is one.
        """
        for item in models_or_model_optim_pairs:
            model, optimizer, *_ = item if isinstance(item, tuple) else (item, None)
            if optimizer is not None:
                self._connect(model, optimizer)
            elif model is not None:
                for one in model if isinstance(model, list) else [model]:
                    self.inner.place(one)
        items = list(models_or_model_optim_pairs)
        return items[0] if len(items) == 1 else items

    def _connect(self, model: nn.Module, optimizer: Any) -> None:
        if not isinstance(optimizer, StrategyOptimizer):
            raise ConfigError(
                f"optimizer is a {type(optimizer).__name__}; build it by create_optimizer() of the strategy"
            )
        state = self.inner.prepare(model, optimizer.config, total_steps=1)
        optimizer.state_of_model = self._states[id(model)] = state
        optimizer.take_step = self.inner.step

    def prepare_models_and_optimizers(
        self,
        actor: Any,
        critic: Any,
        reward_models: Any,
        initial_model: Any,
        args: Any,
        max_steps: int,
    ) -> Any:
        """Build optimizers and cosine schedules, and prepare all models.

        Args:
            actor: The policy.
            critic: The value function, or ``None``. It is trained if ``critic_pretrain`` is set.
            reward_models: A reward model, a list of them, or ``None``.
            initial_model: The reference, or ``None``.
            args: Not read: the options of the strategy count.
            max_steps: Optimizer steps of the schedule.

        Returns:
            ``(actor, optimizer, scheduler)``, the same of the critic, the reward models and the
            reference.
        """
        trained = [(actor, self.config.actor_learning_rate)]
        if critic is not None and self.config.critic_pretrain:
            trained.append((critic, self.config.critic_learning_rate))
        triples = [self._scheduled(model, lr, max_steps) for model, lr in trained]
        if len(triples) == 1:
            triples.append((critic, None, None))
        return self.prepare(*triples, reward_models, initial_model, is_rlhf=True)

    def prepare_reward_model(
        self, reward_model: nn.Module, args: Any = None, max_steps: int = 10**8
    ) -> Any:
        """Build optimizer and cosine schedule of a reward model, and prepare it.

        Args:
            reward_model: The model.
            args: Not read: the options of the strategy count. The rate is that of the actor.
            max_steps: Optimizer steps of the schedule.

        Returns:
            ``(model, optimizer, scheduler)``.
        """
        return self.prepare(
            self._scheduled(reward_model, self.config.actor_learning_rate, max_steps)
        )

    def _scheduled(self, model: nn.Module, lr: float, max_steps: int) -> tuple[Any, Any, Any]:
        # The module of schedules imports peft, which takes a second.
        from transformers import get_scheduler

        config = self.config
        optimizer = self.create_optimizer(
            model, lr=lr, betas=config.adam_betas, weight_decay=config.l2
        )
        scheduler = get_scheduler(
            "cosine_with_min_lr",
            optimizer,
            num_warmup_steps=math.ceil(max_steps * config.lr_warmup_ratio),
            num_training_steps=max_steps,
            scheduler_specific_kwargs={"min_lr": lr * 0.1},
        )
        return model, optimizer, scheduler

    def backward(self, loss: Tensor, model: nn.Module, optimizer: Any, name: str = "model") -> None:
        """Add the gradient of a micro-batch's mean loss.

        Args:
            loss: 0-d.
            model: The model.
            optimizer: Its optimizer.
            name: Name of the model, as in ``optimizer_step``.
        """
        is_last = self.steps.get(name, 0) + 1 >= self.accumulated_gradient
        self.inner.backward(self._state(model), loss / self.accumulated_gradient, last=is_last)

    def optimizer_step(
        self, optimizer: Any, model: nn.Module, scheduler: Any = None, name: str = "model"
    ) -> StepInfo | None:
        """Count a micro-batch. After ``accumulated_gradient`` of them, update the weights.

        A gradient that is not finite updates nothing and leaves the schedule.

        Args:
            optimizer: The optimizer of ``model``.
            model: The model.
            scheduler: Its scheduler, or ``None``.
            name: Name of the model, whose micro-batches are counted.

        Returns:
            Norm of the gradient and learning rate, after an update. Else ``None``.
        """
        count = self.steps.get(name, 0) + 1
        self.steps[name] = count % self.accumulated_gradient
        if self.steps[name]:
            return None
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        info = StepInfo(optimizer.info.grad_norm, rate, optimizer.info.skipped)
        if info.skipped:
            _log.warning("%s: no update, %s", name, info.skipped)
        elif scheduler is not None:
            scheduler.step()
        return info

    def _state(self, model: nn.Module) -> TrainState:
        state = self._states.get(id(model))
        if state is None:
            raise ConfigError(
                f"{type(model).__name__} has no optimizer: call the strategy's prepare() with "
                "the model and the optimizer first"
            )
        return state

    def setup_dataloader(
        self,
        replay_buffer: Any,
        batch_size: int,
        pin_memory: bool = False,
        shuffle: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = True,
        sampler: Sampler[int] | None = None,
        consumed_samples: int = 0,
    ) -> DataLoader[Any]:
        """Return a loader of a data set or a buffer.

        Args:
            replay_buffer: The data.
            batch_size: Samples of a batch.
            pin_memory: Move batches to pinned memory.
            shuffle: Shuffle by the seed, differently in each epoch.
            collate_fn: Makes a batch of samples.
            drop_last: Leave out the last batch if it is smaller.
            sampler: Order of the samples, in place of the shuffle.
            consumed_samples: Samples of the first epoch that are left out.
        """
        if sampler is None:
            sampler = ResumedSampler(replay_buffer, shuffle, self.seed, drop_last, consumed_samples)
        return DataLoader(
            replay_buffer,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=drop_last,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
        )

    def save_model(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, output_dir: str
    ) -> None:
        """Write a folder that transformers loads. Adapters are written as adapters.

        Args:
            model: An actor or a transformers model.
            tokenizer: Written too, unless ``None``.
            output_dir: The folder.
        """
        save_model(self.unwrap_model(model), tokenizer, output_dir, merge=False)

    def save_ckpt(
        self,
        model: nn.Module,
        save_dir: str,
        tag: str | None = None,
        max_num: int = 3,
        max_mem: int = 1000,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
    ) -> None:
        """Write weights, optimizer and ``client_state`` to ``save_dir/tag``.

        The oldest checkpoints of ``save_dir`` are removed. Other folders stay.

        Args:
            model: A prepared model.
            save_dir: Folder of all checkpoints.
            tag: Name of the checkpoint. ``None`` takes the number after the largest one.
            max_num: Most checkpoints.
            max_mem: Most GiB of all checkpoints.
            client_state: Plain data.
            save_latest: Let ``load_ckpt`` without a tag take this checkpoint.
        """
        folder = Path(save_dir)
        folder.mkdir(parents=True, exist_ok=True)
        if tag is None:
            steps = [path.name.removeprefix("step_") for path in _checkpoints(folder)]
            tag = f"step_{max([-1, *map(int, filter(str.isdecimal, steps))]) + 1}"
        with whole_folder(folder / tag) as target:
            self.inner.save(self._state(model), target)
            write_json(target / CLIENT_STATE, client_state or {})
        if save_latest:
            (folder / LATEST).write_text(tag)
        saved = _checkpoints(folder)
        while len(saved) > 1 and (len(saved) > max_num or _size(saved) > max_mem * GIB):
            shutil.rmtree(saved.pop(0))

    def load_ckpt(
        self,
        model: nn.Module,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str, dict[str, Any]]:
        """Restore a checkpoint. Return its folder and the client state.

        Args:
            model: A prepared model.
            load_dir: Folder of all checkpoints.
            tag: Name of the checkpoint. ``None`` takes the latest one.
            load_module_strict: Must be true.
            load_optimizer_states: Must be true.
            load_lr_scheduler_states: Must be true. A scheduler of torch is restored by its caller.
            load_module_only: Must be false.

        Raises:
            CheckpointError: There is no such checkpoint.
            ConfigError: Only a part is to be restored.
        """
        whole = load_module_strict and load_optimizer_states and load_lr_scheduler_states
        if not whole or load_module_only:
            raise ConfigError(
                "load_ckpt restores weights and optimizer, all of them: leave its options out, or "
                "load the weights of save_model by from_pretrained"
            )
        folder = Path(load_dir)
        if tag is None:
            if not (folder / LATEST).is_file():
                raise CheckpointError(f"{load_dir} has no latest checkpoint; name one by tag")
            tag = (folder / LATEST).read_text().strip()
        if not (folder / tag / CLIENT_STATE).is_file():
            raise CheckpointError(f"{load_dir} has no checkpoint {tag!r}")
        self.inner.load(self._state(model), folder / tag)
        return str(folder / tag), json.loads((folder / tag / CLIENT_STATE).read_text())

    def print(self, *msg: object) -> None:
        """Print on standard output."""
        sys.stdout.write(" ".join(str(part) for part in msg) + "\n")

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Return the transformers or peft model of an actor, or ``model``."""
        inner = getattr(model, "model", model)
        return inner if hasattr(inner, "save_pretrained") else model

    def report_memory(self, prefix: str = "") -> None:
        """Log the memory of the accelerator, after ``prefix``."""
        if torch.accelerator.is_available():
            _log.info("%s: %d bytes in use", prefix, torch.accelerator.memory_allocated())

    def sync_and_clear_cache(self) -> None:
        """Return the free blocks of torch's allocator to the device."""
        release_cached_memory()


StrategyBase = FakeStrategy = TrainingStrategy
"""The names in LightRFT."""


def check_options(config: StrategyOptions) -> None:
    """Raise ``ConfigError`` for options that would change nothing."""
    default = StrategyOptions()
    for name, why in REFUSED.items():
        value = getattr(config, name)
        if value != getattr(default, name):
            raise ConfigError(f"{name} = {value} changes nothing in get_strategy: {why}; drop it")


def get_strategy(args: Any) -> TrainingStrategy:
    """Return the strategy of LightRFT's options.

    ``fsdp`` and ``zero_stage`` select how several processes share a model, so that one process
    computes the same for each.

    Args:
        args: A namespace, as ``argparse`` returns it.

    Raises:
        ConfigError: As in ``TrainingStrategy``.
    """
    config = StrategyOptions.from_args(args)
    return TrainingStrategy(
        seed=config.seed,
        max_norm=config.max_norm,
        micro_train_batch_size=config.micro_train_batch_size,
        train_batch_size=config.train_batch_size,
        args=args,
    )


def get_fake_strategy(args: Any = None) -> TrainingStrategy:
    """Return ``get_strategy(args)``, of default options for ``None``."""
    return TrainingStrategy() if args is None else get_strategy(args)


def is_engine(model: object) -> bool:
    """Return True if ``model`` is an inference engine, which can be woken up."""
    return hasattr(model, "wake_up")


OFFLOADS = ("adam_offload", "fsdp_cpu_offload")
"""Options that keep gradients and the optimizer in the memory of the CPU."""


def _placed(config: StrategyOptions) -> Any:
    """Return the strategy that the options of ``OFFLOADS`` select."""
    ranks = _ranks()
    named = [name for name in OFFLOADS if getattr(config, name)]
    if named and not torch.accelerator.is_available():
        raise ConfigError(
            f"{named[0]} = True changes nothing on the CPU, whose memory holds all in any case; "
            "leave it out"
        )
    return strategy_of(PlacementConfig(cpu_offload=bool(named)), ranks)


def _ranks() -> Any:
    from lightrft.distributed.process_group import SINGLE_PROCESS

    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count > 1:
        raise ConfigError(
            f"WORLD_SIZE = {count}: get_strategy trains in one process; train by `lightrft rl` "
            f"with launch.processes={count}, or by torchrun with `-m lightrft rl`"
        )
    return SINGLE_PROCESS


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints that ``save_ckpt`` wrote, the oldest first."""
    saved = [path.parent for path in folder.glob(f"*/{CLIENT_STATE}")]
    return sorted(saved, key=lambda path: (path / CLIENT_STATE).stat().st_mtime_ns)


def _size(folders: list[Path]) -> int:
    return sum(path.stat().st_size for one in folders for path in one.rglob("*"))
