"""Linear layers that multiply by oneDNN where it is faster."""

from __future__ import annotations

from typing import TypeGuard

from torch import Tensor, nn

from lightrft.models.onednn.products import is_faster_than_mkl, linear


class OneDNNLinear(nn.Linear):
    """A linear layer whose large products are computed by oneDNN."""

    def forward(self, input: Tensor) -> Tensor:
        """Return ``[..., out]`` for ``[..., in]``."""
        return linear(input, self.weight, self.bias)


def use_onednn(model: nn.Module) -> None:
    """Make the linear layers of ``model`` instances of ``OneDNNLinear`` where this saves time.

    Names and values of parameters stay. Layers of subclasses of ``nn.Linear`` compute as before.
    """
    if not is_faster_than_mkl():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            # not a new module: hooks and adapters may hold this one
            module.__class__ = OneDNNLinear


def is_plain_linear(module: object) -> TypeGuard[nn.Linear]:
    """Return whether ``module`` multiplies by its weight, adds its bias, and does nothing else.

    Subclasses of ``nn.Linear`` may have adapters or quantised weights.
    """
    return type(module) in (nn.Linear, OneDNNLinear)
