"""Sound of any file format to one channel ``[N]`` float32 at a model's rate. Raises ``ValueError`` with the reason."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lightrft.datasets.media.contents import Content, Samples, stream
from lightrft.utils.errors import DataError

_CROSSINGS, _BETA = 24, 9.0
"""Zero crossings of the resampling filter on each side, and the beta of its Kaiser window."""


@dataclass(frozen=True, slots=True)
class Hearing:
    """``rate``: samples a second that the model takes; another rate is resampled, or refused."""

    rate: int
    resample: bool
    max_seconds: float | None


def sound_length(content: Content, hearing: Hearing) -> int:
    """N, from the header where it is exact."""
    if isinstance(content, Path | bytes):
        info = _header(content)
        if info is not None:
            return _length(info.frames, info.samplerate, hearing)
    values, rate = _samples(content)
    return _length(len(values), rate, hearing)


def read_sound(content: Content, hearing: Hearing) -> np.ndarray:
    """The channels' mean, resampled to ``hearing.rate``."""
    values, rate = _samples(content)
    length = _length(len(values), rate, hearing)
    if not np.isfinite(values).all():
        raise ValueError("the sound holds values that are not finite")
    return resampled(values, rate, hearing.rate)[:length]


def resampled(values: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """``values [N]`` at ``rate`` to ``[ceil(N * wanted / rate)]`` float32 at ``wanted``, by a windowed-sinc polyphase filter."""
    up, down = wanted // math.gcd(rate, wanted), rate // math.gcd(rate, wanted)
    if up == down:
        return values.astype(np.float32)
    bank = _filters(up, down)
    reach = (bank.shape[1] - 1) // 2
    length = -(-len(values) * up // down)
    padded = np.pad(values.astype(np.float64), (reach, reach + down + 1))
    windows = np.lib.stride_tricks.sliding_window_view(padded, bank.shape[1])
    out = np.empty(length)
    for first in range(min(up, length)):  # outputs first, first + up, ... lie at the same place between two samples
        start, phase = divmod(first * down, up)
        count = -(-(length - first) // up)
        out[first::up] = windows[start::down][:count] @ bank[phase]
    return out.astype(np.float32)


@lru_cache(maxsize=16)
def _filters(up: int, down: int) -> np.ndarray:
    """``[up, taps]`` a low-pass filter for each place between two samples, each of sum 1."""
    cutoff = min(1.0, up / down)
    reach = math.ceil(_CROSSINGS / cutoff)
    taps = np.arange(-reach, reach + 1)[None, :] - np.arange(up)[:, None] / up
    window = np.i0(_BETA * np.sqrt(np.clip(1 - (taps / (reach + 1)) ** 2, 0, None))) / np.i0(_BETA)
    bank = cutoff * np.sinc(cutoff * taps) * window
    return bank / bank.sum(axis=1, keepdims=True)


def _length(samples: int, rate: int, hearing: Hearing) -> int:
    if samples < 1:
        raise ValueError("the sound is empty")
    if rate < 1:
        raise ValueError(f"the sound has a rate of {rate}")
    if rate != hearing.rate and not hearing.resample:
        raise ValueError(f"the sound has {rate} samples a second, the model takes {hearing.rate}; set data.media.resample: true")
    if hearing.max_seconds is not None and samples > hearing.max_seconds * rate:
        raise ValueError(f"the sound lasts {samples / rate:.1f} s, more than data.media.max_seconds = {hearing.max_seconds:g}")
    return -(-samples * hearing.rate // rate)


def _samples(content: Content) -> tuple[np.ndarray, int]:
    """``[N]`` in [-1, 1] and the rate."""
    if isinstance(content, Samples):
        return _mono(_scaled(content.values)), content.rate
    if not isinstance(content, Path | bytes):
        raise ValueError(f"{type(content).__name__} has no sampling rate; write {{'array': ..., 'sampling_rate': ...}}")
    library = _soundfile()
    try:
        values, rate = library.read(stream(content), dtype="float32", always_2d=True)
    except library.LibsndfileError as error:
        return _of_container(content, str(error))
    return values.mean(axis=1), int(rate)


def _header(content: Path | bytes) -> Any:
    """What the header says, None where it may not be exact."""
    library = _soundfile()
    try:
        info = library.info(stream(content))
    except library.LibsndfileError:
        return None
    return info if info.format in ("WAV", "WAVEX", "FLAC", "AIFF", "RF64", "W64", "AU", "CAF") else None


def _of_container(content: Path | bytes, problem: str) -> tuple[np.ndarray, int]:
    """Sound that only a video container's library reads, such as AAC."""
    try:
        import av
    except ImportError:
        raise ValueError(f"{problem} (with pip install 'lightrft[video]' more formats can be read)") from None
    try:
        with av.open(stream(content), "r") as container:
            if not container.streams.audio:
                raise ValueError("no sound in the file")
            source = container.streams.audio[0]
            # The channels stay: the library's own way from stereo to one is louder than their mean.
            convert = av.AudioResampler(format="fltp", rate=source.rate)
            frames = [f for frame in (*container.decode(source), None) for f in convert.resample(frame)]
            values = [f.to_ndarray().mean(axis=0) for f in frames]
            return (np.concatenate(values) if values else np.empty(0, np.float32)), int(source.rate)
    except av.FFmpegError as error:
        raise ValueError(f"the sound cannot be read: {problem}; {error.strerror}") from None


def _soundfile() -> Any:
    try:
        import soundfile
    except ImportError:
        raise DataError("reading sound needs soundfile; pip install 'lightrft[audio]'") from None
    return soundfile


def _scaled(values: np.ndarray) -> np.ndarray:
    if values.dtype == np.uint8:
        return (values.astype(np.float32) - 128) / 128
    if values.dtype.kind == "i" and values.dtype.itemsize <= 4:
        return values.astype(np.float32) / (1 << (8 * values.dtype.itemsize - 1))
    if values.dtype.kind != "f":
        raise ValueError(f"sound must be floating-point numbers in [-1, 1] or int16, not {values.dtype}")
    return values.astype(np.float32)


def _mono(values: np.ndarray) -> np.ndarray:
    if values.ndim == 1:
        return values
    if values.ndim != 2:
        raise ValueError(f"an array of shape {values.shape} is no sound; it must be [samples] or [channels, samples]")
    return values.mean(axis=int(np.argmin(values.shape)))
