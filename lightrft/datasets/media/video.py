"""Decoding of videos, animations and image lists to frames ``[T, H, W, 3]`` uint8.

Raises ``ValueError`` with the reason.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeGuard

import numpy as np
from PIL import Image

from lightrft.datasets.media.fetch import (
    Content,
    Frames,
    frame_count,
    head,
    held,
    picture_formats,
    stream,
    turn,
)
from lightrft.datasets.media.image import picture_size, read_picture, to_rgb
from lightrft.types import Extent
from lightrft.utils.atomic_files import human_bytes
from lightrft.utils.errors import DataError, install_extra

MOST_PACKETS = 4_000_000
"""Largest number of packets whose times are read: 18 hours at 60 per second."""
PASSED_BY = 8
"""Largest total size of all frames of an animation, as a multiple of ``VideoSettings.most_bytes``.

All frames count, because each must be decoded to reach the next one.
"""
CONTAINERS = (
    *("mov", "matroska", "avi", "flv", "mpegts", "mpeg", "asf", "ogg", "mp3", "aac", "wav"),
    *("flac", "aiff", "au", "caf", "ac3", "eac3", "amr", "h264", "hevc", "m4v"),
    *("mpegvideo", "mjpeg", "ivf", "obu", "mxf", "rm", "w64", "wv", "ape", "tta", "dts"),
    "gif",
)
"""Supported container formats.

Others are refused, such as playlists, which open further files and addresses.
"""


class FrameRule(Protocol):
    """The rule by which the processor of a model selects frames."""

    def select(self, total: int, rate: float, request: VideoSettings) -> list[int]:
        """Return ascending indices of the selected frames.

        Args:
            total: number of frames of the clip.
            rate: frames of the clip per second.
            request: the frames that are asked for.

        Raises:
            ValueError: the clip has too few frames for the request.
        """
        ...

    def rate(self, total: int, rate: float, count: int, request: VideoSettings) -> float:
        """Return the frames per second from which the model computes positions.

        Args:
            total: number of frames of the clip.
            rate: frames of the clip per second.
            count: number of selected frames.
            request: the frames that are asked for.
        """
        ...


@dataclass(frozen=True, slots=True)
class VideoSettings:
    """Settings for selecting frames.

    Frames are spread evenly over the whole video.

    Args:
        fps: frames per second. None spreads ``max_frames`` frames.
        max_frames: largest number of frames.
        max_seconds: longest duration in seconds. None means no limit.
        max_source_pixels: largest number of pixels of a frame.
        least: smallest number of frames, if the video has so many.
        most_bytes: largest memory of the decoded frames, in bytes.
        nframes: exact number of frames, in place of ``fps``. None for no such number.
        start: first second of the clip to use. None is its start.
        end: last second of the clip to use. None is its end.
        rule: selects the frames as the model's processor does. None takes the frame that is shown
            at each multiple of ``1 / fps`` seconds.
    """

    fps: float | None
    max_frames: int
    max_seconds: float | None
    max_source_pixels: int
    least: int = 1
    most_bytes: float = math.inf
    nframes: int | None = None
    start: float | None = None
    end: float | None = None
    rule: FrameRule | None = None

    def check(self, frames: int, height: int, width: int, allowance: int = 1) -> None:
        """Raise ``ValueError`` for frames that are too large, each or in total.

        Args:
            frames: number of frames.
            height: height in pixels.
            width: width in pixels.
            allowance: factor on ``most_bytes``.
        """
        if height * width > self.max_source_pixels:
            limit = f"data.media.max_source_pixels = {self.max_source_pixels}"
            raise ValueError(f"frames of {width} x {height} pixels, more than {limit}")
        size = frames * height * width * 3
        if size > allowance * self.most_bytes:
            taken = f"{frames} frames of {width} x {height} pixels take {human_bytes(size)}"
            times = f"{allowance} times " if allowance > 1 else ""
            limit = f"data.media.max_decoded_mb = {self.most_bytes / 2**20:g}"
            raise ValueError(f"{taken}, more than {times}{limit}")

    def chosen(
        self, times: Sequence[float], rate: float | None
    ) -> tuple[list[int], tuple[float, ...], float | None]:
        """Return the positions of the selected frames, their times, and the rate for the model.

        Args:
            times: time of each frame in seconds, ascending.
            rate: mean number of frames per second. None if only ``times`` are known.

        Raises:
            ValueError: the video has no frames from ``start`` to ``end``, too few for ``nframes``,
                or lasts longer than ``max_seconds``.
        """
        first, stop = self._cut(times)
        times = times[first:stop]
        if self.rule is None:
            taken = self.choose(times)
            return [first + k for k in taken], tuple(times[k] for k in taken), None
        self._check_length(times)
        last = times[-1] - times[0]
        if rate is None:
            rate = (len(times) - 1) / last if last else self.fps or 1.0
        picked = self.rule.select(len(times), rate, self)
        since_start = np.asarray(times) - times[0]
        if np.abs(since_start - np.arange(len(times)) / rate).max() < 0.5 / rate:
            # exact times, since a file rounds them to its time base
            shown = [(first + k) / rate for k in picked]
        else:
            # a rate that changes: the frame that is shown at the time of the regular frame
            moments = np.asarray(picked) / rate + 1e-6
            picked = np.unique(np.searchsorted(since_start, moments, side="right") - 1).tolist()
            shown = [times[k] for k in picked]
        told = self.rule.rate(len(times), rate, len(picked), self)
        return [first + k for k in picked], tuple(shown), told

    def _cut(self, times: Sequence[float]) -> tuple[int, int]:
        """Return the first frame from ``start`` on, and the frame after the last up to ``end``."""
        if self.start is None and self.end is None:
            return 0, len(times)
        since_start = np.asarray(times) - (times[0] if times else 0.0)
        first = 0 if self.start is None else int(np.searchsorted(since_start, self.start - 1e-6))
        stop = len(times)
        if self.end is not None:
            stop = int(np.searchsorted(since_start, self.end + 1e-6, side="right"))
        if first >= stop:
            last = since_start[-1] if times else 0.0
            ends = f"video_start = {self.start or 0:g} and video_end = {self.end or last:g}"
            raise ValueError(f"no frame is between {ends}; the last frame is at {last:.3g} s")
        return first, stop

    def _check_length(self, times: Sequence[float]) -> None:
        """Raise ``ValueError`` for no ``times``, or more than ``max_seconds`` of them."""
        if not times:
            raise ValueError("the video has no frames")
        last = times[-1] - times[0]
        if self.max_seconds is not None and last > self.max_seconds:
            raise ValueError(
                f"the video lasts {last:.1f} s, more than data.media.max_seconds = "
                f"{self.max_seconds:g}"
            )

    def choose(self, times: Sequence[float]) -> list[int]:
        """Return the positions in ``times`` of the selected frames.

        ``times`` are ascending seconds.

        Raises ``ValueError`` for a video without frames or longer than ``max_seconds``.
        """
        self._check_length(times)
        last = times[-1] - times[0]
        if self.fps is None:
            return self.spread(len(times))
        # times are multiples of a time base, so sums of them miss a frame by a rounding error
        count = int(last * self.fps + 1e-6) + 1
        if count <= self.max_frames:
            wanted = np.arange(count) / self.fps
        else:
            wanted = np.linspace(0, last, self.max_frames)
        since_start = np.asarray(times) - times[0]
        # the last frame at or before each wanted time: the frame that a player shows then
        found = np.unique(np.searchsorted(since_start, wanted + 1e-6, side="right") - 1)
        if len(found) < self.least:
            return self.spread(len(times), self.least)
        return found.tolist()

    def spread(self, count: int, most: int = sys.maxsize) -> list[int]:
        """Return evenly spread positions below ``count``.

        There are at most ``max_frames`` of them, and at most ``most``.
        """
        taken = min(count, self.max_frames, most)
        return np.unique(np.linspace(0, count - 1, taken).round().astype(int)).tolist()


def clip_extent(content: Content, viewing: VideoSettings) -> Extent:
    """Return the extent that ``read_clip`` returns, without decoding every frame."""
    if isinstance(content, np.ndarray | Frames):
        return _evenly(_pictures(content), viewing)[1]
    if _is_animation(content):
        with _animation(content) as picture:
            return _extent_of(picture, viewing)[1]
    library = _library()
    with _container(library, content) as container:
        return _plan(library, container, viewing)[1]


def read_clip(content: Content, viewing: VideoSettings) -> tuple[np.ndarray, Extent]:
    """Return the selected frames ``[T, H, W, 3]`` and their extent, with their times."""
    if isinstance(content, np.ndarray | Frames):
        pictures = _pictures(content)
        chosen, extent = _evenly(pictures, viewing)
        frames = (read_picture(pictures[k], viewing.max_source_pixels) for k in chosen)
        return _filled(extent.shape, enumerate(frames)), extent
    if _is_animation(content):
        with _animation(content) as picture:
            chosen, extent = _extent_of(picture, viewing)
            frames = (_shown(picture, k) for k in chosen)
            return _filled(extent.shape, enumerate(frames)), extent
    return _decoded(content, viewing)


def _decoded(content: Content, viewing: VideoSettings) -> tuple[np.ndarray, Extent]:
    library = _library()
    with _container(library, content) as container:
        places, extent = _plan(library, container, viewing)
        # ``_plan`` has decoded the first frame.
        container.seek(0, backward=True, any_frame=False)
        try:
            return _seen(container.decode(container.streams.video[0]), places, extent.shape), extent
        except library.FFmpegError as error:
            raise ValueError(f"the video is damaged: {error.strerror}") from None


def _pictures(content: np.ndarray | Frames) -> Sequence[Content]:
    """Return the frames of a list or an array, without a copy."""
    if isinstance(content, Frames):
        return content.pictures
    if content.ndim != 4:
        raise ValueError(
            f"an array of shape {content.shape} is no video; it must be [frames, height, width, 3]"
        )
    return list(content)


def _evenly(pictures: Sequence[Content], viewing: VideoSettings) -> tuple[list[int], Extent]:
    """Return the selected frames of a list, and their extent with times at ``viewing.fps``."""
    if not pictures:
        raise ValueError("the video has no frames")
    rate = viewing.fps or 1.0
    chosen = viewing.spread(len(pictures))
    times, told = tuple(k / rate for k in chosen), None
    if viewing.rule is not None:
        every = replace(viewing, fps=None)
        chosen, times, told = every.chosen([k / rate for k in range(len(pictures))], rate)
    # from the headers, so that no frame is decoded before all are known to fit together
    sizes = {picture_size(pictures[k], viewing.max_source_pixels) for k in chosen}
    if len(sizes) > 1:
        listed = sorted(f"{width} x {height}" for height, width, _ in sizes)
        raise ValueError(f"frames of different sizes: {', '.join(listed)}")
    ((height, width, channels),) = sizes
    viewing.check(len(chosen), height, width)
    return chosen, Extent((len(chosen), height, width, channels), times, told)


def _filled(shape: tuple[int, ...], frames: Iterable[tuple[int, np.ndarray]]) -> np.ndarray:
    """Return an array of ``shape`` filled with the numbered ``frames``.

    ``frames`` may be a generator, so that only the array has all frames in memory.
    """
    out = np.empty(shape, np.uint8)
    for at, frame in frames:
        if frame.shape != shape[1:]:
            raise ValueError(
                f"frames of different sizes: {frame.shape[1]} x {frame.shape[0]} after "
                f"{shape[2]} x {shape[1]}"
            )
        out[at] = frame
    return out


def _seen(frames: Iterable[Any], places: Sequence[int], shape: tuple[int, ...]) -> np.ndarray:
    """Return the visible frame at each of ``places`` as an array of ``shape``.

    ``places`` are ascending. A packet may have no frame: some codecs send data that only later
    frames refer to. A stream may also be cut before the data that its first frames refer to. Such a
    place shows the last frame before it, or else the first frame.

    Raises ``ValueError`` if more than half of the places have no frame.
    """
    own: set[int] = set()
    before: dict[int, Any] = {}

    def shown() -> Generator[tuple[int, np.ndarray]]:
        first = None
        for frame in frames:
            if frame.pts is None:
                continue
            if max(frame.height, frame.width) > max(shape[1:3]):
                sizes = f"{frame.width} x {frame.height} after {shape[2]} x {shape[1]}"
                raise ValueError(f"frames of different sizes: {sizes}")
            first = first or frame
            at = bisect_left(places, frame.pts)
            if at < len(places) and places[at] == frame.pts:
                own.add(at)
                yield at, _upright(frame)
            elif at not in before or before[at].pts < frame.pts:
                before[at] = frame
            if len(own) == len(places):
                break
        if 2 * len(own) < len(places):
            lost = f"{len(places) - len(own)} of {len(places)} frames"
            raise ValueError(f"the video is damaged: {lost} cannot be decoded")
        for at in sorted({*before, 0} & set(range(len(places))) - own):
            yield at, _upright(before.get(at, first))

    out = _filled(shape, shown())
    for at in range(1, len(places)):
        if at not in own and at not in before:
            out[at] = out[at - 1]
    return out


def _plan(library: ModuleType, container: Any, viewing: VideoSettings) -> tuple[list[int], Extent]:
    """Return the time stamps of the selected frames, and their extent.

    Reads the packets and decodes the first frame.
    """
    if not container.streams.video:
        raise ValueError("no video in the file")
    source = container.streams.video[0]
    codec = source.codec_context
    # before the first frame is decoded, which would allocate its memory
    viewing.check(1, codec.height, codec.width)
    # the header may understate the size, so the decoder has the limit, too
    codec.options = {**codec.options, "max_pixels": str(viewing.max_source_pixels)}
    try:
        packets = islice(container.demux(source), MOST_PACKETS)
        # Packets come in the order of decoding, which differs from that of display.
        visible = [p.pts for p in packets if not p.is_discard]
        stamps = sorted(stamp for stamp in visible if stamp is not None)
        # demuxing has moved the container to its end
        container.seek(0, backward=True, any_frame=False)
        first = next(iter(container.decode(source)), None)
    except library.FFmpegError as error:
        raise ValueError(f"the video is damaged: {error.strerror}") from None
    if first is None or not stamps:
        raise ValueError("the video has no frames")
    if len(stamps) >= MOST_PACKETS - 1:
        raise ValueError(f"the video has {MOST_PACKETS} frames or more")
    times = [float((s - stamps[0]) * source.time_base) for s in stamps]
    mean = source.average_rate
    chosen, shown, told = viewing.chosen(times, float(mean) if mean else None)
    height, width = _upright(first).shape[:2]
    viewing.check(len(chosen), height, width)
    return [stamps[k] for k in chosen], Extent((len(chosen), height, width, 3), shown, told)


def _upright(frame: Any) -> np.ndarray:
    turns = round(frame.rotation / 90) % 4
    return np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), k=turns))


def _is_animation(content: Content) -> TypeGuard[Path | bytes | Image.Image]:
    if isinstance(content, Image.Image):
        return True
    if not isinstance(content, Path | bytes):
        return False
    start = head(content)
    if start.startswith((b"GIF8", b"\x89PNG\r\n\x1a\n")):
        return True
    return start[:4] == b"RIFF" and start[8:12] == b"WEBP"


@contextmanager
def _animation(content: Path | bytes | Image.Image) -> Generator[Image.Image, None, None]:
    """Yield the opened animation. An image in memory returns to its current frame afterwards."""
    with held(content):
        picture, at = _leafed(content)
        try:
            yield picture
        finally:
            if at is None:
                picture.close()
            else:
                turn(picture, at)


def _leafed(content: Path | bytes | Image.Image) -> tuple[Image.Image, int | None]:
    """Return the animation at its first frame, and its original frame if the caller owns it."""
    try:
        if not isinstance(content, Image.Image):
            return Image.open(stream(content), formats=picture_formats()), None
        if frame_count(content) == 1:
            return content.copy(), None
        at = content.tell()
        turn(content, 0)
        return content, at
    except Exception as error:  # plugins raise SyntaxError, struct.error and more
        raise ValueError(f"the animation cannot be read: {error}") from error


def _extent_of(picture: Image.Image, viewing: VideoSettings) -> tuple[list[int], Extent]:
    times, now = [], 0.0
    count = frame_count(picture)
    for k in range(count):
        with _damage(k):
            picture.seek(k)
        # a GIF may grow from frame to frame
        height, width, channels = picture_size(picture, viewing.max_source_pixels)
        viewing.check(count, height, width, PASSED_BY)
        with _damage(k):
            picture.load()  # Pillow reads the duration of a WebP frame only on loading it
        times.append(now)
        # browsers show a frame without a duration for 100 ms
        now += (picture.info.get("duration") or 100) / 1000
    chosen, shown, told = viewing.chosen(times, count / now)
    viewing.check(len(chosen), height, width)
    return chosen, Extent((len(chosen), height, width, channels), shown, told)


def _shown(picture: Image.Image, k: int) -> np.ndarray:
    with _damage(k):
        picture.seek(k)
        return np.asarray(to_rgb(picture))


@contextmanager
def _damage(k: int) -> Generator[None]:
    try:
        yield
    except Exception as error:  # plugins raise SyntaxError, struct.error and more
        raise ValueError(f"the animation is damaged at frame {k + 1}: {error}") from error


def _container(library: ModuleType, content: Content) -> Any:
    if not isinstance(content, Path | bytes):
        raise ValueError(f"{type(content).__name__} is no video")
    try:
        return opened(library, content)
    except library.FFmpegError as error:
        raise ValueError(f"not a video of any known format: {error.strerror}") from None


def opened(library: ModuleType, content: Path | bytes) -> Any:
    """Open a container of one of ``CONTAINERS``. It cannot open other files or addresses."""
    return library.open(
        stream(content),
        "r",
        container_options={"format_whitelist": ",".join(CONTAINERS), "protocol_whitelist": "file"},
    )


def _library() -> ModuleType:
    try:
        import av
    except ImportError:
        raise DataError(f"reading video needs av: {install_extra('video')}") from None
    return av
