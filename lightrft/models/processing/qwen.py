"""The Qwen-VL families: patches of pictures at their own size, on a grid of time, height and width."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from lightrft.models.processing.base import Part, spelling
from lightrft.models.settings import ModelConfig
from lightrft.types import Extent


def build(config: ModelConfig, settings: Any, tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Part]:
    """Pictures and frames, by the picture processor of the folder."""
    processor = Qwen2VLImageProcessorPil.from_pretrained(config.path, revision=config.revision or "main")
    image, video = (spelling(tokenizer, i) for i in (settings.image_token_id, settings.video_token_id))
    return {"image": QwenImage(processor, image), "video": QwenVideo(processor, video)}


@dataclass(frozen=True, slots=True)
class QwenImage:
    """Pictures. ``written`` is one placeholder between the vision marks that the chat template writes."""

    processor: Any
    written: str
    rate: int = 0

    def expand(self, extent: Extent) -> str:
        height, width = self._resized(*extent.shape[:2])
        return self.written * (height * width // self._side**2)

    def inputs(self, value: np.ndarray, extent: Extent) -> dict[str, Tensor]:
        made = self.processor(images=[Image.fromarray(value)], return_tensors="pt")
        return {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}

    def count(self, inputs: Mapping[str, Tensor]) -> int:
        return int(inputs["image_grid_thw"].prod(-1).sum()) // self.processor.merge_size**2

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> QwenImage:
        return QwenImage(_limited(self.processor, min_pixels, max_pixels), self.written)

    def save(self, path: Path) -> None:
        self.processor.save_pretrained(path)

    @property
    def _side(self) -> int:
        """Pixels of one side of what becomes one feature."""
        return self.processor.patch_size * self.processor.merge_size

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        size = self.processor.size
        return smart_resize(height, width, self._side, size["shortest_edge"], size["longest_edge"])


@dataclass(frozen=True, slots=True)
class QwenVideo:
    """Frames, in pairs. ``limited`` bounds each frame."""

    processor: Any
    written: str
    rate: int = 0

    def expand(self, extent: Extent) -> str:
        return self.written * (int(self._grid(extent).prod()) // self.processor.merge_size**2)

    def inputs(self, value: np.ndarray, extent: Extent) -> dict[str, Tensor]:
        grid = self._grid(extent)
        pairs = int(grid[0]) * self.processor.temporal_patch_size
        frames = [Image.fromarray(value[min(t, len(value) - 1)]) for t in range(pairs)]
        made = self.processor(images=frames, return_tensors="pt")["pixel_values"]
        # The picture processor repeats each frame to fill a patch's time; here consecutive frames take those places.
        size = self.processor.patch_size**2
        each = made.view(int(grid[0]), self.processor.temporal_patch_size, int(grid[1] * grid[2]), -1)
        colours = each.unflatten(-1, (-1, self.processor.temporal_patch_size, size))[..., 0, :]
        patches = colours.permute(0, 2, 3, 1, 4).reshape(int(grid.prod()), -1)
        return {"pixel_values_videos": patches, "video_grid_thw": grid[None]}

    def count(self, inputs: Mapping[str, Tensor]) -> int:
        return int(inputs["video_grid_thw"].prod(-1).sum()) // self.processor.merge_size**2

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> QwenVideo:
        return QwenVideo(_limited(self.processor, min_pixels, max_pixels), self.written)

    def save(self, path: Path) -> None:
        return

    def _grid(self, extent: Extent) -> Tensor:
        frames, height, width = extent.shape[:3]
        size, side = self.processor.size, self.processor.patch_size
        resized = smart_resize(height, width, side * self.processor.merge_size, size["shortest_edge"], size["longest_edge"])
        return torch.tensor([-(-frames // self.processor.temporal_patch_size), resized[0] // side, resized[1] // side])


def _limited(processor: Any, min_pixels: int | None, max_pixels: int | None) -> Any:
    size = processor.size
    fields = processor.to_dict()
    fields["size"] = {
        "shortest_edge": size["shortest_edge"] if min_pixels is None else min_pixels,
        "longest_edge": size["longest_edge"] if max_pixels is None else max_pixels,
    }
    return type(processor).from_dict(fields)
