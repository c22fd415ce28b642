"""Weights, gradients and optimizer state in equal shards over the ranks, by PyTorch's ``fully_shard`` (FSDP2).

The unit of sharding is the module that a model's class says not to split; what lies outside of those is sharded with the model as
a whole. A checkpoint has the form that one process writes, so that any number of ranks can take it up.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from lightrft.strategy.base import Shared, StepInfo, Towered, TrainState
from lightrft.strategy.blocks import blocks_of
from lightrft.strategy.settings import StrategyConfig
from lightrft.strategy.single import SingleStrategy
from lightrft.strategy.tensor_parallel import by_mesh, partial_names, shard_layers, sum_partial
from lightrft.utils.ranks import Ranks, in_teams


class Fsdp2Strategy(SingleStrategy):
    """``Strategy`` over the ranks of torch's default process group."""

    def __init__(self, config: StrategyConfig, ranks: Ranks) -> None:
        super().__init__(config)
        self.ranks = ranks
        self.team, self._teams = in_teams(ranks, config.sequence, config.tensor)
        self.together = config.tensor
        grid = init_device_mesh(
            self.device.type, (ranks.size // config.tensor, config.tensor), mesh_dim_names=("shard", "tensor")
        )
        self.mesh, self.across = grid["shard"], grid["tensor"]

    @property
    def teams(self) -> Ranks:
        return self._teams

    def place(self, model: nn.Module) -> None:
        """Shard ``model`` in place. Its forward must be called as a module."""
        super().place(model)
        if self.together > 1:
            shard_layers(model, self.across)
        if isinstance(model, Shared):
            model.team = self.team
        if isinstance(model, Towered):
            model.run_towers = True  # a call of a sharded module is a call on every rank
        options = {"mesh": self.mesh, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
        kept = blocks_of(model)
        blocks = [module for module in model.modules() if type(module).__name__ in kept]
        for module in [*blocks, model]:
            fully_shard(module, **options)  # ty: ignore[no-matching-overload]
        _fetch_ahead(model)
        for module in _sharded(model):
            module.set_gradient_divide_factor(1.0)  # losses are shares of the global one: they add up
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction
        # Else whoever calls a part of the model first, such as an engine, finds modules that do not know their root.
        model._get_fsdp_state()._lazy_init()  # ty: ignore[not-callable]

    def backward(self, state: TrainState, loss: Tensor, *, last: bool) -> None:
        for module in _sharded(state.model):
            module.set_requires_gradient_sync(last, recurse=False)
        super().backward(state, loss, last=last)

    def step(self, state: TrainState) -> StepInfo:
        if self.together > 1:
            masters = state.inner.masters
            sum_partial([masters[n].grad for n in partial_names(state.model) if n in masters], self.across)
        return super().step(state)

    def alike(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        return by_mesh(tensors)

    @contextmanager
    def whole(self, model: nn.Module) -> Generator[None]:
        modules = list(_sharded(model))
        for module in modules:
            module.unshard()
            module.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for module in modules:
                module.reshard()
                module.set_reshard_after_forward(True, recurse=False)

    def tensors(self, module: nn.Module) -> AbstractContextManager[Mapping[str, Tensor]]:
        for sharded in _sharded(module):
            sharded.reshard()  # what a call has left whole is a copy
        return super().tensors(module)

    def full_parameters(self, state: TrainState) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.full(parameter.detach())) for name, parameter in state.model.named_parameters())

    def full(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def like(self, whole: Tensor, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return super().like(whole, tensor)
        on_device = whole.to(tensor.device)
        return distribute_tensor(on_device, tensor.device_mesh, tensor.placements, src_data_rank=None)


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
