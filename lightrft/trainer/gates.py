"""Which tokens of a mini-batch get gradient from the policy loss, where that depends on the other tokens of the mini-batch.

``GATES[name](batch, generator, **options) -> Gate``: ``batch`` is the whole mini-batch, with its advantages, old log-probs, the
policy's ``logprobs`` at the start of the optimizer step where the part needs ``current``, and ``entropy`` where it needs that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrft.config import Part
from lightrft.types import Batch
from lightrft.utils.registry import Registry


@dataclass(slots=True)
class Gate:
    """``keep [N]`` multiplies the policy loss; ``pull [N]``, if any, is a coefficient of ``|log-prob - old log-prob|``."""

    keep: Tensor
    pull: Tensor | None = None


GateFunction = Callable[..., Gate]
GATES: Registry[GateFunction] = Registry("gate")


def gated(batch: Batch, parts: Sequence[Part], generator: torch.Generator) -> Batch:
    """``batch``, a whole mini-batch, with the product of all gates and the sum of all pulls."""
    for part in parts:
        gate = GATES[part.name](batch, generator, **part.options)
        keep = gate.keep.to(torch.float32)
        batch = batch.replace(gate=keep if batch.gate is None else batch.gate * keep)
        if gate.pull is not None:
            batch = batch.replace(pull=gate.pull if batch.pull is None else batch.pull + gate.pull)
    return batch
