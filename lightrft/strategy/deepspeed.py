"""ZeRO by DeepSpeed: optimizer state, gradients and weights in equal shards.

Stage 1 shards optimizer state over the ranks, stage 2 also gradients, stage 3 also weights.
DeepSpeed divides gradients by the number of ranks, but the ranks' losses are parts of one sum. So
each loss is first multiplied by the number of ranks. The trainer calls models in ways that
DeepSpeed's engine does not support. So the engine only gets the loss, through ``_Shell``, which
contains the model. Checkpoints have the format of a single process.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightrft.config.base import Tree, deep_merge
from lightrft.config.strategy import OptimizerConfig, StrategyConfig
from lightrft.distributed.process_group import ProcessGroup
from lightrft.distributed.shards import LocalShard, flat_blocks, local_shard_of
from lightrft.strategy.base import StepInfo, TrainableModule, TrainState, lr_factor, separate_calls
from lightrft.strategy.sharding import blocks_of, bucket_of, largest_block, limit_groups
from lightrft.strategy.single import (
    MOMENTS,
    SingleStrategy,
    parameter_groups,
    read_state,
    set_lr,
    write_state,
)
from lightrft.utils.errors import ConfigError, install_extra
from lightrft.utils.module_tensors import exchange

OURS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "data_types",
)
"""Keys of DeepSpeed's configuration that settings of this program replace."""

MASTERS = (
    "fp32_partitioned_groups_flat",
    "fp32_groups_flat_partition",
    "single_partition_of_fp32_groups",
)
"""Attributes with DeepSpeed's float32 masters: in stage 3, in stage 1 of bfloat16 weights, and
otherwise."""


@dataclass(slots=True)
class Zero:
    """DeepSpeed's engine over a model, and the model's trainable parameters by name."""

    engine: Any
    parameters: dict[str, nn.Parameter]
    step: int = 0
    total: int = 1

    @property
    def flat(self) -> list[Tensor]:
        """This rank's shards of the masters, each of many parameters. AdamW updates them."""
        zero = self.engine.optimizer
        return list(next(getattr(zero, name) for name in MASTERS if hasattr(zero, name)))


class _Shell(nn.Module):
    """The module that the engine calls. Its ``forward`` returns the loss that was computed by calls
    of the inner model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss: Tensor) -> Tensor:
        return loss


class DeepSpeedStrategy(SingleStrategy):
    """``Strategy`` over the ranks of torch's default process group.

    Frozen models are sharded in stage 3, and replicated on each rank in the other stages.
    """

    def __init__(self, config: StrategyConfig, ranks: ProcessGroup) -> None:
        super().__init__(config)
        self.ranks = ranks
        self.config = config
        self._hooked: dict[nn.Module, Any] = {}
        _check_settings(config.deepspeed, self.device)
        # Before the import, which looks for an accelerator.
        if self.device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        self.deepspeed = _deepspeed()

    def loading(self) -> AbstractContextManager[torch.device]:
        return nullcontext(torch.device("meta") if self.config.zero_stage == 3 else self.device)

    def place(self, model: nn.Module) -> None:
        """Move a frozen ``model`` to its device; in stage 3, shard it.

        Its forward must be called as a module.
        """
        self._spread(model)
        if self.config.zero_stage == 3:
            if isinstance(model, TrainableModule):
                # A call of a sharded module is collective, so every rank must make it.
                model.run_towers = True
                model.equal_calls.ranks = self.ranks
            self._fetch_by_blocks(model, self._engine(model, None, {}).optimizer)

    def _spread(self, model: nn.Module) -> None:
        """Move ``model`` to this device. If it was built on the meta device, shard it and read this
        rank's shards."""
        unread = any(parameter.is_meta for parameter in model.parameters())
        if unread:
            self._partition(model)
        super().place(model)
        if unread and isinstance(model, TrainableModule):
            model.read_weights(_held)

    def _partition(self, model: nn.Module) -> None:
        """Allocate a shard for each parameter on the meta device, one full parameter at a time, and
        memory for its buffers."""
        zero, groups = self.deepspeed.zero, self.deepspeed.utils.groups
        settings = self._configuration()["zero_optimization"]
        # Pass the existing groups: DeepSpeed would create them again for each model, which fails
        # for the second.
        near = None
        if settings.get("zero_hpz_partition_size"):
            near = groups._get_zero_param_intra_parallel_group()
        with self._refusing():
            init = zero.Init(
                config_dict_or_path=self._configuration(), zero_param_parallel_group=near
            )
        # Otherwise full weights would be saved for the backward pass.
        if init.mem_efficient_linear:
            init._enable_mem_efficient_linear()
        # Quantised frozen shards could not be filled with the weights that are read later.
        init.quantized_nontrainable_weights = False
        unread = {name for name, parameter in model.named_parameters() if parameter.is_meta}
        # A parameter cannot leave the meta device in place: each first becomes one expanded number.
        exchange(model, partial(_memory, device=self.device), buffers=True)
        parameters: dict[str, Any] = dict(model.named_parameters())
        for name, parameter in parameters.items():
            if name in unread:
                parameter.data = torch.empty(
                    parameter.shape, dtype=parameter.dtype, device=self.device
                )
                # The public way to convert a parameter would also broadcast it in full from rank 0.
                init._convert_to_deepspeed_param(parameter)
                parameter.partition()

    def prepare(self, model: nn.Module, optimizer: OptimizerConfig, total_steps: int) -> TrainState:
        self._spread(model)
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # A sharded parameter has the shape [0].
        shapes = {
            name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()
        }
        groups = parameter_groups(model, shapes, parameters, optimizer)
        precision = _precision(parameters.values())
        if isinstance(model, TrainableModule):
            # Every rank waits for the gradient of every parameter, so towers must always run.
            model.run_towers = True
            model.equal_calls.ranks = self.ranks
        adamw = torch.optim.AdamW(
            groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, fused=True
        )
        engine = self._engine(
            model, adamw, {"gradient_clipping": optimizer.max_grad_norm or 0.0, **precision}
        )
        if self.config.zero_stage == 3:
            self._fetch_by_blocks(model, engine.optimizer.parameter_offload)
            _share_masters(engine.optimizer)
        inner = Zero(engine, parameters, 0, total_steps)
        state = TrainState(model, adamw, optimizer, inner, shapes)
        set_lr(adamw, optimizer, 0, total_steps)
        # DeepSpeed's own first step would link moments only to the parameters of its first group.
        self._reset_moments(state, None)
        return state

    def _engine(self, model: nn.Module, adamw: torch.optim.Optimizer | None, more: Tree) -> Any:
        """Build DeepSpeed's engine over ``model``. Raises ``ConfigError`` for settings that
        DeepSpeed refuses."""
        config = deep_merge({"zero_optimization": _sizes(model)}, self._configuration()) | more
        with self._refusing():
            engine, *_ = self.deepspeed.initialize(
                model=_Shell(model), optimizer=adamw, config=config
            )
        # DeepSpeed has made process groups with torch's default timeout.
        limit_groups(self.ranks)
        return engine

    @contextmanager
    def _refusing(self) -> Generator[None]:
        try:
            yield
        except ValueError as error:  # includes pydantic's errors
            raise ConfigError(
                f"strategy.deepspeed = {self.config.deepspeed} is refused by DeepSpeed: {error}"
            ) from error

    def _configuration(self) -> Tree:
        ours = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "communication_data_type": "fp32",
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": self.config.zero_stage,
                "stage3_param_persistence_threshold": 0,
            },
            "steps_per_print": 2**31,
        }
        return deep_merge(ours, self.config.deepspeed)

    def _fetch_by_blocks(self, model: nn.Module, offload: Any) -> None:
        """Fetch weights by full blocks, and weights outside of blocks with the model as a whole.

        Heads and position tables are read by other modules than the ones that hold them.
        """
        self._hooked[model] = offload
        register = self.deepspeed.zero.register_external_parameter
        kept = blocks_of(model)
        blocks = [module for module in model.modules() if type(module).__name__ in kept]
        inside = {p for block in blocks for p in block.parameters()}
        for module in blocks:
            for parameter in module.parameters():
                register(module, parameter)
        for parameter in model.parameters():
            if parameter not in inside:
                register(model, parameter)
        # It prefetches in the order of earlier calls, but no two calls have the same order here.
        offload.fwd_pre_hook.remove()

    def backward(self, state: TrainState, loss: Tensor, *, last: bool) -> None:
        engine = state.inner.engine
        # The number of micro-batches varies, so DeepSpeed cannot count them.
        engine.set_gradient_accumulation_boundary(last)
        engine.backward(engine(loss * self.ranks.size))

    def step(self, state: TrainState) -> StepInfo:
        inner: Zero = state.inner
        lr = state.config.lr * lr_factor(inner.step, inner.total, state.config)
        inner.engine.step()
        info = StepInfo(float(inner.engine.get_global_grad_norm()), lr)
        if inner.engine.optimizer.overflow:
            info.skipped = "gradient not finite"
        else:
            inner.step += 1
            set_lr(state.optimizer, state.config, inner.step, inner.total)
        return info

    @contextmanager
    def gathered(self, model: nn.Module) -> Generator[None]:
        offload = self._hooked.get(model)
        if offload is None:
            yield
            return
        with self.deepspeed.zero.GatheredParameters(list(model.parameters())):
            # The hooks would release the weights after each call, and cost time in each.
            offload._remove_module_hooks()
            try:
                with separate_calls(model):
                    yield
            finally:
                offload.forward_hooks, offload.backward_hooks = [], []
                offload._register_deepspeed_module(offload.module)

    @contextmanager
    def local_parameters(self, module: nn.Module) -> Generator[Mapping[str, Tensor]]:
        """Yield full parameters, in stage 3 too. Changes by rank 0 take effect on all ranks."""
        with self.deepspeed.zero.GatheredParameters(list(module.parameters()), modifier_rank=0):
            yield dict(module.named_parameters())

    def shards(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of every parameter of ``module``, by name, without gathering."""
        for name, parameter in module.named_parameters():
            # In stage 3 the parameter itself is empty, and this attribute has its part.
            yield name, getattr(parameter, "ds_tensor", parameter)

    def full_parameters(self, state: TrainState) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in state.model.named_parameters():
            with self.deepspeed.zero.GatheredParameters([parameter]):
                # DeepSpeed frees the gathered memory when this context ends.
                is_sharded = hasattr(parameter, "ds_id")
                yield name, parameter.detach().clone() if is_sharded else parameter.detach()

    def save(self, state: TrainState, path: Path) -> None:
        inner, utils = state.inner, self.deepspeed.utils
        first = self.ranks.rank == 0
        steps = state.optimizer.state[inner.flat[0]]["step"]
        tensors: dict[str, Tensor] = {}
        for name, parameter in inner.parameters.items():
            # On every rank, since each of these calls gathers shards.
            found = {"weights": utils.safe_get_full_fp32_param(parameter), "step": steps}
            for key in MOMENTS[:2]:
                found[key] = utils.safe_get_full_optimizer_state(parameter, key)
            if first:
                for key, tensor in found.items():
                    tensors[f"{key}/{name}"] = tensor.detach().to("cpu", copy=True)
        write_state(self.ranks, path, tensors, inner.step, inner.total)

    def load(self, state: TrainState, path: Path) -> None:
        inner: Zero = state.inner
        shapes = {name: state.shapes[name] for name in inner.parameters}
        tensors, inner.step = read_state(path, shapes)
        steps = [tensors[f"step/{n}"] for n in inner.parameters if f"step/{n}" in tensors]
        # DeepSpeed has one step count for all parameters. Other strategies have one for each.
        self._reset_moments(state, max(steps, default=None))
        with torch.no_grad():
            for name, parameter in inner.parameters.items():
                found: dict[str, Tensor] = {}
                for key in ("weights", *MOMENTS[:2]):
                    if f"{key}/{name}" in tensors:
                        found[key] = tensors[f"{key}/{name}"].to(self.device)
                self._write(parameter, found)
        set_lr(state.optimizer, state.config, inner.step, inner.total)

    def _reset_moments(self, state: TrainState, step: Tensor | None) -> None:
        """Set all moments to zero and the step count to ``step``, in the tensors that DeepSpeed
        reads."""
        zero = state.inner.engine.optimizer
        for flat in state.inner.flat:
            held = state.optimizer.state[flat]
            for key in MOMENTS[:2]:
                held[key] = held[key].zero_() if key in held else torch.zeros_like(flat)
            on = flat.device if flat.is_cuda else torch.device("cpu")
            held["step"] = torch.zeros((), device=on) if step is None else step.to(on, copy=True)
        if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
            zero._lazy_init_hp_params_optimizer_state()

    def _write(self, parameter: nn.Parameter, whole: dict[str, Tensor]) -> None:
        """Set the ``weights`` and moments of ``parameter`` from full tensors."""
        utils, sharded = self.deepspeed.utils, getattr(parameter, "ds_tensor", None)
        set_weights = utils.safe_set_full_fp32_param
        set_moment = utils.safe_set_full_optimizer_state
        if sharded is not None:
            # DeepSpeed's full setters of stage 3 fail for sizes that the ranks do not divide.
            values = {k: _shard(t, sharded.numel(), self.ranks) for k, t in whole.items()}
            set_weights = utils.safe_set_local_fp32_param
            set_moment = utils.safe_set_local_optimizer_state
        else:
            values = whole
        for key, tensor in values.items():
            if key == "weights":
                set_weights(parameter, tensor)
            else:
                set_moment(parameter, tensor, key)
        # The setters change the masters only.
        with self.deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(whole["weights"])


def _check_settings(settings: Tree, device: torch.device) -> None:
    """Raise ``ConfigError`` for settings of DeepSpeed that do not work here.

    ``settings`` is ``strategy.deepspeed``.
    """
    if odd := sorted(set(settings) & set(OURS)):
        raise ConfigError(
            f"strategy.deepspeed.{odd[0]} is set by this program's own settings; leave it out"
        )
    zero: Tree = settings.get("zero_optimization", {})
    if "stage" in zero:
        raise ConfigError(
            "strategy.deepspeed.zero_optimization.stage: set strategy.zero_stage in its place"
        )
    offload = zero.get("offload_param") or {}
    if offload.get("device") == "nvme":
        raise ConfigError(
            "strategy.deepspeed.zero_optimization.offload_param.device = 'nvme': shards are "
            "read into memory; set cpu"
        )
    if device.type != "cpu":
        return
    for name, value in zero.items():
        if name.startswith("zero_quantized") and value:
            raise ConfigError(
                f"strategy.deepspeed.zero_optimization.{name} = {value}: DeepSpeed quantises "
                "on GPUs alone; leave it out on a CPU"
            )


def _memory(tensor: Tensor, device: torch.device) -> Tensor | None:
    if not tensor.is_meta:
        return None
    if isinstance(tensor, nn.Parameter):
        return torch.empty((), dtype=tensor.dtype, device=device).expand(tensor.shape)
    return torch.empty_like(tensor, device=device)


def _held(tensor: Tensor) -> LocalShard:
    """Return the parts of a sharded parameter on this rank: its shard, and its shard of the
    secondary copy (hpZ)."""
    parameter: Any = tensor
    if not hasattr(parameter, "ds_id"):
        return local_shard_of(tensor)
    shape, own, near = tuple(parameter.ds_shape), parameter.ds_tensor, parameter.ds_secondary_tensor
    blocks = flat_blocks(shape, parameter.ds_zero_partition_rank * own.numel(), own)
    if near is not None:
        rank = dist.get_rank(parameter.ds_zero_param_process_group)
        blocks = chain(blocks, flat_blocks(shape, rank * near.numel(), near))
    return LocalShard(shape, blocks)


def _sizes(model: nn.Module) -> dict[str, int]:
    """Return the settings of the reduce bucket and of AdamW's sub-groups, in elements of the
    largest block.

    DeepSpeed's defaults are for billions of weights. It would keep a full second copy of a smaller
    model on each rank.
    """
    size = bucket_of(largest_block(model))
    return {"reduce_bucket_size": size, "sub_group_size": size}


def _share_masters(zero: Any) -> None:
    """Make float32 shards of stage 3 their own masters. DeepSpeed intends this, but compares a
    device with its name, and copies."""
    for master, shard in zip(zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat):
        if shard is None:
            continue
        is_same_place = (master.dtype, master.device) == (shard.dtype, shard.device)
        if is_same_place and master.shape == shard.shape:
            master.data = shard.data


def _precision(parameters: Iterable[nn.Parameter]) -> Tree:
    """Return DeepSpeed's precision settings for trained ``parameters``.

    DeepSpeed supports one dtype. If some parameters are bfloat16, all are converted to it, with
    float32 masters. Raises ``ConfigError`` for other dtypes.
    """
    parameters = list(parameters)
    kinds = {p.dtype for p in parameters}
    if odd := kinds - {torch.float32, torch.bfloat16}:
        raise ConfigError(
            "strategy.kind = 'deepspeed' trains float32 and bfloat16 weights, and the model has "
            f"{', '.join(sorted(map(str, odd)))}; set model.dtype=bfloat16, or "
            "strategy.kind=fsdp2"
        )
    if kinds == {torch.float32}:
        return {}
    for parameter in parameters:
        parameter.data = parameter.data.to(torch.bfloat16)
    # Micro-batches add up in float32: a sum of half-precision gradients would lose the small ones.
    return {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


def _shard(whole: Tensor, size: int, ranks: ProcessGroup) -> Tensor:
    """Return this rank's part ``[size]`` of ``whole``, padded with zeros at the end."""
    flat = whole.flatten()
    padded = nn.functional.pad(flat, (0, size * ranks.size - flat.numel()))
    first = size * ranks.rank
    return padded[first : first + size]


def _deepspeed() -> Any:
    """Return the package deepspeed. Raises ``ConfigError`` if it is not installed."""
    try:
        deepspeed = import_module("deepspeed")
    except ImportError as error:
        raise ConfigError(
            f"strategy.kind = 'deepspeed' needs the package deepspeed ({error}): "
            f"{install_extra('deepspeed')}, or set strategy.kind=fsdp2"
        ) from None
    # DeepSpeed would compile this op on first use, for calls that are not made here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("WARNING")
    _import_muon()
    # DeepSpeed uses deprecated names of torch.
    warnings.filterwarnings("ignore", r".*torch\.distributed\..* is deprecated", FutureWarning)
    return deepspeed


def _import_muon() -> None:
    """Import DeepSpeed's Muon optimizer without compiling it.

    Every engine imports it, to compare its class with that of the optimizer in use. On import it
    calls ``torch.compile``, which loads torch's compiler: 2 s of a processor in each rank.
    """
    compiler: Any = import_module("deepspeed.runtime.compiler")
    compiling = compiler.compile
    compiler.compile = lambda *args, **options: lambda function: function
    try:
        import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = compiling
