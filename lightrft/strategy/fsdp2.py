"""Weights, gradients and optimizer state in equal shards over the ranks, by PyTorch's ``fully_shard`` (FSDP2).

The unit of sharding is the module that a model's class says not to split; what lies outside of those is sharded with the model as
a whole. Gradients are summed into their shards with every micro-batch, so that none is held whole from one to the next. A checkpoint
has the form that one process writes, so that any number of ranks can take it up.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightrft.config.strategy import StrategyConfig
from lightrft.distributed.process_group import Ranks, in_teams
from lightrft.distributed.shards import held_of
from lightrft.strategy.activation_offload import keep_on_host
from lightrft.strategy.base import Readable, Shared, StepInfo, Towered, TrainState
from lightrft.strategy.device_mesh import mesh_of
from lightrft.strategy.single import SingleStrategy
from lightrft.strategy.tensor_parallel import by_mesh, partial_names, shard_layers, sum_partial
from lightrft.strategy.wrap_policy import outermost_blocks
from lightrft.utils.module_tensors import exchange

HALF = (torch.bfloat16, torch.float16)


class Fsdp2Strategy(SingleStrategy):
    """``Strategy`` over the ranks of torch's default process group."""

    def __init__(self, config: StrategyConfig, ranks: Ranks) -> None:
        super().__init__(config)
        self.ranks = ranks
        self.team, self._teams = in_teams(ranks, config.sequence, config.tensor)
        self.mesh, self.across = mesh_of(self.device, ranks, config.shard, config.tensor)
        self.home = torch.device("cpu") if config.offload else self.device
        """Where shards lie between calls."""
        self._types: WeakKeyDictionary[nn.Module, dict[str, torch.dtype]] = WeakKeyDictionary()

    @property
    def teams(self) -> Ranks:
        return self._teams

    def loading(self) -> AbstractContextManager[torch.device]:
        return nullcontext(torch.device("meta"))

    def place(self, model: nn.Module) -> None:
        """Shard ``model`` in place, and have this rank's part of its weights read where it was made without. Its forward must be called
        as a module. Half-precision weights that are trained lie here in float32, and calls see them as they were."""
        unread = any(parameter.is_meta for parameter in model.parameters())
        if not unread:
            model.to(self.device)
        if self.across is not None:
            shard_layers(model, self.across)
        if isinstance(model, Shared):
            model.team = self.team
        if isinstance(model, Towered):
            model.run_towers = True  # a call of a sharded module is a call on every rank
        self._types[model] = {name: parameter.dtype for name, parameter in model.named_parameters()}
        self._shard(model)
        _fetch_ahead(model)
        for module in _sharded(model):
            module.set_gradient_divide_factor(1.0)  # losses are shares of the global one: they add up
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction
        if unread:
            exchange(model, self._memory, buffers=True)
        # Else whoever calls a part of the model first, such as an engine, finds modules that do not know their root.
        model._get_fsdp_state()._lazy_init()  # ty: ignore[not-callable]
        if unread and isinstance(model, Readable):
            model.read_weights()
        if self.config.offload_activations:
            keep_on_host(model)

    def _shard(self, model: nn.Module) -> None:
        trained = any(parameter.requires_grad for parameter in model.parameters())
        half = next((p.dtype for p in model.parameters() if p.requires_grad and p.dtype in HALF), None)
        alone = [] if half is None else [module for module in model.modules() if _full_precision(module)]
        half = half if self.across is None else None  # else optimizers keep the float32 copy
        if half is not None:
            exchange(model, lambda p: p.detach().float() if p.requires_grad and p.dtype in HALF else None)
        options: dict[str, Any] = {
            "mesh": self.mesh,
            # Of a model that nobody trains no backward pass would ever let go.
            "reshard_after_forward": self.config.reshard if trained else True,
            "offload_policy": CPUOffloadPolicy(pin_memory=self.device.type != "cpu") if self.config.offload else OffloadPolicy(),
        }
        for module in (*alone, *outermost_blocks(model), model):
            compute = None if module in alone else half
            policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
            fully_shard(module, mp_policy=policy, **options)

    def _memory(self, tensor: Tensor) -> Tensor | None:
        """Memory for a parameter or buffer that has none."""
        if not tensor.is_meta:
            return None
        return torch.empty_like(tensor, device=self.home if isinstance(tensor, nn.Parameter) else self.device)

    def step(self, state: TrainState) -> StepInfo:
        if self.across is not None:
            masters = state.inner.masters
            sum_partial([masters[n].grad for n in partial_names(state.model) if n in masters], self.across)
        return super().step(state)

    def alike(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        return by_mesh(tensors)

    @contextmanager
    def whole(self, model: nn.Module) -> Generator[None]:
        modules = list(_sharded(model))
        groups = [group for module in modules if (group := module._get_fsdp_state()._fsdp_param_group) is not None]
        after = [group.post_forward_mesh_info for group in groups]
        for module in modules:
            module.unshard()
            module.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for module in modules:
                module.reshard()
            for group, info in zip(groups, after):
                group.post_forward_mesh_info = info

    def tensors(self, module: nn.Module) -> AbstractContextManager[Mapping[str, Tensor]]:
        for sharded in _sharded(module):
            sharded.reshard()  # what a call has left whole is a copy
        return super().tensors(module)

    def full_parameters(self, state: TrainState) -> Iterator[tuple[str, Tensor]]:
        types = self._types[state.model]
        for name, parameter in state.model.named_parameters():
            yield name, self.full(parameter.detach()).to(types[name])

    def full(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def like(self, whole: Tensor, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return super().like(whole, tensor)
        own = torch.empty_like(tensor, dtype=whole.dtype)  # of what is offloaded, not where its mesh is
        for index, part in held_of(own).blocks:
            part.copy_(whole[index])
        return own


def _fetch_ahead(model: nn.Module) -> None:
    """Have each block of a stack fetched while the backward pass is in the one after it. Left alone, FSDP2 goes by the order of all
    calls since the last backward pass, which differs between ranks once they have drawn answers of different lengths."""
    before: dict[str, FSDPModule] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            stack = name.rpartition(".")[0] if name else name
            module.set_modules_to_backward_prefetch([before.get(stack, module)])
            before[stack] = module


def _sharded(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _full_precision(module: nn.Module) -> bool:
    """Whether ``module`` has weights, and all of them in full precision, and no module inside."""
    own = list(module.parameters(recurse=False))
    return bool(own) and not any(module.children()) and all(p.dtype == torch.float32 and p.requires_grad for p in own)
