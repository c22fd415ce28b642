"""Tensor parallelism: a group of ranks shards the heads and the inner width of each layer.

The plan is in transformers' config, the styles are PyTorch's. Activations between layers,
embeddings, norms and the head are replicated in a tensor-parallel group, whose ranks all make the
same calls. An adapter matrix is sharded if it has its layer's sharded side: B of a column-wise
layer, A of a row-wise layer. The other matrix is replicated, and so are the ``rank`` numbers per
token that A passes to B.

A module that stacks the weights of many experts has a style of its own.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
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
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.torch_version import TorchVersion

from lightrft.utils.errors import ConfigError

STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
PARTIAL = "replicated_with_grad_allreduce"
"""Style of a replicated module that reads only this rank's heads, so its gradient is a partial
sum."""
EXPERTS = "moe_tp_experts"
ADAPTERS = {"colwise": "lora_B", "rowwise": "lora_A"}
"""The adapter matrix with the sharded side of its layer, by the layer's style."""


def shard_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the layers of ``model``, in place, over the 1-D ``mesh``.

    Raises ``ConfigError`` for a model without a plan, an unknown style, or sizes that the mesh does
    not divide.
    """
    plan = plan_of(model)
    size = mesh.size()
    if not plan:
        raise _refused(size, f"transformers has no plan for {type(_planned(model)).__name__}")
    inner = _planned(model)
    for pattern, style in plan.items():
        if not _known(plan, pattern):
            name = type(inner).__name__
            raise _refused(size, f"{pattern} of {name} is {style}, which is not known here")
    _check_sizes(inner.config.get_text_config(decoder=True), size)
    parts: list[tuple[nn.Module, ParallelStyle]] = []
    # All of them first, so that a refusal leaves the model as it was.
    for name, module in inner.named_modules():
        parts += _parts(name, module, plan, size)
    for part, style in parts:
        # None: every rank has the same weights, so none has to be broadcast.
        parallelize_module(part, mesh, style, src_data_rank=None)


def plan_of(model: nn.Module) -> dict[str, str]:
    """Return the style of each module of the layers, by patterns of names.

    The patterns match names in the transformers model inside ``model``.
    """
    plan: Mapping[str, str] = getattr(_planned(model), "tp_plan", None) or {}
    return {pattern: style for pattern, style in plan.items() if ".layers." in f".{pattern}"}


def partial_names(model: nn.Module) -> list[str]:
    """Return the parameters whose gradient must be summed over the group.

    The group is tensor-parallel. The order is the same on all ranks.
    """
    inner = _planned(model)
    prefix = next(name for name, module in model.named_modules() if module is inner)
    partial = [pattern for pattern, style in plan_of(model).items() if style == PARTIAL]
    patterns = [f"{prefix}.{pattern}.*".lstrip(".") for pattern in partial]
    names: list[str] = []
    for name, _ in model.named_parameters():
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            names.append(name)
    return names


def cut_names(model: nn.Module) -> frozenset[str]:
    """Return the parameters of ``model`` that its plan shards."""
    plan = plan_of(model)
    cut: set[nn.Parameter] = set()
    for name, module in _planned(model).named_modules():
        style = _style(plan, name)
        if style == EXPERTS:
            cut |= set(module.parameters())
        elif style in STYLES:
            for part in _matrices(module, style):
                cut |= set(part.parameters())
    # By identity, since the inner model has other names for its parameters.
    return frozenset(name for name, parameter in model.named_parameters() if parameter in cut)


def sum_partial(gradients: Iterable[Tensor | None], mesh: DeviceMesh) -> None:
    """All-reduce, in place, ``gradients`` of which each rank of ``mesh`` has a partial sum."""
    for gradient in gradients:
        if gradient is not None:
            # The mesh of a DTensor is that of data parallelism, so reduce its shard over ``mesh``.
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            dist.all_reduce(local, group=mesh.get_group())


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group ``tensors`` by their mesh, since one call can only process tensors of one mesh."""
    found: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        mesh = getattr(tensor, "device_mesh", None)
        found.setdefault(mesh, []).append(tensor)
    # At least one group, so that the norm of no tensors is 0.
    return list(found.values()) or [[]]


def _planned(model: nn.Module) -> Any:
    """Return the transformers model inside. A wrapper with adapters forwards attributes, so look at
    classes."""
    for module in model.modules():
        if hasattr(type(module), "tp_plan"):
            return module
    return model


def _known(plan: Mapping[str, str], pattern: str) -> bool:
    """Return ``True`` if the style of ``pattern`` is known. Weights inside a module of experts need
    a style of ``WIDTHS``."""
    if plan.get(pattern.rpartition(".")[0]) == EXPERTS:
        return plan[pattern] in WIDTHS
    return plan[pattern] in (*STYLES, PARTIAL, EXPERTS)


def _style(plan: Mapping[str, str], name: str) -> str:
    """Return the style of ``name`` in ``plan``, or an empty string. Each star of a pattern matches
    one component of a name."""
    for pattern, style in plan.items():
        expression = re.escape(pattern).replace(r"\*", "[^.]+")
        if re.fullmatch(expression, name):
            return style
    return ""


def _parts(
    name: str, module: Any, plan: Mapping[str, str], size: int
) -> Iterator[tuple[nn.Module, ParallelStyle]]:
    """Yield the sharded submodules of a module, with their styles."""
    style = _style(plan, name)
    if style == EXPERTS:
        yield module, Experts(_cuts(name, module, plan, size))
    elif style in STYLES:
        if len(getattr(module, "lora_magnitude_vector", ())):
            why = "model.lora.dora = true needs the norms of whole weights"
            raise _refused(size, f"{why}; set model.lora.dora=false", "or ")
        if hasattr(module, "original_module"):
            why = f"model.lora.modules_to_save trains {name} whole"
            raise _refused(size, f"{why}; leave it out there", "or ")
        for part in _matrices(module, style):
            yield part, STYLES[style]()


def _matrices(module: nn.Module, style: str) -> list[nn.Module]:
    """Return the layer itself, or the layer below peft's adapters and their sharded matrices."""
    adapters = getattr(module, ADAPTERS[style], {}).values()
    return [getattr(module, "base_layer", module), *adapters]


def _cuts(name: str, module: nn.Module, plan: Mapping[str, str], size: int) -> dict[str, Placement]:
    cuts: dict[str, Placement] = {}
    for own, weight in module.named_parameters():
        style = _style(plan, f"{name}.{own}")
        if style not in WIDTHS:
            raise _refused(size, f"the plan for {name} says nothing of its {own}")
        cut = cut_of(weight, style, size)
        if cut is None:
            shape = list(weight.shape)
            raise _refused(size, f"{own} of {name} is {shape}, whose width it does not divide")
        if isinstance(cut, _StridedShard) and TorchVersion(torch.__version__) < "2.12":
            why = (
                f"torch {torch.__version__} cannot put {own} of {name} together, two matrices "
                "side by side; install torch 2.12 or newer"
            )
            raise _refused(size, why, "or ")
        cuts[own] = cut
    return cuts


def _check_sizes(config: object, size: int) -> None:
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if not hasattr(config, name):
            continue
        value = getattr(config, name)
        # Some configs have a list, one number per layer.
        if isinstance(value, int) and value % size:
            raise _refused(size, f"the model's {name} is {value}, which it does not divide")


def _refused(size: int, why: str, way: str = "") -> ConfigError:
    return ConfigError(
        f"strategy.tensor_parallel = {size}: {why}; {way}set strategy.tensor_parallel=1"
    )


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
