"""Formats of 8-bit weights with a scale per row: their rounding, and the options of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

_FP8_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_NEGATIVE_ZERO = 128

_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "linear": {
            "targets": ["Linear"],
            "weights": {**_INT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
        }
    },
}
"""``quantization_config`` of a checkpoint with INT8 weights and inputs (W8A8)."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """A format of the weights of linear layers: 8-bit values with a scale per row.

    Attributes:
        name: Value of the setting ``engine.quantization``.
        kind: Name of the values in messages.
        dtype: Type of the values.
        largest: Largest value.
        smallest_scale: Smallest scale of a row.
        options: Arguments of vLLM's ``LLM``.
        sends_values: vLLM is sent values and scales. Otherwise it is sent the trainer's weights,
            and rounds them itself.
    """

    name: str
    kind: str
    dtype: torch.dtype
    largest: float
    smallest_scale: float
    options: Mapping[str, Any]
    sends_values: bool

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values of ``weight``, as ``round`` gives them, and the scales of its rows.

        Args:
            weight: ``[rows, columns]``.

        Returns:
            The values as integers, ``[rows, columns]``, and the scales in float32, ``[rows]``.
        """
        # a GPU multiplies by the inverse of a number, and vLLM divides by a tensor
        largest = torch.tensor(self.largest, dtype=torch.float32, device=weight.device)
        scales = (weight.abs().amax(1).float() / largest).clamp(min=self.smallest_scale)
        return self.round(weight.float() / scales[:, None]), scales

    def round(self, values: Tensor) -> Tensor:
        """Return ``values`` rounded to the format, as integers of 8 bits.

        FP8 values are returned as their bytes. Zeros have no sign.
        """
        found = values.clamp(-self.largest, self.largest)
        if self.dtype == torch.int8:
            return found.round().to(torch.int8)
        found = found.to(self.dtype).view(torch.uint8)
        return found.masked_fill(found == _NEGATIVE_ZERO, 0)


FP8 = RowFormat(
    name="fp8_per_channel",
    kind="FP8",
    dtype=torch.float8_e4m3fn,
    largest=_FP8_LARGEST,
    # vLLM's own
    smallest_scale=1 / (_FP8_LARGEST * 512),
    options=MappingProxyType({"quantization": "fp8_per_channel"}),
    sends_values=False,
)
INT8 = RowFormat(
    name="int8_per_channel",
    kind="INT8",
    dtype=torch.int8,
    largest=127,
    # products of such a row are still exact enough in float16
    smallest_scale=2**-24,
    # a checkpoint of the trainer's weights cannot be read into INT8 tensors
    options=MappingProxyType(
        {"hf_overrides": {"quantization_config": W8A8}, "load_format": "dummy"}
    ),
    sends_values=True,
)
ROW_FORMATS: Mapping[str | None, RowFormat] = {one.name: one for one in (FP8, INT8)}
"""Formats by the setting ``engine.quantization``."""
