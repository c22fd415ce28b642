"""Tensor parallelism: a team of ranks shares out the heads and the inner width of each layer, by the plan in transformers' config and
PyTorch's own styles.

Activations between layers, embeddings, norms and the head are whole on each rank of a team, which all make the same calls.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from lightrft.utils.errors import ConfigError

STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
PARTIAL = "replicated_with_grad_allreduce"
"""Style of a module that is whole on each rank and sees only its heads: its gradient is a part of the sum."""


def shard_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Share out the layers of ``model``, in place, over the 1-D ``mesh``. Raises ``ConfigError`` for one that has no plan, a style that is
    not known here, or sizes that do not divide."""
    plan = plan_of(model)
    size = mesh.size()
    if not plan:
        raise _refused(size, f"transformers has no plan for {type(_planned(model)).__name__}")
    for pattern, style in plan.items():
        if style not in STYLES and style != PARTIAL:
            raise _refused(size, f"{pattern} of {type(_planned(model)).__name__} is {style}, which is not known here")
    _check_sizes(_planned(model).config.get_text_config(decoder=True), size)
    if any(".lora_" in name for name, _ in model.named_parameters()):
        raise _refused(size, "the model has adapters (model.lora), which are not shared out")
    styles: dict[str, ParallelStyle] = {pattern: STYLES[style]() for pattern, style in plan.items() if style in STYLES}
    parallelize_module(_planned(model), mesh, styles, src_data_rank=None)


def plan_of(model: nn.Module) -> dict[str, str]:
    """The style of each module of the layers, by patterns of names in the transformers model inside ``model``."""
    plan: Mapping[str, str] = getattr(_planned(model), "tp_plan", None) or {}
    return {pattern: style for pattern, style in plan.items() if ".layers." in f".{pattern}"}


def partial_names(model: nn.Module) -> list[str]:
    """Parameters of ``model`` whose gradient is to be summed over a team, in the order that all ranks know."""
    inner = _planned(model)
    prefix = next(name for name, module in model.named_modules() if module is inner)
    patterns = [f"{prefix}.{pattern}.*".lstrip(".") for pattern, style in plan_of(model).items() if style == PARTIAL]
    return [name for name, _ in model.named_parameters() if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def sum_partial(gradients: Iterable[Tensor | None], mesh: DeviceMesh) -> None:
    """Add up, in place, ``gradients`` of which each rank of a team has its part."""
    for gradient in gradients:
        if gradient is not None:
            dist.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=mesh.get_group())


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """``tensors`` by the mesh that they lie on: only those can be worked on in one call."""
    found: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(found.values()) or [[]]


def _planned(model: nn.Module) -> Any:
    """The transformers model inside."""
    return next((module for module in model.modules() if hasattr(module, "tp_plan")), model)


def _check_sizes(config: Any, size: int) -> None:
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if hasattr(config, name) and isinstance(value := getattr(config, name), int) and value % size:
            raise _refused(size, f"the model's {name} is {value}, which it does not divide")


def _refused(size: int, why: str) -> ConfigError:
    return ConfigError(f"strategy.tensor = {size}: {why}; set strategy.tensor=1")
