"""The units in which a model is spread over ranks."""

from __future__ import annotations

from torch import nn


def blocks_of(model: nn.Module) -> set[str]:
    """Names of the classes that are sharded as units: those that transformers' models say not to split."""
    named: set[str] = set()
    for module in model.modules():
        named |= set(getattr(module, "_no_split_modules", None) or ())
    return named
