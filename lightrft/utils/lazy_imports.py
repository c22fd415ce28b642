"""Packages under their usual names, imported when one of their attributes is first read.

Modules that hold formulas import NumPy and torch from here. A command can then print a formula
without loading torch. A run without servers needs no httpx.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any


class LazyModule(ModuleType):
    """A module that is imported when one of its attributes is first read."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


class _LazyTensor(type):
    """Make ``isinstance`` ask ``torch.Tensor``. No tensor exists before torch is imported."""

    def __instancecheck__(cls, instance: Any) -> bool:
        loaded = sys.modules.get("torch")
        return loaded is not None and isinstance(instance, loaded.Tensor)


if TYPE_CHECKING:
    import httpx
    import numpy as np
    import torch
    from torch import Tensor
else:
    httpx, np, torch = LazyModule("httpx"), LazyModule("numpy"), LazyModule("torch")

    class Tensor(metaclass=_LazyTensor):
        """``torch.Tensor`` in annotations and ``isinstance``."""


__all__ = ["LazyModule", "Tensor", "httpx", "np", "torch"]
