"""SmolVLM and Idefics 3: a picture becomes square crops of one size.

Crops are ordered row by row, followed by the full picture at that size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, isqrt
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.smolvlm.image_processing_pil_smolvlm import (
    SmolVLMImageProcessorPil,
    get_resize_output_image_size,
)
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from lightrft.config.model import ModelConfig
from lightrft.models.processors.base import ModalityProcessor, token_text, within, write_settings
from lightrft.types import Extent


def build(
    config: ModelConfig,
    settings: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> Mapping[str, ModalityProcessor]:
    """Build the part of pictures from the folder's picture processor.

    Args:
        config: Settings with the folder of the model.
        settings: Config of the model.
        tokenizer: Gives the placeholder.
    """
    processor = SmolVLMImageProcessorPil.from_pretrained(
        config.path, revision=config.revision or "main"
    )
    side = processor.max_image_size["longest_edge"] // settings.vision_config.patch_size
    written = token_text(tokenizer, settings.image_token_id)
    features = side**2 // settings.scale_factor**2
    return {"image": SmolImage(processor, written, features, KINDS[settings.model_type])}


KINDS = {
    "smolvlm": ("SmolVLMProcessor", "SmolVLMImageProcessor"),
    "idefics3": ("Idefics3Processor", "Idefics3ImageProcessor"),
}
"""Classes of transformers that read the saved files, by family."""


@dataclass(frozen=True, slots=True)
class SmolImage:
    """Pictures.

    ``written`` is one placeholder. A crop becomes ``features`` placeholders, between marks with its
    row and column. ``kinds`` are the classes of the saved processor and of its image processor.
    """

    processor: SmolVLMImageProcessorPil
    written: str
    features: int
    kinds: tuple[str, str] = KINDS["smolvlm"]
    around: tuple[str, str] = ("", "")
    rate: int = 0

    def placeholder_text(self, extent: Extent) -> str:
        marks = {
            "fake_token_around_image": "<fake_token_around_image>",
            "image_token": self.written,
            "global_image_token": "<global-img>",
        }
        return get_image_prompt_string(*self._grid(*extent.shape[:2]), self.features, **marks)

    def inputs(self, value: np.ndarray, extent: Extent) -> dict[str, Tensor]:
        made = self.processor(images=[Image.fromarray(value)], return_tensors="pt")
        # All crops have the tower's input size, so there is no padding and no mask is needed.
        return {"pixel_values": made["pixel_values"][0]}

    def count(self, inputs: Mapping[str, Tensor]) -> int:
        return len(inputs["pixel_values"]) * self.features

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> SmolImage:
        """Return the part with a lower size for the longest edge.

        Pictures are resized to it before they are cut.
        """
        within(self._side**2, min_pixels, max_pixels)
        longest = self.processor.size["longest_edge"]
        if max_pixels is None or longest**2 <= max_pixels:
            return self
        fields = self.processor.to_dict()
        # a multiple of the crops' side, since pictures are cut into whole crops
        fields["size"] = {"longest_edge": isqrt(max_pixels) // self._side * self._side}
        return replace(self, processor=type(self.processor).from_dict(fields))

    def save(self, path: Path) -> None:
        """Write the files. Without ``image_seq_len``, transformers takes that of another size."""
        whole, pictures = self.kinds
        fields = json.loads(self.processor.to_json_string())
        write_settings(
            path / "preprocessor_config.json", {**fields, "image_processor_type": pictures}
        )
        own = {"processor_class": whole, "image_seq_len": self.features}
        write_settings(path / "processor_config.json", own)

    @property
    def _side(self) -> int:
        return self.processor.max_image_size["longest_edge"]

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of crops, 0 and 0 for an uncut picture, with the sizes of
        ``SmolVLMImageProcessorPil._preprocess``."""
        if not self.processor.do_image_splitting:
            return 0, 0
        if self.processor.do_resize:
            # only the shape is read, and a broadcast array takes no memory
            shape = np.broadcast_to(np.uint8(0), (height, width))
            height, width = get_resize_output_image_size(shape, self.processor.size["longest_edge"])
        side, ratio = self._side, width / height
        if width >= height:
            columns = ceil(width / side)
            rows = ceil(int(columns * side / ratio) / side)
        else:
            rows = ceil(height / side)
            columns = ceil(int(rows * side * ratio) / side)
        return (rows, columns) if max(rows, columns) > 1 else (0, 0)
