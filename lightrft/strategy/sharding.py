"""The units in which a model is sharded over ranks, and the position of each rank in their grid."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from lightrft.distributed.process_group import ProcessGroup
from lightrft.utils.errors import ConfigError


def blocks_of(model: nn.Module) -> set[str]:
    """Return the names of the classes that are sharded as units.

    transformers' models list them as classes not to split.
    """
    named: set[str] = set()
    for module in model.modules():
        named |= set(getattr(module, "_no_split_modules", None) or ())
    return named


def outermost_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules of these classes that are not inside another one."""
    kept = blocks_of(model)
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():  # ``modules()`` yields a module before its submodules
        if type(module).__name__ in kept and id(module) not in inside:
            found.append(module)
            inside |= {id(each) for each in module.modules()}
    return found


def largest_block(model: nn.Module) -> int:
    """Return the number of trained weights of the largest block of ``model``.

    If no block is trained, count the full model.
    """
    return max(map(_trained, outermost_blocks(model)), default=0) or _trained(model)


BUCKET = 500_000_000
"""Upper bound of elements to collect, for any block size: DeepSpeed's default."""


def bucket_of(block: int) -> int:
    """Return the number of elements that DeepSpeed collects before it reduces gradients.

    ``block`` is the size of the largest block.
    """
    return max(1, min(BUCKET, block))


def _trained(module: nn.Module) -> int:
    """Count trained weights in full: DeepSpeed's sharded parameters have no elements, but keep
    their count in ``ds_numel``."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters() if p.requires_grad)


REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"
"""Axes of the grid; the last one varies fastest. Ranks along ``tensor`` shard each layer. Ranks
along ``shard`` hold one copy of the weights between them, ranks along ``replicate`` one each."""


def mesh_of(
    device: torch.device, ranks: ProcessGroup, shard: int | None = None, tensor: int = 1
) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Build the mesh that shards weights and the mesh that shards layers.

    The latter is ``None`` without tensor parallelism.

    Args:
        device: Its type selects the backend.
        ranks: All ranks of the run.
        shard: Ranks that hold one copy of the weights between them. ``None`` means all.
        tensor: Ranks that shard each layer.

    Raises:
        ConfigError: ``strategy.hsdp_shard_size`` does not divide the number of ranks over
        ``tensor``.
    """
    rows = ranks.size // tensor
    if shard is not None and rows % shard:
        of = f"the {ranks.size} processes of this run"
        if tensor > 1:
            of += f" over strategy.tensor_parallel = {tensor}"
        raise ConfigError(
            f"strategy.hsdp_shard_size = {shard} does not divide {of}; set it to a divisor, or "
            "leave it out to spread one copy of the weights over all of them"
        )
    shard = shard or rows
    axes: dict[str, int] = {}
    # An axis of one rank would make FSDP2 all-reduce each gradient once more.
    if shard < rows:
        axes[REPLICATE] = rows // shard
    axes[SHARD] = shard
    data = tuple(axes)
    if tensor > 1:
        axes[TENSOR] = tensor
    grid = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    limit_groups(ranks)
    return (grid, None) if tensor == 1 else (grid[data], grid[TENSOR])


def limit_groups(ranks: ProcessGroup) -> None:
    """Set the timeout of every process group to ``ranks.minutes``.

    Groups that libraries create have torch's default timeout.
    """
    for group in list(_world.pg_map):
        _set_pg_timeout(timedelta(minutes=ranks.minutes), group)
