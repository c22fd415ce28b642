"""Formats of 8-bit weights with a scale per row: their rounding, and the options of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_FP8_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_NEGATIVE_ZERO = 128


@dataclass(frozen=True, slots=True)
class RowFormat:
    """A format of the weights of linear layers: 8-bit values with a scale per row.

    Attributes:
        name: Value of the setting ``engine.quantization``.
        kind: Name of the values in messages.
        dtype: Type of the values.
        largest: Largest value.
        smallest_scale: Smallest scale of a row.
    """

    name: str
    kind: str
    dtype: torch.dtype
    largest: float
    smallest_scale: float

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of vLLM's ``LLM``: the config of a checkpoint in this format (W8A8).

        vLLM is sent values and scales. If it rounded the trainer's weights itself, ties could go
        another way on a GPU, and no value could be compared.
        """
        kind = "int" if self.dtype == torch.int8 else "float"
        numbers = {"num_bits": 8, "type": kind, "symmetric": True}
        config = {
            "quant_method": "compressed-tensors",
            "format": f"{kind}-quantized",
            "ignore": ["lm_head"],
            "config_groups": {
                "linear": {
                    "targets": ["Linear"],
                    "weights": {**numbers, "strategy": "channel", "dynamic": False},
                    "input_activations": {**numbers, "strategy": "token", "dynamic": True},
                }
            },
        }
        # the trainer's weights cannot be read into tensors of 8 bits
        return {"hf_overrides": {"quantization_config": config}, "load_format": "dummy"}

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values of ``weight [rows, columns]``, as ``round`` gives them, and the scales
        of its rows, ``[rows]`` float32."""
        scales = (weight.abs().amax(1).float() / self.largest).clamp(min=self.smallest_scale)
        return self.round(weight.float() / scales[:, None]), scales

    def round(self, values: Tensor) -> Tensor:
        """Return ``values`` rounded to the format, in ``dtype``. Zeros have no sign."""
        found = values.clamp(-self.largest, self.largest)
        if self.dtype == torch.int8:
            return found.round().to(torch.int8)
        codes = found.to(self.dtype).view(torch.uint8)
        return codes.masked_fill(codes == _NEGATIVE_ZERO, 0).view(self.dtype)


FP8 = RowFormat(
    name="fp8_per_channel",
    kind="FP8",
    dtype=torch.float8_e4m3fn,
    largest=_FP8_LARGEST,
    smallest_scale=1 / (_FP8_LARGEST * 512),
)
INT8 = RowFormat(
    name="int8_per_channel",
    kind="INT8",
    dtype=torch.int8,
    largest=127,
    # products of such a row are still exact enough in float16
    smallest_scale=2**-24,
)
ROW_FORMATS: Mapping[str | None, RowFormat] = {one.name: one for one in (FP8, INT8)}
"""Formats by the setting ``engine.quantization``."""
