"""The Qwen-VL families: patches of pictures and frames at their native size.

The patches form a grid of time, height and width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as clip_resize
from transformers.video_processing_utils import BaseVideoProcessor

from lightrft.config.model import ModelConfig
from lightrft.models.processors.base import ModalityProcessor, token_text, write_settings
from lightrft.models.processors.frames import EvenFrames, FramesWithEnds, PairedFrames
from lightrft.types import Extent


def build(
    config: ModelConfig,
    settings: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> Mapping[str, ModalityProcessor]:
    """Build the parts of pictures and frames from the folder's processors.

    Without a video processor, frames use the pictures'.

    Args:
        config: Settings with the folder of the model.
        settings: Config of the model.
        tokenizer: Gives placeholders and marks.
    """
    revision = config.revision or "main"
    processor = Qwen2VLImageProcessorPil.from_pretrained(config.path, revision=revision)
    fields, _ = BaseVideoProcessor.get_video_processor_dict(config.path, revision=revision)
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    image, video, start, end = (token_text(tokenizer, getattr(settings, name)) for name in names)
    marks = (start, end)
    known = {*processor.to_dict(), "min_pixels", "max_pixels"}
    shared = {name: value for name, value in fields.items() if name in known}
    clip: dict[str, Any] = {"written": video, "fields": fields}
    plain = QwenVideo(_frames(_QWEN2_CLIPS, shared), **clip, around=marks, per_second=0.0)
    each = settings.vision_config.to_dict().get("tokens_per_second")
    timed = replace(plain, timed=True, per_second=each)
    kinds: dict[str, QwenVideo] = {
        "qwen2_vl": plain,
        "qwen2_5_vl": timed,
        # its processor tells the model the requested rate, also of a clip that has fewer frames
        "qwen2_5_omni_thinker": replace(timed, frames=PairedFrames(nominal=2.0), per_second=None),
    }
    # the video processor of Qwen3 has no limits of these names
    pairs = {name: value for name, value in shared.items() if "_pixels" not in name}
    # Its class has limits of clips, which replace those of a folder.
    kinds["qwen3_omni_moe_thinker"] = replace(
        kinds["qwen2_5_omni_thinker"],
        processor=_frames({}, {**pairs, "size": _QWEN3_CLIPS["size"]}),
        frames=PairedFrames(nominal=1.0),
    )
    newer = Qwen3Video(_frames(_QWEN3_CLIPS, pairs), **clip, marks=marks, frames=FramesWithEnds())
    return {
        "image": QwenImage(processor, image, marks),
        "video": kinds.get(settings.model_type) or newer,
    }


_QWEN2_CLIPS: dict[str, Any] = {"size": {"shortest_edge": 100352, "longest_edge": 602112}}
"""Defaults of ``Qwen2VLVideoProcessor`` that differ from those of pictures."""
_QWEN3_CLIPS: dict[str, Any] = {
    "size": {"shortest_edge": 131072, "longest_edge": 786432},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "patch_size": 16,
}
"""Defaults of ``Qwen3VLVideoProcessor`` that differ from those of pictures."""


def _frames(defaults: Mapping[str, Any], fields: Mapping[str, Any]) -> Qwen2VLImageProcessorPil:
    """Build the processor of frames from the ``fields`` of a folder's video processor."""
    given = {name: value for name, value in fields.items() if value is not None}
    made = {**defaults, **given}
    # the constructor writes the limits of pixels into it
    made["size"] = dict(made["size"])
    return Qwen2VLImageProcessorPil.from_dict(made)


@dataclass(frozen=True, slots=True)
class QwenImage:
    """Pictures.

    ``written`` is one placeholder. Only the vision marks ``around`` it show where a picture begins.
    """

    processor: Qwen2VLImageProcessorPil
    written: str
    around: tuple[str, str]
    rate: int = 0
    size: tuple[int, int] | None = None

    def placeholder_text(self, extent: Extent) -> str:
        height, width = _resized(self.processor, *(self.size or extent.shape[:2]))
        return self.written * (height * width // _side(self.processor) ** 2)

    def inputs(self, value: np.ndarray, extent: Extent) -> dict[str, Tensor]:
        picture = Image.fromarray(value)
        options: dict[str, Any] = {}
        if self.size is not None:
            height, width = _resized(self.processor, *self.size)
            picture = picture.resize((width, height), resample=self.processor.resample)
            options["do_resize"] = False
        made = self.processor(images=[picture], return_tensors="pt", **options)
        return {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}

    def sized(self, height: int | None, width: int | None, total: int | None) -> QwenImage:
        """Return the part for pictures of one size, rounded as in ``smart_resize``.

        Args:
            height: Height in pixels.
            width: Width in pixels.
            total: ``None``, since a picture has no other frames.
        """
        assert height is not None and width is not None and total is None
        return replace(self, size=(height, width))

    def count(self, inputs: Mapping[str, Tensor]) -> int:
        return int(inputs["image_grid_thw"].prod(-1).sum()) // self.processor.merge_size**2

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> QwenImage:
        return replace(self, processor=_limited(self.processor, min_pixels, max_pixels))

    def save(self, path: Path) -> None:
        self.processor.save_pretrained(path)
        file, size = path / "preprocessor_config.json", self.processor.size
        # The picture processor of transformers 4.57 without torchvision reads no ``size``.
        limits = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        write_settings(file, {**json.loads(file.read_text(encoding="utf-8")), **limits})


@dataclass(frozen=True)
class QwenVideo:
    """Frames, in pairs; the last frame is repeated to complete a pair.

    ``limited`` bounds each frame.

    Attributes:
        processor: Resizes and normalizes frames.
        written: One placeholder.
        fields: Config of the folder's video processor.
        timed: Positions along time follow the rate of the frames.
        frames: Selects the frames.
        size: Fixed height and width of a frame. ``None`` for the limits of ``processor``.
        total: Largest number of pixels of all frames. ``None`` for no such limit.
        per_second: Positions of a second of a clip, 0 for one of each pair of frames. ``None``
            where text after a clip continues from its last position.
    """

    processor: Qwen2VLImageProcessorPil
    written: str
    fields: Mapping[str, Any]
    timed: bool = False
    around: tuple[str, str] = ("", "")
    rate: int = 0
    frames: EvenFrames = field(default_factory=PairedFrames)
    size: tuple[int, int] | None = None
    total: int | None = None
    per_second: float | None = None
    saved_type: ClassVar[str] = "Qwen2VLVideoProcessor"

    def placeholder_text(self, extent: Extent) -> str:
        return self.written * (int(self._grid(extent).prod()) // self.processor.merge_size**2)

    def inputs(self, value: np.ndarray, extent: Extent) -> dict[str, Tensor]:
        grid = self._grid(extent)
        made = {"pixel_values_videos": self._patches(value, grid), "video_grid_thw": grid[None]}
        if self.timed:
            made["second_per_grid_ts"] = torch.tensor([self._seconds(extent)])
        return made

    @property
    def least(self) -> int:
        """Smallest number of frames of a clip, if it has so many."""
        return int(self.fields.get("min_frames") or 4)

    def passed(self, extent: Extent) -> tuple[int, int] | None:
        """Return the last position of a clip in time, and the first of the text after it.

        transformers places text after the longer side of a frame. Return ``None`` if the clip does
        not reach beyond.
        """
        if self.per_second is None:
            return None
        steps, height, width = self._grid(extent).tolist()
        spacing = self.per_second * self._seconds(extent) if self.per_second else 1
        last, text = int((steps - 1) * spacing), max(height, width) // self.processor.merge_size
        return (last, text) if last >= text else None

    def _seconds(self, extent: Extent) -> float:
        """Return the seconds from one pair of frames to the next."""
        if extent.rate is not None:
            return self.processor.temporal_patch_size / extent.rate
        times = _times(extent)
        # 0 for a single frame
        spacing = (times[-1] - times[0]) / max(1, len(times) - 1)
        return self.processor.temporal_patch_size * spacing

    def _patches(self, value: np.ndarray, grid: Tensor) -> Tensor:
        """Return ``[grid.prod(), colours * time * height * width]``, without the video processor,
        which needs torchvision."""
        per_patch, side = self.processor.temporal_patch_size, self.processor.patch_size
        size = (int(grid[2]) * side, int(grid[1]) * side)
        # the last frame completes an incomplete pair
        taken = [min(t, len(value) - 1) for t in range(int(grid[0]) * per_patch)]
        frames = []
        for t in taken:
            picture = Image.fromarray(value[t])
            frames.append(picture.resize(size, resample=self.processor.resample))
        # frames are resized above, to the size of the clip
        made = self.processor(images=frames, do_resize=False, return_tensors="pt")
        patches = made["pixel_values"]
        # The picture processor repeats each frame to fill a patch's time axis. Consecutive frames
        # replace the copies here.
        each = patches.view(int(grid[0]), per_patch, int(grid[1] * grid[2]), -1)
        colours = each.unflatten(-1, (-1, per_patch, side**2))[..., 0, :]
        return colours.permute(0, 2, 3, 1, 4).reshape(int(grid.prod()), -1)

    def count(self, inputs: Mapping[str, Tensor]) -> int:
        return int(inputs["video_grid_thw"].prod(-1).sum()) // self.processor.merge_size**2

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> QwenVideo:
        limited = _limited(self.processor, min_pixels, max_pixels)
        return replace(self, processor=limited, fields={**self.fields, "size": dict(limited.size)})

    def save(self, path: Path) -> None:
        # ``size`` has these limits, and transformers would let them replace it
        fields = {k: v for k, v in self.fields.items() if k not in ("min_pixels", "max_pixels")}
        fields |= {"size": dict(self.processor.size), "video_processor_type": self.saved_type}
        write_settings(path / "video_preprocessor_config.json", fields)

    def sized(self, height: int | None, width: int | None, total: int | None) -> Self:
        """Return the part with a fixed size of frames, or a limit of all frames.

        Args:
            height: Height of a frame in pixels. ``None`` keeps its size.
            width: Width of a frame in pixels. ``None`` keeps its size.
            total: Largest number of pixels of all frames. ``None`` for no such limit.
        """
        size = None if height is None or width is None else (height, width)
        return replace(self, size=size, total=total)

    def _grid(self, extent: Extent) -> Tensor:
        """Return the number of patches along time, height and width."""
        pairs = -(-extent.shape[0] // self.processor.temporal_patch_size)
        height, width = self._resized(extent.shape[0], *(self.size or extent.shape[1:3]))
        side = self.processor.patch_size
        return torch.tensor([pairs, height // side, width // side])

    def _resized(self, frames: int, height: int, width: int) -> tuple[int, int]:
        low, high = self.processor.size["shortest_edge"], self.processor.size["longest_edge"]
        step = self.processor.temporal_patch_size
        budgets = [] if self.total is None else [self.total]
        if self.fields.get("cap_pixels_per_frame"):
            tokens = self.fields.get("max_video_tokens") or 128000
            budgets.append(int(tokens * _side(self.processor) ** 2 * 0.9))
        for budget in budgets:
            # an even share of the clip for each frame, as in ``Qwen2VLVideoProcessor.resize``
            high = max(min(high, budget * step // frames), int(low * 1.05))
        return smart_resize(height, width, _side(self.processor), low, high)


@dataclass(frozen=True)
class Qwen3Video(QwenVideo):
    """Frames whose times are written as text: each pair is a separate picture between ``marks``.

    The folder's pixel bounds are for the full clip. The bounds of ``limited`` (in ``each``) are for
    one frame.
    """

    marks: tuple[str, str] = ("", "")
    each: tuple[int | None, int | None] = (None, None)
    saved_type: ClassVar[str] = "Qwen3VLVideoProcessor"

    def placeholder_text(self, extent: Extent) -> str:
        grid = self._grid(extent)
        start, end = self.marks
        features = int(grid[1] * grid[2]) // self.processor.merge_size**2
        picture = start + self.written * features + end
        times = _times(extent)
        step = self.processor.temporal_patch_size
        text = ""
        for t in range(0, len(times), step):
            pair = times[t : t + step]
            text += f"<{(pair[0] + pair[-1]) / 2:.1f} seconds>{picture}"
        return text

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> Qwen3Video:
        low, high = self.each
        low = low if min_pixels is None else min_pixels
        high = high if max_pixels is None else max_pixels
        return replace(self, each=(low, high))

    def _resized(self, frames: int, height: int, width: int) -> tuple[int, int]:
        size = self.processor.size
        step = self.processor.temporal_patch_size
        if frames < step:
            raise ValueError(f"a clip of {frames} frames: this model needs at least {step}")
        # the bounds of a row are for one frame, those of the processor for a whole clip
        counted = round(frames / step) * step
        low, high = self.each
        low = size["shortest_edge"] if low is None else low * counted
        high = size["longest_edge"] if high is None else high * counted
        side = _side(self.processor)
        if self.total is not None:
            high = max(min(high, self.total), int(low * 1.05))
        if self.fields.get("cap_pixels_per_frame"):
            most = (self.fields.get("max_video_tokens") or 768) * side**2
            high = max(min(most, high // frames), int(low * 1.05)) * frames
        return clip_resize(frames, height, width, step, side, low, high)


def _side(processor: Qwen2VLImageProcessorPil) -> int:
    """Return the side, in pixels, of the square that becomes one feature."""
    return processor.patch_size * processor.merge_size


def _resized(processor: Qwen2VLImageProcessorPil, height: int, width: int) -> tuple[int, int]:
    """Return the height and width at which ``processor`` reads a picture."""
    low, high = processor.size["shortest_edge"], processor.size["longest_edge"]
    return smart_resize(height, width, _side(processor), low, high)


def _times(extent: Extent) -> tuple[float, ...]:
    if len(extent.times) != extent.shape[0]:
        raise ValueError(
            f"a clip of {extent.shape[0]} frames whose times are not known: this model reads them"
        )
    return extent.times


def _limited(
    processor: Qwen2VLImageProcessorPil, min_pixels: int | None, max_pixels: int | None
) -> Qwen2VLImageProcessorPil:
    size = processor.size
    fields = processor.to_dict()
    fields["size"] = {
        "shortest_edge": size["shortest_edge"] if min_pixels is None else min_pixels,
        "longest_edge": size["longest_edge"] if max_pixels is None else max_pixels,
    }
    return type(processor).from_dict(fields)
