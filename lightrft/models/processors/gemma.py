"""Gemma 3: every picture at one size, with optional crops of long pictures.

The folder's settings enable crops (pan and scan).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from lightrft.config.model import ModelConfig
from lightrft.models.processors.base import ModalityProcessor, token_text, within, write_settings
from lightrft.types import Extent

_CROPS = {
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
"""Values that ``Gemma3Processor`` uses where a folder's settings are null."""


def build(
    config: ModelConfig,
    settings: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> Mapping[str, ModalityProcessor]:
    """Build the part of pictures from the folder's picture processor.

    Args:
        config: Settings with the folder of the model.
        settings: Config of the model.
        tokenizer: Gives placeholder and marks.
    """
    processor = Gemma3ImageProcessorPil.from_pretrained(
        config.path, revision=config.revision or "main"
    )
    begin = token_text(tokenizer, settings.boi_token_index)
    soft = token_text(tokenizer, settings.image_token_index)
    end = token_text(tokenizer, settings.eoi_token_index)
    features = settings.mm_tokens_per_image
    whole = f"\n\n{begin}{soft * features}{end}\n\n"
    return {"image": GemmaImage(processor, begin, whole, features)}


@dataclass(frozen=True, slots=True)
class GemmaImage:
    """Pictures.

    ``written`` marks the start of one. ``whole`` is the text of one picture or crop, which becomes
    ``features`` features.
    """

    processor: Any
    written: str
    whole: str
    features: int
    around: tuple[str, str] = ("", "")
    rate: int = 0

    def placeholder_text(self, extent: Extent) -> str:
        crops = 0
        if self.processor.do_pan_and_scan:
            # only the shape is read, and a broadcast array takes no memory
            shape = np.broadcast_to(np.uint8(0), (3, *extent.shape[:2]))
            crops = len(self.processor.pan_and_scan(shape, **self._options))
        if not crops:
            return self.whole
        many = " ".join([self.whole] * crops)
        # the words with which the family was trained
        original = f"Here is the original image {self.whole}"
        return f"{original} and here are some crops to help you see better {many}"

    def inputs(self, value: np.ndarray, extent: Extent) -> dict[str, Tensor]:
        made = self.processor(images=[Image.fromarray(value)], return_tensors="pt", **self._options)
        return {"pixel_values": made["pixel_values"]}

    def count(self, inputs: Mapping[str, Tensor]) -> int:
        return len(inputs["pixel_values"]) * self.features

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> GemmaImage:
        size = self.processor.size
        within(size["height"] * size["width"], min_pixels, max_pixels)
        return self

    def save(self, path: Path) -> None:
        self.processor.save_pretrained(path)
        fields = {"processor_class": "Gemma3Processor", "image_seq_length": self.features}
        write_settings(path / "processor_config.json", fields)

    @property
    def _options(self) -> dict[str, object]:
        """The settings of crops, with defaults for nulls."""
        chosen = {name: getattr(self.processor, name) for name in _CROPS}
        return {name: _CROPS[name] if value is None else value for name, value in chosen.items()}
