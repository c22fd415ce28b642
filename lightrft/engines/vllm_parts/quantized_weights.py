"""Prove that vLLM holds the 8-bit values of the weights that it was sent.

Each quantized layer computes rows of the identity matrix, which gives back its own weights. So the
proof reads through the kernel that samples, and depends on no layout in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightrft.engines.fingerprint import checksum
from lightrft.engines.vllm_parts.held_weights import HeldWeights, Place, places_in, unfused
from lightrft.engines.vllm_parts.kernel_copies import identity_rows
from lightrft.engines.vllm_parts.row_formats import RowFormat
from lightrft.utils.errors import ConfigError, ModelError

CUT_OFF = 2**-8
"""Mean share that a product in bfloat16 lacks where its last bits are cut off."""


@dataclass(frozen=True, slots=True)
class SentLayer:
    """Expected contents of a quantized layer, or of its part, in this process of vLLM.

    Attributes:
        shape: Shape of the weight.
        total: Checksum of the 8-bit values.
        scales: ``[rows]``. Scale of each row.
    """

    shape: tuple[int, ...]
    total: str
    scales: Tensor


class QuantizedWeights:
    """Records the weights that vLLM is sent, and compares them with those that it holds.

    Args:
        model: vLLM's model, with the options of ``form``.
        about: vLLM's ``ModelConfig``.
        form: Format of the quantized layers.

    Raises:
        ConfigError: vLLM has quantized no layer of this model.
    """

    def __init__(self, model: nn.Module, about: Any, form: RowFormat) -> None:
        self._model, self._form = model, form
        self._dtype: torch.dtype = about.dtype
        self._others = HeldWeights(model, about)
        self._parts = quantized_parts(model)
        self._quantized: dict[str, Place] = {}
        for path, names in self._parts.items():
            found = dict(places_in(model, path, model.get_submodule(path), "weight"))
            self._quantized |= {name: found[name] for name in names}
        self._sent: dict[str, SentLayer] = {}
        if not self._quantized:
            raise ConfigError(
                f"engine.quantization = {form.name}: vLLM quantized no layer of this model; "
                "leave it out"
            )

    def recorded(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield ``weights`` as vLLM reads them, and record what it must hold of each."""
        self._sent.clear()
        self._others.begin()
        for name, tensor in weights:
            place = self._quantized.get(name)
            if place is None:
                self._others.record(name, tensor)
                yield name, tensor
                continue
            plain = tensor.detach().to(self._dtype)
            values, scales = self._form.quantize(plain)
            mine = place.shard(values)
            self._sent[name] = SentLayer(
                tuple(mine.shape), checksum(mine.contiguous()), place.shard_rows(scales)
            )
            yield name, values
            yield f"{name}_scale", scales[:, None]

    def check(self) -> set[str]:
        """Return an empty set: no tensor may be left out of the comparison.

        Raises ``ModelError`` unless vLLM holds all that was recorded.
        """
        for path, names in self._parts.items():
            problem = self._problem(path, names)
            if problem:
                raise ModelError(f"after a weight update, {problem}")
        for name in self._others.check():
            raise ModelError(
                f"vLLM's {type(self._model).__name__} has no tensor for {name}, so its "
                f"{self._form.kind} weights cannot be compared: leave out engine.quantization"
            )
        return set()

    def _problem(self, path: str, names: Sequence[str]) -> str:
        """Return what the layer ``path`` does not hold of the weights ``names``, or no text."""
        kind = self._form.kind
        lost = (
            f"vLLM does not hold {{}} {kind} values of {{}} that it was sent. Cause: a lost update"
        )
        wanted = [self._sent[name] for name in names if name in self._sent]
        if len(wanted) < len(names):
            return (
                f"vLLM was not sent all weights of {path}: {', '.join(names)}. Its {kind} weights "
                "cannot be compared: leave out engine.quantization"
            )
        layer: Any = self._model.get_submodule(path)
        if not hasattr(layer, "weight"):
            # so vLLM leaves a layer on a CPU that an update did not reach
            return lost.format("the", names[0])
        rows = [one.shape[0] for one in wanted]
        # a kernel may pad the rows
        scales = layer.weight_scale.detach().flatten()[: sum(rows)]
        for name, one, of_rows in zip(names, wanted, scales.split(rows)):
            # the trainer's weights, and so their scales, may be on another device
            if not torch.equal(one.scales.to(of_rows.device, of_rows.dtype), of_rows):
                return lost.format("the scales of the", name)
        read = partial(read_back, layer, wanted[0].shape[1], scales, self._form, self._dtype)
        # Kernels for processors without bfloat16 cut products off in place of rounding them.
        wrong = dict(zip(names, wanted, strict=True))
        for lack in (0.0, CUT_OFF):
            values = read(lack=lack)
            for name, held in zip(names, values.split(rows), strict=True):
                if name in wrong and checksum(held.contiguous()) == wrong[name].total:
                    del wrong[name]
            if not wrong:
                return ""
        first = next(iter(wrong))
        if torch.equal(values.float(), read(sign=-1, lack=CUT_OFF).float()):
            return lost.format("the", first)
        # a kernel without VNNI adds products in 16 bits
        return (
            f"the {kind} kernel of vLLM overflows on this processor: the weights of {first} have "
            "other products with x than with -x. Leave out engine.quantization, or use a processor "
            "with VNNI"
        )


def read_back(
    layer: nn.Module,
    columns: int,
    scales: Tensor,
    form: RowFormat,
    dtype: torch.dtype,
    sign: int = 1,
    lack: float = 0.0,
) -> Tensor:
    """Return the values of a quantized ``layer``, as ``RowFormat.round`` returns them.

    Args:
        layer: A linear layer of vLLM.
        columns: Number of its inputs.
        scales: ``[rows]``. Scale of each row.
        form: Format of the layer.
        dtype: Type of the inputs.
        sign: Sign of the inputs, 1 or -1. The values of an exact kernel do not depend on it.
        lack: Mean share that a product lacks.

    Returns:
        ``[rows, columns]``.
    """
    found = []
    method: Any = layer.quant_method
    # The scale of a row of inputs is exactly 1 at this value, so the product rounds once.
    value = sign * form.largest
    for rows in identity_rows(columns, scales.to(dtype), value):
        product = method.apply(layer, rows, None)[:, : len(scales)].float() / value
        # The product is rounded by 0.4 % at most, or cut off by 0.8 %. FP8 values are 6 % apart, and
        # INT8 values 0.8 %.
        found.append(form.round(product * (1 + lack) / scales).T)
    return torch.cat(found, dim=1)


def quantized_parts(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the names of the weights in each quantized layer, by the path of the layer.

    Args:
        model: A model of vLLM, which fuses some layers.
    """
    found = {}
    for path, module in model.named_modules():
        # a kernel may keep the values where no attribute shows them
        if isinstance(getattr(module, "weight_scale", None), Tensor):
            found[path] = tuple(f"{part}.weight" for part in unfused(model, path))
    return found
