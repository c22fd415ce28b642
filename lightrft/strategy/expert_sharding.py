"""The tensor-parallel style of a module that stacks the weights of many experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import _StridedShard

WIDTHS: dict[str, tuple[int, int]] = {
    "colwise": (-2, 1),
    "rowwise": (-1, 1),
    "packed_colwise": (-2, 2),
    "packed_rowwise": (-1, 2),
}
"""The sharded dimension, and the number of matrices concatenated along it, by the style that
transformers' plans have for such weights."""


class Experts(ParallelStyle):
    """Shards the width of each expert over the ranks. ``cuts`` are placements by parameter name.

    A rank's output for a token is a partial sum, and so are the gradients of its inputs.
    """

    def __init__(self, cuts: Mapping[str, Placement]) -> None:
        self.cuts = cuts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            cut = distribute_tensor(
                parameter, device_mesh, [self.cuts[name]], src_data_rank=self.src_data_rank
            )
            module.register_parameter(
                name, nn.Parameter(cut, requires_grad=parameter.requires_grad)
            )
        whole = module.forward

        def forward(*inputs: Tensor) -> Tensor:
            held = dict(module._parameters)
            here: dict[str, Any] = {}
            for name, weight in held.items():
                if isinstance(weight, DTensor):
                    here[name] = weight.to_local()
            # The module's code indexes and multiplies plain tensors. For the call, give it those.
            module._parameters.update(here)
            try:
                found = whole(*(_replicated(x, device_mesh) for x in inputs))
            finally:
                module._parameters.update(held)
            partial = DTensor.from_local(found, device_mesh, [Partial()], run_check=False)
            return partial.full_tensor()

        module.forward = forward
        return module


def cut_of(weight: Tensor, style: str, size: int) -> Placement | None:
    """Return the placement of ``weight`` over ``size`` ranks; ``None`` if they do not divide it.

    Args:
        weight: The stacked weights.
        style: A key of ``WIDTHS``.
        size: Number of ranks.
    """
    dim, side_by_side = WIDTHS[style]
    if weight.shape[dim] % (side_by_side * size):
        return None
    dim += weight.ndim
    return Shard(dim) if side_by_side == 1 else _StridedShard(dim, split_factor=side_by_side)


def _replicated(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return ``x``, which is replicated. Its gradient, if it has one, is summed over the ranks."""
    # Indices of experts have no gradient.
    if not x.is_floating_point():
        return x
    shared = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return shared.to_local(grad_placements=[Partial()])
