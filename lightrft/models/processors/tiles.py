"""Families that cut a picture into square tiles: InternVL and LLaVA-OneVision."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.image_processing_utils import select_best_resolution
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.video_processing_utils import BaseVideoProcessor

from lightrft.config.model import ModelConfig
from lightrft.models.processors.base import (
    Bounds,
    ModalityProcessor,
    bounded,
    newer,
    token_text,
    write_settings,
)
from lightrft.models.processors.frames import EvenFrames
from lightrft.types import Extent


def internvl(
    config: ModelConfig,
    settings: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> Mapping[str, ModalityProcessor]:
    """Build the part of pictures.

    A tile is a square of the tower's size. Its features are shuffled into fewer, wider ones.

    Args:
        config: Settings with the folder of the model.
        settings: Config of the model.
        tokenizer: Gives placeholder and marks.
    """
    processor = GotOcr2ImageProcessorPil.from_pretrained(
        config.path, revision=config.revision or "main"
    )
    vision = settings.vision_config
    side = vision.image_size[0] // vision.patch_size[0] * settings.downsample_ratio
    begin = getattr(tokenizer, "start_image_token", "<img>")
    end = getattr(tokenizer, "end_image_token", "</img>")
    written = token_text(tokenizer, settings.image_token_id)
    return {"image": InternImage(processor, written, (begin, end), int(side**2))}


@dataclass(frozen=True, slots=True)
class InternImage:
    """Pictures, as tiles and the full picture as one more tile.

    The number of tiles fits the aspect ratio best. ``each`` is the number of features of a tile.
    """

    processor: GotOcr2ImageProcessorPil
    written: str
    marks: tuple[str, str]
    each: int
    around: tuple[str, str] = ("", "\n")
    rate: int = 0

    def placeholder_text(self, extent: Extent) -> str:
        tiles = self.processor.get_number_of_image_patches(
            *extent.shape[:2], {"crop_to_patches": True}
        )
        return self.marks[0] + self.written * (self.each * tiles) + self.marks[1]

    def inputs(self, value: np.ndarray, extent: Extent) -> dict[str, Tensor]:
        made = self.processor(
            images=[Image.fromarray(value)], crop_to_patches=True, return_tensors="pt"
        )
        return {"pixel_values": made["pixel_values"]}

    def count(self, inputs: Mapping[str, Tensor]) -> int:
        return len(inputs["pixel_values"]) * self.each

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> InternImage:
        fields = self.processor.to_dict()
        tile = self.processor.size["height"] * self.processor.size["width"]
        most = fields["max_patches"] if max_pixels is None else max(1, max_pixels // tile)
        least = fields["min_patches"] if min_pixels is None else -(-min_pixels // tile)
        fields |= {"min_patches": max(1, min(least, most)), "max_patches": most}
        return replace(self, processor=type(self.processor).from_dict(fields))

    def save(self, path: Path) -> None:
        self.processor.save_pretrained(path)
        fields = {"processor_class": "InternVLProcessor", "image_seq_length": self.each}
        write_settings(path / "processor_config.json", fields)


def onevision(
    config: ModelConfig,
    settings: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> Mapping[str, ModalityProcessor]:
    """Build the parts of pictures and frames.

    Without a video processor in the folder, frames use the pictures'.

    Args:
        config: Settings with the folder of the model.
        settings: Config of the model.
        tokenizer: Gives placeholders.

    Raises:
        ValueError: Model and processor cut a picture into different tiles.
    """
    revision = config.revision or "main"
    processor = LlavaOnevisionImageProcessorPil.from_pretrained(config.path, revision=revision)
    grids = [list(grid) for grid in settings.image_grid_pinpoints]
    if [list(grid) for grid in processor.image_grid_pinpoints] != grids:
        raise ValueError(
            "image_grid_pinpoints differ between config.json and preprocessor_config.json"
        )
    # another strategy drops features of each tile, which the count of placeholders does not know
    if settings.vision_feature_select_strategy != "full":
        problem = f"vision_feature_select_strategy {settings.vision_feature_select_strategy!r}"
        raise ValueError(f"{problem}, where 'full' is known")
    fields, _ = BaseVideoProcessor.get_video_processor_dict(config.path, revision=revision)
    known = SiglipImageProcessorPil().to_dict()
    frames = SiglipImageProcessorPil.from_dict({k: v for k, v in fields.items() if k in known})
    side = settings.vision_config.image_size // settings.vision_config.patch_size
    most = int(settings.vision_aspect_ratio.removeprefix("anyres_max_"))
    image, video = (
        token_text(tokenizer, i) for i in (settings.image_token_index, settings.video_token_index)
    )
    return {
        "image": OnevisionImage(processor, image, side, most),
        "video": OnevisionVideo(frames, video, side, fields),
    }


@dataclass(frozen=True, slots=True)
class OnevisionImage:
    """Pictures, as the full picture in one tile, then tiles at the resolution that fits best.

    Features of padding are dropped, and a mark ends each line. ``side`` is the number of features
    along one side of a tile. More than ``most`` tiles are shrunk. Every picture is cut this way, as
    transformers does for pictures given one by one. For several pictures of one message,
    transformers does not cut.
    """

    processor: LlavaOnevisionImageProcessorPil
    written: str
    side: int
    most: int
    bounds: Bounds = (None, None)
    around: tuple[str, str] = ("", "\n")
    rate: int = 0

    def placeholder_text(self, extent: Extent) -> str:
        return self.written * self._features(*self._bounded(*extent.shape[:2]))

    def inputs(self, value: np.ndarray, extent: Extent) -> dict[str, Tensor]:
        height, width = self._bounded(*value.shape[:2])
        picture = Image.fromarray(value)
        if (height, width) != value.shape[:2]:
            picture = picture.resize((width, height), resample=self.processor.resample)
        made = self.processor(images=[picture], return_tensors="pt")
        return {"pixel_values": made["pixel_values"][0], "image_sizes": made["image_sizes"]}

    def count(self, inputs: Mapping[str, Tensor]) -> int:
        return sum(
            self._features(height, width) for height, width in inputs["image_sizes"].tolist()
        )

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> OnevisionImage:
        return replace(self, bounds=newer(self.bounds, min_pixels, max_pixels))

    def save(self, path: Path) -> None:
        self.processor.save_pretrained(path)
        fields = {
            "processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": self.side**2,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": f"anyres_max_{self.most}",
        }
        write_settings(path / "processor_config.json", fields)

    def _bounded(self, height: int, width: int) -> tuple[int, int]:
        """Return the size at which the picture is read: the original size, unless it is out of
        bounds."""
        return bounded(height, width, *self.bounds)

    def _features(self, height: int, width: int) -> int:
        """Return the number of features, with the rounding of the model's
        ``pack_image_features``."""
        best = select_best_resolution((height, width), self.processor.image_grid_pinpoints)
        rows, columns = (self.side * (n // self.processor.size["height"]) for n in best)
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        ratio = math.sqrt(rows * columns / (self.most * self.side**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return self.side**2 + rows * columns + rows


@dataclass(frozen=True, slots=True)
class OnevisionVideo:
    """Frames, each one tile, and a mark at the end of the clip.

    The features of a tile are halved along each side.
    """

    processor: SiglipImageProcessorPil
    written: str
    side: int
    fields: Mapping[str, object]
    around: tuple[str, str] = ("", "\n")
    rate: int = 0
    frames: EvenFrames = field(default_factory=EvenFrames)

    def placeholder_text(self, extent: Extent) -> str:
        return self.written * (extent.shape[0] * math.ceil(self.side / 2) ** 2 + 1)

    def inputs(self, value: np.ndarray, extent: Extent) -> dict[str, Tensor]:
        frames = [Image.fromarray(frame) for frame in value]
        made = self.processor(images=frames, return_tensors="pt")
        lengths = torch.tensor([len(value)])
        return {"pixel_values_videos": made["pixel_values"], "video_lengths": lengths}

    def count(self, inputs: Mapping[str, Tensor]) -> int:
        frames, clips = len(inputs["pixel_values_videos"]), len(inputs["video_lengths"])
        return frames * math.ceil(self.side / 2) ** 2 + clips

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> OnevisionVideo:
        return self  # a frame is always one tile

    def save(self, path: Path) -> None:
        fields = {**self.fields, "video_processor_type": "LlavaOnevisionVideoProcessor"}
        write_settings(path / "video_preprocessor_config.json", fields)
