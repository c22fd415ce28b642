"""Prove that vLLM holds the 8-bit values of the weights that it was sent.

Each quantized layer computes rows of the identity matrix, which gives back its own weights. So the
proof reads through the kernel that samples, and depends on no layout in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightrft.engines.fingerprint import checksum
from lightrft.engines.vllm_parts.held_weights import unfused
from lightrft.engines.vllm_parts.kernel_copies import identity_rows
from lightrft.engines.vllm_parts.row_formats import RowFormat
from lightrft.utils.errors import ConfigError, ModelError

OF_LAYER = ("weight", "weight_scale")
"""Tensors of a quantized layer that are compared as 8-bit values and their scales."""

Names = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class SentTensor:
    """Expected contents of a tensor in vLLM.

    Attributes:
        shape: Its shape.
        total: Checksum in vLLM's type; of the 8-bit values for a layer that is quantized.
        scales: ``[rows]``. Scale of each row. ``None`` for a tensor that stays as it is.
    """

    shape: tuple[int, ...]
    total: str
    scales: Tensor | None = None


class QuantizedWeights:
    """Records the weights that vLLM is sent, and compares them with those that it holds.

    Args:
        llm: vLLM's ``LLM`` with the options of ``form``.
        form: Format of the quantized layers.
        dtype: Type of the weights before they are rounded, and of the inputs of the layers.

    Raises:
        ConfigError: vLLM has quantized no layer of this model.
    """

    def __init__(self, llm: Any, form: RowFormat, dtype: torch.dtype) -> None:
        self._apply: Callable[..., list[Any]] = llm.apply_model
        self._form, self._dtype = form, dtype
        [self._parts] = self._apply(quantized_parts)
        self._quantized = {name for names in self._parts.values() for name in names}
        self._sent: dict[str, SentTensor] = {}
        if not self._quantized:
            raise ConfigError(
                f"engine.quantization = {form.name}: vLLM quantized no layer of this model; "
                "leave it out"
            )

    def recorded(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield ``weights`` as vLLM reads them, and record what it must hold of each."""
        self._sent.clear()
        for name, tensor in weights:
            plain = tensor.detach().to(self._dtype)
            shape = tuple(plain.shape)
            if name not in self._quantized:
                self._sent[name] = SentTensor(shape, checksum(plain))
                yield name, tensor
                continue
            values, scales = self._form.quantize(plain)
            self._sent[name] = SentTensor(shape, checksum(values), scales)
            yield name, values
            yield f"{name}_scale", scales[:, None]

    def check(self) -> None:
        """Raise ``ModelError`` unless vLLM holds all that was recorded."""
        find = partial(find_difference, parts=self._parts, sent=self._sent, form=self._form)
        [problem] = self._apply(partial(find, dtype=self._dtype))
        if problem:
            raise ModelError(f"after a weight update, {problem}")


def read_back(
    layer: nn.Module, columns: int, scales: Tensor, form: RowFormat, dtype: torch.dtype
) -> Tensor:
    """Return the values of a quantized ``layer``, as ``RowFormat.round`` returns them.

    Args:
        layer: A linear layer of vLLM.
        columns: Number of its inputs.
        scales: ``[rows]``. Scale of each row.
        form: Format of the layer.
        dtype: Type of the inputs.

    Returns:
        ``[rows, columns]``.
    """
    found = []
    method: Any = layer.quant_method
    # The scale of a row of inputs is exactly 1 at this value, so the product rounds once.
    for rows in identity_rows(columns, scales.to(dtype), form.largest):
        product = method.apply(layer, rows, None)[:, : len(scales)].float() / form.largest
        # The product is rounded by 0.4 % at most. FP8 values are 6 % apart, and INT8 values 0.8 %.
        found.append(form.round(product / scales).T)
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


def find_difference(
    model: nn.Module,
    parts: Names,
    sent: Mapping[str, SentTensor],
    form: RowFormat,
    dtype: torch.dtype,
) -> str:
    """Return what ``model`` does not hold as it was ``sent``, or an empty string.

    Args:
        model: A model of vLLM.
        parts: Names of the weights in each quantized layer.
        sent: What the model must hold, by name.
        form: Format of the quantized layers.
        dtype: Type of their inputs.
    """
    lost = "vLLM does not hold {} of {} that it was sent. Cause: a lost update"
    held = _whole_tensors(model, parts, sent)
    scales: dict[str, Tensor] = {}
    for path, names in parts.items():
        wanted = [sent[name] for name in names if name in sent]
        if len(wanted) < len(names):
            return (
                f"vLLM was not sent all weights of {path}: {', '.join(names)}. Its {form.kind} "
                "weights cannot be compared: leave out engine.quantization"
            )
        layer: Any = model.get_submodule(path)
        if not hasattr(layer, "weight"):
            # so vLLM leaves a layer on a CPU that an update did not reach
            return lost.format(f"the {form.kind} values", names[0])
        rows = [one.shape[0] for one in wanted]
        # a kernel may pad the rows
        of_rows = layer.weight_scale.detach().flatten()[: sum(rows)]
        values = read_back(layer, wanted[0].shape[1], of_rows, form, dtype)
        scales |= zip(names, of_rows.split(rows))
        held |= zip(names, values.split(rows))
    for name, one in sent.items():
        if name not in held:
            return (
                f"vLLM's {type(model).__name__} has no tensor for {name}, so its {form.kind} "
                "weights cannot be compared: leave out engine.quantization"
            )
        what = _lost(one, held[name], scales.get(name), form)
        if what:
            return lost.format(what, name)
    return ""


def _lost(one: SentTensor, held: Tensor, scales: Tensor | None, form: RowFormat) -> str:
    """Return what ``held`` and ``scales`` lack of ``one``, or an empty string."""
    if one.scales is not None:
        assert scales is not None
        # the trainer's weights, and so their scales, may be on another device
        if not torch.equal(one.scales.to(scales.device, scales.dtype), scales):
            return f"the scales of the {form.kind} values"
    if checksum(held.contiguous()) != one.total:
        return "the tensor" if one.scales is None else f"the {form.kind} values"
    return ""


def _whole_tensors(
    model: nn.Module, parts: Names, sent: Mapping[str, SentTensor]
) -> dict[str, Tensor]:
    """Return the tensors that are not quantized, by their names before layers were fused."""
    found: dict[str, Tensor] = {}
    for name, tensor in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        if path in parts and leaf in OF_LAYER:
            continue
        start = 0
        for part in (f"{one}.{leaf}" for one in unfused(model, path)):
            if part not in sent:
                continue
            # the rows of a vocabulary may be padded
            rows = sent[part].shape[0]
            found[part] = tensor.detach()[start : start + rows]
            start += rows
    return found
