"""The units in which a model is spread over ranks."""

from __future__ import annotations

from torch import nn


def blocks_of(model: nn.Module) -> set[str]:
    """Names of the classes that are sharded as units: those that transformers' models say not to split."""
    named: set[str] = set()
    for module in model.modules():
        named |= set(getattr(module, "_no_split_modules", None) or ())
    return named


def outermost_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules of those classes, but for those that lie in another of them."""
    kept = blocks_of(model)
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():  # a module comes before what is in it
        if type(module).__name__ in kept and id(module) not in inside:
            found.append(module)
            inside |= {id(each) for each in module.modules()}
    return found


def largest_block(model: nn.Module) -> int:
    """Trained weights of the largest block of ``model``; of all of it, where no block is trained."""
    return max(map(_trained, outermost_blocks(model)), default=0) or _trained(model)


BUCKET = 500_000_000
"""Most elements to collect, however large a block is: DeepSpeed's own number."""


def bucket_of(block: int) -> int:
    """Elements that DeepSpeed collects before it sums gradients, where the largest block has so many."""
    return max(1, min(BUCKET, block))


def _trained(module: nn.Module) -> int:
    """How many, whole: DeepSpeed has parameters without elements where it holds them in shards."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters() if p.requires_grad)
