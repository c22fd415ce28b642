"""Fully sharded data parallelism by PyTorch's ``fully_shard`` (FSDP2).

Weights, gradients and optimizer state are in equal shards over the ranks. The unit of sharding is
the module that a model's class says not to split. Modules outside of these units are sharded with
the root. Gradients are reduce-scattered with every micro-batch, so no full gradient is kept between
micro-batches. Checkpoints have the format of a single process, so any number of ranks can resume
from them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from lightrft.config.strategy import StrategyConfig
from lightrft.distributed.process_group import ProcessGroup, build_parallel_groups
from lightrft.distributed.shards import local_shard_of
from lightrft.strategy.activation_offload import keep_on_host
from lightrft.strategy.base import StepInfo, TrainableModule, TrainState, separate_calls
from lightrft.strategy.sharding import mesh_of, outermost_blocks
from lightrft.strategy.single import SingleStrategy
from lightrft.strategy.tensor_parallel import by_mesh, partial_names, shard_layers, sum_partial
from lightrft.utils.module_tensors import exchange

HALF = (torch.bfloat16, torch.float16)


class Fsdp2Strategy(SingleStrategy):
    """``Strategy`` over the ranks of torch's default process group."""

    def __init__(self, config: StrategyConfig, ranks: ProcessGroup) -> None:
        super().__init__(config)
        # FSDP2 keeps the shards on the host itself, and they are their own masters.
        self.keeps_state_on_host = False
        self.ranks = ranks
        self.model_parallel_group, self._data_parallel_group = build_parallel_groups(
            ranks, config.sequence_parallel, config.tensor_parallel
        )
        self.mesh, self.across = mesh_of(
            self.device, ranks, config.hsdp_shard_size, config.tensor_parallel
        )
        self.home = torch.device("cpu") if config.cpu_offload else self.device
        """Device of the shards between calls."""
        self._types: WeakKeyDictionary[nn.Module, dict[str, torch.dtype]] = WeakKeyDictionary()

    @property
    def data_parallel_group(self) -> ProcessGroup:
        return self._data_parallel_group

    def loading(self) -> AbstractContextManager[torch.device]:
        return nullcontext(torch.device("meta"))

    def place(self, model: nn.Module) -> None:
        """Shard ``model`` in place.

        Read this rank's shards of its weights if it was built on the meta device.

        Its forward must be called as a module. Trained half-precision weights are kept in float32,
        and calls use them in half precision.
        """
        unread = any(parameter.is_meta for parameter in model.parameters())
        if not unread:
            model.to(self.device)
        if self.across is not None:
            shard_layers(model, self.across)
        if isinstance(model, TrainableModule):
            model.model_parallel_group = self.model_parallel_group
            # A call of a sharded module is collective, so every rank must make it.
            model.run_towers = True
            model.equal_calls.ranks = self.ranks
        # Before ``_shard``, which makes trained parameters float32.
        self._types[model] = {name: parameter.dtype for name, parameter in model.named_parameters()}
        self._shard(model)
        _fetch_ahead(model)
        for module in _sharded(model):
            # each rank's loss is a part of the global loss, so gradients are summed, not averaged
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction
        if unread:
            exchange(model, self._memory, buffers=True)
        # Initialise now: an engine may call a submodule first, which would then become the root.
        model._get_fsdp_state()._lazy_init()  # ty: ignore[not-callable]
        if unread and isinstance(model, TrainableModule):
            model.read_weights()
        if self.config.offload_activations:
            keep_on_host(model)

    def _shard(self, model: nn.Module) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        half = next((p.dtype for p in trained if p.dtype in HALF), None)
        alone: list[nn.Module] = []
        if half is not None:
            # Float32 modules among half-precision ones keep computing in float32.
            alone = [module for module in model.modules() if _full_precision(module)]
            if self.across is None:
                exchange(model, _as_float32)
            else:
                # With tensor parallelism, the optimizer keeps the float32 copy.
                half = None
        offload = OffloadPolicy()
        if self.config.cpu_offload:
            offload = CPUOffloadPolicy(pin_memory=self.device.type != "cpu")
        options: dict[str, Any] = {
            "mesh": self.mesh,
            # A frozen model has no backward pass to reshard it, so it must reshard after forward.
            "reshard_after_forward": self.config.reshard_after_forward if trained else True,
            "offload_policy": offload,
        }
        # Inner modules first: ``fully_shard`` takes only parameters that no earlier call has taken.
        for module in (*alone, *outermost_blocks(model), model):
            compute = None if module in alone else half
            policy = MixedPrecisionPolicy(
                param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
            fully_shard(module, mp_policy=policy, **options)

    def _memory(self, tensor: Tensor) -> Tensor | None:
        """Allocate memory for a parameter or buffer on the meta device; ``None`` for another."""
        if not tensor.is_meta:
            return None
        # FSDP2 offloads parameters only. It leaves buffers whole, on the device.
        device = self.home if isinstance(tensor, nn.Parameter) else self.device
        return torch.empty_like(tensor, device=device)

    def step(self, state: TrainState) -> StepInfo:
        if self.across is not None:
            masters = state.inner.masters
            # Frozen parameters have no master.
            names = [name for name in partial_names(state.model) if name in masters]
            sum_partial([masters[name].grad for name in names], self.across)
        return super().step(state)

    def alike(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        return by_mesh(tensors)

    @contextmanager
    def gathered(self, model: nn.Module) -> Generator[None]:
        modules = list(_sharded(model))
        states = [module._get_fsdp_state() for module in modules]
        # A module whose parameters all belong to inner modules has no group.
        groups = [s._fsdp_param_group for s in states if s._fsdp_param_group is not None]
        # ``set_reshard_after_forward`` overwrites it, and has no counterpart that reads it.
        after = [group.post_forward_mesh_info for group in groups]
        for module in modules:
            module.unshard()
            # otherwise a call inside this context would reshard the module
            module.set_reshard_after_forward(False, recurse=False)
        try:
            with separate_calls(model):
                yield
        finally:
            for module in modules:
                module.reshard()
            for group, info in zip(groups, after):
                group.post_forward_mesh_info = info

    def local_parameters(self, module: nn.Module) -> AbstractContextManager[Mapping[str, Tensor]]:
        for sharded in _sharded(module):
            # A module left unsharded by a call has a copy, and changes to it would be lost.
            sharded.reshard()
        return super().local_parameters(module)

    def full_parameters(self, state: TrainState) -> Iterator[tuple[str, Tensor]]:
        types = self._types[state.model]
        for name, parameter in state.model.named_parameters():
            yield name, self.gather(parameter.detach()).to(types[name])

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def shard_like(self, whole: Tensor, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return super().shard_like(whole, tensor)
        # ``empty_like``, since an offloaded tensor is not on the device of its mesh.
        own = torch.empty_like(tensor, dtype=whole.dtype)
        for index, part in local_shard_of(own).blocks:
            part.copy_(whole[index])
        return own


def _fetch_ahead(model: nn.Module) -> None:
    """Prefetch each block of a stack while the backward pass runs in the block after it.

    By default, FSDP2 prefetches in the order of all calls since the last backward pass. That order
    differs between ranks once they have generated responses of different lengths.
    """
    before: dict[str, FSDPModule] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            stack = name.rpartition(".")[0]
            module.set_modules_to_backward_prefetch([before.get(stack, module)])
            before[stack] = module


def _sharded(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _full_precision(module: nn.Module) -> bool:
    """Return ``True`` if ``module`` has no submodules and all of its weights are trained in
    float32."""
    own = list(module.parameters(recurse=False))
    if not own or any(module.children()):
        return False
    return all(p.dtype == torch.float32 and p.requires_grad for p in own)


def _as_float32(parameter: Tensor) -> Tensor | None:
    """Return a float32 copy of a trained half-precision parameter; ``None`` for another."""
    if parameter.requires_grad and parameter.dtype in HALF:
        return parameter.detach().float()
    return None
