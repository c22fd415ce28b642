"""The frames of a clip that the processors of transformers select.

Each rule gives the indices of ``sample_frames`` of its family's video processor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch


class FrameRequest(Protocol):
    """The frames that a row or the settings ask for."""

    @property
    def fps(self) -> float | None:
        """Frames per second. ``None`` for all frames."""
        ...

    @property
    def nframes(self) -> int | None:
        """Exact number of frames. ``None`` for no such number."""
        ...

    @property
    def least(self) -> int:
        """Smallest number of frames."""
        ...

    @property
    def max_frames(self) -> int:
        """Largest number of frames."""
        ...


@dataclass(frozen=True, slots=True)
class EvenFrames:
    """Frames in equal steps from the first, as ``default_sample_indices_fn``.

    Attributes:
        nominal: Rate from which positions follow for an exact number of frames. They follow the
            requested rate otherwise (``Qwen2_5OmniProcessor``). None for the selected rate.
    """

    nominal: float | None = None

    def select(self, total: int, rate: float, request: FrameRequest) -> list[int]:
        """Return ascending indices of the selected frames.

        Args:
            total: Number of frames of the clip.
            rate: Frames of the clip per second.
            request: Frames that are asked for.

        Raises:
            ValueError: There are fewer frames than ``request.nframes``.
        """
        most = min(request.max_frames, total)
        if request.nframes is not None:
            count = self._whole(request.nframes)
            if count > total:
                problem = f"nframes = {request.nframes}, and the clip has {total} frames"
                raise ValueError(f"{problem}; set a smaller number")
            # a number in a row replaces the limit of the settings
            return self._spread(total, max(1, count))
        if request.fps is None:
            return list(range(total)) if total <= most else self._spread(total, most)
        return self._spread(total, self._count(total / rate * request.fps, request.least, most))

    def rate(self, total: int, rate: float, count: int, request: FrameRequest) -> float:
        """Return the frames per second from which the model computes positions.

        Args:
            total: Number of frames of the clip.
            rate: Frames of the clip per second.
            count: Number of selected frames.
            request: Frames that are asked for.
        """
        asked = request.fps if request.nframes is None else self.nominal
        if self.nominal is None or asked is None:
            return count / total * rate
        return asked

    def _whole(self, count: int) -> int:
        """Return the number of frames for a request of exactly ``count`` frames."""
        return count

    def _count(self, count: float, least: int, most: int) -> int:
        """Return the number of frames within the bounds."""
        return max(1, min(max(int(count), least), most))

    def _spread(self, total: int, count: int) -> list[int]:
        """Return ``count`` indices below ``total``."""
        return (np.arange(count) * total // count).tolist()


@dataclass(frozen=True, slots=True)
class PairedFrames(EvenFrames):
    """Frames in equal steps, in multiples of ``step``, as ``Qwen2VLVideoProcessor``.

    Attributes:
        step: Frames of a patch.
    """

    step: int = 2

    def _whole(self, count: int) -> int:
        return round(count / self.step) * self.step

    def _count(self, count: float, least: int, most: int) -> int:
        most = most // self.step * self.step
        whole = int(min(max(count, least), most)) // self.step * self.step
        # transformers has no rule for clips that are shorter than a patch
        return max(1, whole)

    def _spread(self, total: int, count: int) -> list[int]:
        # computed like transformers, since the rounding of float32 decides about ties
        indices = torch.arange(0, total, total / count).int()
        return indices[:count].tolist()


@dataclass(frozen=True, slots=True)
class FramesWithEnds(EvenFrames):
    """Frames in equal steps that include the last frame, as ``Qwen3VLVideoProcessor``."""

    def _spread(self, total: int, count: int) -> list[int]:
        return np.linspace(0, total - 1, count).round().astype(int).tolist()
