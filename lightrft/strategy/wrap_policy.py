"""The units in which a model is sharded over ranks."""

from __future__ import annotations

from torch import nn


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
