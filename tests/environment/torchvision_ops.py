"""Let torchvision load with a torch that has no torchvision operators.

The CPU build of torch that vLLM needs has no torchvision build. Without the library of a fitting
build, torchvision fails to register its shape functions. With the two operators declared, its
transforms work. The operators themselves do not.

``make test-vllm`` installs this module into its environment, where every process loads it at start.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
KEPT: list[Any] = []
"""The declarations, which end with their object."""


def declare() -> None:
    """Declare the operators."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + SCHEMA)
    KEPT.append(library)


class Finder:
    """Declares the operators before torchvision runs, and finds nothing else."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of torchvision. Return ``None`` for other modules."""
        spec = PathFinder.find_spec(name, path) if name == "torchvision" else None
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            declare()
            run(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
