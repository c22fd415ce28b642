"""Linear layers that multiply by oneDNN where it is faster, and embeddings of patches as products.

Towers of video families embed patches by a convolution whose kernel is a whole patch. Each patch is
an input of its own, so the convolution is a matrix product. Libraries of convolutions take several
times as long for this shape.
"""

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


class PatchEmbedding(nn.Conv3d):
    """A convolution that computes inputs of the size of its kernel by a matrix product."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the features ``[N, E, 1, 1, 1]`` of N patches ``[N, C, T, H, W]``."""
        if input.shape[2:] != self.kernel_size:
            return super().forward(input)
        features = linear(input.flatten(1), self.weight.flatten(1), self.bias)
        return features[:, :, None, None, None]


def replace_patch_embeddings(model: nn.Module) -> None:
    """Make the convolutions of ``model`` that read whole patches instances of ``PatchEmbedding``.

    Names and values of parameters stay.
    """
    for module in model.modules():
        if type(module) is nn.Conv3d and _reads_patches(module):
            # not a new module: hooks and adapters may hold this one
            module.__class__ = PatchEmbedding


def _reads_patches(module: nn.Conv3d) -> bool:
    is_plain = not any(module.padding) and set(module.dilation) == {1} and module.groups == 1
    return is_plain and module.stride == module.kernel_size
