"""Prove that vLLM holds the FP8 values of the weights that it was sent.

Each quantized layer computes rows of the identity matrix, which gives back its own weights. So the
proof reads through the kernel that samples, and depends on no layout in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightrft.engines.fingerprint import checksum
from lightrft.utils.errors import ConfigError, ModelError

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
SMALLEST_SCALE = 1 / (LARGEST * 512)
"""Smallest scale of a row that vLLM uses."""
COLUMNS = 512
"""Columns of a layer that are read back at once."""
NEGATIVE_ZERO = 128

Names = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class SentTensor:
    """Expected contents of a tensor in vLLM.

    Attributes:
        shape: Its shape.
        total: Checksum in vLLM's type; of the FP8 values for a layer that vLLM quantizes.
        scales: ``[rows]``. Scale of each row. ``None`` for a tensor that stays as it is.
    """

    shape: tuple[int, ...]
    total: str
    scales: Tensor | None = None


class FP8Weights:
    """Records the weights that vLLM is sent, and compares them with those that it holds.

    Args:
        llm: vLLM's ``LLM`` with ``quantization="fp8_per_channel"``.
        dtype: Type of the weights that vLLM quantizes.

    Raises:
        ConfigError: vLLM has quantized no layer of this model.
    """

    def __init__(self, llm: Any, dtype: torch.dtype) -> None:
        self._apply: Callable[..., list[Any]] = llm.apply_model
        self._dtype = dtype
        [self._parts] = self._apply(quantized_parts)
        self._quantized = {name for names in self._parts.values() for name in names}
        self._sent: dict[str, SentTensor] = {}
        if not self._quantized:
            raise ConfigError(
                "engine.quantization = fp8_per_channel: vLLM quantized no layer of this model; "
                "leave it out"
            )

    def recorded(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield ``weights``, and record what vLLM must hold of each."""
        self._sent.clear()
        for name, tensor in weights:
            plain = tensor.detach().to(self._dtype)
            if name in self._quantized:
                values, scales = quantize(plain)
                self._sent[name] = SentTensor(tuple(plain.shape), checksum(values), scales)
            else:
                self._sent[name] = SentTensor(tuple(plain.shape), checksum(plain))
            yield name, tensor

    def check(self) -> None:
        """Raise ``ModelError`` unless vLLM holds all that was recorded."""
        [problem] = self._apply(partial(find_difference, parts=self._parts, sent=self._sent))
        if problem:
            raise ModelError(f"after a weight update, {problem}")


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the FP8 values of ``weight`` with a scale per row, as vLLM rounds them.

    Args:
        weight: ``[rows, columns]``.

    Returns:
        The values as bytes, ``[rows, columns]``, and the scales, ``[rows]``.
    """
    scales = (weight.abs().amax(1).float() / LARGEST).clamp(min=SMALLEST_SCALE)
    return as_bytes(weight.float() / scales[:, None]), scales


def as_bytes(values: Tensor) -> Tensor:
    """Return ``values``, rounded to FP8, as bytes. Zeros have no sign."""
    found = values.clamp(-LARGEST, LARGEST).to(FP8).view(torch.uint8)
    return found.masked_fill(found == NEGATIVE_ZERO, 0)


def read_back(layer: nn.Module, columns: int, scales: Tensor) -> Tensor:
    """Return the FP8 values of a quantized ``layer`` as bytes, ``[rows, columns]``.

    Args:
        layer: A linear layer of vLLM.
        columns: Number of its inputs.
        scales: ``[rows]``. Scale of each row.
    """
    # the trainer's weights, and so their scales, may be on another device
    scales = scales.to(next(layer.parameters()).device)
    found = torch.empty(len(scales), columns, dtype=torch.uint8, device=scales.device)
    method: Any = layer.quant_method
    for start in range(0, columns, COLUMNS):
        count = min(COLUMNS, columns - start)
        # The scale of a row of inputs is exactly 1 at this value, so the product rounds once.
        rows = torch.zeros(count, columns, dtype=method.input_dtype, device=scales.device)
        rows[torch.arange(count), torch.arange(start, start + count)] = LARGEST
        product = method.apply(layer, rows, None).float() / LARGEST
        # a value differs from its neighbour by 6 % or more, and rounding of the product by 0.4 %
        found[:, start : start + count] = as_bytes(product / scales).T
    return found


def quantized_parts(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the names of the weights in each quantized layer, by the path of the layer.

    Args:
        model: A model of vLLM, which fuses some layers.
    """
    found = {}
    for path, module in model.named_modules():
        if getattr(getattr(module, "weight", None), "dtype", None) is FP8:
            found[path] = tuple(f"{part}.weight" for part in unfused(model, path))
    return found


def unfused(model: nn.Module, path: str) -> list[str]:
    """Return the paths of the layers that vLLM has fused into ``path``, in order."""
    # adapters wrap a layer
    plain = path.replace(".base_layer", "")
    parent, dot, leaf = plain.rpartition(".")
    fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    return [f"{parent}{dot}{part}" for part in fused.get(leaf, [leaf])]


def find_difference(model: nn.Module, parts: Names, sent: Mapping[str, SentTensor]) -> str:
    """Return what ``model`` does not hold as it was ``sent``, or an empty string.

    Args:
        model: A model of vLLM.
        parts: Names of the weights in each quantized layer.
        sent: What the model must hold, by name.
    """
    held: dict[str, Tensor] = {}
    for path, names in parts.items():
        wanted = [sent[name] for name in names if name in sent]
        if len(wanted) < len(names):
            return f"vLLM was not sent all weights of {path}: {', '.join(names)}"
        scales = torch.cat([one.scales for one in wanted if one.scales is not None])
        layer = model.get_submodule(path)
        values = read_back(layer, wanted[0].shape[1], scales)
        held |= zip(names, values.split([one.shape[0] for one in wanted]))
    held |= _whole_tensors(model, sent)
    for name, one in sent.items():
        if name not in held:
            return (
                f"vLLM's {type(model).__name__} has no tensor for {name}, so its FP8 weights "
                "cannot be compared: leave out engine.quantization"
            )
        if checksum(held[name].contiguous()) != one.total:
            kind = "the tensor" if one.scales is None else "the FP8 values"
            return f"vLLM does not hold {kind} of {name} that it was sent. Cause: a lost update"
    return ""


def _whole_tensors(model: nn.Module, sent: Mapping[str, SentTensor]) -> dict[str, Tensor]:
    """Return the tensors that are not quantized, by their names before layers were fused."""
    found: dict[str, Tensor] = {}
    for name, tensor in model.named_parameters():
        if tensor.dtype is FP8:
            continue
        path, _, leaf = name.rpartition(".")
        start = 0
        for part in (f"{one}.{leaf}" for one in unfused(model, path)):
            if part not in sent:
                continue
            # the rows of a vocabulary may be padded
            rows = sent[part].shape[0]
            found[part] = tensor.detach()[start : start + rows]
            start += rows
    return found
