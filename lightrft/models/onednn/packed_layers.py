"""Products of linear layers by oneDNN while a model samples on a CPU.

torch multiplies float32 matrices by MKL on x86. A product of few rows by MKL reads the weights at a
fraction of the speed of the memory. Decoding has few rows.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightrft.models.onednn.layers import is_plain_linear
from lightrft.models.onednn.products import multiply, onednn_has_bfloat16

PACKED_BYTES = 2**28
"""Largest memory of packed copies. Further layers are multiplied from their own memory, which takes
1.1 to 1.4 times as long."""
SMALLEST = 2**14
"""Number of weights from which oneDNN saves more than a call of it costs."""
CACHED_BYTES = 2**25
"""Memory of packed copies that a processor keeps in its caches. From the memory itself, one row
reads the layers' own weights faster than the packed ones."""
ROWS = 16
"""Number of rows that weights are packed for. Other numbers of rows can use them too."""
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers of one module that multiply the same input, in the order of their calls."""


class PackedLayers:
    """Multiplies by oneDNN in the linear layers of a model, inside ``running()``.

    The first product packs a weight into the layout of oneDNN, together with those of its siblings,
    whose products become one. Packed copies are dropped once a weight is written or replaced.

    Args:
        model: The model. Layers of subclasses of ``nn.Linear`` compute as before.

    Attributes:
        held_bytes: Memory of the packed copies.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._packed: dict[tuple[nn.Linear, ...], _Packed] = {}
        self._layers: list[tuple[nn.Linear, ...]] | None = None
        self.held_bytes = 0

    def forget(self) -> None:
        """Drop all packed copies, and look for the layers again."""
        self._packed.clear()
        self._layers = None
        self.held_bytes = 0

    @contextmanager
    def running(self) -> Generator[None]:
        """Multiply by oneDNN in the calls inside, which must record no gradients."""
        if any(packed.mark != _mark(layers) for layers, packed in self._packed.items()):
            self.forget()
        if self._layers is None or not all(_fits(x) for layers in self._layers for x in layers):
            self._layers = list(_groups(self._model))
        groups = [_Group(layers) for layers in self._layers]
        for group in groups:
            for index, layer in enumerate(group.layers):
                layer.forward = partial(self._product, group, index)
        try:
            yield
        finally:
            for group in groups:
                for layer in group.layers:
                    del layer.forward

    def _product(self, group: _Group, index: int, input: Tensor) -> Tensor:
        layer = group.layers[index]
        if input.dtype != layer.weight.dtype:
            return F.linear(input, layer.weight, layer.bias)
        half = layer.weight.dtype != torch.float32
        if input.numel() == input.shape[-1] and (half or self.held_bytes > CACHED_BYTES):
            return _unpacked(input, layer)
        if (part := group.part_of(index, input)) is not None:
            return part
        layers = group.layers if index == 0 and group.share_input else (layer,)
        packed = self._pack(layers)
        if packed is not None:
            found = multiply(input, packed.weight, packed.bias)
            return found if len(layers) == 1 else group.split(found, input)
        return _unpacked(input, layer)

    def _pack(self, layers: tuple[nn.Linear, ...]) -> _Packed | None:
        """Return the packed weights of ``layers``. ``None`` if they exceed the memory."""
        if layers in self._packed:
            return self._packed[layers]
        size = sum(layer.weight.nbytes for layer in layers)
        if self.held_bytes + size > PACKED_BYTES:
            return None
        weight = _joined([layer.weight.detach() for layer in layers])
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        packed = _Packed(_mark(layers), weight, _joined(biases) if biases else None)
        self._packed[layers] = packed
        self.held_bytes += size
        return packed


@dataclass(frozen=True)
class _Packed:
    """Weights of layers in the layout of oneDNN. ``mark`` is of the weights that were copied."""

    mark: object
    weight: Tensor
    bias: Tensor | None


class _Group:
    """Layers that may multiply the same input, and the products that are not asked for yet.

    Attributes:
        layers: In the order of their calls.
        share_input: False once a layer got another input than the first.
    """

    def __init__(self, layers: tuple[nn.Linear, ...]) -> None:
        self.layers = layers
        self.share_input = True
        self._input: Tensor | None = None
        self._parts: Sequence[Tensor] = ()

    def split(self, found: Tensor, input: Tensor) -> Tensor:
        """Keep the products of all layers with ``input``. Return that of the first."""
        self._input = input
        sizes = [layer.out_features for layer in self.layers]
        # Tensor.split takes longer than a small product
        self._parts = torch.split_with_sizes(found, sizes, -1)
        return self._parts[0]

    def part_of(self, index: int, input: Tensor) -> Tensor | None:
        """Return the product of a layer with ``input``, if it has been computed."""
        if index == 0:
            return None
        if input is not self._input:
            self.share_input = False
            return None
        part = self._parts[index]
        if index == len(self.layers) - 1:
            self._input, self._parts = None, ()
        return part


def _groups(model: nn.Module) -> Iterator[tuple[nn.Linear, ...]]:
    """Yield the layers of ``model`` that oneDNN can multiply, siblings together."""
    grouped: set[nn.Module] = set()
    for module in model.modules():
        for names in SIBLINGS:
            # an adapter holds the layer itself
            children = [getattr(module, name, None) for name in names]
            layers = [getattr(child, "base_layer", child) for child in children]
            fitting = tuple(x for x in layers if isinstance(x, nn.Linear) and _fits(x))
            kinds = {(x.in_features, x.weight.dtype, x.bias is None) for x in fitting}
            if len(set(fitting) - grouped) == len(names) and len(kinds) == 1:
                grouped.update(fitting)
                yield fitting
    for module in model.modules():
        if isinstance(module, nn.Linear) and module not in grouped and _fits(module):
            yield (module,)


def _fits(layer: nn.Linear) -> bool:
    # subclasses may compute more than a product, and so may a layer that was given a forward
    if not is_plain_linear(layer) or "forward" in vars(layer):
        return False
    weight = layer.weight
    return (
        type(weight) in (nn.Parameter, Tensor)
        and weight.device.type == "cpu"
        and (
            weight.dtype == torch.float32
            or (weight.dtype == torch.bfloat16 and onednn_has_bfloat16())
        )
        and weight.numel() >= SMALLEST
    )


def _mark(layers: Sequence[nn.Linear]) -> object:
    """Return a value that changes when a weight or a bias is written or replaced."""
    tensors = [x for layer in layers for x in (layer.weight, layer.bias) if x is not None]
    versions = (None if x.is_inference() else x._version for x in tensors)
    return [(x.data_ptr(), version, x.dtype) for x, version in zip(tensors, versions)]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _unpacked(input: Tensor, layer: nn.Linear) -> Tensor:
    if layer.weight.dtype == torch.float32:
        return multiply(input, layer.weight.detach(), layer.bias)
    # here torch calls oneDNN itself
    return F.linear(input, layer.weight, layer.bias)
